// A picture: previews during generation, then the image and its buttons.

import { el, iconButton, icon } from "../dom.js";
import { blobOf } from "../images.js";

export class ImageView {
  picture = null; // {prompt, seed, size, blob} once it is complete
  #url = null;
  #startedMs = 0;

  /** `place` is shown if a request has several images: "2 of 4".
   *
   * `actions` are the handlers of the buttons, called with the picture: `open`, and any of `ask`,
   * `useSeed`, `edit`, `remove`. Without `hasButtons`, the caller shows them.
   */
  constructor(prompt, place, actions, { hasButtons = true } = {}) {
    Object.assign(this, { prompt, place, actions, hasButtons });
    this.image = el("img", { alt: `Preview: ${prompt}`, hidden: true });
    this.bar = el("progress", { max: "1", "aria-label": "Steps done" });
    this.note = el("figcaption", { class: "note" }, "Waiting");
    this.frame = el("div", { class: "generated generating" }, this.image);
    this.element = el("figure", {}, this.frame, this.bar, this.note);
  }

  /** Show a picture of an earlier visit. */
  static of(picture, actions, options) {
    const view = new ImageView(picture.prompt, "", actions, options);
    view.#show(picture.blob);
    view.#complete(picture);
    return view;
  }

  /** Show why the request waits. */
  wait(text) {
    this.note.textContent = text || "Waiting";
  }

  progress({ step, num_steps: numSteps, queue_position: place }) {
    if (place > 0) this.wait(`${place} ahead in the queue`);
    else if (numSteps) {
      this.#startedMs ||= performance.now();
      this.wait(`Step ${step} of ${numSteps}${this.#leftText(step, numSteps)}`);
    }
    if (numSteps) Object.assign(this.bar, { max: numSteps, value: step });
  }

  #leftText(step, numSteps) {
    if (step < 2) return "";
    const perStepMs = (performance.now() - this.#startedMs) / step;
    return ` · about ${Math.max(1, Math.round((perStepMs * (numSteps - step)) / 1000))} s left`;
  }

  preview(base64, type) {
    this.#show(blobOf(base64, type));
  }

  #show(blob) {
    URL.revokeObjectURL(this.#url);
    this.blob = blob;
    this.#url = URL.createObjectURL(blob);
    this.image.src = this.#url;
    this.image.hidden = false;
  }

  finish(base64, type, { seed, size }) {
    this.preview(base64, type);
    this.#complete({ prompt: this.prompt, seed, size, blob: this.blob });
  }

  #complete(picture) {
    this.picture = picture;
    const { prompt, seed, size } = picture;
    this.image.alt = prompt;
    this.frame.classList.remove("generating");
    this.bar.remove();
    const open = el(
      "button",
      { type: "button", class: "open", "aria-label": "Full screen", title: "Full screen" },
      this.image,
    );
    open.addEventListener("click", () => this.actions.open(picture));
    this.frame.replaceChildren(open);
    const about = [size.replace("x", " × "), `seed ${seed}`, this.place].filter(Boolean);
    this.note.replaceChildren(
      el("span", { class: "of-prompt", title: prompt }, prompt),
      el("span", {}, about.join(" · ")),
    );
    if (this.hasButtons)
      this.note.append(el("span", { class: "buttons" }, ...pictureButtons(picture, this.actions)));
  }

  /** Remove an unfinished image. */
  drop() {
    if (!this.picture) this.element.remove();
  }
}

/** Create the buttons below a picture. */
export function pictureButtons(picture, actions) {
  const { ask, useSeed, edit, remove } = actions;
  const { seed } = picture;
  return [
    ask && iconButton("eye", "Ask about this picture", () => ask(picture)),
    useSeed && iconButton("seed", `Use seed ${seed} again`, () => useSeed(picture)),
    edit && iconButton("edit", "Edit this image", () => edit(picture)),
    saveLink(picture),
    remove && iconButton("bin", "Delete", () => remove(picture)),
  ].filter(Boolean);
}

/** Create a link that saves a picture; its address is made when it is used. */
function saveLink({ blob, prompt }) {
  const extension = blob.type.split("/")[1] ?? "png";
  const link = el(
    "a",
    {
      class: "button quiet icon",
      href: "#images",
      download: `${nameOf(prompt)}.${extension}`,
      "aria-label": "Download",
      title: "Download",
      onclick: () => (link.href = URL.createObjectURL(blob)),
    },
    icon("download"),
  );
  return link;
}

const nameOf = (prompt) =>
  prompt
    .toLowerCase()
    .replace(/[^\p{L}\d]+/gu, "-")
    .slice(0, 40) || "image";
