"""What a simulation counts, and what follows from it.

A hit counts turns here: one of whose history something was loaded. `cached_share` counts tokens.

Not here: counting (server).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

_PERCENTILES = (50, 90, 99)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SimPrefill:
    """One prefill."""

    prompt_tokens: int
    history_tokens: int
    """Of those, the ones of earlier turns."""
    cached_tokens: int
    """Of those, the ones whose KV was loaded."""
    waited: bool
    """Whether its KV was still on SSD when it could have run."""
    prefill_s: float
    """The device was busy with it, loads that it waited for included."""
    stall_s: float
    """Of that, waiting for loads."""
    ttft_s: float
    """From when the turn came to its first token."""


def _that(follows: Callable[[SimCounts], Any], doc: str) -> Any:
    """What follows from the counts."""
    return property(follows, doc=doc)


def _sum_of(name: str, doc: str) -> Any:
    return _that(lambda counts: sum(getattr(each, name) for each in counts.prefills), doc)


@dataclasses.dataclass(kw_only=True)
class SimCounts:
    """Counts of the turns after the warm-up. Shares are in [0, 1]."""

    begin_s: float = 0.0
    """When the first of them began."""
    end_s: float = 0.0
    output_tokens: int = 0
    """Generated behind first tokens."""
    decode_s: float = 0.0
    """The device was busy with decode steps of these turns, each shared by those that ran in it."""
    overflow_s: float = 0.0
    """The device computed contexts anew that had become full in the middle of an answer."""
    saved_bytes: float = 0.0
    prefills: list[SimPrefill] = dataclasses.field(default_factory=list)

    num_turns = _that(lambda counts: len(counts.prefills), "Turns counted.")
    num_returning = _that(
        lambda counts: sum(each.history_tokens > 0 for each in counts.prefills), "Turns with a history."
    )
    dram_hits = _that(
        lambda counts: sum(each.cached_tokens > 0 and not each.waited for each in counts.prefills),
        "Turns that found KV of their history in DRAM when they could run.",
    )
    ssd_hits = _that(
        lambda counts: sum(each.cached_tokens > 0 and each.waited for each in counts.prefills),
        "Turns that waited for SSD to bring it.",
    )
    prompt_tokens = _sum_of("prompt_tokens", "Tokens of histories and new ones.")
    history_tokens = _sum_of("history_tokens", "Tokens of histories.")
    cached_tokens = _sum_of("cached_tokens", "Tokens of histories whose KV was loaded.")
    prefill_s = _sum_of("prefill_s", "The device was busy with prefills, loads that it waited for included.")
    stall_s = _sum_of("stall_s", "Of that, waiting for loads.")
    hits = _that(lambda counts: counts.dram_hits + counts.ssd_hits, "Turns of whose history something was loaded.")
    hit_rate = _that(
        lambda counts: counts.hits / max(counts.num_returning, 1), "Of turns with a history, those with a hit."
    )
    hit_rate_of_all = _that(
        lambda counts: counts.hits / max(counts.num_turns, 1), "Of all turns; first ones have nothing to find."
    )
    dram_share = _that(lambda counts: counts.dram_hits / max(counts.hits, 1), "Share of hits that found it in DRAM.")
    cached_share = _that(
        lambda counts: counts.cached_tokens / max(counts.history_tokens, 1),
        "Share of the histories' tokens whose KV was loaded: the hit rate in tokens.",
    )
    gpu_s = _that(lambda counts: counts.prefill_s + counts.decode_s + counts.overflow_s, "The device was busy.")
    elapsed_s = _that(lambda counts: counts.end_s - counts.begin_s, "From the first counted turn to the end.")
    ttft_mean_s = _that(
        lambda counts: float(np.mean([each.ttft_s for each in counts.prefills] or [0.0])),
        "Mean time from when a turn came to its first token.",
    )

    @property
    def ttft_percentiles_s(self) -> dict[str, float]:
        """Of the same times: `p50`, `p90`, `p99`."""
        ttft_s = [each.ttft_s for each in self.prefills] or [0.0]
        return {f"p{each}": float(np.percentile(ttft_s, each)) for each in _PERCENTILES}


_OF_COUNTS = (
    *("num_turns", "hit_rate", "hit_rate_of_all", "dram_share", "cached_share", "prefill_s", "stall_s", "gpu_s"),
    *("elapsed_s", "ttft_mean_s", "ttft_percentiles_s", "saved_bytes"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """What became of a workload under one policy."""

    policy: str
    """A policy's name, or `RECOMPUTE`."""
    counts: SimCounts
    prefill_saved: float
    """Share of recomputing's prefill seconds that was saved."""

    def row(self) -> dict[str, Any]:
        """Everything as one row of JSON; fields are those of `SimCounts`."""
        of_counts = {name: getattr(self.counts, name) for name in _OF_COUNTS}
        return {"policy": self.policy, **of_counts, "prefill_saved": self.prefill_saved}
