/**
 * Rows of the table of requests: those in flight, finished, failed and refused, as one list. Pure.
 * A row's `group` is `active`, `finished` or `failed`; its `phases` are those of its waterfall.
 */

import { clock, count, listed, percent, plural, rate, seconds } from "./formats.js";
import { pauseOf } from "./pauses.js";

/** Return all rows, the newest first. */
export function rows(status) {
  const { ends, failures, refusals } = status.recent;
  const known = new Set(ends.map((end) => end.id));
  const ended = [...ends, ...failures.filter((end) => !known.has(end.id))];
  const captured = new Set(status.gateway.captured ?? []);
  const found = [
    ...status.requests.map((request) => activeRow(status, request)),
    ...ended.map(endedRow),
    ...unique(refusals.filter((refusal) => !isTwice(refusal, failures)).map(refusedRow)),
  ];
  return merged(found.sort((one, other) => one.time - other.time)).map((each) => ({ ...each, captured: captured.has(each.id) })).reverse();
}

/** Merge refusals in succession that differ only in their time, as of a client that retries. `found`: the oldest first. */
function merged(found) {
  const kept = [];
  for (const each of found) {
    const before = kept.at(-1);
    if (!each.path || before?.path !== each.path || before.code !== each.code) {
      kept.push(each);
      continue;
    }
    const times = (before.times ?? 1) + 1;
    const since = before.since ?? before.clock;
    kept[kept.length - 1] = {
      ...each, key: before.key, times, since, status: `${each.status} × ${times}`, facts: [`${times} times since ${since}`],
    };
  }
  return kept;
}

/** Return the rows that a filter `{group, model, text}` leaves; an empty value leaves all. */
export function filtered(all, { group, model, text }) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return all.filter((row) => (!group || row.group === group) && (!model || row.model === model)
    && words.every((word) => row.text.includes(word)));
}

/** Number the items of a list, the newest first, that have the same key: clients choose the ids of refusals. */
export function unique(items) {
  const seen = new Map();
  return items.toReversed().map((item) => {
    seen.set(item.key, (seen.get(item.key) ?? 0) + 1);
    return { ...item, key: `${item.key} ${seen.get(item.key)}` };
  }).toReversed();
}

const TWICE_S = 0.1;

/** Return whether a refusal is also a failure: of a request that failed before its response began. */
const isTwice = (refusal, failures) =>
  failures.some((end) => end.code === refusal.code && Math.abs(end.time - refusal.time) < TWICE_S);

// --- rows ---

function row({ id, time, model, key = "", more = "", ...values }) {
  const text = [id, key, model, values.status, more].join(" ").toLowerCase();
  return {
    id, key: id, time, clock: clock(time), model, owner: key, text, path: "", first: "", tokens: "", speed: "", cached: "",
    duration: "", phases: [], seconds: 0, facts: [], ...values,
  };
}

function activeRow(status, request) {
  const [words, tone] = phaseOf(status, request);
  const done = ratio(request.prefilled, request.prompt_tokens);
  const reused = request.reuse?.tokens ?? 0;
  return row({
    ...request,
    group: "active", tone, active: true,
    status: request.phase === "prefill" ? `${words} ${percent(done)}` : words,
    cached: reused ? percent(ratio(reused, request.prompt_tokens)) : "",
    speed: request.tokens_per_s ? rate(request.tokens_per_s) : "",
    ...figures(request, reused, request.reuse?.tier),
  });
}

const FINISHED = new Set(["stop", "length", "tool_calls", "client_left"]);
const QUIET = new Set([...FINISHED, "request_cancelled"]);

function endedRow(end) {
  const decode_s = end.seconds - end.time_to_first_token_s;
  const hasSpeed = end.task === "generate" && end.answered > 1 && end.time_to_first_token_s !== null && decode_s > 0;
  return row({
    ...end,
    time: end.time - end.seconds,
    group: FINISHED.has(end.code) ? "finished" : "failed",
    tone: QUIET.has(end.code) ? "idle" : "bad",
    active: false,
    status: listed(end.task === "generate" ? "" : end.task, end.code.replaceAll("_", " ")),
    cached: end.cached_tokens ? percent(ratio(end.cached_tokens, end.prompt_tokens)) : "",
    speed: hasSpeed ? rate((end.answered - 1) / decode_s) : "",
    more: end.code,
    ...figures(end, end.cached_tokens, ""),
  });
}

/** Return the cells and facts that a running and an ended request have in common. */
function figures(request, reused, tier) {
  const { prompt_tokens: prompt, answered, time_to_first_token_s: first, resumes, preemptions = 0 } = request;
  const times = (number) => (number === 1 ? "once" : `${number} times`);
  return {
    first: first === null ? "" : seconds(first),
    tokens: prompt || answered ? `${count(prompt)} → ${count(answered)}` : "",
    duration: seconds(request.seconds),
    facts: [
      prompt ? `${plural(prompt, "prompt token")}, ${reused ? `${count(reused)} from ${tier || "cache"}` : "none from cache"}` : "",
      resumes ? `resumed ${times(resumes)}` : "",
      preemptions ? `preempted ${times(preemptions)}` : "",
      first === null ? "" : `first token after ${seconds(first)}`,
    ].filter(Boolean),
  };
}

function refusedRow(refusal) {
  return row({
    ...refusal,
    id: refusal.request_id, key: "", model: "", group: "failed", tone: refusal.status < 500 || refusal.status === 503 ? "busy" : "bad", active: false,
    status: `${refusal.status} ${refusal.code.replaceAll("_", " ")}`, path: `${refusal.method} ${refusal.path}`,
    more: `${refusal.code} ${refusal.method} ${refusal.path}`,
  });
}

export const ratio = (part, whole) => (whole ? Math.min(1, part / whole) : 0);

// --- phases ---

const PHASES = {
  preparing: ["tokenizing", "busy"], waiting: ["waiting", "busy"],
  prefill: ["prefill", "busy"], decode: ["decode", "good"],
};

/** Return the phase of a request in flight, in words, and its tone. */
export function phaseOf(status, { phase, model, phases = [] }) {
  if (phase !== "queued") return PHASES[phase] ?? [phase, "idle"];
  if (phases.at(-1)?.[0] === "paused") return ["waiting for the next worker", "bad"];
  return waitOf(status, model);
}

/** Return what a request without a worker waits for, in words, and the tone. */
export function waitOf(status, name) {
  if (pauseOf(status, name)) return ["waiting for the next worker", "bad"];
  const loading = status.workers.find((worker) => worker.model === name && worker.loading?.total)?.loading;
  if (loading) return [`loading the model, ${percent(ratio(loading.done, loading.total))}`, "busy"];
  const state = status.models.find((model) => model.model === name)?.state;
  if (state === "loading") return ["loading the model", "busy"];
  return [state === "unloaded" ? "waiting for memory for the model" : "queued", "busy"];
}

const LABELS = {
  queued: "Queued", preparing: "Tokenizing", waiting: "Cache, wait for a row", prefill: "Prefill", decode: "Decode",
  paused: "Pause between workers",
};
const SHORTEST_S = 0.0005;

/**
 * Return the bars of a row's waterfall, in order.
 * @returns {{key, phase, label, from, width, took}[]} `from` and `width` are shares of the whole
 */
export function waterfall({ phases, seconds: whole }) {
  const bars = phases.map(([phase, from], place) => {
    const to = Math.min(whole, phases[place + 1]?.[1] ?? whole);
    return {
      key: String(place), phase, label: LABELS[phase] ?? phase, from: ratio(from, whole), width: ratio(Math.max(0, to - from), whole),
      took: seconds(Math.max(0, to - from)), passed: to - from,
    };
  });
  return bars.filter((bar) => bar.passed >= SHORTEST_S).map(({ passed, ...bar }) => bar);
}
