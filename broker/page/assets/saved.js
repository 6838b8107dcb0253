/** Stored form of the playground: JSON of bounded size, which survives a reload. Pure. */

import { EMPTY } from "./chat.js";

export const CHARACTERS_MAX = 2_000_000;
const INTERRUPTED = "The page was closed before the answer was complete.";

/**
 * Return the playground's state as JSON of at most `limit` characters; empty if there is nothing to store.
 * Images are left out first, then the oldest turns.
 * @param {{turns: object[], fields: object, model: string, prompt: string}} state `fields`: the settings' texts
 */
export function packed(state, limit = CHARACTERS_MAX) {
  const used = Object.values(state.fields).some((text) => text.trim());
  if (!state.turns.length && !used && !state.prompt) return "";
  const whole = JSON.stringify(state);
  if (whole.length <= limit) return whole;
  const turns = state.turns.map(withoutImages);
  const spare = limit - JSON.stringify({ ...state, turns: [] }).length;
  return spare < 0 ? "" : JSON.stringify({ ...state, turns: latest(turns, spare) });
}

function withoutImages(turn) {
  const { images = [] } = turn;
  return images.length ? { ...turn, images: [], lost: (turn.lost ?? 0) + images.length } : turn;
}

/** Return the last turns that fit, from a question on. */
function latest(turns, characters) {
  let first = turns.length;
  for (let size = 0; first > 0; first -= 1) {
    size += JSON.stringify(turns[first - 1]).length + 1;
    if (size > characters) break;
  }
  const question = turns.findIndex((turn, place) => place >= first && turn.role === "user");
  return question < 0 ? [] : turns.slice(question);
}

/** Return the state from its JSON; null if it is invalid, as after an upgrade. */
export function unpacked(text) {
  const { turns, fields, model, prompt } = parsed(text) ?? {};
  const valid = Array.isArray(turns) && turns.every(isTurn) && isRecord(fields) && typeof model === "string" && typeof prompt === "string";
  return valid ? { turns: turns.map(restored), fields, model, prompt } : null;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

const isRecord = (value) => typeof value === "object" && value !== null && Object.values(value).every((text) => typeof text === "string");

const LISTS = { user: "images", assistant: "calls" };

function isTurn(turn) {
  if (typeof turn?.text !== "string") return false;
  if (turn.role === "tool") return typeof turn.call === "string" && typeof turn.name === "string";
  return turn.role in LISTS && Array.isArray(turn[LISTS[turn.role]]);
}

function restored(turn) {
  if (turn.role !== "assistant") return turn;
  return turn.endedAt === null ? { ...EMPTY, ...turn, problem: INTERRUPTED } : { ...EMPTY, ...turn };
}
