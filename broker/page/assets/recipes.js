/**
 * Snippets that connect clients to this server. Pure.
 *
 * They are those of docs/clients.md, and for agents those of `roundhouse launch`; tests compare them.
 */

const PROMPT = "Count from 3 to 6.";
const MESSAGES = [{ role: "user", content: PROMPT }];
const NO_KEY = "none";

const ANSWER_SHARE = 4; // of the context, which agents reserve for the answer
const ANSWER_TOKENS_MAX = 32_000;
const AGENT_CONTEXT_MIN = 32_000;

/**
 * @param {{origin: string, key: string, model: {id: string, tasks?: string[], context_length?: number}}} server
 *   `key`: empty if the server needs none
 * @returns {{name: string, text: string, note: string}[]} snippets for the tasks of the model
 */
export function recipes({ origin, key, model }) {
  const server = { origin, openai: `${origin}/v1`, key: key || NO_KEY, model };
  const tasks = model.tasks ?? ["generate"];
  const found = tasks.includes("generate") ? GENERATE : tasks.includes("embed") ? EMBED : RERANK;
  return found.map(([name, make]) => ({ name, note: "", ...make(server) }));
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

/** Return a string literal of Python or JavaScript. */
const literal = (text) => JSON.stringify(text);
const single = (text) => `'${literal(text).slice(1, -1).replaceAll('\\"', '"').replaceAll("'", "\\'")}'`;

/** Return JSON on one line, with spaces. Newlines are never within its strings. */
function line(value) {
  const text = JSON.stringify(value, null, 1);
  return text.replace(/([{[])\n\s*/g, "$1").replace(/\n\s*([}\]])/g, "$1").replace(/\n\s*/g, " ");
}

const exported = (variables) => Object.entries(variables).map(([name, value]) => `export ${name}=${quoted(value)}`);

// --- APIs ---

function curl({ origin, key }, path, body) {
  const keyed = key === NO_KEY ? "" : `  -H ${quoted(`authorization: Bearer ${key}`)} \\\n`;
  const head = `curl ${quoted(origin + path)} -H 'content-type: application/json' \\\n`;
  return { text: `${head}${keyed}  -d ${quoted(line(body))}` };
}

const openai = ({ openai: url, key }) => [
  "from openai import OpenAI", "", `client = OpenAI(base_url=${literal(url)}, api_key=${literal(key)})`,
];

const python = (server) => ({
  note: "First: pip install openai",
  text: [
    ...openai(server),
    `messages = ${line(MESSAGES)}`,
    `for chunk in client.chat.completions.create(model=${literal(server.model.id)}, messages=messages, stream=True):`,
    '    print(chunk.choices[0].delta.content or "", end="", flush=True)',
  ].join("\n"),
});

const javascript = ({ openai: url, key, model }) => ({
  note: "First: npm install openai",
  text: [
    "import OpenAI from 'openai';", "",
    `const client = new OpenAI({ baseURL: ${single(url)}, apiKey: ${single(key)} });`,
    `const messages = [{ role: 'user', content: ${single(PROMPT)} }];`,
    `const stream = await client.chat.completions.create({ model: ${single(model.id)}, messages, stream: true });`,
    "for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta?.content ?? '');",
  ].join("\n"),
});

const anthropic = ({ origin, key, model }) => ({
  note: "First: pip install anthropic",
  text: [
    "from anthropic import Anthropic", "",
    `client = Anthropic(base_url=${literal(origin)}, api_key=${literal(key)})`,
    `messages = ${line(MESSAGES)}`,
    `with client.messages.stream(model=${literal(model.id)}, max_tokens=64, messages=messages) as stream:`,
    "    for text in stream.text_stream:",
    '        print(text, end="", flush=True)',
  ].join("\n"),
});

function openWebui({ origin, openai: url, key }) {
  const { protocol, hostname, port } = new URL(origin);
  const near = ["localhost", "127.0.0.1", "[::1]"].includes(hostname);
  const host = `${protocol}//host.docker.internal${port ? `:${port}` : ""}/v1`;
  return {
    note: near ? `In a container, use ${host}: serve with --host 0.0.0.0 and API keys.` : "",
    text: [
      `export OPENAI_API_BASE_URL=${quoted(url)} OPENAI_API_KEY=${quoted(key)} ENABLE_OLLAMA_API=False`,
      "open-webui serve --port 3000",
    ].join("\n"),
  };
}

// --- agents ---

const answerTokens = (context) => Math.max(1, Math.min(ANSWER_TOKENS_MAX, Math.floor(context / ANSWER_SHARE)));

function agentNote(agent, { origin, model }) {
  const launch = `With Roundhouse installed: roundhouse launch ${agent} --url ${quoted(origin)} --model ${quoted(model.id)}`;
  const small = model.context_length && model.context_length < AGENT_CONTEXT_MIN;
  return small ? `${launch}\nThe context of this model is too small for agents, which need 32,000 tokens.` : launch;
}

function claude(server) {
  const { origin, key, model } = server;
  const kinds = ["", "SMALL_FAST_", "DEFAULT_HAIKU_", "DEFAULT_SONNET_", "DEFAULT_OPUS_"];
  const context = model.context_length && {
    CLAUDE_CODE_MAX_CONTEXT_TOKENS: String(model.context_length),
    CLAUDE_CODE_MAX_OUTPUT_TOKENS: String(answerTokens(model.context_length)),
  };
  const variables = {
    ANTHROPIC_BASE_URL: origin,
    ...Object.fromEntries(kinds.map((kind) => [`ANTHROPIC_${kind}MODEL`, model.id])),
    CLAUDE_CODE_SUBAGENT_MODEL: model.id,
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
    CLAUDE_CODE_ATTRIBUTION_HEADER: "0",
    ...context,
    ANTHROPIC_AUTH_TOKEN: key,
  };
  const elsewhere = [
    "ANTHROPIC_API_KEY", "CLAUDE_CODE_OAUTH_TOKEN", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_FOUNDRY", "CLAUDE_CODE_USE_VERTEX",
  ];
  return { note: agentNote("claude", server), text: [...exported(variables), `unset ${elsewhere.join(" ")}`, "claude"].join("\n") };
}

function codex(server) {
  const { openai: url, key, model } = server;
  const provider = "model_providers.roundhouse";
  const settings = {
    model_provider: "roundhouse",
    model: model.id,
    [`${provider}.name`]: "Roundhouse",
    [`${provider}.base_url`]: url,
    [`${provider}.wire_api`]: "responses",
    [`${provider}.env_key`]: "ROUNDHOUSE_API_KEY",
    ...(model.context_length && { model_context_window: model.context_length }),
  };
  const words = Object.entries(settings).map(([name, value]) => `  -c ${quoted(`${name}=${JSON.stringify(value)}`)}`);
  return {
    note: agentNote("codex", server),
    text: [...exported({ ROUNDHOUSE_API_KEY: key }), ["codex", ...words].join(" \\\n")].join("\n"),
  };
}

function opencode(server) {
  const { openai: url, key, model } = server;
  const limit = model.context_length && { limit: { context: model.context_length, output: answerTokens(model.context_length) } };
  const named = `roundhouse/${model.id}`;
  const provider = {
    npm: "@ai-sdk/openai-compatible",
    name: "Roundhouse",
    options: { baseURL: url, apiKey: key },
    models: { [model.id]: { name: model.id, ...limit } },
  };
  const config = JSON.stringify({ provider: { roundhouse: provider }, model: named, small_model: named }, null, 2);
  return { note: agentNote("opencode", server), text: [...exported({ OPENCODE_CONFIG_CONTENT: config }), "opencode"].join("\n") };
}

// --- by task ---

const GENERATE = [
  ["curl", (server) => curl(server, "/v1/chat/completions", { model: server.model.id, messages: MESSAGES, max_tokens: 32 })],
  ["Python", python], ["JavaScript", javascript], ["Anthropic SDK", anthropic],
  ["Claude Code", claude], ["Codex", codex], ["opencode", opencode], ["Open WebUI", openWebui],
];

const EMBED = [
  ["curl", (server) => curl(server, "/v1/embeddings", { model: server.model.id, input: ["A text.", "Another text."] })],
  ["Python", (server) => ({
    note: "First: pip install openai",
    text: [
      ...openai(server),
      `answer = client.embeddings.create(model=${literal(server.model.id)}, input=["A text.", "Another text."])`,
      "print(len(answer.data), len(answer.data[0].embedding))",
    ].join("\n"),
  })],
];

const RERANK = [
  ["curl", (server) => curl(server, "/v1/rerank", {
    model: server.model.id, query: "What is grass like?", documents: ["Grass is green.", "Snow is white."],
  })],
];
