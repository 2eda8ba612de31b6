// Plays 16-bit audio while it arrives, and again from any position.

const LEAD_S = 0.15; // between the arrival of a piece and its playback

export class PcmPlayer {
  #context;
  #ownContext;
  #planned = []; // scheduled pieces: {node, at, from, to} in seconds
  #nextS = 0;
  #rest = new Uint8Array(0); // half a sample
  #plannedS = 0;

  /** `context` may be one that several players share. */
  constructor(sampleRate, onChange, context = null) {
    this.sampleRate = sampleRate;
    this.samples = new Float32Array(sampleRate * 30);
    this.numSamples = 0;
    this.isPaused = false;
    this.onChange = onChange;
    this.#ownContext = context ? null : new AudioContext({ sampleRate });
    this.#context = context ?? this.#ownContext;
  }

  get lengthS() {
    return this.numSamples / this.sampleRate;
  }

  /** The playback position in seconds. */
  get positionS() {
    const now = this.#context.currentTime;
    let found = this.#planned[0]?.from ?? this.#plannedS;
    for (const { at, from, to } of this.#planned)
      if (at <= now) found = Math.min(to, from + now - at);
    return found;
  }

  get isPlaying() {
    return !this.isPaused && this.hasMore;
  }

  /** Whether some of what has arrived is not played yet. */
  get hasMore() {
    return this.positionS < this.lengthS - 0.001;
  }

  /** Append the next bytes, little-endian samples. */
  push(bytes) {
    const joined = new Uint8Array(this.#rest.length + bytes.length);
    joined.set(this.#rest);
    joined.set(bytes, this.#rest.length);
    const num = joined.length >> 1;
    this.#rest = joined.slice(num * 2);
    this.#reserve(num);
    const view = new DataView(joined.buffer);
    for (let index = 0; index < num; index += 1)
      this.samples[this.numSamples + index] = view.getInt16(index * 2, true) / 32768;
    this.numSamples += num;
    if (!this.isPaused) this.#plan(LEAD_S);
    this.onChange();
  }

  #reserve(num) {
    if (this.numSamples + num <= this.samples.length) return;
    const larger = new Float32Array(Math.max(this.samples.length * 2, this.numSamples + num));
    larger.set(this.samples.subarray(0, this.numSamples));
    this.samples = larger;
  }

  /** Schedule samples that are not scheduled yet; `leadS` after now if nothing is. */
  #plan(leadS) {
    const from = Math.round(this.#plannedS * this.sampleRate);
    const num = this.numSamples - from;
    if (num <= 0) return;
    const buffer = this.#context.createBuffer(1, num, this.sampleRate);
    buffer.copyToChannel(this.samples.subarray(from, this.numSamples), 0);
    const node = new AudioBufferSourceNode(this.#context, { buffer });
    node.connect(this.#context.destination);
    const at = Math.max(this.#nextS, this.#context.currentTime + leadS);
    node.start(at);
    this.#nextS = at + buffer.duration;
    this.#planned.push({ node, at, from: this.#plannedS, to: this.lengthS });
    this.#plannedS = this.lengthS;
  }

  /** Play from a position in seconds. */
  playFrom(moment) {
    this.#silence(Math.min(Math.max(0, moment), this.lengthS));
    this.isPaused = false;
    this.#context.resume();
    this.#plan(0);
    this.onChange();
  }

  pause() {
    this.#silence(this.positionS);
    this.isPaused = true;
    this.onChange();
  }

  toggle() {
    if (this.isPlaying) this.pause();
    else this.playFrom(this.positionS >= this.lengthS - 0.001 ? 0 : this.positionS);
  }

  #silence(moment) {
    for (const { node } of this.#planned) node.disconnect();
    this.#planned = [];
    this.#nextS = 0;
    this.#plannedS = moment;
  }

  close() {
    this.#silence(0);
    this.#ownContext?.close();
  }

  /** Return all samples as a WAV file. */
  wav() {
    const head = new DataView(new ArrayBuffer(44));
    const numBytes = this.numSamples * 2;
    const words = [
      [0, 0x52494646],
      [8, 0x57415645],
      [12, 0x666d7420],
      [36, 0x64617461],
    ]; // RIFF WAVE fmt data
    words.forEach(([at, word]) => head.setUint32(at, word));
    head.setUint32(4, 36 + numBytes, true);
    head.setUint32(16, 16, true);
    head.setUint16(20, 1, true); // integer PCM
    head.setUint16(22, 1, true); // one channel
    head.setUint32(24, this.sampleRate, true);
    head.setUint32(28, this.sampleRate * 2, true);
    head.setUint16(32, 2, true);
    head.setUint16(34, 16, true);
    head.setUint32(40, numBytes, true);
    const body = Int16Array.from(this.samples.subarray(0, this.numSamples), (value) =>
      Math.round(Math.max(-1, Math.min(1, value)) * 32767),
    );
    return new Blob([head, body], { type: "audio/wav" });
  }
}
