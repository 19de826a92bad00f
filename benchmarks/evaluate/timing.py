"""Times to the first token behind chunks, by an engine for each way to use their KV: figures 12, 15, 16 and 17.

All engines of a figure's point are open at once and take turns, so that what else the machine does falls on all alike.
Each turn is a new session's, asks for one token, and is forgotten then; chunks are stored before it. A turn that does
not find them is an error, not a number.

Not here: quality (`evaluation.rag`), more tiers, ideals and spreads (`bench --suite=blend`).
Source: CacheBlend (Yao et al., EuroSys 2025), section 7.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from benchmarks.disk import scratch_directory
from benchmarks.engines import make_engine, send_turn, sized_config
from benchmarks.evaluate.comparison import Evaluation
from benchmarks.evaluate.items import RagPrompt, read_prompts
from benchmarks.evaluate.rag import RagConfig, RagRow, run_rag
from benchmarks.evaluate.rag_methods import RECOMPUTE, Method, methods_of
from benchmarks.evaluate.statistics import Interval
from benchmarks.harness import ticked
from benchmarks.paced import PacedLink
from ca_jax.config import BlendConfig, EngineConfig
from ca_jax.engine import Engine
from ca_jax.kv.layout import kv_layout
from ca_jax.launch.texts import EvaluationError
from ca_jax.pretrained import LoadedModel, Progress
from ca_jax.turns.requests import Usage

DRAM, SSD = "dram", "ssd"
"""Storages that are what they are."""

_COPIES = 3  # Of a prompt's KV that a store has room for: its chunks, its session, and one that is being forgotten.
_GB = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedRow:
    """Figures 12, 15, 16 and 17: the time to the first token (TTFT) behind chunks, served by an engine."""

    name: str
    ratio: float | None
    """Of the chunks' tokens that were computed anew, as it was asked for; None where they are not blended."""
    storage: str
    """Where the chunks' KV was: `dram`, `ssd` (its files are likely in the page cache), or a speed in GB/s that loads
    from DRAM are paced to, as if they came layer by layer from a storage so fast."""
    num_chunks: int
    """Of each prompt at most."""
    chunk_tokens: int
    """Of each chunk at most."""
    num_items: int
    context_tokens: float | None = None
    """Of chunks, mean over these; None where nothing was timed. So are the others up to `speedup`."""
    cached_tokens: float | None = None
    """Of them, whose KV came from the store."""
    recomputed_tokens: float | None = None
    """Of these, that were computed anew; of some layers alone, times their share of the layers."""
    ttft_s: float | None = None
    """Median over turns."""
    ttft_quartiles: Interval | None = None
    """Lower and upper one."""
    ttft_recompute_s: float | None = None
    """Median of full recompute, in turns that alternated with these."""
    speedup: float | None = None
    """Median over turns of the TTFT of full recompute over this one's."""
    mean_kl: float | None = None
    """See `RagRow`, over all items; None where quality was not measured, in figures 15 and 17. So are the others."""
    same_top1: float | None = None
    f1: float | None = None
    rouge_l: float | None = None


_Way = tuple[Method, str]
"""A method, and the storage that its chunks are in."""


def run_timing(model: LoadedModel, config: RagConfig, progress: Progress) -> Evaluation:
    """Measures the figure that `config.figure` says, 12, 15, 16 or 17."""
    quality: dict[str, RagRow] = {}
    items: Sequence[dict[str, object]] = []
    if config.figure in (12, 16):
        told = run_rag(model, config, progress)
        quality = {row.name: row for row in told.rows if isinstance(row, RagRow)}
        items = told.items
    rows = [row for sizes in _sizes(config) for row in _timed_rows(model, config, sizes, quality, progress)]
    timed = {row.name for row in rows}
    rows += [_untimed(config, row) for name, row in quality.items() if name not in timed]
    return Evaluation(rows=rows, items=items)


def _sizes(config: RagConfig) -> list[tuple[int, int]]:
    """Numbers of chunks and lengths that are timed, each by itself."""
    chunking = config.chunking
    if config.figure != 15:
        return [(chunking.num_chunks, chunking.chunk_tokens)]
    by_count = [(count, chunking.chunk_tokens) for count in config.chunk_counts]
    by_length = [(chunking.num_chunks, length) for length in config.chunk_lengths]
    return list(dict.fromkeys((*by_count, *by_length)))


def _ways(config: RagConfig) -> list[_Way]:
    """Full recompute once, the others over each storage; prefix caching has its KV in DRAM, as the paper favours it."""
    paced = tuple(f"{speed:g}" for speed in config.storage_gb_s)
    methods = [
        method for method in methods_of(config.blends, config.baselines) if not method.maps and method != RECOMPUTE
    ]
    ways = [(RECOMPUTE, DRAM)]
    for storage in (DRAM, SSD, *paced) if config.figure == 17 else (DRAM,):
        ways += [(method, storage) for method in methods if method.kind != "prefix" or storage == DRAM]
    return ways


def _timed_rows(
    model: LoadedModel, config: RagConfig, size: tuple[int, int], quality: dict[str, RagRow], progress: Progress
) -> list[TimedRow]:
    sizes: dict[str, Any] = dict(zip(("num_chunks", "chunk_tokens"), size, strict=True))
    max_items = min(config.timed_items, config.chunking.max_items or config.timed_items)
    chunking = dataclasses.replace(config.chunking, max_items=max_items, **sizes)
    prompts = read_prompts(model, chunking, answer_tokens=1)
    found: dict[_Way, list[Usage]] = {way: [] for way in _ways(config)}
    rounds = list(itertools.product(range(len(prompts)), range(1 + config.repeats)))
    with contextlib.ExitStack() as stack:
        engines = {way: stack.enter_context(_opened(model, way, prompts, config)) for way in found}
        for number, nth in ticked(progress, f"{size[0]} x {size[1]}", rounds):
            for way, engine in engines.items():
                usage = _turn(engine, way, prompts[number], f"{number}-{nth}")
                if nth:  # The first one compiles.
                    found[way].append(usage)
    base_s = np.array([usage.ttft_s for usage in found[RECOMPUTE, DRAM]])
    context_tokens = float(np.mean([len(prompt.context_ids) - len(prompt.head) for prompt in prompts]))
    rows = []
    for (method, storage), turns in found.items():
        seconds = np.array([usage.ttft_s for usage in turns])
        low, high = np.percentile(seconds, [25, 75])
        rows.append(
            TimedRow(
                name=method.name,
                ratio=method.ratio,
                storage=storage,
                **sizes,
                num_items=len(prompts),
                context_tokens=context_tokens,
                cached_tokens=float(np.mean([usage.num_cached_tokens for usage in turns])),
                recomputed_tokens=float(np.mean([usage.repaired_tokens for usage in turns])),
                ttft_s=float(np.median(seconds)),
                ttft_quartiles=(float(low), float(high)),
                ttft_recompute_s=float(np.median(base_s)),
                speedup=float(np.median(base_s / seconds)),
                **_quality(quality.get(method.name)),
            )
        )
    return rows


def _untimed(config: RagConfig, row: RagRow) -> TimedRow:
    """A row of what has no engine."""
    return TimedRow(
        name=row.name,
        ratio=row.ratio,
        storage=DRAM,
        num_chunks=config.chunking.num_chunks,
        chunk_tokens=config.chunking.chunk_tokens,
        num_items=0,
        **_quality(row),
    )


def _quality(row: RagRow | None) -> dict[str, Any]:
    return {} if row is None else {name: getattr(row, name) for name in ("mean_kl", "same_top1", "f1", "rouge_l")}


@contextlib.contextmanager
def _opened(model: LoadedModel, way: _Way, prompts: Sequence[RagPrompt], config: RagConfig) -> Iterator[Engine]:
    """An engine that serves one way."""
    method, storage = way
    num_tokens = max(len(prompt.context_ids) + len(prompt.question_ids) for prompt in prompts) + 1
    blend = BlendConfig(
        mode=method.kind,
        recompute_ratio=method.ratio,
        check_layers=config.blends.check_layers,
        chunk_head=config.blends.chunk_head,
        selection=method.selection or BlendConfig.selection,  # type: ignore[arg-type]
    )
    window = min(num_tokens + 1, model.config.max_positions)
    engine_config = EngineConfig(context_window=window, max_batch_size=1, recompute_if_faster=False, blend=blend)
    most_chunks = max(len(prompt.chunks) for prompt in prompts)
    num_blocks = _COPIES * (kv_layout(model, engine_config).num_blocks(num_tokens) + most_chunks)
    num_turns = len(prompts) * (1 + config.repeats)  # Each has chunks of its own on SSD.
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(scratch_directory(None)) if storage == SSD else None
        sized = sized_config(
            engine_config, model, num_blocks, directory=directory, ssd_blocks=2 * num_turns * num_blocks
        )
        link = None
        if storage not in (DRAM, SSD):
            link = stack.enter_context(PacedLink(float(storage) * _GB, copies_early=True))
        yield stack.enter_context(make_engine(model, sized, loads=link))


def _turn(engine: Engine, way: _Way, prompt: RagPrompt, nth: str) -> Usage:
    """A turn of a session that is forgotten then, once its chunks are stored.

    What came from SSD is in DRAM afterwards: there each turn is of a tenant of its own, whose chunks are on SSD alone.
    """
    method, storage = way
    tier: Literal["dram", "ssd"] = "ssd" if storage == SSD else "dram"
    tenant = nth if storage == SSD else ""
    if method != RECOMPUTE:
        engine.precompute(prompt.chunks, tenant=tenant, tier=tier)
    engine.wait_for_saves()
    session = engine.session(tenant=tenant)
    send_turn(engine, session, list(prompt.question_ids), prompt.chunks)
    usage = session.usage
    session.close()
    engine.wait_for_saves()
    if usage is None:
        raise RuntimeError(f"a turn of {method.name} has ended and says nothing of what it took")
    if method.fuses:
        wanted = sum(map(len, prompt.chunks))
        if usage.missed_chunks or usage.cached_tokens.get(tier, 0) != wanted:
            raise EvaluationError(
                f"{method.name} from {storage} must find {wanted} tokens of chunks in the store, got "
                f"{usage.cached_tokens}"
            )
    return usage
