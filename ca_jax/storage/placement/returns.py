"""When sessions come back, learned while they do: the more turns one has had, and the less long ago, the likelier.

For sessions of 1, 2, 3, and 4 or more turns, the chance of a return is kept by the time since the last one ended, in
bins each of which is `sqrt(2)` times as wide as the one before: returns seen, over time spent waiting for them. A
session that still waits counts with the time so far. Few data are stretched: a bin has its neighbour's chance until it
has some of its own, and all numbers of turns share a curve, each with a factor.

What is asked is how much is saved by the bytes of a session, for as long as it is worth to keep them. A person who
reads the last answer will not be back within seconds; so the chance of a return just now says little, and is bad to
evict by. Rather, of all times at which one might give up on the session, the best is taken:

    rate = max over h of  P(comes back within h) / E(time until it does, h at most)

which is the most that its tokens can save each second: an index after Gittins. What is worth least goes first.

`SaidReturns` has what clients say of it themselves, which counts for more while it holds.

`ReuseGaps` counts how soon what was evicted from a tier is wanted again: short gaps say that the tier is too small, or
evicts badly.

Not here: the choice (policy), the orders (orders).

Source: Gittins, "Bandit processes and dynamic allocation indices", J. R. Statist. Soc. B, 1979.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from sortedcontainers import SortedList

from ca_jax.storage.records import GAP_BOUNDS_S, GapHistogram

NUM_GROUPS = 4
"""Sessions of 1, 2, 3, and 4 or more turns."""

_STARTS_S = [0.0] + [2 ** (i / 2) for i in range(31)]  # Of bins; the last goes on from 9 hours to 18.
_ENDS_S = [*_STARTS_S[1:], 2 * _STARTS_S[-1]]
_WIDTHS_S = np.subtract(_ENDS_S, _STARTS_S)
_FIRST_CHANCE = 0.03  # Of a return within a bin, before anything is known: then longer waits are worth less.
_BIN_WEIGHT = 16.0  # Sessions that the neighbour's chance counts for.
_GROUP_WEIGHT = 8.0  # Returns that the factor 1 counts for.
_REFIT_TURNS = 32  # So many turns at the least are between two fits, and this share of the sessions known.
_REFIT_SHARE = 16


class ReturnTimes:
    """How soon sessions come back, and what that makes keeping them worth. Belongs to the bookkeeping thread.

    A turn costs O(1) on average; what is known of a session that has been away for 18 hours is forgotten.

    Args:
      clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: collections.OrderedDict[str, _Turn] = collections.OrderedDict()  # The one that ended first first.
        # By group and bin.
        self._num_returns = np.zeros((NUM_GROUPS, len(_STARTS_S)))
        self._exposure = np.zeros_like(self._num_returns)  # Of who waits no more, in widths of the bin.
        self._num_turns = 0  # Since the rates were fitted.
        self._rates = self._fit().tolist()

    def came(self, key: str) -> None:
        """A turn of a session has come."""
        now_s = self._clock()
        while self._last and now_s - (oldest := next(iter(self._last.values()))).ended_s >= _ENDS_S[-1]:
            self._last.popitem(last=False)
            self._exposure[oldest.group] += oldest.waits
        turn = self._last.get(key)
        if turn is not None and turn.waits:
            turn.waits = False
            self._exposure[turn.group] += _exposures(now_s - np.array([turn.ended_s]))[0]
            self._num_returns[turn.group, _bin_of(now_s - turn.ended_s)] += 1

    def left(self, key: str) -> None:
        """A turn of a session has ended, whether its KV is stored or not. Without effect on one that has not come."""
        before = self._last.get(key)
        if before is not None and before.waits:
            return
        number = 1 if before is None else before.number + 1
        self._last[key] = _Turn(number=number, ended_s=self._clock())
        self._last.move_to_end(key)
        self._num_turns += 1

    def group(self, key: str) -> int:
        """Whom a session is like: of its number of turns, one less, up to `NUM_GROUPS` - 1."""
        turn = self._last.get(key)
        return 0 if turn is None else turn.group

    def rate(self, group: int, since_s: float) -> float:
        """What each token of a session saves a second, tokens of prefill: see the module.

        Args:
          group: whom it is like.
          since_s: when its last turn ended, by the clock.
        """
        if self._num_turns >= max(_REFIT_TURNS, len(self._last) // _REFIT_SHARE):
            self._rates, self._num_turns = self._fit().tolist(), 0
        return float(self._rates[group][_bin_of(self._clock() - since_s)])

    def learnt(self) -> dict[str, list[list[float]]]:
        """What was seen so far, for `adopt` by a later process; who still waits counts with the time so far."""
        return {"num_returns": self._num_returns.tolist(), "exposure": self._exposed().tolist()}

    def adopt(self, learnt: Mapping[str, Any]) -> None:
        """Begins with what another process has learnt, before any turn.

        Raises:
          ValueError: it is nothing that `learnt` gives.
        """
        try:
            seen = [np.array(learnt[name], float) for name in ("num_returns", "exposure")]
        except (KeyError, TypeError) as error:
            raise ValueError(f"num_returns and exposure must be tables of numbers, got {error!r}") from error
        for table in seen:
            if table.shape != self._exposure.shape or not np.isfinite(table).all() or (table < 0).any():
                raise ValueError(f"each table must be {self._exposure.shape} of numbers >= 0, got {table.shape}")
        self._num_returns, self._exposure = seen
        self._rates = self._fit().tolist()

    def _fit(self) -> np.ndarray:
        """The rate by group and bin, from what was seen so far."""
        exposure = self._exposed()
        chance = _FIRST_CHANCE
        hazard = np.empty(len(_STARTS_S))
        for i, (returned, exposed) in enumerate(zip(self._num_returns.sum(axis=0), exposure.sum(axis=0), strict=True)):
            chance = hazard[i] = (returned + _BIN_WEIGHT * chance) / (exposed + _BIN_WEIGHT)
        expected = exposure @ hazard
        factor = (self._num_returns.sum(axis=1) + _GROUP_WEIGHT) / (expected + _GROUP_WEIGHT)
        return best_rates(factor[:, None] * hazard, _WIDTHS_S)

    def _exposed(self) -> np.ndarray:
        """The exposure by group and bin, of who still waits too."""
        waiting = [turn for turn in self._last.values() if turn.waits]
        exposure, groups = self._exposure.copy(), np.array([turn.group for turn in waiting], int)
        np.add.at(exposure, groups, _exposures(self._clock() - np.array([turn.ended_s for turn in waiting])))
        return exposure


_SOONEST_S = 1.0  # That a session is expected in: nothing is worth endlessly much.
EARLY_S = 10.0
"""How long before its next turn a session is brought back from SSD: as long as tens of GB take to read."""
_SAID_FOR = 1.5  # Times what was said, for which it holds: tools take longer than they were expected to.


class SaidReturns:
    """When sessions will be back, as their clients say. Belongs to the bookkeeping thread.

    What is said while a turn waits or runs counts from its end on. It holds for half as long again as it says, and
    until the next turn comes.

    Args:
      clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._said_s: dict[str, float] = {}  # Of a turn that waits or runs.
        self._until_s: dict[str, float] = {}
        self._due_s: dict[str, float] = {}  # Of those that `take_due` has not named.
        self._by_due: SortedList[tuple[float, str]] = SortedList()

    def say(self, key: str, seconds: float | None, *, is_busy: bool) -> None:
        """A session will be back so long after its turn, or from now where none waits or runs; None: nobody knows."""
        self.forget(key)
        if seconds is not None and is_busy:
            self._said_s[key] = seconds
        elif seconds is not None:
            self._expect(key, seconds)

    def left(self, key: str) -> None:
        """A turn of a session has ended."""
        if (seconds := self._said_s.pop(key, None)) is not None:
            self._expect(key, seconds)

    def forget(self, key: str) -> None:
        """A session has come back, or is gone."""
        self._said_s.pop(key, None)
        self._until_s.pop(key, None)
        self._not_due(key)

    def take_due(self) -> str | None:
        """Names the session that is expected soonest, once, if that is within `EARLY_S` seconds."""
        if not self._by_due or self._by_due[0][0] > self._clock() + EARLY_S:
            return None
        _, key = self._by_due[0]
        self._not_due(key)
        return key

    def until_s(self, key: str) -> float | None:
        """Up to when what was said of a session holds, by the clock; None where it does not, or nothing was said."""
        until_s = self._until_s.get(key)
        if until_s is not None and until_s <= self._clock():
            del self._until_s[key]
            return None
        return until_s

    def away_s(self, key: str, last_used_s: float) -> float:
        """How long a session will be away from now on: as it is said, or else as long as it has been."""
        now_s, until_s = self._clock(), self.until_s(key)
        return now_s - last_used_s if until_s is None else until_s - now_s

    def rate(self, key: str) -> float | None:
        """What each token of a session saves a second by what was said, as `ReturnTimes.rate`; None: nothing was."""
        until_s = self.until_s(key)
        return None if until_s is None else 1 / max(until_s - self._clock(), _SOONEST_S)

    @property
    def now_s(self) -> float:
        """By the clock."""
        return self._clock()

    def _expect(self, key: str, seconds: float) -> None:
        now_s = self._clock()
        self._until_s[key], self._due_s[key] = now_s + _SAID_FOR * seconds, now_s + seconds
        self._by_due.add((self._due_s[key], key))

    def _not_due(self, key: str) -> None:
        if (due_s := self._due_s.pop(key, None)) is not None:
            self._by_due.remove((due_s, key))


def _bin_of(waited_s: float) -> int:
    return max(bisect.bisect(_STARTS_S, waited_s) - 1, 0)


def _exposures(waited_s: np.ndarray) -> np.ndarray:
    """How much of each bin a wait has passed: `[n, bins]` of `[n]` seconds."""
    return np.clip((waited_s[:, None] - _STARTS_S) / _WIDTHS_S, 0, 1)


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class _Turn:
    """The last turn of a session that has ended."""

    number: int  # Counted from 1.
    ended_s: float
    waits: bool = True  # Whether no other has come.

    @property
    def group(self) -> int:
        """Of sessions with as many turns, the longest ones together."""
        return min(self.number, NUM_GROUPS) - 1


def best_rates(hazard: np.ndarray, widths_s: np.ndarray) -> np.ndarray:
    """How much of a return each second of waiting is worth, with the best time to give up.

    `G` groups, `I` bins of time, within each of which the hazard is even.

    Args:
      hazard: float `[G, I]`, > 0: of a return, per width of the bin.
      widths_s: float `[I]`.

    Returns:
      float `[G, I]`: from the beginning of a bin on, the greatest P(return within h) / E(wait, h at most), 1/s, where
      h ends with that bin or a later one.
    """
    num_bins = len(widths_s)
    passed = np.concatenate([np.zeros((len(hazard), 1)), np.cumsum(hazard, axis=1)], axis=1)
    later = np.triu(np.ones((num_bins, num_bins), bool))  # [a, b]: bin b does not come before bin a.
    to_begin = np.where(later, passed[:, None, :-1] - passed[:, :-1, None], 0)
    to_end = np.where(later, passed[:, None, 1:] - passed[:, :-1, None], 0)
    in_bin_s = -np.expm1(-hazard) / hazard * widths_s  # Mean time in a bin that has been reached.
    wait_s = np.cumsum(np.where(later, np.exp(-to_begin) * in_bin_s[:, None], 0), axis=2)
    return np.max(np.divide(-np.expm1(-to_end), wait_s, out=np.zeros_like(wait_s), where=later), axis=2)


_MAX_KEYS = 10_000  # Sessions that are waited for, the last to be evicted: about 1 MB.


class ReuseGaps:
    """The gaps of one tier. Belongs to the bookkeeping thread.

    Each eviction counts once at most; a session that is not wanted again never does.

    Args:
      clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._evicted_s: collections.OrderedDict[str, float] = collections.OrderedDict()
        self._counts = [0] * (len(GAP_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def evicted(self, key: str) -> None:
        """A session was evicted from the tier."""
        self._evicted_s[key] = self._clock()
        self._evicted_s.move_to_end(key)
        if len(self._evicted_s) > _MAX_KEYS:
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
