// The embeddings panel: a table of the cosine similarity of each pair of texts, in color.

import { call, errorBox, isAborted } from "./api.js";
import { showCode } from "./code/dialog.js";
import { byId, el } from "./dom.js";
import { chooseModel } from "./models.js";
import { sayWhileWaiting } from "./server.js";

const MAX_TEXTS = 40;

export function openEmbeddings(models) {
  const able = [...models].filter((model) => ["embedding", "chat"].includes(model.task));
  able.sort((one, other) => (other.task === "embedding") - (one.task === "embedding"));
  chooseModel(byId("embed-model"), able);
  byId("embed-form").addEventListener("submit", (event) => {
    event.preventDefault();
    compare();
  });
  byId("embed-code").addEventListener("click", () =>
    showCode([{ task: "embedding", fields: { model: byId("embed-model").value, input: texts() } }]),
  );
}

const texts = () =>
  byId("embed-texts")
    .value.split("\n")
    .map((line) => line.trim())
    .filter(Boolean)
    .slice(0, MAX_TEXTS);

async function compare() {
  const input = texts();
  const model = byId("embed-model").value;
  const result = byId("embed-result");
  const status = byId("embed-status");
  status.textContent = "Comparing …";
  const stopWaiting = sayWhileWaiting(
    model,
    (text) => (status.textContent = text || "Comparing …"),
  );
  try {
    const response = await call("/v1/embeddings", { json: { model, input } });
    stopWaiting();
    const { data, usage } = await response.json();
    const vectors = data.map((entry) => unit(entry.embedding));
    result.replaceChildren(table(input, vectors));
    status.textContent = `${input.length} texts, ${usage.prompt_tokens} tokens, vectors of ${vectors[0].length} numbers.`;
  } catch (error) {
    stopWaiting();
    status.textContent = "";
    if (!isAborted(error)) result.replaceChildren(errorBox(error, compare));
  }
}

function unit(vector) {
  const length = Math.hypot(...vector) || 1;
  return vector.map((value) => value / length);
}

const cosine = (one, other) => one.reduce((sum, value, index) => sum + value * other[index], 0);

function table(texts, vectors) {
  const similarity = vectors.map((row) => vectors.map((column) => cosine(row, column)));
  const others = similarity.flatMap((row, index) => row.filter((_, column) => column !== index));
  const [low, high] = others.length ? [Math.min(...others), Math.max(...others)] : [0, 1];
  const share = (value) => Math.min(1, Math.max(0, (value - low) / (high - low || 1)));
  const heads = texts.map((text, index) =>
    el("th", { scope: "col", title: text, "aria-label": text }, String(index + 1)),
  );
  const rows = texts.map((text, row) => {
    const cells = similarity[row].map((value, column) =>
      cell(value, row === column ? 1 : share(value), row === column),
    );
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, el("span", { class: "number" }, String(row + 1)), text),
      ...cells,
    );
  });
  const caption = el("caption", { class: "sr" }, "Cosine similarity of each pair of texts");
  const head = el("thead", {}, el("tr", {}, el("td", {}), ...heads));
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Similarity table" },
    el("table", {}, caption, head, el("tbody", {}, ...rows)),
  );
}

function cell(value, share, isSame) {
  const shown = el("td", { class: isSame ? "same" : "" }, value.toFixed(2));
  shown.style.setProperty("--share", share.toFixed(3));
  return shown;
}
