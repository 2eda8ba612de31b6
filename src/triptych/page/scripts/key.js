// The API key: entered if the server requires one, stored for the tab only.

import { byId } from "./dom.js";

const STORED = "triptych-key";
const listeners = [];
let asking = null;

export const key = () => sessionStorage.getItem(STORED) ?? "";

/** Call `listener` after each entry of a key. */
export const onKey = (listener) => listeners.push(listener);

/** Prompt for a key; concurrent callers share the result. */
export function askForKey() {
  asking ??= ask().finally(() => (asking = null));
  return asking;
}

function ask() {
  const dialog = byId("key-dialog");
  const input = byId("key-input");
  if (key())
    byId("key-note").textContent = "The server does not accept this key. Enter another one.";
  input.value = "";
  dialog.showModal();
  return new Promise((resolve, reject) => {
    byId("key-form").onsubmit = () => {
      sessionStorage.setItem(STORED, input.value.trim());
      for (const listener of listeners) listener();
      resolve();
    };
    dialog.oncancel = () => reject(new DOMException("No key was given.", "AbortError"));
  });
}
