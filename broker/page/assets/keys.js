/** The API key: requested when the server needs one, and stored until the tab is closed. */

import { byId, write } from "./dom.js";
import { load, save } from "./storage.js";

const PLACE = "roundhouse-key";
let asking = null;
let changed = () => {};
let required = false;
let entered = load("session", PLACE);

export const key = () => entered;

/** Whether the server has refused a request for want of a valid key. */
export const isRequired = () => required;

/** Show the key dialog; concurrent calls share it. Resolves to true if a key was submitted. */
function askForKey(why) {
  asking ??= ask(why).finally(() => { asking = null; });
  return asking;
}

/** Ask for a key, because the server has refused the present one or its absence. */
export function requireKey(why) {
  required = true;
  enter(""); // it is of no use
  return askForKey(why);
}

/** Ask for a key, and report the change. */
export async function changeKey() {
  const given = await askForKey("");
  if (given) changed();
  return given;
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

function enter(text) {
  entered = text;
  save("session", PLACE, text);
  document.dispatchEvent(new Event("keychange"));
}

function take(event) {
  event.preventDefault();
  enter(byId("key").value.trim());
  byId("key-dialog").close("given");
}

/** Show the key button, which is hidden while no key is needed. */
const show = () => { byId("key-button").hidden = false; };

/** @param whenChanged called when a key was entered that nothing waited for */
export function start(whenChanged) {
  changed = whenChanged;
  if (key()) show();
  byId("key-form").addEventListener("submit", take);
  byId("key-cancel").addEventListener("click", () => byId("key-dialog").close(""));
  byId("key-button").addEventListener("click", changeKey);
}
