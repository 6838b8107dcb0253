/** Renders the conversation. */

import { byId, copy, element, fill, keep, write } from "./dom.js";
import { count, listed, plural, rate, seconds } from "./formats.js";
import { render } from "./prose.js";

const NEAR_PX = 60;

/**
 * @param turns see `chat`; @param going whether the last one is streaming; @param state its status line meanwhile
 * @param actions {again, reply(call, text)}
 */
export function show(turns, going, state, actions) {
  const talk = byId("talk");
  const atEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < NEAR_PX;
  const items = turns.map((turn, place) => ({ key: `${place} ${turn.role}`, turn, last: place === turns.length - 1 }));
  keep(byId("turns"), items, () => copy("turn"), (node, item) => {
    one(node, item.turn, { going: going && item.last, last: item.last, state, actions });
  });
  if (atEnd) talk.scrollTop = talk.scrollHeight;
}

const SPEAKERS = { user: "You", assistant: "", tool: "Returned by" };

function one(node, turn, context) {
  node.dataset.role = turn.role;
  node.classList.toggle("going", context.going);
  fill(node, {
    speaker: turn.role === "tool" ? `${SPEAKERS.tool} ${turn.name}` : SPEAKERS[turn.role],
    problem: turn.problem ?? "",
    foot: turn.role === "assistant" ? foot(turn, context) : "",
    thinking: thinking(turn),
    thought: turn.thought ?? "",
  });
  node.querySelector(".thought").hidden = !turn.thought;
  if (turn.role === "assistant") render(node.querySelector(".text"), turn.text);
  else write(node.querySelector(".text"), turn.text);
  images(node.querySelector(".images"), turn.images ?? []);
  calls(node.querySelector(".calls"), turn, context);
  buttons(node, turn, context);
}

function thinking({ thought, askedAt, firstAt, answerAt, endedAt }) {
  if (!thought) return "";
  const end = answerAt ?? endedAt;
  return end ? `Reasoned for ${seconds(end - (firstAt ?? askedAt))}` : `Reasoning … ${count(thought.length)} characters`;
}

/** Return the footer: the speed of the answer, or its state while it streams. */
function foot({ usage, firstAt, askedAt, endedAt, finish }, { going, state }) {
  if (going) return state;
  const tokens = usage?.completion_tokens;
  const speed = tokens > 1 && endedAt > firstAt ? `${rate((tokens - 1) / (endedAt - firstAt))}/s` : "";
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  return listed(
    tokens ? plural(tokens, "token") : "", speed, firstAt ? `first token after ${seconds(firstAt - askedAt)}` : "",
    cached ? `${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens from cache` : "",
    finish === "length" ? "token limit reached" : "", state && !finish ? state : "",
  );
}

function images(place, urls) {
  const items = urls.map((url, number) => ({ key: String(number), url }));
  keep(place, items, ({ url }) => element("li", {}, element("img", { src: url, alt: "Sent image" })), () => {});
}

function calls(place, turn, { going, last, actions }) {
  const items = (turn.calls ?? []).map((call, number) => ({ key: String(number), call }));
  keep(place, items, ({ call }) => callCard(call, actions), (node, { call }) => {
    fill(node, { name: call.name, arguments: pretty(call.arguments) });
    node.querySelector(".reply").hidden = going || !last;
  });
}

function callCard(call, actions) {
  const card = copy("call");
  const field = card.querySelector("textarea");
  const send = element("button", { type: "submit", className: "quiet" }, "Send result");
  card.querySelector(".reply").append(element("p", { className: "buttons" }, send));
  card.querySelector(".reply").addEventListener("submit", (event) => {
    event.preventDefault();
    actions.reply(card.querySelector(".called").textContent, Number(card.dataset.key), field.value);
  });
  return card;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // still incomplete
  }
}

function buttons(node, turn, { going, last, actions }) {
  const copyButton = node.querySelector(".copy");
  copyButton.hidden = going || turn.role !== "assistant" || !turn.text || !navigator.clipboard;
  copyButton.onclick = () => navigator.clipboard.writeText(turn.text).then(() => write(copyButton, "Copied"));
  const again = node.querySelector(".again");
  again.hidden = going || turn.role !== "assistant" || !last;
  again.onclick = actions.again;
}
