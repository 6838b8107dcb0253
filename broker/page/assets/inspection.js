/**
 * A request that is looked into: its prompt as the model was given it, and its answer, token by token. Pure.
 */

import { count, listed, percent, plural } from "./formats.js";

/** One line for each request that is kept. */
export const lines = ({ data }) => data.map((each) => ({
  key: each.id, id: each.id, path: each.path, model: each.model,
  more: listed(each.code ?? "runs", plural(each.prompt_tokens, "prompt token"), plural(each.answered, "token")),
}));

/** What came from the cache, and why no more did. */
export function reuse({ reuse: told, prompt_tokens: prompt }) {
  if (!told) return "Nothing is known of what came from the cache.";
  const share = prompt ? ` (${percent(told.tokens / prompt)})` : "";
  const why = told.miss ? ` No more, because: ${told.miss.replaceAll("_", " ")}.` : "";
  return `${count(told.tokens)} of ${count(prompt)} prompt tokens came from ${told.tokens ? told.tier : "the cache"}${share}.${why}`;
}

/** The prompt's tokens in two parts: those that came from the cache, and those that were computed. */
export function halves({ prompt, reuse: told }) {
  const cached = told?.tokens ?? 0;
  return { cached: prompt.tokens.slice(0, cached), computed: prompt.tokens.slice(cached) };
}

/** What is asked to learn how likely each token of the answer was. */
export function scoring({ model, prompt, answer }) {
  return { model, prompt: [...prompt.tokens, ...answer.tokens], echo: true, logprobs: 3, max_tokens: 0 };
}

/**
 * The answer's tokens, from the answer to `scoring`.
 * @returns {{text: string, share: number, label: string}[]} `share`: how likely it was
 */
export function likelihoods({ prompt }, { choices: [{ logprobs }] }) {
  const from = prompt.tokens.length;
  return logprobs.tokens.slice(from).map((text, place) => {
    const share = Math.exp(logprobs.token_logprobs[from + place]);
    return { text: text || SILENT, share, label: labelled(share, logprobs.top_logprobs?.[from + place]) };
  });
}

/** A token without text, such as the one that ends an answer. */
const SILENT = "▪";

function labelled(share, top) {
  const others = Object.entries(top ?? {}).map(([text, likely]) => `${JSON.stringify(text)} ${percent(Math.exp(likely))}`);
  return `${percent(share)}${others.length ? `; likeliest: ${others.join(", ")}` : ""}`;
}

/** A body as it came, laid out if it is JSON; what is long within it, such as an image, shortened. */
export function laidOut(body) {
  try {
    return JSON.stringify(JSON.parse(body), shortened, 2);
  } catch {
    return body;
  }
}

const DATA_CHARACTERS = 80;

const shortened = (key, value) => (typeof value === "string" && value.startsWith("data:") && value.length > DATA_CHARACTERS
  ? `${value.slice(0, DATA_CHARACTERS)} … (${count(value.length)} characters)` : value);
