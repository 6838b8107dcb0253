/** The inspector: a dialog with a captured request, its prompt and its output tokens. */

import { ask } from "./api.js";
import { byId, element, write } from "./dom.js";
import { halves, laidOut, likelihoods, reuse, scoring } from "./inspection.js";

const UNLIKELY_PERCENT = 40; // of red behind the most unlikely token; more would be unreadable
let shown = null;

export function start() {
  byId("look-close").addEventListener("click", () => byId("look").close());
  byId("look-likely").addEventListener("click", showLikelihoods);
}

/** Open the inspector with the captured request of this id. */
export async function look(id) {
  say("");
  byId("look-prompt").replaceChildren();
  byId("look-answer").replaceChildren();
  try {
    shown = await (await ask(`/v1/inspect/${encodeURIComponent(id)}`)).json();
    tell();
    const { cached, computed } = halves(shown);
    byId("look-prompt").append(element("mark", { title: "from the prefix cache" }, await text(cached)), await text(computed));
  } catch (error) {
    say(error.message);
  }
  byId("look").showModal();
}

function tell() {
  write(byId("look-title"), `${shown.path} · ${shown.model}`);
  write(byId("look-body"), laidOut(shown.body));
  write(byId("look-reuse"), reuse(shown));
  byId("look-likely").hidden = !shown.answer.tokens.length || shown.images > 0;
}

/** Detokenize tokens with their model. */
async function text(tokens) {
  if (!tokens.length) return "";
  const answer = await ask("/detokenize", { body: { model: shown.model, tokens } });
  return (await answer.json()).prompt;
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
