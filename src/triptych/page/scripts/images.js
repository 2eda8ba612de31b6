// Conversion of image files for the API.

import { Advice } from "./api.js";

const KINDS = ["image/png", "image/jpeg", "image/webp"];
const MAX_SIDE = 2048;

/** Decode a file to a bitmap. Throws `Advice` if it is not an image. */
export async function bitmapOf(file) {
  try {
    return await createImageBitmap(file, { imageOrientation: "from-image" });
  } catch {
    throw new Advice(
      `${file.name || "The file"} is not an image that this browser can read. Use PNG, JPEG or WebP.`,
    );
  }
}

/** Encode a file as a data URL: unchanged, or as a smaller PNG if models could not take it. */
export async function dataUrlOf(file) {
  const bitmap = await bitmapOf(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && KINDS.includes(file.type)) return asDataUrl(file);
  const canvas = new OffscreenCanvas(
    Math.round(bitmap.width * scale),
    Math.round(bitmap.height * scale),
  );
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return asDataUrl(await canvas.convertToBlob({ type: "image/png" }));
}

/** Encode a blob as a data URL. */
export function asDataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Advice("The file could not be read."));
    reader.readAsDataURL(blob);
  });
}

/** Decode base64 to a blob. */
export function blobOf(base64, type) {
  return new Blob([Uint8Array.from(atob(base64), (char) => char.charCodeAt(0))], { type });
}

/** Decode a data URL in base64 to a blob. */
export function blobOfDataUrl(url) {
  const [head, base64] = url.split(",", 2);
  return blobOf(base64, head.slice("data:".length).split(";")[0]);
}
