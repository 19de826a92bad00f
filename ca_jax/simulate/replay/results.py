"""What is kept of serving a workload, of each turn, of moments in between and in all; and what follows from it.

A hit counts turns: one of whose history something was loaded. `loaded_tokens` over `history_tokens` counts tokens.

Not here: serving (serving), tables and plots (`ca_jax.launch`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from ca_jax.simulate.fitted import DecodeSample

Totals = dict[str, float]
"""What the engine and its store have done since the warm-up: `EngineMetrics`, `StoreStats` and `SsdStats` by the names
in `serving`, and `elapsed_s`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedTurn:
    """One turn that has ended. Times are seconds; `due_s` and `started_s` since the replay began."""

    session: int
    """The conversation's place in the workload."""
    turn: int
    due_s: float
    """When it came."""
    started_s: float
    ttft_s: float
    """From when it came to its first token."""
    latency_s: float
    """From when it came to its last token."""
    prefill_s: float
    """Its prefill's passes, waiting for loads included."""
    load_stall_s: float
    """Of that, waiting for loads."""
    decode_s: float
    """From its first token to its last."""
    history_tokens: int
    """Of the conversation before it, without what left as the window was full."""
    message_tokens: int
    answer_tokens: int
    cached_tokens: int
    tier: str
    """Where that was when the turn was queued, `dram` or `ssd`."""
    dropped_tokens: int
    """Tokens of the conversation that left in this turn or an earlier one."""
    is_counted: bool
    """Whether it came after the warm-up."""

    @property
    def loaded_tokens(self) -> int:
        """Tokens of its history whose KV was loaded; more may be loaded that another conversation began with."""
        return min(self.cached_tokens, self.history_tokens)

    @property
    def prefill_tokens(self) -> int:
        """Tokens that were prefilled."""
        return self.history_tokens + self.message_tokens - self.cached_tokens

    @property
    def tpot_s(self) -> float:
        """Mean time between its tokens; answers have two or more."""
        return self.decode_s / max(self.answer_tokens - 1, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """What the engine was doing at one moment."""

    time_s: float
    ended: int
    running: int
    waiting: int
    returning: int
    """Turns that have begun and had a history."""
    hits: int
    """Of those, the ones whose history was loaded, in part at least."""
    output_tokens: int
    prompt_tokens: int
    """Histories and messages of these."""
    dram_share: float
    """Share of the DRAM tier in use."""
    ssd_share: float
    """Share of the SSD tier in use; 0 where there is none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """A workload, served."""

    turns: tuple[ServedTurn, ...]
    """In the order in which their prefills began."""
    answers: dict[tuple[int, int], tuple[int, ...]]
    """What was generated, by conversation and turn."""
    samples: tuple[Sample, ...]
    """Taken now and then."""
    decode_samples: tuple[DecodeSample, ...]
    """Decode steps without a prefill pass in the same engine step."""
    totals: Totals
    """After the warm-up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """How a quantity is distributed over turns."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of these values, one at least."""
        values = list(values)
        p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
        return cls(mean=float(np.mean(values)), p50=p50, p90=p90, p99=p99)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """A run, but for its warm-up."""

    turns: int
    returning_turns: int
    """Of those, the ones that had a history."""
    dram_hits: int
    """Of those, the ones whose history was loaded, in part at least, and had been in DRAM since it was last used."""
    ssd_hits: int
    """Likewise, and it had been fetched from SSD for this turn, ahead of it or while it waited."""
    misses: int
    hit_rate: float
    """Hits of either tier over returning turns; 0 where there are none."""
    prompt_tokens: int
    history_tokens: int
    loaded_tokens: int
    """Of those, the ones whose KV was loaded."""
    recomputed_tokens: int
    """And the ones that were prefilled again. The last token of an answer always is: nothing was computed of it."""
    prefill_tokens: int
    output_tokens: int
    ttft_s: Spread
    """From when a turn came to its first token."""
    tpot_s: Spread
    """Mean time between a turn's tokens."""
    latency_s: Spread
    prefill_tokens_per_s: float
    """Prompt tokens, loaded ones included, over the time of prefill passes."""
    decode_tokens_per_s: float
    """Tokens behind first ones over the time of decode steps."""
    turns_per_minute: float
    totals: Totals


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run with a store against the same workload recomputed; above 1 where the store is better."""

    prefill_time: float
    """Time of prefill passes, recomputed over stored."""
    total_time: float
    busy_time: float
    """Time of prefill passes and decode steps."""
    mean_ttft: float
    p99_ttft: float
    same_answers: int
    """Turns with the same tokens in both runs, of those of `comparable_answers`."""
    comparable_answers: int
    """Turns up to the first in which tokens left a full context: from there on KV that is kept has seen tokens that
    what is recomputed has not."""


def summarize(served: Served) -> Summary:
    """Sums up a run.

    Raises:
      ValueError: no turn is counted.
    """
    turns = [turn for turn in served.turns if turn.is_counted]
    if not turns:
        raise ValueError(f"warmup_turns must be fewer than the {len(served.turns)} turns, got as many or more")
    totals = served.totals
    returning = [turn for turn in turns if turn.history_tokens]
    hits = [turn for turn in returning if turn.cached_tokens]
    from_ssd = sum(turn.tier == "ssd" for turn in hits)
    history_tokens = sum(turn.history_tokens for turn in turns)
    prompt_tokens = history_tokens + sum(turn.message_tokens for turn in turns)
    loaded_tokens = sum(turn.loaded_tokens for turn in turns)
    output_tokens = sum(turn.answer_tokens for turn in turns)
    return Summary(
        turns=len(turns),
        returning_turns=len(returning),
        dram_hits=len(hits) - from_ssd,
        ssd_hits=from_ssd,
        misses=len(returning) - len(hits),
        hit_rate=len(hits) / max(len(returning), 1),
        prompt_tokens=prompt_tokens,
        history_tokens=history_tokens,
        loaded_tokens=loaded_tokens,
        recomputed_tokens=history_tokens - loaded_tokens,
        prefill_tokens=sum(turn.prefill_tokens for turn in turns),
        output_tokens=output_tokens,
        ttft_s=Spread.of(turn.ttft_s for turn in turns),
        tpot_s=Spread.of(turn.tpot_s for turn in turns),
        latency_s=Spread.of(turn.latency_s for turn in turns),
        prefill_tokens_per_s=_ratio(prompt_tokens, totals["prefill_s"]),
        decode_tokens_per_s=_ratio(output_tokens - len(turns), totals["decode_s"]),
        turns_per_minute=_ratio(60 * len(turns), totals["elapsed_s"]),
        totals=totals,
    )


def compare(stored: Served, recomputed: Served) -> Comparison:
    """Compares a run with a store to one without."""
    ours, other = summarize(stored), summarize(recomputed)
    undropped = {(turn.session, turn.turn) for turn in stored.turns if not turn.dropped_tokens}

    def times(*names: str) -> float:
        return _ratio(sum(other.totals[name] for name in names), sum(ours.totals[name] for name in names))

    return Comparison(
        prefill_time=times("prefill_s"),
        total_time=times("elapsed_s"),
        busy_time=times("prefill_s", "decode_s"),
        mean_ttft=_ratio(other.ttft_s.mean, ours.ttft_s.mean),
        p99_ttft=_ratio(other.ttft_s.p99, ours.ttft_s.p99),
        same_answers=sum(stored.answers[each] == recomputed.answers[each] for each in undropped),
        comparable_answers=len(undropped),
    )


def _ratio(amount: float, other: float) -> float:
    return amount / other if other else 0.0
