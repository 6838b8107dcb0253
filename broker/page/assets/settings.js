/** Converts the fields of the settings form to API parameters. Pure. */

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "presence_penalty", "repetition_penalty", "max_tokens", "seed",
  "thinking_budget",
];

/**
 * @param fields the text of every form field by name; empty: the server's default
 * @returns {{parameters: object, problem: string}} `problem`: why the settings are invalid
 */
export function parameters(fields) {
  try {
    return { parameters: { ...numbers(fields), ...texts(fields), ...format(fields), ...tools(fields) }, problem: "" };
  } catch (error) {
    return { parameters: {}, problem: error.message };
  }
}

/** Return the number of settings that are set, without the system prompt. */
export const chosen = ({ system, ...fields }) => Object.values(fields).filter((value) => value.trim()).length;

function numbers(fields) {
  const given = NUMBERS.filter((name) => fields[name]?.trim());
  return Object.fromEntries(given.map((name) => [name, number(name, fields[name])]));
}

function number(name, text) {
  const value = Number(text);
  if (Number.isNaN(value)) throw new Error(`${name} must be a number.`);
  return value;
}

function texts({ enable_thinking: thinking, stop = "" }) {
  const strings = stop.split("\n").filter(Boolean);
  return {
    ...(thinking ? { enable_thinking: thinking === "true" } : {}),
    ...(strings.length ? { stop: strings } : {}),
  };
}

function format({ response_format: wanted, schema = "" }) {
  if (!wanted) return {};
  if (wanted === "json_object") return { response_format: { type: "json_object" } };
  return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: json("schema", schema) } } };
}

function tools({ tools: list = "", tool_choice: choice }) {
  if (!list.trim()) return {};
  const found = json("tools", list);
  if (!Array.isArray(found)) throw new Error("tools must be a list.");
  const offered = found.map((tool) => (tool.function ? tool : { type: "function", function: tool }));
  return { tools: offered, ...(choice ? { tool_choice: choice } : {}) };
}

function json(what, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} must be JSON: ${error.message}`);
  }
}
