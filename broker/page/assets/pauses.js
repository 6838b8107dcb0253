/** Outages of models: from the loss of a worker until the next one is ready. A shutdown is none. Pure. */

const COMING = new Set(["connected", "ready"]);

/** Classify a worker event: `lost`, `leaves` (intended shutdown), `connected` or `ready`. */
export function kind(event) {
  if (COMING.has(event.what)) return event.what;
  return event.what.startsWith("said goodbye") ? "leaves" : "lost";
}

/**
 * Return the outages, each from the loss of a worker to the next that is ready.
 * @param events worker events of a status document, the latest first
 * @returns {{model: string, from: number, to: number | null, how: string}[]} the oldest first; `to`: null while it lasts
 */
export function pauses(events) {
  const open = new Map();
  const found = [];
  for (const event of events.toReversed()) {
    const what = kind(event);
    if (what === "ready") close(open, event);
    else if (what === "lost" && !open.has(event.model)) {
      const pause = { model: event.model, from: event.time, to: null, how: event.what };
      open.set(event.model, pause);
      found.push(pause);
    }
  }
  return found;
}

function close(open, event) {
  const pause = open.get(event.model);
  if (pause) pause.to = event.time;
  open.delete(event.model);
}

/** Return the current outage of a model, or undefined. A model with another ready worker has none. */
export function pauseOf(status, model) {
  const serves = status.workers.some((worker) => worker.model === model && worker.state === "ready");
  if (serves) return undefined;
  return pauses(status.recent.workers).find((pause) => pause.model === model && pause.to === null);
}
