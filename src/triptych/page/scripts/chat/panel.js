// The chat panel: the turns, and sending, stopping and regenerating.

import { Advice, errorBox, isAborted } from "../api.js";
import { showCode } from "../code/dialog.js";
import { byId, followEnd, show } from "../dom.js";
import { LOOK } from "../examples.js";
import { chooseModel, seesImages, setModel } from "../models.js";
import { sayWhileWaiting } from "../server.js";
import { newId } from "../store.js";
import { toast } from "../toast.js";
import { stopReading } from "./aloud.js";
import { Attachments } from "./attachments.js";
import { answer, assistantTurn, isWaiting, requestOf, userTurn } from "./conversation.js";
import { Dictation } from "./dictate.js";
import { DrawingView, drawingTurn } from "./drawing.js";
import { History } from "./history.js";
import { homeView } from "./home.js";
import { openDrawer, readSettings } from "./settings.js";
import { AssistantView, userView } from "./view.js";

const MAX_SPOKEN_CHARS = 1500;
const MAX_TITLE_CHARS = 60;
const NEW_TITLE = "New chat";

/** `links.speak` and `links.draw` open other panels, if they are there. Returns {enter, leave, ask}. */
export function openChat(models, links) {
  const chats = models.filter((model) => model.task === "chat");
  if (!chats.length) return {};
  const panel = new ChatPanel(chats, {
    canSpeak: models.some((model) => model.task === "speech"),
    canHear: models.some((model) => model.task === "transcription"),
    canDraw: models.some((model) => model.task === "image"),
    links,
  });
  return {
    enter: () => (show(byId("chats")), panel.input.focus({ preventScroll: true })),
    leave: () => show(byId("chats"), false),
    ask: (picture) => panel.askAbout(picture),
  };
}

class ChatPanel {
  turns = [];
  views = new Map();
  stopping = null;
  chat = null; // the kept record: {id, title, model, updatedMs, turns}

  constructor(models, { canSpeak, canHear, canDraw, links }) {
    this.seeing = new Set(models.filter(seesImages).map((model) => model.id));
    this.firstModel = models.find((model) => !seesImages(model))?.id ?? models[0].id;
    this.links = links;
    this.model = byId("chat-model");
    this.log = byId("chat-log");
    this.input = byId("chat-input");
    chooseModel(this.model, models);
    this.actions = {
      resend: (turn, text) => this.#resend(turn, text),
      regenerate: (turn) => this.#regenerate(turn),
      proceed: () => this.#answer(),
      grown: () => followEnd(this.log),
      draw: canDraw ? (prompt) => this.#draw(prompt) : null,
      ask: this.seeing.size ? (picture) => this.askAbout(picture) : null,
      canSpeak,
    };
    this.attachments = new Attachments(this.seeing, (error) => this.#complain(error));
    if (canHear) new Dictation(this.input, (error) => this.#complain(error));
    openDrawer({ canSpeak });
    this.history = new History({
      open: (chat) => ((location.hash = "chat"), this.#open(chat)),
      start: (how) => this.#start(how),
      follow: (chat) => this.#followTab(chat),
    });
    this.history.load();
    this.#listen();
    this.#start();
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
    byId("chat-new").addEventListener("click", () => this.#start());
    byId("chat-code").addEventListener("click", () => this.#showCode());
  }

  // -- chats ----------------------------------------------------------------------------------

  #clear() {
    this.#leaveRequest();
    stopReading();
    this.turns = [];
    this.views.clear();
    this.log.replaceChildren();
  }

  /** End the running request; what it brought so far is kept. */
  #leaveRequest() {
    if (!this.stopping) return;
    this.stopping.abort();
    this.#setBusy(null);
    if (this.turns.length) this.turns.at(-1).isStopped = true;
    this.#save();
  }

  #start({ isDeleted = false } = {}) {
    if (isDeleted) this.turns = []; // nothing to keep
    this.#clear();
    this.chat = null;
    this.log.append(homeView(this.#homeActions()));
    this.log.scrollTop = 0;
    byId("chat-title").textContent = NEW_TITLE;
    this.history.setShown(null);
    this.input.focus({ preventScroll: true });
  }

  #homeActions() {
    const { speak, draw } = this.links;
    return {
      ask: (text) => (setModel(this.model, this.firstModel), this.#sendExample(text)),
      look: this.seeing.size ? (text) => this.#look(text) : null,
      speak,
      draw,
    };
  }

  async #look(question) {
    const blob = await (await fetch(LOOK.picture)).blob();
    await this.attachments.add([blob]);
    this.#sendExample(question);
  }

  /** Send an example, with the likeliest words unless the user set a temperature. */
  #sendExample(text) {
    if (this.input.readOnly) return;
    this.input.value = text;
    this.#send({ temperature: 0 });
  }

  #open(chat) {
    this.#clear();
    this.chat = chat;
    for (const turn of chat.turns) this.#add(revived(turn)).finish?.();
    setModel(this.model, chat.model);
    byId("chat-title").textContent = chat.title;
    this.history.setShown(chat.id);
    this.log.scrollTop = this.log.scrollHeight;
  }

  /** Show a chat that another tab changed. If an answer runs here, continue in a copy. */
  #followTab(chat) {
    if (!this.stopping) {
      this.#open(chat);
      return;
    }
    this.chat = { ...this.chat, id: newId() };
    this.#save();
  }

  #save() {
    if (!this.turns.length) return;
    const updatedMs = Date.now();
    this.chat ??= { id: newId() };
    const { chat } = this;
    if (!chat.isNamed) chat.title = titleOf(this.turns);
    Object.assign(chat, { updatedMs, model: this.model.value, turns: this.turns.map(plain) });
    byId("chat-title").textContent = chat.title;
    this.history.save(chat);
    this.history.setShown(chat.id);
  }

  // -- turns ----------------------------------------------------------------------------------

  #send(standard = {}) {
    const text = this.input.value.trim();
    const isTaken = this.stopping || this.input.readOnly; // dictation writes on
    if (isTaken || (!text && !this.attachments.urls.length)) return;
    if (isWaiting(this.turns.at(-1))) {
      this.#complain(
        new Advice("The model waits for a tool result. Enter it above, or regenerate the answer."),
      );
      return;
    }
    this.#add(userTurn(text, this.attachments.take()));
    this.input.value = "";
    this.#fit();
    this.#answer(standard);
  }

  #add(turn) {
    this.log.querySelector(".home")?.remove();
    this.log.querySelectorAll(":scope > .error").forEach((box) => box.remove());
    this.turns.push(turn);
    const view = viewOf(turn, this.actions);
    this.views.set(turn, view.element);
    this.log.append(view.element);
    this.log.scrollTop = this.log.scrollHeight;
    return view;
  }

  /** Remove `turn` and all later turns. */
  #dropFrom(turn) {
    this.stopping?.abort();
    stopReading();
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

  /** Ask for an answer; `standard` are fields for which the settings have no value. */
  async #answer(standard = {}) {
    let body;
    try {
      body = { ...standard, ...requestOf(this.model.value, this.turns, readSettings()) };
    } catch (error) {
      this.#complain(error);
      return;
    }
    const stopping = this.#begin("Answering");
    const turn = assistantTurn(this.model.value);
    const view = this.#add(turn);
    this.#save();
    const stopWaiting = sayWhileWaiting(turn.model, (text) => view.wait(text));
    try {
      await answer(turn, body, stopping.signal, () => (stopWaiting(), view.update()));
    } catch (error) {
      if (isAborted(error)) turn.isStopped = true;
      else turn.error = error;
    }
    stopWaiting();
    view.finish();
    if (!this.#end(stopping)) return;
    this.#announce(turn);
    if (readSettings().isAloud && !turn.error && !turn.isStopped) view.readAloud();
  }

  async #draw(prompt) {
    if (this.stopping) {
      toast("Wait for the answer, or stop it.");
      return;
    }
    const stopping = this.#begin("Drawing");
    const view = this.#add(drawingTurn(prompt));
    await view.run(stopping.signal);
    this.#end(stopping);
  }

  /** Attach a picture, to ask about it. */
  async askAbout({ blob }) {
    await this.attachments.add([blob]);
    if (!this.input.value.trim()) [this.input.value] = LOOK.questions;
    this.#fit();
    this.input.focus();
    this.input.select();
  }

  #showCode() {
    const { system, fields } = readSettings();
    const messages = [{ role: "user", content: this.input.value.trim() || "Hello!" }];
    if (system) messages.unshift({ role: "system", content: system });
    showCode([{ task: "chat", fields: { model: this.model.value, messages, ...fields } }]);
  }

  // -- the screen -----------------------------------------------------------------------------

  #begin(status) {
    const stopping = new AbortController();
    this.#setBusy(stopping);
    byId("chat-status").textContent = status;
    return stopping;
  }

  /** Keep what a request added. Returns false if the chat was left in the meantime. */
  #end(stopping) {
    if (this.stopping !== stopping) return false;
    this.#setBusy(null);
    this.#save();
    return true;
  }

  #announce({ text, error, isStopped }) {
    const spoken = `${isStopped ? "Stopped. " : ""}${text.slice(0, MAX_SPOKEN_CHARS)}`;
    byId("chat-status").textContent = error ? "" : spoken;
  }

  #setBusy(stopping) {
    this.stopping = stopping;
    show(byId("chat-send"), !stopping);
    show(byId("chat-stop"), Boolean(stopping));
  }

  #complain(error) {
    this.log.append(errorBox(error));
    this.log.scrollTop = this.log.scrollHeight;
  }

  #fit() {
    this.input.style.height = "auto";
    this.input.style.height = `${this.input.scrollHeight}px`;
  }
}

function viewOf(turn, actions) {
  if (turn.role === "user") return { element: userView(turn, actions) };
  if (turn.role === "drawing") return new DrawingView(turn, actions);
  return new AssistantView(turn, actions);
}

function titleOf(turns) {
  const [first] = turns;
  const text = (first.text || first.prompt || "A picture").replace(/\s+/g, " ");
  return text.length > MAX_TITLE_CHARS ? `${text.slice(0, MAX_TITLE_CHARS)} …` : text;
}

/** Return a turn as it is kept: an error as its message. */
const plain = (turn) => ({ ...turn, error: turn.error?.message ?? null });

const revived = (turn) => ({ ...turn, error: turn.error ? new Advice(turn.error) : null });
