// Elements of a conversation's turns. `actions` are the handlers of their buttons.

import { errorBox } from "../api.js";
import { copy, el, iconButton, relabel, show } from "../dom.js";
import { showMarkdown } from "../markdown/blocks.js";
import { readAloud, stopReading } from "./aloud.js";
import { isWaiting, wholeCalls } from "./conversation.js";
import { promptForm, promptFrom } from "./drawing.js";

/** Create the element of a user turn. */
export function userView(turn, actions) {
  const images = turn.images.map((url, index) =>
    el("img", { src: url, alt: `Image ${index + 1} of the message` }),
  );
  const body = el("div", { class: "bubble" }, ...images, turn.text ? el("p", {}, turn.text) : null);
  const copying = iconButton("copy", "Copy the message", () => copy(turn.text, copying));
  const editing = iconButton("edit", "Edit the message", () => edit(element, turn, actions));
  const element = el(
    "article",
    { class: "turn user", "aria-label": "You" },
    body,
    el("div", { class: "turn-foot" }, editing, copying),
  );
  return element;
}

/** Replace a message by a field to edit and resend it. */
function edit(element, turn, actions) {
  const before = [...element.childNodes];
  const area = el("textarea", { rows: "4", "aria-label": "The message" });
  area.value = turn.text;
  const leave = () => element.replaceChildren(...before);
  const form = el(
    "form",
    { class: "edit" },
    area,
    el(
      "div",
      { class: "actions" },
      el("button", { type: "submit", class: "primary" }, "Send again"),
      el("button", { type: "button", onclick: leave }, "Cancel"),
    ),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    actions.resend(turn, area.value);
  });
  form.addEventListener("keydown", (event) => event.key === "Escape" && leave());
  element.replaceChildren(form);
  area.focus();
}

/** The element of an assistant turn, which grows. */
export class AssistantView {
  #frame = 0;

  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.text = el("div", { class: "markdown" });
    this.reasoning = el("div", { class: "markdown" });
    this.reasoningFold = el(
      "details",
      { class: "fold", hidden: true },
      el("summary", {}, "Reasoning"),
      this.reasoning,
    );
    this.calls = el("div", { class: "calls" });
    this.player = el("div", { class: "turn-extra" }); // while the answer is read aloud
    this.drawing = el("div", { class: "turn-extra" }); // the form for the prompt of a picture
    this.foot = el("div", { class: "turn-foot" });
    this.element = el(
      "article",
      { class: "turn assistant", "aria-label": turn.model, "aria-busy": "true" },
      this.reasoningFold,
      this.text,
      this.calls,
      this.player,
      this.drawing,
      this.foot,
    );
    this.text.append(
      el("span", { class: "waiting", role: "img", "aria-label": "Waiting for the answer" }),
    );
  }

  /** Show why the answer does not begin. */
  wait(text) {
    this.foot.replaceChildren(el("span", { class: "stats", role: "status" }, text));
  }

  /** Show the turn's current state at the next frame. */
  update() {
    this.#frame ||= requestAnimationFrame(() => this.show());
  }

  show() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const { text, reasoning, calls } = this.turn;
    if (text) showMarkdown(this.text, text);
    if (reasoning) showMarkdown(this.reasoning, reasoning);
    show(this.reasoningFold, Boolean(reasoning));
    if (reasoning || calls.length) this.text.querySelector(".waiting")?.remove();
    calls.forEach((made, index) => this.#showCall(made, index));
    this.foot.replaceChildren(el("span", { class: "stats" }, statsText(this.turn)));
    this.actions.grown();
  }

  /** Show the turn after its answer completed, stopped or failed. */
  finish() {
    this.show();
    const { turn, actions } = this;
    this.text.querySelector(".waiting")?.remove();
    this.element.removeAttribute("aria-busy");
    const copying = iconButton("copy", "Copy the answer", () => copy(turn.text, copying));
    this.foot.prepend(
      copying,
      iconButton("again", "Regenerate", () => actions.regenerate(turn)),
      ...(turn.text ? this.#links() : []),
    );
    if (turn.error)
      this.element.insertBefore(
        errorBox(turn.error, () => actions.regenerate(turn)),
        this.foot,
      );
    if (isWaiting(turn) && !turn.error && !turn.isStopped) this.#askForResults();
    actions.grown();
  }

  /** Create the buttons that take the answer to another model. */
  #links() {
    const { canSpeak, draw } = this.actions;
    const openForm = () => {
      this.drawing.replaceChildren(promptForm(promptFrom(this.text), draw));
      this.drawing.querySelector("input").select();
    };
    if (canSpeak) this.reading = iconButton("aloud", "Read aloud", () => this.#toggleReading());
    return [canSpeak && this.reading, draw && iconButton("draw", "Draw this", openForm)].filter(
      Boolean,
    );
  }

  #toggleReading() {
    if (this.reading.getAttribute("aria-pressed") === "true") stopReading();
    else this.readAloud();
  }

  /** Read the answer aloud. */
  readAloud() {
    if (!this.reading) return;
    const mark = (isOn) => {
      this.reading.setAttribute("aria-pressed", String(isOn));
      relabel(this.reading, isOn ? "stop" : "aloud", isOn ? "Stop reading aloud" : "Read aloud");
    };
    readAloud(this.text, this.player, () => mark(false));
    mark(true);
  }

  #showCall(made, index) {
    const there = this.calls.children[index];
    const args = el("pre", { tabindex: "0" }, el("code", {}, indented(made.args)));
    if (there?.tagName === "DETAILS") there.querySelector("pre").replaceWith(args);
    else
      this.calls.append(
        el(
          "details",
          { class: "fold call" },
          el("summary", {}, "Calls ", el("code", {}, made.name)),
          args,
        ),
      );
  }

  /** Show fields for tool results, which the user enters in place of a program. */
  #askForResults() {
    const { turn, actions } = this;
    const calls = wholeCalls(turn);
    const fields = calls.map((made) =>
      el("label", {}, `Result of ${made.name}`, el("textarea", { rows: "2", required: true })),
    );
    const form = el(
      "form",
      { class: "results" },
      ...fields,
      el("button", { type: "submit", class: "primary" }, "Continue"),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      calls.forEach((made, index) => {
        made.result = fields[index].querySelector("textarea").value;
        this.calls.children[turn.calls.indexOf(made)].append(
          el("p", { class: "result" }, made.result),
        );
      });
      form.remove();
      actions.proceed();
    });
    this.element.insertBefore(form, this.foot);
  }
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // not complete yet
  }
}

function statsText({ stats, finish, isStopped }) {
  if (!stats) return isStopped ? "stopped" : "";
  const parts = [`${stats.numTokens} tokens`];
  if (stats.perSecond) parts.push(`${stats.perSecond.toFixed(1)} per second`);
  parts.push(`first token after ${(stats.firstMs / 1000).toFixed(2)} s`);
  if (isStopped) parts.push("stopped");
  else if (finish === "length") parts.push("ended at the token limit");
  return parts.join(" · ");
}
