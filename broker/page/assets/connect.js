/** The box that tells how to connect clients: addresses, model, key, and a snippet for each client. */

import data from "./client_recipes.js";
import { copyText } from "./clipboard.js";
import { byId, element, keep, write } from "./dom.js";
import { isRequired, key } from "./keys.js";
import { preferred } from "./models.js";
import { recipes } from "./recipes.js";
import { load, save } from "./storage.js";

const CLOSED = "roundhouse-connect-closed";
const CLIENT = "roundhouse-connect-client";
const NO_MODEL = { id: "MODEL" };
const MISSING_KEY = "YOUR_API_KEY";
const HIDDEN_KEY = "••••••••"; // the page may be on a shared screen

let models = [];
let client = load("local", CLIENT);

export function start() {
  const box = byId("connect");
  box.open = !load("local", CLOSED);
  box.addEventListener("toggle", () => save("local", CLOSED, box.open ? "" : "closed"));
  byId("connect-model").addEventListener("change", draw);
  document.addEventListener("keychange", draw);
  byId("connect-clients").addEventListener("keydown", turn);
  on("connect-copy-openai", () => `${location.origin}/v1`);
  on("connect-copy-anthropic", () => location.origin);
  on("connect-copy-model", () => model().id);
  on("connect-copy-key", secret);
  on("connect-copy", () => chosen(secret()).text);
  draw();
}

const on = (id, text) => byId(id).addEventListener("click", (event) => copyText(event.currentTarget, text()));

/** Offer the models. */
export function offer(listed) {
  const before = model();
  models = listed;
  const items = models.map(({ id }) => ({ key: id }));
  keep(byId("connect-model"), items, ({ key: id }) => element("option", { value: id }, id), () => {});
  if (before === NO_MODEL) byId("connect-model").value = preferred(models)?.id ?? "";
  draw();
}

const model = () => models.find(({ id }) => id === byId("connect-model").value) ?? NO_MODEL;
const secret = () => key() || (isRequired() ? MISSING_KEY : "");

/** Return all snippets with a key, and the one of the chosen client; the first if its model has none for it. */
function snippets(withKey) {
  return recipes(data, { origin: location.origin, key: withKey, model: model() });
}

function chosen(withKey) {
  const made = snippets(withKey);
  return made.find(({ name }) => name === client) ?? made[0];
}

/** Show the values and the snippet. */
function draw() {
  const shown = key() ? HIDDEN_KEY : secret();
  write(byId("connect-openai"), `${location.origin}/v1`);
  write(byId("connect-anthropic"), location.origin);
  write(byId("connect-key"), shown || "none");
  byId("connect-copy-key").hidden = !secret();
  const { name, text, note } = chosen(shown);
  keep(byId("connect-clients"), snippets(shown).map((each) => ({ key: each.name })), tab, (node, { key: each }) => {
    node.setAttribute("aria-selected", String(each === name));
    node.tabIndex = each === name ? 0 : -1;
  });
  write(byId("connect-snippet"), text);
  write(byId("connect-note"), note);
}

function tab({ key: name }) {
  const made = element("button", { type: "button", role: "tab", onclick: () => choose(name) }, name);
  made.setAttribute("aria-controls", "connect-panel");
  return made;
}

function choose(name) {
  client = name;
  save("local", CLIENT, name);
  draw();
}

/** Move to another tab with the arrow keys, Home or End, as in the ARIA pattern of tabs. */
function turn(event) {
  const tabs = [...byId("connect-clients").children];
  const from = tabs.indexOf(event.target);
  const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: tabs.length - 1 }[event.key];
  if (to === undefined || from < 0) return;
  event.preventDefault();
  const next = tabs.at(to % tabs.length);
  choose(next.dataset.key);
  next.focus();
}
