// Answers read aloud, one at a time, with a waveform below the answer.

import { errorBox, isAborted } from "../api.js";
import { byId, el, iconButton } from "../dom.js";
import { sayWhileWaiting } from "../server.js";
import { PcmPlayer } from "../speech/player.js";
import { SAMPLE_RATE, speakInto } from "../speech/request.js";
import { drawWave } from "../speech/wave.js";

const MAX_PIECE_CHARS = 1500; // of a request
const UNSPOKEN = ".code-block, .scroll, .waiting";
let current = null;

/** Read the text of `element` aloud, with the player in `place`; `onEnd` is called at its end. */
export function readAloud(element, place, onEnd) {
  stopReading();
  current = new Reading(spokenText(element), place, onEnd);
  current.run();
}

export function stopReading() {
  current?.stop();
}

/** Return the text of an answer without code and tables. */
export function spokenText(element) {
  const copy = element.cloneNode(true);
  copy.querySelectorAll(UNSPOKEN).forEach((part) => part.remove());
  const blocks = copy.querySelectorAll("p, li, h3, h4, h5, h6");
  const lines = [...blocks].filter((block) => !block.parentElement.closest("li"));
  return lines.map((line) => ended(line.textContent.trim())).join(" ");
}

const ended = (line) => (/[\p{L}\p{N}]$/u.test(line) ? `${line}.` : line);

/** Cut a text into requests, at ends of sentences where there are any. */
export function piecesOf(text) {
  const pieces = [];
  let rest = text.trim();
  while (rest.length > MAX_PIECE_CHARS) {
    const end = rest.slice(0, MAX_PIECE_CHARS).search(/[.!?][^.!?]*$/) + 1 || MAX_PIECE_CHARS;
    pieces.push(rest.slice(0, end));
    rest = rest.slice(end).trim();
  }
  return rest ? [...pieces, rest] : pieces;
}

class Reading {
  #stopping = new AbortController();
  #isReceived = false;

  constructor(text, place, onEnd) {
    Object.assign(this, { text, place, onEnd });
    this.wave = el("canvas", { class: "wave", "aria-hidden": "true" });
    this.note = el("span", { class: "time" }, "Starting to speak");
    const stop = iconButton("stop", "Stop reading", () => this.stop());
    place.replaceChildren(el("div", { class: "aloud" }, stop, this.wave, this.note));
    this.player = new PcmPlayer(SAMPLE_RATE, () => this.#draw());
  }

  async run() {
    const stopWaiting = sayWhileWaiting(
      byId("speak-model").value,
      (text) => this.player.numSamples || (this.note.textContent = text || "Starting to speak"),
    );
    try {
      for (const piece of piecesOf(this.text))
        await speakInto(this.player, piece, this.#stopping.signal);
      this.#isReceived = true;
      this.#draw();
    } catch (error) {
      this.stop();
      if (!isAborted(error)) this.place.replaceChildren(errorBox(error));
    }
    stopWaiting();
  }

  #draw() {
    if (this.#stopping.signal.aborted) return;
    const { player } = this;
    const { positionS, lengthS, isPlaying } = player;
    if (this.#isReceived && !isPlaying) {
      this.stop();
      return;
    }
    drawWave(this.wave, player.samples.subarray(0, player.numSamples), {
      playedShare: lengthS ? positionS / lengthS : 0,
    });
    if (lengthS) this.note.textContent = `${positionS.toFixed(1)} / ${lengthS.toFixed(1)} s`;
    this.frame ||= requestAnimationFrame(() => ((this.frame = 0), this.#draw()));
  }

  stop() {
    if (this.#stopping.signal.aborted) return;
    this.#stopping.abort();
    this.player.close();
    this.place.replaceChildren();
    if (current === this) current = null;
    this.onEnd();
  }
}
