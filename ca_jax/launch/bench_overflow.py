"""Measures what truncation costs and saves: conversations that outgrow the window, and what one truncation takes.

One engine for each method, all of one process, one model and one configuration. Conversations are served group by
group: each group by every method in turn, every group beginning with another method (A B B A ...), so that a machine
that slows down slows all alike. A group is a closed loop: each conversation sends its next message as soon as its
answer has ended, so that all go on together. Engines are warmed up and have truncated before anything is measured.

Not here: which conversations (`bench_overflow_scripts`), what one truncation costs (`bench_overflow_costs`,
`bench_overflow_bookkeeping`), what rows hold (`bench_overflow_schema`), quality (`evaluate`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.kv.layout import kv_layout
from ca_jax.launch.bench_engines import make_engine
from ca_jax.launch.bench_overflow_bookkeeping import measure_bookkeeping
from ca_jax.launch.bench_overflow_costs import first_truncations, gap_rows, next_turn_rows
from ca_jax.launch.bench_overflow_schema import (
    BookkeepingRow,
    ConversationsRow,
    GapRow,
    NextTurnRow,
    OverflowBenchConfig,
    OverflowResult,
    OverflowRow,
)
from ca_jax.launch.bench_overflow_scripts import make_overflow_scripts
from ca_jax.launch.bench_schema import BenchError
from ca_jax.launch.bench_throughput import ServedTurn, serve
from ca_jax.pretrained import LoadedModel, Progress
from ca_jax.replay.scripts import Script
from ca_jax.storage.config import GIB
from ca_jax.telemetry.metrics import CompileCounter

PAPER_HIT_RATE_DROPS = (17.6, 41.5, 18.1, 18.4)
"""Points of hit rate that `of` is below `ca` in the paper's Figure 22a: LLaMA-13B, -65B, -70B, Falcon-40B."""

_SPARE_BLOCKS = 3  # Of a session that was cut: first tokens keep a block, others keep parts.
_METRICS = (
    "truncations",
    "dropped_tokens",
    "invalidated_histories",
    "loaded_histories",
    "repaired_tokens",
    "failed_loads",
    "failed_saves",
)


def run_overflow_suite(model: LoadedModel, config: OverflowBenchConfig, progress: Progress) -> OverflowResult:
    """Measures conversations, bookkeeping, the gap between tokens and the next turn, with engines of its own. Blocks.

    Args:
      model: to serve.
      config: what to measure.
      progress: told of every sample.

    Raises:
      BenchError: the engines cannot be as large as wanted, conversations are wanting, the disk cannot be used, or a
        sample did other work than its row would say.
    """
    scripts = make_overflow_scripts(model, config) if config.num_sessions else None
    rows: list[OverflowRow] = []
    summary: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for method in config.methods:
            engine = make_engine(model, engine_config(config, model, method), suite=config.suite)
            engines[method] = stack.enter_context(engine)
            engine.warmup(progress=progress)
        for engine in engines.values():
            engine.wait_until_ready()  # First touch would share the memory bus with the samples.
        rng = np.random.default_rng(config.seed)
        first_compiles = {method: first_truncations(engine, config, rng) for method, engine in engines.items()}
        if scripts is not None:
            rows += _conversations(engines, config, scripts.each, progress)
            summary["conversations"] = scripts.source
        rows += gap_rows(engines, config, rng, progress)
        rows += next_turn_rows(engines, config, rng, progress)
    if config.bookkeeping_sessions:
        rows += measure_bookkeeping(config, progress)
    return OverflowResult(
        rows=rows, summary={**summary, **summarize_overflow(rows), "first_truncation_compiles": first_compiles}
    )


def engine_config(config: OverflowBenchConfig, model: LoadedModel, method: str) -> EngineConfig:
    """The engine of one method; its DRAM holds all conversations that go on together.

    Raises:
      ValueError: the config allows no overflow.
    """
    overflow = config.engine.overflow
    if overflow is None:
        raise ValueError("engine.overflow wanted an OverflowConfig, found None")
    layout = kv_layout(model, config.engine)
    num_sessions = max((config.concurrent_sessions, *config.gap_sessions))
    num_blocks = num_sessions * (layout.num_blocks(config.context_window) + _SPARE_BLOCKS)
    return dataclasses.replace(
        config.engine,
        context_window=config.context_window,
        overflow=dataclasses.replace(overflow, method=method),
        recompute_if_faster=False,
        store=dataclasses.replace(config.engine.store, dram_gib=num_blocks * layout.block_bytes / GIB),
    )


def summarize_overflow(rows: Sequence[OverflowRow]) -> dict[str, Any]:
    """What the rows come to, each of which is there where there are rows of it.

    `METHOD_over_ca`, conversations: its seconds, prefilled tokens, seconds of prefill and mean TTFT over those of `ca`,
    the same of the seconds of each group (least and largest), and the points of hit rate that it is below `ca`; beside
    `of`, `paper_hit_rate_drop_points`. `same_turns`, whether all methods had the same turns and truncations.
    `discard_ms`, by tier. `extra_decode_steps`, by method the most of its rows. `recomputed_tokens`, of the turn behind
    a truncation, by method the most of its rows; `next_turn_ttft_over_ca`, the same; `overflow_ttft_ratio`, over turns
    without an overflow, the same. `recompiles`.
    """
    conversations = {row.method: row for row in rows if isinstance(row, ConversationsRow)}
    gaps = [row for row in rows if isinstance(row, GapRow)]
    next_turns = [row for row in rows if isinstance(row, NextTurnRow)]
    summary: dict[str, Any] = {}
    if (ca := conversations.get("ca")) is not None:
        for method, row in conversations.items():
            if method != "ca":
                summary[f"{method}_over_ca"] = _compare(row, ca)
        if "of" in conversations:
            summary["paper_hit_rate_drop_points"] = list(PAPER_HIT_RATE_DROPS)
    if conversations:
        turns = {(row.turns, row.history_turns, row.prompt_tokens, row.overflows) for row in conversations.values()}
        summary["same_turns"] = len(turns) == 1
    bookkeeping = [row for row in rows if isinstance(row, BookkeepingRow)]
    if bookkeeping:
        summary["discard_ms"] = {row.tier: 1e3 * row.discard_s for row in bookkeeping}
    if gaps:
        summary["extra_decode_steps"] = _largest((row.method, row.extra_steps) for row in gaps)
    if next_turns:
        summary["recomputed_tokens"] = _largest((row.method, row.recomputed_tokens) for row in next_turns)
        summary["overflow_ttft_ratio"] = _largest((row.method, row.overflow_ratio) for row in next_turns)
        ratios = [(row.method, row.ratio) for row in next_turns if row.ratio is not None and row.method != "ca"]
        if ratios:
            summary["next_turn_ttft_over_ca"] = _largest(ratios)
    summary["recompiles"] = sum(row.recompiles for row in rows if not isinstance(row, BookkeepingRow))
    return summary


def _compare(row: ConversationsRow, ca: ConversationsRow) -> dict[str, Any]:
    of_groups = [mine / other for mine, other in zip(row.group_s, ca.group_s, strict=True)]
    return {
        "hit_rate_drop_points": 100 * (ca.hit_rate - row.hit_rate),
        "total_s": row.total_s / ca.total_s,
        "total_s_of_groups": [min(of_groups), max(of_groups)],
        "prefill_tokens": row.prefill_tokens / ca.prefill_tokens,
        "prefill_s": row.prefill_s / ca.prefill_s,
        "ttft_mean_s": row.ttft_mean_s / ca.ttft_mean_s,
    }


def _largest(pairs: Any) -> dict[str, float]:
    largest: dict[str, float] = {}
    for name, value in pairs:
        largest[name] = max(value, largest.get(name, value))
    return largest


# Conversations.


@dataclasses.dataclass
class _Served:
    """What one method has served so far."""

    turns: list[tuple[ServedTurn, int]] = dataclasses.field(default_factory=list)  # With tokens of its message.
    group_s: list[float] = dataclasses.field(default_factory=list)
    metrics: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    recompiles: int = 0


def _conversations(
    engines: Mapping[str, Engine], config: OverflowBenchConfig, scripts: Sequence[Script], progress: Progress
) -> list[ConversationsRow]:
    """All conversations by every method, group by group."""
    size = config.concurrent_sessions
    groups = [scripts[start : start + size] for start in range(0, len(scripts), size)]
    served = {method: _Served() for method in config.overflow_methods}
    done, total = itertools.count(), len(groups) * len(served)
    progress("conversations", next(done), total)
    for index, group in enumerate(groups):
        for method in config.overflow_methods[:: -1 if index % 2 else 1]:
            _serve_group(engines[method], group, served[method])
            progress("conversations", next(done), total)
    return [_row(method, each, config, len(scripts)) for method, each in served.items()]


def _serve_group(engine: Engine, group: Sequence[Script], served: _Served) -> None:
    before = _counts(engine)
    with CompileCounter() as compiles:
        found = serve(engine, group)
    served.recompiles += compiles.count
    served.group_s.append(found.elapsed_s)
    served.metrics.update({name: count - before[name] for name, count in _counts(engine).items()})
    for script, turns in zip(group, found.conversations, strict=True):
        served.turns += [(turn, len(said.message)) for said, turn in zip(script, turns, strict=True)]


def _counts(engine: Engine) -> dict[str, int]:
    counts = {name: int(getattr(engine.metrics, name)) for name in _METRICS}
    return {**counts, "misses": sum(engine.store_stats().misses.values())}


@dataclasses.dataclass(frozen=True)
class _Turn:
    """One turn as a row counts it."""

    has_history: bool
    is_hit: bool
    history_tokens: int  # That the prompt was behind, when tokens had left.
    loaded_tokens: int
    prompt_dropped: int  # Tokens that left for the message.
    answer_dropped: int  # In the middle of the answer.
    prefill_tokens: int
    ttft_s: float


def _row(method: str, served: _Served, config: OverflowBenchConfig, num_sessions: int) -> ConversationsRow:
    turns = [_turn(turn, num_new, method, config) for turn, num_new in served.turns]
    usages = [turn.usage for turn, _ in served.turns]
    with_history = [turn for turn in turns if turn.has_history]
    history_tokens = sum(turn.history_tokens for turn in turns)
    ttft_s = [turn.ttft_s for turn in turns]
    overflow_ttft_s = [turn.ttft_s for turn in turns if turn.prompt_dropped]
    hits = sum(turn.is_hit for turn in with_history)
    answer_overflows = sum(turn.answer_dropped > 0 for turn in turns)
    overflows = answer_overflows + sum(turn.prompt_dropped > 0 for turn in turns)
    if overflows != served.metrics["truncations"]:
        raise BenchError(f"wanted {overflows} truncations of {method}, found {served.metrics['truncations']}")
    return ConversationsRow(
        method=method,
        sessions=num_sessions,
        turns=len(turns),
        overflows=overflows,
        answer_overflows=answer_overflows,
        history_turns=len(with_history),
        hits=hits,
        hit_rate=hits / max(len(with_history), 1),
        history_tokens=history_tokens,
        loaded_share=sum(turn.loaded_tokens for turn in turns) / max(history_tokens, 1),
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        prefill_tokens=sum(turn.prefill_tokens for turn in turns),
        repaired_tokens=sum(usage.repaired_tokens for usage in usages),
        prefill_s=sum(usage.ttft_s - usage.queued_s for usage in usages),
        ttft_mean_s=float(np.mean(ttft_s)),
        ttft_p50_s=float(np.percentile(ttft_s, 50)),
        ttft_p99_s=float(np.percentile(ttft_s, 99)),
        overflow_ttft_p50_s=float(np.percentile(overflow_ttft_s, 50)) if overflow_ttft_s else None,
        total_s=sum(served.group_s),
        group_s=tuple(served.group_s),
        metrics=dict(served.metrics),
        recompiles=served.recompiles,
    )


def _turn(turn: ServedTurn, num_new: int, method: str, config: OverflowBenchConfig) -> _Turn:
    usage = turn.usage
    keep_first = 0 if config.engine.overflow is None else config.engine.overflow.keep_first_tokens
    history_tokens = usage.prompt_tokens - num_new
    prompt_dropped = turn.history_tokens - history_tokens
    answer_dropped = usage.dropped_tokens - prompt_dropped
    # The context is full then, and its last token was not computed yet; an answer is too short to overflow twice.
    recomputed = config.context_window - 1 - answer_dropped if answer_dropped and method in ("tt", "of") else 0
    return _Turn(
        has_history=turn.history_tokens > 0,
        is_hit=usage.num_cached_tokens > keep_first,
        history_tokens=history_tokens,
        loaded_tokens=min(usage.num_cached_tokens, history_tokens),
        prompt_dropped=prompt_dropped,
        answer_dropped=answer_dropped,
        prefill_tokens=usage.new_tokens + recomputed,
        ttft_s=usage.ttft_s,
    )
