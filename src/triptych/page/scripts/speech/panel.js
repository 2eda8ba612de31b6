// The speech panel: synthesis and transcription, each if a model serves it.

import { openHear } from "./hear.js";
import { openSpeak } from "./speak.js";

export function openSpeech(models) {
  const speaking = models.filter((model) => model.task === "speech");
  const hearing = models.filter((model) => model.task === "transcription");
  const offer = hearing.length ? openHear(hearing) : () => {};
  if (speaking.length) openSpeak(speaking, offer);
}
