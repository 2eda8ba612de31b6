// The list of chats that are kept in the browser: search, rename, delete, export.

import { byId, el, icon, show } from "../dom.js";
import { attachMenu } from "../menu.js";
import { chats, isKeeping, setKeeping } from "../store.js";
import { toast } from "../toast.js";
import { fileName, saveAsJson, saveAsMarkdown } from "./export.js";

const NOTES = {
  none: "Chats stay in this browser only.",
  found: "No chat has these words.",
  off: "Nothing is kept: a chat is lost when the page closes.",
  failed: "This browser does not keep chats.",
};

export class History {
  list = []; // the latest first
  shownId = null;
  #hasFailed = false;

  /** `open` shows a chat; `start` a new one, in place of one that is deleted if it says so. */
  constructor({ open, start }) {
    Object.assign(this, { open, start });
    byId("chats-find").addEventListener("input", () => this.#show());
    const keep = byId("chats-keep");
    keep.checked = isKeeping();
    keep.addEventListener("change", () => (setKeeping(keep.checked), this.#show()));
    attachMenu(byId("chats-more"), () => this.#entriesOfAll(), "All chats");
    byId("chats-open").addEventListener("click", () => this.#setOpen(true));
    byId("chats-close").addEventListener("click", () => this.#setOpen(false));
    byId("chats").addEventListener(
      "keydown",
      ({ key }) => key === "Escape" && this.#setOpen(false),
    );
  }

  async load() {
    try {
      this.list = await chats.all();
    } catch {
      this.#hasFailed = true;
    }
    this.#show();
  }

  /** Keep a chat, if the user wants that. */
  async save(chat) {
    try {
      if (!(await chats.put(chat))) return;
    } catch {
      this.#hasFailed = true;
    }
    this.list = [chat, ...this.list.filter(({ id }) => id !== chat.id)];
    this.#show();
  }

  setShown(id) {
    this.shownId = id;
    this.#setOpen(false);
    this.#show();
  }

  // -- the list -----------------------------------------------------------------------------

  /** Open the list on a small screen, where it covers the page. */
  #setOpen(isOpen) {
    const button = byId("chats-open");
    if (isOpen === (button.getAttribute("aria-expanded") === "true")) return;
    button.setAttribute("aria-expanded", String(isOpen));
    byId("chats").classList.toggle("open", isOpen);
    byId("main").inert = isOpen;
    if (isOpen) byId("chats-find").focus();
    else button.focus();
  }

  #show() {
    const words = byId("chats-find").value.toLowerCase().split(/\s+/).filter(Boolean);
    this.list.sort((one, other) => other.updatedMs - one.updatedMs);
    const found = this.list.filter((chat) => words.every((word) => textOf(chat).includes(word)));
    byId("chats-list").replaceChildren(...found.map((chat) => this.#row(chat)));
    show(byId("chats-find"), this.list.length > 0);
    show(byId("chats-more"), this.list.length > 0);
    byId("chats-note").textContent = NOTES[this.#noteFor(found)] ?? "";
  }

  #noteFor(found) {
    if (this.#hasFailed) return "failed";
    if (!isKeeping()) return "off";
    if (!this.list.length) return "none";
    return found.length ? "" : "found";
  }

  #row(chat) {
    const open = el(
      "button",
      { type: "button", class: "chat-link", title: chat.title, onclick: () => this.open(chat) },
      chat.title,
    );
    if (chat.id === this.shownId) open.setAttribute("aria-current", "true");
    const more = el(
      "button",
      { type: "button", class: "quiet icon", "aria-label": `Options of ${chat.title}` },
      icon("more"),
    );
    const row = el("li", {}, open, more);
    attachMenu(more, () => this.#entriesOf(chat, row), chat.title);
    return row;
  }

  #entriesOf(chat, row) {
    return [
      { name: "edit", label: "Rename", run: () => this.#rename(chat, row) },
      { name: "download", label: "Export as Markdown", run: () => saveAsMarkdown(chat) },
      { name: "download", label: "Export as JSON", run: () => saveAsJson([chat], fileName(chat)) },
      {
        name: "bin",
        label: "Delete",
        run: () => this.#delete([chat], `“${chat.title}” is deleted.`),
      },
    ];
  }

  #entriesOfAll() {
    const text =
      this.list.length === 1 ? "1 chat is deleted." : `${this.list.length} chats are deleted.`;
    return [
      {
        name: "download",
        label: "Export all as JSON",
        run: () => saveAsJson(this.list, "triptych-chats"),
      },
      { name: "bin", label: "Delete all chats", run: () => this.#delete([...this.list], text) },
    ];
  }

  #rename(chat, row) {
    const input = el("input", {
      value: chat.title,
      "aria-label": "Title of the chat",
      maxlength: "120",
    });
    let isDone = false;
    const leave = (title) => {
      if (isDone) return;
      isDone = true;
      if (title) this.save(Object.assign(chat, { title, isNamed: true }));
      else this.#show();
      if (title && chat.id === this.shownId) byId("chat-title").textContent = title;
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") leave(input.value.trim());
      if (event.key !== "Escape") return;
      event.stopPropagation();
      leave("");
    });
    input.addEventListener("blur", () => leave(input.value.trim()));
    row.replaceChildren(input);
    input.select();
  }

  async #delete(gone, text) {
    const ids = new Set(gone.map(({ id }) => id));
    this.list = this.list.filter(({ id }) => !ids.has(id));
    for (const id of ids) await chats.remove(id).catch(() => {});
    if (ids.has(this.shownId)) this.start({ isDeleted: true });
    this.#show();
    toast(text, {
      label: "Undo",
      run: async () => {
        for (const chat of gone) await chats.put(chat).catch(() => {});
        this.list.push(...gone);
        this.#show();
      },
    });
  }
}

/** Return the words of a chat, for the search. */
function textOf(chat) {
  const texts = chat.turns.map((turn) => turn.text ?? turn.prompt ?? "");
  return [chat.title, ...texts].join(" ").toLowerCase();
}
