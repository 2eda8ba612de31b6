// The start of a chat: a card for each modality that is served, with examples of one click.

import { urlOf } from "../api.js";
import { chips, el } from "../dom.js";
import { ASK, DRAW, LOOK, pictureOf, SPEAK } from "../examples.js";

const NUM_EXAMPLES = 2; // of a card

/** `actions` are functions of an example: ask, and look, speak, draw where a model serves them. */
export function homeView({ ask, look, speak, draw }) {
  const cards = [
    ask && card("ask", "Ask", "Answers, ideas and code", ASK, ask, lines()),
    look && card("look", "Look", "Questions about a picture", LOOK.questions, look, picture()),
    speak && card("speak", "Speak", "Text becomes a voice at once", SPEAK, speak, bars()),
    draw && card("draw", "Draw", "Pictures from a few words", DRAW, draw, scene()),
  ].filter(Boolean);
  return el(
    "div",
    { class: "home" },
    el("img", {
      class: "home-logo",
      src: urlOf("/page/icon.svg"),
      alt: "Triptych",
      width: "44",
      height: "44",
    }),
    el("p", { class: "hello" }, "What would you like to do?"),
    el("p", { class: "lead" }, "One server for text, vision, speech and images."),
    el("div", { class: "home-cards" }, ...cards),
  );
}

function card(name, title, about, examples, use, art) {
  const go = el(
    "button",
    { type: "button", class: "home-go", onclick: () => use(examples[0]) },
    el("span", { class: "home-art", "aria-hidden": "true" }, art),
    el("b", {}, title),
    el("span", { class: "note" }, about),
  );
  const shown = examples.slice(0, NUM_EXAMPLES);
  return el(
    "section",
    { class: `home-card ${name}`, "aria-label": title },
    go,
    ...chips(shown, use),
  );
}

/** Create a drawing of lines of text. */
const lines = () => el("span", { class: "art-lines" }, ...[1, 2, 3, 4].map(() => el("span", {})));

const picture = () => el("img", { src: LOOK.picture, alt: "", width: "96", height: "96" });

/** Create a drawing of a voice. */
const bars = () =>
  el("span", { class: "art-bars" }, ...Array.from({ length: 15 }, () => el("span", {})));

/** Create a drawing of pictures. */
const scene = () => {
  const shown = DRAW.slice(1, 5).map((prompt) => el("img", { src: pictureOf(prompt), alt: "" }));
  return el("span", { class: "art-tiles" }, ...shown);
};
