"""What follows from the turns that were served: latencies, hit rates, throughput, and one run against another.

Not here: serving, tables and plots (`ca_jax.launch`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from ca_jax.replay.served import Served, Totals


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """How something is distributed over turns."""

    mean: float
    """Of all."""
    p50: float
    """Median."""
    p90: float
    """Nine in ten are below."""
    p99: float
    """All but one in a hundred are below."""

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
    """Turns."""
    returning_turns: int
    """Of those, the ones that had a history."""
    dram_hits: int
    """Of those, the ones whose history was loaded, in part at least, and had been in DRAM since it was last used."""
    ssd_hits: int
    """Likewise, and it had been fetched from SSD for this turn, ahead of it or while it waited."""
    misses: int
    """And the ones of whose history nothing was loaded."""
    hit_rate: float
    """Hits of either tier over returning turns; 0 where there are none."""
    prompt_tokens: int
    """Histories and messages."""
    history_tokens: int
    """Of histories."""
    loaded_tokens: int
    """Of those, the ones whose KV was loaded."""
    recomputed_tokens: int
    """And the ones that were prefilled again. The last token of an answer always is: nothing was computed of it."""
    prefill_tokens: int
    """All tokens that were prefilled."""
    output_tokens: int
    """Generated."""
    ttft_s: Spread
    """From when a turn came to its first token."""
    tpot_s: Spread
    """Mean time between a turn's tokens."""
    latency_s: Spread
    """From when a turn came to its last token."""
    prefill_tokens_per_s: float
    """Prompt tokens, loaded ones included, over the time of prefill passes."""
    decode_tokens_per_s: float
    """Tokens behind first ones over the time of decode steps."""
    turns_per_minute: float
    """Over the whole time."""
    totals: Totals
    """Of the engine."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run with a store against the same workload recomputed; above 1 where the store is better."""

    prefill_time: float
    """Time of prefill passes, recomputed over stored."""
    total_time: float
    """From the beginning to the last token."""
    busy_time: float
    """Of prefill passes and decode steps."""
    mean_ttft: float
    """From when turns came."""
    p99_ttft: float
    """Likewise."""
    same_answers: int
    """Turns with the same tokens in both runs, of those of `comparable_answers`."""
    comparable_answers: int
    """Turns up to the first in which tokens left a full context: from there on KV that is kept has seen tokens that
    what is recomputed has not."""


def summarize(served: Served) -> Summary:
    """What a run comes to.

    Raises:
      ValueError: no turn is counted.
    """
    turns = [turn for turn in served.turns if turn.is_counted]
    if not turns:
        raise ValueError(f"warmup_turns must be fewer than the {len(served.turns)} turns that there are")
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
        prefill_tokens_per_s=_rate(prompt_tokens, totals.prefill_s),
        decode_tokens_per_s=_rate(output_tokens - len(turns), totals.decode_s),
        turns_per_minute=_rate(60 * len(turns), totals.elapsed_s),
        totals=totals,
    )


def compare(stored: Served, recomputed: Served) -> Comparison:
    """A run with a store against one without."""
    ours, other = summarize(stored), summarize(recomputed)
    undropped = {(turn.session, turn.turn) for turn in stored.turns if not turn.dropped_tokens}
    return Comparison(
        prefill_time=_rate(other.totals.prefill_s, ours.totals.prefill_s),
        total_time=_rate(other.totals.elapsed_s, ours.totals.elapsed_s),
        busy_time=_rate(other.totals.prefill_s + other.totals.decode_s, ours.totals.prefill_s + ours.totals.decode_s),
        mean_ttft=_rate(other.ttft_s.mean, ours.ttft_s.mean),
        p99_ttft=_rate(other.ttft_s.p99, ours.ttft_s.p99),
        same_answers=sum(stored.answers[each] == recomputed.answers[each] for each in undropped),
        comparable_answers=len(undropped),
    )


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else 0.0
