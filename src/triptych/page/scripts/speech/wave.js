// A waveform on a canvas.

import { color, sharp } from "../dom.js";

const BAR_PX = 3;
const GAP_PX = 2;

/** Draw the peaks of `samples`, the first `playedShare` in the color `hue`, at least `minSamples` wide. */
export function drawWave(
  canvas,
  samples,
  { playedShare = 0, minSamples = 0, hue = "speech" } = {},
) {
  const context = sharp(canvas);
  const { clientWidth: width, clientHeight: height } = canvas;
  const numBars = Math.max(1, Math.floor(width / (BAR_PX + GAP_PX)));
  const perBar = Math.max(samples.length, minSamples) / numBars;
  const played = playedShare * samples.length;
  const [ahead, behind] = [color("wave"), color(hue)];
  for (let bar = 0; bar < numBars; bar += 1) {
    const start = Math.floor(bar * perBar);
    const size = Math.max(
      2,
      Math.sqrt(peak(samples, start, Math.floor(start + perBar))) * (height - 4),
    );
    context.fillStyle = start < played ? behind : ahead;
    context.globalAlpha = start < samples.length ? 1 : 0.35;
    context.beginPath();
    context.roundRect(bar * (BAR_PX + GAP_PX), (height - size) / 2, BAR_PX, size, BAR_PX / 2);
    context.fill();
  }
}

function peak(samples, start, end) {
  let most = 0;
  const stride = Math.max(1, Math.floor((end - start) / 200));
  for (let at = start; at < Math.min(end, samples.length); at += stride)
    most = Math.max(most, Math.abs(samples[at]));
  return most;
}
