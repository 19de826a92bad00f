// Where the session's blocks are: a cell for each. Not here: whose they are.

import { draw, make } from "./dom.js";
import { bytes, many } from "./format.js";

const MOST_CELLS = 480; // Beyond that a cell is several blocks.

export function paintBlocks(session) {
  if (!session) return [make("p", { className: "none" }, "A new chat: nothing of it is stored.")];
  const numSaving = session.blocks.reduce((sum, block) => sum + block.saving_tokens, 0);
  const row = (name, tokens, about, rest) => [
    make("span", { className: "name" }, name),
    make("span", { "data-tokens": name }, many(tokens, "token")),
    make("span", {}, about),
    make("span", {}, rest),
  ];
  const onSsd = session.blocks.filter((block) => block.ssd_tokens).length;
  const table = make(
    "div",
    { className: "places" },
    ...row(
      "DRAM",
      session.dram_tokens,
      bytes(session.dram_bytes),
      `${many(session.dram_blocks, "block")}${numSaving ? `, ${numSaving} tokens being saved` : ""}`,
    ),
    ...row("SSD", session.ssd_tokens, bytes(session.ssd_bytes), many(onSsd, "block")),
  );
  const perCell = Math.ceil(session.blocks.length / MOST_CELLS);
  const cells = [];
  for (let i = 0; i < session.blocks.length; i += perCell)
    cells.push(shownBlock(session.blocks.slice(i, i + perCell), session.block_tokens));
  const tokens = `${many(session.dram_tokens, "token")} in DRAM, ${session.ssd_tokens} on SSD`;
  const summary = `${many(session.blocks.length, "block")}: ${tokens}`;
  const map = cells.length > 0 && make("div", { className: "map", role: "img", "aria-label": summary }, ...cells);
  const legend = [
    ["above: DRAM", [1, 0, 0]],
    ["below: SSD", [0, 1, 0]],
    ["slim: being saved", [0, 0, 1]],
  ].map(([text, shares]) => make("li", {}, glyph(shares, ""), text));
  return [
    table,
    map || make("p", { className: "none" }, "Nothing of it is stored yet."),
    make(
      "ul",
      { className: "legend" },
      ...legend,
      make("li", {}, `a cell: ${perCell > 1 ? `${perCell} blocks of ` : ""}${session.block_tokens} tokens`),
    ),
  ];
}

function shownBlock(blocks, blockTokens) {
  const sum = (field) => blocks.reduce((total, block) => total + block[field], 0);
  const [dram, ssd, saving] = [sum("dram_tokens"), sum("ssd_tokens"), sum("saving_tokens")];
  const first = blocks[0].first_token;
  const count = Math.max(dram + saving, ssd);
  const where = [dram && `${dram} in DRAM`, ssd && `${ssd} on SSD`, saving && `${saving} being saved`]
    .filter(Boolean)
    .join(", ");
  const whole = blockTokens * blocks.length;
  return glyph([dram / whole, ssd / whole, saving / whole], `tokens ${first} to ${first + count - 1}: ${where}`);
}

// A block: DRAM's share fills the upper half from the left, SSD's the lower; what is being saved is a slim bar behind
// DRAM's.
function glyph([dram, ssd, saving], name) {
  return draw(
    "svg",
    { class: "block", viewBox: "0 0 13 18", "aria-hidden": true },
    draw("title", {}, name),
    draw("rect", { class: "frame", x: 0.5, y: 0.5, width: 12, height: 17, rx: 1.5 }),
    draw("rect", { class: "of-dram", x: 1, y: 1, width: 11 * dram, height: 8 }),
    draw("rect", { class: "of-save", x: 1 + 11 * dram, y: 3.5, width: 11 * saving, height: 3 }),
    draw("rect", { class: "of-ssd", x: 1, y: 10, width: 11 * ssd, height: 7 }),
  );
}
