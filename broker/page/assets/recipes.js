/** Snippets that connect clients to this server: those of protocol/common/client_recipes.toml, filled in. Pure. */

const LOCAL = ["localhost", "127.0.0.1", "[::1]"];
const PLACEHOLDER = /\{\{(\w+)(?:\|(\w+))?\}\}/g;

/**
 * @param {object} data the recipes
 * @param {{origin: string, key: string, model: {id: string, tasks?: string[], context_length?: number}}} server
 *   `key`: empty if the server needs none
 * @returns {{name: string, text: string, note: string}[]} snippets for the tasks of the model
 */
export function recipes(data, server) {
  const facts = factsOf(data, server);
  const tasks = server.model.tasks ?? ["generate"];
  const task = ["generate", "embed"].find((each) => tasks.includes(each)) ?? "rerank";
  return data.clients.filter((client) => client.task === task).map(({ name, agent, body = "", ...client }) => {
    if (agent) {
      const note = lines(data.agent_note, { ...facts, agent });
      return { name, note, text: agentText(agent, data.agents[agent], facts) };
    }
    return { name, note: lines(client.note ?? "", facts), text: lines(client.text, { ...facts, body: filled(body, facts) }) };
  });
}

/** Return the curl command for a request body; `key` is empty if the server needs none. */
export function curlOf(origin, key, path, body) {
  const keyed = key ? ` -H ${quoted(`authorization: Bearer ${key}`)}` : "";
  const head = `curl -N ${quoted(origin + path)} -H 'content-type: application/json'${keyed} -d @-`;
  return `${head} <<'END'\n${JSON.stringify(body, null, 2)}\nEND`;
}

// --- quoting ---

/** Quote a word for a shell, if that is necessary. */
const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);
const literal = (text) => JSON.stringify(text);
const single = (text) => `'${literal(text).slice(1, -1).replaceAll('\\"', '"').replaceAll("'", "\\'")}'`;
const QUOTES = { shell: quoted, json: literal, js: single };

// --- filling in ---

function factsOf(data, { origin, key, model }) {
  const { protocol, hostname, port } = new URL(origin);
  const context = model.context_length;
  const answer = context && Math.max(1, Math.min(data.answer_tokens_max, Math.floor(context / data.answer_share)));
  return {
    origin, openai: `${origin}/v1`, key: key || "none", model: model.id, context, answer,
    authorization: key && key !== "none" ? `authorization: Bearer ${key}` : undefined,
    container: LOCAL.includes(hostname) ? `${protocol}//host.docker.internal${port ? `:${port}` : ""}/v1` : undefined,
    small: context < data.agent_context_min ? data.agent_context_min.toLocaleString("en") : undefined,
  };
}

/** Fill in a value. It is undefined if a fact is unknown; tables leave such entries out. */
function filled(value, facts) {
  if (Array.isArray(value)) return value.map((item) => filled(item, facts));
  if (typeof value === "object") {
    const entries = Object.entries(value).map(([name, item]) => [filled(name, facts), filled(item, facts)]);
    const known = entries.filter(([, item]) => item !== undefined);
    return known.length ? Object.fromEntries(known) : undefined;
  }
  const placeholders = [...value.matchAll(PLACEHOLDER)];
  if (placeholders.some(([, name]) => facts[name] === undefined)) return undefined;
  if (placeholders[0]?.[0] === value && !placeholders[0][2]) return facts[placeholders[0][1]];
  return value.replace(PLACEHOLDER, (_, name, quotes) => (quotes ? QUOTES[quotes](facts[name]) : facts[name]));
}

/** Fill in a text without the lines whose facts are unknown. */
function lines(text, facts) {
  return text.trim().split("\n").map((line) => filled(line, facts)).filter((line) => line !== undefined).join("\n");
}

function agentText(program, { variables, unset = [], words = [] }, facts) {
  const exported = Object.entries(filled(variables, facts)).map(([name, value]) => {
    const text = typeof value === "object" ? JSON.stringify(value, null, 2) : String(value);
    return `export ${name}=${quoted(text)}`;
  });
  const known = filled(words, facts).filter((group) => !group.includes(undefined));
  const command = [program, ...known.map((group) => `  ${group.map(quoted).join(" ")}`)].join(" \\\n");
  return [...exported, ...(unset.length ? [`unset ${unset.join(" ")}`] : []), command].join("\n");
}
