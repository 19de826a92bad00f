"""What the benchmark leaves: one JSON object, and the same as a table to read.

Not here: measuring (`bench_suites`), what rows hold (`bench_schema`), describing the machine (`machine`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.box
import rich.console
import rich.table

from ca_jax.launch.bench_schema import BenchConfig, DecodeRow, PrefillRow, ReuseRow, Row, Startup

Report = dict[str, Any]
"""suite, model, dtype, machine, versions, command, config, peer, rows, startup, summary; JSON types only."""

_QUIET_LOAD_SHARE = 0.1  # of all CPU time; what an idle machine's own housekeeping stays well under


def make_report(
    config: BenchConfig,
    rows: Sequence[Row],
    startup: Startup,
    *,
    model: str,
    dtype: str,
    machine: Mapping[str, Any],
    versions: Mapping[str, Any],
    command: str,
    peer: str | None,
) -> Report:
    """Everything there is to say of one run.

    Args:
      config: what was asked for.
      rows: what was measured.
      startup: what came before.
      model: which.
      dtype: of its weights and KV.
      machine: where.
      versions: of what ran.
      command: that does it again.
      peer: name of the engine beside ours, if any.
    """
    return {
        "suite": config.suite,
        "model": model,
        "dtype": dtype,
        "machine": dict(machine),
        "versions": dict(versions),
        "command": command,
        "config": dataclasses.asdict(config),
        "peer": peer,
        "rows": [dataclasses.asdict(row) for row in rows],
        "startup": dataclasses.asdict(startup),
        "summary": summarize(rows),
    }


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """The best and the worst of a suite's rows; what no row has is None.

    Of `decode`, `batch_scaling` has for each context the largest batch's tokens per second over the smallest's.
    """
    summary: dict[str, Any] = {"recompiles": sum(row.recompiles for row in rows)}
    reuse = [row for row in rows if isinstance(row, ReuseRow)]
    prefill = [row for row in rows if isinstance(row, PrefillRow)]
    decode = [row for row in rows if isinstance(row, DecodeRow)]
    if reuse:
        summary |= _extremes("speedup", [row.speedup for row in reuse])
        summary["worst_load_share"] = max(row.load_share for row in reuse)
    if prefill:
        summary |= _extremes("ratio", [row.ratio for row in prefill])
    if reuse or prefill:
        summary["same_tokens"] = all(row.same_tokens for row in reuse) and all(row.same_tokens for row in prefill)
    if decode:
        summary |= _extremes("speedup_vs_peer", [row.speedup_vs_peer for row in decode])
        summary["batch_scaling"] = _batch_scaling(decode)
    return summary


def write_json(report: Report, path: Path) -> None:
    """Writes a report; makes the directory it goes to.

    Raises:
      OSError: it cannot be written there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def print_report(report: Report, console: rich.console.Console) -> None:
    """Prints a report as a table, with the machine and the versions it was measured on."""
    config = report["config"]
    beside = f", beside {report['peer']}" if report["peer"] else ""
    what = f"{report['suite']}, {report['model']} in {report['dtype']}{beside}"
    table = rich.table.Table(
        title=f"{what}: medians of {config['repeats']}, in brackets the least and the largest",
        box=rich.box.SIMPLE_HEAD,
        title_justify="left",
    )
    columns = _COLUMNS[report["suite"]]
    for heading, _, _ in columns:
        table.add_column(heading, justify="right")
    for row in report["rows"]:
        table.add_row(*(_cell(row, name, form) for _, name, form in columns))
    console.print(table)
    for title in ("summary", "startup", "machine", "versions"):
        console.print(f"[bold]{title}[/bold]  {_one_line(report[title])}", highlight=False)
    if (report["startup"]["other_load_share"] or 0.0) > _QUIET_LOAD_SHARE:
        console.print("[bold red]Something else ran on this machine: do not compare these numbers.[/bold red]")


def _extremes(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    found = [value for value in values if value is not None]
    return {f"best_{name}": max(found, default=None), f"worst_{name}": min(found, default=None)}


def _batch_scaling(rows: Sequence[DecodeRow]) -> list[dict[str, Any]]:
    scaling = []
    by_context = sorted(rows, key=lambda row: (row.context_tokens, row.batch_size))
    for context_tokens, group in itertools.groupby(by_context, key=lambda row: row.context_tokens):
        same_context = list(group)
        smallest, largest = same_context[0], same_context[-1]
        scaling.append(
            {
                "context_tokens": context_tokens,
                "batch_sizes": [smallest.batch_size, largest.batch_size],
                "ratio": largest.tokens_per_s / smallest.tokens_per_s,
            }
        )
    return scaling


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.1f}"


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}x"


_COLUMNS: dict[str, tuple[tuple[str, str, Callable[[Any], str]], ...]] = {
    "reuse": (
        ("history\ntokens", "history_tokens", str),
        ("new\ntokens", "new_tokens", str),
        ("TTFT\nrecompute ms", "ttft_recompute_s", _milliseconds),
        ("TTFT peer\nrecompute ms", "ttft_peer_recompute_s", _milliseconds),
        ("TTFT\nreuse ms", "ttft_reuse_s", _milliseconds),
        ("speedup", "speedup", _ratio),
        ("load\nms", "load_s", _milliseconds),
        ("load\nshare", "load_share", "{:.1%}".format),
        ("load\nstall ms", "load_stall_s", _milliseconds),
        ("same\ntokens", "same_tokens", lambda same: "yes" if same else "NO"),
        ("re-\ncompiles", "recompiles", str),
    ),
    "prefill": (
        ("tokens", "tokens", str),
        ("prefill ms", "prefill_s", _milliseconds),
        ("tokens/s", "tokens_per_s", _rate),
        ("peer tokens/s", "peer_tokens_per_s", _rate),
        ("ratio", "ratio", _ratio),
        ("same\ntokens", "same_tokens", lambda same: "yes" if same else "NO"),
        ("re-\ncompiles", "recompiles", str),
    ),
    "decode": (
        ("batch", "batch_size", str),
        ("context\ntokens", "context_tokens", str),
        ("tokens/s", "tokens_per_s", _rate),
        ("tokens/s\nper slot", "tokens_per_s_per_slot", _rate),
        ("peer tokens/s", "peer_tokens_per_s", _rate),
        ("speedup", "speedup_vs_peer", _ratio),
        ("re-\ncompiles", "recompiles", str),
    ),
}
"""Heading, field and form of each column."""


def _cell(row: Mapping[str, Any], name: str, form: Callable[[Any], str]) -> str:
    if row[name] is None:
        return "-"
    if name not in row["spread"]:
        return form(row[name])
    least, largest = row["spread"][name]
    return f"{form(row[name])}\n({form(least)}..{form(largest)})"


def _one_line(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {f'{value:.3g}' if isinstance(value, float) else value}" for name, value in values.items()
    )
