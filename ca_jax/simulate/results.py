"""What a simulation counts, and what follows from it."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(kw_only=True)
class SimCounts:
    """Counts of the turns after the warm-up."""

    begin_s: float = 0.0
    """When the first of them began."""
    end_s: float = 0.0
    """When all was done."""
    num_turns: int = 0
    """How many."""
    num_returning: int = 0
    """Of those, the ones that had a history."""
    dram_hits: int = 0
    """Of those, the ones that found KV of it in DRAM when they could run."""
    ssd_hits: int = 0
    """And those that waited for SSD to bring it."""
    prompt_tokens: int = 0
    """Histories and new tokens."""
    history_tokens: int = 0
    """Of those, the ones that earlier turns had."""
    cached_tokens: int = 0
    """Of those, the ones whose KV was loaded."""
    output_tokens: int = 0
    """Generated behind first tokens."""
    prefill_s: float = 0.0
    """The device was busy with prefills, loads that it waited for included."""
    stall_s: float = 0.0
    """Of that, waiting for loads."""
    decode_s: float = 0.0
    """The device was busy with decode steps of these turns, each shared by those that ran in it."""
    overflow_s: float = 0.0
    """The device computed contexts anew that had become full in the middle of an answer."""
    saved_bytes: float = 0.0
    """Handed to the store."""
    ttft_s: list[float] = dataclasses.field(default_factory=list)
    """Of each turn, from when it came to its first token."""
    prefill_times_s: list[float] = dataclasses.field(default_factory=list)
    """Of each turn, from when its prefill began to its first token."""

    def add_prefill(
        self,
        *,
        num_tokens: int,
        num_history: int,
        num_cached: int,
        waited: bool,
        prefill_s: float,
        stall_s: float,
        ttft_s: float,
    ) -> None:
        """Counts the prefill of a turn."""
        self.num_turns += 1
        self.num_returning += num_history > 0
        if num_cached:
            if waited:
                self.ssd_hits += 1
            else:
                self.dram_hits += 1
        self.prompt_tokens += num_tokens
        self.history_tokens += num_history
        self.cached_tokens += num_cached
        self.prefill_s += prefill_s
        self.stall_s += stall_s
        self.ttft_s.append(ttft_s)
        self.prefill_times_s.append(prefill_s)

    @property
    def num_hits(self) -> int:
        """Turns that found KV of their history."""
        return self.dram_hits + self.ssd_hits

    @property
    def hit_rate(self) -> float:
        """Share of turns with a history that found KV of it."""
        return self.num_hits / max(self.num_returning, 1)

    @property
    def hit_rate_of_all(self) -> float:
        """Share of all turns that found KV; first ones have none to find."""
        return self.num_hits / max(self.num_turns, 1)

    @property
    def dram_share(self) -> float:
        """Share of hits that found it in DRAM."""
        return self.dram_hits / max(self.num_hits, 1)

    @property
    def cached_share(self) -> float:
        """Share of the histories' tokens whose KV was loaded."""
        return self.cached_tokens / max(self.history_tokens, 1)

    @property
    def gpu_s(self) -> float:
        """The device was busy."""
        return self.prefill_s + self.decode_s + self.overflow_s

    @property
    def mean_ttft_s(self) -> float:
        """From the beginning of a prefill to its first token."""
        return float(np.mean(self.prefill_times_s)) if self.prefill_times_s else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens, loaded ones included, over the time of prefills."""
        return self.prompt_tokens / self.prefill_s if self.prefill_s else 0.0
