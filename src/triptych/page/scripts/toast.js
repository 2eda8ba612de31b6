// A short message at the bottom of the page, with at most one button.

import { el } from "./dom.js";

const SHOWN_MS = 6000;
let timer = 0;

/** Show `text`; `action` is {label, run}. */
export function toast(text, action = null) {
  document.querySelector(".toast")?.remove();
  clearTimeout(timer);
  const box = el("div", { class: "toast", role: "status" }, el("span", {}, text));
  if (action) {
    const run = () => (box.remove(), action.run());
    box.append(el("button", { type: "button", onclick: run }, action.label));
  }
  document.body.append(box);
  timer = setTimeout(() => box.remove(), SHOWN_MS);
}
