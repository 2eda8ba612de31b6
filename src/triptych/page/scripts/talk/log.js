// What was heard and what is said, as text.

import { errorBox } from "../api.js";
import { el, followEnd } from "../dom.js";

export class TalkLog {
  #turns = new Map(); // by the id of the item: {turn, text, note}

  constructor(place) {
    this.place = place;
  }

  clear() {
    this.#turns.clear();
    this.place.replaceChildren();
  }

  /** Show more of an item's text; `role` is that of its speaker, user or assistant. */
  add(id, role, text) {
    this.#at(id, role).text.append(text);
    followEnd(this.place);
  }

  /** Replace the text of an item; without text, the item is removed. */
  set(id, role, text) {
    const { turn, text: shown } = this.#at(id, role);
    shown.textContent = text;
    if (text) return;
    turn.remove();
    this.#turns.delete(id);
  }

  /** Show which part of an answer was heard before the user spoke. */
  cut(id, text) {
    const found = this.#turns.get(id);
    if (!found) return;
    found.text.textContent = text;
    found.note ??= found.turn.appendChild(el("p", { class: "note" }, "Interrupted"));
  }

  complain(error) {
    this.place.append(errorBox(error));
    this.place.scrollTo(0, this.place.scrollHeight);
  }

  #at(id, role) {
    if (!this.#turns.has(id)) {
      const text = el("p", { class: role === "user" ? "bubble" : "" });
      const speaker = el("span", { class: "sr" }, role === "user" ? "You: " : "Answer: ");
      const turn = el("div", { class: `turn ${role}` }, el("div", {}, speaker, text));
      this.place.append(turn);
      this.#turns.set(id, { turn, text });
    }
    return this.#turns.get(id);
  }
}
