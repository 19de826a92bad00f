"""What is kept of serving a workload: of each turn, of moments in between, in all.

Not here: serving (serving), figures of it (summary).
"""

from __future__ import annotations

import dataclasses

from ca_jax.simulate.fitted import DecodeSample


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedTurn:
    """One turn that has ended."""

    session: int
    """The conversation's place in the workload."""
    turn: int
    """Of the conversation, from 0."""
    due_s: float
    """When it came, since the replay began."""
    started_s: float
    """When its prefill began, since the replay began."""
    ttft_s: float
    """From when it came to its first token."""
    latency_s: float
    """From when it came to its last token."""
    prefill_s: float
    """Of its prefill's passes, waiting for loads included."""
    load_stall_s: float
    """Of that, waiting for loads."""
    decode_s: float
    """From its first token to its last."""
    history_tokens: int
    """Of the conversation before it, without what left as the window was full."""
    message_tokens: int
    """Sent."""
    answer_tokens: int
    """Generated."""
    cached_tokens: int
    """Tokens whose KV was loaded."""
    tier: str
    """Where that was when the turn was queued, `dram` or `ssd`."""
    dropped_tokens: int
    """Of the conversation, that left in this turn or an earlier one."""
    is_counted: bool
    """Whether it came after the warm-up."""

    @property
    def loaded_tokens(self) -> int:
        """Tokens of its history whose KV was loaded; what is loaded behind that another conversation began with."""
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
    """Since the replay began."""
    ended: int
    """Turns that have ended."""
    running: int
    """Turns in slots."""
    waiting: int
    """Turns in the queue."""
    returning: int
    """Turns that have begun and had a history."""
    hits: int
    """Of those, the ones whose history was loaded, in part at least."""
    output_tokens: int
    """Generated in turns that have ended."""
    prompt_tokens: int
    """Histories and messages of these."""
    dram_share: float
    """Of the DRAM tier, in use."""
    ssd_share: float
    """Of the SSD tier, in use; 0 where there is none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Totals:
    """What the engine and its store have done, since they were made or since the warm-up."""

    elapsed_s: float
    """Time."""
    prefill_s: float
    """Of prefill passes, waiting for loads included."""
    decode_s: float
    """Of decode steps."""
    decode_steps: int
    """How many."""
    load_stall_s: float
    """Compute waited for loads."""
    write_stall_s: float
    """Compute waited for room in the write buffer."""
    truncations: int
    """Times tokens left a full context."""
    failed_loads: int
    """Loads that broke."""
    failed_saves: int
    """Saves that broke."""
    loaded_bytes: int
    """From DRAM to the device."""
    saved_bytes: int
    """From the device to DRAM."""
    fetched_bytes: int
    """From SSD to DRAM."""
    flushed_bytes: int
    """From DRAM to SSD."""
    dram_evictions: int
    """Conversations that left DRAM."""
    ssd_evictions: int
    """Conversations that left SSD."""
    skipped_saves: int
    """Saves for which no room could be made."""

    def since(self, earlier: Totals) -> Totals:
        """What was done since."""
        fields = [field.name for field in dataclasses.fields(self)]
        return Totals(**{name: getattr(self, name) - getattr(earlier, name) for name in fields})


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
    """Decode steps that no prefill pass came behind."""
    totals: Totals
    """After the warm-up."""
