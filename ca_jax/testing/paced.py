"""Transfers whose time a test decides: at the pace of a link, after random delays, or when a gate is opened.

- `PacedLink` is a serial link of a set bandwidth. It waits on a condition and uses no CPU but for the copies.
- `DelayedTransfers` ends transfers after seeded random delays, in any order.
- `GatedTransfers` ends them when, in what order and how the test says.

The bytes arrive all at once at the end of a transfer, right before it is done: whoever reads staging too early, or
writes too early to what is being saved, finds or leaves the wrong ones.

Not here: what is transferred (controlled_store), time (timers), what a transfer should take (costs).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import random
import threading
from collections.abc import Callable
from typing import Literal, Protocol, TypeVar

from ca_jax.testing.timers import Timer, TimerThread

Result = TypeVar("Result")
Future = concurrent.futures.Future


@dataclasses.dataclass(frozen=True)
class Transfer:
    """What one read or write of a ticket moves."""

    direction: Literal["load", "save"]
    """Towards the device, or away from it."""
    key: str
    """The ticket's session."""
    layer: int | None
    """Which layer; None for all at once."""
    num_layers: int
    """How many."""
    num_bytes: int
    """In all of them; what is padded does not count."""
    memory: tuple[int, int] | None = dataclasses.field(default=None, compare=False)
    """Addresses of the first and one past the last byte of where a load puts them, padding included."""


class Transfers(Protocol):
    """Decides when copies run."""

    def submit(self, transfer: Transfer, copy: Callable[[], Result]) -> Future[Result]:
        """Has `copy` run when the transfer is over. Does not wait; any thread may call it.

        Returns:
          A future of what `copy` returned, or raised.
        """


class PacedLink:
    """A simulated serial link: transfers take their turns, in order of submission, each for its time.

    A transfer ends `seconds(transfer)` after the later of its submission and the end of the one before. Copies run on
    the timer's thread and do not count: one that is late does not delay those behind it. Given to loads and saves both,
    they share it; links of their own make it full duplex.

    Args:
      bytes_per_s: bandwidth; infinite for none.
      layer_s: seconds that each layer takes besides.
      timer: whose time; a thread's own by default.
      copies_early: bytes arrive when a transfer begins, and not right before it is done: for benches, whose transfers
        would else take as much longer as their copies do.

    Raises:
      ValueError: a bandwidth that is not positive, or a negative time.
    """

    def __init__(
        self,
        bytes_per_s: float = math.inf,
        *,
        layer_s: float = 0.0,
        timer: Timer | None = None,
        copies_early: bool = False,
    ) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"bytes_per_s must be a positive number, got {bytes_per_s}")
        if not 0 <= layer_s < math.inf:
            raise ValueError(f"layer_s must be at least 0, got {layer_s}")
        self._bytes_per_s = bytes_per_s
        self._layer_s = layer_s
        self._copies_early = copies_early
        self._timer = timer or TimerThread()
        self._lock = threading.Lock()
        self._free_at_s = -math.inf
        self.busy_s = 0.0
        """Seconds that the transfers submitted so far take."""

    def seconds(self, transfer: Transfer) -> float:
        """What a transfer takes."""
        return transfer.num_layers * self._layer_s + transfer.num_bytes / self._bytes_per_s

    def submit(self, transfer: Transfer, copy: Callable[[], Result]) -> Future[Result]:
        """See `Transfers`."""
        early: Future[Result] = Future()
        arrive = functools.partial(_run, copy, early)
        future, end = _begin(early.result if self._copies_early else copy)
        seconds = self.seconds(transfer)
        with self._lock:  # Until it is on its way, so that they end in order of submission.
            begin_s = max(self._free_at_s, self._timer.now_s())
            self._free_at_s = begin_s + seconds
            self.busy_s += seconds
            if self._copies_early:
                self._timer.call_at(begin_s, arrive)
            self._timer.call_at(self._free_at_s, end)
        return future

    def close(self) -> None:
        """Waits until what was submitted has ended."""
        self._timer.close()

    def __enter__(self) -> PacedLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DelayedTransfers:
    """Ends each transfer after a random delay of its own, so that they overtake one another.

    The delay depends on the seed, the transfer and how many like it there were, and on nothing else: a run can be
    repeated however its threads take their turns.

    Args:
      max_delay_s: the longest; delays are uniform from 0 on.
      seed: of the delays.
      timer: whose time; a thread's own by default.

    Raises:
      ValueError: a negative delay.
    """

    def __init__(self, max_delay_s: float, *, seed: int, timer: Timer | None = None) -> None:
        if not 0 <= max_delay_s < math.inf:
            raise ValueError(f"max_delay_s must be at least 0, got {max_delay_s}")
        self._max_delay_s = max_delay_s
        self._seed = seed
        self._timer = timer or TimerThread()
        self._lock = threading.Lock()
        self._num_like: dict[Transfer, int] = {}

    def submit(self, transfer: Transfer, copy: Callable[[], Result]) -> Future[Result]:
        """See `Transfers`."""
        future, end = _begin(copy)
        with self._lock:
            nth = self._num_like[transfer] = self._num_like.get(transfer, -1) + 1
        delay_s = random.Random(repr((self._seed, transfer, nth))).uniform(0, self._max_delay_s)
        self._timer.call_at(self._timer.now_s() + delay_s, end)
        return future

    def close(self) -> None:
        """Waits until what was submitted has ended."""
        self._timer.close()

    def __enter__(self) -> DelayedTransfers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GatedTransfers:
    """Holds each transfer before a gate until it is let through, by the thread that does so. Any thread may call it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: list[tuple[Transfer, Callable[[], None], Callable[[BaseException], None]]] = []
        self._is_open = False
        self._copying = threading.RLock()  # One copy at a time; what waits for one may submit the next.

    @property
    def held(self) -> tuple[Transfer, ...]:
        """Who stands before the gate, in order of arrival."""
        with self._changed:
            return tuple(transfer for transfer, _, _ in self._held)

    def submit(self, transfer: Transfer, copy: Callable[[], Result]) -> Future[Result]:
        """See `Transfers`."""
        future, end = _begin(copy)
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
        """Waits until so many stand before the gate.

        Returns:
          Who stands there then.

        Raises:
          TimeoutError: they did not come.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._held) >= num_transfers, timeout_s):
                raise TimeoutError(f"there must be {num_transfers} transfers before the gate, got {len(self._held)}")
            return tuple(transfer for transfer, _, _ in self._held)

    def let_through(self, transfer: Transfer | None = None, *, error: BaseException | None = None) -> Transfer:
        """Ends one transfer: when this returns its bytes are in place and its future is done.

        Args:
          transfer: which; by default who came first.
          error: what it breaks with instead; no byte moves then.

        Raises:
          ValueError: it does not stand before the gate.
        """
        with self._changed:
            at = next((i for i, held in enumerate(self._held) if transfer in (None, held[0])), None)
            if at is None:
                raise ValueError(
                    f"there must be {transfer or 'a transfer'} before the gate, got {len(self._held)} others"
                )
            found, end, fail = self._held.pop(at)
        with self._copying:
            if error is not None:
                fail(error)
            else:
                end()
        return found

    def open(self) -> None:
        """Lets through who is here, in order of arrival, and whoever comes."""
        with self._changed:
            self._is_open = True
            held, self._held = self._held, []
        for _, end, _ in held:
            with self._copying:
                end()

    def shut(self) -> None:
        """Holds whoever comes from here on."""
        with self._changed:
            self._is_open = False


def _begin(copy: Callable[[], Result]) -> tuple[Future[Result], Callable[[], None]]:
    """A future that cannot be cancelled, and the action that copies and then completes it."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()
    return future, functools.partial(_run, copy, future)


def _run(copy: Callable[[], Result], future: Future[Result]) -> None:
    """Copies, and completes the future with what came of it."""
    try:
        result = copy()
    except BaseException as error:  # Whatever it is, it is for whoever waits.
        future.set_exception(error)
    else:
        future.set_result(result)
