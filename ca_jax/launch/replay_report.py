"""What a replay leaves: tables to read, and one JSON object.

Not here: replaying (`ca_jax.replay`), plots (replay_plot), describing the machine (machine).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rich.box
import rich.console
import rich.table

from ca_jax.replay.running import ReplayConfig, Result, Run
from ca_jax.replay.served import Sample, ServedTurn
from ca_jax.replay.summary import Spread
from ca_jax.storage.config import GIB

_DIGITS = 6  # Of seconds in the JSON.
_LONG = ("turns", "samples")  # Of each run, and written a row on each line.
_MOST_SAMPLES = 200  # Of a run in the JSON, about.


def make_report(
    result: Result,
    config: ReplayConfig,
    *,
    model: str,
    dtype: str,
    machine: Mapping[str, Any],
    versions: Mapping[str, Any],
    command: str,
) -> dict[str, Any]:
    """Everything there is to say of a replay, JSON types only.

    Of each run `turns` are rows of `turn_columns`, and `samples`, some of those that were taken, of `sample_columns`.

    Args:
      result: of it.
      config: what was asked for.
      model: which.
      dtype: of its weights and KV.
      machine: where.
      versions: of what ran.
      command: that does it again.
    """
    workload = result.workload
    return {
        "suite": "replay",
        "model": model,
        "dtype": dtype,
        "machine": dict(machine),
        "versions": dict(versions),
        "command": command,
        "config": dataclasses.asdict(config),
        "workload": {
            "sessions": len(workload.sessions),
            "turns": workload.num_turns,
            "window": result.window,
            "stored_tokens": workload.stored_tokens,
            "workload_bytes": result.workload_bytes,
            "store_bytes": result.store_bytes,
            "cut_turns": workload.cut_turns,
            "cut_tokens": workload.cut_tokens,
            "left_out_turns": workload.left_out_turns,
            "skipped_rows": workload.skipped_rows,
            "first_skipped": workload.first_skipped,
        },
        "comparison": None if result.comparison is None else dataclasses.asdict(result.comparison),
        "agreement": None if result.agreement is None else dataclasses.asdict(result.agreement),
        "turn_columns": [field.name for field in dataclasses.fields(ServedTurn)],
        "sample_columns": [field.name for field in dataclasses.fields(Sample)],
        "runs": [_run(run) for run in result.runs],
    }


def write_json(report: Mapping[str, Any], path: Path) -> None:
    """Writes a report, each turn and each sample on a line; makes the directory it goes to.

    Raises:
      OSError: it cannot be written there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    runs = [{**run, **{name: f"@{name} {index}" for name in _LONG}} for index, run in enumerate(report["runs"])]
    text = json.dumps({**report, "runs": runs}, indent=2, allow_nan=False)
    for index, run in enumerate(report["runs"]):
        for name in _LONG:
            rows = ",\n".join(json.dumps(row, allow_nan=False) for row in run[name])
            text = text.replace(f'"@{name} {index}"', f"[\n{rows}\n]")
    path.write_text(text + "\n", encoding="utf-8")


def print_report(result: Result, console: rich.console.Console) -> None:
    """Prints what was served and what it took, one column for each run."""
    workload = result.workload
    console.print(
        f"{len(workload.sessions):,} conversations, {workload.num_turns:,} turns, window of {result.window:,} tokens; "
        f"KV of all at their ends {result.workload_bytes / GIB:.2f} GiB, store {result.store_bytes / GIB:.2f} GiB",
        highlight=False,
    )
    for said in _left_out(result):
        console.print(said, style="yellow", highlight=False, markup=False)
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    table.add_column("")
    for run in result.runs:
        table.add_column(run.name, justify="right")
    for name, *cells in _rows(result.runs):
        table.add_row(name, *cells)
    console.print(table)
    if (against := result.comparison) is not None:
        console.print(
            f"store against recompute: prefill time {against.prefill_time:.2f}x, total time {against.total_time:.2f}x, "
            f"busy time {against.busy_time:.2f}x, mean TTFT {against.mean_ttft:.2f}x; the same answer in "
            f"{against.same_answers} of {against.comparable_answers} turns before anything was dropped",
            highlight=False,
        )
    if (agreed := result.agreement) is not None:
        console.print(
            f"simulated: hit rate {agreed.simulated_hit_rate:.1%} ({agreed.hit_rate_points:+.1f} points), prefilled "
            f"{agreed.simulated_prefill_tokens:,} tokens ({agreed.prefill_tokens_ratio - 1:+.2%}), "
            f"{agreed.simulated_elapsed_s:.0f} s",
            highlight=False,
        )


def _left_out(result: Result) -> list[str]:
    workload, said = result.workload, []
    if workload.cut_turns:
        said.append(f"cut to fit the window: {workload.cut_tokens:,} tokens of {workload.cut_turns:,} messages")
    if workload.left_out_turns:
        said.append(f"left out, since the window was full: {workload.left_out_turns:,} turns")
    if workload.skipped_rows:
        said.append(f"skipped: {workload.skipped_rows:,} rows of the trace, the first one: {workload.first_skipped}")
    return said


def _rows(runs: tuple[Run, ...]) -> list[list[str]]:
    each = [run.summary for run in runs]
    returning = [max(one.returning_turns, 1) for one in each]

    def spread(name: str) -> list[str]:
        return [_describe_spread(getattr(one, name)) for one in each]

    return [
        ["turns, those with a history", *(f"{one.turns:,}, {one.returning_turns:,}" for one in each)],
        ["hit rate", *(f"{one.hit_rate:.1%}" for one in each)],
        [
            "  from DRAM, SSD, missed",
            *(
                f"{one.dram_hits / of:.1%}, {one.ssd_hits / of:.1%}, {one.misses / of:.1%}"
                for one, of in zip(each, returning, strict=True)
            ),
        ],
        [
            "history tokens loaded, recomputed",
            *(f"{one.loaded_tokens:,}, {one.recomputed_tokens:,}" for one in each),
        ],
        ["tokens prefilled", *(f"{one.prefill_tokens:,}" for one in each)],
        ["TTFT, s: mean, p50, p90, p99", *spread("ttft_s")],
        ["TPOT, s", *spread("tpot_s")],
        ["latency, s", *spread("latency_s")],
        ["prefill, prompt tokens/s", *(f"{one.prefill_tokens_per_s:,.0f}" for one in each)],
        ["decode, tokens/s", *(f"{one.decode_tokens_per_s:,.0f}" for one in each)],
        ["prefill, decode time, s", *(f"{one.totals.prefill_s:.1f}, {one.totals.decode_s:.1f}" for one in each)],
        [
            "waited for loads, for saves, s",
            *(f"{one.totals.load_stall_s:.2f}, {one.totals.write_stall_s:.2f}" for one in each),
        ],
        [
            "loaded, saved, GiB",
            *(f"{one.totals.loaded_bytes / GIB:.2f}, {one.totals.saved_bytes / GIB:.2f}" for one in each),
        ],
        [
            "fetched from, flushed to SSD, GiB",
            *(f"{one.totals.fetched_bytes / GIB:.2f}, {one.totals.flushed_bytes / GIB:.2f}" for one in each),
        ],
        ["truncations", *(f"{one.totals.truncations:,}" for one in each)],
        ["turns a minute", *(f"{one.turns_per_minute:.1f}" for one in each)],
        ["total time, s", *(f"{one.totals.elapsed_s:.1f}" for one in each)],
    ]


def _describe_spread(spread: Spread) -> str:
    return ", ".join(f"{value:.3f}" for value in (spread.mean, spread.p50, spread.p90, spread.p99))


def _run(run: Run) -> dict[str, Any]:
    samples = run.served.samples[:: max(1, len(run.served.samples) // _MOST_SAMPLES)]
    return {
        "name": run.name,
        "summary": dataclasses.asdict(run.summary),
        "recompiles": run.recompiles,
        "samples": [_rounded(dataclasses.astuple(sample)) for sample in samples],
        "turns": [_rounded(dataclasses.astuple(turn)) for turn in run.served.turns],
    }


def _rounded(values: tuple[Any, ...]) -> list[Any]:
    return [round(value, _DIGITS) if isinstance(value, float) else value for value in values]
