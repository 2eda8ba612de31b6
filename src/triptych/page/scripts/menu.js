// A menu below a button. Knows nothing of its entries' purpose.

import { el, icon } from "./dom.js";

const GAP_PX = 6;
const EDGE_PX = 8;
let closeOpen = null;

/** Make `button` open a menu: `entriesOf` returns entries {label, run, nodes, isChecked, name}.
 *
 * `nodes` replace the label's text on the screen; entries with `isChecked` are a choice of one.
 */
export function attachMenu(button, entriesOf, label) {
  button.setAttribute("aria-haspopup", "menu");
  button.setAttribute("aria-expanded", "false");
  button.addEventListener("click", () => {
    if (button.getAttribute("aria-expanded") === "true") closeOpen();
    else open(button, entriesOf(), label);
  });
}

function open(button, entries, label) {
  closeOpen?.();
  const menu = el("div", { class: "menu", role: "menu", "aria-label": label });
  const close = ({ isReturning = true } = {}) => {
    menu.remove();
    button.setAttribute("aria-expanded", "false");
    for (const [target, type, listener] of outside)
      target.removeEventListener(type, listener, true);
    closeOpen = null;
    if (isReturning) button.focus({ preventScroll: true });
  };
  const outside = [
    [
      document,
      "pointerdown",
      (event) => leaves(event, menu, button) && close({ isReturning: false }),
    ],
    [window, "resize", () => close({ isReturning: false })],
    [window, "hashchange", () => close({ isReturning: false })],
  ];
  menu.append(...entries.map((entry) => item(entry, close)));
  menu.addEventListener("keydown", (event) => onKey(event, menu, close));
  for (const [target, type, listener] of outside) target.addEventListener(type, listener, true);
  (button.closest("dialog") ?? document.body).append(menu);
  button.setAttribute("aria-expanded", "true");
  place(menu, button.getBoundingClientRect());
  closeOpen = close;
  (menu.querySelector('[aria-checked="true"]') ?? menu.firstElementChild).focus();
}

const leaves = ({ target }, menu, button) => !menu.contains(target) && !button.contains(target);

function item({ label, name, nodes, isChecked, run }, close) {
  const isChoice = isChecked !== undefined;
  return el(
    "button",
    {
      type: "button",
      class: "menu-item",
      role: isChoice ? "menuitemradio" : "menuitem",
      "aria-checked": isChoice ? String(isChecked) : null,
      "aria-label": nodes ? label : null,
      tabindex: "-1",
      onclick: () => {
        close();
        run();
      },
    },
    ...(nodes ?? [name ? icon(name) : null, el("span", {}, label)]),
  );
}

function onKey(event, menu, close) {
  const items = [...menu.children];
  const at = items.indexOf(document.activeElement);
  const to = {
    ArrowDown: (at + 1) % items.length,
    ArrowUp: (at - 1 + items.length) % items.length,
    Home: 0,
    End: items.length - 1,
  }[event.key];
  if (to !== undefined) items[to].focus();
  else if (event.key === "Escape" || event.key === "Tab") close();
  else return;
  event.stopPropagation();
  if (event.key !== "Tab") event.preventDefault();
}

/** Put the menu below the button or above it, within the window. */
function place(menu, { left, top, bottom }) {
  const { offsetWidth: width, offsetHeight: height } = menu;
  const isBelow = bottom + GAP_PX + height <= innerHeight || top < innerHeight / 2;
  const y = isBelow ? bottom + GAP_PX : top - GAP_PX - height;
  const x = Math.min(left, innerWidth - width - EDGE_PX);
  menu.style.left = `${Math.max(EDGE_PX, x)}px`;
  menu.style.top = `${Math.max(EDGE_PX, y)}px`;
  menu.style.maxHeight = `${innerHeight - Math.max(EDGE_PX, y) - EDGE_PX}px`;
}
