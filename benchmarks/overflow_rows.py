"""What the suite `overflow` is asked and answers: what truncation costs and is worth.

Not here: measuring (`suites.overflow`, `overflow_costs`, `overflow_store`), quality (`ca_jax.launch.evaluate`).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from benchmarks.harness import Row, ServingConfig, Spread, require
from ca_jax.overflow.config import METHODS, OverflowConfig
from ca_jax.storage.config import StoreConfig

PLACES = ("prompt", "answer", "idle, then prompt", "answer, then idle")
"""Where a window overflows: before a turn's prefill, or in the middle of the answer before. Where it says `idle`, turns
come once the engine has had time for what is to be done, else at once."""
NOWHERE = "nowhere"
"""Of a turn over as many tokens as an overflow leaves, that never overflowed."""
TIERS = ("dram", "ssd")
"""Where KV is that is cut: in DRAM alone, or on SSD too."""

_LEAST_WINDOW = 128  # Room for the tokens around a truncation that is measured, and for those that decode beside it.
_LEAST_MESSAGE = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverflowBenchConfig(ServingConfig):
    """What a truncation costs, and what it saves over recomputing what is left."""

    settled: ClassVar = ("recompute_if_faster", "max_draft_tokens")
    may_be_zero: ClassVar = frozenset({"seed", "num_sessions", "bookkeeping_sessions"})
    may_be_empty: ClassVar = frozenset({"overflow_methods", "gap_methods", "next_turn_methods", "gap_sessions"})
    choices: ClassVar = dict.fromkeys(("overflow_methods", "gap_methods", "next_turn_methods"), METHODS)

    overflow_methods: tuple[str, ...] = ("ca", "of")
    """Conversations: methods that serve them, a row each; the paper's Figure 22 compares these two."""
    num_sessions: int = 64
    """Conversations: how many; 0 leaves this part out."""
    concurrent_sessions: int = 8
    """Conversations: how many go on together; a group of so many is served by every method before the next one is."""
    context_window: int = 1024
    """Most tokens of a context, in all parts."""
    conversation_tokens: int = 1792
    """Conversations: most tokens of each; later turns are left out. As set, each overflows once or twice."""
    max_turns: int = 16
    """Conversations: most turns of each."""
    max_answer_tokens: int = 16
    """Conversations: most tokens generated of an answer; the rest of the recorded one comes with the next message, so
    that histories grow as they did while little is decoded."""
    bookkeeping_blocks: int = 100
    """Bookkeeping: blocks of a session."""
    bookkeeping_sessions: int = 100
    """Bookkeeping: sessions that are cut, one after the other; 0 leaves this part out."""
    gap_methods: tuple[str, ...] = ("ca", "tt")
    """Gap between tokens: methods; none leaves this part out."""
    gap_sessions: tuple[int, ...] = (1, 4)
    """Gap between tokens: sessions that decode, one of which overflows."""
    next_turn_methods: tuple[str, ...] = ("ca", "of", "tt")
    """Next turn: methods; none leaves this part out."""
    next_turn_tokens: int = 64
    """Next turn: tokens of its message."""
    ssd_dir: str | None = None
    """Bookkeeping: directory on the disk to measure; by default where temporary files are."""
    ssd_driver: str = StoreConfig.ssd_driver
    """Bookkeeping: how KV is kept on SSD."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.num_sessions or self.bookkeeping_sessions or self.gap_methods or self.next_turn_methods):
            raise ValueError(
                "num_sessions, bookkeeping_sessions, gap_methods or next_turn_methods must have something to measure, "
                "got none in all"
            )
        require(
            self.context_window >= _LEAST_WINDOW, "context_window", f"at least {_LEAST_WINDOW}", self.context_window
        )
        require(
            self.next_turn_tokens >= _LEAST_MESSAGE,
            "next_turn_tokens",
            f"at least {_LEAST_MESSAGE}",
            self.next_turn_tokens,
        )
        have_methods = bool(self.overflow_methods or not self.num_sessions)
        require(have_methods, "overflow_methods", "at least one where there are num_sessions", "none")
        least = self.context_window + self.max_answer_tokens + 1
        wanted = f"at least {least}, a window and another turn"
        require(self.conversation_tokens >= least, "conversation_tokens", wanted, self.conversation_tokens)
        most, sessions = self.engine.max_batch_size, self.gap_sessions
        fits = not self.gap_methods or (bool(sessions) and max(sessions) <= most)
        require(fits, "gap_sessions", f"numbers from 1 to the max_batch_size of {most}", list(sessions))
        share = round(self.overflow.truncation_ratio * self.context_window)
        for name in ("max_answer_tokens", "next_turn_tokens"):
            wanted = f"at most the {share} tokens that leave at once"
            require(getattr(self, name) <= share, name, wanted, getattr(self, name))

    @property
    def overflow(self) -> OverflowConfig:
        """The engine's, but for the method."""
        if self.engine.overflow is None:
            raise ValueError("engine.overflow must be an OverflowConfig, got None: nothing may be dropped")
        return self.engine.overflow

    @property
    def methods(self) -> tuple[str, ...]:
        """Of all parts, each once: those of the engines that are needed."""
        conversations = self.overflow_methods if self.num_sessions else ()
        return tuple(dict.fromkeys((*conversations, *self.gap_methods, *self.next_turn_methods)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversationsRow:
    """Conversations that outgrow the window, served by one method: the paper's Figure 22.

    Every method is sent the same messages, and generates answers of the same lengths. Of an answer the first
    `max_answer_tokens` are generated; the rest of the recorded one is prefilled with the next message.
    """

    measured: str = "conversations"
    method: str
    """See `overflow.METHODS`."""
    sessions: int
    turns: int
    overflows: int
    """Times a full window had tokens dropped."""
    answer_overflows: int
    """Of those, in the middle of an answer; the others came with a message."""
    history_turns: int
    """Turns that are not their conversation's first."""
    hits: int
    """Of those, turns that loaded KV of more than the first tokens, which always stay."""
    hit_rate: float
    history_tokens: int
    """Tokens of histories as they were prefilled upon, behind truncation, of all turns."""
    loaded_share: float
    """Of those, the share whose KV was loaded. Each answer's last token never is: nothing was computed from it."""
    prompt_tokens: int
    """Of all turns, history and new ones."""
    prefill_tokens: int
    """Tokens computed: of prompts, and of what was left of contexts that were computed anew in the middle of an
    answer."""
    repaired_tokens: int
    """Loaded tokens whose KV was computed anew in part, see `Usage`."""
    prefill_s: float
    """From the begin of turns' prefill to their first token, of all turns; others decode between passes."""
    ttft_mean_s: float
    """From sending to the first token, mean of the turns; truncation's bookkeeping comes before that."""
    ttft_p50_s: float
    ttft_p99_s: float
    """Of a hundred turns one waits longer."""
    overflow_ttft_p50_s: float | None
    """Median of the turns whose message overflowed the window; None where none did."""
    total_s: float
    """From the first message sent to the last answer ended, of all groups."""
    group_s: tuple[float, ...]
    """The same, of each group of conversations."""
    metrics: dict[str, int]
    """What the engine counted meanwhile, see `EngineMetrics`; `misses` of the store."""
    recompiles: int
    """Functions compiled meanwhile; 0 unless the warm-up missed one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BookkeepingRow:
    """A truncation's bookkeeping: the oldest half of a stored session is discarded behind its first 4 tokens.

    Blocks are as small as they can be: no byte of them is touched, however large they are.
    """

    measured: str = "bookkeeping"
    tier: str
    """One of `TIERS`."""
    blocks: int
    """Of the session, before."""
    kept_blocks: int
    """Of it in DRAM, behind."""
    tokens: int
    """Of the session, before."""
    sessions: int
    """What the median is of."""
    discard_s: float
    """`AttentionStore.discard`, from call to return, median of the sessions. What the SSD does then is not waited
    for."""
    discard_p99_s: float
    """Of a hundred sessions one takes longer."""
    conversation_s: float
    """Taking as many tokens out of the conversation, and what is left as bytes to be kept with the KV; median."""
    spread: Spread


@dataclasses.dataclass(frozen=True, kw_only=True)
class GapRow(Row):
    """Time between two tokens of an answer in the middle of which the window overflows, against all other times."""

    measured: str = "decode_gap"
    method: str
    sessions: int
    """That decode; one of them overflows, the others have half a window."""
    context_tokens: int
    """Of the one that overflows: the window."""
    dropped_tokens: int
    tpot_s: float
    """Between two tokens, median of one answer without the truncation and its first tokens; median of the samples."""
    gap_s: float
    """The longer of the two times that follow upon the truncation, the truncation included; median of the samples."""
    gap_ratio: float
    """`gap_s` over `tpot_s` of the same sample, median."""
    extra_steps: float
    """Decode steps lost: `gap_ratio` minus the step that the token takes anyway."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextTurnRow(Row):
    """The first turn that is prefilled over a history which was truncated."""

    measured: str = "next_turn"
    method: str
    overflowed: str
    """One of `PLACES`, or `NOWHERE`."""
    history_tokens: int
    """That were left."""
    new_tokens: int
    prefill_tokens: int
    """Computed in this turn, see `Usage`."""
    recomputed_tokens: int
    """Of those, the history's."""
    repaired_tokens: int
    """Loaded tokens whose KV was computed anew in part, see `Usage`."""
    ttft_s: float
    """From sending to the first token, as the caller sees it, the truncation included; median."""
    ratio: float | None
    """`ttft_s` over that of `ca` in the same round, median; None without `ca`."""
    overflow_ratio: float
    """`ttft_s` over that of the same method in the same round where nothing overflowed, median."""


OverflowRow = ConversationsRow | BookkeepingRow | GapRow | NextTurnRow
