// Dictation: a recording, or a file where there is no microphone, becomes text at the cursor.

import { byId, onFilePick, relabel, show } from "../dom.js";
import { sayWhileWaiting } from "../server.js";
import { canRecord, fileNameOf, record } from "../speech/recorder.js";
import { transcribe } from "../speech/request.js";

export class Dictation {
  #recording = null;
  #canRecord = canRecord();

  /** `input` receives the text; `complain` shows an error. */
  constructor(input, complain) {
    Object.assign(this, { input, complain });
    this.button = byId("chat-dictate");
    this.level = byId("chat-level");
    this.hint = byId("chat-hint");
    this.hints = [...this.hint.childNodes];
    show(this.button);
    this.button.addEventListener("click", () => this.#press());
    onFilePick(byId("chat-sound"), ([file]) => this.#write(file, file.name));
  }

  async #press() {
    if (!this.#canRecord) byId("chat-sound").click();
    else if (this.#recording) await this.#end();
    else await this.#begin();
  }

  async #begin() {
    try {
      show(this.level);
      this.#recording = await record(this.level);
      relabel(this.button, "stop", "Stop dictation");
      this.#say("Listening: press again when you are done");
    } catch (error) {
      this.#canRecord = false; // the next press opens a file
      show(this.level, false);
      error.message += " Or press again to choose a recording.";
      this.complain(error);
    }
  }

  async #end() {
    const { stop } = this.#recording;
    this.#recording = null;
    show(this.level, false);
    relabel(this.button, "mic", "Dictate");
    const blob = await stop();
    await this.#write(blob, fileNameOf(blob));
  }

  async #write(blob, name) {
    this.button.disabled = true;
    this.#say("Transcribing …");
    const stopWaiting = sayWhileWaiting(byId("hear-model").value, (text) =>
      this.#say(text || "Transcribing …"),
    );
    try {
      const { text } = await transcribe(blob, name);
      this.#insert(text.trim());
    } catch (error) {
      this.complain(error);
    }
    stopWaiting();
    this.button.disabled = false;
    this.hint.replaceChildren(...this.hints);
  }

  #insert(text) {
    const { input } = this;
    const before = input.value.slice(0, input.selectionStart);
    const gap = before && !/\s$/.test(before) ? " " : "";
    input.setRangeText(gap + text, input.selectionStart, input.selectionEnd, "end");
    input.dispatchEvent(new Event("input", { bubbles: true }));
    input.focus();
  }

  #say(text) {
    this.hint.textContent = text;
  }
}
