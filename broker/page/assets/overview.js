/** The overview: fills the templates with the values from `view`. */

import { byId, copy, fill, keep, write } from "./dom.js";
import * as drawing from "./drawing.js";
import { pauses } from "./pauses.js";
import { joined } from "./samples.js";
import { view } from "./view.js";

let samples = [];

export const start = drawing.start;

/** Show a status document. */
export function show(status) {
  samples = joined(samples, status.history);
  drawing.draw(samples, pauses(status.recent.workers), status.time);
  const told = view(status);
  verdict(told.verdict);
  write(byId("about"), told.about);
  write(byId("requests-count"), told.requests.length ? String(told.requests.length) : "");
  keep(byId("models"), told.models, () => copy("model"), card);
  keep(byId("requests"), told.requests, () => copy("request"), fill);
  for (const name of ["events", "errors", "ends"]) keep(byId(name), told[name], () => copy("line"), fill);
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

function card(node, model) {
  fill(node, model);
  keep(node.querySelector(".workers"), model.workers, () => copy("worker"), fill);
}
