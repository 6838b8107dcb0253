/** The last requests on the page, each to be looked into; there is nothing of it where the server keeps none. */

import { ask } from "./api.js";
import { byId, copy, element, fill, keep, write } from "./dom.js";
import { halves, laidOut, likelihoods, lines, reuse, scoring } from "./inspection.js";

const EVERY_MS = 3000;
const UNLIKELY_PERCENT = 40; // of red behind the most unlikely; more could not be read
let shown = null;

/** To be called when the server answers. */
export async function start() {
  byId("look-close").addEventListener("click", () => byId("look").close());
  byId("look-likely").addEventListener("click", showLikelihoods);
  while (await list()) await new Promise((resolve) => { setTimeout(resolve, EVERY_MS); });
}

/** Whether there ever is anything to be had. */
async function list() {
  const answer = await ask("/v1/inspect").catch((error) => error);
  if (!answer.ok) return true; // or again a little later
  const told = await answer.json();
  byId("kept-section").hidden = !told.enabled;
  keep(byId("kept"), lines(told), line, fill);
  return told.enabled;
}

function line({ id }) {
  const made = copy("kept");
  made.querySelector("button").addEventListener("click", () => look(id));
  return made;
}

async function look(id) {
  const answer = await ask(`/v1/inspect/${encodeURIComponent(id)}`).catch((error) => error);
  if (!answer.ok) return say(answer.message);
  shown = await answer.json();
  const { cached, computed } = halves(shown);
  write(byId("look-title"), `${shown.path} · ${shown.model}`);
  write(byId("look-body"), laidOut(shown.body));
  write(byId("look-reuse"), reuse(shown));
  byId("look-prompt").replaceChildren(element("mark", { title: "from the cache" }, cached), computed);
  byId("look-answer").replaceChildren();
  byId("look-likely").hidden = !shown.answer.tokens.length || shown.images > 0;
  say("");
  return byId("look").showModal();
}

const say = (text) => write(byId("look-problem"), text);

async function showLikelihoods() {
  const answer = await ask("/v1/completions", { body: scoring(shown) }).catch((error) => error);
  if (!answer.ok) return say(answer.message);
  return byId("look-answer").replaceChildren(...likelihoods(shown, await answer.json()).map(token));
}

function token({ text, share, label }) {
  const made = element("span", { className: "token", title: label }, text);
  made.style.setProperty("--unlikely", `${Math.round((1 - share) * UNLIKELY_PERCENT)}%`);
  return made;
}
