/** Light or dark theme: the system's setting, unless one is chosen. */

import { byId } from "./dom.js";

const PLACE = "roundhouse-theme";

export function start() {
  const choice = byId("theme");
  choice.value = localStorage.getItem(PLACE) ?? "";
  choice.addEventListener("change", () => {
    localStorage.setItem(PLACE, choice.value);
    apply(choice.value);
  });
  apply(choice.value);
}

function apply(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}
