// Speech to text: a recording or a file, and its words with times, which play on click.

import { errorBox, isAborted } from "../api.js";
import { byId, copy, el, icon, onFilePick, onFiles, show } from "../dom.js";
import { chooseModel } from "../models.js";
import { sayWhileWaiting } from "../server.js";
import { canRecord, fileNameOf, record } from "./recorder.js";
import { transcribe } from "./request.js";

const WITH_WORDS = { response_format: "verbose_json", "timestamp_granularities[]": "word" };

/** Open the panel; returns a function that accepts generated speech for transcription. */
export function openHear(models) {
  chooseModel(byId("hear-model"), models);
  show(byId("hear"));
  const hearer = new Hearer();
  return (wav) => hearer.offer(wav);
}

class Hearer {
  recording = null;
  spoken = null;
  url = null;
  words = []; // {start, end, button}

  constructor() {
    this.audio = byId("hear-audio");
    this.status = byId("hear-status");
    this.text = byId("hear-text");
    byId("hear-record").addEventListener("click", () => this.#toggleRecording());
    byId("hear-upload").addEventListener("click", () => byId("hear-file").click());
    byId("hear-spoken").addEventListener("click", () => this.hear(this.spoken, "speech.wav"));
    onFilePick(byId("hear-file"), ([file]) => this.hear(file, file.name));
    byId("hear-copy").addEventListener("click", ({ currentTarget }) =>
      copy(this.plain, currentTarget),
    );
    onFiles(byId("hear"), ([file]) => this.hear(file, file.name));
    this.audio.addEventListener("timeupdate", () => this.#mark());
    this.text.addEventListener("keydown", (event) => this.#move(event));
    if (!canRecord()) {
      byId("hear-record").disabled = true;
      byId("hear-note").textContent =
        "Recording requires https or the address 127.0.0.1. A file works as well.";
    }
  }

  offer(wav) {
    this.spoken = wav;
    show(byId("hear-spoken"));
  }

  async #toggleRecording() {
    const button = byId("hear-record");
    const level = byId("hear-level");
    try {
      if (this.recording) {
        const { stop } = this.recording;
        this.recording = null;
        const blob = await stop();
        await this.hear(blob, fileNameOf(blob));
      } else {
        show(level);
        this.recording = await record(level);
        this.status.textContent = "Recording";
      }
    } catch (error) {
      this.status.replaceChildren(errorBox(error));
    }
    show(level, Boolean(this.recording));
    button.replaceChildren(
      icon(this.recording ? "stop" : "mic"),
      el("span", {}, this.recording ? "Stop and transcribe" : "Record"),
    );
  }

  /** Transcribe `blob` and show its words. */
  async hear(blob, name) {
    URL.revokeObjectURL(this.url);
    this.audio.src = this.url = URL.createObjectURL(blob);
    show(this.audio);
    show(this.text, false);
    show(byId("hear-copy"), false);
    this.status.textContent = "Transcribing …";
    const startedMs = performance.now();
    const stopWaiting = sayWhileWaiting(
      byId("hear-model").value,
      (text) => (this.status.textContent = text || "Transcribing …"),
    );
    try {
      const found = await transcribe(blob, name, WITH_WORDS);
      stopWaiting();
      const elapsedS = (performance.now() - startedMs) / 1000;
      this.status.textContent = `${found.duration.toFixed(1)} s of audio in ${elapsedS.toFixed(1)} s. Click a word to play it.`;
      this.#show(found);
    } catch (error) {
      stopWaiting();
      this.status.textContent = "";
      if (!isAborted(error)) this.status.append(errorBox(error, () => this.hear(blob, name)));
    }
  }

  #show({ text, words }) {
    this.plain = text.trim();
    this.words = words.map(({ word, start, end }) => ({
      start,
      end,
      button: this.#button(word, start),
    }));
    this.text.replaceChildren(...this.words.flatMap(({ button }) => [button, " "]));
    if (this.words.length) this.words[0].button.tabIndex = 0;
    else this.text.append(this.plain || "No words were recognized.");
    show(this.text);
    show(byId("hear-copy"), Boolean(this.plain));
  }

  #button(word, start) {
    const play = () => {
      this.audio.currentTime = start;
      this.audio.play();
    };
    return el(
      "button",
      {
        type: "button",
        class: "word",
        tabindex: "-1",
        title: `${start.toFixed(2)} s`,
        onclick: play,
      },
      word.trim(),
    );
  }

  /** Highlight the word that is playing. */
  #mark() {
    const now = this.audio.currentTime;
    for (const { start, end, button } of this.words)
      button.classList.toggle("now", !this.audio.paused && start <= now && now < end);
  }

  /** Move from word to word with arrow keys. */
  #move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const at = this.words.findIndex(({ button }) => button === document.activeElement);
    const next = this.words[at + step]?.button;
    if (at < 0 || !next) return;
    event.preventDefault();
    document.activeElement.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}
