"""What KV kept in int8 is held against: rows rounded by numpy, and a conversation rounded between its turns."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ca_jax.overflow.config import OverflowConfig
from ca_jax.recompute.drift import Drift
from tests import overflow_kit as ok


def scales_of(kv: np.ndarray) -> np.ndarray:
    """The scale of each row, bfloat16 `[*, 1]`: f32 `[*, H]`, largest number / 127, rounded up."""
    wanted = np.abs(kv).max(-1, keepdims=True) / np.float32(127)
    scale = wanted.astype(ml_dtypes.bfloat16)
    above = np.nextafter(scale, ml_dtypes.bfloat16(np.inf))
    return np.where(scale.astype(np.float32) < wanted, above, scale)


def as_kept(kv: np.ndarray) -> np.ndarray:
    """f32 `[*, H]` as it comes back from int8."""
    scale = scales_of(kv).astype(np.float32)
    return np.rint(kv / np.where(scale > 0, scale, 1)) * scale


class RoundedCache(ok.SlicedCache):
    """A context whose rows are rounded once each, when `round_all` is called."""

    def __init__(self, window: int) -> None:
        super().__init__(window)
        self.is_rounded = np.zeros(0, bool)

    def round_all(self) -> None:
        """What is not rounded yet, as a load gives it."""
        places = np.flatnonzero(~self.is_rounded)
        self.kv[:, :, places] = as_kept(self.kv[:, :, places])
        self.is_rounded[:] = True

    def keep(self, kept: np.ndarray) -> None:
        """See `SlicedCache`."""
        super().keep(kept)
        self.is_rounded = self.is_rounded[np.flatnonzero(kept)]

    def compute_anew(self, num_tokens: int) -> None:
        """See `SlicedCache`."""
        super().compute_anew(num_tokens)
        self.is_rounded[:num_tokens] = False

    def _feed(self, part: list[int]) -> np.ndarray:
        logits = super()._feed(part)
        self.is_rounded = np.append(self.is_rounded, np.zeros(len(part), bool))
        return logits


class RoundedConversation(ok.Conversation):
    """A conversation whose turns load what the turns before them saved, rounded, and go on with what they computed."""

    def __init__(self, overflow: OverflowConfig, window: int = ok.WINDOW, drift: Drift | None = None) -> None:
        super().__init__(overflow, window, drift)
        self.cache: RoundedCache = RoundedCache(window)

    def _answer(self, token_ids, max_tokens, given):
        self.cache.round_all()
        return super()._answer(token_ids, max_tokens, given)

    def _drop(self, discarded: np.ndarray, *, by_hand: bool = False) -> None:
        super()._drop(discarded, by_hand=by_hand)
        if self.drift is not None and not by_hand:  # All of it is another, and saved anew.
            self.cache.is_rounded[:] = False
