// An image in the gallery: previews during generation, then the image and its buttons.

import { el, iconButton, icon } from "../dom.js";
import { blobOf } from "../images.js";

export class ImageView {
  blob = null;
  #url = null;

  /** `place` is shown if a request has several images: "2 of 4". */
  constructor(prompt, place, actions) {
    Object.assign(this, { prompt, place, actions });
    this.image = el("img", { alt: `Preview: ${prompt}`, hidden: true });
    this.bar = el("progress", { max: "1", "aria-label": "Steps done" });
    this.note = el("figcaption", { class: "note" }, "Waiting");
    this.frame = el("div", { class: "generated generating" }, this.image);
    this.element = el("figure", {}, this.frame, this.bar, this.note);
  }

  progress({ step, num_steps: numSteps, queue_position: place }) {
    if (place > 0) this.note.textContent = `${place} ahead in the queue`;
    else if (numSteps) this.note.textContent = `Step ${step} of ${numSteps}`;
    if (numSteps) Object.assign(this.bar, { max: numSteps, value: step });
  }

  preview(base64, type) {
    URL.revokeObjectURL(this.#url);
    this.blob = blobOf(base64, type);
    this.#url = URL.createObjectURL(this.blob);
    this.image.src = this.#url;
    this.image.hidden = false;
  }

  finish(base64, type, { seed, size }) {
    this.preview(base64, type);
    this.image.alt = this.prompt;
    this.frame.classList.remove("generating");
    this.bar.remove();
    this.seed = seed;
    const save = el(
      "a",
      {
        class: "button quiet icon",
        href: this.#url,
        download: `${name(this.prompt)}.png`,
        "aria-label": "Download",
      },
      icon("download"),
    );
    const buttons = [
      save,
      iconButton("seed", `Use seed ${seed} again`, () => this.actions.useSeed(seed)),
      iconButton("edit", "Edit this image", () => this.actions.edit(this.blob)),
    ];
    this.note.replaceChildren(
      el(
        "span",
        {},
        [size.replace("x", " × "), `seed ${seed}`, this.place].filter(Boolean).join(" · "),
      ),
      el("span", { class: "buttons" }, ...buttons),
    );
  }

  /** Remove an unfinished image. */
  drop() {
    if (this.bar.isConnected) this.element.remove();
  }
}

const name = (prompt) =>
  prompt
    .toLowerCase()
    .replace(/[^\p{L}\d]+/gu, "-")
    .slice(0, 40) || "image";
