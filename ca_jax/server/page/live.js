// What the server is doing, as it tells: one stream of events, begun anew when it breaks. Not here: drawing it.

import { Failure, ask, events } from "./api.js";

const INTERVAL_S = 0.25;
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 8000;

export class Live {
  #sessionId = null;
  #stream = null;
  #onSnapshot;
  #onState;

  // onSnapshot: given each snapshot. onState: given `live`, `starting` or `broken`, and what is the matter.
  constructor(onSnapshot, onState) {
    this.#onSnapshot = onSnapshot;
    this.#onState = onState;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
  }

  watch(sessionId) {
    if (sessionId === this.#sessionId && this.#stream) return;
    this.#sessionId = sessionId;
    this.start();
  }

  start() {
    this.stop();
    this.#stream = new AbortController();
    this.#run(this.#stream.signal);
  }

  stop() {
    this.#stream?.abort();
    this.#stream = null;
  }

  async #run(signal) {
    let pause = FIRST_PAUSE_MS;
    while (!signal.aborted) {
      try {
        const query = new URLSearchParams({ interval_s: INTERVAL_S });
        if (this.#sessionId) query.set("session_id", this.#sessionId);
        const response = await ask(`/live?${query}`, { signal });
        this.#onState("live", "live");
        for await (const data of events(response)) {
          pause = FIRST_PAUSE_MS;
          if (!signal.aborted) this.#onSnapshot(JSON.parse(data));
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof Failure && error.status === 401) {
          this.#onState("broken", "wants a key");
          return;
        }
        const starting = error instanceof Failure && error.status === 503;
        this.#onState(starting ? "starting" : "broken", starting ? error.message : "no connection");
      }
      if (signal.aborted) return;
      await new Promise((done) => setTimeout(done, pause));
      pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
    }
  }
}
