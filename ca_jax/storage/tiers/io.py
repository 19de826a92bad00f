"""Moves of blocks from and to a slow device: several operations under one handle, in order, in bounded number, on time.

An operation is a call that reads or writes, and blocks. A queue has a few threads for them, so that one large move
neither fills memory with half-decoded blocks nor starves the next one. A handle is what the mover holds.

**A deadline never frees memory.** A read that is late becomes an error at once, so that the turn goes on without it;
its bytes may still arrive. Until `IoHandle.settled`, the memory or blocks it was to fill are not to be reused.

Beside the queue: `StepThread`, for what waits for a disk without a handle, and `BusyPeriods`, which measures moves that
share a disk.

Not here: what an operation does, or when a move is worth making.
"""

from __future__ import annotations

import concurrent.futures
import errno
import logging
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Hashable, Sequence

from ca_jax.storage.records import BlockIoError, IoFailure

_LOG = logging.getLogger(__name__)
Operation = Callable[[], object]
"""One read or write; blocks. What it raises is the operation's error."""
_REASONS = {
    "NOT_FOUND": IoFailure.MISSING,
    "DATA_LOSS": IoFailure.CORRUPT,
    "OUT_OF_RANGE": IoFailure.CORRUPT,
    "RESOURCE_EXHAUSTED": IoFailure.NO_SPACE,
}


class IoHandle:
    """One move under way. Any thread may use it."""

    def __init__(self, queue: IoQueue, num_operations: int, last: Operation | None):
        self._queue = queue
        self._num_left = num_operations
        self._num_running = 0
        self._last = last
        self._progress_s: float | None = None  # When an operation last began or ended.
        self._submitted_s = queue.clock()
        self._decided = False
        self._outcome, self._end = concurrent.futures.Future[None](), concurrent.futures.Future[None]()
        self.error: BlockIoError | None = None
        """Why it failed; None while the outcome is open, and after success."""

    @property
    def settled(self) -> bool:
        """Whether nothing of it will touch memory or blocks any more. After success always, after an error not yet."""
        return self._end.done()

    def done(self) -> bool:
        """Whether the outcome is known: success, or an error, which a passed deadline is too. Never blocks."""
        self._queue.poll(self)
        return self._outcome.done()

    def wait(self) -> None:
        """Blocks until the outcome is known: by the deadline at the latest."""
        while not self.done():
            concurrent.futures.wait([self._outcome], max(self._late_s() - self._queue.clock(), 0.0))

    def wait_settled(self, timeout_s: float | None = None) -> bool:
        """Blocks until `settled`, which no deadline hastens; returns whether it is."""
        concurrent.futures.wait([self._end], timeout_s)
        return self.settled

    def result(self) -> None:
        """Blocks as `wait` does, and raises what went wrong, a `BlockIoError`."""
        self.wait()
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """Gives the move up, if its outcome is open: what has not begun never will."""
        self._queue._advance(self, BlockIoError(IoFailure.CANCELLED, "the move was cancelled"))

    def add_done_callback(self, callback: Callable[[IoHandle], None]) -> None:
        """Calls `callback(self)` once the outcome is known, at once if it is; on the thread that brings it.

        It must be short and must not wait: it may run on an I/O thread. What it raises is logged.
        """
        self._outcome.add_done_callback(lambda _: callback(self))

    def add_settled_callback(self, callback: Callable[[IoHandle], None]) -> None:
        """Calls `callback(self)` once `settled`. Otherwise as `add_done_callback`."""
        self._end.add_done_callback(lambda _: callback(self))

    def _late_s(self) -> float:
        """When it is late, if nothing progresses before."""
        progress_s = self._progress_s
        if progress_s is None:
            progress_s = max(self._submitted_s, self._queue._progress_s)
        return progress_s + self._queue._deadline_s


class IoQueue:
    """Runs operations, first come first served, a few at a time, each on a thread.

    Args:
      max_in_flight: how many operations run at once.
      deadline_s: seconds without progress after which a move fails. Progress is a begin or end of one of its own
        operations or, while it has not begun, an end of any: to stand behind others that move is not to be late.
      clock: seconds, never decreasing.

    Raises:
      ValueError: a number that is not positive.
    """

    def __init__(self, *, max_in_flight: int, deadline_s: float, clock: Callable[[], float] = time.monotonic):
        if max_in_flight <= 0:
            raise ValueError(f"max_in_flight must be at least 1 operation, got {max_in_flight}")
        if not deadline_s > 0:
            raise ValueError(f"deadline_s must be above 0 s, got {deadline_s} s")
        self.clock = clock
        """Seconds, never decreasing."""
        self._deadline_s = deadline_s
        self._threads = concurrent.futures.ThreadPoolExecutor(max_in_flight, thread_name_prefix="ca_jax-ssd")
        self._lock = threading.Lock()
        self._open: dict[IoHandle, None] = {}  # Not settled, oldest first.
        self._progress_s = clock()
        self._closed = False

    def submit(self, operations: Sequence[Operation], last: Operation | None = None) -> IoHandle:
        """Queues operations as one move. Does not block.

        Args:
          operations: begun in this order, several at once. With the first that fails the move fails.
          last: run when all others have succeeded, at once, such as the one that makes their bytes durable.
        """
        if not operations and last is not None:
            operations, last = [last], None
        handle, error = IoHandle(self, len(operations), last), None
        with self._lock:
            if self._closed:
                error = BlockIoError(IoFailure.CANCELLED, "the store is closed")
            elif operations:
                self._open[handle] = None
                for operation in operations:
                    self._threads.submit(self._run, handle, operation)
                return handle
        self._advance(handle, error)
        return handle

    def failed(self, error: BlockIoError) -> IoHandle:
        """A move that failed before it began: done and settled."""
        handle = IoHandle(self, 0, None)
        self._advance(handle, error)
        return handle

    def poll(self, handle: IoHandle | None = None) -> None:
        """Fails what is late, of one move or of all. Never blocks."""
        now_s = self.clock()
        with self._lock:
            handles = [each for each in ([handle] if handle else self._open) if not each._decided]
        for each in handles:
            if each._late_s() <= now_s:
                found = f"{each._num_left} operations are left, {each._num_running} of them begun"
                message = f"the move must progress within {self._deadline_s} s, and has not; {found}"
                self._advance(each, BlockIoError(IoFailure.DEADLINE, message))

    def close(self) -> None:
        """Cancels moves that have not begun and refuses new ones. Does not wait for the others."""
        with self._lock:
            self._closed = True
            handles = [each for each in self._open if not each._num_running]
        for handle in handles:
            handle.cancel()
        self._threads.shutdown(wait=False)

    def wait_empty(self, timeout_s: float | None) -> bool:
        """Blocks until every move has settled, at most `timeout_s` seconds. Returns whether they have."""
        with self._lock:
            ends = [each._end for each in self._open]
        return not concurrent.futures.wait(ends, timeout_s).not_done

    def _run(self, handle: IoHandle, operation: Operation) -> None:
        """Runs one operation on a thread, and the last one of its move behind it."""
        with self._lock:
            if handle._decided:
                return
            handle._num_running += 1
            handle._progress_s = self.clock()
        error = None
        try:
            operation()
        except Exception as exception:
            error = _describe(exception)
        with self._lock:
            self._progress_s = handle._progress_s = self.clock()
            handle._num_running -= 1
            if error is None:  # One that failed stays left: others may get to `_advance` first, and succeed.
                handle._num_left -= 1
        self._advance(handle, error)

    def _advance(self, handle: IoHandle, error: BlockIoError | None = None) -> None:
        """Moves a handle to its next state, and tells of it outside of the lock."""
        last, was_decided = None, True
        with self._lock:
            if not handle._decided and not error and not handle._num_left and handle._last:
                last, handle._last, handle._num_left = handle._last, None, 1
            elif not handle._decided and (error or not handle._num_left):
                handle._decided, was_decided, handle.error = True, False, error
            settles = handle._decided and not handle._num_running and (handle in self._open or not was_decided)
            if settles:
                self._open.pop(handle, None)
        if last is not None:
            self._run(handle, last)
            return
        if settles:
            handle._end.set_result(None)
        if not was_decided:
            handle._outcome.set_result(None)


def _describe(exception: BaseException) -> BlockIoError:
    """Finds the reason in what an operation raised. TensorStore's is a ValueError that begins with its status."""
    if isinstance(exception, BlockIoError):
        return exception
    message = str(exception)
    if isinstance(exception, OSError):
        is_full, message = exception.errno in (errno.ENOSPC, errno.EDQUOT), f"{type(exception).__name__}: {message}"
    else:
        is_full = re.search(r"os_error_code='(28|122)'", message) is not None  # ENOSPC, EDQUOT
    reason = IoFailure.NO_SPACE if is_full else _REASONS.get(message.partition(":")[0], IoFailure.DEVICE)
    return BlockIoError(reason, message)


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
        self._num_bytes = 0.0  # NaN once a move of the period has failed.

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
            self._num_bytes += math.nan if num_bytes is None else num_bytes
            total_bytes, seconds = self._num_bytes, self._clock() - self._began_s
            if self._moving or math.isnan(total_bytes):
                return
        self._on_period(int(total_bytes), seconds)
