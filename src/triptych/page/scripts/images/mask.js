// A mask painted on an image, with the pointer or with keys.

import { color } from "../dom.js";

const STEP_PX = 8;
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class MaskPainter {
  isPainted = false;
  #last = null;
  #cursor = null;

  /** `below` shows the image, `paint` is the painted canvas, `brush` the input of its size. */
  constructor(below, paint, brush) {
    Object.assign(this, { below, paint, brush });
    paint.addEventListener("pointerdown", (event) => this.#begin(event));
    paint.addEventListener("pointermove", (event) => this.#last && this.#to(this.#place(event)));
    for (const name of ["pointerup", "pointercancel"])
      paint.addEventListener(name, () => (this.#last = null));
    paint.addEventListener("keydown", (event) => this.#key(event));
    paint.addEventListener("blur", () => this.#showCursor(false));
  }

  /** Show another image with an empty mask. */
  open(bitmap) {
    for (const canvas of [this.below, this.paint])
      Object.assign(canvas, { width: bitmap.width, height: bitmap.height });
    this.below.getContext("2d").drawImage(bitmap, 0, 0);
    this.#cursor = { x: bitmap.width / 2, y: bitmap.height / 2 };
    this.clear();
  }

  clear() {
    this.painted = new OffscreenCanvas(this.paint.width, this.paint.height);
    this.isPainted = false;
    this.#show();
  }

  /** Return the image as PNG. */
  image() {
    return new Promise((resolve) => this.below.toBlob(resolve, "image/png"));
  }

  /** Return the mask as PNG: transparent where the image may change. */
  mask() {
    const canvas = new OffscreenCanvas(this.paint.width, this.paint.height);
    const context = canvas.getContext("2d");
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.globalCompositeOperation = "destination-out";
    context.drawImage(this.painted, 0, 0);
    return canvas.convertToBlob({ type: "image/png" });
  }

  #place({ offsetX, offsetY }) {
    const scale = this.paint.width / this.paint.clientWidth;
    return { x: offsetX * scale, y: offsetY * scale };
  }

  #begin(event) {
    this.paint.setPointerCapture(event.pointerId);
    this.#last = this.#place(event);
    this.#to(this.#last);
  }

  #to(place) {
    const context = this.painted.getContext("2d");
    Object.assign(context, { lineCap: "round", lineWidth: this.#brushSize(), strokeStyle: "#000" });
    context.beginPath();
    context.moveTo(this.#last.x, this.#last.y);
    context.lineTo(place.x, place.y + 0.01);
    context.stroke();
    this.#last = place;
    this.isPainted = true;
    this.#show();
  }

  #brushSize() {
    return (Number(this.brush.value) * this.paint.width) / this.paint.clientWidth;
  }

  #key(event) {
    const move = MOVES[event.key];
    if (move) {
      const scale = (STEP_PX * this.paint.width) / this.paint.clientWidth;
      this.#cursor.x = Math.min(this.paint.width, Math.max(0, this.#cursor.x + move[0] * scale));
      this.#cursor.y = Math.min(this.paint.height, Math.max(0, this.#cursor.y + move[1] * scale));
    } else if (event.key === " ") {
      this.#last = { ...this.#cursor };
      this.#to(this.#last);
      this.#last = null;
    } else return;
    event.preventDefault();
    this.#showCursor(true);
  }

  #showCursor(isShown) {
    this.#show();
    if (!isShown) return;
    const context = this.paint.getContext("2d");
    context.globalAlpha = 1;
    context.globalCompositeOperation = "source-over";
    Object.assign(context, { lineWidth: 2, strokeStyle: color("ink") });
    context.beginPath();
    context.arc(this.#cursor.x, this.#cursor.y, this.#brushSize() / 2, 0, 7);
    context.stroke();
  }

  /** Show the painted area in color. */
  #show() {
    const context = this.paint.getContext("2d");
    context.globalCompositeOperation = "source-over";
    context.clearRect(0, 0, this.paint.width, this.paint.height);
    context.globalAlpha = 0.55;
    context.fillStyle = color("image");
    context.fillRect(0, 0, this.paint.width, this.paint.height);
    context.globalAlpha = 1;
    context.globalCompositeOperation = "destination-in";
    context.drawImage(this.painted, 0, 0);
    context.globalCompositeOperation = "source-over";
  }
}
