/** The API key: asked for when the server wants one, and kept until the tab is closed. */

import { byId, write } from "./dom.js";

const PLACE = "roundhouse-key";
let asking = null;

export const key = () => sessionStorage.getItem(PLACE) ?? "";

/** Ask for a key. Whoever asks meanwhile waits for the same answer: true, if there is another key now. */
export function askForKey(why) {
  asking ??= ask(why).finally(() => { asking = null; });
  return asking;
}

function ask(why) {
  const dialog = byId("key-dialog");
  show();
  if (why) write(byId("key-why"), why);
  byId("key").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "given"), { once: true });
  });
}

function take(event) {
  event.preventDefault();
  const given = byId("key").value.trim();
  if (given) sessionStorage.setItem(PLACE, given);
  else sessionStorage.removeItem(PLACE);
  byId("key-dialog").close("given");
}

/** Who needs no key sees nothing of keys. */
const show = () => { byId("key-button").hidden = false; };

export function start(changed) {
  if (key()) show();
  byId("key-form").addEventListener("submit", take);
  byId("key-cancel").addEventListener("click", () => byId("key-dialog").close(""));
  byId("key-button").addEventListener("click", async () => { if (await askForKey("")) changed(); });
}
