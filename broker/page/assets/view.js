/**
 * View model of the overview: from a status document to texts, tones and shares for the templates. Pure.
 * A tone is `good`, `busy`, `bad` or `idle`; a share is between 0 and 1.
 */

import { bytes, clock, count, listed, percent, plural, rate, seconds } from "./formats.js";
import { kind, pauseOf, pauses } from "./pauses.js";
import { phaseOf, ratio, unique, waitOf } from "./table.js";

/** @returns {{verdict, about, models, events, batches}} each list with a `key` in every item */
export function view(status) {
  return {
    verdict: verdict(status),
    about: [`${status.gateway.version} · up ${seconds(status.gateway.uptime_s)}`, ...durable(status)].join(" · "),
    models: status.models.map((model) => modelCard(status, model)),
    events: unique(workerEvents(status.recent.workers)),
    batches: batchLines(status.batches),
  };
}

/** What outlives its client: responses that wait in the background, and a journal that cannot be written. */
function durable({ durable: told }) {
  const said = [];
  if (told?.queued) said.push(`${plural(told.queued, "response")} queued in the background`);
  if (told?.journal?.problem) said.push("the journal cannot be written");
  return said;
}

// --- overall state ---

function verdict(status) {
  const away = status.models.filter((model) => pauseOf(status, model.model));
  if (status.gateway.stopping) return { tone: "bad", text: "The gateway is shutting down" };
  if (away.length) return { tone: "bad", text: lost(away) };
  const failed = status.models.filter((model) => model.state === "failed");
  if (failed.length) return { tone: "bad", text: `Cannot load ${names(failed)}` };
  const serving = new Set(status.workers.filter(({ state }) => state === "ready").map(({ model }) => model)).size;
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
  const active = status.requests.length;
  return `Serving ${plural(serving, "model")}, ${active ? plural(active, "active request") : "no active requests"}`;
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
    wait: !pause && model.waiting ? `${plural(model.waiting, "request waits", "requests wait")} · ${waitOf(status, model.model)[0]}` : "",
    trouble: pause ? listed(pause.how, model.waiting && `${plural(model.waiting, "request waits", "requests wait")} for the next worker`)
      : trouble(status, model),
    canLoad: Boolean(model.on_demand) && model.state === "unloaded" && !isTooLarge(status, model),
    canUnload: Boolean(model.on_demand) && !model.pinned && ["loaded", "loading"].includes(model.state),
    canPin: Boolean(model.on_demand) && !model.pinned && ["loaded", "loading"].includes(model.state),
    canUnpin: Boolean(model.pinned),
    workers: workers.map(workerLine),
  };
}

/** Return why a model cannot be loaded, or is not likely to be. */
function trouble(status, model) {
  if (model.failure) return model.failure;
  if (model.state === "failed") return model.last_end || "It cannot be loaded. The server's log has the reason.";
  return isTooLarge(status, model) ? `It is larger than the memory budget of ${bytes(status.gateway.memory_budget)}.` : "";
}

const isTooLarge = ({ gateway: { memory_budget: budget } }, { weight_bytes: size }) => Boolean(budget) && size > budget;

const onDisk = ({ weight_bytes: size, on_demand: isOnDemand }) =>
  size ? `${bytes(size)} on disk` : isOnDemand && size === null ? "not on this machine yet" : "";

/** Name a model's adapters: "adapters sql, chat (leaving)". */
const adapters = ({ adapters: known = [] }) => known.length
  ? `${known.length === 1 ? "adapter" : "adapters"} ${known.map(({ name, leaving }) => leaving ? `${name} (leaving)` : name).join(", ")}` : "";

function detail(model) {
  const restarts = model.restarts ? plural(model.restarts, "restart") : "";
  return listed(
    model.aliases.length ? `also ${model.aliases.join(", ")}` : "",
    restarts && (model.last_end_reason ? `${restarts}, last: ${endWords(model.last_end_reason)}` : restarts),
    onDisk(model),
    adapters(model),
    model.answered_tokens ? `${plural(model.answered_tokens, "token")} generated` : "",
  );
}

/** Describe how a process ended, by its code: `sigkill`, `exit_1`, `not_started`. */
const endWords = (reason) => reason.startsWith("sig") ? reason.toUpperCase() : reason.replaceAll("_", " ");

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
  return `process ${bytes(told.footprint_bytes || told.resident_bytes)}${told.device_bytes ? `, device ${bytes(told.device_bytes)}` : ""}`;
}

function reuse(prefix) {
  if (!prefix || !prefix.lookups) return "";
  return `${percent(prefix.token_hit_rate)} of prompt tokens from cache`;
}

// --- an awaited answer ---

const GONE = "the worker was lost; the next one continues this";

/** Return the status line of an awaited answer, by the id of its stream; the id is empty before the first chunk. */
export function stateOf(status, id, model) {
  const request = status?.requests.find((each) => each.id === id);
  if (!request && id) return "";
  const [words, tone] = request ? phaseOf(status, request) : status ? waitOf(status, model) : ["queued", "busy"];
  if (tone === "bad") return GONE;
  if (!request) return words === "queued" ? "sent" : words;
  const { answered, prefilled, prompt_tokens: prompt, tokens_per_s: speed } = request;
  const progress = prompt && request.phase !== "queued" ? `prompt ${count(prefilled)} of ${count(prompt)}` : "";
  return listed(words, answered ? plural(answered, "token") : progress, speed ? `${rate(speed)}/s` : "");
}

// --- worker events ---

const EVENT_TONES = { ready: "good", connected: "busy", leaves: "idle", lost: "bad" };
const EVENT_WORDS = { ready: "ready", connected: "connected", leaves: "stopped" };

function workerEvents(events) {
  const ended = pauses(events).filter((pause) => pause.to !== null);
  return events.map((event) => {
    const pause = kind(event) === "ready" && ended.find((p) => p.model === event.model && p.to === event.time);
    const what = EVENT_WORDS[kind(event)] ?? `lost: ${event.what}`;
    return {
      key: `${event.incarnation} ${event.what}`, tone: EVENT_TONES[kind(event)], clock: clock(event.time),
      what: `${event.model} ${what}`, more: pause ? `after ${seconds(pause.to - pause.from)}` : `pid ${event.pid}`,
    };
  });
}

// --- batches ---

/** Return a line for each batch that is not over, and one for why they wait. */
function batchLines(batches) {
  if (!batches) return [];
  const waits = batches.problem ? [{ key: "problem", tone: "bad", clock: "", what: "batches wait", more: batches.problem }] : [];
  return [...waits, ...batches.unfinished.map(({ id, status, endpoint, total, succeeded, errored, created_at: created }) => ({
    key: id, tone: status === "in_progress" ? "good" : "busy", clock: clock(created),
    what: `${id} ${status.replaceAll("_", " ")}`,
    more: listed(total && `${count(succeeded + errored)} of ${plural(total, "request")}`, errored && `${count(errored)} failed`, endpoint),
  }))];
}
