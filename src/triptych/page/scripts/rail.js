// The rail: links to the panels of the served models, and the server's health.

import { byId, show } from "./dom.js";
import { onServer } from "./server.js";

/** Whether a panel can be served, by a function that says whether there is a model of a task. */
const TASKS = {
  chat: (has) => has("chat"),
  talk: (has) => has("chat") && has("transcription"),
  speech: (has) => has("speech") || has("transcription"),
  images: (has) => has("image"),
  embeddings: (has) => has("embedding") || has("chat"),
  timeline: () => true,
};

/** Return the names of the panels that the models can serve. */
export function servedPanels(models) {
  const has = (task) => models.some((model) => model.task === task);
  return Object.keys(TASKS).filter((name) => TASKS[name](has));
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
