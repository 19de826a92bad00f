"""Context-window overflow: how many tokens leave, which, and how what is left is used. Pure, and knows no jax.

A context of n tokens under a window of W overflows when it would hold more than W. Then a share of the window leaves at
once, the oldest first, behind a few first tokens that stay:

    before    k k k k o o o o o o o o r r r r r r        k kept first, o leave, r stay
    after     k k k k r r r r r r                        at positions 0 to 9, as they are stored

The first tokens stay since models put the attention they have no use for there; without them quality breaks down.
Where a `TokenDiscarder` is asked, what it names leaves in place of the oldest: as a whole, from all layers and heads.

Not here: forgetting it (truncator, storage), measuring attention (models.attention), computing anew (recompute).
Source: CachedAttention (Gao et al., USENIX ATC 2024), section 3.4, token discarding lists among it; first tokens:
StreamingLLM (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from ca_jax.errors import InvalidRequestError, check, is_count

if TYPE_CHECKING:
    from ca_jax.models.kv import KVCache

_MAX_SHOWN = 5  # Positions that an error names.

METHODS = ("ca", "tt", "of")
"""What becomes of the KV of the tokens that stay. `ca`: it is used as it is stored, at its new positions. `tt`: it is
computed anew. `of`: as `tt`, since what is stored has its positions in it and is lost."""

REPAIRS = ("none", "deviating", "spread")
"""Which of the tokens that stay have their KV computed anew. `none`: no token, the way of the paper. `deviating`: the
anchors, and the tokens whose KV is farthest from what computing it anew would give, as CacheBlend chooses them.
`spread`: the anchors and tokens evenly apart, and all others are moved as these have moved, see `blend`."""


# Which tokens leave.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DiscardContext:
    """What a discarder knows of a context.

    Raises:
      ValueError: numbers that contradict each other; the message says what was wanted.
    """

    num_tokens: int
    """Of the context."""
    num_leaving: int
    """How many tokens are to leave."""
    keep_first: int = 0
    """First tokens that never leave."""
    attention: np.ndarray | None = None
    """f32 `[num_tokens]`, attention that each token received, summed over heads, layers and queries; None where the
    discarder does not need it."""
    kv: KVCache | None = None
    """Unrotated KV, `[1, S, K, H]` a layer with S at least `num_tokens`; None where the discarder does not need it."""

    def __post_init__(self) -> None:
        num_tokens = self.num_tokens
        check(0 <= self.num_leaving <= num_tokens, "num_leaving", f"0 to {num_tokens} tokens", self.num_leaving)
        check(self.keep_first >= 0, "keep_first", "a number of tokens >= 0", self.keep_first)
        if self.attention is not None:
            shape, is_finite = self.attention.shape, np.isfinite(self.attention)
            check(shape == (num_tokens,), "attention", f"of the shape ({num_tokens},)", shape)
            check(bool(is_finite.all()), "attention", "finite numbers", self.attention[~is_finite])
        if self.kv is not None:
            found = (self.kv.lengths.shape, self.kv.capacity)
            holds = found[0] == (1,) and found[1] >= num_tokens
            check(holds, "lengths' shape and room of kv", f"(1,) and at least {num_tokens} tokens", found)

    @property
    def num_staying(self) -> int:
        """How many tokens are to stay."""
        return self.num_tokens - self.num_leaving


class TokenDiscarder(Protocol):
    """Says which tokens leave. Pure: the same context gives the same tokens."""

    @property
    def name(self) -> str:
        """In flags and reports."""

    @property
    def needs_attention(self) -> bool:
        """Whether it wants `DiscardContext.attention`, which costs every step some time."""

    @property
    def needs_kv(self) -> bool:
        """Whether it wants `DiscardContext.kv`, which is brought together for it."""

    def choose(self, context: DiscardContext) -> np.ndarray:
        """The places of the tokens that leave.

        Returns:
          i64, sorted, each once: `num_leaving` of them, fewer only where `keep_first` leaves no more to choose from.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class OldestFirst:
    """The oldest tokens leave, but for some first ones if that is asked for: attention sinks."""

    needs_attention: ClassVar[bool] = False
    needs_kv: ClassVar[bool] = False

    num_sinks: int = 0
    """First tokens that stay, as far as that many tokens do."""

    def __post_init__(self) -> None:
        check(self.num_sinks >= 0, "num_sinks", "a number of tokens >= 0", self.num_sinks)

    @property
    def name(self) -> str:
        """See `TokenDiscarder`."""
        return "sinks" if self.num_sinks else "oldest"

    def choose(self, context: DiscardContext) -> np.ndarray:
        """See `TokenDiscarder`."""
        first = _num_first(context, self.num_sinks)
        return np.arange(first, min(first + context.num_leaving, context.num_tokens), dtype=np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeavyHitters:
    """Those tokens leave that received the least attention, but for first and most recent ones; of equals the older.

    In the paper each head has its own tokens. Here they leave as a whole, by the attention of all heads and layers.

    Source: H2O (Zhang et al., "Heavy-Hitter Oracle for Efficient Generative Inference of LLMs", NeurIPS 2023).
    """

    name: ClassVar[str] = "heavy_hitters"
    needs_attention: ClassVar[bool] = True
    needs_kv: ClassVar[bool] = False

    recent_ratio: float = 0.5
    """Share of the tokens that stay which are the most recent, in [0, 1]. Half, as in the paper: recent tokens had few
    queries to receive attention from."""
    num_sinks: int = 0
    """First tokens that stay whatever they received, as far as that many do. 0: sinks receive the most anyway."""

    def __post_init__(self) -> None:
        check(0 <= self.recent_ratio <= 1, "recent_ratio", "a share in [0, 1]", self.recent_ratio)
        check(self.num_sinks >= 0, "num_sinks", "a number of tokens >= 0", self.num_sinks)

    def choose(self, context: DiscardContext) -> np.ndarray:
        """See `TokenDiscarder`.

        Raises:
          ValueError: the context has no attention.
        """
        if context.attention is None:
            raise ValueError(f"{self.name} must be given the attention that each token received, got none")
        first = _num_first(context, self.num_sinks)
        num_recent = min(round(self.recent_ratio * context.num_staying), max(0, context.num_staying - first))
        between = context.attention[first : context.num_tokens - num_recent]
        least = np.argsort(between, kind="stable")[: context.num_leaving]
        return np.sort(least.astype(np.int64) + first)


def _num_first(context: DiscardContext, num_sinks: int) -> int:
    """First tokens that stay: sinks only as far as they fit."""
    return max(context.keep_first, min(num_sinks, context.num_staying))


def check_discarded(indices: npt.ArrayLike, num_tokens: int) -> np.ndarray:
    """Which tokens leave, from what a discarder or a user names.

    Args:
      indices: positions in any order, each once; or a bool mask `[num_tokens]`.
      num_tokens: of the context.

    Returns:
      bool `[num_tokens]`, a fresh array.

    Raises:
      InvalidRequestError: a position that does not exist or is named twice, a mask of another length, an array of
        another kind, or all tokens of the context.
    """

    def refuse(wanted: str, got: str) -> InvalidRequestError:
        return InvalidRequestError(f"tokens to discard must {wanted}, got {got}")

    wanted = f"be integer positions or a bool mask of {num_tokens} tokens"
    try:
        found = np.asarray(indices)
    except (ValueError, OverflowError) as error:
        raise refuse(wanted, f"what makes no array: {error}") from error
    if found.ndim != 1 or not (found.size == 0 or found.dtype == bool or np.issubdtype(found.dtype, np.integer)):
        raise refuse(wanted, f"an array of shape {found.shape} and dtype {found.dtype}")
    if found.dtype == bool:
        if found.size != num_tokens:
            raise refuse(wanted, f"a mask of {found.size}")
        mask = found.copy()
    else:
        strangers = found[(found < 0) | (found >= num_tokens)]
        if strangers.size:
            raise refuse(f"be positions of a context of {num_tokens} tokens", _shown(strangers))
        counts = np.bincount(found.astype(np.int64), minlength=num_tokens)
        if (counts > 1).any():
            raise refuse("name each position once", f"repeats of {_shown(np.flatnonzero(counts > 1))}")
        mask = counts > 0
    if num_tokens and mask.all():
        raise refuse("be fewer than all", f"all {num_tokens}")
    return mask


def _shown(positions: np.ndarray) -> str:
    shown = ", ".join(str(position) for position in positions[:_MAX_SHOWN])
    return shown if positions.size <= _MAX_SHOWN else f"{shown} and {positions.size - _MAX_SHOWN} more"


_NUM_SINKS = 4  # StreamingLLM's: more gain next to nothing.
DISCARDERS: dict[str, TokenDiscarder] = {
    discarder.name: discarder for discarder in (OldestFirst(), OldestFirst(num_sinks=_NUM_SINKS), HeavyHitters())
}
"""Discarders by name, as flags have them."""


# How many leave, and what becomes of the others.


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverflowConfig:
    """What happens when a conversation outgrows the context window.

    Raises:
      ValueError: a value outside its range; the message says what was wanted.
    """

    method: str = "ca"
    """What becomes of the KV of the tokens that stay, one of `METHODS`."""
    truncation_ratio: float = 0.5
    """Share of the window that leaves at once, in (0, 1]. Half, as in the paper: less overflows more often."""
    keep_first_tokens: int = 4
    """First tokens that never leave. Models put the attention they have no use for there."""
    repair: str = "spread"
    """Which of the tokens that stay have their KV computed anew, one of `REPAIRS`: with the next turn's prefill, once.
    The default, with the two numbers below, is what was chosen on half of LongEval's questions, see
    `results/quality.md`. Other methods than `ca` ignore it, and so do models whose layers all see less than the context
    window: what leaves there is first what no layer looks back to."""
    anchor_tokens: int = 32
    """First tokens, of those that stay, that `repair` computes anew, as the beginning that they are now; in the middle
    of an answer at once."""
    repair_ratio: float = 0.1
    """Share of the tokens that stay that `repair` computes anew, the anchors among them, in [0, 1]."""
    exact_when_idle: bool = True
    """Whether what stays is computed anew, as `tt` would have, once there is nothing else to do, or ahead of its cut
    where less than a fourth of the window is left. A server does it, and so does a caller that keeps calling
    `Engine.step`. Not with several processes, nor where `repair` repairs nothing."""
    drift: str | None = None
    """File of the model's drift (`ca_jax.recompute.drift`), which is added to what stays; None adds nothing."""
    whole_turns: bool = False
    """Only whole turns leave, as far as that makes room."""
    discarder: str | TokenDiscarder = "oldest"
    """Which tokens leave: a name in `DISCARDERS`, or one's own."""

    def __post_init__(self) -> None:
        check(self.method in self.methods, "overflow method", f"one of {', '.join(self.methods)}", self.method)
        check(0 < self.truncation_ratio <= 1, "truncation_ratio", "a share in (0, 1]", self.truncation_ratio)
        check(0 <= self.repair_ratio <= 1, "repair_ratio", "a share in [0, 1]", self.repair_ratio)
        for name in ("keep_first_tokens", "anchor_tokens"):
            value = getattr(self, name)
            check(is_count(value), name, "a number of tokens >= 0", value)
        check(self.repair in REPAIRS, "repair", f"one of {', '.join(REPAIRS)}", self.repair)
        discarder = self.token_discarder.name
        check(not self.whole_turns or discarder == "oldest", "the discarder of whole_turns", "'oldest'", discarder)

    @property
    def methods(self) -> tuple[str, ...]:
        """What `method` may be."""
        return METHODS

    @property
    def token_discarder(self) -> TokenDiscarder:
        """The one that `discarder` names.

        Raises:
          ValueError: there is none of that name.
        """
        if not isinstance(self.discarder, str):
            return self.discarder
        check(self.discarder in DISCARDERS, "token discarder", f"one of {', '.join(DISCARDERS)}", self.discarder)
        return DISCARDERS[self.discarder]

    @property
    def recomputes(self) -> bool:
        """Whether some of what stays is computed anew, and the rest used as it is stored."""
        return self.method == "ca" and self.repair != "none" and bool(self.anchor_tokens or self.repair_ratio)

    @property
    def needs_everything(self) -> bool:
        """Whether KV that no layer looks back to has a use: what stays is changed by it, or what leaves chosen."""
        looks = self.token_discarder.needs_attention or self.token_discarder.needs_kv
        return self.method != "ca" or self.drift is not None or looks

    def check_window(self, window: int) -> None:
        """Refuses what does not fit a window of so many tokens.

        Raises:
          ValueError: the first tokens that stay fill it.
        """
        wanted = f"fewer than the context window of {window} tokens"
        check(self.keep_first_tokens < window, "keep_first_tokens", wanted, self.keep_first_tokens)


def leaving_at_once(config: OverflowConfig, window: int) -> int:
    """How many tokens leave a full window at once, unless more are in the way."""
    return max(1, round(config.truncation_ratio * window))


def num_leaving(config: OverflowConfig, *, window: int, num_tokens: int, num_wanted: int) -> int:
    """How many tokens of a context leave so that some more fit.

    Args:
      config: the share that leaves at once, and how many first tokens stay.
      window: most tokens of a context.
      num_tokens: of the context.
      num_wanted: tokens that are to fit behind it.

    Returns:
      0 where they fit; else whole shares of the window, as many as it takes, at most all that may leave. The rest may
      be too much still.
    """
    excess = num_tokens + num_wanted - window
    if excess <= 0:
        return 0
    share = leaving_at_once(config, window)
    return max(0, min(math.ceil(excess / share) * share, num_tokens - config.keep_first_tokens))


def oldest_first(
    num_tokens: int, num_leaving: int, keep_first: int, turn_starts: Sequence[int] = (), num_needed: int = 0
) -> np.ndarray:
    """Which tokens leave, the oldest first: bool `[num_tokens]`.

    Args:
      num_tokens: of the context.
      num_leaving: how many leave.
      keep_first: first tokens that stay.
      turn_starts: where turns begin; if any is given, tokens leave up to the nearest one that makes room for
        `num_needed`, where there is one.
      num_needed: least number of tokens that must leave.
    """
    stop = min(keep_first + num_leaving, num_tokens)
    fitting = [start for start in turn_starts if start - keep_first >= max(num_needed, 1)]
    if fitting:
        stop = min(fitting, key=lambda start: (abs(start - stop), start))
    mask = np.zeros(num_tokens, bool)
    mask[keep_first:stop] = True
    return mask
