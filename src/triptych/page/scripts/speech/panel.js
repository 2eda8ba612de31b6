// The speech panel: synthesis and transcription, each if a model serves it.

import { byId } from "../dom.js";
import { showCode } from "../code/dialog.js";
import { openHear } from "./hear.js";
import { voiceFields } from "./request.js";
import { openSpeak } from "./speak.js";

export function openSpeech(models) {
  const speaking = models.filter((model) => model.task === "speech");
  const hearing = models.filter((model) => model.task === "transcription");
  const offer = hearing.length ? openHear(hearing) : () => {};
  const speak = speaking.length ? openSpeak(speaking, offer) : null;
  const fieldsOf = {
    speech: () => ({ ...voiceFields(), input: byId("speak-text").value }),
    transcription: () => ({ model: byId("hear-model").value }),
  };
  const tasks = [speak && "speech", hearing.length && "transcription"].filter(Boolean);
  byId("speech-code").addEventListener("click", () =>
    showCode(tasks.map((task) => ({ task, fields: fieldsOf[task]() }))),
  );
  return { speak };
}
