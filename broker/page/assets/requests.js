/** The table of requests: filters, rows that open, cancellation. */

import { ask } from "./api.js";
import { byId, copy, element, fill, keep, write } from "./dom.js";
import { plural } from "./formats.js";
import { look } from "./looking.js";
import { filtered, rows, waterfall } from "./table.js";

const PAGE_ROWS = 25;
const problems = new Map();
let all = [];
let opened = "";
let limit = PAGE_ROWS;

export function start() {
  byId("filter").addEventListener("input", () => { limit = PAGE_ROWS; draw(); });
  byId("more").addEventListener("click", () => { limit += 2 * PAGE_ROWS; draw(); });
}

/** Show the requests of a status document. */
export function show(status) {
  all = rows(status);
  const active = all.filter((row) => row.active).length;
  write(byId("requests-count"), active ? plural(active, "active request") : "");
  const models = status.models.map(({ model }) => ({ key: model, text: model }));
  const options = [{ key: "", text: "All models" }, ...models];
  keep(byId("filter-model"), options, ({ key }) => element("option", { value: key }), (node, { text }) => write(node, text));
  draw();
}

function open(key) {
  opened = opened === key ? "" : key;
  problems.clear();
  draw();
}

const filter = () => Object.fromEntries([...byId("filter").children].map(({ name, value }) => [name, value]));

function draw() {
  const wanted = filtered(all, filter());
  const table = byId("requests-table");
  table.dataset.keys = String(all.some((row) => row.owner));
  const listed = wanted.slice(0, limit).flatMap((row) => (row.key === opened ? [row, { ...row, key: `${row.key} detail`, isDetail: true }] : [row]));
  keep(byId("requests"), listed, make, update);
  byId("requests-empty").hidden = wanted.length > 0;
  write(byId("requests-empty"), all.length ? "No request matches the filter." : "No requests yet.");
  byId("more").hidden = wanted.length <= limit;
}

function make(row) {
  const made = copy(row.isDetail ? "detail" : "request");
  if (!row.isDetail) made.addEventListener("click", () => open(row.key)); // also of its button, by keyboard
  if (!row.isDetail) return made;
  made.querySelector(".cancel").addEventListener("click", (event) => cancel(row.id, event.currentTarget));
  made.querySelector(".inspect").addEventListener("click", () => look(row.id));
  return made;
}

function update(node, row) {
  fill(node, row);
  if (!row.isDetail) {
    node.querySelector(".open").setAttribute("aria-expanded", String(row.key === opened));
    node.querySelector(".model").title = row.model || row.path;
    return;
  }
  const { id, facts, path } = row;
  write(node.querySelector(".facts"), [path, row.owner && `API key: ${row.owner}`, ...facts].filter(Boolean).join(" · "));
  write(node.querySelector(".id"), id);
  write(node.querySelector(".problem"), problems.get(id) ?? "");
  keep(node.querySelector(".waterfall"), waterfall(row), () => copy("bar"), bar);
}

function bar(node, values) {
  fill(node, values);
  const filled = node.querySelector(".filled");
  filled.dataset.phase = values.phase;
  filled.style.left = `${values.from * 100}%`;
  filled.style.width = `${values.width * 100}%`;
}

async function cancel(id, button) {
  button.disabled = true;
  await ask(`/v1/requests/${encodeURIComponent(id)}/cancel`, { method: "POST" }).catch((error) => problems.set(id, error.message));
  button.disabled = false;
  draw();
}
