"""What a session's KV has seen: whether tokens were dropped from it, and how much of it is as if none had been.

KV that was computed behind dropped tokens has seen them, and what is left of a cut session may spell another text. Both
must never be served as KV of that text: only the tokens before the first cut may.

Not here: which tokens are left (records), or where they lie (places).
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Lineage:
    """What was dropped from a session so far. Immutable.

    Raises:
      ValueError: a negative number.
    """

    num_dropped: int = 0
    """Tokens that were dropped with others left behind them: a mark, by which KV of two states is told apart."""
    num_plain: int | None = None
    """Leading tokens whose KV has seen no token that was dropped; None for all, those to come too."""

    def __post_init__(self) -> None:
        if self.num_dropped < 0 or (self.num_plain is not None and self.num_plain < 0):
            raise ValueError(f"wanted num_dropped and num_plain >= 0, found {self.num_dropped} and {self.num_plain}")

    def plain_tokens(self, num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens may be served to whoever has the same tokens."""
        return num_tokens if self.num_plain is None else min(self.num_plain, num_tokens)

    def after(self, discarded: np.ndarray, num_stored: int) -> Lineage:
        """What it is once tokens were discarded.

        Args:
          discarded: bool `[T]`, which of the session's first T tokens go.
          num_stored: tokens of the session that are known to be there, more than T or fewer.
        """
        if num_stored <= len(discarded):  # What goes from the end leaves nothing behind that has seen it.
            left = np.flatnonzero(~discarded)
            discarded = discarded[: left[-1] if left.size else 0]
        num_dropped = int(np.count_nonzero(discarded))
        if not num_dropped:
            return self
        first = int(np.argmax(discarded))
        return Lineage(self.num_dropped + num_dropped, first if self.num_plain is None else min(first, self.num_plain))


PLAIN = Lineage()
"""Of a session that nothing was ever dropped from."""
