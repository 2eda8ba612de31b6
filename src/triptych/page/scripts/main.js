// The page's frame: its panels and the ways between them.

import { errorBox, getJson, isAborted } from "./api.js";
import { byId, show } from "./dom.js";
import { openChat } from "./chat/panel.js";
import { openEmbeddings } from "./embeddings.js";
import { openImages } from "./images/panel.js";
import { seesImages } from "./models.js";
import { markLink, servedPanels, showLinks, watchHealth } from "./rail.js";
import { openSpeech } from "./speech/panel.js";
import { openTalk } from "./talk/panel.js";
import { openTimeline } from "./timeline/panel.js";

const PANELS = {
  chat: openChat,
  talk: openTalk,
  speech: openSpeech,
  images: openImages,
  embeddings: openEmbeddings,
  timeline: openTimeline,
};
const NUM_DRAWN = 4; // pictures of an example

const panels = new Map();

async function start() {
  watchHealth();
  const note = byId("start");
  try {
    const { data } = await getJson("/v1/models");
    openPanels(data);
    showLinks(data);
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
  const links = linksFor(models);
  for (const name of servedPanels(models)) panels.set(name, PANELS[name](models, links) ?? {});
}

/** Return the ways from one panel to another: {speak, draw, ask}, null without a model for it. */
function linksFor(models) {
  const has = (task) => models.some((model) => model.task === task);
  const go = (name, act) => (given) => {
    location.hash = name;
    act(panels.get(name), given);
  };
  return {
    speak: has("speech") ? go("speech", (panel, text) => panel.speak(text)) : null,
    draw: has("image") ? go("images", (panel, prompt) => panel.draw(prompt, NUM_DRAWN)) : null,
    ask: models.some(seesImages) ? go("chat", (panel, picture) => panel.ask(picture)) : null,
  };
}

function showPanel({ isMoved = false } = {}) {
  const wanted = location.hash.slice(1);
  const shown = panels.has(wanted) ? wanted : panels.keys().next().value;
  for (const [name, panel] of panels) {
    show(byId(name), name === shown);
    if (name === shown) panel.enter?.();
    else panel.leave?.();
  }
  markLink(shown);
  const link = document.querySelector(`nav [data-panel="${shown}"]`);
  document.title = `${link.textContent} · Triptych`;
  if (isMoved && shown !== "chat") byId("main").focus({ preventScroll: true });
}

start();
