"""Rows as tables, in the console and in Markdown. Columns, headings and units follow from the rows' names and values.

Not here: measuring, the report (`main`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import rich.console

from ca_jax.launch.script import make_table, note

Line = Mapping[str, Any]

_QUIET_LOAD_SHARE = 0.1  # Of all CPU time; what an idle machine's own housekeeping stays well under.
_MOST_ITEMS = 6  # Of a mapping that has a cell; longer ones, and lists, are in the JSON alone.
_LAST = ("same_tokens", "recompiles")
_TIMES = ("speedup", "ratio", "_over_ideal", "over_ideal", "_vs_bound")
_SHARES = ("share", "hit_rate", "hidden", "vs_belady", "over_capacity", "queue_depth")
_CHANGES = ("change", "overhead", "async_gain")


def make_markdown(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table with the columns and rows of `make_table`."""
    columns = list(columns)
    head = [column.removeprefix(">").replace("\n", " ") for column in columns]
    rules = ["---:" if column.startswith(">") else "---" for column in columns]
    return [f"| {' | '.join(cells)} |" for cells in (head, rules, *filter(None, rows))]


def summarize_machine(machine: dict[str, Any]) -> str:
    """One line for captions: "AMD EPYC, 2 cores, 23 GiB"; the accelerator is named where there is one."""
    parts = [machine["cpu"], f"{machine['cores']} cores"]
    if machine["memory_gib"] is not None:
        parts.append(f"{machine['memory_gib']:.0f} GiB")
    if machine["platform"] != "cpu":
        parts.append(f"{machine['num_devices']} x {machine['device']}")
    return ", ".join(parts)


def print_report(report: Mapping[str, Any], console: rich.console.Console) -> None:
    """Prints a report as tables, with its summary, the machine and the versions it was measured on."""
    for kind, rows in _kinds(report).items():
        print_table(rows, console, title=_title(report, kind))
    console.print(make_table(("summary", ""), [(name, _plain(value)) for name, value in report["summary"].items()]))
    for title in ("startup", "machine", "versions"):
        if title in report:
            note(console, f"{title}  {_plain(report[title])}", None)
    if (report.get("startup", report)["other_load_share"] or 0.0) > _QUIET_LOAD_SHARE:
        note(console, "Something else ran on this machine: do not compare these numbers.", "bold red")


def print_table(rows: Sequence[Line], console: rich.console.Console, *, title: str) -> None:
    """Prints rows as one table; what is the same in all of several rows is named above it."""
    columns, common = _columns(rows)
    cells = [[_with_spread(row, name) for name in columns] for row in rows]
    console.print(make_table([f">{_heading(name)}" for name in columns], cells, title=title))
    if common:
        note(console, f"  all: {_plain_cells(common)}")


def to_markdown(report: Mapping[str, Any]) -> str:
    """The rows of a report as tables in Markdown, one for each kind of row; medians without their spread."""
    return "\n".join("\n".join(markdown_lines(rows)) for rows in _kinds(report).values())


def markdown_lines(rows: Sequence[Line]) -> Iterator[str]:
    """A table in Markdown, and an empty line; what is the same in all of several rows stands above it."""
    columns, common = _columns(rows)
    if common:
        yield f"All rows: {_plain_cells(common)}."
        yield ""
    cells = [[cell(name, row[name]) for name in columns] for row in rows]
    yield from make_markdown([f">{_heading(name)}" for name in columns], cells)
    yield ""


def cell(name: str, value: Any) -> str:
    """A value as people read it: times in milliseconds, shares in percent, ratios with an x."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, Mapping):
        if name.startswith("cached"):
            return ", ".join(f"{count} {tier}" for tier, count in value.items()) or "0"
        return ", ".join(f"{key} {cell(name, item)}" for key, item in value.items())
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    if _is_time(name):
        return f"{value * 1e3:,.{1 if abs(value) >= 0.01 else 3}f}"
    if name.endswith(_CHANGES):
        return f"{value:+.1%}"
    if name.endswith(_SHARES):
        return f"{value:.1%}"
    if (name != "recompute_ratio" and name.endswith(_TIMES)) or name.startswith("ratio_"):
        return f"{value:.2f}x"
    return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.1f}"


def _kinds(report: Mapping[str, Any]) -> dict[str, list[Line]]:
    """The lines of each kind of row; rows with `sources` are a line for each."""
    kinds: dict[str, list[Line]] = {}
    for row in report["rows"]:
        kind = row["measured"] if "measured" in row and report["suite"] != "store" else report["suite"]
        if "link" in row:
            kind = f"{kind}, {row['link']} link"
        kinds.setdefault(kind, []).extend(_sources(row))
    return kinds


def _sources(row: Line) -> Iterator[Line]:
    if "sources" not in row:
        yield row if "driver" in row or "measured" not in row else {k: v for k, v in row.items() if k != "measured"}
        return
    rest = {name: value for name, value in row.items() if name != "sources"}
    for source, times in row["sources"].items():
        yield {"history from": source, **rest, **times}


def _columns(rows: Sequence[Line]) -> tuple[list[str], dict[str, Any]]:
    """The columns of a table, and what all of several rows have in common instead."""
    shown = [name for name in rows[0] if name != "spread" and all(_has_cell(row[name]) for row in rows)]
    shown = [name for name in shown if name not in _LAST] + [name for name in _LAST if name in shown]
    shown = [name for name in shown if any(row[name] is not None for row in rows)]
    if len(rows) == 1:
        return shown, {}
    common = {
        name: rows[0][name]
        for name in shown
        if not isinstance(rows[0][name], float) and all(row[name] == rows[0][name] for row in rows)
    }
    return [name for name in shown if name not in common], common


def _has_cell(value: Any) -> bool:
    return not isinstance(value, list | tuple) and not (isinstance(value, Mapping) and len(value) > _MOST_ITEMS)


def _is_time(name: str) -> bool:
    return name.endswith("_s") and not name.endswith("_per_s")


def _heading(name: str) -> str:
    return f"{name[:-2].replace('_', ' ')} ms" if _is_time(name) else name.replace("_", " ")


def _with_spread(row: Line, name: str) -> str:
    text = cell(name, row[name])
    if row[name] is None or name not in (row.get("spread") or ()):
        return text
    least, largest = (type(row[name])(bound) for bound in row["spread"][name])
    return text if least == largest else f"{text}\n({cell(name, least)}..{cell(name, largest)})"


def _title(report: Mapping[str, Any], kind: str) -> str:
    what = kind
    if "model" in report:
        beside = f", beside {report['peer']}" if report["peer"] else ""
        what = f"{kind}, {report['model']} in {report['dtype']}{beside}"
    if not any(row.get("spread") for row in report["rows"] if row.get("measured", kind).partition(",")[0] in kind):
        return what
    return f"{what}: medians of {report['config']['repeats']}, in brackets the least and the largest"


def _plain_cells(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{_heading(name)} {cell(name, value)}" for name, value in values.items())


def _plain(value: Any) -> str:
    """A JSON value in short."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.3g}" if isinstance(value, float) else "-" if value is None else str(value)
