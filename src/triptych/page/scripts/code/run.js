// A request of the API reference, sent from the page, with what the server answered.

import { call, errorBox, isAborted } from "../api.js";
import { codeBlock, el } from "../dom.js";
import { sayWhileWaiting } from "../server.js";
import { ROUTES, whole } from "./snippets.js";

const MAX_SHOWN_CHARS = 3000;

/** Whether a request can be sent without a file of the user. */
export const canRun = ({ task }) => task !== "transcription";

/** Send a request, and show the answer in `place`. */
export async function run({ task, fields }, place) {
  const note = el("p", { class: "note", role: "status" }, "Waiting for the answer");
  place.replaceChildren(note);
  const stopWaiting = sayWhileWaiting(fields.model, (text) => (note.textContent = text));
  const startedMs = performance.now();
  try {
    const response = await call(ROUTES[task], { json: whole(task, fields) });
    const type = response.headers.get("content-type");
    const body = await response.blob();
    const elapsedS = (performance.now() - startedMs) / 1000;
    note.textContent = `${response.status}, ${type}, ${elapsedS.toFixed(2)} s`;
    place.append(...(await shown(task, body)));
  } catch (error) {
    if (isAborted(error)) note.textContent = "";
    else place.replaceChildren(errorBox(error));
  }
  stopWaiting();
}

async function shown(task, body) {
  if (task === "speech") {
    const src = URL.createObjectURL(body);
    return [el("audio", { controls: true, autoplay: true, src, "aria-label": "The speech" })];
  }
  const reply = JSON.parse(await body.text());
  const text = JSON.stringify(reply, shorten, 2);
  const block = codeBlock(text.slice(0, MAX_SHOWN_CHARS), "JSON");
  return task === "image" ? [...pictures(reply), block] : [block];
}

const pictures = ({ data }) =>
  data.map(({ b64_json: base64 }) =>
    el("img", { src: `data:image/png;base64,${base64}`, alt: "The picture" }),
  );

/** Shorten long lists of numbers and long texts, for the screen only. */
function shorten(name, value) {
  if (name === "embedding") return [...value.slice(0, 4), `… ${value.length} numbers`];
  return typeof value === "string" && value.length > 400 ? `${value.slice(0, 80)} …` : value;
}
