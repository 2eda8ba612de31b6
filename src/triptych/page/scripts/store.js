// What the page keeps in the browser: chats and pictures, in IndexedDB. Nothing leaves the browser.

import { pref, setPref } from "./prefs.js";

const NAME = "triptych";
const VERSION = 1;
const STORES = ["chats", "pictures"];

let opening = null;

/** Return an id that sorts by time; `crypto.randomUUID` is for secure pages only. */
export const newId = () => `${Date.now()}-${Math.random().toString(36).slice(2)}`;

/** Whether the user wants things kept. */
export const isKeeping = () => pref("keep", true);

export const setKeeping = (isOn) => setPref("keep", isOn ? null : false);

function open() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      for (const name of STORES) request.result.createObjectStore(name, { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("Another tab has an old version of the page open."));
  });
  return opening;
}

async function run(store, mode, act) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(store, mode);
    const request = act(transaction.objectStore(store));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

/** Things of one kind, by their `id`. */
class Collection {
  constructor(name) {
    this.name = name;
  }

  all() {
    return run(this.name, "readonly", (store) => store.getAll());
  }

  /** Store `entry` if the user wants things kept. Returns whether it is stored. */
  async put(entry) {
    if (!isKeeping()) return false;
    await run(this.name, "readwrite", (store) => store.put(entry));
    return true;
  }

  remove(id) {
    return run(this.name, "readwrite", (store) => store.delete(id));
  }
}

export const chats = new Collection("chats");
export const pictures = new Collection("pictures");
