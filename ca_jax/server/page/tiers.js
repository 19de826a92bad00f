// The tiers: device, DRAM and SSD, one above the other, and what moves between them. Not here: when that changes.

import { draw, make } from "./dom.js";
import { TIERS, bytes, many, rate } from "./format.js";

const SPARK_S = 60; // That the line of how full a tier was is wide.
const WAYS = {
  load: { arrow: "↑", from: "DRAM to device" },
  save: { arrow: "↓", from: "device to DRAM" },
  fetch: { arrow: "↑", from: "SSD to DRAM" },
  flush: { arrow: "↓", from: "DRAM to SSD" },
};

export function paintTiers(tiers, sparks, moves, moving, running, numSlots, own) {
  const ways = (...names) => {
    const shown = moves.filter((move) => names.includes(move.name));
    return (
      shown.length > 0 &&
      make("div", { className: "ways" }, ...shown.map((move) => shownWay(move, moving.includes(move.name))))
    );
  };
  const parts = [shownDevice(running, numSlots, own), ways("load", "save")];
  tiers.forEach((tier, i) => parts.push(shownTier(tier, sparks[i]), i === 0 && ways("fetch", "flush")));
  return parts;
}

export function aboutHits(tiers, misses) {
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
    return make(
      "span",
      { className: `slot ${job.phase}${mine ? " own" : ""}`, title: name },
      `${job.phase} `,
      make("b", {}, tokens),
    );
  });
  return make(
    "div",
    { className: "tier device" },
    make("span", { className: "name" }, "Device"),
    make(
      "div",
      {
        className: "slots",
        role: "group",
        "aria-label": `${running.length} of ${numSlots} slots, with tokens of context`,
      },
      ...slots,
    ),
  );
}

function shownTier(tier, path) {
  const share = tier.capacity_bytes ? tier.used_bytes / tier.capacity_bytes : 0;
  const percent = `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`;
  const label = `${TIERS[tier.name]} ${percent} full`;
  return make(
    "div",
    { className: `tier ${tier.name}`, "data-tier": tier.name },
    make("span", { className: "name" }, TIERS[tier.name]),
    make(
      "div",
      {
        className: "bar",
        role: "meter",
        "aria-label": label,
        "aria-valuenow": (share * 100).toFixed(1),
        "aria-valuemin": 0,
        "aria-valuemax": 100,
      },
      make("i", { style: { width: `${share * 100}%` } }),
    ),
    draw(
      "svg",
      { class: "spark", "aria-hidden": true, viewBox: "0 0 84 18" },
      draw("title", {}, "the last minute"),
      draw("path", { d: path }),
    ),
    make(
      "p",
      { className: "about" },
      make("b", { className: "used" }, bytes(tier.used_bytes)),
      ` of ${bytes(tier.capacity_bytes)}, ${percent} · `,
      make("span", { className: "sessions" }, many(tier.num_sessions, "session")),
      ` · ${tier.num_evictions} evicted · `,
      make("span", { className: "hits" }, many(tier.num_hits, "hit")),
    ),
  );
}

function shownWay(move, moves) {
  const { arrow, from } = WAYS[move.name];
  return make(
    "span",
    {
      className: `way${moves ? " moves" : ""}`,
      title: `${move.name}: ${from}, ${many(move.num_moves, "time")}`,
      "data-way": move.name,
    },
    make("span", { className: "arrow", "aria-hidden": true }, arrow),
    make("b", {}, move.name),
    `${bytes(move.num_bytes)}${move.bytes_per_s === null ? "" : ` · ${rate(move.bytes_per_s)}`}`,
  );
}

// How full a tier was, as a line from its own least to its most: what it does is to be seen, however little that is.
export function spark(filled, capacity, nowS) {
  const used = filled.map(([, value]) => value);
  const least = Math.min(...used);
  const span = Math.max(Math.max(...used) - least, capacity / 200, 1);
  const points = filled.map(([atS, value]) => [84 * (1 - (nowS - atS) / SPARK_S), 16 - (14 * (value - least)) / span]);
  points.unshift([Math.min(Math.max(points[0][0], 0), 84), points[0][1]]);
  return points.map(([x, y], i) => `${i ? "L" : "M"}${Math.max(x, 0).toFixed(1)} ${y.toFixed(1)}`).join("");
}
