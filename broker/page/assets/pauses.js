/** When models had lost a worker and did not have it back yet. Pure. */

const COMING = new Set(["connected", "ready"]);

/** What an event of a worker is: `lost`, `leaves` (it was told to), `connected` or `ready`. */
export function kind(event) {
  if (COMING.has(event.what)) return event.what;
  return event.what.startsWith("said goodbye") ? "leaves" : "lost";
}

/**
 * From the loss of a worker to the next that is ready.
 * @param events of workers, the latest first, as a status document has them
 * @returns {{model: string, from: number, to: number | null, how: string}[]} the eldest first; `to`: null while it lasts
 */
export function pauses(events) {
  const open = new Map();
  const found = [];
  for (const event of events.toReversed()) {
    const what = kind(event);
    if (what === "ready") close(open, event);
    else if (what !== "connected" && !open.has(event.model)) {
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

/** The pause that a model is in; or undefined. A model with another worker is in none. */
export function pauseOf(status, model) {
  const serves = status.workers.some((worker) => worker.model === model && worker.state === "ready");
  if (serves) return undefined;
  return pauses(status.recent.workers).find((pause) => pause.model === model && pause.to === null);
}
