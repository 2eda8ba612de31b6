// The talk panel: one button starts a conversation, and the wave forms of both sides show it.

import { Advice, errorBox, isAborted } from "../api.js";
import { stopReading } from "../chat/aloud.js";
import { byId, show } from "../dom.js";
import { chooseModel } from "../models.js";
import { keepField } from "../prefs.js";
import { SAMPLE_RATE } from "../speech/request.js";
import { fillVoices } from "../speech/voices.js";
import { drawWave } from "../speech/wave.js";
import { Conversation } from "./conversation.js";
import { TalkLog } from "./log.js";
import { canListen, openMicrophone } from "./microphone.js";
import { openSocket } from "./socket.js";

const SHOWN_S = 4; // of the microphone
const ENDED = "The server has ended the conversation.";
const NO_SPEECH = "The server has no speech model: answers are written.";
const UNPLUGGED = "The microphone is gone. Connect it, then start again.";
const NO_MICROPHONE =
  "Talking requires https or the address 127.0.0.1: browsers allow the microphone only there.";

export function openTalk(models) {
  const served = (task) => models.filter((model) => model.task === task);
  chooseModel(byId("talk-model"), served("chat"));
  for (const id of ["talk-voice", "talk-instructions"]) keepField(byId(id));
  const [speech] = served("speech"); // the one of the route
  const canSpeak = Boolean(speech);
  if (canSpeak) fillVoices(byId("talk-voice"), byId("talk-voice-field"), speech.id);
  const panel = new TalkPanel(canSpeak);
  new ResizeObserver(() => panel.draw()).observe(byId("talk-heard"));
}

class TalkPanel {
  conversation = null;
  microphone = null;
  isMuted = false;

  constructor(canSpeak) {
    this.canSpeak = canSpeak;
    this.log = new TalkLog(byId("talk-log"));
    this.state = byId("talk-state");
    this.heard = new Float32Array(SAMPLE_RATE * SHOWN_S);
    byId("talk-go").addEventListener("click", () => this.start());
    byId("talk-end").addEventListener("click", () => this.end("The conversation has ended."));
    byId("talk-mute").addEventListener("click", () => this.mute(!this.isMuted));
    const canHear = canListen();
    byId("talk-go").disabled = !canHear;
    byId("talk-log").ariaLive = canSpeak ? "off" : "polite"; // what is spoken is not read out, too
    byId("talk-note").textContent = canHear ? (canSpeak ? "" : NO_SPEECH) : NO_MICROPHONE;
  }

  async start() {
    byId("talk-go").disabled = true;
    byId("talk-error").replaceChildren();
    stopReading();
    this.state.textContent = "Starting";
    try {
      this.microphone = await openMicrophone(
        SAMPLE_RATE,
        (samples) => this.#hear(samples),
        () => this.#fail(new Advice(UNPLUGGED)),
      );
      const socket = await openSocket({ model: byId("talk-model").value });
      if (!this.microphone) return socket.close(); // it is gone meanwhile
      this.log.clear();
      this.conversation = new Conversation(socket, this.log, this.#session(), (error) =>
        error ? this.#fail(error) : this.end(ENDED),
      );
      this.#showButtons();
      byId("talk-end").focus();
      this.#follow();
    } catch (error) {
      this.#fail(error);
    }
  }

  #session() {
    const voice = byId("talk-voice").value;
    return {
      type: "realtime",
      instructions: byId("talk-instructions").value.trim(),
      audio: {
        input: {
          transcription: { model: byId("hear-model").value },
          turn_detection: { hold_response: true },
        },
        ...(this.canSpeak && voice ? { output: { voice } } : {}),
      },
    };
  }

  mute(isMuted) {
    this.isMuted = isMuted;
    this.microphone?.mute(isMuted);
    byId("talk-mute").setAttribute("aria-pressed", String(isMuted));
  }

  /** End the conversation; `text` says why. */
  end(text) {
    const hadFocus = byId("talk-live").contains(document.activeElement);
    this.conversation?.close();
    this.microphone?.close();
    this.conversation = this.microphone = null;
    this.mute(false);
    this.state.textContent = text;
    byId("talk-go").disabled = false;
    this.#showButtons();
    if (hadFocus) byId("talk-go").focus();
  }

  #fail(error) {
    this.end("");
    if (isAborted(error)) return;
    if (!(error instanceof Advice)) console.error(error);
    byId("talk-error").replaceChildren(errorBox(error));
  }

  #showButtons() {
    show(byId("talk-live"), Boolean(this.conversation));
    show(byId("talk-go"), !this.conversation);
    show(byId("talk-settings"), !this.conversation);
  }

  #hear(samples) {
    this.heard.copyWithin(0, samples.length);
    this.heard.set(samples, this.heard.length - samples.length);
    this.conversation?.hear(samples);
  }

  /** Draw until the conversation ends. */
  #follow() {
    if (!this.conversation) return;
    const { state } = this.conversation;
    const text = this.isMuted && state === "Listening" ? "Muted" : state;
    if (this.state.textContent !== text) this.state.textContent = text;
    this.draw();
    requestAnimationFrame(() => this.#follow());
  }

  draw() {
    const player = this.conversation?.player;
    drawWave(byId("talk-heard"), this.heard, { playedShare: 1, hue: "transcription" });
    drawWave(byId("talk-said"), player?.samples.subarray(0, player.numSamples) ?? [], {
      playedShare: player ? player.positionS / player.lengthS : 0,
      minSamples: SHOWN_S * SAMPLE_RATE,
    });
  }
}
