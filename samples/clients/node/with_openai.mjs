// OpenAI's package for Node: chat, a stream, its loop over tools, an answer of a type, responses,
// and a spoken answer.

import { connect } from "node:net";

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { OpenAIRealtimeWS } from "openai/realtime/ws";
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
  tooSmallIf,
} from "./checks.mjs";

const Person = z.object({ name: z.string(), age: z.number().int() });
const asked = (text) => [{ role: "user", content: text }];
const clientOf = (server) => new OpenAI({ baseURL: server.v1, apiKey: server.key });

async function chat(server) {
  const reply = await clientOf(server).chat.completions.create({
    model: server.model,
    messages: asked(QUESTION),
    temperature: 0,
  });
  return said(reply.choices[0].message.content, "Paris");
}

async function stream(server) {
  const events = clientOf(server).chat.completions.stream({
    model: server.model,
    messages: asked(QUESTION),
    temperature: 0,
  });
  return said(await events.finalContent(), "Paris");
}

async function runTools(server) {
  const called = [];
  const look_up_price = (args) => {
    called.push("look_up_price");
    return lookUpPrice(args);
  };
  const body = {
    model: server.model,
    messages: [{ role: "system", content: INSTRUCTIONS }, ...asked(PRICE_QUESTION)],
    temperature: 0,
    max_tokens: MAX_TOKENS,
    tools: [
      {
        type: "function",
        function: {
          name: "look_up_price",
          function: look_up_price,
          parse: JSON.parse,
          description: "Looks up the price of an item in the shop's list.",
          parameters: {
            type: "object",
            properties: { item: { type: "string" } },
            required: ["item"],
          },
        },
      },
    ],
  };
  const runner = clientOf(server).chat.completions.runTools(body, {
    maxChatCompletions: MAX_STEPS,
  });
  const text = await tooSmallIf(/without|limit|content/i, () => runner.finalContent());
  said(String(called), "look_up_price");
  return said(text, "24.9");
}

async function parse(server) {
  const reply = await clientOf(server).chat.completions.parse({
    model: server.model,
    messages: asked(PERSON_TEXT),
    response_format: zodResponseFormat(Person, "person"),
    temperature: 0,
  });
  return said(JSON.stringify(reply.choices[0].message.parsed), "36");
}

async function responses(server) {
  const reply = await clientOf(server).responses.create({
    model: server.model,
    input: QUESTION,
    temperature: 0,
  });
  return said(reply.output_text, "Paris");
}

/** A spoken answer. The server needs a speech model, too. */
async function realtime(server) {
  const talk = new OpenAIRealtimeWS(
    { model: server.model, options: transportOf(server) },
    clientOf(server),
  );
  let numBytes = 0;
  let transcript = "";
  const done = new Promise((resolve, reject) => {
    talk.on("error", reject);
    talk.on("response.output_audio.delta", ({ delta }) => (numBytes += delta.length));
    talk.on("response.output_audio_transcript.done", (event) => ({ transcript } = event));
    talk.on("response.done", resolve);
  });
  talk.socket.on("open", () => {
    talk.send({ type: "session.update", session: { type: "realtime", max_output_tokens: MAX_TOKENS } });
    const content = [{ type: "input_text", text: QUESTION }];
    talk.send({ type: "conversation.item.create", item: { type: "message", role: "user", content } });
    talk.send({ type: "response.create" });
  });
  await done;
  talk.close();
  if (!numBytes) throw new Error("there is no sound");
  return said(transcript, "Paris");
}

/** The package opens wss:// alone. Without HTTPS, the same messages go over a plain connection. */
function transportOf(server) {
  const isPlain = server.url.startsWith("http:");
  return isPlain ? { createConnection: ({ host, port }) => connect(port, host) } : {};
}

await runChecks("openai", [chat, stream, runTools, parse, responses, realtime]);
