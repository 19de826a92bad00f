"""Which stored sequences go when room is needed: pure choices over a frozen view.

Not here: what is stored (the AttentionStore keeps it and carries the choice out), or any clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Protocol


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredEntry:
    """One stored sequence, as a policy sees it."""

    key: str
    """Session id."""
    num_blocks: int
    """Blocks that its eviction would free."""
    pinned: bool
    """Whether it must stay: pinned, being loaded or saved, or the one that room is sought for."""
    last_used_s: float
    """When it was last looked up, loaded or saved; seconds of the store's clock."""
    created_s: float
    """When it was first saved; seconds of the store's clock."""
    queue_position: int | None = None
    """Place of its next job in the scheduler's queue, 0 at the head; None where no job waits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreView:
    """What a policy may look at. Valid during the call only.

    Both fields hold the same entries. They are iterables, which the store makes on demand in the order that it keeps
    anyway: a policy that stops early looks at few entries, however many are stored.
    """

    by_last_used: Iterable[StoredEntry]
    """Least recently used first."""
    by_created: Iterable[StoredEntry]
    """Oldest first."""


class EvictionPolicy(Protocol):
    """Chooses whom to evict."""

    def choose_victims(self, view: StoreView, num_blocks: int) -> tuple[str, ...]:
        """Names entries whose eviction frees at least `num_blocks` blocks.

        Atomic: enough room, or nothing. Pure: the same view gives the same answer.

        Args:
          view: what is stored.
          num_blocks: blocks wanted, > 0.

        Returns:
          Keys of entries that are not pinned and together hold at least `num_blocks` blocks; empty if there are none.
        """
        ...


class LruPolicy:
    """Evicts what was not used for longest."""

    def choose_victims(self, view: StoreView, num_blocks: int) -> tuple[str, ...]:
        """See `EvictionPolicy`."""
        return _first_that_suffice(view.by_last_used, num_blocks)


class FifoPolicy:
    """Evicts what was stored first, used since or not."""

    def choose_victims(self, view: StoreView, num_blocks: int) -> tuple[str, ...]:
        """See `EvictionPolicy`."""
        return _first_that_suffice(view.by_created, num_blocks)


EVICTION_POLICIES: dict[str, type[LruPolicy] | type[FifoPolicy]] = {"lru": LruPolicy, "fifo": FifoPolicy}


def make_policy(name: str) -> EvictionPolicy:
    """Makes the policy of that name.

    Raises:
      ValueError: no policy has that name.
    """
    if name not in EVICTION_POLICIES:
        raise ValueError(f"eviction policy wanted one of {', '.join(EVICTION_POLICIES)}; found {name!r}")
    return EVICTION_POLICIES[name]()


def _first_that_suffice(entries: Iterable[StoredEntry], num_blocks: int) -> tuple[str, ...]:
    victims = []
    for entry in entries:
        if entry.pinned or not entry.num_blocks:
            continue
        victims.append(entry.key)
        num_blocks -= entry.num_blocks
        if num_blocks <= 0:
            return tuple(victims)
    return ()
