// The images panel: generation with previews, and edits of an image.

import { call, errorBox, events, isAborted } from "../api.js";
import { byId, el, fill, onFiles, show } from "../dom.js";
import { bitmapOf } from "../images.js";
import { ImageView } from "./gallery.js";
import { MaskPainter } from "./mask.js";

const NUM_PREVIEWS = 3; // the maximum
const SHAPES = [
  [1, 1],
  [4, 3],
  [3, 4],
  [3, 2],
  [2, 3],
];
const MULTIPLE = 32;

export function openImages(models) {
  fill(
    byId("image-model"),
    models.filter((model) => model.task === "image").map((model) => model.id),
  );
  new ImagesPanel();
}

class ImagesPanel {
  stopping = null;
  isEdit = false;

  constructor() {
    this.status = byId("image-status");
    this.painter = new MaskPainter(byId("mask-image"), byId("mask-paint"), byId("mask-brush"));
    this.actions = {
      useSeed: (seed) => {
        byId("image-seed").value = seed;
        this.status.textContent = `Seed ${seed} is set.`;
      },
      edit: (blob) => this.#open(blob),
    };
    this.#listen();
  }

  #listen() {
    byId("image-form").addEventListener("submit", (event) => (event.preventDefault(), this.generate()));
    byId("image-stop").addEventListener("click", () => this.stopping?.abort());
    byId("image-open").addEventListener("click", () => byId("image-file").click());
    byId("image-file").addEventListener("change", ({ target }) => {
      if (target.files[0]) this.#open(target.files[0]);
      target.value = "";
    });
    byId("image-source-drop").addEventListener("click", () => this.#leaveEdit());
    byId("mask-clear").addEventListener("click", () => this.painter.clear());
    byId("image-strength").addEventListener(
      "input",
      ({ target }) => (byId("image-strength-shown").textContent = Number(target.value).toFixed(2)),
    );
    onFiles(byId("images"), ([file]) => this.#open(file));
  }

  /** Open an image to edit. */
  async #open(blob) {
    try {
      show(byId("image-source"));
      this.painter.open(await bitmapOf(blob));
      this.status.replaceChildren(); // clears an earlier error
      this.isEdit = true;
      byId("image-go").textContent = "Generate edit";
      byId("image-source").scrollIntoView({ block: "nearest" });
    } catch (error) {
      this.#leaveEdit();
      this.status.replaceChildren(errorBox(error));
    }
  }

  #leaveEdit() {
    this.isEdit = false;
    show(byId("image-source"), false);
    byId("image-go").textContent = "Generate";
  }

  async generate() {
    const stopping = (this.stopping = new AbortController());
    const fields = this.#fields();
    const views = Array.from(
      { length: fields.n },
      (_, index) =>
        new ImageView(
          fields.prompt,
          fields.n > 1 ? `${index + 1} of ${fields.n}` : "",
          this.actions,
        ),
    );
    const results = byId("image-results");
    results.querySelector(".empty")?.remove();
    results.prepend(...views.map((view) => view.element));
    this.#setBusy(true);
    const startedMs = performance.now();
    try {
      await this.#receive(await this.#ask(fields, stopping.signal), views);
      this.status.textContent = `Generated in ${((performance.now() - startedMs) / 1000).toFixed(1)} s.`;
    } catch (error) {
      if (isAborted(error)) this.status.textContent = "Stopped.";
      else this.status.replaceChildren(errorBox(error, () => this.generate()));
    }
    views.forEach((view) => view.drop());
    this.#setBusy(false);
  }

  #fields() {
    const fields = {
      prompt: byId("image-prompt").value.trim(),
      model: byId("image-model").value,
      n: Number(byId("image-count").value) || 1,
      stream: true,
      partial_images: NUM_PREVIEWS,
      progress: true,
    };
    const optional = {
      size: byId("image-size").value.trim(),
      steps: byId("image-steps").value,
      seed: byId("image-seed").value,
      negative_prompt: byId("image-negative").value.trim(),
    };
    for (const [name, value] of Object.entries(optional)) {
      if (value) fields[name] = ["steps", "seed"].includes(name) ? Number(value) : value;
    }
    return fields;
  }

  async #ask(fields, signal) {
    if (!this.isEdit) return call("/v1/images/generations", { json: fields, signal });
    const form = new FormData();
    for (const [name, value] of Object.entries(fields)) form.append(name, String(value));
    form.append("strength", byId("image-strength").value);
    form.append("image", await this.painter.image(), "image.png");
    if (this.painter.isPainted) form.append("mask", await this.painter.mask(), "mask.png");
    return call("/v1/images/edits", { form, signal });
  }

  async #receive(response, views) {
    for await (const { data } of events(response)) {
      const view = views[data.index];
      const type = `image/${data.output_format}`;
      if (data.type.endsWith(".progress")) view.progress(data);
      else if (data.type.endsWith(".partial_image")) view.preview(data.b64_json, type);
      else if (data.type.endsWith(".completed")) {
        view.finish(data.b64_json, type, data);
        if (!this.isEdit) this.#suggestSizes(data.size);
      }
    }
  }

  /** Suggest sizes with other aspect ratios and as many pixels as the model's default. */
  #suggestSizes(size) {
    if (byId("image-size").value !== "auto") return;
    const [width, height] = size.split("x").map(Number);
    const side = Math.sqrt(width * height);
    const sizes = SHAPES.map(([across, down]) => {
      const scale = side / Math.sqrt(across * down);
      return [across, down]
        .map((part) => Math.max(1, Math.round((part * scale) / MULTIPLE)) * MULTIPLE)
        .join("x");
    });
    byId("image-sizes").replaceChildren(
      ...["auto", ...new Set(sizes)].map((value) => el("option", { value })),
    );
  }

  #setBusy(isBusy) {
    show(byId("image-stop"), isBusy);
    byId("image-go").disabled = isBusy;
    if (isBusy) this.status.textContent = "Generating";
  }
}
