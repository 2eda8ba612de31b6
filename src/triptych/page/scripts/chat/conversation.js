// A conversation: its turns, the request that continues it, and the events of an answer.
//
// A user turn has `text` and `images`; an assistant turn has `text`, `reasoning`, `calls` (tool
// calls, later with a `result`) and `stats`. A drawing turn is for the user: models do not see it.

import { call, events } from "../api.js";

const MIN_RATED_S = 0.05; // a shorter time gives no rate: events may arrive together

export const userTurn = (text, images = []) => ({ role: "user", text, images });

export const assistantTurn = (model) => ({
  role: "assistant",
  model,
  text: "",
  reasoning: "",
  calls: [],
  stats: null,
  error: null,
  isStopped: false,
});

/** Return the complete tool calls of a turn: an answer may end within a call. */
export const wholeCalls = (turn) => turn.calls.filter(({ args }) => isJson(args));

/** Whether the assistant waits for tool results. */
export const isWaiting = (turn) =>
  turn?.role === "assistant" && wholeCalls(turn).some((made) => made.result === null);

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** Build the body of the request that continues `turns`. */
export function requestOf(model, turns, settings) {
  const messages = turns.flatMap(messagesOf);
  if (settings.system) messages.unshift({ role: "system", content: settings.system });
  const options = { include_usage: true, continuous_usage_stats: true };
  return { model, messages, stream: true, stream_options: options, ...settings.fields };
}

function messagesOf(turn) {
  if (turn.role === "drawing") return [];
  if (turn.role === "user") return [{ role: "user", content: contentOf(turn) }];
  const made = wholeCalls(turn);
  if (!made.length) return [{ role: "assistant", content: turn.text }];
  const calls = made.map(({ id, name, args }) => ({
    id,
    type: "function",
    function: { name, arguments: args },
  }));
  const message = { role: "assistant", content: turn.text || null, tool_calls: calls };
  if (turn.reasoning) message.reasoning_content = turn.reasoning;
  return [
    message,
    ...made.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result ?? "" })),
  ];
}

function contentOf({ text, images }) {
  if (!images.length) return text;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

/** Fill `turn` with the answer to `body`, and call `onChange` after each event. */
export async function answer(turn, body, signal, onChange) {
  const startedMs = performance.now();
  const response = await call("/v1/chat/completions", { json: body, signal });
  for await (const { data } of events(response)) {
    take(turn, data);
    turn.stats = statsOf(turn.stats, data.usage, performance.now() - startedMs);
    onChange();
  }
}

function take(turn, { choices: [choice] }) {
  if (!choice) return;
  const { delta } = choice;
  turn.text += delta.content ?? "";
  turn.reasoning += delta.reasoning_content ?? "";
  for (const piece of delta.tool_calls ?? []) {
    const made = (turn.calls[piece.index] ??= { id: "", name: "", args: "", result: null });
    made.id ||= piece.id ?? "";
    made.name += piece.function?.name ?? "";
    made.args += piece.function?.arguments ?? "";
  }
  turn.finish = choice.finish_reason ?? turn.finish;
}

/** Return the number of tokens, the time to the first, and the rate after it. */
function statsOf(before, usage, elapsedMs) {
  const num = usage?.completion_tokens ?? before?.numTokens ?? 0;
  if (!num) return before;
  const first = before ?? { firstMs: elapsedMs, numFirst: num };
  const elapsedS = (elapsedMs - first.firstMs) / 1000;
  const isLater = num > (before?.numTokens ?? 0) && elapsedS > MIN_RATED_S;
  return {
    ...first,
    numTokens: num,
    numPrompt: usage?.prompt_tokens ?? before?.numPrompt,
    perSecond: isLater ? (num - first.numFirst) / elapsedS : (before?.perSecond ?? 0),
  };
}
