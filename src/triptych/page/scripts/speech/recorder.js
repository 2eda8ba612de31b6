// Recording from the microphone with a level meter.

import { Advice } from "../api.js";
import { color, sharp } from "../dom.js";

const KINDS = ["audio/webm;codecs=opus", "audio/mp4", "audio/ogg;codecs=opus"];
const EXTENSIONS = {
  "audio/webm": "webm",
  "audio/mp4": "m4a",
  "audio/ogg": "ogg",
};
const BAR_PX = 5;
const NOT_ALLOWED =
  "The microphone cannot be used. Allow it for this page in the browser, then try again.";
const WHY_NOT = {
  NotFoundError: "There is no microphone. Connect one, then try again.",
  NotReadableError:
    "The microphone gives no sound. End other programs that use it, or connect it again, then try again.",
};

export const canRecord = () =>
  Boolean(navigator.mediaDevices?.getUserMedia && window.MediaRecorder);

/** Return a file name for a recording, by its type. */
export const fileNameOf = (blob) => `recording.${EXTENSIONS[blob.type] ?? "webm"}`;

/** Return the stream of the microphone; `audio` are its constraints. Throws `Advice`. */
export function askForMicrophone(audio = true) {
  return navigator.mediaDevices.getUserMedia({ audio }).catch((error) => {
    throw new Advice(WHY_NOT[error?.name] ?? NOT_ALLOWED);
  });
}

/** Start a recording; its `stop` returns the blob. */
export async function record(canvas) {
  const stream = await askForMicrophone();
  const mimeType = KINDS.find((kind) => MediaRecorder.isTypeSupported(kind));
  const recorder = new MediaRecorder(stream, mimeType ? { mimeType } : {});
  const pieces = [];
  recorder.ondataavailable = ({ data }) => pieces.push(data);
  const meter = showLevel(stream, canvas);
  recorder.start();
  return {
    stop: () =>
      new Promise((resolve) => {
        recorder.onstop = () => {
          meter.stop();
          stream.getTracks().forEach((track) => track.stop());
          resolve(new Blob(pieces, { type: recorder.mimeType.split(";")[0] }));
        };
        recorder.stop();
      }),
  };
}

/** Draw the level of a stream until `stop` of the result is called. */
export function showLevel(stream, canvas) {
  const context = new AudioContext();
  const analyser = new AnalyserNode(context, { fftSize: 1024 });
  context.createMediaStreamSource(stream).connect(analyser);
  const samples = new Float32Array(analyser.fftSize);
  const levels = [];
  const timer = setInterval(() => {
    analyser.getFloatTimeDomainData(samples);
    levels.push(Math.sqrt(samples.reduce((sum, value) => sum + value * value, 0) / samples.length));
    draw(canvas, levels);
  }, 60);
  return { stop: () => (clearInterval(timer), context.close()) };
}

function draw(canvas, levels) {
  const context = sharp(canvas);
  const { clientWidth: width, clientHeight: height } = canvas;
  context.fillStyle = color("transcription");
  levels.slice(-Math.floor(width / BAR_PX)).forEach((level, index) => {
    const size = Math.max(2, Math.min(1, Math.sqrt(level) * 1.6) * height);
    context.fillRect(index * BAR_PX, (height - size) / 2, BAR_PX - 2, size);
  });
}
