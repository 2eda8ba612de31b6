// Ollama's package for Node: chat, a stream, generate, a tool, structured output, the models.

import { Ollama } from "ollama";
import { z } from "zod";
import {
  INSTRUCTIONS,
  MAX_TOKENS,
  PERSON_TEXT,
  PRICE_QUESTION,
  QUESTION,
  lookUpPrice,
  runChecks,
  said,
} from "./checks.mjs";

const Person = z.object({ name: z.string(), age: z.number().int() });
const OPTIONS = { temperature: 0, num_predict: MAX_TOKENS };
const TOOL = {
  type: "function",
  function: {
    name: "look_up_price",
    description: "Looks up the price of an item in the shop's list.",
    parameters: {
      type: "object",
      properties: { item: { type: "string" } },
      required: ["item"],
    },
  },
};

/** A client for the server, whose address has no /v1 here. */
const clientOf = (server) => new Ollama({ host: server.url });
const asked = (text) => [{ role: "user", content: text }];
const asking = (server, messages) => ({ model: server.model, messages, options: OPTIONS });

async function chat(server) {
  const reply = await clientOf(server).chat(asking(server, asked(QUESTION)));
  return said(reply.message.content, "Paris");
}

async function stream(server) {
  const parts = await clientOf(server).chat({ ...asking(server, asked(QUESTION)), stream: true });
  let text = "";
  for await (const part of parts) text += part.message.content;
  return said(text, "Paris");
}

async function generate(server) {
  const body = { model: server.model, prompt: QUESTION, options: OPTIONS };
  return said((await clientOf(server).generate(body)).response, "Paris");
}

async function tools(server) {
  const client = clientOf(server);
  const messages = [{ role: "system", content: INSTRUCTIONS }, ...asked(PRICE_QUESTION)];
  const reply = await client.chat({ ...asking(server, messages), tools: [TOOL] });
  messages.push(reply.message);
  for (const { function: called } of reply.message.tool_calls ?? []) {
    const content = lookUpPrice(called.arguments);
    messages.push({ role: "tool", tool_name: called.name, content });
  }
  said(JSON.stringify(reply.message.tool_calls), "look_up_price");
  return said((await client.chat(asking(server, messages))).message.content, "24.9");
}

async function structured(server) {
  const body = { ...asking(server, asked(PERSON_TEXT)), format: z.toJSONSchema(Person) };
  const reply = await clientOf(server).chat(body);
  return said(JSON.stringify(Person.parse(JSON.parse(reply.message.content))), "36");
}

async function models(server) {
  const client = clientOf(server);
  const names = (await client.list()).models.map((model) => model.name);
  said(String(names), server.model);
  return `${names} ${(await client.show({ model: server.model })).capabilities}`;
}

await runChecks("ollama", [chat, stream, generate, tools, structured, models]);
