"""Measures a stream of questions whose chunks come again: turns a second in each way to use what is stored of chunks.

Each turn's chunks are drawn by a Zipf law, all different, and stand in the order in which they were drawn. A turn is a
new session's. Some are under way together: as one ends the next is sent.

    round 0 (for nothing)   blend  reuse  prefix  recompute      every mode serves the same turns, with an engine, a
    round 1                 recompute  prefix  reuse  blend      store and an SSD of its own, all of one size; each
    round 2                 blend  reuse  prefix  recompute      round begins with the other one

The store is smaller than all chunks. Sessions are forgotten as they end where chunks are what is used again, and stay
where other sessions begin with a copy of their KV: with `prefix`. That is what gives each mode most of its store.

Not here: what chunks say (`bench_blend_texts`), what rows hold (`bench_blend_schema`), one turn (`bench_blend`), what
each mode is worth in quality (`evaluate`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.kv.layout import kv_layout
from ca_jax.launch.bench_blend_schema import BlendThroughputBenchConfig, BlendThroughputResult, BlendThroughputRow
from ca_jax.launch.bench_blend_texts import Contexts, make_contexts
from ca_jax.launch.bench_disk import scratch_directory
from ca_jax.launch.bench_engines import SSD_BLOCK_EXTRA_BYTES, make_engine
from ca_jax.launch.bench_schema import Samples
from ca_jax.pretrained import LoadedModel, Progress
from ca_jax.session import Session
from ca_jax.storage.config import GIB
from ca_jax.telemetry.metrics import CompileCounter
from ca_jax.turns.jobs import Job
from ca_jax.turns.requests import SamplingParams

_CHUNK_MODES = ("blend", "reuse")


@dataclasses.dataclass(frozen=True)
class StreamTurn:
    """One turn of the stream."""

    chunks: tuple[tuple[int, ...], ...]
    """Of its context, in order."""
    question: tuple[int, ...]
    """Behind them."""


def run_blend_throughput_suite(
    model: LoadedModel, config: BlendThroughputBenchConfig, progress: Progress
) -> BlendThroughputResult:
    """Measures every row, with engines of its own. Blocks.

    Args:
      model: to serve.
      config: what to measure.
      progress: told of every round.

    Raises:
      BenchError: the engines cannot be as large as wanted, the disk cannot be used, or texts are wanting.
      EvaluationError: the data cannot be read.
    """
    contexts = make_contexts(
        model, config.stream_chunks, config.context_chunk_tokens, data=config.data, seed=config.seed
    )
    turns = stream_turns(config, contexts)
    total, done = len(config.ssd_shares) * (1 + config.repeats), itertools.count()
    progress(config.suite, next(done), total)
    rows: list[BlendThroughputRow] = []
    for ssd_share in config.ssd_shares:
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(scratch_directory(config.ssd_dir))
            engines = {
                mode: stack.enter_context(
                    make_engine(
                        model,
                        engine_config(config, model, mode, ssd_share, contexts.longest_question, directory / mode),
                        suite=config.suite,
                    )
                )
                for mode in config.stream_modes
            }
            for engine in engines.values():
                engine.warmup(
                    max_new_tokens=config.context_chunk_tokens,
                    contexts=[[config.context_chunk_tokens] * config.context_chunks],
                    progress=progress,
                )
            bench = _Bench(engines, config, ssd_share)
            for served in _rounds(config, turns):
                bench.round(served)
                progress(config.suite, next(done), total)
            rows += bench.rows()
    return BlendThroughputResult(rows=rows, summary={"texts": contexts.source, **summarize_stream(rows)})


def stream_turns(config: BlendThroughputBenchConfig, contexts: Contexts) -> list[StreamTurn]:
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


def engine_config(
    config: BlendThroughputBenchConfig,
    model: LoadedModel,
    mode: str,
    ssd_share: float,
    question_tokens: int,
    directory: Path,
) -> EngineConfig:
    """The engine of one mode; its store has shares of what all chunks take."""
    layout = kv_layout(model, config.engine)
    num_blocks = config.stream_chunks * layout.num_blocks(config.context_chunk_tokens)
    store = dataclasses.replace(
        config.engine.store,
        dram_gib=config.dram_share * num_blocks * layout.block_bytes / GIB,
        ssd_dir=str(directory),
        ssd_gib=ssd_share * num_blocks * (layout.block_bytes + SSD_BLOCK_EXTRA_BYTES) / GIB,
        ssd_driver=config.ssd_driver,
    )
    blend = dataclasses.replace(config.engine.blend, mode=mode)
    if mode in _CHUNK_MODES:
        blend = dataclasses.replace(blend, recompute_ratio=config.stream_ratio if mode == "blend" else 0.0)
    context_tokens = config.context_chunks * config.context_chunk_tokens
    return dataclasses.replace(
        config.engine,
        context_window=context_tokens + question_tokens + config.context_answer_tokens + 1,
        max_batch_size=config.concurrent_turns,
        recompute_if_faster=False,
        blend=blend,
        store=store,
    )


def summarize_stream(rows: Sequence[BlendThroughputRow]) -> dict[str, Any]:
    """`blend_over_prefix` and `blend_over_recompute`, the least of the stores, where they were served; `recompiles`."""
    blends = [row for row in rows if row.mode == "blend"]
    over_prefix = [row.speedup_over_prefix for row in blends if row.speedup_over_prefix is not None]
    over_recompute = [row.speedup for row in blends if row.speedup is not None]
    return {
        "blend_over_prefix": min(over_prefix, default=None),
        "blend_over_recompute": min(over_recompute, default=None),
        "recompiles": sum(row.recompiles for row in rows),
    }


def serve(engine: Engine, turns: Sequence[StreamTurn], config: BlendThroughputBenchConfig) -> dict[str, float]:
    """Serves turns, some at once, and says what that took: the fields of a row that are medians of rounds.

    Args:
      engine: idle; it is idle again afterwards.
      turns: in order.
      config: how many at once, and how long answers are.

    Raises:
      Exception: what broke a turn, if something did.
    """
    params = SamplingParams(max_tokens=config.context_answer_tokens, ignore_eos=True)
    keeps_sessions = engine.config.blend.mode == "prefix"
    before = dataclasses.replace(engine.metrics)
    to_come = collections.deque(turns)
    running: dict[Job, Session] = {}
    ended: list[Job] = []
    started_s = perf_counter()
    while running or to_come:
        while to_come and len(running) < config.concurrent_turns:
            turn, session = to_come.popleft(), engine.session()
            running[engine.submit_turn(session, turn.question, params, context=turn.chunks)] = session
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
    engine: Engine, before: Any, jobs: Sequence[Job], elapsed_s: float, config: BlendThroughputBenchConfig
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
    ttft_s = [usage.ttft_s for usage in usages]
    return {
        "turns_per_s": len(jobs) / elapsed_s,
        "tokens_per_s": (prompt_tokens + sum(usage.completion_tokens for usage in usages)) / elapsed_s,
        "hit_share": hit_share,
        "computed_share": computed_tokens / prompt_tokens,
        "ssd_turn_share": sum(usage.cached_tokens.get("ssd", 0) > 0 for usage in usages) / len(usages),
        "ttft_p50_s": float(np.percentile(ttft_s, 50)),
        "ttft_p95_s": float(np.percentile(ttft_s, 95)),
    }


def _rounds(config: BlendThroughputBenchConfig, turns: Sequence[StreamTurn]) -> Iterator[Sequence[StreamTurn]]:
    yield turns[: config.fill_turns]
    for start in range(config.fill_turns, len(turns), config.round_turns):
        yield turns[start : start + config.round_turns]


class _Bench:
    """Serves rounds in all modes.

    Args:
      engines: by mode, idle.
      config: what to measure.
      ssd_share: size of their SSDs.
    """

    def __init__(self, engines: Mapping[str, Engine], config: BlendThroughputBenchConfig, ssd_share: float) -> None:
        self._engines = engines
        self._config = config
        self._ssd_share = ssd_share
        self._num_rounds = 0
        self._samples = {mode: Samples() for mode in engines}
        self._recompiles: collections.Counter[str] = collections.Counter()
        for engine in engines.values():
            engine.wait_until_ready()  # First touch would share the memory bus with the rounds.

    def round(self, turns: Sequence[StreamTurn]) -> None:
        """One round in all modes; the first is for nothing."""
        is_measured = self._num_rounds > 0
        self._num_rounds += 1
        modes = list(self._engines) if self._num_rounds % 2 else list(self._engines)[::-1]
        found: dict[str, dict[str, float]] = {}
        for mode in modes:
            with CompileCounter() as compiles:
                found[mode] = serve(self._engines[mode], turns, self._config)
            if is_measured:
                self._recompiles[mode] += compiles.count
        for mode, sample in found.items() if is_measured else ():
            for name, other in (("speedup", "recompute"), ("speedup_over_prefix", "prefix")):
                if other in found:
                    sample[name] = sample["turns_per_s"] / found[other]["turns_per_s"]
            self._samples[mode].add(**sample)

    def rows(self) -> list[BlendThroughputRow]:
        """One for each mode."""
        return [self._row(mode, samples) for mode, samples in self._samples.items()]

    def _row(self, mode: str, samples: Samples) -> BlendThroughputRow:
        config, blend = self._config, self._engines[mode].config.blend
        is_blend = mode == "blend"
        return BlendThroughputRow(
            mode=mode,
            recompute_ratio=blend.recompute_ratio if is_blend else None,
            selection=blend.selection if is_blend else None,
            dram_share=config.dram_share,
            ssd_share=self._ssd_share,
            turns=config.round_turns,
            turns_per_s=samples.median("turns_per_s"),
            tokens_per_s=samples.median("tokens_per_s"),
            speedup=samples.median_or_none("speedup"),
            speedup_over_prefix=samples.median_or_none("speedup_over_prefix"),
            hit_share=samples.median("hit_share"),
            computed_share=samples.median("computed_share"),
            ssd_turn_share=samples.median("ssd_turn_share"),
            ttft_p50_s=samples.median("ttft_p50_s"),
            ttft_p95_s=samples.median("ttft_p95_s"),
            recompiles=self._recompiles[mode],
            spread=samples.spread(),
        )
