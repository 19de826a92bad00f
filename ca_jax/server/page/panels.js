// The live panels: tiers, job queue, where the session's blocks are, its last turn. Not here: where snapshots come from.

import { byId, draw, make, painter } from "./dom.js";
import { bytes, many, milliseconds, rate, shortName } from "./format.js";

const HISTORY_S = 60; // Of how full a tier was.
const MOST_CELLS = 480; // Of the block map; beyond that a cell is several blocks.
const TIERS = { dram: "DRAM", ssd: "SSD" };
const WAYS = {
  load: { arrow: "↑", from: "DRAM to device" },
  save: { arrow: "↓", from: "device to DRAM" },
  fetch: { arrow: "↑", from: "SSD to DRAM" },
  flush: { arrow: "↓", from: "DRAM to SSD" },
};
const RESIDENCES = { dram: ["D", "KV in DRAM"], ssd: ["S", "KV on SSD"], pending: ["…", "KV on its way"], absent: ["–", "no KV stored"] };

export class Panels {
  #before = null; // The snapshot before.
  #last = null;
  #filled = { dram: [], ssd: [] };
  #tiers = painter(byId("tiers"), paintTiers);
  #queue = painter(byId("queue"), paintQueue);
  #blocks = painter(byId("blocks"), paintBlocks);
  #turn = painter(byId("turn"), paintTurn);

  constructor() {
    for (const choice of document.querySelectorAll("input[name=scale]")) choice.addEventListener("change", () => this.#showTurn());
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
    const moving = snapshot.moves.filter((move, i) => this.#before && move.num_bytes > (this.#before.moves[i]?.num_bytes ?? 0));
    const sparks = snapshot.tiers.map((tier) => spark(this.#filled[tier.name], tier.capacity_bytes, snapshot.at_s));
    this.#tiers(snapshot.tiers, sparks, snapshot.moves, moving.map((move) => move.name), snapshot.running, snapshot.num_slots, own);
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

// Tiers

function paintTiers(tiers, sparks, moves, moving, running, numSlots, own) {
  const ways = (...names) => {
    const shown = moves.filter((move) => names.includes(move.name));
    return shown.length > 0 && make("div", { className: "ways" }, ...shown.map((move) => shownWay(move, moving.includes(move.name))));
  };
  const parts = [shownDevice(running, numSlots, own), ways("load", "save")];
  tiers.forEach((tier, i) => parts.push(shownTier(tier, sparks[i]), i === 0 && ways("fetch", "flush")));
  return parts;
}

function aboutHits(tiers, misses) {
  const hits = tiers.reduce((sum, tier) => sum + tier.num_hits, 0);
  const missed = Object.entries(misses).map(([reason, count]) => `${count} ${reason.replaceAll("_", " ")}`);
  return `${many(hits, "hit")}, misses: ${missed.join(", ") || "none"}`;
}

function shownDevice(running, numSlots, own) {
  const slots = Array.from({ length: numSlots }, (_, slot) => {
    const job = running.find((each) => each.slot === slot);
    if (!job) return make("span", { className: "slot", title: `slot ${slot}: free` }, "free");
    const who = job.is_own ? (job.session_id ? `session ${job.session_id}` : "a chunk") : "another tenant";
    const tokens = job.is_own ? job.num_tokens.toLocaleString("en") : "other";
    const name = `slot ${slot}: ${job.phase}, ${who}${job.is_own ? `, ${many(job.num_tokens, "token")}` : ""}`;
    const mine = own !== null && job.session_id === own;
    return make("span", { className: `slot ${job.phase}${mine ? " own" : ""}`, title: name }, `${job.phase} `, make("b", {}, tokens));
  });
  return make("div", { className: "tier device" }, make("span", { className: "name" }, "Device"),
    make("div", { className: "slots", role: "group", "aria-label": `${running.length} of ${numSlots} decode slots, with tokens of context` }, ...slots));
}

function shownTier(tier, path) {
  const share = tier.capacity_bytes ? tier.used_bytes / tier.capacity_bytes : 0;
  const percent = `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`;
  const label = `${TIERS[tier.name]} ${percent} full`;
  return make("div", { className: `tier ${tier.name}`, "data-tier": tier.name },
    make("span", { className: "name" }, TIERS[tier.name]),
    make("div", { className: "bar", role: "meter", "aria-label": label, "aria-valuenow": (share * 100).toFixed(1), "aria-valuemin": 0, "aria-valuemax": 100 },
      make("i", { style: { width: `${share * 100}%` } })),
    draw("svg", { class: "spark", "aria-hidden": true, viewBox: "0 0 84 18" }, draw("title", {}, "the last minute"), draw("path", { d: path })),
    make("p", { className: "about" }, make("b", { className: "used" }, bytes(tier.used_bytes)), ` of ${bytes(tier.capacity_bytes)}, ${percent} · `,
      make("span", { className: "sessions" }, many(tier.num_sessions, "session")), ` · ${tier.num_evictions} evicted · `,
      make("span", { className: "hits" }, many(tier.num_hits, "hit"))));
}

function shownWay(move, moves) {
  const { arrow, from } = WAYS[move.name];
  return make("span", { className: `way${moves ? " moves" : ""}`, title: `${move.name}: ${from}, ${many(move.num_moves, "time")}`, "data-way": move.name },
    make("span", { className: "arrow", "aria-hidden": true }, arrow), make("b", {}, move.name), 
    `${bytes(move.num_bytes)}${move.bytes_per_s === null ? "" : ` · ${rate(move.bytes_per_s)}`}`);
}

// How full a tier was, as a line from its own least to its most: what it does is to be seen, however little that is.
function spark(filled, capacity, nowS) {
  const used = filled.map(([, value]) => value);
  const least = Math.min(...used);
  const span = Math.max(Math.max(...used) - least, capacity / 200, 1);
  const points = filled.map(([atS, value]) => [84 * (1 - (nowS - atS) / HISTORY_S), 16 - (14 * (value - least)) / span]);
  points.unshift([Math.min(Math.max(points[0][0], 0), 84), points[0][1]]);
  return points.map(([x, y], i) => `${i ? "L" : "M"}${Math.max(x, 0).toFixed(1)} ${y.toFixed(1)}`).join("");
}

// Queue

function paintQueue(queue, own) {
  const span = (jobs) => make("b", {}, jobs ? many(jobs, "job") : "none");
  const windows = make("p", { className: "note" }, "look-ahead windows: above, prefetch: ", span(queue.prefetch_window_jobs), "; below, eviction: ", span(queue.eviction_window_jobs));
  windows.title = "Jobs of the prefetch window have their KV fetched from SSD before they run; what those of the eviction window need leaves DRAM last.";
  if (!queue.waiting.length) return [make("p", { className: "none" }, "No job waits for a slot."), windows];
  const cells = queue.waiting.map((job, i) => {
    const [letter, where] = RESIDENCES[job.residency];
    const who = job.is_own ? (job.session_id ? `session ${job.session_id}, ${many(job.num_tokens, "token")}` : "a chunk") : "another tenant";
    const mine = own !== null && job.session_id === own;
    return make("span", { className: `job in-${job.residency}${job.is_own ? "" : " foreign"}${mine ? " own" : ""}`, title: `${i + 1}. ${who}: ${where}`, style: { gridColumn: `${i + 1}` } }, letter);
  });
  const bracket = (name, field, text) => {
    const last = queue.waiting.findLastIndex((job) => job[field]);
    return last >= 0 && make("span", { className: `bracket ${name}`, style: { gridColumn: `1 / span ${last + 1}` }, title: `${text} window` });
  };
  const residences = ["dram", "ssd", "pending", "absent"].map((name) => `${queue.waiting.filter((job) => job.residency === name).length} ${RESIDENCES[name][1]}`);
  const line = make("div", { className: "cells", role: "img", "aria-label": `${many(queue.num_waiting, "job")} waiting: ${residences.join(", ")}` },
    ...[bracket("prefetch", "in_prefetch_window", "prefetch"), bracket("eviction", "in_eviction_window", "eviction")].filter(Boolean), ...cells);
  const more = queue.num_waiting - queue.waiting.length;
  const legend = make("ul", { className: "legend" }, ...Object.entries(RESIDENCES).map(([name, [letter, where]]) => make("li", {}, make("b", {}, letter), where)),
    queue.waiting.some((job) => !job.is_own) && make("li", {}, "hatched: another tenant"));
  return [make("div", { className: "line", tabindex: 0, role: "region", "aria-label": "Jobs that wait" }, line),
    more > 0 && make("p", { className: "note" }, `and ${more} more`), windows, legend];
}

// Blocks

function paintBlocks(session) {
  if (!session) return [make("p", { className: "none" }, "A new chat: nothing of it is stored.")];
  const numSaving = session.blocks.reduce((sum, block) => sum + block.saving_tokens, 0);
  const row = (name, tokens, about, rest) => [make("span", { className: "name" }, name), make("span", { "data-tokens": name }, many(tokens, "token")), make("span", {}, about), make("span", {}, rest)];
  const onSsd = session.blocks.filter((block) => block.ssd_tokens).length;
  const table = make("div", { className: "places" },
    ...row("DRAM", session.dram_tokens, bytes(session.dram_bytes), `${many(session.dram_blocks, "block")}${numSaving ? `, ${numSaving} tokens being saved` : ""}`),
    ...row("SSD", session.ssd_tokens, bytes(session.ssd_bytes), many(onSsd, "block")));
  const perCell = Math.ceil(session.blocks.length / MOST_CELLS);
  const cells = [];
  for (let i = 0; i < session.blocks.length; i += perCell) cells.push(shownBlock(session.blocks.slice(i, i + perCell), session.block_tokens));
  const summary = `${many(session.blocks.length, "block")}: ${many(session.dram_tokens, "token")} in DRAM, ${session.ssd_tokens} on SSD`;
  const map = cells.length > 0 && make("div", { className: "map", role: "img", "aria-label": summary }, ...cells);
  const legend = [["above: DRAM", [1, 0, 0]], ["below: SSD", [0, 1, 0]], ["slim: being saved", [0, 0, 1]]].map(([text, shares]) => make("li", {}, glyph(shares, ""), text));
  return [table, map || make("p", { className: "none" }, "Nothing of it is stored yet."),
    make("ul", { className: "legend" }, ...legend, make("li", {}, `a cell: ${perCell > 1 ? `${perCell} blocks of ` : ""}${session.block_tokens} tokens`))];
}

function shownBlock(blocks, blockTokens) {
  const sum = (field) => blocks.reduce((total, block) => total + block[field], 0);
  const [dram, ssd, saving] = [sum("dram_tokens"), sum("ssd_tokens"), sum("saving_tokens")];
  const first = blocks[0].first_token;
  const count = Math.max(dram + saving, ssd);
  const where = [dram && `${dram} in DRAM`, ssd && `${ssd} on SSD`, saving && `${saving} being saved`].filter(Boolean).join(", ");
  const whole = blockTokens * blocks.length;
  return glyph([dram / whole, ssd / whole, saving / whole], `tokens ${first} to ${first + count - 1}: ${where}`);
}

// A block: DRAM's share fills the upper half from the left, SSD's the lower; what is being saved is a slim bar behind DRAM's.
function glyph([dram, ssd, saving], name) {
  return draw("svg", { class: "block", viewBox: "0 0 13 18", "aria-hidden": true }, draw("title", {}, name),
    draw("rect", { class: "frame", x: 0.5, y: 0.5, width: 12, height: 17, rx: 1.5 }),
    draw("rect", { class: "of-dram", x: 1, y: 1, width: 11 * dram, height: 8 }),
    draw("rect", { class: "of-save", x: 1 + 11 * dram, y: 3.5, width: 11 * saving, height: 3 }),
    draw("rect", { class: "of-ssd", x: 1, y: 10, width: 11 * ssd, height: 7 }));
}

// The last turn

function paintTurn(turn, scale) {
  if (!turn) return [make("p", { className: "none" }, "No turn since this session was opened.")];
  const endOf = (span) => span.end_s ?? Math.max(turn.age_s, span.start_s + span.busy_s);
  const upTo = scale === "first" && turn.ttft_s !== null ? turn.ttft_s * 1.05 : Math.max(...turn.spans.map(endOf), 1e-4);
  const start = Math.min(0, ...turn.spans.map((span) => span.start_s));
  const at = (seconds) => `${(100 * Math.min(Math.max((seconds - start) / (upTo - start), 0), 1)).toFixed(3)}%`;
  const facts = make("p", { className: "facts" },
    make("b", { id: "turn-cached" }, `${turn.cached_tokens} of ${turn.prompt_tokens}`), ` prompt tokens from ${turn.cached_tokens ? TIERS[turn.cached_tier] : "the cache"} · `,
    make("b", {}, String(turn.prompt_tokens - turn.cached_tokens)), " prefilled · ", make("b", {}, String(turn.completion_tokens)), " generated · ",
    make("b", {}, String(turn.saved_tokens)), " saved", turn.ttft_s === null ? "" : " · first token (dashed) ", turn.ttft_s === null ? "" : make("b", {}, milliseconds(turn.ttft_s)));
  const rows = turn.spans.flatMap((span) => {
    const end = endOf(span);
    const within = span.start_s < upTo;
    const bar = within && make("i", { className: span.name, style: { left: at(span.start_s), width: `calc(${at(end)} - ${at(span.start_s)})` } });
    return [make("span", {}, span.name), make("span", { className: "track" }, bar), make("span", { className: "amount", "data-span": span.name }, milliseconds(end - span.start_s), aboutSpan(span, turn))];
  });
  const marks = turn.ttft_s !== null && make("div", { className: "marks", "aria-hidden": true }, make("i", { style: { left: at(turn.ttft_s) } }));
  const label = turn.spans.map((span) => `${span.name} from ${milliseconds(span.start_s)} for ${milliseconds(endOf(span) - span.start_s)}`).join("; ");
  const axis = make("div", { className: "axis", "aria-hidden": true }, ...ticks(start, upTo).map((tick) => make("span", { style: { left: at(tick) } }, tickLabel(tick, upTo))));
  const chart = make("div", { className: "turn", role: "group", "aria-label": label }, ...rows, axis, marks || "");
  return [facts, chart];
}

function aboutSpan(span, turn) {
  const length = (span.end_s ?? turn.age_s) - span.start_s;
  let text = "";
  if (span.end_s === null) text = "so far";
  else if (span.name === "load") text = span.stall_s > 0 ? `${milliseconds(span.stall_s)} waited for` : "none waited for";
  else if (span.name === "prefill" && span.busy_s < length * 0.98) text = `${milliseconds(span.busy_s)} computing`;
  else if (span.name === "decode" && turn.completion_tokens > 1 && length > 0) text = `${((turn.completion_tokens - 1) / length).toFixed(1)} tokens/s`;
  else if (span.name === "save") text = `${milliseconds(Math.max(span.end_s - turn.age_s, 0))} after answer`;
  return text && make("small", {}, text);
}

function ticks(start, stop) {
  const rough = (stop - start) / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  const found = [];
  for (let tick = Math.ceil(start / step) * step; tick <= stop + step * 1e-6; tick += step) found.push(tick);
  return found;
}

function tickLabel(seconds, upTo) {
  if (upTo >= 10) return `${Number(seconds.toFixed(1))} s`;
  return `${Number((seconds * 1e3).toFixed(3)).toLocaleString("en")} ms`;
}
