"""Writes results/paper.md: every figure's table and plot, the paper's numbers beside ours, with what there is to say.

    .venv/bin/python -m tools.paper_page

What it reads was written by `make figures`: results/paper/figures.json, results/replay.json and
results/replay_vs_simulator.json. The words are results/paper/notes.md: its sections `## 13` and so on come behind the
figure's table, `## replay` and `## simulator` behind theirs, and all others before and after, as they stand.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ca_jax.launch.machine import summarize_machine
from ca_jax.launch.simulate import shown

RESULTS = Path(__file__).resolve().parent.parent / "results"
_TITLES = {
    "13": "hit rates",
    "14": "time to first token",
    "15": "prefill throughput",
    "16": "GPU time",
    "17": "cost",
    "21": "policies",
    "22": "overflow",
    "23": "capacity",
    "24": "mediums",
    "25": "arrival rates",
}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of what was measured, and of the page")
    args = parser.parse_args()
    notes = sections((args.results / "paper" / "notes.md").read_text(encoding="utf-8"))
    reports = {
        name: json.loads((args.results / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("paper/figures", "replay", "replay_vs_simulator")
    }
    page = "\n".join(lines(notes, reports["paper/figures"], reports["replay"], reports["replay_vs_simulator"]))
    (args.results / "paper.md").write_text(page, encoding="utf-8")


def sections(text: str) -> dict[str, str]:
    """The sections of a Markdown text by their titles of the second level, in order; what is before is under `""`."""
    first, *others = re.split(r"^## ", text, flags=re.MULTILINE)
    found = {"": first.strip()}
    for other in others:
        title, _, body = other.partition("\n")
        found[title.strip()] = body.strip()
    return found


def lines(
    notes: Mapping[str, str], figures: Mapping[str, Any], replay: Mapping[str, Any], check: Mapping[str, Any]
) -> Iterable[str]:
    """The page, line by line."""
    own = {*_TITLES, "replay", "simulator", ""}
    yield notes[""]
    yield ""
    yield f"`{figures['command']}`: {figures['num_turns']:,} turns in {figures['elapsed_s']:.0f} s, " + (
        f"{summarize_machine(figures['machine'])}."
    )
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in figures["rows"]:
        rows.setdefault(row["figure"], []).append(row)
    for figure, of_figure in rows.items():
        yield ""
        yield f"## Figure {figure}: {_TITLES[figure]}"
        yield ""
        yield from table(
            ("case", "what", "ours", "paper", "ours / paper"),
            (
                (
                    row["case"],
                    row["metric"],
                    shown(row["ours"], row["unit"]),
                    shown(row["paper"], row["unit"]),
                    "" if row["ratio"] is None else f"{row['ratio']:.2f}",
                )
                for row in of_figure
            ),
        )
        yield ""
        yield f"![Figure {figure}](paper/figure_{figure}.png)"
        yield from _note(notes, figure)
    yield ""
    yield "## The engine itself: stored against recomputed"
    yield ""
    yield from _replay_table(replay)
    yield ""
    yield "![TTFT, hits and tiers of the replay](replay.png)"
    yield from _note(notes, "replay")
    yield ""
    yield "## The simulator against the engine"
    yield ""
    yield from _check_table(check)
    yield from _note(notes, "simulator")
    for title, body in notes.items():
        if title not in own:
            yield ""
            yield f"## {title}"
            yield ""
            yield body
    yield ""


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    """A Markdown table; numbers are to the right."""
    yield "| " + " | ".join(headings) + " |"
    yield "|" + "|".join("---" if index < 1 else "---:" for index in range(len(headings))) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _note(notes: Mapping[str, str], title: str) -> Iterable[str]:
    if title in notes:
        yield ""
        yield notes[title]


def _replay_table(replay: Mapping[str, Any]) -> Iterable[str]:
    yield f"`{replay['command']}`; {summarize_machine(replay['machine'])}."
    yield ""
    runs = {run["name"]: run["summary"] for run in replay["runs"]}
    rows: list[tuple[str, list[str]]] = [
        ("turns, with a history", [f"{run['turns']}, {run['returning_turns']}" for run in runs.values()]),
        ("hit rate", [shown(run["hit_rate"], "%") for run in runs.values()]),
        ("tokens of histories loaded", [f"{run['loaded_tokens']:,}" for run in runs.values()]),
        ("tokens prefilled", [f"{run['prefill_tokens']:,}" for run in runs.values()]),
        ("prefill", [shown(run["totals"]["prefill_s"], "s") for run in runs.values()]),
        ("total time", [shown(run["totals"]["elapsed_s"], "s") for run in runs.values()]),
        *(
            (f"TTFT {name}", [shown(run["ttft_s"][name], "s") for run in runs.values()])
            for name in ("mean", "p50", "p90", "p99")
        ),
    ]
    yield from table(("what", *runs), ((name, *values) for name, values in rows))


def _check_table(check: Mapping[str, Any]) -> Iterable[str]:
    yield f"`{check['command']}`; {summarize_machine(check['machine'])}."
    yield ""
    rows = []
    for policy, found in check["policies"].items():
        each = found["agreement"]
        rows.append(
            (
                policy,
                shown(each["engine_hit_rate"], "%"),
                shown(each["simulated_hit_rate"], "%"),
                f"{each['hit_rate_points']:+.2f}",
                f"{each['engine_prefill_tokens']:,}",
                f"{each['simulated_prefill_tokens']:,}",
                f"{100 * (each['prefill_tokens_ratio'] - 1):+.2f} %",
            )
        )
    headings = "policy", "hits, engine", "simulator", "points", "tokens prefilled, engine", "simulator", "more"
    yield from table(headings, rows)


if __name__ == "__main__":
    main()
