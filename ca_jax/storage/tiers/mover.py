"""Moves between DRAM and SSD, done on two threads: one reads and verifies, one writes and keeps the catalog.

A third one holds both against the deadline: either may stand in the catalog for as long as the disk does. Fetches that
wait for the catalog then fail, and all are told that the SSD is late; a flush is under way until it has ended.

A *fetch* reads what to expect from the catalog, then the blocks, which are held against their checksums. A *flush*
makes earlier changes of the catalog durable, writes the blocks that are not on SSD yet, and publishes the session, with
the checksums of its blocks, once they are durable. No block that a published session refers to is ever written: what
changes goes to other blocks, so that a process that dies at any moment leaves the old state or the new one.

Changes of the catalog that free blocks (`forget`, `cut`) are carried out in the order of their submission, before
any later write. While one of them cannot be made durable, nothing is written at all.

Tasks belong to the caller; what became of them comes back by `take_ended`. Nothing here raises for what a disk or
catalog does, but `contents`, which reads the catalog for a thread that must not wait for a disk.

Not here: which sessions move, and into which blocks (ssd), how the catalog is changed (catalog.writer).
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ca_jax.storage.catalog.catalog import Catalog, CatalogReader
from ca_jax.storage.catalog.file import CatalogError, CatalogLateError
from ca_jax.storage.catalog.records import Contents, DamagedRecordError
from ca_jax.storage.catalog.writer import CatalogWriter
from ca_jax.storage.layout import layer_sums
from ca_jax.storage.placement.blocks import BlockAllocator
from ca_jax.storage.records import BlockIoError, IoFailure, StoreRuntime
from ca_jax.storage.tiers.disk import DiskTier
from ca_jax.storage.tiers.dram import host_array
from ca_jax.storage.tiers.io import BusyPeriods, IoHandle, StepThread
from ca_jax.storage.tiers.tasks import Changed, FetchTask, FlushTask, Lost, TaskEnd
from ca_jax.storage.tokens import Lineage
from ca_jax.telemetry.timeline import ArgValue, Track

_POLL_S = 0.25  # How often what is under way is held against its deadline.
_CLOSE_ASKS_S = 1.0  # A reader that does not answer in that time stays open.
_SHOWN_KEY_CHARS = 12  # Of a key, on a timeline.


class SsdWorker:
    """The threads. `submit` calls never wait; all public methods belong to the bookkeeping thread.

    Args:
      tier: the blocks.
      catalog: written by the worker alone from now on.
      prepare: run before the first write, on the writing thread, for as long as it takes.
      deadline_s: seconds without progress after which a read or change of the catalog is late.
      runtime: its `on_progress` is called, from the threads, whenever `take_ended` has something new.
    """

    def __init__(
        self,
        tier: DiskTier,
        catalog: Catalog,
        *,
        prepare: Callable[[], object],
        deadline_s: float,
        runtime: StoreRuntime,
    ) -> None:
        self._tier = tier
        self.layout = tier.layout
        """See `SsdMover`."""
        self._writer = CatalogWriter(catalog, on_lost=self._lost)
        self._reader, self._asked_reader = (CatalogReader(catalog.directory, catalog.namespace) for _ in range(2))
        self._asked: concurrent.futures.Future[Contents | None] | None = None
        self._on_progress = runtime.on_progress
        self._fetching = BusyPeriods(runtime.on_fetch)
        self._timeline = runtime.timeline
        self._began_s: dict[FetchTask | FlushTask, float] = {}  # Not on the timeline yet.
        self._ended: collections.deque[TaskEnd | Changed | Lost] = collections.deque()
        self._bounces: list[np.ndarray] = []
        self._deadline_s = deadline_s
        self._was_late = False
        self.num_changes = 0
        """Changes of the catalog that were asked for and not tried yet."""
        self._fetches: dict[FetchTask, None] = {}  # Not ended, nor told to be late.
        self._lock = threading.Lock()
        self._reads, self._writes, self._asks = (
            StepThread(f"ca_jax-ssd-{does}") for does in ("reads", "writes", "asks")
        )
        self._writes.put(prepare, timed=False)
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="ca_jax-ssd-watch", daemon=True).start()

    @property
    def stored_block_bytes(self) -> int:
        """See `SsdMover`."""
        return self._tier.stored_block_bytes

    @property
    def allocator(self) -> BlockAllocator:
        """See `SsdMover`."""
        return self._tier.allocator

    @property
    def is_late(self) -> bool:
        """See `SsdMover`."""
        return max(self._reads.stands_s, self._writes.stands_s) > self._deadline_s

    def submit(self, task: FetchTask | FlushTask) -> None:
        """Begins a fetch or a flush."""
        if isinstance(task, FetchTask):
            with self._lock:
                self._fetches[task] = None
            self._reads.put(functools.partial(self._begin_fetch, task))
        else:
            self._writes.put(functools.partial(self._begin_flush, task))

    def forget(self, keys: Sequence[str]) -> None:
        """See `SsdMover`."""
        self._change_catalog(functools.partial(self._writer.forget, tuple(keys)))

    def cut(self, key: str, kept: np.ndarray, lineage: Lineage, note: bytes | None) -> None:
        """See `SsdMover`."""

        def cut() -> None:
            if self._writer.cut(key, kept, lineage, note):
                self._ended.append(Changed(key=key, note=note))

        self._change_catalog(cut)

    def change(self, key: str, pinned: bool, ttl_s: float | None) -> None:
        """See `SsdMover`."""
        self._change_catalog(
            lambda: self._ended.append(Changed(key=key, error=self._writer.change(key, pinned, ttl_s)))
        )

    def set_note(self, key: str, note: bytes) -> None:
        """See `SsdMover`."""
        self._change_catalog(
            lambda: self._ended.append(Changed(key=key, note=note, error=self._writer.set_note(key, note)))
        )

    def use(self, times_s: Mapping[str, float]) -> None:
        """Has written down when sessions were last used, seconds since the epoch."""
        self._change_catalog(functools.partial(self._writer.use, times_s))

    def contents(self, key: str) -> Contents | None:
        """See `SsdMover`. Until its last question is answered no other is asked."""
        if self._asked is not None and not self._asked.done():
            raise CatalogLateError("the catalog must answer one question at a time, and has not answered the last")
        future = self._asked = concurrent.futures.Future[Contents | None]()

        def answer() -> None:
            try:
                future.set_result(self._asked_reader.contents(key))
            except BaseException as error:  # For the caller.
                future.set_exception(error)

        self._asks.put(answer)
        try:
            return future.result(self._deadline_s)
        except TimeoutError:
            raise CatalogLateError(f"the catalog must answer within {self._deadline_s} s, and did not") from None

    def take_ended(self) -> TaskEnd | Changed | Lost | None:
        """The next thing that happened, in order; None where there is none."""
        return self._ended.popleft() if self._ended else None

    def close(self, timeout_s: float) -> bool:
        """Ends the threads after what was submitted, waits at most so long, and closes tier and catalog.

        Returns:
          Whether all has settled. If not, the memory of open tasks must stay.
        """
        for thread in (self._asks, self._reads, self._writes):
            thread.end()
        if self._asks.join(_CLOSE_ASKS_S):  # First: the last one to close has to be one that may merge the log.
            self._asked_reader.close()
        ended = [thread.join(timeout_s) for thread in (self._reads, self._writes)]
        settled = self._tier.close(timeout_s)
        self._closed.set()
        if all(ended):
            self._reader.close()
            self._writer.close()
        return settled

    def _change_catalog(self, step: Callable[[], None]) -> None:
        with self._lock:
            self.num_changes += 1

        def change() -> None:
            try:
                step()
            finally:
                with self._lock:
                    self.num_changes -= 1
                self._on_progress()

        self._writes.put(change)

    # The threads.

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_S):
            self._tier.poll()
            if self._reads.stands_s > self._deadline_s:
                with self._lock:
                    late, self._fetches = list(self._fetches), {}
                for task in late:
                    task.cancelled = True
                    self._end(TaskEnd(task=task, error=self._late(), settled=False))
            was_late, self._was_late = self._was_late, self.is_late
            if self._was_late != was_late:
                self._on_progress()

    def _late(self) -> BlockIoError:
        return BlockIoError(IoFailure.DEADLINE, f"the catalog must answer within {self._deadline_s} s, and did not")

    # Fetching, on the reading thread.

    def _begin_fetch(self, task: FetchTask) -> None:
        error, contents = _cancelled(task), None
        if error is None:
            self._mark_begin(task)
            self._fetching.begin(task)
            try:
                contents = self._expected(task)
            except BlockIoError as failure:
                error = failure
        error = error or _cancelled(task)
        if error is not None or contents is None:
            self._finish(task, error)
            return
        handle = self._tier.read_blocks(task.copy.block_ids.tolist(), task.into, contents.sums)
        self._move(handle, task, self._reads, lambda: self._finish(task, _cancelled(task), contents))

    def _expected(self, task: FetchTask) -> Contents:
        """What the catalog says is in the blocks."""
        try:
            found = self._reader.load(task.key)
        except DamagedRecordError as error:
            raise BlockIoError(IoFailure.CORRUPT, str(error)) from error
        except CatalogError as error:
            raise BlockIoError(IoFailure.CATALOG, str(error)) from error
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
        return dataclasses.replace(contents, token_ids=contents.token_ids[tokens], sums=contents.sums[blocks])

    # Flushing, on the writing thread.

    def _begin_flush(self, task: FlushTask) -> None:
        error = _cancelled(task) or self._writer.settle()
        if error is not None:
            self._finish(task, error)
            return
        self._mark_begin(task)
        num_shared, sources = task.num_shared_blocks, list(task.sources)
        sums = np.empty((len(sources), self.layout.num_layers), np.uint32)
        for index in range(num_shared):
            sums[index] = layer_sums(sources[index])
        self._writes.progressed()
        bounce = None
        if (
            len(sources) > num_shared
        ):  # More tokens may come to the last one meanwhile, and what is written stands still.
            bounce = self._bounces.pop() if self._bounces else host_array(sources[-1].shape, sources[-1].dtype)
            np.copyto(bounce, sources[-1])
            sources[-1] = bounce
        block_ids = task.record.block_ids[task.num_kept_blocks + num_shared :].tolist()
        handle = self._tier.write_blocks(block_ids, sources[num_shared:], sums[num_shared:])
        if bounce is not None:
            handle.add_settled_callback(lambda _: self._bounces.append(bounce))
        self._move(handle, task, self._writes, lambda: self._publish(task, sums))

    def _publish(self, task: FlushTask, sums: np.ndarray) -> None:
        error = _cancelled(task)
        if error is None:
            error = self._writer.publish(task.record, task.token_ids, sums, task.num_kept_blocks, task.note)
        self._finish(task, error)

    # Both.

    def _move(
        self,
        handle: IoHandle,
        task: FetchTask | FlushTask,
        steps: StepThread,
        then: Callable[[], None],
    ) -> None:
        """Goes on with `then` on the same thread once a move has succeeded, and says so if it fails."""

        def settled(handle: IoHandle) -> None:
            if handle.error is None:
                steps.put(then)
            else:
                self._finish(task, handle.error)

        def done(handle: IoHandle) -> None:
            if handle.error is not None and not handle.settled:
                self._end(TaskEnd(task=task, error=handle.error, settled=False))

        handle.add_done_callback(done)
        handle.add_settled_callback(settled)

    def _finish(
        self, task: FetchTask | FlushTask, error: BlockIoError | None, contents: Contents | None = None
    ) -> None:
        self._end(TaskEnd(task=task, error=error, contents=contents if error is None else None))

    def _lost(self, key: str) -> None:
        self._ended.append(Lost(key=key))

    def _mark_begin(self, task: FetchTask | FlushTask) -> None:
        if self._timeline.enabled:
            self._began_s[task] = time.perf_counter()

    def _end(self, end: TaskEnd) -> None:
        self._record(end)
        if isinstance(end.task, FetchTask):
            with self._lock:
                self._fetches.pop(end.task, None)
            num_bytes = end.task.copy.num_blocks * self.layout.block_bytes
            self._fetching.end(end.task, num_bytes if end.error is None else None)
        self._ended.append(end)
        self._on_progress()

    def _record(self, end: TaskEnd) -> None:
        """Tells the timeline of a task, once. It was no thread's: others were under way with it."""
        began_s = self._began_s.pop(end.task, None)
        if began_s is None:
            return
        track: Track
        if isinstance(end.task, FetchTask):
            track, key, num_blocks = "fetch", end.task.key, end.task.copy.num_blocks
        else:
            track, key, num_blocks = "flush", end.task.record.key, end.task.num_written_blocks
        args: dict[str, ArgValue] = {"key": key[:_SHOWN_KEY_CHARS], "num_bytes": num_blocks * self.layout.block_bytes}
        if end.error is not None:
            args["error"] = end.error.reason.value
        self._timeline.add(track, track, began_s, time.perf_counter(), **args)


def _cancelled(task: FetchTask | FlushTask) -> BlockIoError | None:
    return BlockIoError(IoFailure.CANCELLED, "the task was cancelled") if task.cancelled else None
