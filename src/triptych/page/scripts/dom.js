// DOM helpers. Text is only ever set as text, so that model output cannot become markup.

const SVG = "http://www.w3.org/2000/svg";
const NEAR_END_PX = 120;

export const byId = (id) => document.getElementById(id);

/** Create an element. `on…` names are listeners; true sets and false omits an attribute. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

/** Create an icon from the page's sprite. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

/** Create a small icon button with an accessible name. */
export function iconButton(name, label, onclick) {
  return el(
    "button",
    { type: "button", class: "quiet icon", "aria-label": label, title: label, onclick },
    icon(name),
  );
}

/** Show or hide `element`. */
export function show(element, isShown = true) {
  element.hidden = !isShown;
}

/** Scroll a log to its end, if its reader is near it. */
export function followEnd(log) {
  const { scrollHeight, scrollTop, clientHeight } = log;
  if (scrollHeight - scrollTop - clientHeight < NEAR_END_PX) log.scrollTop = scrollHeight;
}

/** Change the icon and the name of a button. */
export function relabel(button, name, label) {
  button.replaceChildren(icon(name));
  button.setAttribute("aria-label", label);
  if (button.title) button.title = label;
}

/** Fill a select with `values`, texts or [value, text]; keeps the selection. */
export function fill(select, values) {
  const chosen = select.value;
  const pairs = values.map((value) => (Array.isArray(value) ? value : [value, value]));
  select.replaceChildren(...pairs.map(([value, text]) => el("option", { value }, text)));
  if (pairs.some(([value]) => value === chosen)) select.value = chosen;
}

/** Call `handle` with files that are pasted or dropped on `target`. */
export function onFiles(target, handle) {
  const take = (event, files) => {
    if (!files.length) return;
    event.preventDefault();
    handle([...files]);
  };
  target.addEventListener("paste", (event) => take(event, event.clipboardData?.files ?? []));
  target.addEventListener("dragover", (event) => {
    if (event.dataTransfer?.types.includes("Files")) event.preventDefault();
  });
  target.addEventListener("drop", (event) => take(event, event.dataTransfer?.files ?? []));
}

/** Call `handle` with the files chosen in a file input. */
export function onFilePick(input, handle) {
  input.addEventListener("change", () => {
    const files = [...input.files];
    input.value = "";
    if (files.length) handle(files);
  });
}

/** Copy text, and confirm it on the button for a moment. */
export async function copy(text, button) {
  await putOnClipboard(text);
  const label = button.getAttribute("aria-label");
  button.classList.add("done");
  if (label) button.setAttribute("aria-label", "Copied");
  setTimeout(() => {
    button.classList.remove("done");
    if (label) button.setAttribute("aria-label", label);
  }, 1500);
}

/** Browsers offer their clipboard only to secure pages; others copy a selection. */
async function putOnClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = el("textarea", { class: "sr", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

const colors = new Map();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => colors.clear());

/** Return a color of the page's palette for a canvas, in the current dark or light scheme. */
export function color(name) {
  if (!colors.has(name)) {
    const probe = el("span");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    colors.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return colors.get(name);
}

/** Return the context of a canvas that is sized to its place on the screen. */
export function sharp(canvas) {
  const scale = window.devicePixelRatio || 1;
  const width = Math.round(canvas.clientWidth * scale);
  const height = Math.round(canvas.clientHeight * scale);
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
  return context;
}

/** Save `blob` as a file of the user. */
export function download(blob, name) {
  const url = URL.createObjectURL(blob);
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Create buttons of examples, which call `use` with their text. */
export function chips(texts, use) {
  return texts.map((text) =>
    el("button", { type: "button", class: "chip-button", onclick: () => use(text) }, text),
  );
}

/** Create a block of code with a button that copies it. */
export function codeBlock(code, language) {
  const button = el(
    "button",
    { type: "button", class: "quiet", onclick: () => copy(code, button) },
    "Copy",
  );
  return el(
    "div",
    { class: "code-block" },
    el("div", { class: "code-head" }, el("span", {}, language), button),
    el("pre", { tabindex: "0" }, el("code", {}, code)),
  );
}
