"""Simulated time, and what takes it: links that move bytes, an SSD tier without a disk; a policy that knows the future.

Not here: what moves and when, policies that can be had (storage), threads, files, checksums.
"""

from __future__ import annotations

import collections
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ca_jax.errors import check
from ca_jax.storage.catalog.records import Contents
from ca_jax.storage.config import StoreConfig
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.placement.policy import StoredEntry, StoreView, last_needed_first
from ca_jax.storage.records import BlockIoError, IoFailure
from ca_jax.storage.sessions import StoreParts
from ca_jax.storage.ssd import SsdIndex
from ca_jax.storage.tiers.tasks import Changed, FetchTask, FlushTask, Task, TaskEnd
from ca_jax.storage.tokens import Lineage


class Clock:
    """Runs actions in order of their time; of those due at once, in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        """Seconds since the beginning."""
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    @property
    def next_s(self) -> float:
        """When the next action is due; infinite if there is none."""
        return self._due[0][0] if self._due else math.inf

    def at(self, time_s: float, action: Callable[[], object]) -> None:
        """Has an action run at a time.

        Raises:
          ValueError: the time is past, or not finite.
        """
        check(self.now_s <= time_s < math.inf, "time_s", f"at least {self.now_s} s", time_s)
        heapq.heappush(self._due, (time_s, next(self._order), action))

    def run_until(self, time_s: float) -> None:
        """Lets time pass, and runs what is due by then."""
        while self._due and self._due[0][0] <= time_s:
            self.now_s, _, action = heapq.heappop(self._due)
            action()
        self.now_s = max(self.now_s, time_s)


class Link:
    """Moves bytes, one transfer after the other.

    Args:
      clock: of the simulation.
      bytes_per_s: bandwidth; infinite where bytes cost nothing.

    Raises:
      ValueError: a bandwidth that is not positive.
    """

    def __init__(self, clock: Clock, bytes_per_s: float) -> None:
        check(bytes_per_s > 0, "bytes_per_s", "a number above 0", bytes_per_s)
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self.free_s = 0.0
        """When all transfers so far have ended."""

    def move(self, num_bytes: float, then: Callable[[], object] = lambda: None) -> float:
        """Moves bytes behind those before them, and runs `then` at the end; returns when that will be."""
        self.free_s = max(self.free_s, self._clock.now_s) + num_bytes / self._bytes_per_s
        self._clock.at(self.free_s, then)
        return self.free_s


class SimulatedSsd:
    """An SSD's blocks, catalog and worker as `SsdIndex` asks for them; see `SsdMover`.

    Nothing here outlives the simulation, and the catalog takes no time.

    Args:
      layout: of a block as the store has it.
      block_bytes: what a block stands for.
      num_blocks: its capacity.
      read: moves what is fetched.
      write: moves what is flushed.
    """

    num_changes, is_late = 0, False

    def __init__(self, layout: KVLayout, block_bytes: float, num_blocks: int, read: Link, write: Link) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.stored_block_bytes = layout.block_bytes
        self._block_bytes = block_bytes
        self._links: dict[type[Task], Link] = {FetchTask: read, FlushTask: write}
        self._token_ids: dict[str, np.ndarray] = {}  # The catalog.
        self._ended: collections.deque[TaskEnd] = collections.deque()
        self._on_progress: Callable[[], None] = lambda: None
        self._no_sums = np.zeros((0, layout.num_layers), np.uint32)

    def open(self, parts: StoreParts) -> SsdIndex:
        """Opens the index of this SSD, for `AttentionStore(open_ssd=...)`."""
        self._on_progress = parts.runtime.on_progress
        return SsdIndex(self, config=StoreConfig(), parts=parts)

    def contents(self, key: str) -> Contents | None:
        """See `SsdMover`."""
        token_ids = self._token_ids.get(key)
        return None if token_ids is None else Contents(token_ids=token_ids, sums=self._no_sums)

    def submit(self, task: Task) -> None:
        """See `SsdMover`."""
        self._links[type(task)].move(task.num_moved_blocks * self._block_bytes, functools.partial(self._end, task))

    def forget(self, keys: Sequence[str]) -> None:
        """See `SsdMover`."""
        for key in keys:
            self._token_ids.pop(key, None)

    def change(self, key: str, change: Callable[[Any], bool], note: bytes | None = None, *, cuts: bool = False) -> None:
        """See `SsdMover`. Of pins, notes and times to live this catalog keeps none."""
        if cuts:
            change(self)

    def cut(self, key: str, kept: np.ndarray, lineage: Lineage, note: bytes | None) -> bool:
        """A change of the catalog that cuts: tokens of a session are forgotten."""
        self._token_ids[key] = self._token_ids[key][kept]
        return True

    def take_ended(self) -> TaskEnd | Changed | None:
        """See `SsdMover`."""
        return self._ended.popleft() if self._ended else None

    def close(self, timeout_s: float, used_s: Mapping[str, float]) -> bool:
        """See `SsdMover`."""
        return True

    def _end(self, task: Task) -> None:
        if task.cancelled:
            end = TaskEnd(task=task, error=BlockIoError(IoFailure.CANCELLED, "the task was cancelled"))
        elif isinstance(task, FetchTask):
            end = TaskEnd(task=task, contents=self.contents(task.key))
        else:
            if isinstance(task, FlushTask):
                self._token_ids[task.key] = task.token_ids
            end = TaskEnd(task=task)
        self._ended.append(end)
        self._on_progress()


class BeladyPolicy:
    """Evicts what is needed last. For sessions of equal size no policy hits more often.

    Sessions with a waiting job are needed in the queue's order, and before all others, of which it knows more than a
    server can.

    Args:
      next_use: when a session without a waiting job is needed next, in any unit; infinity for never.

    Source: Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal, 1966.
    """

    def __init__(self, next_use: Callable[[str], float]):
        self._next_use = next_use

    def order(self, view: StoreView, needed_at: int | None = None) -> Iterator[StoredEntry]:
        """See `EvictionPolicy`. Sorts all that will return and do not wait: for comparisons, not for service."""
        returning = []
        for entry in view.idle:
            if (next_use := self._next_use(entry.key)) == math.inf:
                yield entry
            else:
                returning.append((next_use, entry))
        yield from (entry for _, entry in sorted(returning, key=lambda each: each[0], reverse=True))
        yield from last_needed_first(view, needed_at)
