// The chat panel: the composer, the turns, and sending, stopping and regenerating.

import { Advice, errorBox, isAborted } from "../api.js";
import { byId, el, fill, icon, onFiles, show } from "../dom.js";
import { dataUrlOf } from "../images.js";
import { answer, assistantTurn, isWaiting, requestOf, userTurn } from "./conversation.js";
import { openDrawer, readSettings } from "./settings.js";
import { AssistantView, userView } from "./view.js";

const NEAR_END_PX = 120;
const MAX_SPOKEN_CHARS = 1500;

export function openChat(models) {
  const chats = models.filter((model) => model.task === "chat");
  if (!chats.length) return {};
  const panel = new ChatPanel(chats);
  return { enter: () => panel.input.focus({ preventScroll: true }) };
}

class ChatPanel {
  turns = [];
  views = new Map();
  images = [];
  stopping = null;

  constructor(models) {
    this.seeing = new Set(
      models.filter((model) => model.input_modalities?.includes("image")).map((model) => model.id),
    );
    this.model = byId("chat-model");
    this.log = byId("chat-log");
    this.input = byId("chat-input");
    fill(
      this.model,
      models.map((model) => model.id),
    );
    this.actions = {
      resend: (turn, text) => this.#resend(turn, text),
      regenerate: (turn) => this.#regenerate(turn),
      proceed: () => this.#answer(),
      grown: () => this.#follow(),
    };
    openDrawer();
    this.#listen();
    this.#clear();
  }

  #listen() {
    byId("chat-form").addEventListener("submit", (event) => (event.preventDefault(), this.#send()));
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    this.input.addEventListener("input", () => this.#fit());
    byId("chat-stop").addEventListener("click", () => this.stopping?.abort());
    byId("chat-new").addEventListener("click", () => this.#clear());
    byId("chat-attach").addEventListener("click", () => byId("chat-file").click());
    byId("chat-file").addEventListener("change", ({ target }) => {
      this.#attach([...target.files]);
      target.value = "";
    });
    onFiles(byId("chat"), (files) => this.#attach(files));
    show(byId("chat-attach"), this.seeing.size > 0);
  }

  #clear() {
    this.stopping?.abort();
    this.turns = [];
    this.views.clear();
    const hello = el(
      "div",
      { class: "empty" },
      el("p", { class: "hello" }, "What would you like to ask?"),
      el(
        "p",
        {},
        this.seeing.size
          ? "Paste or drop an image to ask about it."
          : "Answers appear while they are generated.",
      ),
    );
    this.log.replaceChildren(hello);
    this.input.focus({ preventScroll: true });
  }

  // -- images -------------------------------------------------------------------------------

  async #attach(files) {
    try {
      if (!this.seeing.size)
        throw new Advice(
          "No served model takes images. Serve a vision model, for example triptych-vision.",
        );
      for (const file of files) this.images.push(await dataUrlOf(file));
      if (!this.seeing.has(this.model.value)) this.model.value = [...this.seeing][0];
    } catch (error) {
      this.#complain(error);
    }
    this.#showImages();
  }

  #showImages() {
    const list = byId("chat-images");
    list.replaceChildren(
      ...this.images.map((url, index) => {
        const remove = () => (this.images.splice(index, 1), this.#showImages());
        const button = el(
          "button",
          {
            type: "button",
            class: "icon",
            "aria-label": `Remove image ${index + 1}`,
            onclick: remove,
          },
          icon("close"),
        );
        return el("li", {}, el("img", { src: url, alt: `Image ${index + 1}` }), button);
      }),
    );
    show(list, this.images.length > 0);
  }

  // -- turns ----------------------------------------------------------------------------------

  #send() {
    const text = this.input.value.trim();
    if (this.stopping || (!text && !this.images.length)) return;
    if (isWaiting(this.turns.at(-1))) {
      this.#complain(
        new Advice("The model waits for a tool result. Enter it above, or regenerate the answer."),
      );
      return;
    }
    this.#add(userTurn(text, this.images));
    this.input.value = "";
    this.images = [];
    this.#showImages();
    this.#fit();
    this.#answer();
  }

  #add(turn) {
    this.log.querySelector(".empty")?.remove();
    this.log.querySelectorAll(":scope > .error").forEach((box) => box.remove());
    this.turns.push(turn);
    const view =
      turn.role === "user" ? userView(turn, this.actions) : new AssistantView(turn, this.actions);
    const element = view.element ?? view;
    this.views.set(turn, element);
    this.log.append(element);
    this.log.scrollTop = this.log.scrollHeight;
    return view;
  }

  /** Remove `turn` and all later turns. */
  #dropFrom(turn) {
    this.stopping?.abort();
    for (const dropped of this.turns.splice(this.turns.indexOf(turn))) {
      this.views.get(dropped).remove();
      this.views.delete(dropped);
    }
  }

  #resend(turn, text) {
    this.#dropFrom(turn);
    this.#add(userTurn(text.trim(), turn.images));
    this.#answer();
  }

  #regenerate(turn) {
    this.#dropFrom(turn);
    this.#answer();
  }

  async #answer() {
    let body;
    try {
      body = requestOf(this.model.value, this.turns, readSettings());
    } catch (error) {
      this.#complain(error);
      return;
    }
    const stopping = new AbortController();
    this.#setBusy(stopping);
    const turn = assistantTurn(this.model.value);
    const view = this.#add(turn);
    try {
      await answer(turn, body, stopping.signal, () => view.update());
    } catch (error) {
      if (isAborted(error)) turn.isStopped = true;
      else turn.error = error;
    }
    view.finish();
    if (this.stopping === stopping) this.#setBusy(null);
    byId("chat-status").textContent = turn.error
      ? ""
      : `${turn.isStopped ? "Stopped. " : ""}${turn.text.slice(0, MAX_SPOKEN_CHARS)}`;
  }

  // -- the screen -----------------------------------------------------------------------------

  #setBusy(stopping) {
    this.stopping = stopping;
    show(byId("chat-send"), !stopping);
    show(byId("chat-stop"), Boolean(stopping));
    if (stopping) byId("chat-status").textContent = "Answering";
  }

  #complain(error) {
    this.log.append(errorBox(error));
    this.log.scrollTop = this.log.scrollHeight;
  }

  #follow() {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    if (scrollHeight - scrollTop - clientHeight < NEAR_END_PX) this.log.scrollTop = scrollHeight;
  }

  #fit() {
    this.input.style.height = "auto";
    this.input.style.height = `${this.input.scrollHeight}px`;
  }
}
