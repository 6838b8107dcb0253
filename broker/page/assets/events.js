/** Parser of server-sent events, from text chunks of any size. Pure. */

/**
 * Return the events that `piece` completes, and the rest. `rest`: what the chunks before it left.
 * @returns {{events: {event: string, data: string}[], rest: string}}
 */
export function read(rest, piece) {
  const blocks = (rest + piece).replaceAll("\r\n", "\n").split("\n\n");
  const last = blocks.pop();
  return { events: blocks.map(parsed).filter((event) => event.data), rest: last };
}

function parsed(block) {
  const lines = block.split("\n").map((line) => line.match(/^(\w+): ?(.*)$/s)).filter(Boolean);
  const values = (name) => lines.filter((line) => line[1] === name).map((line) => line[2]);
  return { event: values("event").at(-1) ?? "message", data: values("data").join("\n") };
}
