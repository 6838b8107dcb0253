// Checks of a smoke: a line for each, and `passed/total` last. Told by BASE_URL, MODEL and API_KEY.
import { z } from 'zod';

export const BASE = process.env.BASE_URL;
export const V1 = `${BASE}/v1`;
export const MODEL = process.env.MODEL;
export const KEY = process.env.API_KEY ?? 'none';
export const ASKED = 'Say something.';
export const CITIES = ['Paris', 'Rome'];
export const WEATHER = {
  type: 'object',
  properties: { city: { type: 'string', enum: CITIES } },
  required: ['city'],
  additionalProperties: false,
};
export const Thing = z.object({ colour: z.enum(['red', 'green']), ok: z.boolean() });

let passed = 0;
let total = 0;

export async function check(name, run) {
  const began = performance.now();
  let wrong = '';
  try {
    await run();
    passed += 1;
  } catch (error) {
    wrong = `  ${error.name}: ${error.message}`.replace(/\s*\n\s*/g, ' ').slice(0, 300);
  }
  total += 1;
  const seconds = ((performance.now() - began) / 1000).toFixed(2);
  console.log(`${wrong ? 'FAIL' : 'OK  '} ${name} ${seconds} s${wrong}`);
}

export function end() {
  console.log(`${passed}/${total}`);
  process.exit(passed === total ? 0 : 1);
}
