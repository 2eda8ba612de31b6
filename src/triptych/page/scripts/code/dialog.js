// Requests as code, in tabs: in a dialog of a panel, and at the top of the API reference.

import { byId, codeBlock, el, show } from "../dom.js";
import { pref, setPref } from "../prefs.js";
import { canRun, run } from "./run.js";
import { LANGUAGES } from "./snippets.js";

const TITLES = {
  chat: "Chat",
  speech: "Speech",
  transcription: "Transcription",
  image: "Images",
  embedding: "Embeddings",
};

/** Show `requests`, entries {task, fields}, in the page's dialog. */
export function showCode(requests) {
  const dialog = byId("code-dialog");
  byId("code-body").replaceChildren(codeTabs(requests));
  byId("code-close").onclick = () => dialog.close();
  dialog.onclick = ({ target }) => target === dialog && dialog.close();
  dialog.showModal();
}

/** Create tabs of tasks, if there are several, and of languages; `isRunnable` adds a button. */
export function codeTabs(requests, { isRunnable = false } = {}) {
  const place = el("div", { class: "code-tabs" });
  const shown = { request: requests[0], language: pref("language", LANGUAGES[0][0]) };
  const code = el("div", { role: "tabpanel", "aria-label": "Code" });
  const answer = el("div", { class: "code-answer" });
  const send = el(
    "button",
    { type: "button", class: "primary", onclick: () => run(shown.request, answer) },
    "Send",
  );
  const showIt = () => {
    const [name, write] = LANGUAGES.find(([each]) => each === shown.language) ?? LANGUAGES[0];
    const { task, fields } = shown.request;
    code.replaceChildren(codeBlock(write(task, fields), name));
    answer.replaceChildren();
    show(send, isRunnable && canRun(shown.request));
  };
  const languages = tabs(
    "Language",
    LANGUAGES.map(([name]) => name),
    shown.language,
    (name) => (setPref("language", name), (shown.language = name), showIt()),
  );
  const tasks = requests.map(({ task }) => TITLES[task]);
  const ofTask = (title) => requests.find(({ task }) => TITLES[task] === title);
  const choice = tabs(
    "Task",
    tasks,
    tasks[0],
    (title) => ((shown.request = ofTask(title)), showIt()),
  );
  place.append(...(requests.length > 1 ? [choice] : []), languages, code);
  place.append(el("div", { class: "actions" }, send), answer);
  showIt();
  return place;
}

/** Create a list of tabs; `use` receives the name of the chosen one. */
function tabs(label, names, chosen, use) {
  const list = el("div", { class: "tabs", role: "tablist", "aria-label": label });
  const choose = (tab) => {
    for (const each of list.children) {
      each.setAttribute("aria-selected", String(each === tab));
      each.tabIndex = each === tab ? 0 : -1;
    }
    use(tab.textContent);
  };
  for (const name of names) {
    const tab = el(
      "button",
      {
        type: "button",
        role: "tab",
        "aria-selected": String(name === chosen),
        tabindex: name === chosen ? "0" : "-1",
        onclick: () => choose(tab),
      },
      name,
    );
    list.append(tab);
  }
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = [...list.children].at(
      ([...list.children].indexOf(event.target) + step) % names.length,
    );
    if (!step || !next) return;
    event.preventDefault();
    choose(next);
    next.focus();
  });
  return list;
}
