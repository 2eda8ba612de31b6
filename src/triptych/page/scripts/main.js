// The page's frame: its panels, navigation, and the server's health.

import { errorBox, getJson, isAborted } from "./api.js";
import { byId, show } from "./dom.js";
import { openChat } from "./chat/panel.js";
import { openEmbeddings } from "./embeddings.js";
import { openImages } from "./images/panel.js";
import { openSpeech } from "./speech/panel.js";
import { openTimeline } from "./timeline/panel.js";

const PANELS = {
  chat: { open: openChat, tasks: ["chat"] },
  speech: { open: openSpeech, tasks: ["speech", "transcription"] },
  images: { open: openImages, tasks: ["image"] },
  embeddings: { open: openEmbeddings, tasks: ["embedding", "chat"] },
  timeline: { open: openTimeline, tasks: null },
};
const HEALTH_EVERY_MS = 5000;

const panels = new Map();

async function start() {
  watchHealth();
  const note = byId("start");
  try {
    const { data } = await getJson("/v1/models");
    openPanels(data);
    show(note, false);
    window.addEventListener("hashchange", () => showPanel({ isMoved: true }));
    showPanel();
  } catch (error) {
    if (isAborted(error))
      note.textContent = "This server requires an API key. Reload the page to enter one.";
    else note.replaceChildren(errorBox(error, start));
  }
}

/** Open each panel that a model can serve. */
function openPanels(models) {
  for (const [name, { open, tasks }] of Object.entries(PANELS)) {
    if (tasks && !models.some((model) => tasks.includes(model.task))) continue;
    panels.set(name, open(models) ?? {});
    show(document.querySelector(`[data-panel="${name}"]`));
  }
}

function showPanel({ isMoved = false } = {}) {
  const wanted = location.hash.slice(1);
  const shown = panels.has(wanted) ? wanted : panels.keys().next().value;
  for (const [name, panel] of panels) {
    const isShown = name === shown;
    const link = document.querySelector(`[data-panel="${name}"]`);
    show(byId(name), isShown);
    if (isShown) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    if (isShown) panel.enter?.();
    else panel.leave?.();
  }
  const title = byId(`${shown}-title`).textContent;
  document.title = `${title} · Triptych`;
  if (isMoved) byId("main").focus({ preventScroll: true });
}

async function watchHealth() {
  const health = await fetch("/readyz")
    .then((reply) => reply.json())
    .catch(() => null);
  const isReady = health?.status === "ok";
  byId("health").textContent = isReady ? "Ready" : (health?.reason ?? "No connection");
  byId("health-dot").className = `dot ${isReady ? "good" : "bad"}`;
  setTimeout(watchHealth, HEALTH_EVERY_MS);
}

start();
