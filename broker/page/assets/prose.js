/** Renders answers: the blocks of `markdown` as elements; only changed blocks are replaced. */

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

function elementOf({ kind, spans, items, text }) {
  if (kind === "code") return element("pre", {}, element("code", {}, text));
  if (kind === "heading") return element("h4", {}, ...inline(spans));
  if (kind === "paragraph") return element("p", {}, ...inline(spans));
  return element(kind === "bullets" ? "ul" : "ol", {}, ...items.map((item) => element("li", {}, ...inline(item))));
}

const inline = (spans) => spans.map(({ kind, text }) => (kind === "text" ? text : element(kind, {}, text)));
