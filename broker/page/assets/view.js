/**
 * View model of the overview: from a status document to texts, tones and shares for the templates. Pure.
 * A tone is `good`, `busy`, `bad` or `idle`; a share is between 0 and 1.
 */

import { bytes, clock, count, listed, percent, plural, rate, seconds } from "./formats.js";
import { kind, pauseOf, pauses } from "./pauses.js";

/** @returns {{verdict, about, models, requests, events, errors, ends}} each list with a `key` in every item */
export function view(status) {
  return {
    verdict: verdict(status),
    about: `${status.gateway.version} · up ${seconds(status.gateway.uptime_s)}`,
    models: status.models.map((model) => modelCard(status, model)),
    requests: status.requests.map(requestLine),
    events: unique(withPauses(status.recent.workers)),
    errors: unique(errors(status.recent)),
    ends: unique(status.recent.ends.map(endLine)),
  };
}

/** Make keys unique: the same thing may have two events in the same millisecond. */
function unique(lines) {
  const seen = new Map();
  return lines.toReversed().map((line) => {
    seen.set(line.key, (seen.get(line.key) ?? 0) + 1);
    return { ...line, key: `${line.key} ${seen.get(line.key)}` };
  }).toReversed();
}

// --- overall state ---

function verdict(status) {
  const away = status.models.filter((model) => pauseOf(status, model.model));
  if (status.gateway.stopping) return { tone: "bad", text: "The gateway is shutting down" };
  if (away.length) return { tone: "bad", text: lost(away) };
  const failed = status.models.filter((model) => model.state === "failed");
  if (failed.length) return { tone: "bad", text: `Cannot load ${names(failed)}` };
  const serving = status.workers.filter((worker) => worker.state === "ready").length;
  if (serving) return { tone: "good", text: serves(status, serving) };
  const loading = status.workers.some((worker) => worker.state === "loading");
  return loading ? { tone: "busy", text: "Loading a model" } : { tone: "idle", text: "No worker is connected" };
}

function lost(models) {
  const waiting = models.reduce((sum, model) => sum + model.waiting, 0);
  const pause = waiting ? `; ${plural(waiting, "request waits", "requests wait")} for the next one` : "";
  return `Lost the worker of ${names(models)}${pause}`;
}

const names = (models) => models.map((model) => model.model).join(", ");

function serves(status, serving) {
  const air = status.requests.length;
  return `Serving ${plural(serving, "model")}, ${air ? plural(air, "request") : "no requests"} in flight`;
}

// --- models and their workers ---

const TONES = { loaded: "good", loading: "busy", unloaded: "idle", failed: "bad" };

function modelCard(status, model) {
  const workers = status.workers.filter((worker) => worker.model === model.model);
  const pause = pauseOf(status, model.model);
  return {
    key: model.model,
    name: model.model,
    tone: pause ? "bad" : TONES[model.state] ?? "idle",
    state: pause ? `worker lost, ${seconds(status.time - pause.from)} ago` : model.state,
    detail: detail(model),
    trouble: pause ? listed(pause.how, model.waiting && `${plural(model.waiting, "request waits", "requests wait")} for the next worker`) : "",
    workers: workers.map(workerLine),
  };
}

function detail(model) {
  const restarts = model.restarts ? plural(model.restarts, "restart") : "";
  return listed(
    model.aliases.length ? `also ${model.aliases.join(", ")}` : "",
    restarts && (model.last_end_reason ? `${restarts}, last: ${endWords(model.last_end_reason)}` : restarts),
    model.answered_tokens ? `${plural(model.answered_tokens, "token")} generated` : "",
  );
}

/** Describe how a process ended, by its code: `sigkill`, `exit_1`, `not_started`. */
const endWords = (reason) => reason.startsWith("sig") ? reason.toUpperCase() : reason.replaceAll("_", " ");

const ratio = (part, whole) => (whole ? Math.min(1, part / whole) : 0);

function workerLine(worker) {
  const prefix = worker.prefix ?? {};
  return {
    key: worker.incarnation,
    line: listed(
      worker.state, `pid ${worker.pid}`, `up ${seconds(worker.uptime_s ?? worker.connected_s)}`,
      worker.context_length ? `context ${count(worker.context_length)}` : "",
    ),
    loading: worker.loading !== null && worker.loading.total > 0,
    ...(worker.loading ? loaded(worker.loading) : {}),
    occupied: Boolean(worker.running_max),
    occupancy: ratio(worker.running, worker.running_max),
    rows: `${worker.running} of ${worker.running_max}${worker.waiting ? `, ${worker.waiting} waiting` : ""}`,
    ...tier("cache", worker.cache_bytes, worker.cache_bytes_max),
    ...tier("ram", prefix.ram_bytes, prefix.ram_limit),
    ...tier("disk", prefix.disk_bytes, prefix.disk_limit),
    ...tier("images", worker.images?.bytes, worker.images?.bytes_max),
    memory: listed(memory(worker.memory), reuse(worker.prefix)),
  };
}

const loaded = ({ done, total }) => ({
  loaded: ratio(done, total), loadedText: `${bytes(done)} of ${bytes(total)}`,
});

/** Return the usage of one kind of memory as text and as a share; empty text if it has no limit. */
function tier(name, used, limit) {
  return { [name]: limit ? `${bytes(used)} of ${bytes(limit)}` : "", [`${name}Share`]: ratio(used, limit) };
}

function memory(told) {
  if (!told) return "";
  return `process ${bytes(told.resident_bytes)}${told.device_bytes ? `, device ${bytes(told.device_bytes)}` : ""}`;
}

function reuse(prefix) {
  if (!prefix || !prefix.lookups) return "";
  return `${percent(prefix.token_hit_rate)} of prompt tokens from cache`;
}

// --- requests in flight ---

const PHASES = {
  queued: ["waiting for a worker", "bad"], preparing: ["preparing", "busy"], waiting: ["waiting", "busy"],
  prefilled: ["waiting for a row", "busy"], prefill: ["prefill", "busy"], decode: ["decode", "good"],
};

export function requestLine(request) {
  const [phase, tone] = PHASES[request.phase] ?? [request.phase, "idle"];
  return {
    key: request.id,
    id: request.id,
    model: request.model,
    tone,
    phase,
    reading: request.phase === "prefill",
    share: ratio(request.prefilled, request.prompt_tokens),
    tokens: listed(request.answered ? plural(request.answered, "token") : progress(request)),
    speed: request.tokens_per_s ? `${rate(request.tokens_per_s)}/s` : "",
    first: request.time_to_first_token_s === null ? "" : `first ${seconds(request.time_to_first_token_s)}`,
    seconds: seconds(request.seconds),
    notes: notes(request),
  };
}

const progress = ({ prefilled, prompt_tokens: prompt }) => (prompt ? `prompt ${count(prefilled)} of ${count(prompt)}` : "");

function notes(request) {
  const { reuse: reused } = request;
  return listed(
    reused?.tokens ? `${count(reused.tokens)} of ${count(request.prompt_tokens)} prompt tokens from ${reused.tier || "cache"}` : "",
    request.resumes ? `resumed ${request.resumes === 1 ? "once" : `${request.resumes} times`}` : "",
    request.preemptions ? `preempted ${request.preemptions === 1 ? "once" : `${request.preemptions} times`}` : "",
  );
}

const GONE = "the worker was lost; the next one continues this";

/** Return the status line of an awaited answer, by the id of its stream; the id is empty before the first chunk. */
export function stateOf(status, id, model) {
  const request = status?.requests.find((each) => each.id === id);
  if (!request && id) return "";
  if (!request) return status && pauseOf(status, model) ? GONE : "sent";
  if (request.phase === "queued") return GONE;
  const { phase, tokens, speed } = requestLine(request);
  return listed(phase, tokens, speed);
}

// --- recent events ---

const EVENT_TONES = { ready: "good", connected: "busy", leaves: "idle", lost: "bad" };

function withPauses(events) {
  const ended = pauses(events).filter((pause) => pause.to !== null);
  return events.map((event) => {
    const pause = kind(event) === "ready" && ended.find((p) => p.model === event.model && p.to === event.time);
    const what = kind(event) === "lost" ? `lost: ${event.what}` : event.what;
    return {
      key: `${event.incarnation} ${event.what}`, tone: EVENT_TONES[kind(event)], clock: clock(event.time),
      what: `${event.model} ${what}`, more: pause ? `after ${seconds(pause.to - pause.from)}` : `pid ${event.pid}`,
    };
  });
}

const TWICE_S = 0.1;

function errors({ failures, refusals }) {
  const failed = failures.map((end) => ({ ...endLine(end), time: end.time, what: `${end.code} · ${end.model}` }));
  // A request that failed before its response began is in both lists.
  const twice = (refusal) => failures.some((end) => end.code === refusal.code && Math.abs(end.time - refusal.time) < TWICE_S);
  const refused = refusals.filter((refusal) => !twice(refusal)).map((refusal) => ({
    key: refusal.request_id, time: refusal.time, tone: refusal.status < 500 ? "busy" : "bad",
    clock: clock(refusal.time), what: `${refusal.status} ${refusal.code}`, more: `${refusal.method} ${refusal.path}`,
  }));
  return [...failed, ...refused].sort((one, other) => other.time - one.time);
}

const FINE = new Set(["stop", "length", "tool_calls"]);

function endLine(end) {
  const tone = FINE.has(end.code) ? "good" : end.code === "client_left" ? "idle" : "bad";
  return {
    key: end.id, tone, clock: clock(end.time), what: listed(end.model, end.task === "generate" ? "" : end.task, end.code.replaceAll("_", " ")),
    more: listed(
      end.answered ? plural(end.answered, "token") : plural(end.prompt_tokens, "prompt token"),
      seconds(end.seconds),
      end.cached_tokens ? `${percent(ratio(end.cached_tokens, end.prompt_tokens))} cached` : "",
      end.resumes ? plural(end.resumes, "resume") : "",
    ),
  };
}
