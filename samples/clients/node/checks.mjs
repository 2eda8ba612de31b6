// Shared code of the scripts of Node's clients; prints the same lines as ../checks.py.

import { readFile } from "node:fs/promises";
import { parseArgs } from "node:util";

const MAX_CHARACTERS = 160;

export const QUESTION = "What is the capital of France?";
export const PRICE_QUESTION = "What is the price of a lamp?";
export const PERSON_TEXT =
  "Ada Lovelace was 36 years old. Give her name and her age as a JSON object.";
export const INSTRUCTIONS =
  "Use the tools: calculate for arithmetic, look_up_price for prices." +
  " Then answer in one short sentence.";
export const MAX_TOKENS = 200;
/** Limit of an agent's turns: small models do not always stop by themselves. */
export const MAX_STEPS = 3;
const PRICES = { apple: "0.40", notebook: "3.25", lamp: "24.90", desk: "189.00" };

/** The answer was whole and well-formed, but not good enough. */
class TooSmall extends Error {}

/** The tool that agents use. */
export function lookUpPrice({ item }) {
  const price = PRICES[item.trim().toLowerCase()];
  return price ? `${price} euros` : `error: no ${item}`;
}

/** Return `text`, which must contain `expected`. */
export function said(text, expected) {
  if (!(text ?? "").toLowerCase().includes(expected.toLowerCase())) {
    throw new TooSmall(`'${expected}' is not in '${text}'`);
  }
  return text;
}

/** The error of a client at the last step. */
export async function tooSmallIf(pattern, work) {
  try {
    return await work();
  } catch (error) {
    throw pattern.test(`${error.name} ${error.message}`) ? new TooSmall(error.message) : error;
  }
}

/** Run the checks, print a line for each, and exit with 1 if one failed. */
export async function runChecks(name, checks) {
  const { values } = parseArgs({
    options: {
      url: { type: "string", default: "http://127.0.0.1:8000" },
      model: { type: "string", default: "qwen2.5-coder-0.5b" },
      key: { type: "string", default: "none" },
      only: { type: "string", default: "" },
    },
  });
  const server = { ...values, v1: `${values.url.replace(/\/+$/, "")}/v1` };
  const manifest = new URL(`node_modules/${name}/package.json`, import.meta.url);
  console.log(`client ${name} ${JSON.parse(await readFile(manifest, "utf8")).version}`);
  let failed = false;
  for (const check of checks) {
    if (values.only && check.name !== values.only) continue;
    const started = Date.now();
    let verdict = "works";
    let result;
    try {
      result = String(await check(server));
    } catch (error) {
      verdict = error instanceof TooSmall ? "small" : "fails";
      result = error instanceof TooSmall ? error.message : `${error.name}: ${error.message}`;
    }
    failed ||= verdict === "fails";
    const taken = `(${Math.round((Date.now() - started) / 1000)} s)`;
    const line = result.split(/\s+/).join(" ").slice(0, MAX_CHARACTERS);
    console.log(verdict, check.name, taken, line);
  }
  process.exit(failed ? 1 : 0);
}
