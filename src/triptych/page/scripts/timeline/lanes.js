// A lane of the timeline for each model: its name, state and steps.

import { color, el, sharp } from "../dom.js";
import { stateText } from "../server.js";

const DELAY_S = 0.35; // steps arrive four times a second; the delay keeps the motion smooth
const LABEL_PX = 46;
const SHADES = {
  prefill: 0.55,
  mixed: 0.75,
  encode: 0.55,
  audio: 0.6,
  align: 0.6,
  listen: 0.4,
  release: 0.3,
  voice: 0.4,
  begin: 0.5,
  curves: 0.7,
};

export class Lane {
  /** `hue` is the name of its modality's color. */
  constructor(model, hue, onPoint) {
    Object.assign(this, { model, hue });
    this.note = el("span", { class: "lane-note" });
    this.bar = el(
      "span",
      { class: "bar", "aria-hidden": "true" },
      el("span", { class: "used" }),
      el("span", { class: "cached" }),
    );
    this.amount = el("span", { class: "lane-note" });
    this.pages = el("span", { class: "pages", hidden: true }, this.bar, this.amount);
    this.canvas = el("canvas", { role: "img", "aria-label": `Steps of ${model.model}` });
    const name = el("span", { class: "lane-name", title: model.model }, model.model);
    this.element = el(
      "li",
      { class: `lane ${hue}` },
      el(
        "div",
        { class: "lane-head" },
        el("span", { class: "chip" }, hue),
        name,
        this.note,
        this.pages,
      ),
      this.canvas,
    );
    this.canvas.addEventListener("pointermove", ({ offsetX }) => onPoint(this.#at(offsetX)));
    this.canvas.addEventListener("pointerleave", () => onPoint(null));
  }

  /** Show the model's state. */
  update({ state, progress, num_running: running, num_waiting: waiting, pages }) {
    this.note.textContent =
      state === "ready" ? `${running} running, ${waiting} waiting` : stateText({ state, progress });
    this.element.classList.toggle("asleep", state !== "ready");
    this.pages.hidden = !pages;
    if (!pages) return;
    const [used, cached] = this.bar.children;
    used.style.width = `${(100 * pages.num_used) / pages.num_pages}%`;
    cached.style.width = `${(100 * pages.num_cached) / pages.num_pages}%`;
    this.amount.textContent = `${pages.num_used} of ${pages.num_pages} pages`;
    this.pages.title = `${pages.num_used} pages in use, ${pages.num_cached} cached, of ${pages.num_pages}`;
  }

  /** Draw the steps of the last `windowS` seconds. */
  draw(feed, nowS, windowS) {
    const context = sharp(this.canvas);
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const endS = nowS - DELAY_S;
    const scale = width / windowS;
    this.shown = { feed, startS: endS - windowS, endS, scale };
    drawGrid(context, this.shown, width, height);
    context.fillStyle = color(this.hue);
    context.font = `11px ${getComputedStyle(this.canvas).fontFamily}`;
    for (const step of feed.steps) {
      if (step.model !== this.model.model || step.start_s + step.length_s < this.shown.startS)
        continue;
      if (step.start_s < endS) this.#box(context, step, step.length_s, height);
    }
    const { running } = feed;
    if (running?.model === this.model.model && running.start_s < endS)
      this.#box(context, running, endS - running.start_s, height);
  }

  #box(context, step, lengthS, height) {
    const { startS, endS, scale } = this.shown;
    const left = (step.start_s - startS) * scale;
    const width = Math.max(1, Math.min(lengthS, endS - step.start_s) * scale - 0.5);
    const share = step.busy_s && lengthS ? Math.max(0.3, Math.min(1, step.busy_s / lengthS)) : 1;
    const tall = (height - 10) * share;
    context.globalAlpha = SHADES[step.kind] ?? 1;
    if (step.is_failed) context.fillStyle = color("bad");
    context.beginPath();
    context.roundRect(left, 5 + (height - 10 - tall) / 2, width, tall, Math.min(3, width / 2));
    context.fill();
    context.globalAlpha = 1;
    const fill = context.fillStyle;
    if (width > LABEL_PX) {
      context.fillStyle = color((SHADES[step.kind] ?? 1) > 0.7 ? "surface" : "ink");
      context.fillText(step.kind, left + 6, height / 2 + 4, width - 10);
    }
    context.fillStyle = step.is_failed ? color(this.hue) : fill;
  }

  /** Return the step at a position of the canvas. */
  #at(x) {
    if (!this.shown) return null;
    const { feed, startS, scale } = this.shown;
    const moment = startS + x / scale;
    const near = 2 / scale;
    return (
      feed.steps.findLast(
        (step) =>
          step.model === this.model.model &&
          step.start_s - near <= moment &&
          moment <= step.start_s + step.length_s + near,
      ) ?? null
    );
  }
}

/** Draw a line per second, which moves with the steps. */
function drawGrid(context, { startS, endS, scale }, width, height) {
  const every = endS - startS > 20 ? 5 : 1;
  context.fillStyle = color("line");
  for (let second = Math.ceil(startS / every) * every; second < endS; second += every)
    context.fillRect(Math.round((second - startS) * scale), 0, 1, height);
}

/** Describe a step in words. */
export function describe(step) {
  const rows = `${step.num_rows} ${step.num_rows === 1 ? "row" : "rows"}`;
  const many = step.num_steps > 1 ? `${step.num_steps} × ` : "";
  return `${step.model}: ${many}${step.kind}${step.is_failed ? ", failed" : ""}, ${rows}, ${(step.busy_s * 1000).toFixed(1)} ms`;
}
