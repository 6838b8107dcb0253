/** The API key: requested when the server needs one, and stored until the tab is closed. */

import { byId, write } from "./dom.js";

const PLACE = "roundhouse-key";
let asking = null;

export const key = () => sessionStorage.getItem(PLACE) ?? "";

/** Show the key dialog; concurrent calls share it. Resolves to true if a key was submitted. */
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

/** Show the key button, which is hidden while no key is needed. */
const show = () => { byId("key-button").hidden = false; };

export function start(changed) {
  if (key()) show();
  byId("key-form").addEventListener("submit", take);
  byId("key-cancel").addEventListener("click", () => byId("key-dialog").close(""));
  byId("key-button").addEventListener("click", async () => { if (await askForKey("")) changed(); });
}
