"""A store whose copies take their time: at the pace of a link, or when other `Transfers` say so.

    with PacedLink(bytes_per_s=12e9) as link:
        store = ControlledStore(store, loads=link, saves=link)

The bytes of a transfer arrive all at once at its end, right before it is done: code that reads staging too early, or
overwrites too early what is being saved, finds or leaves the wrong ones.

Not here: what a transfer should take (`ca_jax.kv.costs`), the copies themselves (`ca_jax.storage.tickets`).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import sched
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, Self, TypeVar, cast

import numpy as np

from ca_jax.storage.records import MissReason
from ca_jax.storage.store import AttentionStore

Result = TypeVar("Result")
Future = concurrent.futures.Future

CALIBRATIONS = 3
"""Samples of compute alone that a suite sets the pace of a link by."""


@dataclasses.dataclass(frozen=True)
class Transfer:
    """What one read or write of a ticket moves."""

    direction: Literal["load", "save"]
    """Towards the device, or away from it."""
    key: str
    layer: int | None
    """Which layer; None for all at once."""
    num_layers: int
    num_bytes: int
    """In all of them, without padding."""
    memory: tuple[int, int] | None = dataclasses.field(default=None, compare=False)
    """Addresses of the first and one past the last byte of where a load puts them, padding included."""


class Transfers(Protocol):
    """Decides when copies run."""

    def submit(self, transfer: Transfer, copy: Callable[[], Result]) -> Future[Result]:
        """Has `copy` run when the transfer is over; returns a future of its result or error. Never waits."""


class Timer(Protocol):
    """Knows the time and runs actions later, one at a time."""

    def now_s(self) -> float:
        """Seconds since some moment."""

    def call_at(self, due_s: float, action: Callable[[], None]) -> None:
        """Has an action run at a time, behind those that were due before. It must not raise."""

    def close(self) -> None:
        """Ends it once every action has run."""


class TimerThread:
    """The time of the machine. Actions run on a thread of its own."""

    def __init__(self) -> None:
        self._changed = threading.Event()
        self._actions = sched.scheduler(time.perf_counter, self._wait)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ca_jax-timer", daemon=True)
        self._thread.start()

    def now_s(self) -> float:
        """Seconds, as `time.perf_counter`."""
        return time.perf_counter()

    def call_at(self, due_s: float, action: Callable[[], None]) -> None:
        """Has an action run on the thread at a time. Any thread may call it. ValueError: the timer was closed."""
        if self._closed:
            raise ValueError("the timer must be open, got one that was closed")
        self._actions.enterabs(due_s, 0, action)
        self._changed.set()

    def close(self) -> None:
        """Waits until every action has run, each at its time, and ends the thread."""
        self._closed = True
        self._changed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed or not self._actions.empty():
            self._wait(None)
            self._actions.run()

    def _wait(self, seconds: float | None) -> None:
        """Until another action may be the first that is due."""
        self._changed.wait(seconds)
        self._changed.clear()


class PacedLink:
    """A simulated serial link: transfers take their turns, in order of submission, each for its time.

    A transfer ends `seconds(transfer)` after the later of its submission and the end of the one before. Copies run on
    the timer's thread and do not count: one that is late does not delay those behind it. Given to loads and saves both,
    they share it; links of their own make it full duplex.

    Args:
      bytes_per_s: bandwidth; infinite for none.
      layer_s: seconds that each layer takes besides.
      timer: whose time; a thread's own by default.
      copies_early: bytes arrive when a transfer begins, and not right before it is done: for benchmarks, whose
        transfers would else take as much longer as their copies do.

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
        if not 0 <= layer_s < math.inf:
            raise ValueError(f"layer_s must be at least 0, got {layer_s}")
        self.set_pace(bytes_per_s)
        self._layer_s = layer_s
        self._copies_early = copies_early
        self._timer = timer or TimerThread()
        self._lock = threading.Lock()
        self._free_at_s = -math.inf
        self.busy_s = 0.0
        """Seconds that the transfers submitted so far take."""

    def set_pace(self, bytes_per_s: float = math.inf) -> None:
        """Makes what is submitted from now on take its time at that bandwidth. Nothing may move meanwhile."""
        if not bytes_per_s > 0:
            raise ValueError(f"bytes_per_s must be a positive number, got {bytes_per_s}")
        self._bytes_per_s = bytes_per_s

    def seconds(self, transfer: Transfer) -> float:
        """Returns what a transfer takes."""
        return transfer.num_layers * self._layer_s + transfer.num_bytes / self._bytes_per_s

    def submit(self, transfer: Transfer, copy: Callable[[], Result]) -> Future[Result]:
        """See `Transfers`."""
        early, arrive = begin_copy(copy)
        future, end = begin_copy(early.result) if self._copies_early else (early, arrive)
        with self._lock:  # Until it is on its way, so that they end in order of submission.
            begin_s = max(self._free_at_s, self._timer.now_s())
            self._free_at_s = begin_s + self.seconds(transfer)
            self.busy_s += self.seconds(transfer)
            if self._copies_early:
                self._timer.call_at(begin_s, arrive)
            self._timer.call_at(self._free_at_s, end)
        return future

    def close(self) -> None:
        """Waits until what was submitted has ended."""
        self._timer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AdjustableLink(PacedLink):
    """A `PacedLink` that hardly uses the CPU; endless at first.

    A load whose bytes the same load has put there before, and no other since, takes its time and copies nothing: a
    device's copy engine would not take cores from what computes either. What is stored must stay the same meanwhile.
    """

    def __init__(self) -> None:
        super().__init__(copies_early=True)
        self._present: dict[tuple[int, int], Transfer] = {}  # What lies where.

    def submit(self, transfer: Transfer, copy: Callable[[], Result]) -> Future[Result]:
        """See `Transfers`."""
        if transfer.memory is None:
            return super().submit(transfer, copy)
        if self._present.get(transfer.memory) == transfer:
            return super().submit(transfer, cast(Callable[[], Result], lambda: None))
        start, stop = transfer.memory
        for each in [each for each in self._present if each[0] < stop and start < each[1]]:
            del self._present[each]
        self._present[transfer.memory] = transfer
        return super().submit(transfer, copy)


def begin_copy(copy: Callable[[], Result]) -> tuple[Future[Result], Callable[[], None]]:
    """Returns a future that cannot be cancelled, and the action that copies and then completes it."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = copy()
        except BaseException as error:  # Whatever it is, it is for the future's reader.
            future.set_exception(error)
        else:
            future.set_result(result)

    return future, run


class ControlledTicket:
    """A ticket of a load or a save whose copies run when `transfers` says so. A load's errors come by its futures."""

    def __init__(self, ticket: Any, transfers: Transfers) -> None:
        self.ticket = ticket
        """The store's; all but copying is its own."""
        self._transfers = transfers
        self._reads: list[Future[None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ticket, name)

    def read(self, layer: int, dst: np.ndarray, first_token: int = 0) -> Future[None]:
        """As `LoadTicket.read`."""
        num_bytes = dst.nbytes * (self.num_tokens - first_token) // max(dst.shape[1], 1)
        memory = dst.ctypes.data, dst.ctypes.data + dst.nbytes
        transfer = Transfer("load", self.key, layer, 1, num_bytes, memory=memory)
        read = functools.partial(self.ticket.read, layer, dst, first_token)
        self._reads.append(self._transfers.submit(transfer, lambda: read().result()))
        return self._reads[-1]

    def write(self, layer: int, kv: np.ndarray, token_offset: int = 0) -> bool:
        """As `SaveTicket.write`; returns when the transfer is over."""
        transfer = Transfer("save", self.key, layer, 1, kv.nbytes)
        return self._transfers.submit(transfer, lambda: bool(self.ticket.write(layer, kv, token_offset))).result()

    def write_all(self, kv: np.ndarray | Sequence[np.ndarray], token_offset: int = 0) -> bool:
        """As `SaveTicket.write_all`; one transfer, of all layers."""
        arrays = [kv] if isinstance(kv, np.ndarray) else kv
        num_bytes = sum(each.nbytes for each in arrays)
        transfer = Transfer("save", self.key, None, sum(map(len, arrays)), num_bytes)
        return self._transfers.submit(transfer, lambda: bool(self.ticket.write_all(kv, token_offset))).result()

    def settle(self) -> None:
        """Waits until no read is under way."""
        concurrent.futures.wait(self._reads)


class ControlledStore:
    """An `AttentionStore` whose tickets copy when `loads` and `saves` say so; everything else is the store's.

    A load ends only once its reads have. A write of a save that was given up returns False when its transfer is over.
    Where one of the two is None, its tickets are left as they are.
    """

    def __init__(
        self, store: AttentionStore, *, loads: Transfers | None = None, saves: Transfers | None = None
    ) -> None:
        self.store = store
        self._loads, self._saves = loads, saves

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def prepare_load(self, *args: Any, **options: Any) -> Any:
        """As `AttentionStore.prepare_load`."""
        return self._controlled(self.store.prepare_load(*args, **options))

    def hold_part(self, *args: Any, **options: Any) -> Any:
        """As `AttentionStore.hold_part`."""
        return self._controlled(self.store.hold_part(*args, **options))

    def prepare_save(self, *args: Any, **options: Any) -> Any:
        """As `AttentionStore.prepare_save`."""
        ticket = self.store.prepare_save(*args, **options)
        return ticket if ticket is None or self._saves is None else ControlledTicket(ticket, self._saves)

    def _controlled(self, ticket: Any) -> Any:
        return ticket if ticket is None or self._loads is None else ControlledTicket(ticket, self._loads)

    def complete_load(self, ticket: Any, **options: Any) -> None:
        """As `AttentionStore.complete_load`."""
        self.store.complete_load(_settled(ticket), **options)

    def abort_load(self, ticket: Any, *reason: MissReason) -> None:
        """As `AttentionStore.abort_load`."""
        self.store.abort_load(_settled(ticket), *reason)

    def complete_save(self, ticket: Any) -> bool:
        """As `AttentionStore.complete_save`."""
        return self.store.complete_save(_settled(ticket))

    def abort_save(self, ticket: Any) -> None:
        """As `AttentionStore.abort_save`."""
        self.store.abort_save(_settled(ticket))


def _settled(ticket: Any) -> Any:
    """The store's own ticket, once no read of it is under way."""
    if not isinstance(ticket, ControlledTicket):
        return ticket
    ticket.settle()
    return ticket.ticket
