// A picture in a conversation: drawn from the words of an answer, and something to ask about.

import { errorBox, isAborted } from "../api.js";
import { byId, el, iconButton } from "../dom.js";
import { asDataUrl, blobOfDataUrl } from "../images.js";
import { ImageView, pictureButtons } from "../images/gallery.js";
import { generateInto, randomSeed } from "../images/request.js";
import { openViewer } from "../images/viewer.js";
import { spokenText } from "./aloud.js";

const MAX_PROMPT_CHARS = 200;
const BARE = { hasButtons: false }; // they are below the turn

export const drawingTurn = (prompt, seed = randomSeed()) => ({
  role: "drawing",
  model: byId("image-model").value,
  prompt,
  seed,
  size: "",
  url: "",
});

/** Return the words of an answer to draw: those that are selected, or its first sentence. */
export function promptFrom(element) {
  const selection = getSelection();
  const isInside = selection.rangeCount && element.contains(selection.anchorNode);
  const chosen = isInside ? selection.toString().trim() : "";
  const [first] = spokenText(element).split(/(?<=[.!?])\s/);
  return (chosen || first).replace(/\s+/g, " ").slice(0, MAX_PROMPT_CHARS);
}

/** Create a form for the prompt of a picture; `draw` receives it. */
export function promptForm(prompt, draw) {
  const input = el("input", { value: prompt, "aria-label": "What to draw", required: true });
  const leave = () => form.remove();
  const form = el(
    "form",
    { class: "draw-form" },
    input,
    el("button", { type: "submit", class: "primary" }, "Draw"),
    iconButton("close", "Cancel", leave),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    leave();
    draw(input.value.trim());
  });
  form.addEventListener("keydown", ({ key }) => key === "Escape" && leave());
  return form;
}

/** The element of a drawing turn. */
export class DrawingView {
  constructor(turn, actions) {
    Object.assign(this, { turn, actions });
    this.figure = el("div", { class: "drawn" });
    this.foot = el("div", { class: "turn-foot" });
    this.element = el(
      "article",
      { class: "turn drawing", "aria-label": turn.model },
      this.figure,
      this.foot,
    );
    if (turn.url) this.#restore();
    else this.figure.append(el("p", { class: "note" }, `Not drawn: ${turn.prompt}`));
  }

  #restore() {
    const { prompt, seed, size, url } = this.turn;
    const picture = { prompt, seed, size, blob: blobOfDataUrl(url) };
    this.#show(ImageView.of(picture, this.#pictureActions(), BARE));
  }

  #pictureActions() {
    return { open: (picture) => openViewer(picture, [picture], { ask: this.actions.ask }) };
  }

  #show(view) {
    this.figure.replaceChildren(view.element);
    const { draw } = this.actions; // null without an image model
    const ask = el(
      "button",
      { type: "button", class: "quiet", onclick: () => this.actions.ask(view.picture) },
      "Ask about this picture",
    );
    this.foot.replaceChildren(
      ...(this.actions.ask ? [ask] : []),
      ...(draw ? [iconButton("again", "Draw again", () => draw(this.turn.prompt))] : []),
      ...pictureButtons(view.picture, {}),
    );
  }

  /** Draw the picture of the turn. */
  async run(signal) {
    const { turn } = this;
    const view = new ImageView(turn.prompt, "", this.#pictureActions(), BARE);
    this.element.setAttribute("aria-busy", "true");
    this.figure.replaceChildren(view.element);
    const { prompt, model, seed } = turn;
    try {
      await generateInto([view], { prompt, model, seed, n: 1 }, { signal });
      Object.assign(turn, { size: view.picture.size, url: await asDataUrl(view.picture.blob) });
      this.#show(view);
    } catch (error) {
      const retry = () => this.actions.draw(prompt);
      this.figure.replaceChildren(
        isAborted(error) ? el("p", { class: "note" }, "Stopped.") : errorBox(error, retry),
      );
    }
    this.element.removeAttribute("aria-busy");
    this.actions.grown();
  }
}
