"""Writes results/paper.md: every figure's table and plot, the paper's numbers beside ours, and what there is to say.

    .venv/bin/python -m tools.paper_page

It reads what `make figures` wrote: results/paper/*.json, results/replay.json and results/replay_vs_simulator.json. The
words are results/paper/notes.md: its sections `## 13`, `## fits`, `## replay`, `## simulator` and so on come behind
their tables, and all others before and after, as they stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper_figures import shown
from benchmarks.paper_turns import FIGURES
from benchmarks.tables import summarize_machine
from tools.pages import Report, assemble, read_json, read_notes, table, write_page

_TITLES = {
    "13": "hit rates",
    "14": "time to first token",
    "15": "prefill throughput",
    "16": "GPU time",
    "17": "cost",
    "18": "recomputing and reuse, one turn",
    "19": "layer-wise pre-loading, one turn",
    "20": "asynchronous saving, one turn",
    "21": "policies",
    "22": "overflow",
    "23": "capacity",
    "24": "mediums",
    "25": "arrival rates",
}
_MODELS = ("13", "14", "15", "16", "17")
_REPORTS = ("paper/figures", "replay", "replay_vs_simulator", "paper/turns_a100", "paper/turns_h100")
_FITS = {
    "paper/figures": "as fitted",
    "paper/measured_characters": "3.86 characters a token",
    "paper/own_prefill_time": "0.6 of peak",
}
"""Reports of figures 13 to 17, and which of the two fitted numbers each has otherwise."""


def main() -> None:
    """See the module."""
    write_page(__doc__, "paper.md", page)


def page(results: Path) -> str:
    """The page of a directory of results."""
    paths = {name: results / f"{name}.json" for name in dict.fromkeys((*_REPORTS, *_FITS))}
    reports = {name: read_json(path) for name, path in paths.items() if name in _REPORTS or path.exists()}
    return make_page(read_notes(results / "paper" / "notes.md"), reports)


def make_page(notes: Mapping[str, str], reports: Mapping[str, Report]) -> str:
    """The page of these words, and of reports by the names in `_REPORTS` and `_FITS`."""
    figures, replay, check, *of_turns = (reports[name] for name in _REPORTS)
    made = {figure: _figure(figure, rows) for figure, rows in _by_figure(figures).items()}
    made |= {figure: _turns(figure, *(_by_figure(report)[figure] for report in of_turns)) for figure in FIGURES}
    parts = [(name, f"Figure {name}: {_TITLES[name]}", made[name]) for name in _TITLES if name in made]
    has_fits = _FITS.keys() <= reports.keys()
    if has_fits:
        parts.append(("fits", "The two fits", _fits(reports)))
    parts.append(("replay", "The engine itself: stored against recomputed", _replay(replay)))
    parts.append(("simulator", "The simulator against the engine", _check(check)))
    words = {title: body for title, body in notes.items() if has_fits or title != "fits"}
    commands = " and ".join(f"`{report['command']}`" for report in of_turns)
    return assemble(words, ["", _made(figures), "", f"{commands}: figures 18 to 20."], parts)


def _by_figure(report: Report) -> dict[str, list[Report]]:
    rows: dict[str, list[Report]] = {}
    for row in report["rows"]:
        rows.setdefault(row["figure"], []).append(row)
    return rows


def _made(report: Report) -> str:
    took = f": {report['num_turns']:,} turns in {report['elapsed_s']:.0f} s, " if "num_turns" in report else "; "
    return f"`{report['command']}`{took}{summarize_machine(report['machine'])}."


def _figure(figure: str, rows: Iterable[Report]) -> list[str]:
    numbers = (
        [
            *(row["case"], row["metric"], shown(row["ours"], row["unit"]), shown(row["paper"], row["unit"])),
            "" if row["ratio"] is None else f"{row['ratio']:.2f}",
        ]
        for row in rows
    )
    made = table(("case", "what", "ours", "paper", "ours / paper"), numbers)
    return [*made, "", f"![Figure {figure}](paper/figure_{figure}.png)"]


def _turns(figure: str, a100: Iterable[Report], h100: Iterable[Report]) -> list[str]:
    """A figure of one turn, two devices side by side."""
    numbers = (
        [
            *(row["case"], row["metric"], shown(row["ours"], row["unit"]), shown(row["paper"], row["unit"])),
            "" if row["ratio"] is None else f"{row['ratio']:.2f}",
            shown(other["ours"], other["unit"]),
        ]
        for row, other in zip(a100, h100, strict=True)
    )
    made = table(("case", "what", "A100", "paper, A100", "A100 / paper", "H100"), numbers)
    return [*made, "", f"![Figure {figure}, A100](paper/figure_{figure}.png)"]


def _fits(reports: Mapping[str, Report]) -> list[str]:
    """A line for each model and setting, and one of the paper's; a column for each number."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    rows = {
        setting: [row for row in reports[name]["rows"] if row["figure"] in _MODELS] for name, setting in _FITS.items()
    }
    for setting, field in [*((setting, "ours") for setting in rows), ("the paper", "paper")]:
        for row in rows.get(setting, rows["as fitted"]):
            lines.setdefault((row["case"], setting), {})[row["metric"]] = shown(row[field], row["unit"])
    metrics = list(dict.fromkeys(row["metric"] for of_setting in rows.values() for row in of_setting))
    models = list(dict.fromkeys(model for model, _ in lines))
    keys = sorted(lines, key=lambda key: models.index(key[0]))
    body = ([*key, *(lines[key].get(metric, "") for metric in metrics)] for key in keys)
    commands = [f"`{reports[name]['command']}`" for name in _FITS if name != "paper/figures"]
    return [f"{' and '.join(commands)}.", "", *table(("model", "setting", *metrics), body)]


def _replay(replay: Report) -> list[str]:
    runs: dict[str, Any] = {run["name"]: run["summary"] for run in replay["runs"]}
    rows: dict[str, Sequence[str]] = {
        "turns, with a history": [f"{run['turns']}, {run['returning_turns']}" for run in runs.values()],
        "turns that found anything of their history": [shown(run["hit_rate"], "%") for run in runs.values()],
        "tokens of histories loaded": [
            f"{run['loaded_tokens']:,}, {shown(run['loaded_tokens'] / run['history_tokens'], '%')}"
            for run in runs.values()
        ],
        "tokens prefilled": [f"{run['prefill_tokens']:,}" for run in runs.values()],
        "prefill": [shown(run["totals"]["prefill_s"], "s") for run in runs.values()],
        "total time": [shown(run["totals"]["elapsed_s"], "s") for run in runs.values()],
    }
    for name in ("mean", "p50", "p90", "p99"):
        rows[f"TTFT {name}"] = [shown(run["ttft_s"][name], "s") for run in runs.values()]
    made = table(("what", *runs), ((name, *values) for name, values in rows.items()))
    return [_made(replay), "", *made, "", "![TTFT, hits and tiers of the replay](replay.png)"]


def _check(check: Report) -> list[str]:
    headings = "policy", "hits, engine", "simulator", "points", "tokens prefilled, engine", "simulator", "more"
    rows = []
    for policy, found in check["policies"].items():
        each = found["agreement"]
        hits = [shown(each[f"{which}_hit_rate"], "%") for which in ("engine", "simulated")]
        tokens = [f"{each[f'{which}_prefill_tokens']:,}" for which in ("engine", "simulated")]
        more = f"{100 * (each['prefill_tokens_ratio'] - 1):+.2f} %"
        rows.append([policy, *hits, f"{each['hit_rate_points']:+.2f}", *tokens, more])
    return [_made(check), "", *table(headings, rows)]


if __name__ == "__main__":
    main()
