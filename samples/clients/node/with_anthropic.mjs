// Anthropic's package for Node: messages, a stream, a tool, counting.

import Anthropic from "@anthropic-ai/sdk";
import {
  INSTRUCTIONS,
  MAX_TOKENS,
  PRICE_QUESTION,
  QUESTION,
  lookUpPrice,
  runChecks,
  said,
} from "./checks.mjs";

const TOOL = {
  name: "look_up_price",
  description: "Looks up the price of an item.",
  input_schema: {
    type: "object",
    properties: { item: { type: "string" } },
    required: ["item"],
  },
};

/** A client for the server, whose address has no /v1 here. */
const clientOf = (server) => new Anthropic({ baseURL: server.url, apiKey: server.key });
const asked = (text) => [{ role: "user", content: text }];
const asking = (server) => ({ model: server.model, max_tokens: MAX_TOKENS, temperature: 0 });
const textOf = (message) =>
  message.content
    .filter((block) => block.type === "text")
    .map((block) => block.text)
    .join("");

async function message(server) {
  const reply = await clientOf(server).messages.create({
    ...asking(server),
    messages: asked(QUESTION),
    system: "You answer in one sentence.",
  });
  said(reply.stop_reason, "end_turn");
  return said(textOf(reply), "Paris");
}

async function stream(server) {
  let text = "";
  const events = clientOf(server).messages.stream({ ...asking(server), messages: asked(QUESTION) });
  events.on("text", (part) => (text += part));
  said(textOf(await events.finalMessage()), text);
  return said(text, "Paris");
}

async function tools(server) {
  const client = clientOf(server);
  const body = { ...asking(server), tools: [TOOL], system: INSTRUCTIONS };
  const messages = asked(PRICE_QUESTION);
  const reply = await client.messages.create({ ...body, messages, tool_choice: { type: "any" } });
  said(reply.stop_reason, "tool_use");
  const results = reply.content
    .filter((block) => block.type === "tool_use")
    .map(({ id, input }) => ({
      type: "tool_result",
      tool_use_id: id,
      content: lookUpPrice(input),
    }));
  messages.push({ role: "assistant", content: reply.content }, { role: "user", content: results });
  const answer = await client.messages.create({ ...body, messages, tool_choice: { type: "none" } });
  return said(textOf(answer), "24.9");
}

async function countTokens(server) {
  const counted = await clientOf(server).messages.countTokens({
    model: server.model,
    messages: asked(QUESTION),
  });
  if (!(counted.input_tokens > 0)) throw new Error("no tokens were counted");
  return `${counted.input_tokens} tokens`;
}

await runChecks("@anthropic-ai/sdk", [message, stream, tools, countTokens]);
