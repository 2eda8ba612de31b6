// The images panel: generation with previews, edits of an image, and the pictures of earlier visits.

import { errorBox, isAborted } from "../api.js";
import { showCode } from "../code/dialog.js";
import { byId, chips, el, onFilePick, onFiles, show } from "../dom.js";
import { DRAW, pictureOf, seedOf, STYLES } from "../examples.js";
import { bitmapOf } from "../images.js";
import { onKey } from "../key.js";
import { chooseModel } from "../models.js";
import { keepField, resetFields } from "../prefs.js";
import { isKeeping, newId, pictures } from "../store.js";
import { toast } from "../toast.js";
import { ImageView } from "./gallery.js";
import { MaskPainter } from "./mask.js";
import { generateInto, randomSeed } from "./request.js";
import { chosenSize, offerSizes, openSizes } from "./sizes.js";
import { openViewer } from "./viewer.js";

const NUM_KEPT = 60; // pictures
const NUM_DRAWN = 4; // of an example
const KEPT = ["image-negative", "image-count", "image-steps", "image-strength"];
const RESET = ["image-shape", "image-size", "image-seed", ...KEPT];

/** `links.ask` opens the chat with a picture, if a model sees. Returns {draw}. */
export function openImages(models, links) {
  const drawing = models.filter((model) => model.task === "image");
  chooseModel(byId("image-model"), drawing);
  openSizes();
  const panel = new ImagesPanel(drawing, links);
  KEPT.forEach((id) => keepField(byId(id)));
  return { draw: (prompt, num) => panel.draw(prompt, num) };
}

class ImagesPanel {
  stopping = null;
  isEdit = false;
  views = []; // the latest first

  constructor(models, links) {
    this.models = models;
    this.status = byId("image-status");
    this.results = byId("image-results");
    this.painter = new MaskPainter(byId("mask-image"), byId("mask-paint"), byId("mask-brush"));
    this.actions = {
      open: (picture) => openViewer(picture, this.#pictures(), this.actions),
      ask: links.ask,
      useSeed: ({ seed, prompt }) => this.#useSeed(seed, prompt),
      edit: ({ blob }) => this.#open(blob),
      remove: (picture) => this.#remove([picture]),
    };
    this.#listen();
    this.#fillExamples();
    this.#restore();
    onKey(() => this.#restore());
  }

  #listen() {
    byId("image-form").addEventListener(
      "submit",
      (event) => (event.preventDefault(), this.generate()),
    );
    byId("image-stop").addEventListener("click", () => this.stopping?.abort());
    byId("image-open").addEventListener("click", () => byId("image-file").click());
    onFilePick(byId("image-file"), ([file]) => this.#open(file));
    byId("image-source-drop").addEventListener("click", () => this.#leaveEdit());
    byId("mask-clear").addEventListener("click", () => this.painter.clear());
    byId("image-reset").addEventListener("click", () => resetFields(RESET.map(byId)));
    byId("image-clear").addEventListener("click", () => this.#remove(this.#pictures()));
    byId("image-code").addEventListener("click", () =>
      showCode([{ task: "image", fields: this.#fields() }]),
    );
    const showStrength = ({ target }) =>
      (byId("image-strength-shown").textContent = Number(target.value).toFixed(2));
    byId("image-strength").addEventListener("input", showStrength);
    byId("image-model").addEventListener("change", () => this.#offerSizes());
    onFiles(byId("images"), ([file]) => this.#open(file));
    this.#offerSizes();
  }

  #offerSizes() {
    const model = this.models.find(({ id }) => id === byId("image-model").value);
    offerSizes(model?.default_size);
  }

  #fillExamples() {
    const prompt = byId("image-prompt");
    const use = (text) => ((prompt.value = text), prompt.focus());
    byId("image-examples").append(...chips(DRAW, use));
    const addStyle = (style) => {
      const plain = STYLES.reduce((text, each) => text.replace(`, ${each}`, ""), prompt.value);
      prompt.value = `${plain.trim()}, ${style}`;
    };
    byId("image-styles").append(...chips(STYLES, addStyle));
  }

  // -- the gallery ----------------------------------------------------------------------------

  async #restore() {
    const kept = await pictures.all().catch(() => []);
    kept.sort((one, other) => other.createdMs - one.createdMs);
    pictures.take(kept.splice(NUM_KEPT).map(({ id }) => id)).catch(() => {});
    const views = isKeeping() ? kept.map((picture) => ImageView.of(picture, this.actions)) : [];
    this.views = [...this.views.filter(({ picture }) => !picture), ...views];
    this.results.replaceChildren(...this.views.map((view) => view.element));
    this.#showEmpty();
  }

  #pictures() {
    return this.views.map((view) => view.picture).filter(Boolean);
  }

  /** Delete pictures, until the user wants them back. */
  #remove(gone) {
    const before = this.views;
    const views = before.filter(({ picture }) => gone.includes(picture));
    this.views = before.filter((view) => !views.includes(view));
    for (const { element } of views) element.remove();
    const taken = pictures.take(views.map(({ picture }) => picture.id)).catch(() => []);
    this.#showEmpty();
    const text = gone.length === 1 ? "The picture is deleted." : "The pictures are deleted.";
    toast(text, { label: "Undo", run: () => this.#putBack(before, taken) });
  }

  /** Put back deleted pictures, in the order of `before`, below what came later. */
  async #putBack(before, taken) {
    this.views = [...this.views.filter((view) => !before.includes(view)), ...before];
    this.results.replaceChildren(...this.views.map((view) => view.element));
    this.#showEmpty();
    await pictures.restore(await taken).catch(() => {});
  }

  /** Show examples while there are no pictures. */
  #showEmpty() {
    show(byId("image-clear"), this.views.length > 0);
    this.results.querySelector(".invitation")?.remove();
    if (this.views.length) return;
    const tiles = DRAW.map((prompt) => this.#tile(prompt));
    const hello = el(
      "p",
      { class: "empty" },
      "Pictures appear here while they are drawn. Try one:",
    );
    this.results.append(
      el("div", { class: "invitation" }, hello, el("div", { class: "tiles" }, ...tiles)),
    );
  }

  #tile(prompt) {
    const draw = () => this.draw(prompt, NUM_DRAWN);
    const image = el("img", { src: pictureOf(prompt), alt: "" });
    return el("button", { type: "button", class: "tile", onclick: draw }, image, prompt);
  }

  #useSeed(seed, prompt) {
    byId("image-seed").value = seed;
    byId("image-prompt").value = prompt;
    this.status.textContent = `Seed ${seed} is set.`;
  }

  // -- edits ------------------------------------------------------------------------------------

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

  async #editFiles() {
    if (!this.isEdit) return null;
    const files = { strength: byId("image-strength").value, image: await this.painter.image() };
    return this.painter.isPainted ? { ...files, mask: await this.painter.mask() } : files;
  }

  // -- generation -------------------------------------------------------------------------------

  /** Draw `num` pictures of an example; the first ones with a seed that is known to be good. */
  draw(prompt, num) {
    this.#leaveEdit();
    byId("image-prompt").value = prompt;
    return this.generate({ n: num, seed: this.views.length ? randomSeed() : seedOf(prompt) });
  }

  async generate(more = {}) {
    this.stopping?.abort();
    const stopping = (this.stopping = new AbortController());
    const fields = { ...this.#fields(), ...more };
    fields.seed ??= randomSeed();
    const views = this.#addViews(fields);
    this.#setBusy(true);
    const startedMs = performance.now();
    try {
      const onDone = (view) => this.#keep(view, fields);
      const edit = await this.#editFiles();
      await generateInto(views, fields, { signal: stopping.signal, edit, onDone });
      this.status.textContent = `Generated in ${((performance.now() - startedMs) / 1000).toFixed(1)} s.`;
    } catch (error) {
      if (isAborted(error)) this.status.textContent = "Stopped.";
      else this.status.replaceChildren(errorBox(error, () => this.generate(more)));
    }
    views.forEach((view) => view.drop());
    this.views = this.views.filter((view) => view.picture || view.element.isConnected);
    this.#showEmpty();
    if (this.stopping === stopping) this.#setBusy(false);
  }

  #addViews({ prompt, n: num }) {
    const placeOf = (index) => (num > 1 ? `${index + 1} of ${num}` : "");
    const views = Array.from(
      { length: num },
      (_, index) => new ImageView(prompt, placeOf(index), this.actions),
    );
    this.views.unshift(...views);
    this.results.prepend(...views.map((view) => view.element));
    this.#showEmpty();
    return views;
  }

  #keep({ picture }, { model }) {
    Object.assign(picture, { id: newId(), model, createdMs: Date.now() });
    pictures.put(picture).catch(() => {}); // a full disk: not kept
  }

  #fields() {
    const fields = {
      prompt: byId("image-prompt").value.trim(),
      model: byId("image-model").value,
      n: Number(byId("image-count").value) || 1,
    };
    const optional = {
      size: chosenSize(),
      steps: byId("image-steps").value,
      seed: byId("image-seed").value,
      negative_prompt: byId("image-negative").value.trim(),
    };
    for (const [name, value] of Object.entries(optional)) {
      if (value) fields[name] = ["steps", "seed"].includes(name) ? Number(value) : value;
    }
    return fields;
  }

  #setBusy(isBusy) {
    show(byId("image-stop"), isBusy);
    byId("image-go").disabled = isBusy;
    if (isBusy) this.status.textContent = "Generating";
  }
}
