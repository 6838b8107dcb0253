/** The playground: a conversation with a model over the public API. */

import { ask, events } from "./api.js";
import { EMPTY, before, grown, messages, sayable, unanswered } from "./chat.js";
import { byId, element, keep, write } from "./dom.js";
import * as pictures from "./pictures.js";
import { chosen, parameters } from "./settings.js";
import * as turnsOnPage from "./turns.js";
import { stateOf } from "./view.js";

let turns = [];
let going = null; // an AbortController while an answer is streaming
let status = null;
let spoken = 0;
let drawn = 0;
let listed = "";

const now = () => performance.now() / 1000;
const fields = () => Object.fromEntries(new FormData(byId("settings-form")));

export function start() {
  pictures.start(document.querySelector(".playground"));
  byId("composer").addEventListener("submit", submit);
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  });
  byId("stop").addEventListener("click", () => going?.abort());
  byId("fresh").addEventListener("click", fresh);
  byId("settings-form").addEventListener("input", check);
  byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
  check();
}

/** Update the model list and the state of the streaming answer from a status document. */
export function hear(document) {
  status = document;
  const known = JSON.stringify(document.models.map((model) => [model.model, model.state]));
  if (known !== listed) listModels().then(() => { listed = known; }, () => {}); // on failure, retry with the next status
  if (going) draw();
}

async function listModels() {
  const { data } = await (await ask("/v1/models")).json();
  const able = data.filter((model) => !model.tasks || model.tasks.includes("generate"));
  const items = able.map((model) => ({ key: model.id, text: model.state === "loaded" ? model.id : `${model.id} (${model.state})` }));
  keep(byId("model"), items, ({ key }) => element("option", { value: key }), (node, { text }) => write(node, text));
}

function check() {
  const { problem } = parameters(fields());
  write(byId("settings-problem"), problem);
  const set = chosen(fields());
  write(byId("settings-count"), set ? `${set} set` : "");
  return !problem;
}

// --- turns ---

function submit(event) {
  event.preventDefault();
  const text = byId("prompt").value.trim();
  if (going || !check()) return byId("settings").setAttribute("open", "");
  const images = pictures.taken();
  if (!text && !images.length) return undefined;
  byId("prompt").value = "";
  turns = [...turns, { role: "user", text, images }];
  return converse();
}

function fresh() {
  going?.abort();
  going = null; // so that its remaining chunks are ignored
  turns = [];
  draw();
  byId("prompt").focus();
}

function reply(name, place, text) {
  const last = turns.findLast((turn) => turn.role === "assistant");
  turns = [...turns, { role: "tool", call: last.calls[place].id, name, text }];
  if (unanswered(turns).length) draw();
  else converse();
}

function again() {
  turns = before(turns);
  converse();
}

// --- an answer ---

async function converse() {
  const asked = turns;
  const mine = new AbortController();
  going = mine;
  let answer = { ...EMPTY, askedAt: now() };
  const become = (next) => {
    answer = next;
    if (going === mine) show([...asked, answer]);
  };
  become(answer);
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
}

function request(asked) {
  const { system = "" } = fields();
  return {
    model: byId("model").value || undefined, messages: messages(asked, system.trim()),
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
  turnsOnPage.show(turns, Boolean(going), state, { again, reply });
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
