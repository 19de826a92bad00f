"""The AttentionStore's books: one entry per session, in the orders that policies ask for, and the counters.

Not here: bytes, blocks' memory, or decisions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from ca_jax.storage.lookahead import LookAhead
from ca_jax.storage.orders import TierOrders
from ca_jax.storage.policy import StoredEntry, StoreView
from ca_jax.storage.records import MissReason, Residency, SkipReason
from ca_jax.storage.tickets import SaveTicket


@dataclasses.dataclass(kw_only=True, slots=True)
class Entry:
    """What is known of one session."""

    key: str
    created_s: float
    last_used_s: float
    token_ids: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    """Of the published tokens, int32."""
    block_ids: list[int] = dataclasses.field(default_factory=list)
    """The block table: blocks in token order, those of unfinished saves included."""
    open_saves: list[SaveTicket] = dataclasses.field(default_factory=list)
    """In token order; each begins where the one before ends."""
    num_open_loads: int = 0

    @property
    def num_tokens(self) -> int:
        """Published tokens."""
        return len(self.token_ids)

    @property
    def num_reserved_tokens(self) -> int:
        """Published tokens and those of unfinished saves."""
        return self.open_saves[-1].stop_token if self.open_saves else self.num_tokens

    @property
    def in_use(self) -> bool:
        """Whether a load or a save is open."""
        return bool(self.open_saves or self.num_open_loads)

    @property
    def residency(self) -> Residency:
        """Readable in DRAM, or not yet."""
        return Residency.DRAM if self.num_tokens else Residency.PENDING


class EntryTable:
    """Entries by key, in the orders that policies ask for, so that no choice of a victim has to sort.

    Args:
      look_ahead: the job queue.
    """

    def __init__(self, look_ahead: LookAhead) -> None:
        self._orders: TierOrders[Entry] = TierOrders(look_ahead)

    def __len__(self) -> int:
        return len(self._orders)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._orders)

    def get(self, key: str) -> Entry | None:
        """The entry of that key, if there is one."""
        return self._orders.get(key)

    def add(self, entry: Entry) -> None:
        """Adds a new entry, as the last created and the last used."""
        self._orders.add(entry.key, entry)

    def use(self, entry: Entry, now_s: float) -> None:
        """Marks an entry as the last used."""
        entry.last_used_s = now_s
        self._orders.use(entry.key)

    def remove(self, entry: Entry) -> None:
        """Takes an entry out."""
        self._orders.remove(entry.key)

    def view(self, must_stay: Callable[[Entry], bool]) -> StoreView:
        """What a policy may see; lazy, so it must be used before the next change."""

        def describe(entry: Entry, queue_position: int | None) -> StoredEntry:
            return StoredEntry(
                key=entry.key,
                num_blocks=len(entry.block_ids),
                pinned=must_stay(entry),
                last_used_s=entry.last_used_s,
                created_s=entry.created_s,
                queue_position=queue_position,
            )

        return self._orders.view(describe)


@dataclasses.dataclass
class Counters:
    """Counts since the store was made; meanings as in `StoreStats`."""

    num_hits: int = 0
    misses: dict[MissReason, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(MissReason, 0))
    num_saves: int = 0
    num_aborted_saves: int = 0
    skipped_saves: dict[SkipReason, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(SkipReason, 0))
    num_evictions: int = 0
    evicted_bytes: int = 0
    loaded_bytes: int = 0
    saved_bytes: int = 0
