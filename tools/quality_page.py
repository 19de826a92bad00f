"""Makes a page of tables from what evaluations have written.

    python -m tools.quality_page --out=results/quality.md ppl_*.json lines.json mmlu.json

Perplexities of one model are a table, a line for each text and window and a column for each method; those of a file
with many methods, and the other tasks, have a line for each method, those on the same data below each other. The
commands that made the files come last.

Not here: evaluating (`ca_jax.launch.evaluate`), what the files hold (`benchmarks.evaluate`).
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from benchmarks.evaluate.tables import COLUMNS, Report, gap, with_error
from benchmarks.tables import make_markdown, summarize_machine
from tools.pages import read_json

_OUT = flags.DEFINE_string("out", None, "Markdown file to write.", required=True)
_NOTES = flags.DEFINE_string("notes", None, "Markdown file whose text comes before the tables.")

_WIDTH = 120
_MOST_COLUMNS = 6  # Methods beside each other; of more, each has a line.
_TITLES = {
    "ppl": "Perplexity",
    "longeval": "LongEval: asking for what an overflow has kept",
    "mmlu": "MMLU behind a text that has overflowed",
    "agreement": "Going on as `tt` does",
}
_INTRODUCTION = """\
What becomes of a model's answers when a conversation outgrows the window and its oldest tokens are dropped. `ca` uses
the KV of the tokens that stay as it is stored, at its new positions. `tt` drops them as text and computes the rest
anew, and is what the others are held against. `of` is `tt` with its KV lost at each overflow, the same in numbers.
`nkvt` cuts KV that has its old positions in it, which is wrong. Of a method is said how many first tokens it keeps, how
many it anchors, what share it repairs, and what share of the window it drops where that is not half.
"""
_INTERVALS = (
    "Intervals are of 95 %: Wilson's of an accuracy, a paired bootstrap over records of a difference; p is the exact "
    "McNemar test's."
)
_NOTES_ON = {
    "ppl": "Perplexity of the tokens after the first overflow ± its standard error, and how far it is above that of "
    "`tt` ± the standard error of the paired difference. Errors are over blocks of as many tokens as are fed at once; "
    "what tokens have in common beyond a block is not in them.",
    "longeval": "Records are built from the benchmark's own lines or conversations, so that they overflow the window "
    f"once and what is asked for was there before and is kept. {_INTERVALS}",
    "mmlu": f"A text is fed that overflows the window; each question is asked behind it. {_INTERVALS}",
    "agreement": "At places behind the first overflow each method goes on with the text by itself, greedily. "
    "Intervals are Wilson's, of 95 %.",
}
REQUIRED = ("task", "model", "dtype", "machine", "versions", "command", "config", "rows")
"""What a report must have."""


def to_markdown(reports: Sequence[Report], *, notes: str = "") -> str:
    """The page.

    Args:
      reports: as `evaluate` has written them.
      notes: Markdown before the tables.

    Raises:
      ValueError: there are none.
    """
    if not reports:
        raise ValueError("reports must be at least one, got none")
    lines = ["# Quality behind an overflow", "", _INTRODUCTION]
    if notes.strip():
        lines += [notes.strip(), ""]
    for task, title in _TITLES.items():
        of_task = [report for report in reports if report["task"] == task]
        if not of_task:
            continue
        lines += [f"## {title}", "", textwrap.fill(_NOTES_ON[task], _WIDTH), ""]
        for model in dict.fromkeys(_model(report) for report in of_task):
            rows = [report for report in of_task if _model(report) == model]
            lines += [f"{model}:", ""]
            beside = [report for report in rows if task == "ppl" and len(report["rows"]) <= _MOST_COLUMNS]
            if beside:
                lines += [*_perplexities(beside), ""]
            if len(beside) < len(rows):
                lines += [*_by_method(task, [report for report in rows if report not in beside]), ""]
    lines += ["## To redo it", ""]
    for place in dict.fromkeys(_place(report) for report in reports):
        commands = [report["command"] for report in reports if _place(report) == place]
        lines += [f"On {place}:", "", *(f"    {command}" for command in commands), ""]
    return "\n".join(lines).rstrip() + "\n"


def read_report(path: Path) -> Report:
    """A file that `evaluate` has written.

    Raises:
      ValueError: it cannot be read, or is something else.
    """
    try:
        report = read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"a report must be a JSON file of launch.evaluate, got {path}: {error}") from error
    missing = [name for name in REQUIRED if not isinstance(report, dict) or name not in report]
    if missing:
        raise ValueError(f"a report must be a JSON file of launch.evaluate, got {path} without {', '.join(missing)}")
    if report["task"] not in _TITLES:
        raise ValueError(f"a report must be a JSON file of launch.evaluate, got {path} of the task {report['task']!r}")
    return report


def _perplexities(reports: Sequence[Report]) -> list[str]:
    """A line for each text, window and number of tokens; a column for each method."""
    rows = [row for report in reports for row in report["rows"]]
    names = sorted(dict.fromkeys(row["name"] for row in rows), key=_rank)
    cells: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        key = (row["text"], f"{row['window']:,}", f"{row['tokens']:,}", f"{row['num_truncations']:,}")
        cells.setdefault(key, {})[row["name"]] = _perplexity(row)
    head = ["text", "window", "tokens", "overflows", *names]
    body = [[*key, *(by_name.get(name, "") for name in names)] for key, by_name in cells.items()]
    return make_markdown(head, body)


def _perplexity(row: Mapping[str, Any]) -> str:
    if row["perplexity_after_overflow"] is None:
        return f"{with_error(row['perplexity'], row['stderr'])} (no overflow)"
    told = with_error(row["perplexity_after_overflow"], row["stderr"])
    return told if row["gap_to_tt"] is None else f"{told} ({gap(row)})"


def _by_method(task: str, reports: Sequence[Report]) -> list[str]:
    """A line for each method, with the columns that a terminal shows but times; the same data one below the other."""
    rows = [row for report in reports for row in report["rows"]]
    shown = [column for column in COLUMNS[task] if column[0] not in ("s", "tokens/s")]
    columns = [(heading.replace("\n", " "), cell) for heading, cell in shown]
    body = [[_data(row), f"{row['window']:,}", *(cell(row) for _, cell in columns)] for row in rows]
    order = {key: i for i, key in enumerate(dict.fromkeys((line[0], line[1]) for line in body))}
    body.sort(key=lambda line: order[line[0], line[1]])
    return make_markdown(["data", "window", *(heading for heading, _ in columns)], body)


def _data(row: Mapping[str, Any]) -> str:
    return str(row["text"] if "text" in row else row["data"])


def _rank(name: str) -> int:
    """Where a method's columns are: `tt` first, `nkvt` last."""
    return ("tt", "of", "ca", "nkvt").index(name.split(",")[0])


def _model(report: Report) -> str:
    return f"{report['model']} in {report['dtype']}"


def _place(report: Report) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version is not None)
    return f"{summarize_machine(report['machine'])}; {versions}"


def main(argv: Sequence[str]) -> None:
    """Runs from the command line."""
    if len(argv) < 2:
        raise app.UsageError("arguments must be JSON files of launch.evaluate, got none")
    try:
        reports = [read_report(Path(name)) for name in argv[1:]]
        notes = "" if _NOTES.value is None else Path(_NOTES.value).read_text(encoding="utf-8")
        out = Path(_OUT.value)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(to_markdown(reports, notes=notes), encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(f"written to {out}")


if __name__ == "__main__":
    app.run(main)
