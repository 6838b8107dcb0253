// An extension for pi that registers the endpoint which `roundhouse launch pi` has found (deploy/agents/profiles.py).
export default function (pi) {
  const { baseUrl, model, ...limits } = JSON.parse(process.env.ROUNDHOUSE_PI);
  const served = {
    id: model,
    name: model,
    reasoning: false,
    input: ["text"],
    cost: { input: 0, output: 0, cacheRead: 0, cacheWrite: 0 },
    contextWindow: 32768, // where it is not known
    maxTokens: 8192,
    ...limits,
  };
  pi.registerProvider("roundhouse", {
    name: "Roundhouse",
    baseUrl,
    apiKey: "ROUNDHOUSE_API_KEY", // the variable's name
    api: "openai-completions",
    models: [served],
  });
}
