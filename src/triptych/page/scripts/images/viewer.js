// A picture on the full screen, with the earlier and the later ones.

import { byId, show } from "../dom.js";
import { pictureButtons } from "./gallery.js";

const MAX_SCALE = 4; // small pictures are enlarged up to this

let shown = null; // {pictures, at, actions}

/** Show `picture`, one of `pictures`; `actions` are those of its buttons. */
export function openViewer(picture, pictures, actions) {
  listenOnce();
  shown = { pictures, at: pictures.indexOf(picture), actions: closing(actions) };
  showPicture();
  byId("viewer").showModal();
}

/** Return `actions`, each of which closes the viewer first. */
function closing(actions) {
  const entries = Object.entries(actions).filter(([, act]) => act);
  const closed = ([name, act]) => [name, (picture) => (byId("viewer").close(), act(picture))];
  return Object.fromEntries(entries.map(closed));
}

let isListening = false;
function listenOnce() {
  if (isListening) return;
  isListening = true;
  const viewer = byId("viewer");
  byId("viewer-close").addEventListener("click", () => viewer.close());
  byId("viewer-before").addEventListener("click", () => move(-1));
  byId("viewer-next").addEventListener("click", () => move(1));
  viewer.addEventListener("click", ({ target }) => {
    if (target === viewer || target.className === "viewer-stage") viewer.close();
  });
  viewer.addEventListener("keydown", ({ key }) => {
    if (key === "ArrowLeft") move(-1);
    if (key === "ArrowRight") move(1);
  });
  byId("viewer-image").addEventListener("load", enlarge);
  window.addEventListener("resize", enlarge);
}

function move(step) {
  const at = shown.at + step;
  if (!shown.pictures[at]) return;
  shown.at = at;
  showPicture();
}

function showPicture() {
  const { pictures, at, actions } = shown;
  const { prompt, seed, size, blob } = pictures[at];
  const image = byId("viewer-image");
  URL.revokeObjectURL(image.src);
  image.src = URL.createObjectURL(blob);
  image.alt = prompt;
  byId("viewer-caption").textContent = `${prompt} · ${size.replace("x", " × ")} · seed ${seed}`;
  byId("viewer-buttons").replaceChildren(...pictureButtons(pictures[at], actions));
  show(byId("viewer-before"), at > 0);
  show(byId("viewer-next"), at < pictures.length - 1);
}

function enlarge() {
  const image = byId("viewer-image");
  const { clientWidth: width, clientHeight: height } = image.parentElement;
  const { naturalWidth: own, naturalHeight: tall } = image;
  const scale = Math.min(MAX_SCALE, (width - 16) / own, height / tall);
  if (!Number.isFinite(scale) || scale <= 0) return;
  image.style.width = `${own * scale}px`;
  image.style.height = `${tall * scale}px`;
}
