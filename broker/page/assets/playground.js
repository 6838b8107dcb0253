/** The playground: a conversation with a model over the public API. */

import { ask, events } from "./api.js";
import {
  EMPTY, added, before, edited, grown, messages, sayable, unanswered, withUsage, without,
} from "./chat.js";
import { byId, element, keep, write } from "./dom.js";
import * as menu from "./menu.js";
import { generates, preferred } from "./models.js";
import * as pictures from "./pictures.js";
import { packed, unpacked } from "./saved.js";
import { chosen, parameters } from "./settings.js";
import { load, save } from "./storage.js";
import * as turnsOnPage from "./turns.js";
import { stateOf } from "./view.js";

const PLACE = "roundhouse-playground";
const CHARACTERS_MAX = [2_000_000, 200_000]; // the second where the storage has no room for the first

let turns = [];
let going = null; // an AbortController while an answer is streaming
let editing = null; // the number of the turn that is edited
let status = null;
let wanted = ""; // the model chosen, which may not be listed yet
let spoken = 0;
let drawn = 0;

const now = () => performance.now() / 1000;
const fields = () => Object.fromEntries(new FormData(byId("settings-form")));
const system = () => (fields().system ?? "").trim();

export function start() {
  pictures.start(document.querySelector(".playground"));
  byId("composer").addEventListener("submit", submit);
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  });
  byId("stop").addEventListener("click", () => going?.abort());
  byId("fresh").addEventListener("click", fresh);
  byId("model").addEventListener("change", () => { wanted = byId("model").value; });
  byId("settings-form").addEventListener("input", check);
  byId("settings-form").addEventListener("reset", () => setTimeout(check)); // after the fields are reset
  byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
  menu.start(() => ({ turns, system: system(), request }));
  restore();
  check();
  window.addEventListener("pagehide", store);
}

/** Update the state of the streaming answer, and the usage of a stopped one, from a status document. */
export function hear(document) {
  status = document;
  const used = withUsage(turns, document.recent.ends);
  if (used === turns && !going) return;
  turns = used;
  draw();
}

/** Offer the models for a conversation. */
export function offer(models) {
  const able = models.filter(generates);
  const items = able.map((model) => ({ key: model.id, text: model.state === "loaded" ? model.id : `${model.id} (${model.state})` }));
  keep(byId("model"), items, ({ key }) => element("option", { value: key }), (node, { text }) => write(node, text));
  if (!able.some(({ id }) => id === wanted)) wanted = preferred(able)?.id ?? "";
  byId("model").value = wanted;
}

function check() {
  const { problem } = parameters(fields());
  write(byId("settings-problem"), problem);
  const set = chosen(fields());
  write(byId("settings-count"), set ? `${set} set` : "");
  return !problem;
}

// --- storage ---

function store() {
  const state = { turns, fields: fields(), model: byId("model").value || wanted, prompt: byId("prompt").value };
  CHARACTERS_MAX.some((limit) => save("session", PLACE, packed(state, limit)));
}

function restore() {
  const state = unpacked(load("session", PLACE));
  if (!state) return;
  const { elements } = byId("settings-form");
  for (const [name, text] of Object.entries(state.fields)) if (elements[name]) elements[name].value = text;
  ({ turns, model: wanted } = state);
  byId("prompt").value = state.prompt;
  draw();
}

// --- turns ---

function submit(event) {
  event.preventDefault();
  const text = byId("prompt").value.trim();
  if (going || !check()) return byId("settings").setAttribute("open", "");
  const images = pictures.taken();
  if (!text && !images.length) return undefined;
  byId("prompt").value = "";
  turns = added(turns, { role: "user", text, images });
  return converse();
}

function fresh() {
  going?.abort();
  going = null; // so that its remaining chunks are ignored
  turns = [];
  edit(null);
  store();
  byId("prompt").focus();
}

const placeOf = (number) => turns.findIndex((turn) => turn.number === number);

function edit(number) {
  editing = number;
  draw();
}

function change(number, text) {
  const place = placeOf(number);
  if (going || (!text && !turns[place].images.length)) return;
  editing = null;
  turns = edited(turns, place, text);
  byId("prompt").focus();
  converse();
}

function drop(number) {
  turns = without(turns, placeOf(number));
  edit(null);
  store();
  byId("prompt").focus();
}

function reply(name, place, text) {
  const last = turns.findLast((turn) => turn.role === "assistant");
  turns = added(turns, { role: "tool", call: last.calls[place].id, name, text });
  if (unanswered(turns).length) draw();
  else converse();
}

function again() {
  turns = before(turns);
  converse();
}

const actions = { again, edit, drop, change, reply };

// --- an answer ---

async function converse() {
  const asked = turns;
  const mine = new AbortController();
  going = mine;
  let answer = { ...EMPTY, askedAt: now() };
  const become = (next) => {
    answer = next;
    if (going === mine) show(added(asked, answer));
  };
  become(answer);
  draw(); // at once, so that nothing can be sent twice
  beQuiet();
  try {
    await stream(request(asked), mine.signal, (chunk) => become(grown(answer, chunk, now())));
    if (!answer.finish && !answer.problem) become({ ...answer, problem: "The stream ended before the answer was complete." });
  } catch (error) {
    become({ ...answer, ...(mine.signal.aborted ? { finish: "stopped" } : { problem: worded(error) }) });
  }
  if (going !== mine) return; // a new conversation was started
  become({ ...answer, endedAt: now() });
  going = null;
  say(answer.text, answer.text.length);
  draw();
  store();
}

/** Return the request body that asks for an answer to some turns. */
function request(asked) {
  return {
    model: byId("model").value || undefined, messages: messages(asked, system()),
    stream: true, stream_options: { include_usage: true }, ...parameters(fields()).parameters,
  };
}

async function stream(body, signal, hear) {
  const response = await ask("/v1/chat/completions", { body, signal });
  for await (const { data } of events(response)) {
    if (data === "[DONE]") return;
    hear(JSON.parse(data));
  }
}

const worded = (error) => (error.status ? error.message : "The connection was lost. The answer so far is kept.");

// --- on the page ---

function show(next) {
  turns = next;
  say(turns.at(-1).text, sayable(turns.at(-1).text));
  drawn ||= requestAnimationFrame(() => { drawn = 0; draw(); });
}

function draw() {
  const state = going ? stateOf(status, turns.at(-1)?.id, byId("model").value) : "";
  turnsOnPage.show(turns, { going: Boolean(going), state, editing, actions });
  byId("stop").hidden = !going;
  byId("send").disabled = Boolean(going);
}

/** Append new text to the live region, sentence by sentence, for screen readers. */
function say(text, end) {
  if (end <= spoken) return;
  byId("spoken").append(element("p", {}, text.slice(spoken, end)));
  spoken = end;
}

function beQuiet() {
  spoken = 0;
  byId("spoken").replaceChildren();
}
