// The operators' view: the last hour as the server kept it. Not here: this moment (panels.js).

import { askJson } from "./api.js";
import { byId, draw, make } from "./dom.js";
import { TIERS, many, milliseconds } from "./format.js";

const REFRESH_MS = 10_000;
const WIDTH = 560;
const HEIGHT = 120;

export class Operate {
  #timer = null;
  #onUnauthorized;

  constructor(onUnauthorized) {
    this.#onUnauthorized = onUnauthorized;
    byId("operate-open").addEventListener("click", () => this.toggle());
  }

  async toggle() {
    const isShown = byId("operate").hidden;
    byId("operate").hidden = !isShown;
    byId("main").hidden = isShown;
    byId("operate-open").setAttribute("aria-pressed", String(isShown));
    clearInterval(this.#timer);
    if (!isShown) return;
    this.#timer = setInterval(() => this.#refresh(), REFRESH_MS);
    await this.#refresh();
  }

  async #refresh() {
    try {
      const hour = await askJson("/live/history");
      byId("charts").replaceChildren(...charts(hour));
      byId("slowest").replaceChildren(...rows(hour.slowest));
      byId("operate-error").hidden = true;
    } catch (error) {
      byId("operate-error").hidden = false;
      byId("operate-error").textContent = error.told ?? error.message;
      if (error.status === 401) this.#onUnauthorized();
    }
  }
}

// Charts from the oldest sample on: of a server that runs for two minutes, of these.
function charts({ samples, sample_s }) {
  const span = Math.max(samples[0]?.age_s ?? 0, sample_s);
  const at = (each) => -each.age_s;
  const over = (name) => samples.slice(1).map((each, i) => each.done[name] - samples[i].done[name]);
  const seconds = samples.slice(1).map((each, i) => samples[i].age_s - each.age_s);
  const [earlier, later] = [samples.slice(0, -1).map(at), samples.slice(1).map(at)];
  const [prompts, cached, generated] = ["prompt_tokens", "cached_tokens", "completion_tokens"].map(over);
  const steps = (values) => values.flatMap((value, i) => [[earlier[i], value], [later[i], value]]); // Of the time between.
  const tiers = Object.keys(samples.at(-1)?.used_shares ?? {});
  return [
    chart(span, "Cached share of prompts", "%", 100, [
      { name: "cached", kind: "device", points: steps(cached.map((count, i) => (prompts[i] ? (100 * count) / prompts[i] : null))) },
    ]),
    chart(span, "Tokens a second", "", null, [
      { name: "generated", kind: "device", points: steps(generated.map((count, i) => count / seconds[i])) },
      { name: "of prompts, computed", kind: "way", points: steps(prompts.map((count, i) => (count - cached[i]) / seconds[i])) },
    ]),
    chart(span, "Jobs", "", null, [
      { name: "running", kind: "device", points: samples.map((each) => [at(each), each.num_running]) },
      { name: "waiting", kind: "ssd", points: samples.map((each) => [at(each), each.num_waiting]) },
    ]),
    chart(span, "Tiers taken", "%", 100, tiers.map((tier) => ({
      name: TIERS[tier] ?? tier,
      kind: tier,
      points: samples.map((each) => [at(each), 100 * (each.used_shares[tier] ?? 0)]),
    }))),
  ];
}

// A line is broken where there is no value.
function chart(span, title, unit, most, lines) {
  const values = lines.flatMap((line) => line.points.map(([, value]) => value).filter((value) => value !== null));
  const top = most ?? Math.max(1, ...values);
  const x = (time) => WIDTH * (1 + time / span);
  const y = (value) => HEIGHT - (HEIGHT * value) / top;
  const begins = (points, i) => (points[i - 1]?.[1] ?? null) === null;
  const path = (points) =>
    points
      .map(([time, value], i) => (value === null ? "" : `${begins(points, i) ? "M" : "L"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`))
      .join("");
  const last = (line) => line.points.at(-1)?.[1] ?? null;
  const told = lines.map((line) => `${line.name} ${last(line) === null ? "unknown" : `${last(line).toFixed(1)}${unit}`}`);
  return make(
    "figure",
    { className: "chart panel" },
    make("figcaption", {}, make("b", {}, title), ` now: ${told.join(", ")} · up to ${Math.round(top).toLocaleString("en")}${unit}`),
    draw(
      "svg",
      { viewBox: `0 -4 ${WIDTH} ${HEIGHT + 8}`, role: "img", "aria-label": `${title} from ${ago(span)} on; now ${told.join(", ")}` },
      ...[0, 0.5, 1].map((share) => draw("line", { x1: 0, x2: WIDTH, y1: HEIGHT * share, y2: HEIGHT * share })),
      ...lines.map((line) => draw("path", { class: line.kind, d: path(line.points) })),
    ),
    make("p", { className: "hours" }, make("span", {}, ago(span)), make("span", {}, "now")),
  );
}

function ago(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  return seconds < 3570 ? `${Math.round(seconds / 60)} min ago` : "an hour ago";
}

function rows(turns) {
  return turns.map((turn) =>
    make(
      "tr",
      {},
      ...[
        turn.session_id ?? "(no name)",
        ago(turn.age_s),
        milliseconds(turn.ttft_s),
        milliseconds(turn.queued_s),
        milliseconds(turn.total_s),
        `${turn.cached_tokens.toLocaleString("en")} of ${many(turn.prompt_tokens, "token")}`,
        many(turn.completion_tokens, "token"),
      ].map((text) => make("td", {}, text)),
    ),
  );
}
