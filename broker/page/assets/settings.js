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
    return { parameters: { ...numbers(fields), ...texts(fields), ...form(fields), ...tools(fields) }, problem: "" };
  } catch (error) {
    return { parameters: {}, problem: error.message };
  }
}

/** Return the number of fields that are set. */
export const chosen = (fields) => Object.values(fields).filter((value) => value.trim()).length;

function numbers(fields) {
  const given = NUMBERS.filter((name) => fields[name]?.trim());
  return Object.fromEntries(given.map((name) => [name, number(name, fields[name])]));
}

function number(name, text) {
  const value = Number(text);
  if (Number.isNaN(value)) throw new Error(`${name} must be a number.`);
  return value;
}

function texts({ thinking, stop = "" }) {
  const strings = stop.split("\n").filter(Boolean);
  return {
    ...(thinking ? { enable_thinking: thinking === "on" } : {}),
    ...(strings.length ? { stop: strings } : {}),
  };
}

function form({ form: wanted, schema = "" }) {
  if (!wanted) return {};
  if (wanted === "json_object") return { response_format: { type: "json_object" } };
  return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: json("The schema", schema) } } };
}

function tools({ tools: list = "", tool_choice: choice }) {
  if (!list.trim()) return {};
  const found = json("The tools", list);
  if (!Array.isArray(found)) throw new Error("The tools must be a list.");
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
