"""Moves of blocks from and to a slow device: several operations under one handle, in order, in bounded number, on time.

An operation is anything that starts and gives a future (TensorStore's or `concurrent.futures`'). A queue runs a few at
a time, so that one large move neither fills memory with half-decoded blocks nor starves the next one. A handle is what
the mover holds.

**A deadline never frees memory.** A read that is late becomes an error at once, so that the turn goes on without it;
its bytes may still arrive. Until `IoHandle.settled`, the memory or blocks it was to fill are not to be reused.

Beside the queue: `StepThread`, for what waits for a disk without a future, and `BusyPeriods`, which measures moves that
share a disk.

Not here: what an operation does, or when a move is worth making.
"""

from __future__ import annotations

import collections
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from ca_jax.storage.records import BlockIoError, IoFailure

_LOG = logging.getLogger(__name__)


class OperationFuture(Protocol):
    """What an operation gives: `tensorstore.Future` and `concurrent.futures.Future` are such."""

    def add_done_callback(self, callback: Callable[[Any], Any], /) -> Any:
        """Calls `callback(self)` when done, at once if it is."""
        ...

    def exception(self) -> BaseException | None:
        """The error of a future that is done."""
        ...


Operation = Callable[[], OperationFuture]
"""Starts one read or write; does not block. What it raises is the operation's error."""


class IoHandle:
    """One move under way. Any thread may use it."""

    def __init__(self, queue: IoQueue, num_operations: int, last: Operation | None):
        self._queue = queue
        self._num_left = num_operations
        self._num_running = 0
        self._futures: set[OperationFuture] = set()  # Held: TensorStore gives up what has no reference.
        self._last = last
        self._progress_s: float | None = None  # When an operation last began or ended.
        self._submitted_s = queue.clock()
        self._done = False
        self.error: BlockIoError | None = None
        """Why it failed; None while the outcome is open, and after success."""
        self.settled = False
        """Whether nothing of it will touch memory or blocks any more. After success always, after an error not yet."""
        self._done_callbacks: list[Callable[[IoHandle], None]] = []
        self._settled_callbacks: list[Callable[[IoHandle], None]] = []

    def done(self) -> bool:
        """Whether the outcome is known: success, or an error, which a passed deadline is too. Never blocks."""
        self._queue.poll(self)
        return self._done

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until the outcome is known, at most `timeout_s` seconds, and by the deadline at the latest.

        Returns:
          Whether it is known.
        """
        queue = self._queue
        give_up_s = None if timeout_s is None else queue.clock() + timeout_s
        while not self.done():
            now_s = queue.clock()
            left_s = queue.time_left_s(self, now_s)
            if give_up_s is not None:
                if now_s >= give_up_s:
                    return False
                left_s = min(left_s, give_up_s - now_s)
            with queue.changed:
                queue.changed.wait_for(lambda: self._done, max(left_s, 0.0))
        return True

    def wait_settled(self, timeout_s: float | None = None) -> bool:
        """Blocks until `settled`, which no deadline hastens.

        Returns:
          Whether it is.
        """
        with self._queue.changed:
            return self._queue.changed.wait_for(lambda: self.settled, timeout_s)

    def result(self, timeout_s: float | None = None) -> None:
        """Blocks as `wait` does, and raises what went wrong.

        Raises:
          BlockIoError: the move failed.
          TimeoutError: after `timeout_s` the outcome is still open.
        """
        if not self.wait(timeout_s):
            raise TimeoutError(f"the move must end within {timeout_s} s, and is still open")
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """Gives the move up, if its outcome is open: what has not begun never will."""
        self._queue.fail(self, BlockIoError(IoFailure.CANCELLED, "the move was cancelled"))

    def add_done_callback(self, callback: Callable[[IoHandle], None]) -> None:
        """Calls `callback(self)` once the outcome is known, at once if it is; on the thread that brings it.

        It must be short and must not wait: it may run on an I/O thread.
        """
        with self._queue.changed:
            if not self._done:
                self._done_callbacks.append(callback)
                return
        callback(self)

    def add_settled_callback(self, callback: Callable[[IoHandle], None]) -> None:
        """Calls `callback(self)` once `settled`. Otherwise as `add_done_callback`."""
        with self._queue.changed:
            if not self.settled:
                self._settled_callbacks.append(callback)
                return
        callback(self)


class IoQueue:
    """Runs operations, first come first served, a few at a time.

    Args:
      max_in_flight: how many operations run at once.
      deadline_s: seconds without progress after which a move fails. Progress is a begin or end of one of its own
        operations or, while it has not begun, an end of any: to stand behind others that move is not to be late.
      describe: turns an operation's exception into a BlockIoError.
      clock: seconds, never decreasing.

    Raises:
      ValueError: a number that is not positive.
    """

    def __init__(
        self,
        *,
        max_in_flight: int,
        deadline_s: float,
        describe: Callable[[BaseException], BlockIoError],
        clock: Callable[[], float] = time.monotonic,
    ):
        if max_in_flight <= 0:
            raise ValueError(f"max_in_flight must be at least 1 operation, got {max_in_flight}")
        if not deadline_s > 0:
            raise ValueError(f"deadline_s must be above 0 s, got {deadline_s} s")
        self.clock = clock
        """Seconds, never decreasing."""
        self._max_in_flight = max_in_flight
        self._deadline_s = deadline_s
        self._describe = describe
        self.changed = threading.Condition(threading.RLock())
        """Held to change a move, and notified when one has changed."""
        self._waiting: collections.deque[tuple[IoHandle, Operation]] = collections.deque()
        self._open: dict[IoHandle, None] = {}  # Not settled, oldest first.
        self._num_in_flight = 0
        self._progress_s = clock()
        self._starting = False
        self._closed = False

    def submit(self, operations: Sequence[Operation], last: Operation | None = None) -> IoHandle:
        """Queues operations as one move. Does not block.

        Args:
          operations: run in this order, several at once. With the first that fails the move fails.
          last: run when all others have succeeded, such as the one that makes their bytes durable.
        """
        handle = IoHandle(self, len(operations), last)
        with self.changed:
            if self._closed:
                return self.failed(BlockIoError(IoFailure.CANCELLED, "the store is closed"))
            self._open[handle] = None
            self._waiting.extend((handle, operation) for operation in operations)
            callbacks = () if operations else self._advance(handle)
        _call(handle, callbacks)
        self._start()
        return handle

    def failed(self, error: BlockIoError) -> IoHandle:
        """A move that failed before it began: done and settled."""
        handle = IoHandle(self, 0, None)
        handle._done = handle.settled = True
        handle.error = error
        return handle

    def poll(self, handle: IoHandle | None = None) -> None:
        """Fails what is late, of one move or of all. Never blocks."""
        now_s = self.clock()
        with self.changed:
            handles = [each for each in ([handle] if handle else self._open) if not each._done]
        for each in handles:
            if self.time_left_s(each, now_s) <= 0:
                self.fail(each, self._late(each))

    def fail(self, handle: IoHandle, error: BlockIoError) -> None:
        """Decides a move's outcome, if it is open: `error`."""
        with self.changed:
            if handle._done:
                return
            handle.error = error
            callbacks = self._advance(handle)
        _call(handle, callbacks)
        self._start()

    def close(self) -> None:
        """Cancels moves that have not begun and refuses new ones. Does not wait for the others."""
        with self.changed:
            self._closed = True
            handles = list(self._open)
        for handle in handles:
            if not handle._num_running:
                handle.cancel()

    def wait_empty(self, timeout_s: float | None) -> bool:
        """Blocks until every move has settled, at most `timeout_s` seconds. Returns whether they have."""
        with self.changed:
            return self.changed.wait_for(lambda: not self._open, timeout_s)

    def _start(self) -> None:
        """Starts operations while there is room. One thread at a time; the others leave their work to it."""
        with self.changed:
            if self._starting:
                return
            self._starting = True
        while True:
            with self.changed:
                if not self._waiting or self._num_in_flight >= self._max_in_flight:
                    self._starting = False
                    return
                handle, operation = self._waiting.popleft()
                self._num_in_flight += 1
                handle._num_running += 1
                handle._progress_s = self.clock()
            try:
                future = operation()
            except Exception as error:
                self._end(handle, None, error)
            else:
                handle._futures.add(future)
                future.add_done_callback(functools.partial(self._ended, handle))

    def _ended(self, handle: IoHandle, future: OperationFuture) -> None:
        self._end(handle, future, future.exception())

    def _end(self, handle: IoHandle, future: OperationFuture | None, exception: BaseException | None) -> None:
        error = None if exception is None else self._describe(exception)
        with self.changed:
            if future is not None:
                handle._futures.discard(future)
            self._num_in_flight -= 1
            handle._num_running -= 1
            handle._num_left -= 1
            self._progress_s = handle._progress_s = self.clock()
            if error is not None and not handle._done:
                handle.error = error
            callbacks = self._advance(handle)
        _call(handle, callbacks)
        self._start()

    def _advance(self, handle: IoHandle) -> Sequence[Callable[[IoHandle], None]]:
        """Moves a handle to its next state. Under the lock. Returns whom to call, outside of it."""
        callbacks: list[Callable[[IoHandle], None]] = []
        if not handle._done and handle.error is None and not handle._num_left and handle._last is not None:
            self._waiting.appendleft((handle, handle._last))
            handle._num_left, handle._last = 1, None
        if not handle._done and (handle.error is not None or not handle._num_left):
            handle._done = True
            if handle.error is not None:  # What has not begun never will.
                self._waiting = collections.deque(each for each in self._waiting if each[0] is not handle)
            callbacks += handle._done_callbacks
            handle._done_callbacks.clear()
        if handle._done and not handle._num_running and not handle.settled:
            handle.settled = True
            self._open.pop(handle, None)
            callbacks += handle._settled_callbacks
            handle._settled_callbacks.clear()
        self.changed.notify_all()
        return callbacks

    def time_left_s(self, handle: IoHandle, now_s: float) -> float:
        """Seconds until a move is late, if nothing progresses."""
        since_s = handle._progress_s
        if since_s is None:
            since_s = max(handle._submitted_s, self._progress_s)
        return since_s + self._deadline_s - now_s

    def _late(self, handle: IoHandle) -> BlockIoError:
        return BlockIoError(
            IoFailure.DEADLINE,
            f"the move must progress within {self._deadline_s} s, and has not; {handle._num_left} operations are left, "
            f"{handle._num_running} of them begun",
        )


def close_all(queues: Sequence[IoQueue], timeout_s: float | None) -> bool:
    """Closes queues, and waits at most `timeout_s` seconds for what runs in them.

    Returns:
      Whether all has settled. If not, the memory it moves must stay.
    """
    give_up_s = None if timeout_s is None else time.monotonic() + timeout_s
    for each in queues:
        each.close()
    return all(each.wait_empty(None if give_up_s is None else give_up_s - time.monotonic()) for each in queues)


def _call(handle: IoHandle, callbacks: Sequence[Callable[[IoHandle], None]]) -> None:
    """Calls each. One that raises must not stop the queue: no one else would start what waits."""
    for callback in callbacks:
        try:
            callback(handle)
        except Exception:
            _LOG.exception("a callback of a move raised")


_LOG = logging.getLogger(__name__)


class StepThread:
    """A daemon thread; any thread may call.

    Args:
      name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._steps: queue.SimpleQueue[tuple[Callable[[], object], bool] | None] = queue.SimpleQueue()
        self._began_s: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, step: Callable[[], object], *, timed: bool = True) -> None:
        """Has a step done behind those that were put before. One that is not `timed` may take as long as it likes."""
        self._steps.put((step, timed))

    def progressed(self) -> None:
        """The step under way goes on: to be called from it."""
        if self._began_s is not None:
            self._began_s = time.monotonic()

    @property
    def stands_s(self) -> float:
        """Seconds since the step under way began, or went on; 0 where none is timed."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def end(self) -> None:
        """Ends the thread after what was put."""
        self._steps.put(None)

    def join(self, timeout_s: float) -> bool:
        """Waits for its end, at most so long; whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._steps.get()) is not None:
            step, timed = item
            self._began_s = time.monotonic() if timed else None
            try:
                step()
            except Exception:  # A defect: what is left open stays so, all else goes on.
                _LOG.exception("a step of %s broke", self._thread.name)
            self._began_s = None


class BusyPeriods:
    """Reports each period in which moves were under way, unless one of them failed. Any thread may call.

    Of moves that run side by side each takes longer than it would alone, so the time of one says little:

        move a     |==========|
        move b          |============|            |====|
        periods    |=================|            |====|

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
