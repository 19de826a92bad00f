"""What the SSD's index asks for: tasks, what became of them, and what a mover must do.

Not here: doing them (mover; a simulator's clock).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from ca_jax.storage.catalog.records import Contents, SessionRecord
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.records import BlockIoError
from ca_jax.storage.tokens import Lineage, SsdCopy


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
    """Memory of the blocks that are not kept, in order: not to be rewritten until the task has settled, but for the
    last one, of which only tokens behind the session's may change."""
    note: bytes | None
    """What to keep with the session; None keeps what is kept."""
    cancelled: bool = False
    """Set by the submitter: it must not be published, if it is not yet. What is forgotten then comes after it."""

    @property
    def num_written_blocks(self) -> int:
        """Blocks that are written."""
        return len(self.sources) - self.num_shared_blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskEnd:
    """What became of a task. One that fails before its moves have settled is reported twice."""

    task: FetchTask | FlushTask
    error: BlockIoError | None = None
    """Why it failed."""
    settled: bool = True
    """Whether none of its memory or blocks will be touched any more. Always after success."""
    contents: Contents | None = None
    """Of a fetched session."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lost:
    """A session that had to be forgotten, since it could not be cut."""

    key: str
    """Of the session."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changed:
    """What became of a change of what the catalog says of a session."""

    key: str
    """Of the session."""
    note: bytes | None = None
    """What it was to keep with it from then on; None: what it kept."""
    error: BlockIoError | None = None
    """Why it failed."""


class SsdMover(Protocol):
    """Blocks on SSD: does tasks, and changes of the catalog in the order in which they were asked for.

    Nothing here waits but `contents`, and that no longer than the deadline.
    """

    layout: KVLayout
    """The shape of a block."""
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

    def cut(self, key: str, kept: np.ndarray, lineage: Lineage, note: bytes | None) -> None:
        """Has tokens of a session forgotten. Blocks that have none left may be given to later flushes at once.

        Where the catalog cannot be changed so, the session is forgotten; `take_ended` says it.

        Args:
          key: of the session.
          kept: bool `[num_tokens]`, which of its tokens on SSD stay.
          lineage: what has been dropped then.
          note: what is kept with it, in the same change; None keeps what is kept.
        """

    def change(self, key: str, pinned: bool, ttl_s: float | None) -> None:
        """Has a session's pin and time to live written down; `take_ended` says what became of it."""

    def set_note(self, key: str, note: bytes) -> None:
        """Has written down what is kept with a session; likewise."""

    def use(self, times_s: Mapping[str, float]) -> None:
        """Has written down when sessions were last used, seconds since the epoch."""

    def contents(self, key: str) -> Contents | None:
        """What the catalog keeps with a session; None where it knows none.

        Raises:
          CatalogLateError: it has not answered in time.
          CatalogError: it cannot be read.
        """

    def take_ended(self) -> TaskEnd | Changed | Lost | None:
        """The next thing that happened, in order; None where there is none."""

    def close(self, timeout_s: float) -> bool:
        """Ends after what was submitted, waiting at most so long.

        Returns:
          Whether all has settled. If not, the memory of open tasks must stay.
        """
