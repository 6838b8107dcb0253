/**
 * Content of the request inspector: the rendered prompt and the output, token by token. Pure.
 */

import { count, percent } from "./formats.js";

/** Describe how much came from the prefix cache, and why no more did. */
export function reuse({ reuse: told, prompt_tokens: prompt }) {
  if (!told) return "The prefix cache usage is unknown.";
  const share = prompt ? ` (${percent(told.tokens / prompt)})` : "";
  const why = told.miss ? ` Miss reason: ${told.miss.replaceAll("_", " ")}.` : "";
  return `${count(told.tokens)} of ${count(prompt)} prompt tokens came from ${told.tokens ? told.tier : "the cache"}${share}.${why}`;
}

/** Split the prompt's tokens into cached and computed ones. */
export function halves({ prompt, reuse: told }) {
  const cached = told?.tokens ?? 0;
  return { cached: prompt.tokens.slice(0, cached), computed: prompt.tokens.slice(cached) };
}

/** Return the request that computes the logprobs of the output tokens. */
export function scoring({ model, prompt, answer }) {
  return { model, prompt: [...prompt.tokens, ...answer.tokens], echo: true, logprobs: 3, max_tokens: 0 };
}

/**
 * Return the output tokens with their probabilities, from the response to `scoring`.
 * @returns {{text: string, share: number, label: string}[]} `share`: its probability
 */
export function likelihoods({ prompt }, { choices: [{ logprobs }] }) {
  const from = prompt.tokens.length;
  return logprobs.tokens.slice(from).map((text, place) => {
    const share = Math.exp(logprobs.token_logprobs[from + place]);
    return { text: text || SILENT, share, label: labelled(share, logprobs.top_logprobs?.[from + place]) };
  });
}

/** Shown for a token without text, such as the end-of-sequence token. */
const SILENT = "▪";

function labelled(share, top) {
  const others = Object.entries(top ?? {}).map(([text, likely]) => `${JSON.stringify(text)} ${percent(Math.exp(likely))}`);
  return `${percent(share)}${others.length ? `; most likely: ${others.join(", ")}` : ""}`;
}

/** Return a request body, indented if it is JSON, with long `data:` URLs shortened. */
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
