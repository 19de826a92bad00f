"""What `ttft` and `throughput` are asked and answer: turns as their callers see them; rows' fields are the JSON's.

Not here: measuring (`bench_ttft`, `bench_throughput`), the other suites (`bench_schema`, `bench_overlap_schema`), the
rest of the JSON (`bench_report`).
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

from ca_jax.config import EngineConfig
from ca_jax.launch.bench_schema import Spread

SERVING_SUITES = ("ttft", "throughput")
"""What can be measured of turns as their callers see them."""
MODES = ("store", "recompute")
"""How `throughput` serves: KV of earlier turns is loaded, or all of a conversation is prefilled at every turn."""
_LEAST_TURN_TOKENS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class TtftBenchConfig:
    """How close a turn over stored history comes to its compute alone.

    Raises:
      ValueError: an empty list, or a number below 1.
    """

    suite: ClassVar[str] = "ttft"

    history_tokens: tuple[int, ...] = (2000,)
    """Tokens whose KV is stored; with `new_tokens` every pair is a row."""
    new_tokens: tuple[int, ...] = (100,)
    """Tokens of the turn over them."""
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    """The engine, but for its sizes and store, which are the longest row's: its DRAM holds that session and no other.
    Histories are always loaded."""
    ssd_dir: str | None = None
    """Where; a directory of its own is made there and removed. None: where temporary files are."""
    repeats: int = 5
    """Samples a median is of."""
    seed: int = 0
    """Of the token ids, which are random: what is computed does not depend on them."""

    def __post_init__(self) -> None:
        for name in ("history_tokens", "new_tokens"):
            value = getattr(self, name)
            if not (value and min(value) >= 1):
                raise ValueError(f"{name} wanted one or more numbers of at least 1, found {list(value)}")
        _check_positive(self, "repeats")

    def cells(self) -> list[tuple[int, int]]:
        """History and new tokens of each row."""
        return list(itertools.product(self.history_tokens, self.new_tokens))

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest row whose KV is stored."""
        return max(self.history_tokens) + max(self.new_tokens)

    def engine_config(self) -> EngineConfig:
        """The engine that has room for the longest row; its SSD is still to be added."""
        return dataclasses.replace(
            self.engine, context_window=self.max_tokens + 1, max_batch_size=1, recompute_if_faster=False
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TtftRow:
    """Time to the first token (TTFT) of the same turn by where its history is, against its load and compute alone."""

    history_tokens: int
    """Tokens whose KV is stored, exactly."""
    new_tokens: int
    """Tokens of the turn."""
    kv_bytes: int
    """Of the history."""
    ttft_dram_s: float
    """From sending to the first token, as the caller sees it, with the history in DRAM."""
    ttft_ssd_s: float
    """The same, with the history on SSD alone, whose files are in the page cache."""
    fetch_ssd_s: float
    """Of that, seconds until prefill began: from SSD to DRAM."""
    compute_s: float
    """The same prefill with its history on the device already, until its first token is on the host."""
    load_s: float
    """The same load from DRAM to the device, while nothing is computed."""
    load_stall_s: float
    """Of `ttft_dram_s`, seconds in which compute waited for a layer."""
    ratio_dram: float
    """`ttft_dram_s` over `compute_s`: the median of the rounds' own ratios, as the next two."""
    ratio_ssd: float
    """`ttft_ssd_s` over `compute_s`."""
    ratio_ideal: float
    """`ttft_dram_s` over the larger of `load_s` and `compute_s`, which no overlap beats."""
    same_tokens: bool
    """Whether all ways gave the same first token in every round."""
    recompiles: int
    """Functions compiled while sampling; 0 unless the warm-up missed one."""
    spread: Spread
    """See `Spread`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TtftResult:
    """What `ttft` has to say."""

    rows: list[TtftRow]
    """One for each pair of lengths."""
    summary: dict[str, Any]
    """See `bench_ttft.summarize_ttft`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThroughputBenchConfig:
    """How many turns a minute a continuous batch of conversations completes, with the store and without.

    Raises:
      ValueError: a number below 1, answers of one token, or a window that the conversations do not fit in.
    """

    suite: ClassVar[str] = "throughput"

    concurrent_sessions: int = 8
    """Conversations that go on together; each sends its next message as soon as its answer has ended."""
    num_turns: int = 8
    """Turns of each conversation."""
    answer_tokens: int = 64
    """Most tokens generated for an answer. Each has as many as were recorded, up to this, so that both ways do the same
    work; the rest of a longer one is prefilled with the next message."""
    context_window: int = 2048
    """Most tokens of a conversation; longer ones are not taken."""
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    """The engine, but for its window and store."""
    repeats: int = 3
    """Rounds a median is of; in each, all conversations are served once in both ways."""
    seed: int = 0
    """Of the messages where they are random."""

    def __post_init__(self) -> None:
        _check_positive(self, "concurrent_sessions", "num_turns", "context_window", "repeats")
        if self.answer_tokens < 2:
            raise ValueError(
                f"answer_tokens wanted at least 2, to have a time between them, found {self.answer_tokens}"
            )
        if self.turn_tokens < _LEAST_TURN_TOKENS:
            raise ValueError(
                f"context_window wanted room for {self.num_turns} turns of at least {_LEAST_TURN_TOKENS} tokens, found "
                f"{self.context_window}"
            )

    @property
    def turn_tokens(self) -> int:
        """Tokens of a turn, answer included, where all are alike and fill the window."""
        return (self.context_window - 1) // self.num_turns


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThroughputRow:
    """All conversations served in one way; numbers are of a round, medians of the rounds'."""

    mode: str
    """One of `MODES`."""
    concurrent_sessions: int
    """Conversations."""
    turns: int
    """Of all of them."""
    turns_per_minute: float
    """Completed, from the first message sent to the last answer ended."""
    prompt_tokens: int
    """Of all turns, history and new ones."""
    prefill_tokens: int
    """Of those, computed."""
    hit_share: float
    """Of the history tokens of all turns, those whose KV was loaded. Each answer's last token never is: nothing was
    computed from it."""
    ttft_p50_s: float
    """From sending to the first token, median of the turns."""
    ttft_p99_s: float
    """Of a hundred turns one waits longer."""
    tpot_p50_s: float
    """Between two tokens of an answer, median of all such times."""
    tpot_p99_s: float
    """Of a hundred such times one is longer."""
    recompiles: int
    """Functions compiled in the measured rounds; 0 unless the warm-up missed one."""
    spread: Spread
    """See `Spread`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThroughputResult:
    """What `throughput` has to say."""

    rows: list[ThroughputRow]
    """One for each of `MODES`."""
    summary: dict[str, Any]
    """See `bench_throughput.run_throughput_suite`."""


def _check_positive(config: object, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} wanted at least 1, found {getattr(config, name)}")
