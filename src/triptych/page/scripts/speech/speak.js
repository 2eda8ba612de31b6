// Text to speech: voice, speed, and a waveform that plays while it arrives.

import { errorBox, isAborted } from "../api.js";
import { byId, chips, relabel, show } from "../dom.js";
import { SPEAK } from "../examples.js";
import { chooseModel } from "../models.js";
import { keepField } from "../prefs.js";
import { sayWhileWaiting } from "../server.js";
import { PcmPlayer } from "./player.js";
import { SAMPLE_RATE, speakInto } from "./request.js";
import { fillVoices } from "./voices.js";
import { drawWave } from "./wave.js";

const EXPECTED_S = 4; // minimum width of the waveform
const STEP_S = 2;

/** `onSpoken` receives each finished speech as a WAV blob. Returns a function that speaks a text. */
export function openSpeak(models, onSpoken) {
  const speaker = new Speaker(onSpoken);
  const speak = (text) => {
    byId("speak-text").value = text;
    speaker.speak();
  };
  byId("speak-examples").append(...chips(SPEAK, speak));
  chooseModel(byId("speak-model"), models);
  for (const id of ["speak-voice", "speak-speed"]) keepField(byId(id));
  byId("speak-model").addEventListener("change", () => speaker.showVoices());
  show(byId("speak"));
  speaker.showVoices();
  return speak;
}

class Speaker {
  player = null;
  stopping = null;
  savedUrl = null;

  constructor(onSpoken) {
    this.onSpoken = onSpoken;
    this.wave = byId("speak-wave");
    this.status = byId("speak-status");
    byId("speak-form").addEventListener(
      "submit",
      (event) => (event.preventDefault(), this.speak()),
    );
    byId("speak-stop").addEventListener("click", () => this.stopping?.abort());
    byId("speak-toggle").addEventListener("click", () => this.player.toggle());
    byId("speak-sample").addEventListener("click", () => this.#hearVoice());
    byId("speak-speed").addEventListener(
      "input",
      ({ target }) => (byId("speak-speed-shown").textContent = Number(target.value).toFixed(2)),
    );
    this.wave.addEventListener("click", (event) =>
      this.player.playFrom((event.offsetX / this.wave.clientWidth) * this.#shownS()),
    );
    this.wave.addEventListener("keydown", (event) => this.#seek(event));
    new ResizeObserver(() => this.player && this.#draw()).observe(this.wave);
  }

  showVoices() {
    return fillVoices(byId("speak-voice"), byId("speak-voice-field"), byId("speak-model").value);
  }

  /** Let the voice introduce itself. */
  #hearVoice() {
    const { text, value } = byId("speak-voice").selectedOptions[0];
    const name = text.replace(/\(.*\)|^\w\w_/g, "").trim();
    return this.speak(`Hello, I am ${value ? name : "the voice"}. Nice to meet you.`);
  }

  /** Speak `input`, or the text of the panel. */
  async speak(input = byId("speak-text").value) {
    this.stopping?.abort();
    this.player?.close();
    const stopping = (this.stopping = new AbortController());
    const player = (this.player = new PcmPlayer(SAMPLE_RATE, () => this.#draw()));
    show(byId("speak-result"));
    show(byId("speak-save"), false);
    show(byId("speak-stop"));
    this.status.textContent = "Speaking";
    try {
      await this.#receive(player, input, stopping.signal);
    } catch (error) {
      if (isAborted(error)) this.status.textContent = "Stopped.";
      else this.status.replaceChildren(errorBox(error, () => this.speak(input)));
    }
    if (this.stopping !== stopping) return;
    this.stopping = null;
    show(byId("speak-stop"), false);
    if (player.numSamples) this.#offer(player);
    else show(byId("speak-result"), false);
  }

  async #receive(player, input, signal) {
    const stopWaiting = sayWhileWaiting(
      byId("speak-model").value,
      (text) => (this.status.textContent = text || "Speaking"),
    );
    try {
      const spoken = await speakInto(player, input, signal);
      stopWaiting();
      this.status.textContent = summary(player.lengthS, spoken);
    } finally {
      stopWaiting();
    }
  }

  /** Offer the finished speech for download and transcription. */
  #offer(player) {
    const wav = player.wav();
    URL.revokeObjectURL(this.savedUrl);
    this.savedUrl = URL.createObjectURL(wav);
    byId("speak-save").href = this.savedUrl;
    show(byId("speak-save"));
    this.onSpoken(wav);
  }

  #shownS() {
    return Math.max(this.player.lengthS, EXPECTED_S);
  }

  #seek(event) {
    const { player } = this;
    const to = {
      ArrowRight: player.positionS + STEP_S,
      ArrowLeft: player.positionS - STEP_S,
      Home: 0,
      End: player.lengthS,
    }[event.key];
    if (to !== undefined) player.playFrom(to);
    else if (event.key === " ") player.toggle();
    else return;
    event.preventDefault();
  }

  #draw() {
    const { player, wave } = this;
    const { positionS, lengthS, isPlaying } = player;
    const samples = player.samples.subarray(0, player.numSamples);
    drawWave(wave, samples, {
      playedShare: lengthS ? positionS / lengthS : 0,
      minSamples: EXPECTED_S * SAMPLE_RATE,
    });
    byId("speak-time").textContent = `${positionS.toFixed(1)} / ${lengthS.toFixed(1)} s`;
    const values = {
      valuemax: lengthS.toFixed(1),
      valuenow: positionS.toFixed(1),
      valuetext: `${positionS.toFixed(0)} of ${lengthS.toFixed(0)} seconds`,
    };
    for (const [name, value] of Object.entries(values)) wave.setAttribute(`aria-${name}`, value);
    const [name, label] = isPlaying ? ["pause", "Pause"] : ["play", "Play"];
    if (byId("speak-toggle").getAttribute("aria-label") !== label)
      relabel(byId("speak-toggle"), name, label);
    if (isPlaying)
      this.frame ||= requestAnimationFrame(
        () => ((this.frame = 0), this.player === player && this.#draw()),
      );
  }
}

function summary(lengthS, { firstMs, elapsedS, coverage }) {
  const missed =
    coverage < 0.99
      ? ` ${Math.round(coverage * 100)} % of these letters are pronounced correctly.`
      : "";
  return `${lengthS.toFixed(1)} s of speech in ${elapsedS.toFixed(1)} s, first audio after ${(firstMs / 1000).toFixed(2)} s.${missed}`;
}
