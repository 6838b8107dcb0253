// The `openai` package: chat and responses.
import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { zodResponseFormat, zodTextFormat } from 'openai/helpers/zod';
import { ASKED, CITIES, KEY, MODEL, Thing, V1, WEATHER, check, end } from './checks.mjs';

const client = new OpenAI({ baseURL: V1, apiKey: KEY, maxRetries: 0 });
const asked = { model: MODEL, messages: [{ role: 'user', content: ASKED }] };
const tools = [{ type: 'function', function: { name: 'get_weather', parameters: WEATHER } }];

await check('chat', async () => {
  const answer = await client.chat.completions.create({ ...asked, max_tokens: 12 });
  assert(answer.choices[0].message.content && answer.usage.completion_tokens);
});
await check('chat_streamed', async () => {
  const stream = client.chat.completions.stream({ ...asked, max_tokens: 12 });
  const pieces = [];
  stream.on('content.delta', ({ delta }) => pieces.push(delta));
  const whole = await stream.finalChatCompletion();
  assert(pieces.length > 1);
  assert.equal(pieces.join(''), whole.choices[0].message.content);
});
await check('chat_tool', async () => {
  const answer = await client.chat.completions.create({ ...asked, tools, tool_choice: 'required' });
  assert(CITIES.includes(JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments).city));
});
await check('chat_structured', async () => {
  const response_format = zodResponseFormat(Thing, 'thing');
  const answer = await client.chat.completions.parse({ ...asked, response_format });
  Thing.parse(answer.choices[0].message.parsed);
});
await check('responses', async () => {
  assert((await client.responses.create({ model: MODEL, input: ASKED, max_output_tokens: 16 })).output_text);
});
await check('responses_streamed', async () => {
  const stream = client.responses.stream({ model: MODEL, input: ASKED, max_output_tokens: 16 });
  let said = '';
  stream.on('response.output_text.delta', ({ delta }) => { said += delta; });
  const whole = await stream.finalResponse();
  assert.equal(said, whole.output_text);
  assert(said);
});
await check('responses_tool', async () => {
  const functions = [{ type: 'function', name: 'get_weather', parameters: WEATHER, strict: true }];
  const asking = { model: MODEL, input: ASKED, tools: functions, tool_choice: 'required' };
  const call = (await client.responses.create(asking)).output.find((item) => item.type === 'function_call');
  assert(CITIES.includes(JSON.parse(call.arguments).city));
});
await check('responses_structured', async () => {
  const text = { format: zodTextFormat(Thing, 'thing') };
  Thing.parse((await client.responses.parse({ model: MODEL, input: ASKED, text })).output_parsed);
});
end();
