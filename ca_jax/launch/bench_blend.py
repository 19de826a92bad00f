"""Measures how much sooner a question is answered behind chunks whose KV is stored, in each way to use that KV.

An engine for each way: `recompute`, `prefix`, and one for each ratio of blending, all of one process and model, each
with the chunks in a store of its own. Every round takes one sample of each way (A B C A B C ...), of the same question
behind the same chunks, which are in another order each round, so that no two rounds begin alike:

    recompute     nothing of the store is used
    prefix        the KV of the first chunk is
    ratio, tier   that of all chunks, which are in DRAM, or on SSD alone: pushed out of DRAM before the turn, and out of
                  the page cache too, or into it
    ratio, ideal  the same compute, past the engine's scheduling, with the chunks' KV on the device already: the tokens
                  that are computed anew, and the question

Each turn is a new session's, of one answer token, that is forgotten then. A turn whose KV came from anywhere else than
it should is an error, not a number. The first round is for nothing: it compiles.

Not here: loads and computes alone (`bench_apart`), what chunks say (`bench_blend_texts`), what rows hold
(`bench_blend_schema`), many turns at once (`bench_blend_throughput`), quality (`evaluate`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ca_jax.config import BlendConfig, EngineConfig
from ca_jax.engine import Engine
from ca_jax.kv.layout import kv_layout
from ca_jax.launch.bench_apart import ApartEngine
from ca_jax.launch.bench_blend_schema import BASELINES, BlendBenchConfig, BlendResult, BlendRow
from ca_jax.launch.bench_blend_texts import make_contexts
from ca_jax.launch.bench_disk import scratch_directory, scratch_on_disk
from ca_jax.launch.bench_engines import (
    SSD_BLOCK_EXTRA_BYTES,
    check_source,
    cool_down_files,
    make_engine,
    warm_up_files,
)
from ca_jax.launch.bench_schema import Samples
from ca_jax.launch.bench_suites import send_turn
from ca_jax.pretrained import LoadedModel, Progress
from ca_jax.storage.config import GIB
from ca_jax.storage.store import AttentionStore
from ca_jax.telemetry.metrics import CompileCounter

_MEDIANS = {  # Of a row.
    *("ttft_s", "ttft_recompute_s", "speedup", "ttft_reuse_s", "ideal_s", "over_ideal"),
    *("load_alone_s", "fetch_s", "load_s", "load_stall_s"),
}
_SESSIONS = 2  # That are stored at once: the one whose turn runs, and one that is about to be forgotten.


def run_blend_suite(model: LoadedModel, config: BlendBenchConfig, progress: Progress) -> BlendResult:
    """Measures every row, with engines of its own. Blocks.

    Args:
      model: to serve.
      config: what to measure.
      progress: told of every round.

    Raises:
      BenchError: the engines cannot be as large as the longest context wants them, the disk cannot be used, texts are
        wanting, or a turn's KV did not come from where it should have.
      EvaluationError: the data cannot be read.
    """
    cells = config.cells()
    total, done = len(cells) * (1 + config.repeats), itertools.count()
    progress(config.suite, next(done), total)
    rows: list[BlendRow] = []
    sources: list[str] = []
    for num_chunks, chunk_tokens in cells:
        contexts = make_contexts(model, num_chunks, chunk_tokens, data=config.data, seed=config.seed)
        question = list(contexts.questions[0])
        sources.append(contexts.source)
        with contextlib.ExitStack() as stack:
            scratch = scratch_on_disk if "ssd" in config.blend_tiers else scratch_directory
            directory = stack.enter_context(scratch(config.ssd_dir))
            chunks = [list(chunk) for chunk in contexts.chunks]
            bench = stack.enter_context(_opened(model, config, chunks, question, directory))
            rows += bench.rows(lambda: progress(config.suite, next(done), total))
    return BlendResult(rows=rows, summary={"texts": sources[0], **summarize_blend(rows)})


def summarize_blend(rows: Sequence[BlendRow]) -> dict[str, Any]:
    """`speedup_RATIO_TIER` and `over_ideal_RATIO_TIER`, the least and the largest of the sizes; `recompiles` of all."""
    summary: dict[str, Any] = {}
    for row in rows:
        if row.recompute_ratio is None or row.over_ideal is None:
            continue
        name = f"{row.recompute_ratio:g}_{row.tier}"
        summary[f"speedup_{name}"] = min(row.speedup, summary.get(f"speedup_{name}", row.speedup))
        summary[f"over_ideal_{name}"] = max(row.over_ideal, summary.get(f"over_ideal_{name}", 0.0))
    return {**summary, "recompiles": sum(row.recompiles for row in rows)}


def engine_config(
    config: BlendBenchConfig, model: LoadedModel, blend: BlendConfig, directory: Path | None, *, num_tokens: int
) -> EngineConfig:
    """The engine of one way, with room for the chunks and for the sessions that are made of them.

    Args:
      config: what else it is.
      model: what it serves.
      blend: the way.
      directory: of its SSD tier; None: it has none.
      num_tokens: of a session.
    """
    layout = kv_layout(model, config.engine)
    # Chunks begin a block each: as many more than their tokens take as there are chunks.
    num_blocks = (1 + _SESSIONS) * (layout.num_blocks(num_tokens) + max(config.num_chunks))
    store = dataclasses.replace(config.engine.store, dram_gib=num_blocks * layout.block_bytes / GIB)
    if directory is not None:
        ssd_bytes = 2 * num_blocks * (layout.block_bytes + SSD_BLOCK_EXTRA_BYTES)
        store = dataclasses.replace(
            store,
            dram_free_fraction=0.0,
            ssd_dir=str(directory),
            ssd_gib=ssd_bytes / GIB,
            ssd_driver=config.ssd_driver,
        )
    return dataclasses.replace(
        config.engine,
        context_window=num_tokens + 1,
        max_batch_size=1,
        recompute_if_faster=False,
        blend=blend,
        store=store,
    )


@dataclasses.dataclass(frozen=True)
class _Way:
    """An engine and how it uses what is stored."""

    blend: BlendConfig
    engine: Engine
    store: AttentionStore
    apart: ApartEngine | None  # Of those that blend.
    directory: Path

    def push_out(self, chunks: Sequence[list[int]]) -> None:
        """Has the chunks on SSD alone."""
        with self.engine._lock:
            for chunk in chunks:
                self.store.leave_dram(self.engine._kv.chunks.key(chunk, ""))


@contextlib.contextmanager
def _opened(
    model: LoadedModel, config: BlendBenchConfig, chunks: list[list[int]], question: list[int], directory: Path
) -> Iterator[_Bench]:
    """Engines of all ways, with the chunks in their stores."""
    num_context = sum(map(len, chunks))
    blends = [BlendConfig(mode=mode) for mode in BASELINES]
    for ratio in config.ratios:
        mode = "blend" if ratio else "reuse"
        blends.append(dataclasses.replace(config.engine.blend, mode=mode, recompute_ratio=ratio))
    with contextlib.ExitStack() as stack:
        ways = []
        for number, blend in enumerate(blends):
            place = directory / str(number)
            has_ssd = blend.mode != "recompute"
            own = engine_config(
                config, model, blend, place if has_ssd else None, num_tokens=num_context + len(question) + 1
            )
            stores: list[AttentionStore] = []
            engine = stack.enter_context(
                make_engine(model, own, suite=config.suite, store_wrapper=partial(_keep, stores))
            )
            engine.wait_until_ready()  # First touch would share the memory bus with the samples.
            apart = None
            if blend.mode in ("blend", "reuse"):
                apart = stack.enter_context(
                    contextlib.closing(ApartEngine(engine, stores[0], max_history_tokens=num_context))
                )
            if has_ssd:
                engine.precompute(chunks)
                engine.wait_for_saves()
            ways.append(_Way(blend, engine, stores[0], apart, place))
        yield _Bench(ways, config, chunks, question)


def _keep(stores: list[AttentionStore], store: AttentionStore) -> AttentionStore:
    stores.append(store)
    return store


class _Bench:
    """Measures the rows of one size.

    Args:
      ways: `BASELINES`, then blends by ascending ratio, from 0 on.
      config: what to measure.
      chunks: of the contexts.
      question: behind them.
    """

    def __init__(
        self, ways: Sequence[_Way], config: BlendBenchConfig, chunks: list[list[int]], question: list[int]
    ) -> None:
        self._recompute, self._prefix, *self._blends = ways
        self._config = config
        self._chunks = chunks
        self._question = question
        self._rng = np.random.default_rng(config.seed)
        self._samples: dict[tuple[_Way, str | None], Samples] = collections.defaultdict(Samples)

    def rows(self, step: Callable[[], None]) -> list[BlendRow]:
        """One round that does not count, then so many that do."""
        self._round()
        step()
        self._samples.clear()
        for _ in range(self._config.repeats):
            self._round()
            step()
        return [self._row(way, tier, samples) for (way, tier), samples in self._samples.items()]

    def _round(self) -> None:
        """One sample of each way."""
        chunks = [self._chunks[index] for index in self._rng.permutation(len(self._chunks))]
        first_token, recompute_s = self._turn(self._recompute, None, chunks, {}, first_token=None, recompute_s=None)
        block_tokens = self._config.engine.store.block_tokens  # Fewer are not looked for.
        found = {"dram": len(chunks[0])} if len(chunks[0]) >= block_tokens else {}
        self._turn(self._prefix, "dram", chunks, found, first_token, recompute_s)
        for tier in self._config.blend_tiers:
            reuse_s: float | None = None
            for way in self._blends:
                ideal_s, load_s = self._ideal(way, chunks)
                if tier != "dram":
                    way.push_out(chunks)
                    block_bytes = kv_layout(way.engine.model, way.engine.config).block_bytes
                    bring = warm_up_files if tier == "ssd_warm" else cool_down_files
                    bring(way.directory, block_bytes)
                wanted = {"dram" if tier == "dram" else "ssd": sum(map(len, chunks))}
                _, ttft_s = self._turn(way, tier, chunks, wanted, first_token, recompute_s)
                reuse_s = ttft_s if reuse_s is None else reuse_s
                self._samples[way, tier].add(
                    ttft_reuse_s=reuse_s, ideal_s=ideal_s, over_ideal=ttft_s / ideal_s, load_alone_s=load_s
                )

    def _turn(
        self,
        way: _Way,
        tier: str | None,
        chunks: Sequence[list[int]],
        wanted: dict[str, int],
        first_token: int | None,
        recompute_s: float | None,
    ) -> tuple[int, float]:
        """A turn of a session that is forgotten then: its token and its TTFT."""
        session = way.engine.session()
        with CompileCounter() as compiles:
            token, ttft_s = send_turn(way.engine, session, self._question, chunks)
        usage = check_source(f"{way.blend.mode} from {tier}", session, len(self._question), wanted)
        session.close()
        way.engine.wait_for_saves()
        recompute_s = ttft_s if recompute_s is None else recompute_s
        self._samples[way, tier].add(
            ttft_s=ttft_s,
            ttft_recompute_s=recompute_s,
            speedup=recompute_s / ttft_s,
            fetch_s=usage.queued_s,
            load_s=usage.load_s,
            load_stall_s=usage.load_stall_s,
            cached_tokens=usage.num_cached_tokens,
            recomputed_tokens=usage.repaired_tokens,
            same_token=first_token in (None, token),
            recompiles=compiles.count,
        )
        return token, ttft_s

    def _ideal(self, way: _Way, chunks: Sequence[list[int]]) -> tuple[float, float]:
        """Seconds of the compute alone, and of the load alone."""
        if way.apart is None:
            raise RuntimeError(f"{way.blend.mode} blends nothing")
        with way.apart.loaded_context(chunks) as context:
            _, ideal_s = way.apart.blend(context, self._question, way.blend.recompute_ratio or 0.0)
        return ideal_s, context.load_s

    def _row(self, way: _Way, tier: str | None, samples: Samples) -> BlendRow:
        blend = way.blend if way.apart is not None else None
        return BlendRow(
            mode=way.blend.mode,
            tier=tier,
            recompute_ratio=None if blend is None else blend.recompute_ratio,
            selection=None if blend is None else blend.selection,
            check_layers=None if blend is None else blend.check_layers,
            num_chunks=len(self._chunks),
            chunk_tokens=len(self._chunks[0]),
            question_tokens=len(self._question),
            cached_tokens=round(samples.median("cached_tokens")),
            recomputed_tokens=round(samples.median("recomputed_tokens")),
            ttft_s=samples.median("ttft_s"),
            ttft_recompute_s=samples.median("ttft_recompute_s"),
            speedup=samples.median("speedup"),
            ttft_reuse_s=samples.median_or_none("ttft_reuse_s"),
            ideal_s=samples.median_or_none("ideal_s"),
            over_ideal=samples.median_or_none("over_ideal"),
            load_alone_s=samples.median_or_none("load_alone_s"),
            fetch_s=samples.median("fetch_s"),
            load_s=samples.median("load_s"),
            load_stall_s=samples.median("load_stall_s"),
            same_token_share=samples.total("same_token") / self._config.repeats,
            repeats=self._config.repeats,
            recompiles=round(samples.total("recompiles")),
            spread={name: samples.spread()[name] for name in _MEDIANS if name in samples.spread()},
        )
