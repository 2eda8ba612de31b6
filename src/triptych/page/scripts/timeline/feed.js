// The feed of engine events: recent steps, state, and clock.

import { call, events, isAborted } from "../api.js";

const KEEP_S = 65;
const RETRY_MS = 2000;

export class Feed {
  steps = []; // in order of their start
  running = null;
  state = null; // the last engine.state
  device = "";
  trouble = "Connecting";
  numDropped = 0;
  #stopping = null;
  #behindS = Infinity; // the browser's clock minus the server's, at the lowest latency

  constructor(onState) {
    this.onState = onState;
  }

  /** The estimated current time of the server's clock. */
  get nowS() {
    return performance.now() / 1000 - this.#behindS;
  }

  async open() {
    if (this.#stopping) return;
    const stopping = (this.#stopping = new AbortController());
    while (!stopping.signal.aborted) {
      try {
        const response = await call("/v1/engine/events", { signal: stopping.signal });
        for await (const { data } of events(response)) this.#take(data);
        this.trouble = "The server ended the stream";
      } catch (error) {
        if (isAborted(error)) break;
        this.trouble = error.message;
      }
      this.onState();
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
    if (this.#stopping === stopping) this.#stopping = null;
  }

  close() {
    this.#stopping?.abort();
    this.#stopping = null;
  }

  #take(data) {
    this.#behindS = Math.min(this.#behindS, performance.now() / 1000 - data.now_s);
    if (data.type === "engine.started")
      Object.assign(this, { device: data.device, trouble: "", running: null });
    else if (data.type === "engine.stopped")
      Object.assign(this, { trouble: data.reason, running: null });
    else if (data.type === "engine.state") this.state = data;
    else if (data.type === "engine.steps") this.#takeSteps(data);
    if (data.type !== "engine.steps") this.onState();
  }

  #takeSteps({ now_s: now, steps, running, num_dropped: numDropped }) {
    this.steps.push(...steps);
    this.running = running;
    this.numDropped += numDropped;
    const old = this.steps.findIndex((step) => step.start_s > now - KEEP_S);
    if (old > 0) this.steps.splice(0, old);
    else if (old < 0) this.steps = [];
  }

  /** Return the busy share of the device and the steps per second of the last `windowS`. */
  busy(windowS) {
    const since = this.nowS - windowS;
    let [busyS, numSteps] = [0, 0];
    for (const step of this.steps) {
      if (step.start_s < since) continue;
      busyS += step.busy_s;
      numSteps += step.num_steps;
    }
    return { share: Math.min(1, busyS / windowS), perSecond: numSteps / windowS };
  }
}
