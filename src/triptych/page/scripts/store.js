// What the page keeps in the browser: chats and pictures, in IndexedDB. Nothing leaves the browser.
// Each API key has a database of its own. Other tabs get a message about each change.

import { key } from "./key.js";
import { pref, setPref } from "./prefs.js";

const NAME = "triptych";
const VERSION = 1;
const STORES = ["chats", "pictures"];

const channel = new BroadcastChannel(NAME);
let opened = { key: null, database: null };

/** Return an id that sorts by time; `crypto.randomUUID` is for secure pages only. */
export const newId = () => `${Date.now()}-${Math.random().toString(36).slice(2)}`;

/** Whether the page can keep things: the digest of a key is for secure pages only. */
export const canKeep = () => !key() || Boolean(crypto.subtle);

/** Whether the user wants things kept, and the page can. */
export const isKeeping = () => canKeep() && pref("keep", true);

export const setKeeping = (isOn) => setPref("keep", isOn ? null : false);

/** Open the database of the current key. */
function open() {
  if (opened.key !== key()) opened = { key: key(), database: databaseName().then(openNamed) };
  return opened.database;
}

async function databaseName() {
  if (!key()) return NAME;
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(key()));
  const hex = Array.from(new Uint8Array(digest), (byte) => byte.toString(16).padStart(2, "0"));
  return `${NAME}-${hex.join("")}`;
}

function openNamed(name) {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(name, VERSION);
    request.onupgradeneeded = () => {
      for (const store of STORES) request.result.createObjectStore(store, { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("Another tab has an old version of the page open."));
  });
}

/** Run the requests that `act` makes in one transaction; return its result once they are complete. */
async function run(store, mode, act) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(store, mode);
    const requests = act(transaction.objectStore(store));
    transaction.oncomplete = () => resolve(requests);
    transaction.onabort = () => reject(transaction.error); // an error aborts as well
  });
}

const resultsOf = (requests) => requests.map(({ result }) => result).filter(Boolean);

/** Things of one kind, by their `id`. */
class Collection {
  constructor(name) {
    this.name = name;
  }

  /** Call `listener` with {ids, isGone} after other tabs stored or removed entries. */
  onChange(listener) {
    channel.addEventListener("message", ({ data }) => data.name === this.name && listener(data));
  }

  #announce(ids, isGone) {
    if (ids.length) channel.postMessage({ name: this.name, ids, isGone });
  }

  async all() {
    if (!canKeep()) return [];
    return (await run(this.name, "readonly", (store) => store.getAll())).result;
  }

  async get(ids) {
    const read = (store) => ids.map((id) => store.get(id));
    return resultsOf(await run(this.name, "readonly", read));
  }

  /** Store `entry` if the user wants things kept. */
  async put(entry) {
    if (isKeeping()) await this.restore([entry]);
  }

  /** Store again what `take` or `takeAll` removed. */
  async restore(entries) {
    await run(this.name, "readwrite", (store) => entries.map((entry) => store.put(entry)));
    this.#announce(
      entries.map(({ id }) => id),
      false,
    );
  }

  /** Remove entries. Returns those that were stored. */
  async take(ids) {
    const remove = (store) => {
      const found = ids.map((id) => store.get(id));
      for (const id of ids) store.delete(id);
      return found;
    };
    const taken = resultsOf(await run(this.name, "readwrite", remove));
    this.#announce(ids, true);
    return taken;
  }

  /** Remove all entries, those of other tabs as well. Returns them. */
  async takeAll() {
    const remove = (store) => {
      const found = store.getAll();
      store.clear();
      return found;
    };
    const taken = (await run(this.name, "readwrite", remove)).result;
    this.#announce(
      taken.map(({ id }) => id),
      true,
    );
    return taken;
  }
}

export const chats = new Collection("chats");
export const pictures = new Collection("pictures");
