/** The overview: fills the templates with the values from `view`. */

import { ask } from "./api.js";
import { byId, copy, fill, keep, write } from "./dom.js";
import * as drawing from "./drawing.js";
import * as looking from "./looking.js";
import { pauses } from "./pauses.js";
import * as requests from "./requests.js";
import { joined } from "./samples.js";
import { view } from "./view.js";

let samples = [];

export function start() {
  drawing.start();
  looking.start();
  requests.start();
}

/** Show a status document. */
export function show(status) {
  samples = joined(samples, status.history);
  drawing.draw(samples, pauses(status.recent.workers), status.time);
  const told = view(status);
  verdict(told.verdict);
  write(byId("about"), told.about);
  keep(byId("models"), told.models, makeCard, card);
  keep(byId("events"), told.events, () => copy("line"), fill);
  byId("batches-section").hidden = !told.batches.length;
  keep(byId("batches"), told.batches, () => copy("line"), fill);
  requests.show(status);
}

/** Show why there is no newer status. */
export function silent(why) {
  verdict({ tone: "bad", text: why });
}

function verdict({ tone, text }) {
  const lamp = byId("verdict").querySelector(".lamp");
  // Announced when the tone changes, not each time that a number in it changes.
  if (lamp.dataset.tone !== tone) write(byId("announced"), text);
  lamp.dataset.tone = tone;
  write(byId("verdict").querySelector(".words"), text);
}

function makeCard({ name }) {
  const made = copy("model");
  for (const verb of ["load", "unload", "pin", "unpin"]) {
    made.querySelector(`.${verb}`).addEventListener("click", (event) => order(verb, name, made, event.currentTarget));
  }
  return made;
}

/** Load, unload, pin or unpin a model; what becomes of it, the next status says. */
async function order(verb, model, node, button) {
  button.disabled = true;
  const refused = await ask(`/v1/models/${verb}`, { body: { model } }).then(() => "", (error) => error.message);
  write(node.querySelector(".refused"), refused);
  button.disabled = false;
}

function card(node, model) {
  fill(node, model);
  keep(node.querySelector(".workers"), model.workers, () => copy("worker"), fill);
}
