"""Transfers whose time a test decides: at once, after seeded random delays, or when a gate is opened; a time that tests
set."""

from __future__ import annotations

import collections
import math
import random
import sched
import threading
from collections.abc import Callable

from benchmarks.paced import Future, Result, Timer, TimerThread, Transfer, begin_copy


class ManualTimer:
    """A time that only `advance` moves: actions run within it, on its thread, so that nothing ever waits."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._actions = sched.scheduler(self.now_s, self._pass)

    def now_s(self) -> float:
        """Seconds advanced so far; in an action, when it was due."""
        return self._now_s

    def call_at(self, due_s: float, action: Callable[[], None]) -> None:
        """Has an action run by the `advance` that reaches a time. Any thread may call it."""
        self._actions.enterabs(due_s, 0, action)

    def advance(self, seconds: float = math.inf) -> None:
        """Lets time pass, and runs what is due by then in order of time. Without an argument, until nothing is left."""
        end_s = self._now_s + seconds
        while not self._actions.empty() and self._actions.queue[0].time <= end_s:
            self._now_s = max(self._now_s, self._actions.queue[0].time)
            self._actions.run(blocking=False)
        if end_s < math.inf:
            self._now_s = end_s

    def close(self) -> None:
        """Runs what is left."""
        self.advance()

    def _pass(self, seconds: float) -> None:
        """`advance` alone moves time."""


class InstantTransfers:
    """Transfers that take place at once, and are counted by direction and layer.

    Args:
      breaks: which of them break instead.
    """

    def __init__(self, breaks: Callable[[Transfer], bool] = lambda transfer: False) -> None:
        self.breaks = breaks
        self.counts: collections.Counter[tuple[str, int | None]] = collections.Counter()
        self.num_broken = 0

    def submit(self, transfer: Transfer, copy: Callable[[], Result]) -> Future[Result]:
        self.counts[transfer.direction, transfer.layer] += 1
        future: Future[Result] = Future()
        if self.breaks(transfer):
            self.num_broken += 1
            future.set_exception(OSError("the bytes are gone"))
        else:
            future.set_result(copy())
        return future


class DelayedTransfers:
    """Ends each transfer after a random delay of its own, uniform up to a longest one: they overtake each other.

    The delay depends on the seed, the transfer and how many like it there were, and on nothing else: a run can be
    repeated however its threads take their turns.
    """

    def __init__(self, max_delay_s: float, *, seed: int, timer: Timer | None = None) -> None:
        self._max_delay_s = max_delay_s
        self._seed = seed
        self._timer = timer or TimerThread()
        self._lock = threading.Lock()
        self._num_like: dict[Transfer, int] = {}

    def submit(self, transfer: Transfer, copy: Callable[[], Result]) -> Future[Result]:
        future, end = begin_copy(copy)
        with self._lock:
            nth = self._num_like[transfer] = self._num_like.get(transfer, -1) + 1
        delay_s = random.Random(repr((self._seed, transfer, nth))).uniform(0, self._max_delay_s)
        self._timer.call_at(self._timer.now_s() + delay_s, end)
        return future

    def __enter__(self) -> DelayedTransfers:
        return self

    def __exit__(self, *_: object) -> None:
        """Waits until what was submitted has ended."""
        self._timer.close()


class GatedTransfers:
    """Holds each transfer before a gate until it is let through, by the thread that does so. Any thread may call it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: list[tuple[Transfer, Callable[[], None], Callable[[BaseException], None]]] = []
        self._is_open = False
        self._copying = threading.RLock()  # One copy at a time; what waits for one may submit the next.

    @property
    def held(self) -> tuple[Transfer, ...]:
        """Transfers before the gate, in order of arrival."""
        with self._changed:
            return tuple(transfer for transfer, _, _ in self._held)

    def submit(self, transfer: Transfer, copy: Callable[[], Result]) -> Future[Result]:
        future, end = begin_copy(copy)
        with self._changed:
            passes = self._is_open
            if not passes:
                self._held.append((transfer, end, future.set_exception))
                self._changed.notify_all()
        if passes:
            with self._copying:
                end()
        return future

    def wait_held(self, num_transfers: int = 1, timeout_s: float = 60.0) -> tuple[Transfer, ...]:
        """Waits until so many are before the gate, and returns those; raises TimeoutError if they do not come."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._held) >= num_transfers, timeout_s):
                raise TimeoutError(f"transfers before the gate must be {num_transfers}, got {len(self._held)}")
            return tuple(transfer for transfer, _, _ in self._held)

    def let_through(self, transfer: Transfer | None = None, *, error: BaseException | None = None) -> Transfer:
        """Ends one transfer, by default the first: when this returns its bytes are in place and its future is done.

        With an error it breaks with that instead, and no byte moves.
        """
        with self._changed:
            at = next((i for i, held in enumerate(self._held) if transfer in (None, held[0])), None)
            if at is None:
                raise ValueError(f"{transfer or 'a transfer'} must be before the gate, got {len(self._held)} others")
            found, end, fail = self._held.pop(at)
        with self._copying:
            if error is not None:
                fail(error)
            else:
                end()
        return found

    def open(self) -> None:
        """Lets through those that are held, in order of arrival, and all that come."""
        with self._changed:
            self._is_open = True
            held, self._held = self._held, []
        for _, end, _ in held:
            with self._copying:
                end()

    def shut(self) -> None:
        """Holds all that come from here on."""
        with self._changed:
            self._is_open = False
