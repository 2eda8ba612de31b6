// The WebSocket of a realtime session, its sound as base64, and the reason for a refusal.

import { Advice, call, urlOf } from "../api.js";
import { key } from "../key.js";

const ROUTE = "/v1/realtime";
const REFUSED = "The server did not open a session. Check that it can be reached, then try again.";
const UPGRADE_REQUIRED = 426;

/** The events of transcripts begin with this. */
export const HEARD = "conversation.item.input_audio_transcription";

/** Open a session of `query`. Prompts for a key if one is needed; throws `Advice`. */
export async function openSocket(query) {
  const path = `${ROUTE}?${new URLSearchParams(query)}`;
  for (;;) {
    const sent = key();
    const socket = await connect(path, sent);
    if (socket) return socket;
    await explain(path);
    if (sent === key()) throw new Advice(REFUSED);
  }
}

/** Return an open socket, or null. */
function connect(path, sent) {
  const protocols = ["realtime", ...(sent ? [`openai-insecure-api-key.${sent}`] : [])];
  let socket;
  try {
    socket = new WebSocket(urlOf(path).replace(/^http/, "ws"), protocols);
  } catch {
    throw new Advice("This API key has characters that browsers cannot send to a WebSocket.");
  }
  return new Promise((resolve) => {
    socket.onopen = () => resolve(socket);
    socket.onclose = () => resolve(null);
  });
}

/** Browsers hide the answer to a refused WebSocket: a plain request of the same path shows it. */
async function explain(path) {
  try {
    await call(path);
  } catch (error) {
    if (error.status !== UPGRADE_REQUIRED) throw error;
  }
}

/** Write samples between -1 and 1 as base64 of 16-bit integers. */
export function encoded(samples) {
  const view = new DataView(new ArrayBuffer(samples.length * 2));
  samples.forEach((value, index) =>
    view.setInt16(index * 2, Math.max(-1, Math.min(1, value)) * 32767, true),
  );
  return btoa(String.fromCharCode(...new Uint8Array(view.buffer)));
}

export const decoded = (text) => Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
