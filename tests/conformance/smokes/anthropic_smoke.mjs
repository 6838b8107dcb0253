// The `@anthropic-ai/sdk` package: messages.
import assert from 'node:assert/strict';
import Anthropic from '@anthropic-ai/sdk';
import { zodOutputFormat } from '@anthropic-ai/sdk/helpers/zod';
import { ASKED, BASE, CITIES, KEY, MODEL, Thing, WEATHER, check, end } from './checks.mjs';

const client = new Anthropic({ baseURL: BASE, apiKey: KEY, maxRetries: 0 });
const asked = { model: MODEL, max_tokens: 200, messages: [{ role: 'user', content: ASKED }] };
const tools = [{ name: 'get_weather', input_schema: WEATHER }];

await check('plain', async () => {
  const answer = await client.messages.create(asked);
  assert(answer.content[0].text && answer.usage.output_tokens);
});
await check('streamed', async () => {
  const stream = client.messages.stream(asked);
  const pieces = [];
  stream.on('text', (text) => pieces.push(text));
  const whole = await stream.finalMessage();
  assert(pieces.length > 1);
  assert.equal(pieces.join(''), whole.content.filter((block) => block.type === 'text').map((block) => block.text).join(''));
});
await check('tool', async () => {
  const answer = await client.messages.create({ ...asked, tools, tool_choice: { type: 'any' } });
  assert(CITIES.includes(answer.content.find((block) => block.type === 'tool_use').input.city));
});
await check('tool_streamed', async () => {
  const answer = await client.messages.stream({ ...asked, tools, tool_choice: { type: 'any' } }).finalMessage();
  assert(CITIES.includes(answer.content.find((block) => block.type === 'tool_use').input.city));
});
await check('structured', async () => {
  const output_config = { format: zodOutputFormat(Thing) };
  Thing.parse((await client.messages.parse({ ...asked, output_config })).parsed_output);
});
end();
