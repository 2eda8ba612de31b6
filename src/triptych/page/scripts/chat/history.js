// The list of chats that are kept in the browser: search, rename, delete, export.

import { byId, el, icon, show } from "../dom.js";
import { onKey } from "../key.js";
import { attachMenu } from "../menu.js";
import { canKeep, chats, isKeeping, setKeeping } from "../store.js";
import { toast } from "../toast.js";
import { fileName, saveAsJson, saveAsMarkdown } from "./export.js";

const NOTES = {
  none: "Chats stay in this browser only.",
  found: "No chat has these words.",
  off: "Nothing is kept: a chat is lost when the page closes.",
  insecure: "Nothing is kept: with an API key, this needs HTTPS.",
  full: "There is no space for this chat. Delete other chats or pictures.",
  failed: "This browser does not keep chats.",
};

export class History {
  list = []; // the latest first
  shownId = null;
  #failure = ""; // of the latest access: the name of a note

  /** `open` shows a chat. `start` shows a new one, and knows if the shown chat was deleted.
   *
   * `follow` receives the shown chat after another tab changed it.
   */
  constructor({ open, start, follow }) {
    Object.assign(this, { open, start, follow });
    byId("chats-find").addEventListener("input", () => this.#show());
    const keep = byId("chats-keep");
    keep.addEventListener("change", () => (setKeeping(keep.checked), this.#show()));
    chats.onChange((change) => this.#followTab(change));
    onKey(() => this.load());
    attachMenu(byId("chats-more"), () => this.#entriesOfAll(), "All chats");
    byId("chats-open").addEventListener("click", () => this.#setOpen(true));
    byId("chats-close").addEventListener("click", () => this.#setOpen(false));
    byId("chats").addEventListener(
      "keydown",
      ({ key }) => key === "Escape" && this.#setOpen(false),
    );
  }

  async load() {
    this.list = (await this.#attempt(() => chats.all())) ?? [];
    this.#show();
  }

  /** Keep a chat, if the user wants that. */
  async save(chat) {
    if (isKeeping()) {
      await this.#attempt(() => chats.put(chat));
      this.list = [chat, ...this.list.filter(({ id }) => id !== chat.id)];
    }
    this.#show();
  }

  /** Return the result of an access to the stored chats, or null if it failed. */
  async #attempt(access) {
    try {
      const result = await access();
      this.#failure = "";
      return result;
    } catch (error) {
      this.#failure = error?.name === "QuotaExceededError" ? "full" : "failed";
      return null;
    }
  }

  /** Show what another tab stored or deleted. */
  async #followTab({ ids, isGone }) {
    const changed = isGone ? [] : await this.#attempt(() => chats.get(ids));
    if (!changed) return;
    this.list = [...changed, ...this.list.filter(({ id }) => !ids.includes(id))];
    const shown = changed.find(({ id }) => id === this.shownId);
    if (shown) this.follow(shown);
    else if (ids.includes(this.shownId)) this.start({ isDeleted: true });
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
    Object.assign(byId("chats-keep"), { checked: isKeeping(), disabled: !canKeep() });
    const words = byId("chats-find").value.toLowerCase().split(/\s+/).filter(Boolean);
    this.list.sort((one, other) => other.updatedMs - one.updatedMs);
    const found = this.list.filter((chat) => words.every((word) => textOf(chat).includes(word)));
    byId("chats-list").replaceChildren(...found.map((chat) => this.#row(chat)));
    show(byId("chats-find"), this.list.length > 0);
    show(byId("chats-more"), this.list.length > 0);
    byId("chats-note").textContent = NOTES[this.#noteFor(found)] ?? "";
  }

  #noteFor(found) {
    if (!canKeep()) return "insecure";
    if (this.#failure) return this.#failure;
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
        run: () => this.#delete([chat], () => chats.take([chat.id]), `“${chat.title}” is deleted.`),
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
      {
        name: "bin",
        label: "Delete all chats",
        run: () => this.#delete([...this.list], () => chats.takeAll(), text),
      },
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

  /** Delete the chats of the list that `take` removes from the browser. */
  async #delete(gone, take, text) {
    const ids = new Set(gone.map(({ id }) => id));
    this.list = this.list.filter(({ id }) => !ids.has(id));
    const taken = (await this.#attempt(take)) ?? [];
    if (ids.has(this.shownId)) this.start({ isDeleted: true });
    this.#show();
    toast(text, {
      label: "Undo",
      run: async () => {
        await this.#attempt(() => chats.restore(taken)); // also if new chats are not kept
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
