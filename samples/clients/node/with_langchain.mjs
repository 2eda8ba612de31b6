// LangChain for JavaScript: an answer, a stream, structured output, an agent with a tool.

import { ChatOpenAI } from "@langchain/openai";
import { createAgent, tool } from "langchain";
import { z } from "zod";
import {
  MAX_STEPS,
  MAX_TOKENS,
  PERSON_TEXT,
  PRICE_QUESTION,
  QUESTION,
  lookUpPrice,
  runChecks,
  said,
  tooSmallIf,
} from "./checks.mjs";

const Person = z.object({ name: z.string(), age: z.number().int() });

const modelOf = (server) =>
  new ChatOpenAI({
    model: server.model,
    temperature: 0,
    maxTokens: MAX_TOKENS,
    apiKey: server.key,
    configuration: { baseURL: server.v1 },
  });

async function invoke(server) {
  return said((await modelOf(server).invoke(QUESTION)).text, "Paris");
}

async function stream(server) {
  let text = "";
  for await (const part of await modelOf(server).stream(QUESTION)) text += part.text;
  return said(text, "Paris");
}

async function structured(server, method) {
  const model = modelOf(server).withStructuredOutput(Person, { method });
  return said(JSON.stringify(await model.invoke(PERSON_TEXT)), "36");
}

const jsonSchema = (server) => structured(server, "jsonSchema");
const jsonMode = (server) => structured(server, "jsonMode");
const functionCalling = (server) => structured(server, "functionCalling");

async function agent(server) {
  const lookUp = tool(lookUpPrice, {
    name: "look_up_price",
    description: "Looks up the price of an item in the shop's list.",
    schema: z.object({ item: z.string() }),
  });
  const answering = createAgent({ model: modelOf(server), tools: [lookUp] });
  const asked = { messages: [{ role: "user", content: PRICE_QUESTION }] };
  const { messages } = await tooSmallIf(/recursion/i, () =>
    answering.invoke(asked, { recursionLimit: 2 * MAX_STEPS }),
  );
  const calls = messages.flatMap((message) => message.tool_calls ?? []);
  said(JSON.stringify(calls), "look_up_price");
  return said(messages.at(-1).text, "24.9");
}

await runChecks("langchain", [invoke, stream, jsonSchema, functionCalling, jsonMode, agent]);
