/** API client for the server of this page: sends the API key and reports the server's error messages. */

import { read } from "./events.js";
import { changeKey, isRequired, key, requireKey } from "./keys.js";

/** An error response. `retryAfter`: in seconds, if the server sends it. */
export class Refusal extends Error {
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/**
 * Return the response to a request; on 401, ask for a key until one is valid or the dialog is cancelled.
 * @throws {Refusal} or what `fetch` throws
 */
export async function ask(path, options = {}) {
  // A request without a key would only be refused, and listed among the errors.
  if (isRequired() && !key() && !(await changeKey())) throw new Refusal(401, "This server requires an API key.");
  let response = await send(path, options);
  while (response.status === 401) {
    const refused = await refusal(response);
    if (!(await requireKey(key() ? refused.message : ""))) throw refused;
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
  return new Refusal(response.status, told?.error?.message ?? `The server responded with status ${response.status}.`, retryAfter);
}

/** Yield the events of a streamed response. `alive` is called for each chunk, including comments. */
export async function* events(response, alive = () => {}) {
  let rest = "";
  for await (const piece of pieces(response.body.pipeThrough(new TextDecoderStream()))) {
    alive();
    const found = read(rest, piece);
    rest = found.rest;
    yield* found.events;
  }
}

/** Yield the chunks of a stream; not every browser can iterate over one. */
async function* pieces(stream) {
  const reader = stream.getReader();
  try {
    for (let next = await reader.read(); !next.done; next = await reader.read()) yield next.value;
  } finally {
    reader.cancel().catch(() => {});
  }
}
