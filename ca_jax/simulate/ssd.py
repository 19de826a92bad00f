"""An SSD tier without a disk: the store's own books of it, and moves that end when a clock says.

Not here: what moves and when (storage), threads, files, checksums.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ca_jax.simulate.clock import Clock, Link
from ca_jax.storage.catalog.records import Contents
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.placement.blocks import BlockAllocator, TenantQuota
from ca_jax.storage.records import BlockIoError, IoFailure
from ca_jax.storage.ssd import SsdIndex
from ca_jax.storage.tiers.tasks import Changed, FetchTask, FlushTask, Lost, TaskEnd
from ca_jax.storage.tokens import Lineage


class SimulatedSsd:
    """Blocks, catalog and worker of an SSD, as `SsdIndex` asks for them: see `SsdMover`.

    Args:
      clock: of the simulation.
      layout: of a block as the store has it.
      block_bytes: what a block stands for.
      num_blocks: the cap.
      read: moves what is fetched.
      write: moves what is flushed.
    """

    def __init__(
        self, clock: Clock, layout: KVLayout, block_bytes: float, num_blocks: int, read: Link, write: Link
    ) -> None:
        self._clock = clock
        self._layout = layout
        self._block_bytes = block_bytes
        self._allocator = BlockAllocator(num_blocks)
        self._links = {FetchTask: read, FlushTask: write}
        self._token_ids: dict[str, np.ndarray] = {}  # The catalog.
        self._ended: collections.deque[TaskEnd | Lost] = collections.deque()
        self._on_progress: Callable[[], None] = lambda: None
        self._no_sums = np.zeros((0, layout.num_layers), np.uint32)

    def open(self, *, on_progress: Callable[[], None], **parts: Any) -> SsdIndex:
        """The books of this SSD, for `AttentionStore(open_ssd=...)`."""
        self._on_progress = on_progress
        return SsdIndex(self, quota=TenantQuota(None), **parts)

    @property
    def layout(self) -> KVLayout:
        """See `SsdMover`."""
        return self._layout

    @property
    def stored_block_bytes(self) -> int:
        """See `SsdMover`."""
        return self._layout.block_bytes

    @property
    def allocator(self) -> BlockAllocator:
        """See `SsdMover`."""
        return self._allocator

    def contents(self, key: str) -> Contents | None:
        """See `SsdMover`."""
        token_ids = self._token_ids.get(key)
        return None if token_ids is None else Contents(token_ids=token_ids, sums=self._no_sums)

    @property
    def num_changes(self) -> int:
        """See `SsdMover`: the catalog takes no time."""
        return 0

    @property
    def is_late(self) -> bool:
        """See `SsdMover`: the catalog takes no time."""
        return False

    def submit(self, task: FetchTask | FlushTask) -> None:
        """See `SsdMover`."""
        num_blocks = len(task.into) if isinstance(task, FetchTask) else task.num_written_blocks
        self._links[type(task)].move(num_blocks * self._block_bytes, functools.partial(self._end, task))

    def forget(self, keys: Sequence[str]) -> None:
        """See `SsdMover`."""
        for key in keys:
            self._token_ids.pop(key, None)

    def cut(self, key: str, kept: np.ndarray, lineage: Lineage, note: bytes | None) -> None:
        """See `SsdMover`."""
        self._token_ids[key] = self._token_ids[key][kept]

    def change(self, key: str, pinned: bool, ttl_s: float | None) -> None:
        """See `SsdMover`: nothing outlives the simulation."""

    def set_note(self, key: str, note: bytes) -> None:
        """See `SsdMover`: nothing outlives the simulation."""

    def use(self, times_s: Mapping[str, float]) -> None:
        """See `SsdMover`: nothing outlives the simulation."""

    def take_ended(self) -> TaskEnd | Changed | Lost | None:
        """See `SsdMover`."""
        return self._ended.popleft() if self._ended else None

    def close(self, timeout_s: float = 0.0) -> bool:
        """See `SsdMover`: there is nothing to end."""
        return True

    def _end(self, task: FetchTask | FlushTask) -> None:
        if task.cancelled:
            self._ended.append(TaskEnd(task=task, error=BlockIoError(IoFailure.CANCELLED, "the task was cancelled")))
        elif isinstance(task, FetchTask):
            self._ended.append(TaskEnd(task=task, contents=self.contents(task.key)))
        else:
            self._token_ids[task.record.key] = task.token_ids
            self._ended.append(TaskEnd(task=task))
        self._on_progress()
