"""What the benchmark leaves: one JSON object, and the same as tables to read.

Not here: measuring (`bench_suites`, `bench_tiers`, `bench_storage`, `bench_policy`), what rows hold (`bench_schema`,
`bench_storage_schema`), describing the machine (`machine`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.box
import rich.console
import rich.table

from ca_jax.launch.bench_schema import BenchConfig, DecodeRow, PrefillRow, ReuseRow, Row, Startup, TiersRow
from ca_jax.launch.bench_storage_schema import (
    DecisionRow,
    LoopRow,
    PolicyBenchConfig,
    PolicyRow,
    StartupRow,
    StoreBenchConfig,
    StoreRow,
)

Report = dict[str, Any]
"""suite, machine, versions, command, config, rows, summary; JSON types only.

Of an engine also model, dtype, peer and startup; of the other suites other_load_share, which startup has there.
"""

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


def make_storage_report(
    config: StoreBenchConfig | PolicyBenchConfig,
    rows: Sequence[StoreRow] | Sequence[PolicyRow],
    *,
    machine: Mapping[str, Any],
    versions: Mapping[str, Any],
    command: str,
    other_load_share: float | None,
) -> Report:
    """Everything there is to say of one run of a suite that needs no engine.

    Args:
      config: what was asked for.
      rows: what was measured.
      machine: where.
      versions: of what ran.
      command: that does it again.
      other_load_share: see `Startup`.
    """
    store_rows = [row for row in rows if isinstance(row, StoreRow)]
    policy_rows = [row for row in rows if not isinstance(row, StoreRow)]
    return {
        "suite": config.suite,
        "machine": dict(machine),
        "versions": dict(versions),
        "command": command,
        "config": dataclasses.asdict(config),
        "other_load_share": other_load_share,
        "rows": [dataclasses.asdict(row) for row in rows],
        "summary": summarize_policy(policy_rows) if policy_rows else summarize_store(store_rows),
    }


def summarize_store(rows: Sequence[StoreRow]) -> dict[str, float]:
    """Ratios to the plain ways, of each driver, and what the checksum costs.

    `dram_vs_memcpy`, `ssd_read_cold_vs_preadv`, `ssd_read_warm_vs_preadv`, `ssd_write_vs_plain`; the SSD's of the
    default driver, with `raw_` in front those of the other one, with `raw_vs_zarr3_` the one's speed over the other's.
    `dram_vs_parallel_memcpy` is against a copy by all cores, if that is faster.
    """
    against = {"ssd_read_cold": "preadv", "ssd_read_warm": "preadv", "ssd_write": "plain"}
    summary: dict[str, float] = {}
    speeds: dict[tuple[str | None, str], float] = {}
    for row in rows:
        speeds[row.driver, row.measured] = row.gb_per_s
        if row.measured == "crc32c":
            summary["crc32c_cpu_s_per_gb"] = row.cpu_s_per_gb
        elif row.measured == "dram_load":
            summary["dram_vs_memcpy"] = row.ratio or 0.0
            summary["dram_vs_parallel_memcpy"] = row.gb_per_s / max(row.plain_gb_per_s_of.values())
        else:
            prefix = "" if row.driver == "zarr3" else f"{row.driver}_"
            summary[f"{prefix}{row.measured}_vs_{against[row.measured]}"] = row.ratio or 0.0
    for measured in against:
        summary[f"raw_vs_zarr3_{measured}"] = speeds["raw", measured] / speeds["zarr3", measured]
    return summary


def summarize_policy(rows: Sequence[PolicyRow]) -> dict[str, float | None]:
    """What one step of the bookkeeping and a start-up cost, and what the scheduler-aware choice is worth.

    `p50_ms`, `p99_ms`, `startup_100k_s` and `loop_vs_belady` at the queue depth that was asked for (the one that LRU
    has a row of), `loop_lru`. Keys are named for the default sizes; rows have those that were measured.
    """
    (decision,) = [row for row in rows if isinstance(row, DecisionRow) and row.policy == "scheduler_aware"]
    (startup,) = [row for row in rows if isinstance(row, StartupRow)]
    loop = {(row.policy, row.queue_depth): row for row in rows if isinstance(row, LoopRow)}
    (lru,) = [row for row in loop.values() if row.policy == "lru"]
    return {
        "p50_ms": decision.p50_ms,
        "p99_ms": decision.p99_ms,
        "startup_100k_s": startup.startup_s,
        "startup_100k_cold_s": startup.cold_startup_s,
        "loop_vs_belady": loop["scheduler_aware", lru.queue_depth].vs_belady,
        "loop_lru": lru.hit_rate,
    }


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """The best and the worst of an engine suite's rows; what no row has is None.

    Of `decode`, `batch_scaling` has for each context the largest batch's tokens per second over the smallest's. Of
    `tiers`, the speed-ups of the first row.
    """
    summary: dict[str, Any] = {"recompiles": sum(row.recompiles for row in rows)}
    reuse = [row for row in rows if isinstance(row, ReuseRow)]
    prefill = [row for row in rows if isinstance(row, PrefillRow)]
    decode = [row for row in rows if isinstance(row, DecodeRow)]
    tiers = [row for row in rows if isinstance(row, TiersRow)]
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
    if tiers:
        for source, times in tiers[0].sources.items():
            if source != "recompute":
                summary[f"ttft_{source}_vs_recompute"] = times.speedup
        summary["same_tokens"] = all(row.same_tokens for row in tiers)
    return summary


def write_json(report: Report, path: Path) -> None:
    """Writes a report; makes the directory it goes to.

    Raises:
      OSError: it cannot be written there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def print_report(report: Report, console: rich.console.Console) -> None:
    """Prints a report as tables, with the machine and the versions it was measured on."""
    kinds = itertools.groupby(_lines(report), key=lambda row: _kind(report, row))
    for kind, rows in kinds:
        table = rich.table.Table(title=_title(report, kind), box=rich.box.SIMPLE_HEAD, title_justify="left")
        for heading, _, _ in _COLUMNS[kind]:
            table.add_column(heading, justify="right")
        for row in rows:
            table.add_row(*(_cell(row, name, form) for _, name, form in _COLUMNS[kind]))
        console.print(table)
    for title in ("summary", "startup", "machine", "versions"):
        if title in report:
            console.print(f"[bold]{title}[/bold]  {_one_line(report[title])}", highlight=False)
    if (report.get("startup", report)["other_load_share"] or 0.0) > _QUIET_LOAD_SHARE:
        console.print("[bold red]Something else ran on this machine: do not compare these numbers.[/bold red]")


def _lines(report: Report) -> Iterator[Mapping[str, Any]]:
    """What is a line of a table each: a row, or each source of one."""
    for row in report["rows"]:
        if "sources" not in row:
            yield row
            continue
        for source, times in row["sources"].items():
            yield {**row, **times, "source": source}


def _kind(report: Report, row: Mapping[str, Any]) -> str:
    """Which columns a row has: those of its suite, or of its own kind where a suite has several."""
    return report["suite"] if report["suite"] in _COLUMNS else row["measured"]


def _title(report: Report, kind: str) -> str:
    what = kind
    if "model" in report:
        beside = f", beside {report['peer']}" if report["peer"] else ""
        what = f"{kind}, {report['model']} in {report['dtype']}{beside}"
    if kind in _WITHOUT_MEDIANS:
        return what
    return f"{what}: medians of {report['config']['repeats']}, in brackets the least and the largest"


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


def _speed(gb_per_s: float) -> str:
    return f"{gb_per_s:.2f}"


def _share(share: float) -> str:
    return f"{share:.1%}"


_WITHOUT_MEDIANS = ("decision", "loop")
_COLUMNS: dict[str, tuple[tuple[str, str, Callable[[Any], str]], ...]] = {
    "reuse": (
        ("history\ntokens", "history_tokens", str),
        ("new\ntokens", "new_tokens", str),
        ("TTFT\nrecompute ms", "ttft_recompute_s", _milliseconds),
        ("TTFT peer\nrecompute ms", "ttft_peer_recompute_s", _milliseconds),
        ("TTFT\nreuse ms", "ttft_reuse_s", _milliseconds),
        ("speedup", "speedup", _ratio),
        ("load\nms", "load_s", _milliseconds),
        ("load\nshare", "load_share", _share),
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
    "tiers": (
        ("history\ntokens", "history_tokens", str),
        ("new\ntokens", "new_tokens", str),
        ("history\nfrom", "source", str),
        ("cached\ntokens", "cached_tokens", lambda tiers: ", ".join(f"{n} {tier}" for tier, n in tiers.items()) or "0"),
        ("TTFT ms", "ttft_s", _milliseconds),
        ("speedup", "speedup", _ratio),
        ("fetch ms", "fetch_s", _milliseconds),
        ("load\nstall ms", "load_stall_s", _milliseconds),
        ("same\ntokens", "same_tokens", lambda same: "yes" if same else "NO"),
        ("re-\ncompiles", "recompiles", str),
    ),
    "store": (
        ("measured", "measured", str),
        ("driver", "driver", str),
        ("GB/s", "gb_per_s", _speed),
        ("CPU s\nper GB", "cpu_s_per_gb", _speed),
        ("plain", "plain", str),
        ("plain\nGB/s", "plain_gb_per_s", _speed),
        ("plain CPU s\nper GB", "plain_cpu_s_per_gb", _speed),
        ("ratio", "ratio", _ratio),
    ),
    "decision": (
        ("policy", "policy", str),
        ("sessions", "num_sessions", str),
        ("jobs", "num_jobs", str),
        ("p50 ms", "p50_ms", "{:.3f}".format),
        ("p99 ms", "p99_ms", "{:.3f}".format),
        ("max ms", "max_ms", "{:.3f}".format),
        ("fetches\nper plan", "fetches_per_plan", "{:.1f}".format),
    ),
    "startup": (
        ("sessions", "num_sessions", str),
        ("blocks", "num_blocks", str),
        ("catalog MB", "catalog_bytes", lambda num_bytes: f"{num_bytes / 1e6:,.1f}"),
        ("start-up ms", "startup_s", _milliseconds),
        ("cold start-up ms", "cold_startup_s", _milliseconds),
    ),
    "loop": (
        ("policy", "policy", str),
        ("sessions", "num_sessions", str),
        ("over\ncapacity", "over_capacity", _share),
        ("queue\ndepth", "queue_depth", _share),
        ("hit rate", "hit_rate", _share),
        ("vs Belady", "vs_belady", _share),
    ),
}
"""Heading, field and form of each column, by suite or, where a suite has rows of several kinds, by kind."""


def _cell(row: Mapping[str, Any], name: str, form: Callable[[Any], str]) -> str:
    if row[name] is None:
        return "-"
    if name not in row.get("spread", ()):
        return form(row[name])
    least, largest = row["spread"][name]
    return f"{form(row[name])}\n({form(least)}..{form(largest)})"


def _one_line(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {f'{value:.3g}' if isinstance(value, float) else value}" for name, value in values.items()
    )
