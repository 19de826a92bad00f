"""What truncation costs and saves: conversations that outgrow the window, and what one truncation takes.

One engine for each method, all of one process, one model and one configuration. Conversations are served group by
group: each group by every method in turn, every group beginning with another method (A B B A ...). Engines are warmed
up and have truncated before anything is measured.

Not here: what one truncation costs (`overflow_costs`, `overflow_store`), what rows hold (`overflow_rows`), serving
(`conversations`), quality (`ca_jax.launch.evaluate`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks import conversations, harness
from benchmarks.compiles import CompileCounter
from benchmarks.conversations import Scripts, ServedTurn
from benchmarks.engines import make_engine, sized_config
from benchmarks.figures import Panel
from benchmarks.harness import BenchError, Run
from benchmarks.overflow_costs import first_truncations, gap_rows, next_turn_rows
from benchmarks.overflow_rows import (
    BookkeepingRow,
    ConversationsRow,
    GapRow,
    NextTurnRow,
    OverflowBenchConfig,
    OverflowRow,
)
from benchmarks.overflow_store import measure_bookkeeping
from benchmarks.replay.workload import Exchange, Script, num_tokens, recorded_script
from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.kv.layout import kv_layout
from ca_jax.pretrained import LoadedModel
from ca_jax.simulate.traces.sharegpt import Conversation

PAPER_HIT_RATE_DROPS = (17.6, 41.5, 18.1, 18.4)
"""Points of hit rate that `of` is below `ca` in the paper's Figure 22a: LLaMA-13B, -65B, -70B, Falcon-40B."""

_RANDOM_TURNS_PER_WINDOW = 3  # About as in ShareGPT under a window of 1,024 tokens.
_SPARE_BLOCKS = 3  # Of a session that was cut: first tokens keep a block, others keep parts.
_METRICS = (
    *("truncations", "dropped_tokens", "invalidated_histories", "loaded_histories"),
    *("repaired_tokens", "failed_loads", "failed_saves"),
)
_OF_CONVERSATIONS = ("measured", "conversations")
_PANELS = (
    Panel(
        title="turns with a hit, history tokens loaded",
        x="method",
        y=("hit_rate", "loaded_share"),
        label="share (%)",
        scale=100,
        only=_OF_CONVERSATIONS,
    ),
    Panel(
        title="the same conversations: total, of it prefill",
        x="method",
        y=("total_s", "prefill_s"),
        label="time (s)",
        only=_OF_CONVERSATIONS,
    ),
)


def make_scripts(model: LoadedModel, config: OverflowBenchConfig) -> Scripts:
    """The first conversations of ShareGPT that outgrow the window, cut off before `conversation_tokens`."""
    return conversations.recorded_or_random(
        model,
        config.num_sessions,
        partial(overflowing_scripts, model, config),
        partial(_random_script, model, config),
        min_turns=2,
        wanted=f"that outgrow a window of {config.context_window} tokens",
        seed=config.seed,
    )


def overflowing_scripts(
    model: LoadedModel, config: OverflowBenchConfig, recorded: Iterable[Conversation]
) -> Iterator[Script]:
    """Scripts of those conversations that outgrow the window within their first turns.

    Turns that were answered are taken, at most `max_turns`, up to the first that would make more than
    `conversation_tokens` or does not fit in a window by itself.
    """
    for each in recorded:
        taken: list[Exchange] = []
        room = config.conversation_tokens
        for turn in recorded_script(model, each.exchanges[: config.max_turns], config.max_answer_tokens):
            room -= turn.num_tokens
            if room < 0 or turn.num_tokens > config.context_window:
                break
            taken.append(turn)
        if num_tokens(taken) > config.context_window:
            yield tuple(taken)


def _random_script(model: LoadedModel, config: OverflowBenchConfig, rng: np.random.Generator) -> Script:
    answer_tokens = config.max_answer_tokens
    most = 2 * config.context_window // _RANDOM_TURNS_PER_WINDOW - answer_tokens
    script: list[Exchange] = []
    while (held := num_tokens(script)) <= config.context_window:
        size = min(int(rng.integers(1, most, endpoint=True)), config.conversation_tokens - held - answer_tokens)
        script.append(Exchange(tuple(rng.integers(model.config.vocab_size, size=size).tolist()), answer_tokens))
    return tuple(script)


def engine_config(config: OverflowBenchConfig, model: LoadedModel, method: str) -> EngineConfig:
    """The engine of one method; its DRAM holds all conversations that go on together."""
    num_sessions = max((config.concurrent_sessions, *config.gap_sessions))
    num_blocks = num_sessions * (kv_layout(model, config.engine).num_blocks(config.context_window) + _SPARE_BLOCKS)
    sized = dataclasses.replace(
        config.engine,
        context_window=config.context_window,
        overflow=dataclasses.replace(config.overflow, method=method),
        recompute_if_faster=False,
        max_draft_tokens=0,  # The gap is in decode steps, of one token each.
    )
    return sized_config(sized, model, num_blocks)


def summarize(rows: Sequence[OverflowRow]) -> dict[str, Any]:
    """What the rows come to, each of which is there where there are rows of it.

    `METHOD_over_ca`, conversations: its seconds, prefilled tokens, seconds of prefill and mean TTFT over those of `ca`,
    the same of the seconds of each group (least and largest), and the points of hit rate that it is below `ca`; beside
    `of`, `paper_hit_rate_drop_points`. `same_turns`, whether all methods had the same turns and truncations.
    `discard_ms`, by tier. `extra_decode_steps`, by method the most of its rows. `recomputed_tokens`, of the turn behind
    a truncation, by method the most of its rows; `next_turn_ttft_over_ca`, the same; `overflow_ttft_ratio`, over turns
    without an overflow, the same. `recompiles`.
    """
    served = {row.method: row for row in rows if isinstance(row, ConversationsRow)}
    gaps = [row for row in rows if isinstance(row, GapRow)]
    next_turns = [row for row in rows if isinstance(row, NextTurnRow)]
    summary: dict[str, Any] = {}
    if (ca := served.get("ca")) is not None:
        for method, row in served.items():
            if method != "ca":
                summary[f"{method}_over_ca"] = _compare(row, ca)
        if "of" in served:
            summary["paper_hit_rate_drop_points"] = list(PAPER_HIT_RATE_DROPS)
    if served:
        turns = {(row.turns, row.history_turns, row.prompt_tokens, row.overflows) for row in served.values()}
        summary["same_turns"] = len(turns) == 1
    if discards := {row.tier: 1e3 * row.discard_s for row in rows if isinstance(row, BookkeepingRow)}:
        summary["discard_ms"] = discards
    if gaps:
        summary["extra_decode_steps"] = _largest((row.method, row.extra_steps) for row in gaps)
    if next_turns:
        summary["recomputed_tokens"] = _largest((row.method, row.recomputed_tokens) for row in next_turns)
        summary["overflow_ttft_ratio"] = _largest((row.method, row.overflow_ratio) for row in next_turns)
        ratios = [(row.method, row.ratio) for row in next_turns if row.ratio is not None and row.method != "ca"]
        if ratios:
            summary["next_turn_ttft_over_ca"] = _largest(ratios)
    return {**summary, **harness.checks(rows)}


def _compare(row: ConversationsRow, ca: ConversationsRow) -> dict[str, Any]:
    of_groups = [mine / other for mine, other in zip(row.group_s, ca.group_s, strict=True)]
    names = ("total_s", "prefill_tokens", "prefill_s", "ttft_mean_s")
    return {
        "hit_rate_drop_points": 100 * (ca.hit_rate - row.hit_rate),
        "total_s_of_groups": [min(of_groups), max(of_groups)],
        **{name: getattr(row, name) / getattr(ca, name) for name in names},
    }


def _largest(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    largest: dict[str, float] = {}
    for name, value in pairs:
        largest[name] = max(value, largest.get(name, value))
    return largest


@harness.suite(OverflowBenchConfig, summary=summarize, panels=_PANELS, plot_needs="num_sessions")
def overflow(run: Run[OverflowBenchConfig]) -> Iterator[OverflowRow]:
    """What truncation costs, and what it saves over recomputing what is left."""
    config, model = run.config, run.model
    scripts = make_scripts(model, config) if config.num_sessions else None
    if scripts is not None:
        run.facts["conversations"] = scripts.source
    with contextlib.ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for method in config.methods:
            engine = make_engine(model, engine_config(config, model, method))
            engines[method] = stack.enter_context(engine)
            engine.warmup(progress=run.progress)
        rng = run.rng()
        compiles = {method: first_truncations(engine, config, rng) for method, engine in engines.items()}
        run.facts["first_truncation_compiles"] = compiles
        if scripts is not None:
            yield from conversation_rows(run, engines, scripts.each)
        yield from gap_rows(run, engines, rng)
        yield from next_turn_rows(run, engines, rng)
    if config.bookkeeping_sessions:
        yield from measure_bookkeeping(run)


# Conversations.


@dataclasses.dataclass
class _Served:
    """What one method has served so far."""

    turns: list[tuple[ServedTurn, int]] = dataclasses.field(default_factory=list)  # With tokens of its message.
    group_s: list[float] = dataclasses.field(default_factory=list)
    metrics: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    recompiles: int = 0


def conversation_rows(
    run: Run[OverflowBenchConfig], engines: Mapping[str, Engine], scripts: Sequence[Script]
) -> Iterator[ConversationsRow]:
    """All conversations by every method, group by group."""
    config, size = run.config, run.config.concurrent_sessions
    groups = [scripts[start : start + size] for start in range(0, len(scripts), size)]
    served = {method: _Served() for method in config.overflow_methods}
    for index, group in enumerate(harness.ticked(run.progress, "conversations", groups)):
        for method in harness.in_turn(config.overflow_methods, index):
            _serve_group(engines[method], group, served[method])
    for method, each in served.items():
        yield _row(method, each, config, len(scripts))


def _serve_group(engine: Engine, group: Sequence[Script], served: _Served) -> None:
    before = _counts(engine)
    with CompileCounter() as compiles:
        found = conversations.serve(engine, group)
    served.recompiles += compiles.count
    served.group_s.append(found.elapsed_s)
    served.metrics.update({name: count - before[name] for name, count in _counts(engine).items()})
    for script, turns in zip(group, found.conversations, strict=True):
        served.turns += [(turn, len(said.message)) for said, turn in zip(script, turns, strict=True)]


def _counts(engine: Engine) -> dict[str, int]:
    counts = {name: int(getattr(engine.metrics, name)) for name in _METRICS}
    return {**counts, "misses": sum(engine.store_stats().misses.values())}


def _row(method: str, served: _Served, config: OverflowBenchConfig, num_sessions: int) -> ConversationsRow:
    totals: collections.Counter[str] = collections.Counter()
    overflow_ttft_s = []
    for turn, num_new in served.turns:
        usage = turn.usage
        history_tokens = usage.prompt_tokens - num_new  # That the prompt was behind, when tokens had left.
        prompt_dropped = turn.history_tokens - history_tokens
        answer_dropped = usage.dropped_tokens - prompt_dropped
        # The context is full then, and its last token was not computed yet; an answer is too short to overflow twice.
        anew = config.context_window - 1 - answer_dropped if answer_dropped and method in ("tt", "of") else 0
        totals["history_turns"] += turn.history_tokens > 0
        totals["hits"] += turn.history_tokens > 0 and usage.num_cached_tokens > config.overflow.keep_first_tokens
        totals["history_tokens"] += history_tokens
        totals["loaded_tokens"] += min(usage.num_cached_tokens, history_tokens)
        totals["answer_overflows"] += answer_dropped > 0
        totals["overflows"] += (answer_dropped > 0) + (prompt_dropped > 0)
        totals["prefill_tokens"] += usage.new_tokens + anew
        totals["prompt_tokens"] += usage.prompt_tokens
        totals["repaired_tokens"] += usage.repaired_tokens
        if prompt_dropped:
            overflow_ttft_s.append(usage.ttft_s)
    if totals["overflows"] != served.metrics["truncations"]:
        raise BenchError(f"{method} must truncate {totals['overflows']} times, got {served.metrics['truncations']}")
    usages = [turn.usage for turn, _ in served.turns]
    ttft_s = [usage.ttft_s for usage in usages]
    loaded_tokens = totals.pop("loaded_tokens")
    return ConversationsRow(
        method=method,
        sessions=num_sessions,
        turns=len(usages),
        **{name: int(total) for name, total in totals.items()},  # type: ignore[arg-type]
        hit_rate=totals["hits"] / max(totals["history_turns"], 1),
        loaded_share=loaded_tokens / max(totals["history_tokens"], 1),
        prefill_s=sum(usage.ttft_s - usage.queued_s for usage in usages),
        ttft_mean_s=float(np.mean(ttft_s)),
        **harness.percentiles("ttft_p{}_s", ttft_s, 50, 99),
        overflow_ttft_p50_s=float(np.median(overflow_ttft_s)) if overflow_ttft_s else None,
        total_s=sum(served.group_s),
        group_s=tuple(served.group_s),
        metrics=dict(served.metrics),
        recompiles=served.recompiles,
    )
