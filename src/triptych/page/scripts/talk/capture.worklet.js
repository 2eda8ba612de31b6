// Runs on the audio thread: passes on the microphone's samples in pieces, at the rate that is wanted.

class Capture extends AudioWorkletProcessor {
  #piece;
  #numTaken = 0;
  #sum = 0;
  #step; // input samples for each output sample
  #missing; // of the present output sample

  constructor({ processorOptions: { wantedRate, numSamples } }) {
    super();
    this.#piece = new Float32Array(numSamples);
    this.#step = this.#missing = sampleRate / wantedRate;
  }

  process([[samples]]) {
    for (const value of samples ?? []) this.#take(value);
    return true;
  }

  /** Each output sample is the mean of the input in its time. */
  #take(value) {
    let share = 1; // of the input sample
    while (this.#missing <= share + 1e-9) {
      this.#give((this.#sum + value * this.#missing) / this.#step);
      share -= this.#missing;
      this.#sum = 0;
      this.#missing = this.#step;
    }
    this.#sum += value * share;
    this.#missing -= share;
  }

  #give(value) {
    this.#piece[this.#numTaken] = value;
    this.#numTaken += 1;
    if (this.#numTaken < this.#piece.length) return;
    this.port.postMessage(this.#piece.slice());
    this.#numTaken = 0;
  }
}

registerProcessor("capture", Capture);
