// The menu of image sizes: the model's own, others with about as many pixels, or one of the user's.

import { byId, fill, show } from "../dom.js";
import { keepField, restoreField } from "../prefs.js";

const SHAPES = [
  ["Square", 1, 1],
  ["Landscape", 4, 3],
  ["Portrait", 3, 4],
  ["Wide", 3, 2],
  ["Tall", 2, 3],
];
const MULTIPLE = 32;
const CUSTOM = "custom";

export function openSizes() {
  keepField(byId("image-size"));
  keepField(byId("image-shape"));
  byId("image-shape").addEventListener("change", showCustom);
  showCustom();
}

/** Offer sizes for a model whose own is `size`, "WIDTHxHEIGHT". */
export function offerSizes(size) {
  const auto = size ? `auto (${spaced(size)})` : "auto";
  const others = size ? sizesLike(size) : [];
  fill(byId("image-shape"), [["", auto], ...others, [CUSTOM, "other …"]]);
  restoreField(byId("image-shape"));
  showCustom();
}

/** Return the chosen size, or an empty text for the model's own. */
export function chosenSize() {
  const shape = byId("image-shape").value;
  return shape === CUSTOM ? byId("image-size").value.trim() : shape;
}

function showCustom() {
  const isCustom = byId("image-shape").value === CUSTOM;
  show(byId("image-size-field"), isCustom);
  byId("image-size").required = isCustom;
}

const spaced = (size) => size.replace("x", " × ");

/** Return sizes of other shapes with about as many pixels, [value, text]. */
function sizesLike(size) {
  const [width, height] = size.split("x").map(Number);
  const side = Math.sqrt(width * height);
  const found = new Map();
  for (const [name, across, down] of SHAPES) {
    const scale = side / Math.sqrt(across * down);
    const rounded = [across, down].map(
      (part) => Math.max(1, Math.round((part * scale) / MULTIPLE)) * MULTIPLE,
    );
    const value = rounded.join("x");
    if (!found.has(value)) found.set(value, `${name} ${spaced(value)}`);
  }
  return [...found];
}
