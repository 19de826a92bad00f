"""Time for tests that wait: a thread's own, or one that moves only when told.

Not here: what is waited for.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """Something that knows the time and runs actions later, one at a time."""

    def now_s(self) -> float:
        """Seconds since some moment."""

    def call_at(self, due_s: float, action: Callable[[], None]) -> None:
        """Has an action run at a time, behind those that were due before. It must not raise."""

    def close(self) -> None:
        """Ends it once every action has run."""


class TimerThread:
    """The time of the machine. Actions run on a thread that waits on a condition between them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._actions: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ca_jax-timer", daemon=True)
        self._thread.start()

    def now_s(self) -> float:
        """Seconds, as `time.perf_counter`."""
        return time.perf_counter()

    def call_at(self, due_s: float, action: Callable[[], None]) -> None:
        """Has an action run on the thread at a time. Any thread may call it.

        Raises:
          ValueError: the timer was closed.
        """
        with self._changed:
            if self._closed:
                raise ValueError("there must be an open timer, got one that was closed")
            heapq.heappush(self._actions, (due_s, next(self._order), action))
            self._changed.notify_all()

    def close(self) -> None:
        """Waits until every action has run, each at its time, and ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while (action := self._next()) is not None:
            action()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while self._actions or not self._closed:
                left_s = self._actions[0][0] - self.now_s() if self._actions else None
                if left_s is not None and left_s <= 0:
                    return heapq.heappop(self._actions)[2]
                self._changed.wait(left_s)
        return None


class ManualTimer:
    """A time that only `advance` moves: actions run within it, on its thread, so that nothing ever waits."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._actions: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._lock = threading.Lock()

    def now_s(self) -> float:
        """Seconds advanced so far; in an action, when it was due."""
        return self._now_s

    def call_at(self, due_s: float, action: Callable[[], None]) -> None:
        """Has an action run by the `advance` that reaches a time. Any thread may call it."""
        with self._lock:
            heapq.heappush(self._actions, (due_s, next(self._order), action))

    def advance(self, seconds: float = math.inf) -> None:
        """Lets time pass, and runs what is due by then in order of time. Without an argument, until nothing is left."""
        end_s = self._now_s + seconds
        while (action := self._next(end_s)) is not None:
            action()
        if end_s < math.inf:
            self._now_s = end_s

    def close(self) -> None:
        """Runs what is left."""
        self.advance()

    def _next(self, end_s: float) -> Callable[[], None] | None:
        with self._lock:
            if not self._actions or self._actions[0][0] > end_s:
                return None
            due_s, _, action = heapq.heappop(self._actions)
            self._now_s = max(self._now_s, due_s)
            return action
