/** Renders the conversation. */

import { copyText } from "./clipboard.js";
import { byId, copy, element, fill, keep, write } from "./dom.js";
import { count, listed, plural, rate, seconds } from "./formats.js";
import { render } from "./prose.js";

const NEAR_PX = 60;

/**
 * @param turns see `chat`; @param going whether the last one is streaming; @param state its status line meanwhile
 * @param editing the number of the turn that is edited, if any
 * @param actions {again(), edit(number), drop(number), change(number, text), reply(call, text)}
 */
export function show(turns, { going, state, editing, actions }) {
  const talk = byId("talk");
  const atEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < NEAR_PX;
  const items = turns.map((turn, place) => ({ key: `${turn.number} ${turn.role}`, turn, last: place === turns.length - 1 }));
  keep(byId("turns"), items, () => copy("turn"), (node, { turn, last }) => {
    one(node, turn, { going: going && last, idle: !going, last, state, edited: turn.number === editing, actions });
  });
  if (atEnd) talk.scrollTop = talk.scrollHeight;
}

const speaker = (turn) => ({ user: "You", assistant: turn.model, tool: `Result of ${turn.name}` })[turn.role];

function one(node, turn, context) {
  node.dataset.role = turn.role;
  node.classList.toggle("going", context.going);
  fill(node, {
    speaker: speaker(turn),
    problem: turn.problem ?? "",
    foot: turn.role === "assistant" ? foot(turn, context) : turn.lost ? `${plural(turn.lost, "image")} not stored` : "",
    thinking: thinking(turn),
    thought: turn.thought ?? "",
  });
  node.querySelector(".thought").hidden = !turn.thought;
  if (turn.role === "assistant") render(node.querySelector(".text"), turn.text);
  else write(node.querySelector(".text"), turn.text);
  images(node.querySelector(".images"), turn.images ?? []);
  calls(node.querySelector(".calls"), turn, context);
  editor(node, turn, context);
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
    finish === "length" ? "token limit reached" : "", finish === "stopped" ? "stopped" : "", state && !finish ? state : "",
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

/** Show the editor of a question in place of its text, or remove it. */
function editor(node, turn, { edited, last, actions }) {
  const there = node.querySelector(".edit");
  node.querySelector(".text").hidden = edited;
  if (!edited) return there?.remove();
  if (there) return undefined;
  const form = copy("edit");
  const field = form.querySelector("textarea");
  const leave = () => { actions.edit(null); node.querySelector(".change").focus(); };
  field.value = turn.text;
  write(form.querySelector(".hint"), last ? "" : "Replaces the turns that follow.");
  form.querySelector(".cancel").addEventListener("click", leave);
  form.addEventListener("keydown", (event) => { if (event.key === "Escape") leave(); });
  form.addEventListener("submit", (event) => { event.preventDefault(); actions.change(turn.number, field.value.trim()); });
  node.querySelector(".text").after(form);
  return field.focus();
}

function buttons(node, turn, { idle, last, edited, actions }) {
  const is = (role) => idle && !edited && turn.role === role;
  const set = (name, shown, act) => {
    const button = node.querySelector(name);
    button.hidden = !shown;
    button.onclick = act;
  };
  set(".copy", is("assistant") && turn.text, (event) => copyText(event.currentTarget, turn.text));
  set(".change", is("user"), () => actions.edit(turn.number));
  set(".drop", is("user"), () => actions.drop(turn.number));
  set(".again", is("assistant") && last, actions.again);
}
