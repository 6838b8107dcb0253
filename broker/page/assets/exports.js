/** Exports of a conversation. Pure. */

/** Return the conversation as Markdown: a heading for each turn. Images are only mentioned. */
export function markdown(turns, system) {
  const told = turns.map((turn) => [`## ${speaker(turn)}`, ...parts(turn)].join("\n\n"));
  return [...(system ? [`## System\n\n${system}`] : []), ...told, ""].join("\n\n").replace(/\n+$/, "\n");
}

const SPEAKERS = { user: "User", assistant: "Assistant" };
const speaker = (turn) => SPEAKERS[turn.role] ?? `Tool: ${turn.name}`;

function parts({ text, images = [], calls = [] }) {
  const called = calls.map((call) => fenced("json", `${call.name}(${call.arguments})`));
  return [...images.map((_, number) => `*Image ${number + 1}*`), text, ...called].filter(Boolean);
}

/** Return a code block, with a fence that is longer than any in the text. */
function fenced(language, text) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
}
