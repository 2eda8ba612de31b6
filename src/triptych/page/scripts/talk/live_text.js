// Speech as text while it is spoken: one turn of a transcription session.

import { ApiError } from "../api.js";
import { SAMPLE_RATE } from "../speech/request.js";
import { openMicrophone } from "./microphone.js";
import { encoded, HEARD, openSocket } from "./socket.js";

const LOST = "The connection was lost. The text so far is kept.";
const SESSION = { type: "transcription", audio: { input: { turn_detection: null } } };

/**
 * Listen until `stop` is called, or the microphone is taken away; `onText` gets the text so far,
 * whenever there is more.
 *
 * Returns {stream, stop, text}: `text` becomes the final text. Throws `Advice`.
 */
export async function listen(model, onText) {
  const waiting = []; // until the session is open
  let take = (samples) => waiting.push(samples);
  let stop = () => {};
  const microphone = await openMicrophone(
    SAMPLE_RATE,
    (samples) => take(samples),
    () => stop(),
  );
  let socket;
  try {
    socket = await openSocket({ intent: "transcription", model });
  } catch (error) {
    microphone.close();
    throw error;
  }
  const send = (type, fields) => {
    if (socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify({ type, ...fields }));
  };
  send("session.update", { session: SESSION });
  take = (samples) => send("input_audio_buffer.append", { audio: encoded(samples) });
  waiting.forEach(take);
  const text = finalText(socket, onText).finally(() => (microphone.close(), socket.close()));
  stop = () => microphone.close() && send("input_audio_buffer.commit"); // once
  return { stream: microphone.stream, stop, text };
}

function finalText(socket, onText) {
  let soFar = "";
  return new Promise((resolve, reject) => {
    const take = ({ type, delta, transcript, error }) => {
      if (type === `${HEARD}.delta`) onText((soFar += delta));
      else if (type === `${HEARD}.completed`) resolve(transcript);
      else if (error?.code === "input_audio_buffer_commit_empty") resolve(soFar);
      else if (error) reject(new ApiError(error.message, { code: error.code }));
    };
    socket.onmessage = ({ data }) => take(JSON.parse(data));
    socket.onclose = () => reject(new ApiError(LOST));
  });
}
