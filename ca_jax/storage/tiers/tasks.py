"""Tasks of moving sessions between DRAM and SSD, what became of them, and what does them.

Not here: doing them by threads (mover), or in simulated time (simulate.clock); which sessions move (ssd).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ca_jax.storage.catalog.catalog import Catalog
from ca_jax.storage.catalog.records import Contents, SessionRecord
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.records import BlockIoError
from ca_jax.storage.tokens import Lineage, SsdCopy


class Cut(NamedTuple):
    """Tokens that are forgotten: of what SSD has, or will have when the flush that is under way has ended."""

    kept: np.ndarray
    """bool `[T]`, which of the first T tokens stay."""
    lineage: Lineage
    """What has been dropped then."""
    note: bytes | None
    """What to keep with the session from then on; None keeps what is kept."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Task:
    """A session on its way between the tiers, and what is free only once that has settled."""

    key: str
    tenant: str
    """Whose it is."""
    dram_blocks: Sequence[int]
    """Blocks of DRAM that it holds: a fetch fills them, a flush reads blocks that are the session's too."""
    ssd_blocks: Sequence[int] = ()
    """Blocks of SSD that it holds."""
    cancelled: bool = False
    """Its outcome does not matter any more: it was given up, or is late. If it is not published yet it never will be,
    and what is forgotten then comes after it."""
    is_final: bool = False
    """Whether it is being published."""
    is_moving: bool = False
    """Whether any of its blocks has begun to move."""
    progress_s: float = math.inf
    """When it went on last; infinite while it may take as long as it likes."""
    began_s: float | None = None
    """When it began, for the timeline; None where that was told already."""

    @property
    def num_moved_blocks(self) -> int:
        """Blocks that are read or written."""
        return len(self.dram_blocks)


@dataclasses.dataclass(kw_only=True, eq=False)
class FetchTask(Task):
    """Reads a session's blocks into memory."""

    copy: SsdCopy
    """What the session is known to have on SSD."""
    into: Sequence[np.ndarray]
    """One block of memory for each: the worker's until the task has settled."""


@dataclasses.dataclass(kw_only=True, eq=False)
class FlushTask(Task):
    """Writes the blocks of a session that are not on SSD yet, and publishes it."""

    record: SessionRecord
    """As it will be published: all blocks, kept ones first."""
    token_ids: np.ndarray
    """int32 `[num_tokens]`."""
    num_kept_blocks: int
    """Leading full blocks that are published already, and stay."""
    num_shared_blocks: int
    """Full blocks behind them that are published already as another session's, its first: they are not written."""
    shares_with: str = ""
    """The key of that session; empty where there are none."""
    sources: Sequence[np.ndarray]
    """Memory of the blocks that are not kept, in order: not to be rewritten until the task has settled."""
    note: bytes | None
    """What to keep with the session; None keeps what is kept."""
    cuts: list[Cut] = dataclasses.field(default_factory=list)
    """Of the session meanwhile: what is on SSD is cut so when the task has ended."""
    detached: bool = False
    """Whether what is in DRAM now is another state of the session."""

    @property
    def num_moved_blocks(self) -> int:
        """Blocks that are written."""
        return len(self.sources) - self.num_shared_blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskEnd:
    """What became of a task. One that is late is reported once more when it has settled."""

    task: Task
    error: BlockIoError | None = None
    settled: bool = True
    """Whether none of its memory or blocks will be touched any more. Always after success."""
    contents: Contents | None = None
    """Of a fetched session."""
    span_s: tuple[float, float] | None = None
    """When it was begun and ended, on the timeline's clock; None where that is told already, or nobody measures."""


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

    @property
    def num_changes(self) -> int:
        """Changes of the catalog that were asked for and not tried yet, and what `take_ended` has."""

    @property
    def is_late(self) -> bool:
        """Whether the catalog has not answered for so long that nothing should wait for the SSD."""

    def submit(self, task: Task) -> None:
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
