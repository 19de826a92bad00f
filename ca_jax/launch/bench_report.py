"""What the benchmark leaves: one JSON object.

Not here: measuring (`bench_run` and what it runs), what rows hold (`bench_schema`, `bench_serving_schema`,
`bench_overlap_schema`, `bench_overflow_schema`, `bench_blend_schema`, `bench_storage_schema`), tables to read
(`bench_tables`), describing the machine (`machine`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ca_jax.launch.bench_blend_schema import BlendBenchConfig, BlendThroughputBenchConfig
from ca_jax.launch.bench_overflow_schema import OverflowBenchConfig
from ca_jax.launch.bench_overlap_schema import PreloadBenchConfig, SaveBenchConfig
from ca_jax.launch.bench_schema import BenchConfig, DecodeRow, PrefillRow, ReuseRow, Row, Startup, TiersRow
from ca_jax.launch.bench_serving_schema import ThroughputBenchConfig, TtftBenchConfig
from ca_jax.launch.bench_storage_schema import (
    DecisionRow,
    LoopRow,
    PolicyBenchConfig,
    PolicyRow,
    PrefixRow,
    StartupRow,
    StoreBenchConfig,
    StoreRow,
    TurnRow,
)

Report = dict[str, Any]
"""suite, machine, versions, command, config, rows, summary; JSON types only.

Of an engine also model, dtype, peer and startup; of the other suites other_load_share, which startup has there.
"""

EngineBenchConfig = (
    BenchConfig
    | TtftBenchConfig
    | ThroughputBenchConfig
    | PreloadBenchConfig
    | SaveBenchConfig
    | OverflowBenchConfig
    | BlendBenchConfig
    | BlendThroughputBenchConfig
)
"""What is asked of the suites that serve a model."""


def make_report(
    config: EngineBenchConfig,
    rows: Sequence[Any],
    summary: Mapping[str, Any],
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
      rows: what was measured, each a row of the suite's schema.
      summary: what the rows come to.
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
        "summary": dict(summary),
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
    """What a step of the bookkeeping, a start-up and a turn's host work cost, and what scheduler-aware choice is worth.

    `p50_ms`, `p99_ms`, `startup_100k_s`, `prefix_p99_ms` and `loop_vs_belady` at the queue depth that was asked for
    (the one that LRU has a row of), `loop_lru`, `turn_100k_ms`. Keys are named for the default sizes; rows have those
    that were measured.
    """
    (decision,) = [row for row in rows if isinstance(row, DecisionRow) and row.policy == "scheduler_aware"]
    (startup,) = [row for row in rows if isinstance(row, StartupRow)]
    (prefix,) = [row for row in rows if isinstance(row, PrefixRow)]
    turns = [row for row in rows if isinstance(row, TurnRow)]
    loop = {(row.policy, row.queue_depth): row for row in rows if isinstance(row, LoopRow)}
    (lru,) = [row for row in loop.values() if row.policy == "lru"]
    return {
        "p50_ms": decision.p50_ms,
        "p99_ms": decision.p99_ms,
        "startup_100k_s": startup.startup_s,
        "startup_100k_cold_s": startup.cold_startup_s,
        "prefix_p99_ms": prefix.p99_ms,
        "loop_vs_belady": loop["scheduler_aware", lru.queue_depth].vs_belady,
        "loop_lru": lru.hit_rate,
        "turn_100k_ms": max(turns, key=lambda row: row.history_tokens).total_ms,
    }


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """The best and the worst of the rows of one of `bench_schema.ENGINE_SUITES`; what no row has is None.

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
