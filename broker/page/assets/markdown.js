/**
 * Parser of the Markdown subset common in answers: paragraphs, headings, lists, fenced code; bold, italics, code.
 * Pure: text to blocks, never HTML. Unknown markup stays as text.
 */

/** @returns {{kind, spans?, items?, language?, text?}[]} kind: `paragraph`, `heading`, `code`, `bullets` or `numbers` */
export function blocks(text) {
  return text.split(/^(```[^\n]*\n[\s\S]*?(?:^```[^\S\n]*$|$(?![\s\S])))/m).flatMap(block);
}

function block(piece) {
  const fenced = piece.match(/^```([^\n]*)\n([\s\S]*?)(?:\n?^```[^\S\n]*)?$(?![\s\S])/m);
  if (fenced && piece.startsWith("```")) return [{ kind: "code", language: fenced[1].trim(), text: fenced[2] }];
  return piece.split(/\n{2,}/).flatMap((part) => grouped(part.split("\n")));
}

const LINES = [
  ["heading", /^#{1,6}\s+(.*)$/],
  ["bullets", /^\s*[-*•]\s+(.*)$/],
  ["numbers", /^\s*\d+[.)]\s+(.*)$/],
  ["paragraph", /^(.*)$/],
];

function kindOf(line) {
  for (const [kind, pattern] of LINES) {
    const found = line.match(pattern);
    if (found) return { kind, text: found[1] };
  }
  return { kind: "paragraph", text: line };
}

/** Group consecutive lines of one kind into blocks; each heading is its own block. */
function grouped(lines) {
  const groups = [];
  for (const { kind, text } of lines.map(kindOf)) {
    if (groups.at(-1)?.kind === kind && kind !== "heading") groups.at(-1).lines.push(text);
    else groups.push({ kind, lines: [text] });
  }
  return groups.filter(({ lines: [...of] }) => of.join("").trim()).map(finished);
}

function finished({ kind, lines }) {
  if (kind === "bullets" || kind === "numbers") return { kind, items: lines.map(spans) };
  return { kind, spans: spans(lines.join("\n").replace(/^\n+|\n+$/g, "")) };
}

const MARKS = /(`[^`\n]+`|\*\*[^*\n]+\*\*|(?<![\w*])\*[^*\s][^*\n]*\*(?![\w*]))/;

/** @returns {{kind: "text" | "code" | "strong" | "em", text: string}[]} */
export function spans(text) {
  return text.split(MARKS).filter(Boolean).map((piece, place) => {
    if (!MARKS.test(piece)) return { kind: "text", text: piece };
    if (piece.startsWith("`")) return { kind: "code", text: piece.slice(1, -1) };
    if (piece.startsWith("**")) return { kind: "strong", text: piece.slice(2, -2) };
    return { kind: "em", text: piece.slice(1, -1) };
  });
}
