// The microphone as a stream of samples.

import { urlOf } from "../api.js";
import { askForMicrophone } from "../speech/recorder.js";

const PIECE_S = 0.02; // an interruption is noticed so much later
const CLEAN = { echoCancellation: true, noiseSuppression: true, autoGainControl: true };

/** Whether the browser may pass on the microphone's samples. */
export const canListen = () =>
  Boolean(navigator.mediaDevices?.getUserMedia && window.AudioWorkletNode);

/**
 * Call `onPiece` with samples, 20 ms at a time at `rate`, and `onLost` if the microphone is taken
 * away. Returns {stream, mute, close}; `close` returns whether it was open. Throws `Advice`.
 */
export async function openMicrophone(rate, onPiece, onLost) {
  const stream = await askForMicrophone({ ...CLEAN, channelCount: 1 });
  const tracks = stream.getTracks();
  tracks.forEach((track) => track.addEventListener("ended", onLost)); // not by `stop`
  let source;
  let isOpen = true;
  const close = () => {
    if (!isOpen) return false;
    isOpen = false;
    tracks.forEach((track) => track.stop());
    source?.context.close();
    return true;
  };
  try {
    source = sourceOf(stream, rate);
    await capture(source, rate, (samples) => isOpen && onPiece(samples));
  } catch (error) {
    close();
    throw error;
  }
  const mute = (isMuted) => tracks.forEach((track) => (track.enabled = !isMuted));
  return { stream, mute, close };
}

async function capture(source, rate, onPiece) {
  const { context } = source;
  await context.audioWorklet.addModule(urlOf("/page/scripts/talk/capture.worklet.js"));
  const node = new AudioWorkletNode(context, "capture", {
    numberOfOutputs: 0,
    processorOptions: { wantedRate: rate, numSamples: Math.round(rate * PIECE_S) },
  });
  node.port.onmessage = ({ data }) => onPiece(data);
  source.connect(node);
}

/** Some browsers connect a microphone only to a context of its own rate. */
function sourceOf(stream, rate) {
  const context = new AudioContext({ sampleRate: rate });
  try {
    return context.createMediaStreamSource(stream);
  } catch {
    context.close();
    return new AudioContext().createMediaStreamSource(stream);
  }
}
