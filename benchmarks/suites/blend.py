"""How much sooner a question is answered behind chunks whose KV is stored, in each way to use that KV.

An engine for each way: `recompute`, `prefix`, and one for each ratio of blending, all of one process and model, each
with the chunks in a store of its own. Every round takes one sample of each way, of the same question behind the same
chunks, which are in another order each round, so that no two rounds begin alike:

    recompute     nothing of the store is used
    prefix        the KV of the first chunk is
    ratio, tier   that of all chunks, which are in DRAM, or on SSD alone: pushed out of DRAM before the turn, and out of
                  the page cache too, or into it
    ratio, ideal  the same compute, past the engine's scheduling, with the chunks' KV on the device already: the tokens
                  that are computed anew, and the question

Each turn is a new session's, of one answer token, that is forgotten then. A turn whose KV came from anywhere else than
it should is an error, not a number.

Not here: loads and computes alone (`apart`), what chunks say (`conversations`), many turns at once
(`suites.blend_throughput`), quality (`ca_jax.launch.evaluate`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from benchmarks import harness
from benchmarks.apart import ApartEngine
from benchmarks.conversations import make_contexts
from benchmarks.disk import scratch_directory, scratch_on_disk
from benchmarks.engines import check_source, cool_down_files, make_engine, send_turn, sized_config, warm_up_files
from benchmarks.figures import Panel
from benchmarks.harness import Row, Run, Sample, Ways
from ca_jax.config import BlendConfig
from ca_jax.engine import Engine
from ca_jax.kv.layout import kv_layout
from ca_jax.storage.config import StoreConfig

TIERS = ("dram", "ssd_warm", "ssd")
"""Where the chunks' KV comes from: DRAM; SSD, with the files in the page cache; SSD, without."""
BASELINES = ("recompute", "prefix")
"""What is served beside blending, see `BlendConfig.mode`: nothing is reused, or the first chunk."""

_SESSIONS = 2  # That are stored at once: the one whose turn runs, and one that is about to be forgotten.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextsConfig(harness.ServingConfig):
    """What the suites share whose turns have a context of chunks."""

    settled: ClassVar = (
        *("max_batch_size", "recompute_if_faster", "blend_mode", "blend_recompute_ratio", "min_recompute_ratio"),
    )

    data: str | None = None
    """File of questions behind texts, or folder of such files; by default chunks are of ShareGPT's conversations."""
    ssd_dir: str | None = None
    """Directory on the disk to measure; by default where temporary files are."""
    ssd_driver: str = StoreConfig.ssd_driver
    """How KV is kept on SSD."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlendBenchConfig(ContextsConfig):
    """How much sooner a turn with a context answers whose chunks are stored. Every pair of sizes is measured."""

    shares: ClassVar = frozenset({"recompute_ratios"})
    choices: ClassVar = {"blend_tiers": TIERS}

    num_chunks: tuple[int, ...] = (6,)
    """Chunks of a context."""
    chunk_tokens: tuple[int, ...] = (512,)
    """Tokens of each chunk."""
    recompute_ratios: tuple[float, ...] = (0.0, 0.15, 0.3, 1.0)
    """Shares of the chunks' tokens that are computed anew. 0, full reuse, is what others are compared with and always
    measured."""
    blend_tiers: tuple[str, ...] = TIERS
    """Where the chunks' KV is, of dram, ssd_warm and ssd; with every ratio a row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlendRow(Row):
    """Time to the first token (TTFT) of a question behind chunks, in one way to use what is stored of them."""

    mode: str
    """See `BlendConfig.mode`. `reuse` is the ratio 0."""
    tier: str | None
    """Where the chunks' KV was, of `TIERS`; None where none is used."""
    recompute_ratio: float | None
    """Share of the chunks' tokens to compute anew; None where chunks are not blended."""
    selection: str | None
    """Which tokens, see `BlendConfig.selection`; None likewise."""
    check_layers: int | None
    """See `BlendConfig.check_layers`; None likewise."""
    num_chunks: int
    chunk_tokens: int
    question_tokens: int
    cached_tokens: int
    """Tokens whose KV was loaded."""
    recomputed_tokens: int
    """Of those, computed anew; of some layers alone, times their share of the layers."""
    ttft_s: float
    """From sending to the first token, as the caller sees it."""
    ttft_recompute_s: float
    """Of the same prompt with nothing reused, in the same rounds."""
    speedup: float
    """The second over the first, median of the rounds' own."""
    ttft_reuse_s: float | None
    """Of full reuse from the same tier; None where no chunk is loaded."""
    ideal_s: float | None
    """The same compute, of what is loaded too, with the chunks' KV on the device before it begins, and nothing saved:
    until its first token is on the host. None where chunks are not blended."""
    over_ideal: float | None
    """`ttft_s` over `ideal_s`, median of the rounds' own."""
    load_alone_s: float | None
    """The same load from DRAM to the device, while nothing is computed. None likewise."""
    fetch_s: float
    """Of the TTFT, seconds until prefill began: those from SSD to DRAM, where chunks are there."""
    load_s: float
    """Of the TTFT, seconds in which KV was being copied to the device; they overlap compute."""
    load_stall_s: float
    """Of those, seconds in which compute waited for a layer."""
    same_token_share: float
    """Of the rounds, those whose first token is that of recompute."""
    repeats: int


def summarize(rows: Sequence[BlendRow]) -> dict[str, Any]:
    """`speedup_RATIO_TIER` and `over_ideal_RATIO_TIER`, the least and the largest of the sizes; `recompiles` of all."""
    summary: dict[str, Any] = {}
    for row in rows:
        if row.recompute_ratio is None or row.over_ideal is None:
            continue
        name = f"{row.recompute_ratio:g}_{row.tier}"
        summary[f"speedup_{name}"] = min(row.speedup, summary.get(f"speedup_{name}", row.speedup))
        summary[f"over_ideal_{name}"] = max(row.over_ideal, summary.get(f"over_ideal_{name}", 0.0))
    return {**summary, **harness.checks(rows)}


_FIGURE = Panel(
    title="lines across bars: the same compute with nothing to load",
    x="recompute_ratio",
    y=("ttft_s",),
    by="tier",
    mark="ideal_s",
    line="mode",
    label="time to the first token (s)",
)


@harness.suite(BlendBenchConfig, summary=summarize, panels=(_FIGURE,))
def blend(run: Run[BlendBenchConfig]) -> Iterator[BlendRow]:
    """TTFT of a question behind stored chunks, by how much of them is computed anew and where they are."""
    config = run.config
    for num_chunks, chunk_tokens in itertools.product(config.num_chunks, config.chunk_tokens):
        contexts = make_contexts(run.model, num_chunks, chunk_tokens, data=config.data, seed=config.seed)
        run.facts.setdefault("texts", contexts.source)
        chunks, question = [list(chunk) for chunk in contexts.chunks], list(contexts.questions[0])
        with contextlib.ExitStack() as stack:
            scratch = scratch_on_disk if "ssd" in config.blend_tiers else scratch_directory
            directory = stack.enter_context(scratch(config.ssd_dir))
            ways = _ways(stack, run, chunks, question, directory)
            yield from _Bench(run, ways, chunks, question).rows()


@dataclasses.dataclass(frozen=True)
class Way:
    """An engine and how it uses what is stored."""

    blend: BlendConfig
    engine: Engine
    apart: ApartEngine | None
    """Its loads and computes alone, where it blends."""

    def push_out(self, chunks: Sequence[list[int]]) -> None:
        """Has the chunks on SSD alone."""
        with self.engine._lock:
            for chunk in chunks:
                self.engine._kv.store.leave_dram(self.engine._kv.chunks.key(chunk, ""))


def _ways(
    stack: contextlib.ExitStack,
    run: Run[BlendBenchConfig],
    chunks: list[list[int]],
    question: list[int],
    directory: Path,
) -> list[Way]:
    """Engines of all ways, with the chunks in their stores: `BASELINES`, then blends by ascending ratio, from 0 on."""
    config, model, num_context = run.config, run.model, sum(map(len, chunks))
    num_tokens = num_context + len(question) + 1
    # Chunks begin a block each: as many more than their tokens take as there are chunks.
    num_blocks = (1 + _SESSIONS) * (kv_layout(model, config.engine).num_blocks(num_tokens) + max(config.num_chunks))
    sized = dataclasses.replace(
        config.engine,
        context_window=num_tokens + 1,
        max_batch_size=1,
        recompute_if_faster=False,
        store=dataclasses.replace(config.engine.store, ssd_driver=config.ssd_driver),
    )
    blends = [BlendConfig(mode=mode) for mode in BASELINES]
    for ratio in sorted({0.0, *config.recompute_ratios}):
        mode = "blend" if ratio else "reuse"
        blends.append(dataclasses.replace(config.engine.blend, mode=mode, recompute_ratio=ratio))
    ways = []
    for number, blend in enumerate(blends):
        place = None if blend.mode == "recompute" else directory / str(number)
        own = dataclasses.replace(sized, blend=blend)
        own = sized_config(own, model, num_blocks, directory=place, ssd_blocks=2 * num_blocks)
        engine, apart = stack.enter_context(make_engine(model, own)), None
        if blend.mode not in BASELINES:
            apart = ApartEngine(engine, max_history_tokens=num_context)
            stack.callback(apart.close)
        if place is not None:
            engine.precompute(chunks)
            engine.wait_for_saves()
        ways.append(Way(blend, engine, apart))
    return ways


@dataclasses.dataclass(frozen=True)
class _Bench:
    run: Run[BlendBenchConfig]
    ways: Sequence[Way]
    chunks: list[list[int]]
    question: list[int]

    def rows(self) -> Iterator[BlendRow]:
        """A row for each way and tier; ratios are of the rounds."""
        rng, block_tokens = self.run.rng(), self.run.config.engine.store.block_tokens
        recompute, prefix, *blends = self.ways
        cells: dict[str, tuple[Way, str | None]] = {"recompute": (recompute, None), "prefix": (prefix, "dram")}
        for place, way in itertools.product(self.run.config.blend_tiers, blends):
            cells[f"{way.blend.recompute_ratio} {place}"] = (way, place)

        def ways() -> Ways:
            chunks = [self.chunks[index] for index in rng.permutation(len(self.chunks))]
            # Of a chunk shorter than a block nothing is looked for.
            found = {"dram": len(chunks[0])} if len(chunks[0]) >= block_tokens else {}
            turns: dict[str, Callable[[], Sample]] = {
                "recompute": partial(self._turn, recompute, None, chunks, {}),
                "prefix": partial(self._turn, prefix, "dram", chunks, found),
            }
            return turns | {name: partial(self._blended, *cells[name], chunks) for name in list(cells)[2:]}

        rounds = self.run.rounds(ways)
        for each in rounds:
            for name, sample in each.items():
                way, tier = cells[name]
                sample["ttft_recompute_s"] = each["recompute"]["ttft_s"]
                sample["speedup"] = sample["ttft_recompute_s"] / sample["ttft_s"]
                sample["same_token_share"] = float(sample["token"] == each["recompute"]["token"])
                if way.apart is not None:
                    sample["ttft_reuse_s"] = each[f"0.0 {tier}"]["ttft_s"]
        for name, (way, tier) in cells.items():
            yield self._row(way, tier, harness.of_way(rounds, name))

    def _blended(self, way: Way, tier: str | None, chunks: list[list[int]]) -> Sample:
        """A turn over chunks that are brought to their tier, and its load and compute alone."""
        if way.apart is None:
            raise RuntimeError(f"{way.blend.mode} blends nothing")
        with way.apart.loaded_context(chunks) as context:
            _, ideal_s = way.apart.blend(context, self.question, way.blend.recompute_ratio or 0.0)
        if tier != "dram":
            way.push_out(chunks)
            bring = warm_up_files if tier == "ssd_warm" else cool_down_files
            bring(way.engine)
        wanted = {"dram" if tier == "dram" else "ssd": sum(map(len, chunks))}
        sample = self._turn(way, tier, chunks, wanted)
        alone = {"ideal_s": ideal_s, "over_ideal": sample["ttft_s"] / ideal_s, "load_alone_s": context.load_s}
        return {**sample, **alone}

    def _turn(self, way: Way, tier: str | None, chunks: list[list[int]], wanted: dict[str, int]) -> Sample:
        """A turn of a session that is forgotten then."""
        session = way.engine.session()
        token, ttft_s = send_turn(way.engine, session, self.question, chunks)
        usage = check_source(f"{way.blend.mode} from {tier}", session, len(self.question), wanted)
        session.close()
        way.engine.wait_for_saves()
        return {
            "token": token,
            "ttft_s": ttft_s,
            "fetch_s": usage.queued_s,
            "load_s": usage.load_s,
            "load_stall_s": usage.load_stall_s,
            "cached_tokens": usage.num_cached_tokens,
            "recomputed_tokens": usage.repaired_tokens,
        }

    def _row(self, way: Way, tier: str | None, taken: Sequence[Sample]) -> BlendRow:
        blended = {"recompute_ratio": None, "selection": None, "check_layers": None}
        if way.apart is not None:
            blended = {name: getattr(way.blend, name) for name in blended}
        same = sum(sample["same_token_share"] for sample in taken) / len(taken)
        return harness.make_row(
            BlendRow,
            taken,
            mode=way.blend.mode,
            tier=tier,
            **blended,
            num_chunks=len(self.chunks),
            chunk_tokens=len(self.chunks[0]),
            question_tokens=len(self.question),
            same_token_share=same,
            repeats=self.run.config.repeats,
        )
