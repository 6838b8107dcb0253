/** Copies text, also where the browser offers no clipboard: on plain http from another machine. */

import { byId, element, write } from "./dom.js";

const CONFIRMED_MS = 2000;

/** Copy a text, and say so on the button that asked for it. */
export async function copyText(button, text) {
  const done = (await written(text)) || selected(text);
  const label = button.dataset.label ??= button.textContent;
  write(button, done ? "Copied" : "Not copied");
  write(byId("announced"), button.textContent);
  setTimeout(() => { write(button, label); write(byId("announced"), ""); }, CONFIRMED_MS);
}

const written = (text) => Promise.resolve(navigator.clipboard?.writeText(text).then(() => true, () => false));

/** Copy with the command for selected text, which needs no secure context. */
function selected(text) {
  const before = document.activeElement;
  const field = element("textarea", { value: text, className: "unseen", readOnly: true });
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  before?.focus();
  return done;
}
