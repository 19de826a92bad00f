"""What `blend` and `blend_throughput` are asked and answer: turns behind chunks; rows' fields are the JSON's.

Not here: measuring (`bench_blend`, `bench_blend_throughput`), what chunks say (`bench_blend_texts`), quality
(`evaluate`), the other suites (`bench_schema`, `bench_serving_schema`), the rest of the JSON (`bench_report`).
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

from ca_jax.config import BLEND_MODES, EngineConfig
from ca_jax.launch.bench_schema import Spread
from ca_jax.storage.config import StoreConfig

BLEND_SUITES = ("blend", "blend_throughput")
"""What can be measured of turns with a context of chunks."""
TIERS = ("dram", "ssd_warm", "ssd")
"""Where `blend` has the chunks' KV come from: DRAM; SSD, with the files in the page cache; SSD, without."""
BASELINES = ("recompute", "prefix")
"""What `blend` serves beside blending, see `BlendConfig.mode`: nothing is reused, or the first chunk."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlendBenchConfig:
    """How much sooner a turn with a context answers whose chunks are stored.

    Raises:
      ValueError: nothing to measure, a tier that there is not, or a number outside its range.
    """

    suite: ClassVar[str] = "blend"

    num_chunks: tuple[int, ...] = (6,)
    """Chunks of a context; with `chunk_tokens` every pair is measured."""
    chunk_tokens: tuple[int, ...] = (512,)
    """Tokens of each chunk."""
    recompute_ratios: tuple[float, ...] = (0.0, 0.15, 0.3, 1.0)
    """Shares of the chunks' tokens that are computed anew. 0, full reuse, is what others are compared with and always
    measured."""
    blend_tiers: tuple[str, ...] = TIERS
    """Where the chunks' KV is, of `TIERS`; with `recompute_ratios` every pair is a row."""
    data: str | None = None
    """A file or folder of questions behind texts, see `evaluation.rag_items`; None: conversations of ShareGPT."""
    ssd_dir: str | None = None
    """Where; a directory of its own is made there and removed. None: where temporary files are."""
    ssd_driver: str = StoreConfig.ssd_driver
    """How KV is kept on SSD, see `StoreConfig`."""
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    """The engines, but for mode and ratio of blending, sizes and store. Its selection and check layers are measured."""
    repeats: int = 5
    """Samples a median is of."""
    seed: int = 0
    """Of the order of chunks, which is another one in each round."""

    def __post_init__(self) -> None:
        for name in ("num_chunks", "chunk_tokens"):
            value = getattr(self, name)
            if not (value and min(value) >= 1):
                raise ValueError(f"{name} wanted one or more numbers of at least 1, found {list(value)}")
        if not (self.recompute_ratios and all(0 <= ratio <= 1 for ratio in self.recompute_ratios)):
            raise ValueError(f"recompute_ratios wanted one or more shares in [0, 1], found {self.recompute_ratios}")
        if not self.blend_tiers or not set(self.blend_tiers) <= set(TIERS):
            raise ValueError(f"blend_tiers wanted some of {', '.join(TIERS)}; found {', '.join(self.blend_tiers)}")
        _check_positive(self, "repeats")

    def cells(self) -> list[tuple[int, int]]:
        """Chunks and tokens of each that are measured together."""
        return list(itertools.product(self.num_chunks, self.chunk_tokens))

    @property
    def ratios(self) -> tuple[float, ...]:
        """Those that are measured, ascending."""
        return tuple(sorted({0.0, *self.recompute_ratios}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlendRow:
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
    """Of the context."""
    chunk_tokens: int
    """Of each."""
    question_tokens: int
    """Behind them."""
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
    """Rounds."""
    recompiles: int
    """Functions compiled while sampling; 0 unless the first round, which is for nothing, missed one."""
    spread: Spread
    """See `Spread`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlendResult:
    """What `blend` has to say."""

    rows: list[BlendRow]
    """One for each way and size."""
    summary: dict[str, Any]
    """See `bench_blend.summarize_blend`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlendThroughputBenchConfig:
    """How many turns a second are served whose chunks come again, with a store that is smaller than all chunks.

    Raises:
      ValueError: an empty list, a mode that there is not, or a number outside its range.
    """

    suite: ClassVar[str] = "blend_throughput"

    stream_modes: tuple[str, ...] = BLEND_MODES
    """Ways to use what is stored, see `BlendConfig.mode`; each a row for each store."""
    stream_ratio: float = 0.15
    """Share of the chunks' tokens that `blend` computes anew."""
    stream_chunks: int = 120
    """Chunks that turns draw from."""
    context_chunks: int = 6
    """Chunks of a turn, all different, in the order they were drawn in."""
    context_chunk_tokens: int = 512
    """Tokens of each."""
    zipf_exponent: float = 1.0
    """How much oftener some chunks are drawn: the n-th in proportion to `n ** -zipf_exponent`."""
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
    data: str | None = None
    """See `BlendBenchConfig`."""
    ssd_dir: str | None = None
    """See `BlendBenchConfig`."""
    ssd_driver: str = StoreConfig.ssd_driver
    """See `BlendBenchConfig`."""
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    """The engines, but for mode and ratio of blending, window, slots and store."""
    repeats: int = 3
    """Rounds a median is of."""
    seed: int = 0
    """Of what is drawn."""

    def __post_init__(self) -> None:
        if not self.stream_modes or not set(self.stream_modes) <= set(BLEND_MODES):
            raise ValueError(
                f"stream_modes wanted some of {', '.join(BLEND_MODES)}; found {', '.join(self.stream_modes)}"
            )
        if not 0 <= self.stream_ratio <= 1:
            raise ValueError(f"stream_ratio wanted a share in [0, 1], found {self.stream_ratio}")
        if not self.zipf_exponent >= 0:
            raise ValueError(f"zipf_exponent wanted at least 0, found {self.zipf_exponent}")
        if not (self.ssd_shares and min(*self.ssd_shares, self.dram_share) > 0):
            raise ValueError(
                f"dram_share and ssd_shares wanted shares above 0, found {self.dram_share} and {self.ssd_shares}"
            )
        _check_positive(self, "context_chunks", "context_chunk_tokens", "context_answer_tokens")
        _check_positive(self, "concurrent_turns", "round_turns", "fill_turns", "repeats")
        if self.stream_chunks < self.context_chunks:
            raise ValueError(
                f"stream_chunks wanted at least the {self.context_chunks} of a context, found {self.stream_chunks}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlendThroughputRow:
    """The same stream of turns served in one way, with one size of the store; numbers are medians of the rounds."""

    mode: str
    """See `BlendConfig.mode`."""
    recompute_ratio: float | None
    """Of `blend`; None of others."""
    selection: str | None
    """Likewise."""
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
    """Tokens that were computed, chunks computed alone and answers' prompts, over the tokens of all prompts; of some
    layers alone, times their share of the layers."""
    ssd_turn_share: float
    """Of the turns, those that waited for KV from SSD."""
    ttft_p50_s: float
    """From sending to the first token, median of the turns."""
    ttft_p95_s: float
    """Of twenty turns one waits longer."""
    recompiles: int
    """Functions compiled in the measured rounds."""
    spread: Spread
    """See `Spread`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlendThroughputResult:
    """What `blend_throughput` has to say."""

    rows: list[BlendThroughputRow]
    """One for each mode and size of the store."""
    summary: dict[str, Any]
    """See `bench_blend_throughput.summarize_stream`."""


def _check_positive(config: object, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} wanted at least 1, found {getattr(config, name)}")
