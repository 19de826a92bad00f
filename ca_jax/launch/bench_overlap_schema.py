"""What `preload` and `save`, the suites of overlap, are asked and answer; rows' fields are the JSON's.

Not here: measuring (`bench_preload`, `bench_save`), what samples come to (`bench_overlap_rows`), the other suites
(`bench_schema`, `bench_serving_schema`), the rest of the JSON (`bench_report`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from ca_jax.config import EngineConfig
from ca_jax.launch.bench_schema import Spread

OVERLAP_SUITES = ("preload", "save")
"""What can be measured of engines that load and save beside what they compute."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreloadBenchConfig:
    """How much of a load layer-wise pre-loading hides, at real speed and at set ones.

    `off` (all is loaded, then computed) and `all` (layers in the read buffer) are always measured; at set speeds, where
    the engine has rates, `auto` too.

    Raises:
      ValueError: nothing to measure, a history that leaves no new tokens, a depth below 0, or another number that is
        not positive.
    """

    suite: ClassVar[str] = "preload"

    preload_prompt_tokens: int = 1000
    """At real speed: tokens of history and turn together. As in the paper's section 4.3.1."""
    preload_history_tokens: tuple[int, ...] = (500, 600, 700, 800, 900)
    """At real speed: tokens of those whose KV is stored, a cell each; none leaves this part out."""
    preload_read_buffers: tuple[int, ...] = (0, 15)
    """At real speed: layers of the read buffer."""
    paced_history_tokens: int = 2000
    """At set speeds: tokens whose KV is stored."""
    paced_new_tokens: int = 100
    """At set speeds: tokens of the turn over them."""
    load_ratios: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    """At set speeds: the load of the history over the compute of the turn, a cell each; none leaves this part out."""
    read_buffers: tuple[int, ...] = (0, 1, 5, 15)
    """At set speeds: layers of the read buffer."""
    ahead_tokens: int = 512
    """Tokens of the job before, which has no history: its prefill is the head start that read buffers are filled in."""
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    """The engine, but for its sizes, store and read buffer, which are the row's. Histories are always loaded."""
    repeats: int = 5
    """Samples a median is of."""
    seed: int = 0
    """Of the token ids, which are random: what is computed does not depend on them."""

    def __post_init__(self) -> None:
        sizes = ("preload_prompt_tokens", "paced_history_tokens", "paced_new_tokens", "ahead_tokens", "repeats")
        _check_positive(self, *sizes)
        if not (self.preload_history_tokens or self.load_ratios):
            raise ValueError("wanted preload_history_tokens or load_ratios to measure, found none of both")
        _check_each_positive(self, "preload_history_tokens", "load_ratios")
        if max(self.preload_history_tokens, default=0) >= self.preload_prompt_tokens:
            raise ValueError(
                f"preload_history_tokens wanted fewer than the {self.preload_prompt_tokens} preload_prompt_tokens, "
                f"found {list(self.preload_history_tokens)}"
            )
        for name in ("preload_read_buffers", "read_buffers"):
            depths = getattr(self, name)
            if min(depths, default=0) < 0:
                raise ValueError(f"{name} wanted numbers of layers of at least 0, found {list(depths)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreloadRow:
    """The same turn behind the same other job, its history loaded in one way; times are from that job's end on."""

    measured: str = "preload_turn"
    link: str
    """`real`: DRAM to device as it is. `paced`: a link of a set speed that takes no CPU but for the copies."""
    load_ratio: float | None
    """`paced`: the load over the compute, as asked for."""
    history_tokens: int
    """Tokens whose KV is stored."""
    new_tokens: int
    """Tokens of the turn over them."""
    read_buffer: str
    """Its layers, `all`, `auto` (as many as the engine chose), `off` (all is loaded, then computed), or `recompute`
    (nothing is stored)."""
    ttft_s: float
    """From the end of the job before to the first token."""
    ideal_s: float | None
    """What that would be were there no cost but `load_s` and `compute_s`, see `costs.pipeline_s`, `costs.blocking_s`;
    of `auto`, with the best depth. None for `recompute`."""
    ratio: float | None
    """`ttft_s` over the ideal with the compute and the head start of the same round: the median of the rounds' own."""
    hidden: float | None
    """The fraction of the blocking load that is hidden: `1 - (ttft_s - compute_s) / (off - compute_s)`, with the
    `ttft_s` of `off`. None for `recompute`, and where blocking took no longer than computing alone."""
    compute_s: float
    """`ttft_s` of the same turn whose history was on the device before: by an endless link, with all layers in the read
    buffer. Of `real` that is the `all` row, whose load has the head start to end in."""
    load_s: float
    """Of all layers: of `paced` as set, of `real` as `off` measured it."""
    load_stall_s: float
    """Seconds in which compute waited for a load."""
    head_start_s: float
    """From the start to the end of the job before, all of which this one waited for."""
    same_tokens: bool
    """Whether the cell's ways drew the same first tokens, in both jobs and every round."""
    recompiles: int
    """Functions compiled while the cell was sampled; 0 unless the warm round missed one."""
    spread: Spread
    """See `Spread`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthRow:
    """How deep the read buffer should be for one speed of the link: by measured rates, by arithmetic, and by trial."""

    measured: str = "read_buffer"
    load_ratio: float
    """See `PreloadRow`."""
    by_rates: int
    """Layers by `costs.read_buffer_layers`, at least 1, from rates of the engine's warm-up and its turns since."""
    best: int
    """Layers by `costs.best_depth`, from this run's load and compute."""
    measured_best: int
    """The shallowest of the measured depths that is as fast as the fastest, within `noise`."""
    noise: float
    """The share of the time within which two count as the same."""
    rates_load_s: float
    """The load that the engine's rates predict; `load_s` is what it is."""
    load_s: float
    """See `PreloadRow`."""
    rates_compute_s: float
    """The prefill that the engine's rates predict; `compute_s` is what it took, all around it included."""
    compute_s: float
    """See `PreloadRow`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreloadResult:
    """What `preload` has to say."""

    rows: list[PreloadRow | DepthRow]
    """In the order they were measured."""
    summary: dict[str, Any]
    """See `bench_overlap_rows.summarize_preload`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveBenchConfig:
    """What saving adds to a turn, and how much of a slow save is hidden.

    Raises:
      ValueError: nothing to measure, or a number that is not positive.
    """

    suite: ClassVar[str] = "save"

    save_prompt_tokens: tuple[int, ...] = (1000, 1300, 1600)
    """At real speed: tokens of the prompts, a row each; none leaves this part out. As in the paper's section 4.3.2."""
    save_answer_tokens: int = 20
    """Tokens of every answer. As in the paper's section 4.3.2."""
    paced_prompt_tokens: int = 1000
    """At set speeds: tokens of the prompt."""
    save_ratios: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    """At set speeds: the save of the prompt over the turn without a store, a row each; none leaves this part out."""
    stream_prompt_tokens: int = 500
    """In the stream of single turns: tokens of the prompts."""
    stream_turns: int = 6
    """In the stream of single turns: turns of one sample, each of a session of its own; 0 leaves this part out."""
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    """The engine, but for its sizes, store and when it saves, which are the row's."""
    repeats: int = 5
    """Samples a median is of."""
    seed: int = 0
    """Of the token ids, which are random: what is computed does not depend on them."""

    def __post_init__(self) -> None:
        _check_positive(self, "save_answer_tokens", "paced_prompt_tokens", "stream_prompt_tokens", "repeats")
        if self.stream_turns < 0:
            raise ValueError(f"stream_turns wanted at least 0, found {self.stream_turns}")
        if not (self.save_prompt_tokens or self.save_ratios or self.stream_turns):
            raise ValueError("wanted save_prompt_tokens, save_ratios or stream_turns to measure, found none of them")
        _check_each_positive(self, "save_prompt_tokens", "save_ratios")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveRow:
    """The same turn without a store, with saves beside it, and with a save at its end that it waits for."""

    measured: str = "save_turn"
    link: str
    """See `PreloadRow`; device to DRAM here."""
    save_ratio: float | None
    """`paced`: the save of the prompt over the turn, as asked for."""
    prompt_tokens: int
    """Of the turn, all new."""
    answer_tokens: int
    """Decoded, the first included."""
    turn_off_s: float
    """Without a store: from sending to the end of the answer, as the caller sees it. What is put off until after that
    does not count, of none of the three."""
    turn_async_s: float
    """With saves beside it."""
    turn_blocking_s: float
    """With a save at its end."""
    async_overhead: float
    """`turn_async_s` over `turn_off_s`, minus 1: the median of the rounds' own."""
    blocking_overhead: float
    """Likewise of `turn_blocking_s`."""
    async_gain: float
    """By how much saving beside the turn shortens it against saving at its end, as a share of that; likewise."""
    hidden: float | None
    """The fraction of the blocking save that is hidden: `1 - (async - off) / (blocking - off)`, of the medians; None
    where the blocking one took no longer than none."""
    save_s: float | None
    """`paced`: what the link takes for the KV of prompt and answer."""
    same_tokens: bool
    """Whether all three gave the same answer in every round."""
    recompiles: int
    """See `PreloadRow`."""
    spread: Spread
    """See `Spread`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamRow:
    """Single turns one behind the other, nothing of which ever comes back, with the store on and off."""

    measured: str = "stream"
    prompt_tokens: int
    """Of each turn."""
    answer_tokens: int
    """Of each turn."""
    num_turns: int
    """In one sample."""
    stream_off_s: float
    """Of all turns, without a store."""
    stream_on_s: float
    """Of all turns with the store, and until everything is in it."""
    overhead: float
    """`stream_on_s` over `stream_off_s`, minus 1: the median of the rounds' own."""
    same_tokens: bool
    """Whether both gave the same answers in every round."""
    recompiles: int
    """See `PreloadRow`."""
    spread: Spread
    """See `Spread`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveResult:
    """What `save` has to say."""

    rows: list[SaveRow | StreamRow]
    """In the order they were measured."""
    summary: dict[str, Any]
    """See `bench_overlap_rows.summarize_save`."""


def _check_positive(config: object, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} wanted at least 1, found {getattr(config, name)}")


def _check_each_positive(config: object, *names: str) -> None:
    for name in names:
        values = getattr(config, name)
        if not all(0 < value < math.inf for value in values):
            raise ValueError(f"{name} wanted positive numbers, found {list(values)}")
