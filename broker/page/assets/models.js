/** The list of models: asked for again when the status shows that it has changed. */

import { ask } from "./api.js";

let known = "";

export const generates = (model) => !model.tasks || model.tasks.includes("generate");

/** Return the model to begin with: one that generates text, and that is loaded if any is. */
export function preferred(models) {
  const able = models.filter(generates);
  return able.find(({ state }) => state === "loaded") ?? able[0] ?? models[0] ?? null;
}

/** @param offer called with the models of `/v1/models`, each time that they may have changed */
export async function follow(status, offer) {
  const told = JSON.stringify(status.models.map((model) => [model.model, model.state]));
  if (told === known) return;
  const answer = await ask("/v1/models").catch(() => null);
  if (!answer) return; // repeated with the next status
  known = told;
  offer((await answer.json()).data);
}
