// Speech requests: text to a player, and audio to text. The voice is that of the speech panel.

import { call } from "../api.js";
import { byId } from "../dom.js";

export const SAMPLE_RATE = 24000; // of `pcm`

/** Return the fields that the speech panel sets: model, voice, speed. */
export function voiceFields() {
  const voice = byId("speak-voice").value;
  return {
    model: byId("speak-model").value,
    ...(voice ? { voice } : {}),
    speed: Number(byId("speak-speed").value),
  };
}

/** Speak `input` into `player`. Returns {firstMs, elapsedS, coverage}. */
export async function speakInto(player, input, signal) {
  const startedMs = performance.now();
  const json = { ...voiceFields(), input, response_format: "pcm" };
  const response = await call("/v1/audio/speech", { json, signal });
  let firstMs = 0;
  for await (const bytes of chunks(response.body)) {
    firstMs ||= performance.now() - startedMs;
    player.push(bytes);
  }
  const coverage = Number(response.headers.get("x-speech-coverage") ?? 1);
  return { firstMs, elapsedS: (performance.now() - startedMs) / 1000, coverage };
}

async function* chunks(stream) {
  const reader = stream.getReader();
  try {
    for (let next = await reader.read(); !next.done; next = await reader.read()) yield next.value;
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Transcribe a recording; `fields` are further fields of the form. */
export async function transcribe(blob, name, fields = {}) {
  const form = new FormData();
  form.append("model", byId("hear-model").value);
  for (const [field, value] of Object.entries(fields)) form.append(field, value);
  form.append("file", blob, name);
  return (await call("/v1/audio/transcriptions", { form })).json();
}
