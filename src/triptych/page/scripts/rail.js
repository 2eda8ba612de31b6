// The rail: links to the panels of the served models, and the server's health.

import { byId, show } from "./dom.js";
import { onServer } from "./server.js";

export const TASKS = {
  chat: ["chat"],
  speech: ["speech", "transcription"],
  images: ["image"],
  embeddings: ["embedding", "chat"],
  timeline: null, // always
};

/** Return the names of the panels that some model can serve. */
export function servedPanels(models) {
  const isServed = ([, tasks]) => !tasks || models.some((model) => tasks.includes(model.task));
  return Object.entries(TASKS)
    .filter(isServed)
    .map(([name]) => name);
}

export function showLinks(models) {
  for (const name of servedPanels(models)) show(linkTo(name));
}

/** Mark the link of the shown panel. */
export function markLink(shown) {
  for (const link of document.querySelectorAll("nav [data-panel]")) {
    if (link.dataset.panel === shown) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

const linkTo = (name) => document.querySelector(`nav [data-panel="${name}"]`);

export function watchHealth() {
  onServer((health) => {
    const isReady = health?.status === "ok";
    byId("health").textContent = isReady ? readyText(health) : (health?.reason ?? "No connection");
    byId("health-dot").className = `dot ${isReady ? "ready" : "failed"}`;
  });
}

/** Describe a ready server: how many of its models are loaded. */
function readyText({ models = [] }) {
  const numReady = models.filter(({ state }) => state === "ready").length;
  if (!models.length || numReady === models.length) return "Ready";
  return `Ready: ${numReady} of ${models.length} models awake`;
}
