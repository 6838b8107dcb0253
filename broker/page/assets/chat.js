/**
 * Conversation state of the playground: turns, the request built from them, and the streamed answer. Pure.
 *
 * A turn is `{role: "user", text, images}`, `{role: "assistant", ...answer}` or
 * `{role: "tool", call, name, text}`, each with a `number`. Images are data URLs.
 */

export const EMPTY = Object.freeze({
  role: "assistant", id: "", model: "", text: "", thought: "", calls: [], finish: null, usage: null, problem: "",
  askedAt: 0, firstAt: null, answerAt: null, endedAt: null,
});

/** Return the answer with a chunk of its stream added, which arrived at `now` (in seconds). */
export function grown(answer, chunk, now) {
  if (chunk.error) return { ...answer, problem: chunk.error.message };
  const { delta = {}, finish_reason: finish = null } = chunk.choices?.[0] ?? {};
  const text = delta.content ?? "";
  const thought = delta.reasoning_content ?? "";
  const calls = delta.tool_calls ?? [];
  const says = Boolean(text || thought || calls.length);
  return {
    ...answer,
    id: chunk.id || answer.id,
    model: chunk.model || answer.model,
    text: answer.text + text,
    thought: answer.thought + thought,
    calls: calls.reduce(called, answer.calls),
    finish: finish ?? answer.finish,
    usage: chunk.usage ?? answer.usage,
    firstAt: answer.firstAt ?? (says ? now : null),
    answerAt: answer.answerAt ?? (text || calls.length ? now : null),
  };
}

function called(calls, growth) {
  const before = calls[growth.index] ?? { id: "", name: "", arguments: "" };
  const after = {
    id: growth.id || before.id,
    name: growth.function?.name || before.name,
    arguments: before.arguments + (growth.function?.arguments ?? ""),
  };
  return Object.assign([...calls], { [growth.index]: after });
}

/** Return the turns as API messages. Empty answers, of streams that failed, are left out. */
export function messages(turns, system) {
  const told = turns.filter((turn) => turn.role !== "assistant" || turn.text || turn.calls.length).map(message);
  return system ? [{ role: "system", content: system }, ...told] : told;
}

function message(turn) {
  if (turn.role === "tool") return { role: "tool", tool_call_id: turn.call, content: turn.text };
  if (turn.role === "user") return { role: "user", content: content(turn) };
  const calls = turn.calls.map((call) => ({
    id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
  }));
  return { role: "assistant", content: turn.text, ...(calls.length ? { tool_calls: calls } : {}) };
}

function content({ text, images }) {
  if (!images.length) return text;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

/** Return the tool calls of the last answer that have no result yet. */
export function unanswered(turns) {
  const last = turns.findLastIndex((turn) => turn.role === "assistant");
  const replied = new Set(turns.slice(last + 1).filter((turn) => turn.role === "tool").map((turn) => turn.call));
  return last < 0 ? [] : turns[last].calls.filter((call) => !replied.has(call.id));
}

/** Return the turns before the last answer, to generate it again. */
export function before(turns) {
  const last = turns.findLastIndex((turn) => turn.role === "assistant");
  return last < 0 ? turns : turns.slice(0, last);
}

/** Return the turns with another one, numbered. */
export function added(turns, turn) {
  return [...turns, { ...turn, number: 1 + Math.max(0, ...turns.map(({ number }) => number)) }];
}

/** Return the turns up to a question, with another text: what followed was about the old one. */
export function edited(turns, place, text) {
  return [...turns.slice(0, place), { ...turns[place], text }];
}

/** Return the turns without a question and what followed it, up to the next question. */
export function without(turns, place) {
  const next = turns.findIndex((turn, at) => at > place && turn.role === "user");
  return [...turns.slice(0, place), ...(next < 0 ? [] : turns.slice(next))];
}

/**
 * Return the turns with the usage of answers that were stopped, whose stream ended before it told; the same
 * array if nothing changed. @param ends the recently ended requests of a status document
 */
export function withUsage(turns, ends) {
  const used = turns.map((turn) => {
    const end = turn.role === "assistant" && turn.endedAt !== null && !turn.usage && turn.id && ends.find(({ id }) => id === turn.id);
    return end ? { ...turn, usage: usageOf(end) } : turn;
  });
  return used.some((turn, place) => turn !== turns[place]) ? used : turns;
}

const usageOf = (end) => ({
  prompt_tokens: end.prompt_tokens, completion_tokens: end.answered, prompt_tokens_details: { cached_tokens: end.cached_tokens },
});

/** Return the length of the text that may be read aloud: up to the end of the last complete sentence. */
export function sayable(text) {
  const ends = [...text.matchAll(/[.!?:;](?=\s)|[。！？]|\n/g)];
  return ends.length ? ends.at(-1).index + 1 : 0;
}
