"""What the benchmark is asked of an engine and what it answers: `BenchConfig`, and rows, whose fields are the JSON's.

What all suites share, samples and the error, is here too.

Not here: the suites that make their engines themselves (`bench_serving_schema`, `bench_overlap_schema`) or need none
(`bench_storage_schema`), measuring (`bench_suites`, `bench_tiers`), the rest of the JSON (`bench_report`).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics

from ca_jax.config import EngineConfig
from ca_jax.errors import CaJaxError
from ca_jax.storage.config import StoreConfig

PEER_SUITES = ("reuse", "prefill", "decode")
"""What can be measured of an engine and of a peer beside it."""
ENGINE_SUITES = (*PEER_SUITES, "tiers")
"""What can be measured of one engine."""
SOURCES = ("dram", "ssd_warm", "ssd", "ssd_restart", "recompute")
"""Where `tiers` has a turn's history come from: DRAM; SSD, with the files in the page cache; SSD, without; the same, by
a new engine over the same directory; nowhere."""
SETTLING_STEPS = 4
"""Decode steps before the first sample, so that the last prefill's KV is in its slot."""

Spread = dict[str, tuple[float, float]]
"""Least and largest sample, by the name of the field that has their median."""


class BenchError(CaJaxError):
    """What was to be measured did not do what a row would claim, or cannot be had, so that there is no row."""


class Samples:
    """Samples by name; a name without samples has no median."""

    def __init__(self) -> None:
        self._samples: dict[str, list[float]] = collections.defaultdict(list)

    def add(self, **samples: float) -> None:
        """Adds one sample to each name."""
        for name, sample in samples.items():
            self._samples[name].append(sample)

    def median(self, name: str) -> float:
        """The median of a name's samples."""
        return statistics.median(self._samples[name])

    def median_or_none(self, name: str) -> float | None:
        """Likewise; None where there are none."""
        return self.median(name) if name in self._samples else None

    def total(self, name: str) -> float:
        """The sum of a name's samples."""
        return sum(self._samples[name])

    def spread(self) -> Spread:
        """Least and largest of each name."""
        return {name: (min(samples), max(samples)) for name, samples in self._samples.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to measure of an engine.

    Raises:
      ValueError: an unknown suite, an empty list, or a number below 1.
    """

    suite: str
    """One of `ENGINE_SUITES`."""
    history_tokens: tuple[int, ...] = (2000,)
    """`reuse`, `tiers`: tokens whose KV is stored; with `new_tokens` every pair is a row."""
    new_tokens: tuple[int, ...] = (100,)
    """`reuse`, `tiers`: tokens of the turn over them."""
    prefill_tokens: tuple[int, ...] = (1024,)
    """`prefill`: tokens of the prompts."""
    batch_sizes: tuple[int, ...] = (1, 8)
    """`decode`: sessions that decode together; with `context_tokens` every pair is a row."""
    context_tokens: tuple[int, ...] = (1000,)
    """`decode`: tokens of each session before it decodes."""
    decode_steps: int = 16
    """`decode`: steps in one sample."""
    repeats: int = 5
    """Samples a median is of."""
    dtype: str | None = None
    """Of weights and KV; None as for `EngineConfig`."""
    dram_gib: float = StoreConfig.dram_gib
    """Cap of the DRAM tier, GiB; `reuse` needs room for the longest history with its new tokens. `tiers` takes just
    that, whatever is said here, since a session must push another one out."""
    ssd_dir: str | None = None
    """`tiers`: where; a directory of its own is made there and removed. None: where temporary files are."""
    ssd_driver: str = StoreConfig.ssd_driver
    """`tiers`: how KV is kept on SSD, see `StoreConfig`."""
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    """The engine, but for dtype, sizes and store, which are said here or are the longest row's. Stored histories are
    always loaded."""
    seed: int = 0
    """Of the token ids, which are random: what is computed does not depend on them."""

    def __post_init__(self) -> None:
        if self.suite not in ENGINE_SUITES:
            raise ValueError(f"suite wanted one of {', '.join(ENGINE_SUITES)}, found {self.suite!r}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple) and not (value and min(value) >= 1):
                raise ValueError(f"{field.name} wanted one or more numbers of at least 1, found {list(value)}")
        for name in ("decode_steps", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} wanted at least 1, found {getattr(self, name)}")

    def cells(self) -> list[tuple[int, ...]]:
        """What the rows differ in, a tuple a row: the cross product of the suite's lists."""
        if self.suite == "prefill":
            return [(num_tokens,) for num_tokens in self.prefill_tokens]
        if self.suite == "decode":
            return list(itertools.product(self.batch_sizes, self.context_tokens))
        return list(itertools.product(self.history_tokens, self.new_tokens))

    @property
    def max_answer_tokens(self) -> int:
        """`decode`: tokens the longest answer may grow to, the steps in which other sessions are prefilled included."""
        return 1 + max(self.batch_sizes) + SETTLING_STEPS + (1 + self.repeats) * self.decode_steps

    def engine_config(self) -> EngineConfig:
        """The engine that has room for the suite's longest row and largest batch.

        `tiers` adds its SSD (`bench_tiers.tiers_engine_config`).
        """
        longest = {
            "reuse": max(self.history_tokens) + max(self.new_tokens) + 1,
            "prefill": max(self.prefill_tokens) + 1,
            "decode": max(self.context_tokens) + self.max_answer_tokens + 1,
            "tiers": max(self.history_tokens) + max(self.new_tokens) + 1,
        }[self.suite]
        return dataclasses.replace(
            self.engine,
            dtype=self.dtype,
            context_window=longest,
            max_batch_size=max(self.batch_sizes) if self.suite == "decode" else 1,
            recompute_if_faster=False,
            store=StoreConfig(dram_gib=self.dram_gib, ssd_driver=self.ssd_driver),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReuseRow:
    """Time to the first token (TTFT) of a turn whose history is stored, against computing it all again."""

    history_tokens: int
    """Tokens whose KV the store holds, exactly."""
    new_tokens: int
    """Tokens of the turn."""
    ttft_recompute_s: float
    """Of the same turn with nothing stored, as the caller sees it: from sending to the first token."""
    ttft_reuse_s: float
    """Of the turn over its stored history."""
    ttft_peer_recompute_s: float | None
    """Of the peer, all tokens from scratch; None without a peer."""
    speedup: float
    """The faster recompute, ours or the peer's, over the reuse."""
    load_s: float
    """Of the reuse, seconds in which KV was being copied from the store; they overlap compute."""
    load_share: float
    """`load_s` as a share of the reuse TTFT, median of the samples' shares."""
    load_stall_s: float
    """Of the reuse, seconds in which compute waited for KV."""
    same_tokens: bool
    """Whether reuse, recompute and the peer drew the same first token in every sample."""
    recompiles: int
    """Functions compiled while sampling; 0 unless the warm-up missed one."""
    spread: Spread
    """See `Spread`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillRow:
    """A prompt computed from scratch, to its first token."""

    tokens: int
    """Of the prompt."""
    prefill_s: float
    """Until the first token."""
    tokens_per_s: float
    """Prompt tokens over `prefill_s`."""
    peer_prefill_s: float | None
    """Of the peer; None without one."""
    peer_tokens_per_s: float | None
    """Of the peer."""
    ratio: float | None
    """Our tokens per second over the peer's."""
    same_tokens: bool
    """Whether ours and the peer's first tokens were the same in every sample."""
    recompiles: int
    """See `ReuseRow`."""
    spread: Spread
    """See `Spread`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeRow:
    """Sessions that all decode, their KV being saved as they do."""

    batch_size: int
    """How many."""
    context_tokens: int
    """Of each when it begins to decode; samples follow one another, so that contexts grow by their steps."""
    tokens_per_s: float
    """Of all sessions together."""
    tokens_per_s_per_slot: float
    """Of one session."""
    peer_tokens_per_s: float | None
    """Of the peer with the same batch and contexts; None without one."""
    speedup_vs_peer: float | None
    """Our tokens per second over the peer's."""
    recompiles: int
    """See `ReuseRow`."""
    spread: Spread
    """See `Spread`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceTimes:
    """What a turn took whose history came from one source."""

    ttft_s: float
    """From sending to the first token, as the caller sees it."""
    speedup: float
    """Recompute's TTFT over this one."""
    fetch_s: float
    """Of those, seconds until prefill began, which are spent waiting for SSD where the history is there."""
    load_s: float
    """Seconds in which KV was being copied from DRAM; they overlap compute."""
    load_stall_s: float
    """Seconds in which compute waited for such a copy."""
    cached_tokens: dict[str, int]
    """History tokens whose KV was loaded, by the tier they were in: the same in every sample."""
    spread: Spread
    """See `Spread`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiersRow:
    """TTFT of the same turn by where its history's KV is."""

    history_tokens: int
    """Tokens whose KV is stored, exactly."""
    new_tokens: int
    """Tokens of the turn."""
    ssd_driver: str
    """See `StoreConfig`. `raw` reads past the page cache, where the disk allows it: warm and cold are one then."""
    kv_bytes: int
    """What a fetch brings: the blocks of the history."""
    sources: dict[str, SourceTimes]
    """By the names in `SOURCES`."""
    same_tokens: bool
    """Whether all sources gave the same first token in every round."""
    recompiles: int
    """Functions compiled in the measured turns; 0 unless the first round, which is for nothing, missed one."""


Row = ReuseRow | PrefillRow | DecodeRow | TiersRow


@dataclasses.dataclass(frozen=True, kw_only=True)
class Startup:
    """What came before the first sample."""

    other_load_share: float | None
    """Share of the machine's CPU time that went to something else just before; None where that is not known."""
    model_load_s: float
    """Of reading the model, or of making its random weights."""
    engine_start_s: float | None
    """Until the engine took turns, the model's loading included; None where a suite has several engines."""
    first_touch_s: float | None
    """Of making host memory resident; in the background, from the engine's start on. None likewise."""
    compile_s: float
    """Of compiling, or of reading from the compile cache, in the whole run."""
    compiles: int
    """Functions compiled, or read from the compile cache, in the whole run."""
