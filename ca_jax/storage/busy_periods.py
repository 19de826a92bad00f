"""How fast moves are that share a disk: bytes and seconds of the times in which any was under way.

Of moves that run side by side each takes longer than it would alone, so the time of one says little:

    move a     |==========|
    move b          |============|            |====|
    periods    |=================|            |====|

Not here: moving (ssd_worker), what follows from rates (rates).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable


class BusyPeriods:
    """Tells of each period in which moves were under way, unless one of them failed. Any thread may call.

    Args:
      on_period: given the bytes that were moved and the seconds it took, on the thread that ended the last move.
      clock: seconds.
    """

    def __init__(self, on_period: Callable[[int, float], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self._on_period = on_period
        self._clock = clock
        self._lock = threading.Lock()
        self._moving: set[Hashable] = set()
        self._began_s = 0.0
        self._num_bytes: int | None = 0

    def begin(self, move: Hashable) -> None:
        """A move begins."""
        with self._lock:
            if not self._moving:
                self._began_s, self._num_bytes = self._clock(), 0
            self._moving.add(move)

    def end(self, move: Hashable, num_bytes: int | None) -> None:
        """A move has ended; of one that never began, or has ended before, nothing is noted.

        Args:
          move: as it began.
          num_bytes: what it moved; None: it failed, so that its period says nothing.
        """
        with self._lock:
            if move not in self._moving:
                return
            self._moving.remove(move)
            if num_bytes is None or self._num_bytes is None:
                self._num_bytes = None
            else:
                self._num_bytes += num_bytes
            total_bytes, seconds = self._num_bytes, self._clock() - self._began_s
            if self._moving or total_bytes is None:
                return
        self._on_period(total_bytes, seconds)
