"""Token discarding lists: which tokens of a context leave, by age or by the attention that they received.

A `TokenDiscarder` is asked when a context outgrows its window; what it names leaves, and the KV of the rest is used as
it is stored, at its new positions. Tokens leave as a whole, from all layers and heads.

Not here: when and how many (overflow), forgetting them (session_kv, storage), measuring attention (models.attention).
Source: token discarding lists are CachedAttention's (Gao et al., USENIX ATC 2024), section 3.4.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from ca_jax.errors import InvalidRequestError, check

if TYPE_CHECKING:
    from ca_jax.models.kv import KVCache

_MAX_SHOWN = 5  # Positions that an error names.


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
    """The oldest tokens leave, but for some first ones if that is asked for: attention sinks.

    Source of sinks: StreamingLLM (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024).
    """

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
    wanted = f"tokens to discard must be integer positions or a bool mask of {num_tokens} tokens"
    try:
        found = np.asarray(indices)
    except (ValueError, OverflowError) as error:
        raise InvalidRequestError(f"{wanted}, got what makes no array: {error}") from error
    if found.ndim == 1 and found.dtype == bool:
        if found.size != num_tokens:
            raise InvalidRequestError(f"{wanted}, got a mask of {found.size}")
        mask = found.copy()
    elif found.ndim == 1 and (found.size == 0 or np.issubdtype(found.dtype, np.integer)):
        mask = _mask_of(found.astype(np.int64) if found.size == 0 else found, num_tokens)
    else:
        raise InvalidRequestError(f"{wanted}, got an array of shape {found.shape} and dtype {found.dtype}")
    if num_tokens and mask.all():
        raise InvalidRequestError(f"tokens to discard must be fewer than all, got all {num_tokens}")
    return mask


def _mask_of(positions: np.ndarray, num_tokens: int) -> np.ndarray:
    strangers = positions[(positions < 0) | (positions >= num_tokens)]
    if strangers.size:
        raise InvalidRequestError(
            f"tokens to discard must be positions of a context of {num_tokens} tokens, got {_shown(strangers)}"
        )
    counts = np.bincount(positions.astype(np.int64), minlength=num_tokens)
    if (counts > 1).any():
        raise InvalidRequestError(
            f"tokens to discard must name each position once, got repeats of {_shown(np.flatnonzero(counts > 1))}"
        )
    return counts > 0


def _shown(positions: np.ndarray) -> str:
    shown = ", ".join(str(position) for position in positions[:_MAX_SHOWN])
    return shown if positions.size <= _MAX_SHOWN else f"{shown} and {positions.size - _MAX_SHOWN} more"


_NUM_SINKS = 4  # StreamingLLM's: more gain next to nothing.
DISCARDERS: dict[str, TokenDiscarder] = {
    discarder.name: discarder for discarder in (OldestFirst(), OldestFirst(num_sinks=_NUM_SINKS), HeavyHitters())
}
"""Discarders by name, as flags have them."""
