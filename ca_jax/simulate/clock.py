"""Simulated time: what happens when, and links that take their time."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable


class Clock:
    """What is to happen, in order of time; of what is due at once, what was asked for first."""

    def __init__(self) -> None:
        self.now_s = 0.0
        """Seconds since the beginning."""
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    @property
    def next_s(self) -> float:
        """When the next thing is due; infinite if nothing is."""
        return self._due[0][0] if self._due else math.inf

    def at(self, time_s: float, action: Callable[[], object]) -> None:
        """Has something happen.

        Raises:
          ValueError: the time is past, or none.
        """
        if not self.now_s <= time_s < math.inf:
            raise ValueError(f"there must be a time of at least {self.now_s} s, got {time_s}")
        heapq.heappush(self._due, (time_s, next(self._order), action))

    def run_until(self, time_s: float) -> None:
        """Lets time pass, and happen what is due by then."""
        while self._due and self._due[0][0] <= time_s:
            self.now_s, _, action = heapq.heappop(self._due)
            action()
        self.now_s = max(self.now_s, time_s)


class Link:
    """Moves bytes, one transfer after the other.

    Args:
      clock: of the simulation.
      bytes_per_s: bandwidth; infinite where bytes cost nothing.

    Raises:
      ValueError: a bandwidth that is not positive.
    """

    def __init__(self, clock: Clock, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"bytes_per_s must be a number above 0, got {bytes_per_s}")
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self.free_s = 0.0
        """When what was handed in will have been moved."""
        self.moved_bytes = 0.0
        """All that was handed in."""

    def move(self, num_bytes: float, then: Callable[[], object]) -> float:
        """Moves bytes when those before them have been, and does something then. When that will be."""
        self.free_s = max(self.free_s, self._clock.now_s) + num_bytes / self._bytes_per_s
        self.moved_bytes += num_bytes
        self._clock.at(self.free_s, then)
        return self.free_s
