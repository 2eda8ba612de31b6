// The images that the next message will have.

import { Advice } from "../api.js";
import { byId, el, icon, onFilePick, onFiles, show } from "../dom.js";
import { dataUrlOf } from "../images.js";
import { setModel } from "../models.js";

export class Attachments {
  urls = [];

  /** `seeing` are the names of the models that take images; `complain` shows an error. */
  constructor(seeing, complain) {
    Object.assign(this, { seeing, complain });
    byId("chat-attach").addEventListener("click", () => byId("chat-file").click());
    onFilePick(byId("chat-file"), (files) => this.add(files));
    onFiles(byId("chat"), (files) => this.add(files));
    show(byId("chat-attach"), seeing.size > 0);
  }

  /** Add files, and choose a model that takes them. */
  async add(files) {
    const model = byId("chat-model");
    try {
      if (!this.seeing.size)
        throw new Advice(
          "No served model takes images. Serve a vision model, for example triptych-vision.",
        );
      for (const file of files) this.urls.push(await dataUrlOf(file));
      if (!this.seeing.has(model.value)) setModel(model, [...this.seeing][0]);
    } catch (error) {
      this.complain(error);
    }
    this.#show();
  }

  /** Return the images, and begin without any. */
  take() {
    const taken = this.urls;
    this.urls = [];
    this.#show();
    return taken;
  }

  #show() {
    const list = byId("chat-images");
    list.replaceChildren(...this.urls.map((url, index) => this.#thumb(url, index)));
    show(list, this.urls.length > 0);
  }

  #thumb(url, index) {
    const button = el(
      "button",
      {
        type: "button",
        class: "icon",
        "aria-label": `Remove image ${index + 1}`,
        onclick: () => (this.urls.splice(index, 1), this.#show()),
      },
      icon("close"),
    );
    return el("li", {}, el("img", { src: url, alt: `Image ${index + 1}` }), button);
  }
}
