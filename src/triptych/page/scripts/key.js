// The API key: asked for where the server demands one, kept for the tab alone.

import { byId } from "./dom.js";

const STORED = "triptych-key";
let asking = null;

export const key = () => sessionStorage.getItem(STORED) ?? "";

/** Ask for a key; those who ask meanwhile share the answer. */
export function askForKey() {
  asking ??= ask().finally(() => (asking = null));
  return asking;
}

function ask() {
  const dialog = byId("key-dialog");
  const input = byId("key-input");
  if (key()) byId("key-note").textContent = "The server does not know this key. Try another.";
  input.value = "";
  dialog.showModal();
  return new Promise((resolve, reject) => {
    byId("key-form").onsubmit = () => {
      sessionStorage.setItem(STORED, input.value.trim());
      resolve();
    };
    dialog.oncancel = () => reject(new DOMException("No key was given.", "AbortError"));
  });
}
