// The choice of a model: its kind, size and state. The select stays the place of the value.

import { el, fill, icon } from "./dom.js";
import { attachMenu } from "./menu.js";
import { keepField } from "./prefs.js";
import { onServer, stateOf, stateText } from "./server.js";

const KINDS = {
  chat: "Text",
  speech: "Speech",
  transcription: "Transcription",
  image: "Images",
  embedding: "Embeddings",
};

export const seesImages = (model) => Boolean(model.input_modalities?.includes("image"));

/** Return the name of a model's color. */
export const hueOf = (model) => (seesImages(model) ? "vision" : model.task);

/** Describe a model: "Text and images · 8,192 tokens · 116 MB". */
export function aboutModel(model) {
  const kind = seesImages(model) ? "Text and images" : (KINDS[model.task] ?? model.task);
  const length = model.max_model_len ? `${model.max_model_len.toLocaleString("en")} tokens` : null;
  const size = model.default_size?.replace("x", " × ");
  return [kind, length, size, bytesText(model.weight_bytes)].filter(Boolean).join(" · ");
}

function bytesText(bytes) {
  if (!bytes) return null;
  return bytes >= 1e9 ? `${(bytes / 1e9).toFixed(1)} GB` : `${Math.ceil(bytes / 1e6)} MB`;
}

/** Fill `select` with `models`, and show a menu in its place. */
export function chooseModel(select, models) {
  fill(
    select,
    models.map((model) => model.id),
  );
  keepField(select);
  const shown = el("span", { class: "model-name" });
  const dot = el("span", { class: "dot" });
  const button = el("button", { type: "button", class: "model-button" }, dot, shown, icon("down"));
  const update = () => {
    const known = stateOf(select.value);
    dot.className = `dot ${known?.state ?? ""}`;
    shown.textContent = select.value;
    const state = stateText(known);
    button.setAttribute("aria-label", `Model: ${select.value}${state ? `, ${state}` : ""}`);
    button.title = state;
  };
  attachMenu(button, () => models.map((model) => entry(model, select)), "Models");
  select.after(button);
  select.addEventListener("change", update);
  onServer(update);
  update();
}

function entry(model, select) {
  const known = stateOf(model.id);
  const about = aboutModel(model);
  return {
    label: [model.id, about, stateText(known), known?.message].filter(Boolean).join(", "),
    isChecked: model.id === select.value,
    nodes: [
      el("span", { class: `swatch ${hueOf(model)}` }),
      el(
        "span",
        { class: "model-about" },
        el("b", {}, model.id),
        el("span", { class: "note" }, about),
        known?.message ? el("span", { class: "note" }, known.message) : null,
      ),
      el(
        "span",
        { class: "model-state" },
        el("span", { class: `dot ${known?.state ?? ""}` }),
        stateText(known),
      ),
    ],
    run: () => setModel(select, model.id),
  };
}

/** Choose a model in a select that `chooseModel` filled. */
export function setModel(select, name) {
  if (select.value === name) return;
  select.value = name;
  select.dispatchEvent(new Event("change", { bubbles: true }));
}
