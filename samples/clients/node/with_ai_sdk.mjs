// Vercel's AI SDK: text, a stream, tools in steps, objects; and OpenAI's provider on responses.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import {
  INSTRUCTIONS,
  MAX_STEPS,
  MAX_TOKENS,
  PERSON_TEXT,
  PRICE_QUESTION,
  QUESTION,
  lookUpPrice,
  runChecks,
  said,
} from "./checks.mjs";

const Person = z.object({ name: z.string(), age: z.number().int() });

const modelOf = (server) =>
  createOpenAICompatible({
    name: "triptych",
    baseURL: server.v1,
    apiKey: server.key,
    supportsStructuredOutputs: true,
  })(server.model);

const tools = {
  look_up_price: tool({
    description: "Looks up the price of an item in the shop's list.",
    inputSchema: z.object({ item: z.string() }),
    execute: async (args) => lookUpPrice(args),
  }),
};

async function text(server) {
  const reply = await generateText({ model: modelOf(server), prompt: QUESTION, temperature: 0, maxOutputTokens: MAX_TOKENS });
  return said(reply.text, "Paris");
}

async function stream(server) {
  const reply = streamText({ model: modelOf(server), prompt: QUESTION, temperature: 0, maxOutputTokens: MAX_TOKENS });
  let text = "";
  for await (const part of reply.textStream) text += part;
  return said(text, "Paris");
}

async function requiredTool(server) {
  const reply = await generateText({
    model: modelOf(server),
    prompt: PRICE_QUESTION,
    tools,
    toolChoice: "required",
    temperature: 0,
    maxOutputTokens: MAX_TOKENS,
  });
  return said(JSON.stringify(reply.toolResults), "24.9");
}

async function toolsInSteps(server) {
  const reply = await generateText({
    model: modelOf(server),
    prompt: PRICE_QUESTION,
    system: INSTRUCTIONS,
    tools,
    stopWhen: stepCountIs(MAX_STEPS),
    // Small models keep calling tools if they can.
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
    temperature: 0,
    maxOutputTokens: MAX_TOKENS,
  });
  const called = reply.steps.flatMap((step) => step.toolCalls.map((call) => call.toolName));
  said(String(called), "look_up_price");
  return said(reply.text, "24.9");
}

async function object(server) {
  const reply = await generateObject({
    model: modelOf(server),
    schema: Person,
    prompt: PERSON_TEXT,
    temperature: 0,
    maxOutputTokens: MAX_TOKENS,
  });
  return said(JSON.stringify(reply.object), "36");
}

async function streamedObject(server) {
  const reply = streamObject({
    model: modelOf(server),
    schema: Person,
    prompt: PERSON_TEXT,
    temperature: 0,
    maxOutputTokens: MAX_TOKENS,
  });
  for await (const part of reply.partialObjectStream) void part;
  return said(JSON.stringify(await reply.object), "36");
}

async function responses(server) {
  const model = createOpenAI({ baseURL: server.v1, apiKey: server.key })(server.model);
  const reply = await generateText({ model, prompt: QUESTION, temperature: 0, maxOutputTokens: MAX_TOKENS });
  return said(reply.text, "Paris");
}

await runChecks("ai", [
  text,
  stream,
  requiredTool,
  toolsInSteps,
  object,
  streamedObject,
  responses,
]);
