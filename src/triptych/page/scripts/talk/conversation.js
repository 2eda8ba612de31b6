// A spoken conversation: the server's events become text and sound, and speech stops an answer.

import { ApiError } from "../api.js";
import { PcmPlayer } from "../speech/player.js";
import { SAMPLE_RATE } from "../speech/request.js";
import { decoded, encoded, HEARD } from "./socket.js";

const LOST = "The connection was lost. Start again to go on with a new conversation.";
const STALLED_BYTES = 640_000; // that a connection has not taken: ten seconds of sound
const BUFFER = "input_audio_buffer";

export class Conversation {
  player = null; // of the answer that is or was spoken
  isHearing = false;
  isThinking = false;
  #spokenId = null;
  #isHeld = false; // while speech is suspected
  #isClosed = false;
  #lastCode = ""; // of an error
  #context = new AudioContext({ sampleRate: SAMPLE_RATE });

  /** `onEnd` is called once if the session ends by itself, with an error that is not in the log. */
  constructor(socket, log, session, onEnd) {
    Object.assign(this, { socket, log, onEnd });
    socket.onmessage = ({ data }) => this.#take(JSON.parse(data));
    socket.onclose = ({ reason }) => this.#lose(reason);
    this.#send("session.update", { session });
  }

  /** The state in words. */
  get state() {
    if (this.isHearing) return "Hearing you";
    if (this.player?.hasMore) return "Speaking: you can interrupt";
    return this.isThinking ? "Thinking" : "Listening";
  }

  /** Send samples of the user. */
  hear(samples) {
    if (this.socket.readyState !== WebSocket.OPEN) return;
    this.#send("input_audio_buffer.append", { audio: encoded(samples) });
    if (this.socket.bufferedAmount > STALLED_BYTES) this.#lose();
  }

  close() {
    if (this.#isClosed) return;
    this.#isClosed = true;
    this.socket.close();
    this.player?.close();
    this.#context.close();
  }

  /** The session has ended by itself, for a `reason` that may be in the log. */
  #lose(reason) {
    if (this.#isClosed) return;
    this.close();
    const isKnown = reason && reason === this.#lastCode;
    this.onEnd(isKnown ? null : new ApiError(LOST));
  }

  #send(type, fields) {
    this.socket.send(JSON.stringify({ type, ...fields }));
  }

  #take(event) {
    const { type, item_id: id, delta } = event;
    if (type === "error") this.#fail(event.error);
    else if (type === `${BUFFER}.speech_suspected`) this.#hold();
    else if (type === `${BUFFER}.speech_dismissed`) this.#goOn();
    else if (type === `${BUFFER}.speech_started`) this.#begin(id);
    else if (type === `${BUFFER}.speech_stopped`) this.#pause();
    else if (type.startsWith(HEARD)) this.#write(type, event);
    else if (type === "response.output_audio.delta") this.#play(id, decoded(delta));
    else if (
      type === "response.output_audio_transcript.delta" ||
      type === "response.output_text.delta"
    )
      this.log.add(id, "assistant", delta);
    else if (type === "response.done") this.#finish(event.response);
    else if (type === "conversation.item.truncated")
      this.#send("conversation.item.retrieve", { item_id: id }); // for the words that were heard
    else if (type === "conversation.item.retrieved")
      this.log.cut(event.item.id, event.item.content[0].transcript);
  }

  /** The user may speak: what is said waits until that is certain. */
  #hold() {
    this.#isHeld = true;
    this.player?.pause();
  }

  #goOn() {
    this.#isHeld = false;
    this.player?.playFrom(this.player.positionS);
  }

  /** The user speaks: what is said stops, and the model learns how much of it was heard. */
  #begin(id) {
    this.isHearing = true;
    this.isThinking = this.#isHeld = false;
    this.log.add(id, "user", "");
    if (!this.player?.hasMore) return;
    const heardMs = Math.floor(this.player.positionS * 1000);
    this.#silence();
    this.#send("conversation.item.truncate", {
      item_id: this.#spokenId,
      content_index: 0,
      audio_end_ms: heardMs,
    });
  }

  #pause() {
    this.isHearing = false;
    this.isThinking = true;
  }

  #write(type, { item_id: id, delta, transcript, error }) {
    if (type === `${HEARD}.delta`) this.log.add(id, "user", delta);
    else if (type === `${HEARD}.completed`) {
      this.log.set(id, "user", transcript.trim());
      if (!transcript.trim()) this.isThinking = false; // such a turn gets no answer
    } else if (type === `${HEARD}.failed`) this.#fail(error);
  }

  #play(id, bytes) {
    if (id !== this.#spokenId) {
      this.#silence();
      this.#spokenId = id;
      this.player = new PcmPlayer(SAMPLE_RATE, () => {}, this.#context);
      if (this.#isHeld) this.player.pause();
    }
    this.isThinking = false;
    this.player?.push(bytes); // none once it was interrupted
  }

  #silence() {
    this.player?.close();
    this.player = null;
  }

  #finish({ status, status_details: details }) {
    if (status === "failed") this.#fail(details.error);
    if (status !== "cancelled") this.isThinking = false;
  }

  #fail({ message, code }) {
    this.isThinking = false;
    this.#lastCode = code;
    this.log.complain(new ApiError(message, { code }));
  }
}
