/** Renders answers: the blocks of `markdown` as elements; only changed blocks are replaced. */

import { copyText } from "./clipboard.js";
import { element } from "./dom.js";
import { blocks } from "./markdown.js";

/** Render a text into `place`. */
export function render(place, text) {
  const wanted = blocks(text);
  wanted.forEach((block, number) => {
    const written = JSON.stringify(block);
    const there = place.children[number];
    if (there?.dataset.written === written) return;
    const made = elementOf(block);
    made.dataset.written = written;
    if (there) there.replaceWith(made);
    else place.append(made);
  });
  while (place.children.length > wanted.length) place.lastElementChild.remove();
}

function elementOf({ kind, spans, items, language, text }) {
  if (kind === "code") return code(language, text);
  if (kind === "heading") return element("h3", {}, ...inline(spans));
  if (kind === "paragraph") return element("p", {}, ...inline(spans));
  return element(kind === "bullets" ? "ul" : "ol", {}, ...items.map((item) => element("li", {}, ...inline(item))));
}

const inline = (spans) => spans.map(({ kind, text }) => (kind === "text" ? text : element(kind, {}, text)));

function code(language, text) {
  const copy = element("button", { type: "button", className: "link" }, "Copy");
  copy.addEventListener("click", () => copyText(copy, text));
  const bar = element("p", { className: "code-bar" }, element("span", {}, language || "code"), copy);
  return element("div", { className: "code" }, bar, element("pre", {}, element("code", {}, text)));
}
