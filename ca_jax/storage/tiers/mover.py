"""Moves between DRAM and SSD: what the SSD's index asks for, and two threads that do it.

One thread reads and verifies, one writes and keeps the catalog. A third one holds both against the deadline: either may
stand in the catalog for as long as the disk does. Fetches that wait for the catalog then fail, and all are told that
the SSD is late; a flush is under way until it has ended.

A *fetch* reads what to expect from the catalog, then the blocks, which are held against their checksums. A *flush*
makes earlier changes of the catalog durable, writes the blocks that are not on SSD yet, and publishes the session, with
the checksums of its blocks, once they are durable. No block that a published session refers to is ever written: what
changes goes to other blocks, so that a process that dies at any moment leaves the old state or the new one.

Changes of the catalog that free blocks (`forget`, and a `change` that cuts) are carried out in the order of their
submission, before any later write. One that cannot be made durable is tried again before the next write, and until it
is made nothing is written at all.

Tasks belong to the caller; what became of them comes back by `take_ended`. Nothing here raises for what a disk or
catalog does, but `contents`, which reads the catalog for a thread that must not wait for a disk.

Not here: which sessions move, and into which blocks (ssd); doing it in simulated time (simulate.clock).
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from ca_jax.storage.catalog.catalog import Catalog, CatalogReader
from ca_jax.storage.catalog.file import (
    CatalogCorruptError,
    CatalogError,
    CatalogFullError,
    CatalogLateError,
    quarantine,
)
from ca_jax.storage.catalog.records import Contents, DamagedRecordError, SessionRecord
from ca_jax.storage.layout import KVLayout, layer_sums
from ca_jax.storage.records import BlockIoError, IoFailure, StoreRuntime
from ca_jax.storage.tiers.disk import DiskTier
from ca_jax.storage.tiers.io import BusyPeriods, IoHandle, StepThread
from ca_jax.storage.tokens import SsdCopy
from ca_jax.telemetry.timeline import ArgValue, Track

_LOG = logging.getLogger(__name__)
_POLL_S = 0.25  # How often what is under way is held against its deadline.
_CLOSE_ASKS_S = 1.0  # A reader that does not answer in that time stays open.
_SHOWN_KEY_CHARS = 12  # Of a key, on a timeline.


@dataclasses.dataclass(kw_only=True, eq=False)
class FetchTask:
    """Reads a session's blocks into memory."""

    key: str
    copy: SsdCopy
    """What the session is known to have on SSD."""
    into: Sequence[np.ndarray]
    """One block of memory for each: the worker's until the task has settled."""
    cancelled: bool = False
    """Its outcome does not matter any more: it was given up, or is late."""

    @property
    def num_moved_blocks(self) -> int:
        """Blocks that are read."""
        return len(self.into)


@dataclasses.dataclass(kw_only=True, eq=False)
class FlushTask:
    """Writes the blocks of a session that are not on SSD yet, and publishes it."""

    record: SessionRecord
    """As it will be published: all blocks, kept ones first."""
    token_ids: np.ndarray
    """int32 `[num_tokens]`."""
    num_kept_blocks: int
    """Leading full blocks that are published already, and stay."""
    num_shared_blocks: int = 0
    """Full blocks behind them that are published already as another session's: they are not written."""
    sources: Sequence[np.ndarray]
    """Memory of the blocks that are not kept, in order: not to be rewritten until the task has settled."""
    note: bytes | None
    """What to keep with the session; None keeps what is kept."""
    cancelled: bool = False
    """Set by the submitter: it must not be published, if it is not yet. What is forgotten then comes after it."""

    @property
    def key(self) -> str:
        """Of the session."""
        return self.record.key

    @property
    def num_moved_blocks(self) -> int:
        """Blocks that are written."""
        return len(self.sources) - self.num_shared_blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskEnd:
    """What became of a task. One that fails before its moves have settled is reported twice."""

    task: FetchTask | FlushTask
    error: BlockIoError | None = None
    settled: bool = True
    """Whether none of its memory or blocks will be touched any more. Always after success."""
    contents: Contents | None = None
    """Of a fetched session."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changed:
    """What became of a change of what the catalog says of a session."""

    key: str
    note: bytes | None = None
    """What it was to keep with it from then on; None: what it kept."""
    error: BlockIoError | None = None
    is_lost: bool = False
    """Whether the catalog does not know the session any more."""


class SsdMover(Protocol):
    """Blocks on SSD: does tasks, and changes of the catalog in the order in which they were asked for.

    Nothing here waits but `contents`, and that no longer than the deadline.
    """

    layout: KVLayout
    stored_block_bytes: int
    """What one block takes on SSD: the unit of the cap."""
    num_blocks: int
    """How many blocks the cap holds."""
    num_changes: int
    """Changes of the catalog that were asked for and not tried yet."""

    @property
    def is_late(self) -> bool:
        """Whether the catalog has not answered for so long that nothing should wait for the SSD."""

    def submit(self, task: FetchTask | FlushTask) -> None:
        """Begins a fetch or a flush."""

    def forget(self, keys: Sequence[str]) -> None:
        """Has sessions forgotten. Their blocks may be given to later flushes at once."""

    def change(
        self, key: str, change: Callable[[Catalog], bool], note: bytes | None = None, *, cuts: bool = False
    ) -> None:
        """Has a change made to what the catalog says of a session; `take_ended` says what became of it.

        Args:
          key: of the session.
          change: makes it, on a thread of the mover's; says whether the catalog knows the session.
          note: what is kept with the session then; None: what is kept.
          cuts: whether it takes blocks from the session, which may be given to later flushes at once. Where it cannot
            be made, the session is forgotten, which `take_ended` says.
        """

    def contents(self, key: str) -> Contents | None:
        """What the catalog keeps with a session; None where it knows none.

        Raises:
          CatalogLateError: it has not answered in time.
          CatalogError: it cannot be read.
        """

    def take_ended(self) -> TaskEnd | Changed | None:
        """The next thing that happened, in order; None where there is none."""

    def close(self, timeout_s: float, used_s: Mapping[str, float]) -> bool:
        """Ends after what was submitted, waiting at most so long.

        Args:
          timeout_s: how long.
          used_s: when sessions were last used, to be written down; seconds since the epoch, by key.

        Returns:
          Whether all has settled. If not, the memory of open tasks must stay.
        """


class SsdWorker:
    """The threads. `submit` calls never wait; all public methods belong to the bookkeeping thread. See `SsdMover`.

    Args:
      tier: the blocks.
      catalog: the worker's from now on: no other thread or process may change it.
      prepare: run before the first write, on the writing thread, for as long as it takes.
      runtime: its `on_progress` is called, from the threads, whenever `take_ended` has something new.
    """

    def __init__(
        self,
        tier: DiskTier,
        catalog: Catalog,
        *,
        prepare: Callable[[], object],
        runtime: StoreRuntime,
    ) -> None:
        self._tier, self._catalog = tier, catalog
        self.layout, self.stored_block_bytes, self.num_blocks = tier.layout, tier.stored_block_bytes, tier.num_blocks
        self.num_changes = 0
        self._unforgotten: set[str] = set()  # What the catalog still names and must not, before anything is written.
        self._is_beyond_use = False  # Whether the catalog is damaged where it would be written.
        self._reader, self._asked_reader = (CatalogReader(catalog.directory, catalog.namespace) for _ in range(2))
        self._asked: concurrent.futures.Future[Contents | None] | None = None
        self._on_progress = runtime.on_progress
        self._fetching = BusyPeriods(runtime.on_fetch)
        self._timeline = runtime.timeline
        self._began_s: dict[FetchTask | FlushTask, float] = {}  # Not on the timeline yet.
        self._ended: collections.deque[TaskEnd | Changed] = collections.deque()
        self._deadline_s = tier.deadline_s
        self._was_late = False
        self._fetches: dict[FetchTask, None] = {}  # Not ended, nor told to be late.
        self._lock = threading.Lock()
        self._reads, self._writes, self._asks = (
            StepThread(f"ca_jax-ssd-{does}") for does in ("reads", "writes", "asks")
        )
        self._writes.put(prepare, timed=False)
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="ca_jax-ssd-watch", daemon=True).start()

    @property
    def is_late(self) -> bool:
        """See `SsdMover`."""
        return max(self._reads.stands_s, self._writes.stands_s) > self._deadline_s

    def submit(self, task: FetchTask | FlushTask) -> None:
        """Begins a fetch or a flush."""
        if isinstance(task, FetchTask):
            with self._lock:
                self._fetches[task] = None
            self._reads.put(lambda: self._do(task, lambda: self._begin_fetch(task)))
        else:
            self._writes.put(lambda: self._do(task, lambda: self._begin_flush(task)))

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
            raise CatalogLateError(str(self._late())) from None

    def take_ended(self) -> TaskEnd | Changed | None:
        """See `SsdMover`."""
        return self._ended.popleft() if self._ended else None

    def close(self, timeout_s: float, used_s: Mapping[str, float]) -> bool:
        """See `SsdMover`. Closes tier and catalog."""
        self._put_change(functools.partial(self._use, used_s))
        for thread in (self._asks, self._reads, self._writes):
            thread.end()
        if self._asks.join(_CLOSE_ASKS_S):  # First: the last one to close has to be one that may merge the log.
            self._asked_reader.close()
        ended = [thread.join(timeout_s) for thread in (self._reads, self._writes)]
        settled = self._tier.close(timeout_s)
        self._closed.set()
        if all(ended):
            self._reader.close()
            self._catalog.close()
            if self._is_beyond_use:  # Nothing could ever be written again with it.
                try:
                    _LOG.warning("the catalog is damaged, and was moved to %s", quarantine(self._catalog.directory))
                except CatalogError as error:
                    _LOG.warning("a damaged catalog stays where it is: %s", error)
        return settled

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

    def _put_change(self, step: Callable[[], None]) -> None:
        """Has a change of the catalog made on the writing thread, in the order of the calls."""
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

    # Fetching, on the reading thread.

    def _begin_fetch(self, task: FetchTask) -> None:
        self._began_s[task] = time.perf_counter()
        self._fetching.begin(task)
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
        _refuse_cancelled(task)
        handle = self._tier.read_blocks(task.copy.block_ids.tolist(), task.into, contents.sums)
        self._move(handle, task, self._reads, lambda: self._end(TaskEnd(task=task, contents=contents)))

    # Flushing and changes of the catalog, on the writing thread.

    def _begin_flush(self, task: FlushTask) -> None:
        self._settle()
        self._began_s[task] = time.perf_counter()
        num_shared = task.num_shared_blocks
        sums = np.empty((len(task.sources), self.layout.num_layers), np.uint32)
        for index in range(num_shared):
            sums[index] = layer_sums(task.sources[index])
        self._writes.progressed()
        block_ids = task.record.block_ids[task.num_kept_blocks + num_shared :].tolist()
        handle = self._tier.write_blocks(block_ids, task.sources[num_shared:], sums[num_shared:])
        self._move(handle, task, self._writes, lambda: self._publish(task, sums))

    def _publish(self, task: FlushTask, new_sums: np.ndarray) -> None:
        """Publishes a session, some leading blocks of which are published already."""
        self._settle()
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
        self._end(TaskEnd(task=task))

    def _settle(self) -> None:
        """Makes outstanding changes durable; raises where that cannot be, or nothing can."""
        if not self._catalog.is_in_place():
            raise BlockIoError(IoFailure.CATALOG, "the catalog must be in its directory; it is gone or was replaced")
        if self._unforgotten:
            self._catalog.forget(self._unforgotten)
            self._unforgotten.clear()

    def _forget(self, keys: tuple[str, ...]) -> None:
        self._unforgotten.update(keys)
        try:
            self._settle()
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

    # Both.

    def _do(self, task: FetchTask | FlushTask, step: Callable[[], None]) -> None:
        """Takes a step of a task, which ends with what the step raises."""
        try:
            _refuse_cancelled(task)
            step()
        except (BlockIoError, CatalogError) as error:
            self._end(TaskEnd(task=task, error=self._failure(error, writes=isinstance(task, FlushTask))))

    def _failure(self, error: BlockIoError | CatalogError | ValueError, *, writes: bool) -> BlockIoError:
        if isinstance(error, BlockIoError):
            return error
        self._is_beyond_use |= writes and isinstance(error, CatalogCorruptError)
        reason = IoFailure.NO_SPACE if isinstance(error, CatalogFullError) else IoFailure.CATALOG
        return BlockIoError(IoFailure.CORRUPT if isinstance(error, DamagedRecordError) else reason, str(error))

    def _move(self, handle: IoHandle, task: FetchTask | FlushTask, steps: StepThread, then: Callable[[], None]) -> None:
        """Goes on with `then` on the same thread once a move has succeeded, and says so if it fails."""

        def settled(handle: IoHandle) -> None:
            if handle.error is None:
                steps.put(lambda: self._do(task, then))
            else:
                self._end(TaskEnd(task=task, error=handle.error))

        def done(handle: IoHandle) -> None:
            if handle.error is not None and not handle.settled:
                self._end(TaskEnd(task=task, error=handle.error, settled=False))

        handle.add_done_callback(done)
        handle.add_settled_callback(settled)

    def _end(self, end: TaskEnd) -> None:
        task, num_bytes = end.task, end.task.num_moved_blocks * self.layout.block_bytes
        track: Track = "fetch" if isinstance(task, FetchTask) else "flush"
        began_s = self._began_s.pop(task, None)
        if began_s is not None:  # Told once. It was no thread's: others were under way with it.
            args: dict[str, ArgValue] = {"key": task.key[:_SHOWN_KEY_CHARS], "num_bytes": num_bytes}
            if end.error is not None:
                args["error"] = end.error.reason.value
            self._timeline.add(track, track, began_s, time.perf_counter(), **args)
        if isinstance(task, FetchTask):
            with self._lock:
                self._fetches.pop(task, None)
            self._fetching.end(task, num_bytes if end.error is None else None)
        self._ended.append(end)
        self._on_progress()


def _refuse_cancelled(task: FetchTask | FlushTask) -> None:
    if task.cancelled:
        raise BlockIoError(IoFailure.CANCELLED, "the task was cancelled")
