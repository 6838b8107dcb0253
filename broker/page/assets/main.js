/** Entry point: passes the server's status to the overview and to the playground. */

import * as connect from "./connect.js";
import { byId } from "./dom.js";
import * as keys from "./keys.js";
import * as models from "./models.js";
import * as overview from "./overview.js";
import * as playground from "./playground.js";
import * as theme from "./theme.js";
import { watch } from "./watch.js";

const WIDE = matchMedia("(min-width: 1180px)");

function show(view) {
  document.body.dataset.view = view;
  byId("settings").open = view === "playground" && WIDE.matches; // there they have a column of their own
  for (const button of document.querySelectorAll("[data-show]")) {
    button.setAttribute("aria-pressed", String(button.dataset.show === view));
  }
}

function views() {
  for (const button of document.querySelectorAll("[data-show]")) {
    button.addEventListener("click", () => { location.hash = button.dataset.show; });
  }
  const fromAddress = () => show(location.hash === "#playground" || location.hash === "#prompt" ? "playground" : "overview");
  window.addEventListener("hashchange", fromAddress);
  fromAddress();
}

function offer(listed) {
  connect.offer(listed);
  playground.offer(listed);
}

function hear(status) {
  overview.show(status);
  playground.hear(status);
  models.follow(status, offer);
}

theme.start();
connect.start();
overview.start();
playground.start();
views();
keys.start(watch(hear, overview.silent));
