// The timeline panel: the engine's live steps, cache pages, memory and queues.

import { errorBox } from "../api.js";
import { byId, el, show } from "../dom.js";
import { hueOf } from "../models.js";
import { keepField } from "../prefs.js";
import { runDemo } from "./demo.js";
import { Feed } from "./feed.js";
import { describe, Lane } from "./lanes.js";

const NUM_LISTED = 25;
const NUM_OWNERS = 8;
const CALM_MS = 1000; // between redraws for users who prefer reduced motion
const HINT = "Point at a step to see its details.";

export function openTimeline(models) {
  keepField(byId("timeline-window"));
  return new TimelinePanel(models);
}

class TimelinePanel {
  lanes = new Map();
  isShown = false;
  isPaused = false;

  constructor(models) {
    this.models = models;
    this.hues = new Map(models.map((model) => [model.id, hueOf(model)]));
    this.feed = new Feed(() => this.#showState());
    this.recent = byId("timeline-recent");
    this.recent.addEventListener("toggle", () => this.#showRecent());
    byId("timeline-pause").addEventListener("click", () => this.#pause());
    byId("timeline-demo").addEventListener("click", () => this.#runDemo());
  }

  enter() {
    if (this.isShown) return;
    this.isShown = true;
    this.feed.open();
    this.#draw();
  }

  leave() {
    this.isShown = false;
    this.feed.close();
  }

  get #windowS() {
    return Number(byId("timeline-window").value);
  }

  #pause() {
    this.isPaused = !this.isPaused;
    byId("timeline-pause").textContent = this.isPaused ? "Resume" : "Pause";
    this.pausedS = this.feed.nowS;
  }

  async #runDemo() {
    const detail = byId("timeline-detail");
    this.isDemo = true;
    this.#showIdle();
    try {
      await runDemo(this.models);
    } catch (error) {
      detail.replaceChildren(errorBox(error));
    }
    this.isDemo = false;
  }

  /** Offer a demo while nothing runs and nothing is to be seen. */
  #showIdle() {
    const { steps, running, nowS, state } = this.feed;
    const isSeen =
      running || steps.some((step) => step.start_s + step.length_s > nowS - this.#windowS);
    show(byId("timeline-idle"), Boolean(state?.is_ready) && !isSeen && !this.isDemo);
  }

  #showState() {
    const { state, trouble } = this.feed;
    byId("timeline").classList.toggle("in-trouble", Boolean(trouble));
    this.#showFacts();
    if (!state) return;
    for (const model of state.models) this.#lane(model).update(model);
    this.#showMemory(state.memory);
    this.#showIdle();
    if (this.recent.open) this.#showRecent();
  }

  #lane(model) {
    if (!this.lanes.has(model.model)) {
      const say = (step) => (byId("timeline-detail").textContent = step ? describe(step) : HINT);
      const lane = new Lane(model, this.#hue(model.model), say);
      this.lanes.set(model.model, lane);
      byId("timeline-lanes").append(lane.element);
    }
    return this.lanes.get(model.model);
  }

  #showFacts() {
    const { state, trouble, device, numDropped } = this.feed;
    const { share, perSecond } = this.feed.busy(this.#windowS);
    const facts = { Engine: trouble || (state?.is_ready ? "ready" : "not ready"), Device: device };
    if (state) {
      facts.Jobs = String(state.num_jobs);
      facts["Device busy"] = `${Math.round(share * 100)} %`;
      facts["Steps per second"] = perSecond.toFixed(1);
    }
    if (numDropped) facts["Not shown"] = `${numDropped} steps`;
    const shown = Object.entries(facts).map(([name, value]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, value)),
    );
    byId("timeline-facts").replaceChildren(...shown);
  }

  #showMemory({ budget_bytes: budget, owners }) {
    const used = sumOf(owners);
    const shown = owners.slice(0, NUM_OWNERS);
    const rest = sumOf(owners.slice(NUM_OWNERS));
    if (rest) shown.push({ owner: "others", num_bytes: rest });
    const bar = byId("timeline-memory");
    bar.setAttribute("aria-label", `${size(used)} of ${size(budget)} in use`);
    byId("timeline-used").textContent = `${size(used)} of ${size(budget)}`;
    bar.replaceChildren(
      ...shown.map(({ owner, num_bytes: bytes }) => {
        const name = `${this.#hue(owner)} ${useOf(owner)}`;
        const part = el("span", { class: name, title: `${owner}: ${size(bytes)}` });
        part.style.width = `${(100 * bytes) / Math.max(budget, used)}%`;
        return part;
      }),
    );
    const rows = shown.map(({ owner, num_bytes: bytes }) =>
      row(`${this.#hue(owner)} ${useOf(owner)}`, owner, bytes),
    );
    byId("timeline-owners").replaceChildren(...rows, row("", "free", Math.max(0, budget - used)));
  }

  /** Return the color name of a memory owner's model. */
  #hue(owner) {
    return this.hues.get(owner.split("/")[0]) ?? "shared";
  }

  #showRecent() {
    const rows = this.feed.steps
      .slice(-NUM_LISTED)
      .reverse()
      .map((step) => {
        const kind = step.num_steps > 1 ? `${step.num_steps} × ${step.kind}` : step.kind;
        const values = [step.model, kind, step.num_rows, (step.busy_s * 1000).toFixed(1)];
        return el("tr", {}, ...values.map((value) => el("td", {}, String(value))));
      });
    byId("timeline-steps").replaceChildren(...rows);
  }

  #draw() {
    if (!this.isShown) return;
    const nowS = this.isPaused ? this.pausedS : this.feed.nowS;
    for (const lane of this.lanes.values()) lane.draw(this.feed, nowS, this.#windowS);
    const isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (isCalm) setTimeout(() => this.#draw(), CALM_MS);
    else requestAnimationFrame(() => this.#draw());
  }
}

/** Return the name of a shade: weights are darker than what a model works with. */
const useOf = (owner) => (owner.endsWith("/weights") ? "weights" : "working");

const sumOf = (owners) => owners.reduce((sum, { num_bytes: bytes }) => sum + bytes, 0);

function row(hue, name, bytes) {
  const amount = el("span", { class: "amount" }, size(bytes));
  return el("li", {}, el("span", { class: `chip-dot ${hue}` }), el("span", {}, name), amount);
}

function size(bytes) {
  const isLarge = bytes >= 2 ** 30;
  return isLarge ? `${(bytes / 2 ** 30).toFixed(2)} GiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`;
}
