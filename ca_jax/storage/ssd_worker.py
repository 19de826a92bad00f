"""Moves between DRAM and SSD, done on two threads: one reads and verifies, one writes and keeps the catalog.

A *fetch* reads what to expect from the catalog, then the blocks, and verifies their seals. A *flush* makes earlier
changes of the catalog durable, seals and writes the blocks that are not on SSD yet, and publishes the session once they
are durable. No block that a published session refers to is ever written: what changes goes to other blocks, so that a
process that dies at any moment leaves the old state or the new one.

Changes of the catalog that free blocks (`forget`, `shorten`) are carried out in the order of their submission, before
any later write. While one of them cannot be made durable, nothing is written at all.

Tasks belong to whoever submitted them; what became of them comes back by `take_ended`. Nothing here raises for what a
disk or catalog does.

Not here: which sessions move, and into which blocks (ssd_books).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ca_jax.storage.block_io import BlockIoError, IoFailure, IoHandle
from ca_jax.storage.catalog import Catalog
from ca_jax.storage.catalog_file import CatalogCorruptError, CatalogError, CatalogFullError, quarantine
from ca_jax.storage.catalog_reader import CatalogReader
from ca_jax.storage.catalog_records import SessionRecord
from ca_jax.storage.catalog_rows import Contents, DamagedRecordError
from ca_jax.storage.disk_tier import DiskTier
from ca_jax.storage.host_memory import host_array
from ca_jax.storage.seal import seal_block, verify_block
from ca_jax.timeline import ArgValue, Timeline, Track

_LOG = logging.getLogger(__name__)
_POLL_S = 0.25  # How often moves under way are held against their deadline.
_SHOWN_KEY_CHARS = 12  # Of a key, on a timeline.


@dataclasses.dataclass(kw_only=True, eq=False)
class FetchTask:
    """Reads a session's blocks into memory."""

    key: str
    num_tokens: int
    """How many the session is known to have."""
    block_ids: Sequence[int]
    """On SSD, in token order."""
    into: Sequence[np.ndarray]
    """One block of memory for each: the worker's until the task has settled."""
    cancelled: bool = False
    """Set by the submitter: its outcome does not matter any more."""


@dataclasses.dataclass(kw_only=True, eq=False)
class FlushTask:
    """Writes the blocks of a session that are not on SSD yet, and publishes it."""

    record: SessionRecord
    """As it will be published: all blocks, kept ones first."""
    token_ids: np.ndarray
    """int32 `[num_tokens]`."""
    num_kept_blocks: int
    """Leading full blocks that are published already, and stay."""
    sources: Sequence[np.ndarray]
    """Memory of the other blocks, in order: not to be rewritten until the task has settled, but for the last one, of
    which only tokens behind the session's may change."""
    note: bytes | None
    """What to keep with the session; None keeps what is kept."""
    cancelled: bool = False
    """Set by the submitter: it must not be published, if it is not yet. What is forgotten then comes after it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskEnd:
    """What became of a task. One that fails before its moves have settled is told of twice."""

    task: FetchTask | FlushTask
    error: BlockIoError | None = None
    """Why it failed."""
    settled: bool = True
    """Whether none of its memory or blocks will be touched any more. Always after success."""
    contents: Contents | None = None
    """Of a fetched session."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lost:
    """A session that had to be forgotten, since it could not be shortened."""

    key: str
    """Of the session."""


class SsdWorker:
    """The threads. `submit` calls never wait; all public methods belong to the bookkeeping thread.

    Args:
      tier: the blocks.
      catalog: written by the worker alone from now on.
      reader: of the same catalog, likewise.
      prepare: run before the first write, on the writing thread.
      on_progress: called, from the threads, whenever `take_ended` has something new.
      timeline: gets a span of every fetch, from reading the catalog to the last seal, and of every flush, from the
        first seal to the catalog; that of a move which fails says why.
    """

    def __init__(
        self,
        tier: DiskTier,
        catalog: Catalog,
        reader: CatalogReader,
        *,
        prepare: Callable[[], object],
        on_progress: Callable[[], None],
        timeline: Timeline,
    ) -> None:
        self._tier = tier
        self._layout = tier.layout
        self._catalog = catalog
        self._reader = reader
        self._on_progress = on_progress
        self._timeline = timeline
        self._began_s: dict[FetchTask | FlushTask, float] = {}  # What the timeline is still to be told of.
        self._ended: collections.deque[TaskEnd | Lost] = collections.deque()
        self._unforgotten: set[str] = set()  # What the catalog still names and must not, before anything is written.
        self._is_beyond_use = False  # Whether the catalog is damaged where it would be written.
        self._bounces: list[np.ndarray] = []
        self._num_moving = self._num_changes = 0
        self._lock = threading.Lock()
        self._reads: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._writes.put(prepare)
        self._threads = [
            threading.Thread(target=self._run, args=(steps,), name=f"ca_jax-ssd-{name}", daemon=True)
            for name, steps in (("reader", self._reads), ("writer", self._writes))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: FetchTask | FlushTask) -> None:
        """Begins a fetch or a flush."""
        if isinstance(task, FetchTask):
            self._reads.put(functools.partial(self._begin_fetch, task))
        else:
            self._writes.put(functools.partial(self._begin_flush, task))

    def forget(self, keys: Sequence[str]) -> None:
        """Has sessions forgotten. Their blocks may be given to later flushes at once."""
        self._change_catalog(functools.partial(self._forget, tuple(keys)))

    def shorten(self, key: str, num_tokens: int, num_blocks: int) -> None:
        """Has a session shortened to full blocks. Those behind may be given to later flushes at once.

        Where the catalog cannot be changed so, the session is forgotten; `take_ended` says it.
        """
        self._change_catalog(functools.partial(self._shorten, key, num_tokens, num_blocks))

    def change(
        self, key: str, *, pinned: bool | None = None, note: bytes | None = None, ttl_s: float | None = None
    ) -> None:
        """Has a session's pin or note (if not None) or else its time to live written down."""
        self._change_catalog(functools.partial(self._change, key, pinned, note, ttl_s))

    def use(self, times_s: Mapping[str, float]) -> None:
        """Has written down when sessions were last used, seconds since the epoch."""
        self._change_catalog(functools.partial(self._use, times_s))

    @property
    def num_changes(self) -> int:
        """Changes of the catalog that were asked for and not tried yet."""
        return self._num_changes

    def take_ended(self) -> TaskEnd | Lost | None:
        """The next thing that happened, in order; None where there is none."""
        return self._ended.popleft() if self._ended else None

    def close(self, timeout_s: float) -> bool:
        """Ends the threads after what was submitted, waits at most so long, and closes tier and catalog.

        Returns:
          Whether all has settled. If not, the memory of open tasks must stay.
        """
        for steps in (self._reads, self._writes):
            steps.put(None)
        for thread in self._threads:
            thread.join(timeout_s)
        settled = self._tier.close(timeout_s)
        if not any(thread.is_alive() for thread in self._threads):
            self._reader.close()
            self._catalog.close()
            if self._is_beyond_use:
                self._move_catalog_aside()
        return settled

    def _change_catalog(self, step: Callable[[], None]) -> None:
        with self._lock:
            self._num_changes += 1

        def change() -> None:
            try:
                step()
            finally:
                with self._lock:
                    self._num_changes -= 1
                self._on_progress()

        self._writes.put(change)

    # The threads.

    def _run(self, steps: queue.SimpleQueue[Callable[[], object] | None]) -> None:
        while True:
            try:
                step = steps.get(timeout=_POLL_S if self._num_moving else None)
            except queue.Empty:
                self._tier.poll()
                continue
            if step is None:
                return
            try:
                step()
            except Exception:  # A defect: what is left open stays so, all else goes on.
                _LOG.exception("a step of the SSD worker broke")

    # Fetching, on the reading thread.

    def _begin_fetch(self, task: FetchTask) -> None:
        if task.cancelled:
            self._end(TaskEnd(task=task, error=_cancelled()))
            return
        self._mark_begin(task)
        try:
            contents = self._expected(task)
        except BlockIoError as error:
            self._end(TaskEnd(task=task, error=error))
            return
        self._move(
            self._tier.read_blocks(task.block_ids, task.into),
            task,
            self._reads,
            lambda: self._finish_fetch(task, contents),
        )

    def _expected(self, task: FetchTask) -> Contents:
        """What the catalog says is in the blocks."""
        try:
            contents = self._reader.contents(task.key)
        except DamagedRecordError as error:
            raise BlockIoError(IoFailure.CORRUPT, str(error)) from error
        except CatalogError as error:
            raise BlockIoError(IoFailure.CATALOG, str(error)) from error
        if contents is None:
            raise BlockIoError(IoFailure.MISSING, f"the catalog wanted session {task.key!r}, found none")
        # The catalog may not have been shortened yet: it is then that only full blocks are kept, whose seals stay.
        num_blocks = len(task.block_ids)
        exact = len(contents.token_ids) == task.num_tokens and len(contents.seals) == num_blocks
        shortened = task.num_tokens == num_blocks * self._layout.block_tokens < len(contents.token_ids)
        if not (exact or shortened):
            raise BlockIoError(
                IoFailure.CORRUPT,
                f"session {task.key!r} wanted {task.num_tokens} tokens in {num_blocks} blocks, the catalog "
                f"found {len(contents.token_ids)} in {len(contents.seals)}",
            )
        return dataclasses.replace(
            contents, token_ids=contents.token_ids[: task.num_tokens], seals=contents.seals[:num_blocks]
        )

    def _finish_fetch(self, task: FetchTask, contents: Contents) -> None:
        for index, block in enumerate(task.into):
            if not verify_block(block, self._layout.tokens_in_block(index, task.num_tokens), contents.seals[index]):
                found = f"block {index} of session {task.key!r} wanted its seal, found other bytes"
                self._end(TaskEnd(task=task, error=BlockIoError(IoFailure.CORRUPT, found)))
                return
        self._end(TaskEnd(task=task, contents=contents))

    # Flushing, on the writing thread.

    def _begin_flush(self, task: FlushTask) -> None:
        error = _cancelled() if task.cancelled else self._settle_catalog()
        if error is not None:
            self._end(TaskEnd(task=task, error=error))
            return
        self._mark_begin(task)
        sources = list(task.sources)
        seals = [
            seal_block(block, self._layout.tokens_in_block(index, task.record.num_tokens))
            for index, block in enumerate(sources, task.num_kept_blocks)
        ]
        bounce = None
        if sources:  # The last one may get more tokens meanwhile, and a checksum is of bytes that stand still.
            bounce = self._bounces.pop() if self._bounces else host_array(sources[0].shape, sources[0].dtype)
            np.copyto(bounce, sources[-1])
            sources[-1] = bounce
        handle = self._tier.write_blocks(task.record.block_ids[task.num_kept_blocks :].tolist(), sources)
        if bounce is not None:
            handle.add_settled_callback(lambda _: self._bounces.append(bounce))
        self._move(handle, task, self._writes, lambda: self._publish(task, seals))

    def _publish(self, task: FlushTask, seals: list[np.ndarray]) -> None:
        error = _cancelled() if task.cancelled else self._settle_catalog()
        if error is None:
            try:
                kept = self._catalog.contents(task.record.key)
                note = task.note if task.note is not None else (kept.note if kept else b"")
                kept_seals = kept.seals[: task.num_kept_blocks] if kept else np.zeros((0, self._layout.num_layers))
                if len(kept_seals) < task.num_kept_blocks:
                    raise DamagedRecordError(
                        f"session {task.record.key!r} wanted {task.num_kept_blocks} blocks to stay, "
                        f"found {len(kept_seals)}"
                    )
                all_seals = np.array([*kept_seals, *seals], np.uint64).reshape(-1, self._layout.num_layers)
                self._catalog.publish(task.record, task.token_ids, all_seals, note)
            except DamagedRecordError as failure:
                error = BlockIoError(IoFailure.CORRUPT, str(failure))
            except CatalogError as failure:
                error = self._of_catalog(failure)
        self._end(TaskEnd(task=task, error=error))

    def _forget(self, keys: tuple[str, ...]) -> None:
        self._unforgotten.update(keys)
        error = self._settle_catalog()
        if error is not None:
            _LOG.warning("%d sessions are to be forgotten before anything is written: %s", len(keys), error)

    def _shorten(self, key: str, num_tokens: int, num_blocks: int) -> None:
        if key in self._unforgotten:
            return
        try:
            self._catalog.shorten(key, num_tokens, num_blocks)
        except (CatalogError, ValueError) as error:  # ValueError: the catalog has less than the books thought.
            _LOG.warning("a session cannot be shortened, and is forgotten: %s", error)
            self._ended.append(Lost(key=key))
            self._forget((key,))

    def _change(self, key: str, pinned: bool | None, note: bytes | None, ttl_s: float | None) -> None:
        try:
            if pinned is not None:
                self._catalog.set_pinned(key, pinned)
            elif note is not None:
                record = self._catalog.get(key)
                if record is not None:
                    self._catalog.shorten(key, record.num_tokens, record.num_blocks, note=note)
            else:
                self._catalog.set_ttl(key, ttl_s)
        except CatalogError as error:
            _LOG.warning("a session's pin, note or time to live was not written down: %s", error)

    def _use(self, times_s: Mapping[str, float]) -> None:
        try:
            self._catalog.touch_used(times_s)
        except CatalogError as error:
            _LOG.warning("when sessions were last used was not written down: %s", error)

    def _settle_catalog(self) -> BlockIoError | None:
        """Makes outstanding changes durable; why not, if that cannot be, or if nothing can."""
        if not self._catalog.is_in_place():
            return BlockIoError(IoFailure.CATALOG, "wanted the catalog in its directory, found it gone or replaced")
        if not self._unforgotten:
            return None
        try:
            self._catalog.forget(self._unforgotten)
        except CatalogError as error:
            return self._of_catalog(error)
        self._unforgotten.clear()
        return None

    def _of_catalog(self, error: CatalogError) -> BlockIoError:
        self._is_beyond_use |= isinstance(error, CatalogCorruptError)
        reason = IoFailure.NO_SPACE if isinstance(error, CatalogFullError) else IoFailure.CATALOG
        return BlockIoError(reason, str(error))

    def _move_catalog_aside(self) -> None:
        """Lets the next engine start empty: with this catalog nothing could ever be written again."""
        try:
            moved = quarantine(self._catalog.block_directory.parent)
        except CatalogError as error:
            _LOG.warning("a damaged catalog stays where it is: %s", error)
        else:
            _LOG.warning("the catalog is damaged, and was moved to %s", moved)

    # Both.

    def _move(
        self,
        handle: IoHandle,
        task: FetchTask | FlushTask,
        steps: queue.SimpleQueue[Callable[[], object] | None],
        then: Callable[[], None],
    ) -> None:
        """Goes on with `then` on the same thread once a move has succeeded, and says so if it fails."""
        with self._lock:
            self._num_moving += 1

        def settled(handle: IoHandle) -> None:
            with self._lock:
                self._num_moving -= 1
            if handle.error is None:
                steps.put(then)
            else:
                self._end(TaskEnd(task=task, error=handle.error))

        def done(handle: IoHandle) -> None:
            if handle.error is not None and not handle.settled:
                self._end(TaskEnd(task=task, error=handle.error, settled=False))

        handle.add_done_callback(done)
        handle.add_settled_callback(settled)

    def _mark_begin(self, task: FetchTask | FlushTask) -> None:
        if self._timeline.enabled:
            self._began_s[task] = time.perf_counter()

    def _end(self, end: TaskEnd) -> None:
        self._record(end)
        self._ended.append(end)
        self._on_progress()

    def _record(self, end: TaskEnd) -> None:
        """Tells the timeline of a task, once. It was no thread's: others were under way with it."""
        began_s = self._began_s.pop(end.task, None)
        if began_s is None:
            return
        track: Track
        if isinstance(end.task, FetchTask):
            track, key, num_blocks = "fetch", end.task.key, len(end.task.block_ids)
        else:
            track, key, num_blocks = "flush", end.task.record.key, len(end.task.sources)
        args: dict[str, ArgValue] = {"key": key[:_SHOWN_KEY_CHARS], "num_bytes": num_blocks * self._layout.block_bytes}
        if end.error is not None:
            args["error"] = end.error.reason.value
        self._timeline.add(track, track, began_s, time.perf_counter(), **args)


def _cancelled() -> BlockIoError:
    return BlockIoError(IoFailure.CANCELLED, "the task was cancelled")
