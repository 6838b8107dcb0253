/** Questions to the server that this page is from: with the key, and with errors as it words them. */

import { read } from "./events.js";
import { askForKey, key } from "./keys.js";

/** An answer that is none. `retryAfter`: in seconds, where the server says so. */
export class Refusal extends Error {
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/**
 * The answer to a request; where a key is wanted, it is asked for until it is the right one, or nobody has one.
 * @throws {Refusal} or what `fetch` throws
 */
export async function ask(path, options = {}) {
  let response = await send(path, options);
  while (response.status === 401) {
    const refused = await refusal(response);
    if (!(await askForKey(key() ? refused.message : ""))) throw refused;
    response = await send(path, options);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

function send(path, { body, ...options }) {
  const headers = key() ? { authorization: `Bearer ${key()}` } : {};
  if (!body) return fetch(path, { headers, cache: "no-store", ...options });
  headers["content-type"] = "application/json";
  return fetch(path, { method: "POST", headers, body: JSON.stringify(body), ...options });
}

async function refusal(response) {
  const retryAfter = Number(response.headers.get("retry-after")) || null;
  const told = await response.json().catch(() => null);
  return new Refusal(response.status, told?.error?.message ?? `The server answered ${response.status}.`, retryAfter);
}

/** The events of an answer that streams. `alive` is called for whatever comes, comments too. */
export async function* events(response, alive = () => {}) {
  let rest = "";
  for await (const piece of pieces(response.body.pipeThrough(new TextDecoderStream()))) {
    alive();
    const found = read(rest, piece);
    rest = found.rest;
    yield* found.events;
  }
}

/** Not every browser lets a stream be iterated. */
async function* pieces(stream) {
  const reader = stream.getReader();
  try {
    for (let next = await reader.read(); !next.done; next = await reader.read()) yield next.value;
  } finally {
    reader.cancel().catch(() => {});
  }
}
