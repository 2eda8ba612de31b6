// Prompts for a first click. The small models that come with Triptych answer them well.

import { urlOf } from "./api.js";

export const ASK = [
  "Give me three tips for a good night's sleep.",
  "Write a Python function that reverses a string.",
  "What is the capital of France?",
];

export const LOOK = {
  picture: urlOf("/page/pictures/penguin.webp"),
  questions: ["What is in this picture?", "How many penguins are there?"],
};

export const SPEAK = [
  "Once upon a time, a small machine learned to speak.",
  "Good morning. It is seven o'clock, the coffee is ready, and the sun is out.",
  "The train to the coast leaves at a quarter to eight.",
];

export const DRAW = [
  "a penguin next to a house",
  "a red apple",
  "two green frogs",
  "a sunflower",
  "a rocket",
  "a blue car",
];

/** Return a seed with which `triptych-images` draws an example well. */
export const seedOf = (prompt) => SEEDS[DRAW.indexOf(prompt)];
const SEEDS = [5, 19, 5, 9, 8, 7];

/** Return the URL of a picture that `triptych-images` drew for an example. */
export const pictureOf = (prompt) =>
  urlOf(`/page/pictures/${PICTURES[DRAW.indexOf(prompt)]}.webp`);
const PICTURES = ["penguin", "apple", "frogs", "sunflower", "rocket", "car"];

export const STYLES = [
  "watercolor",
  "oil painting",
  "pencil sketch",
  "photo",
  "pixel art",
  "flat icon",
];
