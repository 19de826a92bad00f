// The job queue: a row of cells, with a bracket over those in the look-ahead prefetch window and one under those in the
// look-ahead eviction window. Not here: jobs in slots (tiers).

import { make } from "./dom.js";
import { many } from "./format.js";

const RESIDENCES = {
  dram: ["D", "KV in DRAM"],
  ssd: ["S", "KV on SSD"],
  pending: ["…", "KV on its way"],
  absent: ["–", "no KV stored"],
};

export function paintQueue(queue, own) {
  const span = (jobs) => make("b", {}, jobs ? many(jobs, "job") : "none");
  const windows = make(
    "p",
    { className: "note" },
    "look-ahead windows: prefetch ",
    span(queue.prefetch_window_jobs),
    " (above), eviction ",
    span(queue.eviction_window_jobs),
    " (below)",
  );
  windows.title =
    "What jobs in the prefetch window need is fetched from SSD early; in the eviction window, it leaves DRAM last.";
  if (!queue.waiting.length) return [make("p", { className: "none" }, "No job waits for a slot."), windows];
  const cells = queue.waiting.map((job, i) => {
    const [letter, where] = RESIDENCES[job.residency];
    const who = job.is_own
      ? job.session_id
        ? `session ${job.session_id}, ${many(job.num_tokens, "token")}`
        : "a chunk"
      : "another tenant";
    const mine = own !== null && job.session_id === own;
    return make(
      "span",
      {
        className: `job in-${job.residency}${job.is_own ? "" : " foreign"}${mine ? " own" : ""}`,
        title: `${i + 1}. ${who}: ${where}`,
        style: { gridColumn: `${i + 1}` },
      },
      letter,
    );
  });
  const bracket = (name, field, text) => {
    const last = queue.waiting.findLastIndex((job) => job[field]);
    return (
      last >= 0 &&
      make("span", {
        className: `bracket ${name}`,
        style: { gridColumn: `1 / span ${last + 1}` },
        title: `${text} window`,
      })
    );
  };
  const residences = ["dram", "ssd", "pending", "absent"].map(
    (name) => `${queue.waiting.filter((job) => job.residency === name).length} ${RESIDENCES[name][1]}`,
  );
  const line = make(
    "div",
    {
      className: "cells",
      role: "img",
      "aria-label": `${many(queue.num_waiting, "job")} waiting: ${residences.join(", ")}`,
    },
    ...[
      bracket("prefetch", "in_prefetch_window", "prefetch"),
      bracket("eviction", "in_eviction_window", "eviction"),
    ].filter(Boolean),
    ...cells,
  );
  const more = queue.num_waiting - queue.waiting.length;
  const legend = make(
    "ul",
    { className: "legend" },
    ...Object.entries(RESIDENCES).map(([name, [letter, where]]) => make("li", {}, make("b", {}, letter), where)),
    queue.waiting.some((job) => !job.is_own) && make("li", {}, "hatched: another tenant"),
  );
  return [
    make("div", { className: "line", tabindex: 0, role: "region", "aria-label": "Jobs that wait" }, line),
    more > 0 && make("p", { className: "note" }, `and ${more} more`),
    windows,
    legend,
  ];
}
