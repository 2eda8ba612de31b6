// A demo for an idle timeline: requests of all kinds at once, their answers unread.

import { call } from "../api.js";
import { DRAW } from "../examples.js";

const TEXT = "The ferry left at noon, and the gulls followed it across the bay. ";
const STORY = "Tell me a long story about a lighthouse.";
const NUM_EMBEDDINGS = 10;
const EMBEDDING_EVERY_MS = 450;

const REQUESTS = {
  chat: (model, seed) => [
    "/v1/chat/completions",
    { model, messages: [{ role: "user", content: STORY }], max_tokens: 200, seed },
  ],
  speech: (model) => ["/v1/audio/speech", { model, input: TEXT.repeat(4), response_format: "pcm" }],
  image: (model, seed) => ["/v1/images/generations", { model, prompt: DRAW[1], n: 2, seed }],
};

/** Send the requests. Resolves when all are answered; throws if one fails. */
export async function runDemo(models) {
  const sent = models.flatMap((model, index) => {
    const request = model.input_modalities ? null : REQUESTS[model.task];
    return request ? [post(...request(model.id, index))] : [];
  });
  const embedder = models.find((model) => model.task === "embedding");
  if (embedder) sent.push(embedNowAndThen(embedder.id));
  await Promise.all(sent);
}

async function embedNowAndThen(model) {
  for (let turn = 0; turn < NUM_EMBEDDINGS; turn += 1) {
    await post("/v1/embeddings", { model, input: ["a cat", TEXT] });
    await new Promise((resolve) => setTimeout(resolve, EMBEDDING_EVERY_MS));
  }
}

const post = async (path, json) => (await call(path, { json })).arrayBuffer();
