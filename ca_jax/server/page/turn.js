// The session's last turn on an axis of time: queued, load, prefill, decode, save. Not here: measuring it.

import { make } from "./dom.js";
import { TIERS, milliseconds } from "./format.js";

export function paintTurn(turn, scale) {
  if (!turn) return [make("p", { className: "none" }, "No turn since this session was opened.")];
  const endOf = (span) => span.end_s ?? Math.max(turn.age_s, span.start_s + span.busy_s);
  const upTo =
    scale === "first" && turn.ttft_s !== null ? turn.ttft_s * 1.05 : Math.max(...turn.spans.map(endOf), 1e-4);
  const start = Math.min(0, ...turn.spans.map((span) => span.start_s));
  const at = (seconds) => `${(100 * Math.min(Math.max((seconds - start) / (upTo - start), 0), 1)).toFixed(3)}%`;
  const facts = make(
    "p",
    { className: "facts" },
    make("b", { id: "turn-cached" }, `${turn.cached_tokens} of ${turn.prompt_tokens}`),
    ` prompt tokens from ${turn.cached_tokens ? TIERS[turn.cached_tier] : "the cache"} · `,
    make("b", {}, String(turn.prompt_tokens - turn.cached_tokens)),
    " prefilled · ",
    make("b", {}, String(turn.completion_tokens)),
    " generated · ",
    make("b", {}, String(turn.saved_tokens)),
    " saved",
    turn.ttft_s === null ? "" : " · first token (dashed) ",
    turn.ttft_s === null ? "" : make("b", {}, milliseconds(turn.ttft_s)),
  );
  const rows = turn.spans.flatMap((span) => {
    const end = endOf(span);
    const within = span.start_s < upTo;
    const bar =
      within &&
      make("i", {
        className: span.name,
        style: { left: at(span.start_s), width: `calc(${at(end)} - ${at(span.start_s)})` },
      });
    return [
      make("span", {}, span.name),
      make("span", { className: "track" }, bar),
      make(
        "span",
        { className: "amount", "data-span": span.name },
        milliseconds(end - span.start_s),
        aboutSpan(span, turn),
      ),
    ];
  });
  const marks =
    turn.ttft_s !== null &&
    make("div", { className: "marks", "aria-hidden": true }, make("i", { style: { left: at(turn.ttft_s) } }));
  const label = turn.spans
    .map((span) => `${span.name} from ${milliseconds(span.start_s)} for ${milliseconds(endOf(span) - span.start_s)}`)
    .join("; ");
  const axis = make(
    "div",
    { className: "axis", "aria-hidden": true },
    ...ticks(start, upTo).map((tick) => make("span", { style: { left: at(tick) } }, tickLabel(tick, upTo))),
  );
  const chart = make("div", { className: "turn", role: "group", "aria-label": label }, ...rows, axis, marks || "");
  return [facts, chart];
}

function aboutSpan(span, turn) {
  const length = (span.end_s ?? turn.age_s) - span.start_s;
  let text = "";
  if (span.end_s === null) text = "so far";
  else if (span.name === "load")
    text = span.stall_s > 0 ? `${milliseconds(span.stall_s)} waited for` : "none waited for";
  else if (span.name === "prefill" && span.busy_s < length * 0.98) text = `${milliseconds(span.busy_s)} computing`;
  else if (span.name === "decode" && turn.completion_tokens > 1 && length > 0)
    text = `${((turn.completion_tokens - 1) / length).toFixed(1)} tokens/s`;
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
