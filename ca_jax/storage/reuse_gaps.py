"""How soon what was evicted from a tier is wanted again: short gaps say that the tier is too small, or evicts badly.

    evicted ---- gap ----> wanted again: a job of it is queued, or its load is asked for

Not here: who is evicted (policy), when sessions come back whether evicted or not (returns).
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Callable

from ca_jax.storage.records import GAP_BOUNDS_S, GapHistogram

_MAX_KEYS = 10_000  # Sessions that are waited for: about 1 MB.


class ReuseGaps:
    """The gaps of one tier. Belongs to the thread that keeps the books.

    Each eviction counts once at most, and what nobody wants never does.

    Args:
      clock: seconds.
      max_keys: most keys that are remembered; the one evicted first is forgotten first.
    """

    def __init__(self, clock: Callable[[], float], max_keys: int = _MAX_KEYS) -> None:
        self._clock = clock
        self._max_keys = max_keys
        self._evicted_s: collections.OrderedDict[str, float] = collections.OrderedDict()
        self._counts = [0] * (len(GAP_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def __len__(self) -> int:
        """Keys that are remembered."""
        return len(self._evicted_s)

    def evicted(self, key: str) -> None:
        """A session was evicted from the tier."""
        self._evicted_s[key] = self._clock()
        self._evicted_s.move_to_end(key)
        if len(self._evicted_s) > self._max_keys:
            self._evicted_s.popitem(last=False)

    def wanted(self, key: str) -> None:
        """A session that the tier has not is wanted: observes the gap, if it was evicted."""
        evicted_s = self._evicted_s.pop(key, None)
        if evicted_s is None:
            return
        gap_s = max(self._clock() - evicted_s, 0.0)  # Clocks of the day are set back at times.
        self._counts[bisect.bisect_left(GAP_BOUNDS_S, gap_s)] += 1
        self._sum_s += gap_s

    def forget(self, key: str) -> None:
        """A session is in the tier again without having been wanted, or was given up: it is waited for no more."""
        self._evicted_s.pop(key, None)

    def histogram(self) -> GapHistogram:
        """The gaps observed so far."""
        return GapHistogram(counts=tuple(self._counts), sum_s=self._sum_s)
