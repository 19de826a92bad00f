"""Moves between DRAM and SSD: what the SSD's index asks for, and the threads that do it.

Each fetch and each flush is done by one thread from beginning to end; some read, others write and change the catalog,
one at a time. One more thread holds them against the deadline: any may stand in the catalog or before a block for as
long as the disk does. Tasks that are late fail, but a flush that is being published, and all are told that the SSD is
late. **A deadline never frees memory**: bytes may still arrive, and a task is reported once more when it has settled.

A *fetch* reads what to expect from the catalog, then the blocks, which are held against their checksums. A *flush*
makes earlier changes of the catalog durable, writes the blocks that are not on SSD yet, and publishes the session, with
the checksums of its blocks, once they are durable. No block that a published session refers to is ever written: what
changes goes to other blocks, so that a process that dies at any moment leaves the old state or the new one.

Changes of the catalog that free blocks (`forget`, and a `change` that cuts) are carried out in the order of their
submission, before any later write: a flush makes those that were asked for before. One that cannot be made durable is
tried again before the next write, and until it is made nothing is written at all.

Tasks belong to the caller; what became of them comes back by `take_ended`. Nothing here raises for what a disk or
catalog does, but `contents`, which reads the catalog for a thread that must not wait for a disk.

Not here: which sessions move, and into which blocks (ssd); the tasks themselves (tasks).
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ca_jax.storage.catalog.catalog import Catalog, CatalogReader
from ca_jax.storage.catalog.file import (
    CatalogCorruptError,
    CatalogError,
    CatalogFullError,
    CatalogLateError,
    quarantine,
)
from ca_jax.storage.catalog.records import Contents, DamagedRecordError
from ca_jax.storage.records import BlockIoError, IoFailure, StoreRuntime
from ca_jax.storage.tiers.disk import BusyPeriods, DiskTier, describe
from ca_jax.storage.tiers.tasks import Changed, FetchTask, FlushTask, Task, TaskEnd
from ca_jax.telemetry.timeline import ArgValue, Track

_LOG = logging.getLogger(__name__)
_POLL_S = 0.25  # How often what is under way is held against its deadline.
_CLOSE_ASKS_S = 1.0  # A reader that does not answer in that time stays open.
_MAX_READERS = 8  # Fetches that have begun. Their blocks stand in one queue.
_MAX_WRITERS = 4  # Two flushes, what comes before the first, and changes of the catalog.
_SHOWN_KEY_CHARS = 12  # Of a key, on a timeline.


class SsdWorker:
    """The threads. `submit` calls never wait; all public methods belong to the bookkeeping thread. See `SsdMover`.

    Args:
      tier: the blocks.
      catalog: the worker's from now on: no other thread or process may change it.
      deadline_s: seconds without progress after which the SSD is late. A task makes progress when a block of its own
        begins or ends, or while it waits for others, when one of theirs does.
      prepare: run before the first write, for as long as it takes.
      runtime: its `on_progress` is called, from the threads, whenever `take_ended` has something new.
      clock: seconds, never decreasing.
    """

    def __init__(
        self,
        tier: DiskTier,
        catalog: Catalog,
        *,
        deadline_s: float,
        prepare: Callable[[], object],
        runtime: StoreRuntime,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier, self._catalog = tier, catalog
        self.layout, self.stored_block_bytes, self.num_blocks = tier.layout, tier.stored_block_bytes, tier.num_blocks
        self._unforgotten: set[str] = set()  # What the catalog still names and must not, before anything is written.
        self._is_beyond_use = False  # Whether the catalog is damaged where it would be written.
        self._reader, self._asked_reader = (CatalogReader(catalog.directory, catalog.namespace) for _ in range(2))
        self._asked: concurrent.futures.Future[Contents | None] | None = None
        self._on_progress = runtime.on_progress
        self._fetching = BusyPeriods(runtime.on_fetch)
        self._timeline = runtime.timeline
        self._ended: collections.deque[TaskEnd | Changed] = collections.deque()
        self._deadline_s = deadline_s
        self._clock = clock
        self._lock = threading.Lock()  # Of what follows.
        self._open: dict[Task, None] = {}  # Not settled.
        self._progress_s = dict.fromkeys((FetchTask, FlushTask), clock())  # Of any task of the kind.
        self._changes: collections.deque[tuple[float, Callable[[], None]]] = collections.deque()  # Not tried yet.
        self._reading, self._changing = threading.Lock(), threading.Lock()  # Held by who reads or changes the catalog.
        self._futures: set[concurrent.futures.Future[object]] = set()
        self._reads, self._writes, self._asks = (
            concurrent.futures.ThreadPoolExecutor(number, f"ca_jax-ssd-{does}")
            for does, number in (("reads", _MAX_READERS), ("writes", _MAX_WRITERS), ("asks", 1))
        )
        self._prepared = self._put(self._writes, prepare)
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="ca_jax-ssd-watch", daemon=True).start()

    @property
    def num_changes(self) -> int:
        """See `SsdMover`."""
        return len(self._changes) + len(self._ended)  # In this order: none is missed that ends in between.

    @property
    def is_late(self) -> bool:
        """See `SsdMover`."""
        with self._lock:
            changes_s = max(self._changes[0][0], self._progress_s[FlushTask]) if self._changes else math.inf
            told = [self._last_progress_s(task) for task in self._open if task.cancelled or task.is_final]
            return self._clock() - min([changes_s, *told]) > self._deadline_s

    def submit(self, task: Task) -> None:
        """See `SsdMover`."""
        threads = self._writes
        if isinstance(task, FetchTask):
            threads, task.progress_s = self._reads, self._clock()
        with self._lock:
            self._open[task] = None
        self._put(threads, functools.partial(self._do, task))

    def forget(self, keys: Sequence[str]) -> None:
        """See `SsdMover`."""
        self._put_change(functools.partial(self._forget, tuple(keys)))

    def change(
        self, key: str, change: Callable[[Catalog], bool], note: bytes | None = None, *, cuts: bool = False
    ) -> None:
        """See `SsdMover`."""
        self._put_change(functools.partial(self._change, key, change, note, cuts))

    def contents(self, key: str) -> Contents | None:
        """See `SsdMover`. Until its last question is answered no other is asked."""
        if self._asked is not None and not self._asked.done():
            raise CatalogLateError("the catalog must answer one question at a time, and has not answered the last")
        self._asked = self._asks.submit(self._asked_reader.contents, key)
        try:
            return self._asked.result(self._deadline_s)
        except TimeoutError:
            raise CatalogLateError(f"the catalog must answer within {self._deadline_s} s, and did not") from None

    def take_ended(self) -> TaskEnd | Changed | None:
        """See `SsdMover`."""
        return self._ended.popleft() if self._ended else None

    def close(self, timeout_s: float, used_s: Mapping[str, float]) -> bool:
        """See `SsdMover`. Closes tier and catalog, unless something of them is under way for longer."""
        self._put_change(functools.partial(self._use, used_s))
        for threads in (self._asks, self._reads, self._writes):
            threads.shutdown(wait=False)
        # It goes first: the last one to close has to be one that may merge the log.
        if self._asked is None or concurrent.futures.wait([self._asked], _CLOSE_ASKS_S).done:
            self._asked_reader.close()
        has_ended = not concurrent.futures.wait(tuple(self._futures), timeout_s).not_done
        self._closed.set()
        if not has_ended:
            for task in tuple(self._open):
                task.cancelled = True
            return False
        self._tier.close()
        self._reader.close()
        self._catalog.close()
        if self._is_beyond_use:  # Nothing could ever be written again with it.
            try:
                _LOG.warning("the catalog is damaged, and was moved to %s", quarantine(self._catalog.directory))
            except CatalogError as error:
                _LOG.warning("a damaged catalog stays where it is: %s", error)
        return True

    # Threads and the deadline.

    def _put(
        self, threads: concurrent.futures.Executor, step: Callable[[], object]
    ) -> concurrent.futures.Future[object]:
        future = threads.submit(step)
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def _watch(self) -> None:
        """Fails tasks that are late, but a flush that is being published: that one's end is waited for."""
        was_late = False
        while not self._closed.wait(_POLL_S):
            with self._lock:
                begins_s = self._clock() - self._deadline_s
                late = [task for task in self._open if not task.is_final and self._last_progress_s(task) < begins_s]
                late = [task for task in late if not task.cancelled]
                for task in late:
                    task.cancelled = True
            for task in late:
                found = f"the move must progress within {self._deadline_s} s, and has not"
                self._end(task, BlockIoError(IoFailure.DEADLINE, found), settled=False)
            if was_late != (was_late := self.is_late):
                self._on_progress()

    def _last_progress_s(self, task: Task) -> float:
        return task.progress_s if task.is_moving else max(task.progress_s, self._progress_s[type(task)])

    def _progressed(self, task: Task, *, is_moving: bool = False) -> None:
        """Notes that a task goes on.

        Raises:
          BlockIoError: it was cancelled, or is late.
        """
        if task.cancelled:
            raise BlockIoError(IoFailure.CANCELLED, "the task was cancelled")
        task.is_moving |= is_moving
        task.progress_s = self._progress_s[type(task)] = self._clock()

    def _do(self, task: Task) -> None:
        """Does a task from beginning to end."""
        contents: Contents | None = None
        error: BlockIoError | None = None
        try:
            if isinstance(task, FetchTask):
                contents = self._fetch(task)
            elif isinstance(task, FlushTask):
                self._flush(task)
        except (BlockIoError, CatalogError) as failure:
            error = self._failure(failure, writes=isinstance(task, FlushTask))
        except Exception as failure:  # A defect.
            _LOG.exception("a move between DRAM and SSD broke")
            error = describe(failure)
        with self._lock:
            del self._open[task]
        self._end(task, error, contents)

    def _end(
        self, task: Task, error: BlockIoError | None, contents: Contents | None = None, *, settled: bool = True
    ) -> None:
        num_bytes = task.num_moved_blocks * self.layout.block_bytes
        track: Track = "fetch" if isinstance(task, FetchTask) else "flush"
        began_s, task.began_s = task.began_s, None
        span_s = None if began_s is None else (began_s, time.perf_counter())
        if span_s is not None:  # Told once. It was no thread's: others were under way with it.
            args: dict[str, ArgValue] = {"key": task.key[:_SHOWN_KEY_CHARS], "num_bytes": num_bytes}
            if error is not None:
                args["error"] = error.reason.value
            self._timeline.add(track, track, span_s[0], span_s[1], **args)
        self._fetching.end(task, num_bytes if error is None else None)
        self._ended.append(TaskEnd(task=task, error=error, settled=settled, contents=contents, span_s=span_s))
        self._on_progress()

    def _fetch(self, task: FetchTask) -> Contents:
        self._progressed(task)
        task.began_s = time.perf_counter()
        self._fetching.begin(task)
        with self._reading:
            found = self._reader.load(task.key)
        if found is None:
            raise BlockIoError(IoFailure.MISSING, f"the catalog must have session {task.key!r}, got none")
        # The catalog may not have been cut yet: what stays of an older state is in the same rows of the same blocks.
        record, contents = found
        indices = task.copy.find_in(record, self.layout.block_tokens)
        if indices is None:
            raise BlockIoError(
                IoFailure.CORRUPT,
                f"the catalog must have {task.copy.num_tokens} tokens of session {task.key!r} in "
                f"{task.copy.num_blocks} blocks, got {record.num_tokens} in {record.num_blocks}, without these",
            )
        tokens, blocks = indices
        contents = dataclasses.replace(contents, token_ids=contents.token_ids[tokens], sums=contents.sums[blocks])
        on_step = functools.partial(self._progressed, task, is_moving=True)
        self._tier.read_blocks(task.copy.block_ids.tolist(), task.into, contents.sums, on_step)
        return contents

    def _flush(self, task: FlushTask) -> None:
        concurrent.futures.wait([self._prepared])
        self._progressed(task)
        with self._changing:
            self._settle()
        task.began_s = time.perf_counter()
        num_shared = task.num_shared_blocks
        sums = np.empty((len(task.sources), self.layout.num_layers), np.uint32)
        if self._tier.codec is not None:
            sums[:num_shared] = self._sums_of_shared(task)
        else:
            for index in range(num_shared):
                sums[index] = self.layout.layer_sums(task.sources[index])
                self._progressed(task)
        block_ids = task.record.block_ids[task.num_kept_blocks + num_shared :].tolist()
        on_step = functools.partial(self._progressed, task, is_moving=True)
        self._tier.write_blocks(block_ids, task.sources[num_shared:], sums[num_shared:], on_step)
        with self._changing:
            self._settle()
            with self._lock:
                self._progressed(task)
                task.is_final = True
            self._publish(task, sums)

    def _sums_of_shared(self, task: FlushTask) -> np.ndarray:
        """What the catalog says of blocks that are another session's too: memory may hold them as they were before they
        were coded.

        Raises:
          BlockIoError: it does not know that session any more, or with other blocks.
        """
        num_shared, first = task.num_shared_blocks, task.num_kept_blocks
        wanted = task.record.block_ids[first : first + num_shared]
        with self._changing:
            found = self._catalog.load(task.shares_with) if num_shared else None
        if found is not None and np.array_equal(found[0].block_ids[:num_shared], wanted):
            return found[1].sums[:num_shared]
        if num_shared:
            raise BlockIoError(IoFailure.CATALOG, f"session {task.shares_with!r} must have the blocks shared with it")
        return np.empty((0, self.layout.num_layers), np.uint32)

    # The catalog, by whoever holds it.

    def _publish(self, task: FlushTask, new_sums: np.ndarray) -> None:
        """Publishes a session, some leading blocks of which are published already."""
        kept = self._catalog.contents(task.key)
        kept_sums = new_sums[:0] if kept is None else kept.sums
        if len(kept_sums) < task.num_kept_blocks:
            raise DamagedRecordError(
                f"session {task.key!r} must have {task.num_kept_blocks} blocks to stay, got {len(kept_sums)}"
            )
        note = task.note
        if note is None:
            note = b"" if kept is None else kept.note
        sums = np.concatenate([kept_sums[: task.num_kept_blocks], new_sums])
        self._catalog.publish(task.record, task.token_ids, sums, note)

    def _put_change(self, step: Callable[[], None]) -> None:
        """Has a change of the catalog made, in the order of the calls, before any write that is begun later."""
        self._changes.append((self._clock(), step))
        self._put(self._writes, self._make_changes)

    def _make_changes(self) -> None:
        with self._changing:
            self._make_all()

    def _make_all(self) -> None:
        while self._changes:
            try:
                self._changes[0][1]()
            except Exception:  # A defect: all else goes on.
                _LOG.exception("a change of the catalog broke")
            self._progress_s[FlushTask] = self._clock()
            self._changes.popleft()
            self._on_progress()

    def _settle(self) -> None:
        """Makes outstanding changes durable; raises where that cannot be, or nothing can."""
        self._make_all()
        self._forget_all()

    def _forget_all(self) -> None:
        if not self._catalog.is_in_place():
            raise BlockIoError(IoFailure.CATALOG, "the catalog must be in its directory; it is gone or was replaced")
        if self._unforgotten:
            self._catalog.forget(self._unforgotten)
            self._unforgotten.clear()

    def _forget(self, keys: tuple[str, ...]) -> None:
        self._unforgotten.update(keys)
        try:
            self._forget_all()
        except (BlockIoError, CatalogError) as error:
            self._failure(error, writes=True)
            _LOG.warning("%d sessions are to be forgotten before anything is written: %s", len(keys), error)

    def _change(self, key: str, change: Callable[[Catalog], bool], note: bytes | None, cuts: bool) -> None:
        """Makes a change to a session in the catalog, which says whether it knows the session."""
        if key in self._unforgotten:
            return
        error, is_known = None, True
        try:
            is_known = change(self._catalog)
        except (CatalogError, ValueError) as failure:  # ValueError: the catalog has another state than the index.
            if cuts:
                _LOG.warning("a session cannot be cut, and is forgotten: %s", failure)
                is_known = False
                self._forget((key,))
            else:
                _LOG.warning("a session's pin, note or time to live is not written down yet: %s", failure)
                error = self._failure(failure, writes=True)
        self._ended.append(Changed(key=key, note=note, error=error, is_lost=not is_known))

    def _use(self, times_s: Mapping[str, float]) -> None:
        try:
            self._catalog.touch_used(times_s)
        except CatalogError as error:
            _LOG.warning("when sessions were last used was not written down: %s", error)

    def _failure(self, error: BlockIoError | CatalogError | ValueError, *, writes: bool) -> BlockIoError:
        if isinstance(error, BlockIoError):
            return error
        self._is_beyond_use |= writes and isinstance(error, CatalogCorruptError)
        reason = IoFailure.NO_SPACE if isinstance(error, CatalogFullError) else IoFailure.CATALOG
        return BlockIoError(IoFailure.CORRUPT if isinstance(error, DamagedRecordError) else reason, str(error))
