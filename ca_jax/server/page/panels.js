// The live panels: what of a snapshot goes where. Not here: drawing each of them, where snapshots come from.

import { paintBlocks } from "./blocks.js";
import { byId, painter } from "./dom.js";
import { shortName } from "./format.js";
import { paintQueue } from "./queue.js";
import { aboutHits, paintTiers, spark } from "./tiers.js";
import { paintTurn } from "./turn.js";

const HISTORY_S = 60; // Of how full a tier was.

export class Panels {
  #before = null; // The snapshot before.
  #last = null;
  #filled = { dram: [], ssd: [] };
  #tiers = painter(byId("tiers"), paintTiers);
  #queue = painter(byId("queue"), paintQueue);
  #blocks = painter(byId("blocks"), paintBlocks);
  #turn = painter(byId("turn"), paintTurn);

  constructor() {
    for (const choice of document.querySelectorAll("input[name=scale]"))
      choice.addEventListener("change", () => this.#showTurn());
  }

  show(snapshot) {
    this.#before = this.#last;
    this.#last = snapshot;
    for (const tier of snapshot.tiers) {
      const filled = this.#filled[tier.name];
      filled.push([snapshot.at_s, tier.used_bytes]);
      while (filled.length > 1 && filled[1][0] < snapshot.at_s - HISTORY_S) filled.shift();
    }
    const own = snapshot.session?.session_id ?? null;
    const moving = snapshot.moves.filter(
      (move, i) => this.#before && move.num_bytes > (this.#before.moves[i]?.num_bytes ?? 0),
    );
    const sparks = snapshot.tiers.map((tier) => spark(this.#filled[tier.name], tier.capacity_bytes, snapshot.at_s));
    this.#tiers(
      snapshot.tiers,
      sparks,
      snapshot.moves,
      moving.map((move) => move.name),
      snapshot.running,
      snapshot.num_slots,
      own,
    );
    this.#queue(snapshot.queue, own);
    byId("queue-count").textContent = snapshot.queue.num_waiting ? `${snapshot.queue.num_waiting} waiting` : "";
    byId("hits").textContent = aboutHits(snapshot.tiers, snapshot.misses);
    this.#blocks(snapshot.session && { ...snapshot.session, turn: null });
    byId("session-name").textContent = own ? shortName(own) : "";
    byId("session-name").title = own ?? "";
    this.#showTurn();
  }

  #showTurn() {
    const turn = this.#last?.session?.turn ?? null;
    byId("turn-phase").textContent = turn?.phase ?? "";
    this.#turn(turn, document.querySelector("input[name=scale]:checked").value);
  }
}
