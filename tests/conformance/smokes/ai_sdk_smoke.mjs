// The AI SDK, by its providers for servers like ours: @ai-sdk/openai-compatible, /openai and /anthropic.
import assert from 'node:assert/strict';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { Output, generateText, streamText, tool } from 'ai';
import { z } from 'zod';
import { ASKED, CITIES, KEY, MODEL, Thing, V1, check, end } from './checks.mjs';

const told = { baseURL: V1, apiKey: KEY };
const MODELS = {
  compatible: createOpenAICompatible({ ...told, name: 'here', supportsStructuredOutputs: true })(MODEL),
  chat: createOpenAI(told).chat(MODEL),
  responses: createOpenAI(told).responses(MODEL),
  messages: createAnthropic(told)(MODEL),
};
const Asked = z.object({ city: z.enum(CITIES), tags: z.record(z.string(), z.enum(CITIES)) });
const get_weather = tool({ description: 'The weather in a city', inputSchema: Asked });

for (const [name, model] of Object.entries(MODELS)) {
  const asked = { model, prompt: ASKED, maxRetries: 0, maxOutputTokens: 200 };
  await check(`${name}.plain`, async () => {
    const answer = await generateText(asked);
    assert(answer.text && answer.usage.outputTokens);
  });
  await check(`${name}.streamed`, async () => {
    const pieces = [];
    const answer = streamText({ ...asked, onError: ({ error }) => { throw error; } });
    for await (const piece of answer.textStream) pieces.push(piece);
    assert(pieces.length > 1);
    assert.equal(pieces.join(''), await answer.text);
  });
  await check(`${name}.tool`, async () => {
    const answer = await generateText({ ...asked, tools: { get_weather }, toolChoice: 'required' });
    Asked.parse(answer.toolCalls[0].input);
  });
  await check(`${name}.structured`, async () => {
    Thing.parse((await generateText({ ...asked, output: Output.object({ schema: Thing }) })).output);
  });
}
end();
