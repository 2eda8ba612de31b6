// Dictation: speech becomes text at the cursor while it is spoken. Without a microphone, a file does.

import { byId, onFilePick, relabel, show } from "../dom.js";
import { sayWhileWaiting } from "../server.js";
import { showLevel } from "../speech/recorder.js";
import { transcribe } from "../speech/request.js";
import { listen } from "../talk/live_text.js";
import { canListen } from "../talk/microphone.js";

const WAITING = "Transcribing …";

export class Dictation {
  #live = null; // while there is one
  #canListen = canListen();
  #from = 0; // where the text begins
  #shown = "";

  /** `input` receives the text; `complain` shows an error. */
  constructor(input, complain) {
    Object.assign(this, { input, complain });
    this.button = byId("chat-dictate");
    this.level = byId("chat-level");
    this.hint = byId("chat-hint");
    this.hints = [...this.hint.childNodes];
    show(this.button);
    this.button.addEventListener("click", () => this.#press());
    onFilePick(byId("chat-sound"), ([file]) => this.#read(file));
  }

  #press() {
    if (this.#live) this.#stop();
    else if (this.#canListen) this.#dictate();
    else byId("chat-sound").click();
  }

  async #dictate() {
    this.#begin("Starting");
    let meter;
    try {
      this.#live = await listen(byId("hear-model").value, (text) => this.#write(text));
      show(this.level);
      meter = showLevel(this.#live.stream, this.level);
      relabel(this.button, "stop", "Stop dictation");
      this.button.disabled = false;
      this.#say("Listening: press again when you are done");
      this.#write(await this.#live.text);
    } catch (error) {
      if (!this.#live) {
        this.#canListen = false; // the next press opens a file
        error.message += " Or press again to choose a recording.";
      }
      this.complain(error);
      this.#live?.stop();
    }
    meter?.stop();
    show(this.level, false);
    relabel(this.button, "mic", "Dictate");
    this.#live = null;
    this.#end();
  }

  #stop() {
    this.button.disabled = true;
    this.#say(WAITING);
    this.#live.stop();
  }

  async #read(file) {
    this.#begin(WAITING);
    const stopWaiting = sayWhileWaiting(byId("hear-model").value, (text) =>
      this.#say(text || WAITING),
    );
    try {
      this.#write((await transcribe(file, file.name)).text);
    } catch (error) {
      this.complain(error);
    }
    stopWaiting();
    this.#end();
  }

  /** The text is written where the cursor is now, and nothing else meanwhile. */
  #begin(hint) {
    this.button.disabled = this.input.readOnly = true;
    this.#from = this.input.selectionEnd;
    this.#shown = "";
    this.#say(hint);
  }

  #end() {
    this.button.disabled = this.input.readOnly = false;
    this.hint.replaceChildren(...this.hints);
    this.input.focus();
  }

  /** Write `text` in place of the text before. */
  #write(text) {
    const { input } = this;
    const before = input.value.slice(0, this.#from);
    const gap = before && !/\s$/.test(before) ? " " : "";
    const spaced = text.trim() && gap + text.trim();
    input.setRangeText(spaced, this.#from, this.#from + this.#shown.length, "end");
    this.#shown = spaced;
    input.dispatchEvent(new Event("input", { bubbles: true }));
  }

  #say(text) {
    this.hint.textContent = text;
  }
}
