"""Turns a second of a stream of questions whose chunks come again, in each way to use what is stored of chunks.

Each turn's chunks are drawn by a Zipf law, all different, and stand in the order in which they were drawn. A turn is a
new session's. Some are under way together: as one ends the next is sent. Every mode serves the same turns, with an
engine, a store and an SSD of its own, all of one size; each round begins with another mode, and the first, longer one
fills the stores.

The store is smaller than all chunks. Sessions are forgotten as they end where chunks are what is used again, and stay
where other sessions begin with a copy of their KV: with `prefix`. That is what gives each mode most of its store.

Not here: what chunks say (`conversations`), one turn (`suites.blend`), what each mode is worth in quality
(`ca_jax.launch.evaluate`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import numpy as np

from benchmarks import harness
from benchmarks.conversations import Contexts, make_contexts
from benchmarks.disk import scratch_directory
from benchmarks.engines import answer_of, make_engine, sized_config
from benchmarks.figures import Panel
from benchmarks.harness import Row, Run, Ways
from benchmarks.suites.blend import ContextsConfig
from ca_jax.config import BLEND_MODES, EngineConfig
from ca_jax.engine import Engine
from ca_jax.kv.layout import kv_layout
from ca_jax.pretrained import LoadedModel
from ca_jax.session import Job, Session

_CHUNK_MODES = ("blend", "reuse")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlendThroughputConfig(ContextsConfig):
    """How many turns a second are served whose chunks come again, with a store that is smaller than all chunks."""

    may_be_zero: ClassVar = frozenset({"seed", "zipf_exponent"})
    shares: ClassVar = frozenset({"stream_ratio"})
    choices: ClassVar = {"stream_modes": BLEND_MODES}

    stream_modes: tuple[str, ...] = BLEND_MODES
    """Ways to use what is stored, of blend, reuse, prefix and recompute; each a row for each store."""
    stream_ratio: float = 0.15
    """Share of the chunks' tokens that the mode blend computes anew."""
    stream_chunks: int = 120
    """Chunks that turns draw from."""
    context_chunks: int = 6
    """Chunks of a turn, all different, in the order they were drawn in."""
    context_chunk_tokens: int = 512
    """Tokens of each chunk."""
    zipf_exponent: float = 1.0
    """How much oftener some chunks are drawn: the n-th in proportion to n ** -zipf_exponent; 0: all alike."""
    dram_share: float = 0.4
    """Size of DRAM, a share of what all chunks take."""
    ssd_shares: tuple[float, ...] = (0.4, 0.8)
    """Sizes of the SSD, likewise. What is in DRAM gets to SSD too, so that the larger of both is the store's size."""
    concurrent_turns: int = 4
    """Turns under way together, each of a session of its own; as one ends the next is sent."""
    round_turns: int = 16
    """Turns of a round, which all modes serve one after the other."""
    fill_turns: int = 32
    """Turns before the first round, for nothing: they fill the store."""
    context_answer_tokens: int = 8
    """Tokens of every answer."""
    repeats: int = 3
    """Samples that a median is of."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_enough = self.stream_chunks >= self.context_chunks
        harness.require(is_enough, "stream_chunks", f"at least the {self.context_chunks} of a turn", self.stream_chunks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlendThroughputRow(Row):
    """The same stream of turns served in one way, with one size of the store; numbers are medians of the rounds."""

    mode: str
    """See `BlendConfig.mode`."""
    recompute_ratio: float | None
    """Of `blend`; None of others."""
    selection: str | None
    dram_share: float
    """Size of DRAM, a share of what all chunks take."""
    ssd_share: float
    """Likewise, of the SSD."""
    turns: int
    """Of a round."""
    turns_per_s: float
    """From the first turn sent to the last answer ended."""
    tokens_per_s: float
    """Of prompts and answers."""
    speedup: float | None
    """Turns a second over those of full recompute, median of the rounds' own; None where that was not served."""
    speedup_over_prefix: float | None
    """Likewise, over those of prefix caching."""
    hit_share: float
    """Of the tokens of all contexts, those whose KV was stored when their turn was sent, or was computed for another
    one that had been sent before."""
    computed_share: float
    """Tokens that were computed, chunks by themselves and answers' prompts, over the tokens of all prompts; of some
    layers alone, times their share of the layers."""
    ssd_turn_share: float
    """Of the turns, those that waited for KV from SSD."""
    ttft_p50_s: float
    """From sending to the first token, median of the turns."""
    ttft_p95_s: float
    """Of twenty turns one waits longer."""


@dataclasses.dataclass(frozen=True)
class StreamTurn:
    """One turn of the stream."""

    chunks: tuple[tuple[int, ...], ...]
    """Of its context, in order."""
    question: tuple[int, ...]


def summarize(rows: Sequence[BlendThroughputRow]) -> dict[str, Any]:
    """`blend_over_prefix` and `blend_over_recompute`, the least of the stores, where they were served; `recompiles`."""
    blends = [row for row in rows if row.mode == "blend"]
    over_prefix = [row.speedup_over_prefix for row in blends if row.speedup_over_prefix is not None]
    over_recompute = [row.speedup for row in blends if row.speedup is not None]
    return {
        "blend_over_prefix": min(over_prefix, default=None),
        "blend_over_recompute": min(over_recompute, default=None),
        **harness.checks(rows),
    }


_FIGURE = Panel(title="by size of the SSD", x="ssd_share", y=("turns_per_s",), by="mode", label="turns a second")


@harness.suite(BlendThroughputConfig, summary=summarize, panels=(_FIGURE,))
def blend_throughput(run: Run[BlendThroughputConfig]) -> Iterator[BlendThroughputRow]:
    """Turns a second of questions whose chunks come again, in each way to use what is stored of chunks."""
    config, model = run.config, run.model
    contexts = make_contexts(
        model, config.stream_chunks, config.context_chunk_tokens, data=config.data, seed=config.seed
    )
    run.facts["texts"] = contexts.source
    turns = stream_turns(config, contexts)
    longest = max(map(len, contexts.questions))
    for ssd_share in config.ssd_shares:
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(scratch_directory(config.ssd_dir))
            engines = {}
            for mode in config.stream_modes:
                sized = engine_config(config, model, mode, ssd_share, longest, directory / mode)
                engine = stack.enter_context(make_engine(model, sized))
                engine.warmup(
                    max_new_tokens=config.context_chunk_tokens,
                    contexts=[[config.context_chunk_tokens] * config.context_chunks],
                    progress=run.progress,
                )
                engines[mode] = engine
            parts = iter(_parts(config, turns))

            def ways(engines: dict[str, Engine] = engines, parts: Iterator[Sequence[StreamTurn]] = parts) -> Ways:
                part = next(parts)
                return {mode: partial(serve, engine, part, config) for mode, engine in engines.items()}

            rounds = run.rounds(ways)
            blends = {mode: engine.config.blend for mode, engine in engines.items()}
        for each in rounds:
            for name, other in (("speedup", "recompute"), ("speedup_over_prefix", "prefix")):
                for sample in each.values() if other in each else ():
                    sample[name] = sample["turns_per_s"] / each[other]["turns_per_s"]
        for mode, blend in blends.items():
            yield harness.make_row(
                BlendThroughputRow,
                harness.of_way(rounds, mode),
                mode=mode,
                recompute_ratio=blend.recompute_ratio if mode == "blend" else None,
                selection=blend.selection if mode == "blend" else None,
                dram_share=config.dram_share,
                ssd_share=ssd_share,
                turns=config.round_turns,
            )


def stream_turns(config: BlendThroughputConfig, contexts: Contexts) -> list[StreamTurn]:
    """All turns, those before the first round too: chunks by a Zipf law, without one twice in a turn."""
    rng = np.random.default_rng(config.seed)
    weights = np.arange(1, config.stream_chunks + 1, dtype=float) ** -config.zipf_exponent
    popular = rng.permutation(config.stream_chunks)  # Chunks that were found together are not drawn alike.
    turns = []
    for number in range(config.fill_turns + config.repeats * config.round_turns):
        drawn = rng.choice(popular, size=config.context_chunks, replace=False, p=weights / weights.sum())
        question = contexts.questions[number % len(contexts.questions)]
        turns.append(StreamTurn(tuple(contexts.chunks[index] for index in drawn), question))
    return turns


def _parts(config: BlendThroughputConfig, turns: Sequence[StreamTurn]) -> Iterator[Sequence[StreamTurn]]:
    """The turns of each round, those that fill the store first."""
    yield turns[: config.fill_turns]
    for start in range(config.fill_turns, len(turns), config.round_turns):
        yield turns[start : start + config.round_turns]


def engine_config(
    config: BlendThroughputConfig,
    model: LoadedModel,
    mode: str,
    ssd_share: float,
    question_tokens: int,
    directory: Path,
) -> EngineConfig:
    """The engine of one mode; its store has shares of what all chunks take."""
    num_blocks = config.stream_chunks * kv_layout(model, config.engine).num_blocks(config.context_chunk_tokens)
    blend = dataclasses.replace(config.engine.blend, mode=mode)
    if mode in _CHUNK_MODES:
        blend = dataclasses.replace(blend, recompute_ratio=config.stream_ratio if mode == "blend" else 0.0)
    context_tokens = config.context_chunks * config.context_chunk_tokens
    sized = dataclasses.replace(
        config.engine,
        context_window=context_tokens + question_tokens + config.context_answer_tokens + 1,
        max_batch_size=config.concurrent_turns,
        recompute_if_faster=False,
        blend=blend,
    )
    sized = sized_config(
        sized, model, config.dram_share * num_blocks, directory=directory, ssd_blocks=ssd_share * num_blocks
    )
    free = config.engine.store.dram_free_fraction
    store = dataclasses.replace(sized.store, ssd_driver=config.ssd_driver, dram_free_fraction=free)
    return dataclasses.replace(sized, store=store)


def serve(engine: Engine, turns: Sequence[StreamTurn], config: BlendThroughputConfig) -> dict[str, float]:
    """Serves turns, some at once, and says what that took: the fields of a row that are medians of rounds.

    The engine is idle before and afterwards. What broke a turn is raised.
    """
    params = answer_of(config.context_answer_tokens)
    keeps_sessions = engine.config.blend.mode == "prefix"
    before = dataclasses.replace(engine.metrics)
    to_come = collections.deque(turns)
    running: dict[Job, Session] = {}
    ended: list[Job] = []
    started_s = perf_counter()
    while running or to_come:
        while to_come and len(running) < config.concurrent_turns:
            turn, session = to_come.popleft(), engine.session()
            running[session.submit(turn.question, sampling=params, context=turn.chunks)] = session
        engine.step()
        for job in [job for job in running if job.done]:
            if job.error is not None:
                raise job.error
            ended.append(job)
            session = running.pop(job)
            if not keeps_sessions:
                session.close()
    elapsed_s = perf_counter() - started_s
    engine.wait_for_saves()
    return _measured(engine, before, ended, elapsed_s, config)


def _measured(
    engine: Engine, before: Any, jobs: Sequence[Job], elapsed_s: float, config: BlendThroughputConfig
) -> dict[str, float]:
    usages = [job.usage() for job in jobs]
    num_chunks = len(jobs) * config.context_chunks
    prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    num_alone = engine.metrics.computed_chunks - before.computed_chunks
    num_missed = engine.metrics.missed_chunks - before.missed_chunks
    hit_share = sum(usage.num_cached_tokens for usage in usages) / (num_chunks * config.context_chunk_tokens)
    if engine.config.blend.mode in _CHUNK_MODES:
        hit_share = max(1 - (num_alone + num_missed) / num_chunks, 0.0)
    computed_tokens = num_alone * config.context_chunk_tokens
    computed_tokens += sum(usage.new_tokens + usage.repaired_tokens for usage in usages)
    return {
        "turns_per_s": len(jobs) / elapsed_s,
        "tokens_per_s": (prompt_tokens + sum(usage.completion_tokens for usage in usages)) / elapsed_s,
        "hit_share": hit_share,
        "computed_share": computed_tokens / prompt_tokens,
        "ssd_turn_share": sum(usage.cached_tokens.get("ssd", 0) > 0 for usage in usages) / len(usages),
        **harness.percentiles("ttft_p{}_s", [usage.ttft_s for usage in usages], 50, 95),
    }
