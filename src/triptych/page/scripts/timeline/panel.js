// The timeline panel: what the engine does now, step by step, with its pages, memory and queues.

import { byId, el } from "../dom.js";
import { Feed } from "./feed.js";
import { describe, Lane } from "./lanes.js";

const WINDOWS_S = [5, 10, 30, 60];
const NUM_LISTED = 25;
const NUM_OWNERS = 8;
const CALM_MS = 1000; // between drawings for those who want less motion

export function openTimeline(models) {
  const hue = (model) => (model.input_modalities?.includes("image") ? "vision" : model.task);
  return new TimelinePanel(new Map(models.map((model) => [model.id, hue(model)])));
}

class TimelinePanel {
  lanes = new Map();
  isShown = false;
  isPaused = false;

  /** `hues` are the colours of models by their names. */
  constructor(hues) {
    this.hues = hues;
    this.feed = new Feed(() => this.#showState());
    this.#build();
  }

  enter() {
    this.isShown = true;
    this.feed.open();
    this.#draw();
  }

  leave() {
    this.isShown = false;
    this.feed.close();
  }

  #build() {
    this.window = el("select", { "aria-label": "Time shown" }, ...WINDOWS_S.map((seconds) => el("option", { value: String(seconds), selected: seconds === 10 }, `${seconds} s`)));
    this.pausing = el("button", { type: "button", class: "quiet", onclick: () => this.#pause() }, "Pause");
    this.facts = el("dl", { class: "facts" });
    this.list = el("ol", { class: "lanes", "aria-label": "Models" });
    this.detail = el("p", { class: "note detail" }, "Point at a step to see what it was.");
    this.memory = el("div", { class: "memory-bar", role: "img" });
    this.owners = el("ul", { class: "owners" });
    this.recent = el("tbody");
    this.more = el("details", { class: "more", ontoggle: () => this.#showRecent() }, el("summary", {}, "The last steps as a table"),
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "The last steps" },
        el("table", { class: "plain" }, el("thead", {}, el("tr", {}, ...["Model", "Step", "Rows", "Milliseconds"].map((text) => el("th", { scope: "col" }, text)))), this.recent)));
    const head = el("header", { class: "panel-head" }, el("h1", { id: "timeline-title" }, "Timeline"),
      el("p", { class: "lead" }, "What the engine does now: each box is a step on the device."), this.window, this.pausing);
    byId("timeline").append(head, this.facts,
      el("div", { class: "card" }, this.list, el("p", { class: "axis", "aria-hidden": "true" }, el("span", {}, "earlier"), el("span", {}, "now")), this.detail, this.more),
      el("div", { class: "card" }, el("h2", {}, "Memory"), this.memory, this.owners));
  }

  #pause() {
    this.isPaused = !this.isPaused;
    this.pausing.textContent = this.isPaused ? "Go on" : "Pause";
    this.pausedS = this.feed.nowS;
  }

  #showState() {
    const { state, trouble } = this.feed;
    this.#showFacts();
    byId("timeline").classList.toggle("in-trouble", Boolean(trouble));
    if (!state) return;
    for (const model of state.models) this.#lane(model).update(model);
    this.#showMemory(state.memory);
    if (this.more.open) this.#showRecent();
  }

  #lane(model) {
    if (!this.lanes.has(model.model)) {
      const lane = new Lane(model, this.#hue(model.model), (step) => (this.detail.textContent = step ? describe(step) : "Point at a step to see what it was."));
      this.lanes.set(model.model, lane);
      this.list.append(lane.element);
    }
    return this.lanes.get(model.model);
  }

  #showFacts() {
    const { state, trouble, device, numDropped } = this.feed;
    const windowS = Number(this.window.value);
    const { share, perSecond } = this.feed.busy(windowS);
    const facts = [["Engine", trouble || (state?.is_ready ? "ready" : "not ready")], ["Device", device || "–"]];
    if (state) facts.push(["Jobs", String(state.num_jobs)], ["Device busy", `${Math.round(share * 100)} %`], ["Steps a second", perSecond.toFixed(1)]);
    if (numDropped) facts.push(["Not shown", `${numDropped} steps`]);
    this.facts.replaceChildren(...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }

  #showMemory({ budget_bytes: budget, owners }) {
    const used = owners.reduce((sum, { num_bytes: bytes }) => sum + bytes, 0);
    const shown = owners.slice(0, NUM_OWNERS);
    const rest = owners.slice(NUM_OWNERS).reduce((sum, { num_bytes: bytes }) => sum + bytes, 0);
    if (rest) shown.push({ owner: "others", num_bytes: rest });
    this.memory.setAttribute("aria-label", `${size(used)} of ${size(budget)} in use`);
    this.memory.replaceChildren(...shown.map(({ owner, num_bytes: bytes }) => {
      const part = el("span", { class: this.#hue(owner), title: `${owner}: ${size(bytes)}` });
      part.style.width = `${(100 * bytes) / Math.max(budget, used)}%`;
      return part;
    }));
    const rows = shown.map(({ owner, num_bytes: bytes }) => el("li", {}, el("span", { class: `chip-dot ${this.#hue(owner)}` }), el("span", {}, owner), el("span", { class: "amount" }, size(bytes))));
    rows.push(el("li", {}, el("span", { class: "chip-dot" }), el("span", {}, "free"), el("span", { class: "amount" }, size(Math.max(0, budget - used)))));
    this.owners.replaceChildren(...rows);
  }

  /** The colour of what a model, or somebody for it, holds. */
  #hue(owner) {
    return this.hues.get(owner.split("/")[0]) ?? "shared";
  }

  #showRecent() {
    const rows = this.feed.steps.slice(-NUM_LISTED).reverse().map((step) => el("tr", {}, ...[step.model, step.num_steps > 1 ? `${step.num_steps} × ${step.kind}` : step.kind, step.num_rows, (step.busy_s * 1000).toFixed(1)].map((value) => el("td", {}, String(value)))));
    this.recent.replaceChildren(...rows);
  }

  #draw() {
    if (!this.isShown) return;
    const nowS = this.isPaused ? this.pausedS : this.feed.nowS;
    for (const lane of this.lanes.values()) lane.draw(this.feed, nowS, Number(this.window.value));
    const isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (isCalm) setTimeout(() => this.#draw(), CALM_MS);
    else requestAnimationFrame(() => this.#draw());
  }
}

function size(bytes) {
  return bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(2)} GiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`;
}
