/** Light or dark theme: the system's setting, unless one is chosen. */

import { byId } from "./dom.js";
import { load, save } from "./storage.js";

const PLACE = "roundhouse-theme";

export function start() {
  const choice = byId("theme");
  choice.value = load("local", PLACE);
  choice.addEventListener("change", () => {
    save("local", PLACE, choice.value);
    apply(choice.value);
  });
  apply(choice.value);
}

function apply(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}
