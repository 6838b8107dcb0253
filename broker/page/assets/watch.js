/** Subscription to the status stream; reconnects when it ends or stalls. */

import { ask, events } from "./api.js";

const SILENCE_MS = 8000;
const RETRY_MS = 1000;
const RETRY_MS_MAX = 15000;

/**
 * @param told called with each status document
 * @param silent called with the reason when there is no status
 * @returns a function that reconnects at once
 */
export function watch(told, silent) {
  let wake = () => {};
  let listening = new AbortController();
  const again = () => { listening.abort(); wake(); };
  const nap = (ms) => new Promise((resolve) => { wake = resolve; if (ms < Infinity) setTimeout(resolve, ms); });

  (async () => {
    let wait = RETRY_MS;
    for (;;) {
      listening = new AbortController();
      try {
        await listen(listening, (status) => { wait = RETRY_MS; told(status); });
        silent("The server closed the connection; reconnecting");
      } catch (error) {
        silent(why(error));
        if (error.retryAfter) wait = error.retryAfter * 1000;
        if (error.status === 401) await nap(Infinity); // until a key is entered
      }
      await nap(wait);
      wait = Math.min(wait * 2, RETRY_MS_MAX);
    }
  })();
  return again;
}

async function listen(listening, told) {
  let timer;
  const alive = () => {
    clearTimeout(timer);
    timer = setTimeout(() => listening.abort(), SILENCE_MS);
  };
  try {
    const response = await ask("/v1/status/stream", { signal: listening.signal });
    alive();
    for await (const { data } of events(response, alive)) told(JSON.parse(data));
  } finally {
    clearTimeout(timer);
  }
}

const why = (error) => (error.status ? error.message : "The gateway does not respond; reconnecting");
