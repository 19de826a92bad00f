"""What a simulation counts, and what follows from it.

A hit counts turns here: one of whose history something was loaded. `cached_share` counts tokens.

Not here: counting (server).
"""

from __future__ import annotations

import dataclasses
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


def _sum_of(name: str, doc: str) -> property:
    return property(lambda self: sum(getattr(each, name) for each in self.prefills), doc=doc)


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

    @property
    def num_turns(self) -> int:
        """Turns counted."""
        return len(self.prefills)

    @property
    def num_returning(self) -> int:
        """Turns with a history."""
        return sum(each.history_tokens > 0 for each in self.prefills)

    @property
    def dram_hits(self) -> int:
        """Turns that found KV of their history in DRAM when they could run."""
        return sum(each.cached_tokens > 0 and not each.waited for each in self.prefills)

    @property
    def ssd_hits(self) -> int:
        """Turns that waited for SSD to bring it."""
        return sum(each.cached_tokens > 0 and each.waited for each in self.prefills)

    prompt_tokens = _sum_of("prompt_tokens", "Tokens of histories and new ones.")
    history_tokens = _sum_of("history_tokens", "Tokens of histories.")
    cached_tokens = _sum_of("cached_tokens", "Tokens of histories whose KV was loaded.")
    prefill_s = _sum_of("prefill_s", "The device was busy with prefills, loads that it waited for included.")
    stall_s = _sum_of("stall_s", "Of that, waiting for loads.")

    @property
    def hit_rate(self) -> float:
        """Share of turns with a history of which something was loaded."""
        return (self.dram_hits + self.ssd_hits) / max(self.num_returning, 1)

    @property
    def hit_rate_of_all(self) -> float:
        """Share of all turns that found KV; first turns have none to find."""
        return (self.dram_hits + self.ssd_hits) / max(self.num_turns, 1)

    @property
    def dram_share(self) -> float:
        """Share of hits that found it in DRAM."""
        return self.dram_hits / max(self.dram_hits + self.ssd_hits, 1)

    @property
    def cached_share(self) -> float:
        """Share of the histories' tokens whose KV was loaded: the hit rate in tokens."""
        return self.cached_tokens / max(self.history_tokens, 1)

    @property
    def gpu_s(self) -> float:
        """The device was busy."""
        return self.prefill_s + self.decode_s + self.overflow_s

    @property
    def elapsed_s(self) -> float:
        """From the first counted turn to the end."""
        return self.end_s - self.begin_s

    @property
    def mean_prefill_s(self) -> float:
        """From the beginning of a prefill to its first token: the paper's TTFT."""
        return self.prefill_s / max(self.num_turns, 1)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens, loaded ones included, over the time of prefills."""
        return self.prompt_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def ttft_mean_s(self) -> float:
        """Mean time from when a turn came to its first token."""
        return float(np.mean([each.ttft_s for each in self.prefills] or [0.0]))

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
