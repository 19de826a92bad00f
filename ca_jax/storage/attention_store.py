"""The AttentionStore: which session's KV is kept, in which blocks, and what moves in and out.

Moves have two phases. A load or save is prepared (blocks are reserved or held), bytes move by its ticket, and it is
completed or aborted. What is not completed is never readable, and a failure only ever shortens a stored prefix.

Keys are opaque strings: whoever makes them (session, tenant salt, weights, layout) decides who may meet whose KV. The
token ids of what is stored are kept with it, so KV is never served for other tokens.

Bookkeeping belongs to one thread, the engine's; it never waits for bytes except where a docstring says so.

Source: CachedAttention (Gao et al., USENIX ATC 2024), section 3.3.

Not here: copies between host and device, the choice of victims (`policy`), the copies themselves (`tickets`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from ca_jax.storage.books import Counters, Entry, EntryTable
from ca_jax.storage.config import StoreConfig
from ca_jax.storage.dram import DramTier
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.lookahead import LookAhead
from ca_jax.storage.policy import EvictionPolicy, make_policy
from ca_jax.storage.records import EntryInfo, Lookup, MissReason, Residency, SkipReason, StoreStats
from ca_jax.storage.tickets import LoadTicket, SaveTicket, TicketState


class StoreClosedError(RuntimeError):
    """A call on a store that has been closed."""


class EntryInUseError(RuntimeError):
    """A session's KV was to be shortened or dropped while a load or save of it is open."""


class AttentionStore:
    """KV of many sessions in blocks of DRAM, under a byte cap.

    Args:
      layout: the shape of a block; its `block_tokens` must be the config's.
      config: cap and policy.
      policy: who is evicted; by default the one that the config names.
      clock: seconds, never decreasing; orders use for LRU.

    Raises:
      ValueError: layout and config disagree, or the cap is under one block or above the machine's memory.
      MemoryError: the system does not grant the cap.
    """

    def __init__(
        self,
        layout: KVLayout,
        config: StoreConfig,
        policy: EvictionPolicy | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        if layout.block_tokens != config.block_tokens:
            raise ValueError(f"layout wanted blocks of {config.block_tokens} tokens, found {layout.block_tokens}")
        self._layout = layout
        self._policy = make_policy(config.eviction_policy) if policy is None else policy
        self._clock = clock
        self._dram = DramTier(layout, config.dram_bytes)
        self._entries = EntryTable(LookAhead())
        self._pins: collections.Counter[str] = collections.Counter()
        self._open_loads: dict[LoadTicket, Entry] = {}
        self._counters = Counters()
        self._closed = False

    @property
    def layout(self) -> KVLayout:
        """The shape of a block."""
        return self._layout

    def touch(self, progress: Callable[[int, int], None] | None = None) -> float:
        """Makes the DRAM tier's memory resident, so that saves do not pay for it; see `DramTier.touch`.

        The one method meant for another thread than the bookkeeping one. Ends early, without an error, when the store
        is closed.
        """
        return self._dram.touch(progress)

    # What is stored.

    def lookup(self, key: str) -> Lookup:
        """Says where a session's KV is and how many of its tokens can be read; counts as use."""
        self._check_open()
        entry = self._entries.get(key)
        if entry is None:
            return Lookup(residency=Residency.ABSENT, num_tokens=0)
        self._entries.use(entry, self._clock())
        return Lookup(residency=entry.residency, num_tokens=entry.num_tokens)

    def list(self) -> tuple[EntryInfo, ...]:
        """Describes every session stored or being stored, in order of creation. Not a use."""
        self._check_open()
        return tuple(
            EntryInfo(
                key=entry.key,
                residency=entry.residency,
                num_tokens=entry.num_tokens,
                num_blocks=len(entry.block_ids),
                num_bytes=len(entry.block_ids) * self._layout.block_bytes,
                pinned=entry.key in self._pins,
                in_use=entry.in_use,
                created_s=entry.created_s,
                last_used_s=entry.last_used_s,
            )
            for entry in self._entries
        )

    def stats(self) -> StoreStats:
        """Sizes now, and counts since the store was made."""
        self._check_open()
        free_bytes = self._dram.allocator.num_free * self._layout.block_bytes
        capacity_bytes = self._dram.num_blocks * self._layout.block_bytes
        return StoreStats(
            capacity_bytes=capacity_bytes,
            used_bytes=capacity_bytes - free_bytes,
            free_bytes=free_bytes,
            num_sessions=len(self._entries),
            **dataclasses.asdict(self._counters),
        )

    # Pins.

    def pin(self, key: str) -> None:
        """Keeps what is stored, or will be stored, under `key` from being evicted. Counted: each pin wants an unpin.

        A pin does not keep the owner from `truncate` and `drop`.
        """
        self._check_open()
        self._pins[key] += 1

    def unpin(self, key: str) -> None:
        """Takes one pin back.

        Raises:
          ValueError: there is none.
        """
        self._check_open()
        if key not in self._pins:
            raise ValueError(f"wanted a pinned key, found {key!r}, which has no pin")
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]

    @contextlib.contextmanager
    def pinned(self, key: str) -> Iterator[None]:
        """Pins `key` for the length of a `with` block."""
        self.pin(key)
        try:
            yield
        finally:
            self.unpin(key)

    # Saves.

    def prepare_save(self, key: str, start_token: int, token_ids: npt.ArrayLike) -> SaveTicket | None:
        """Reserves room for the KV of a session's next tokens, evicting others where it lacks.

        Several saves of one session may be open; they are completed in order. What is pinned or in use is not evicted.

        Args:
          key: session id.
          start_token: where the new tokens begin: the tokens published plus those of saves still open.
          token_ids: `[T]`, T > 0, the new tokens.

        Returns:
          A ticket to write by; None where no room can be made (counted, with its reason). The next offer must begin
          at the same token then: a stored sequence has no gaps.

        Raises:
          ValueError: `start_token` is another, or `token_ids` is empty or not a list of int32.
        """
        self._check_open()
        token_ids = _as_token_ids(token_ids)
        entry = self._entries.get(key)
        reserved = entry.num_reserved_tokens if entry else 0
        if start_token != reserved:
            raise ValueError(f"save of {key!r} wanted to start at token {reserved}, found start_token={start_token}")
        now_s = self._clock()
        entry = entry or Entry(key=key, created_s=now_s, last_used_s=now_s)
        num_blocks = self._layout.num_blocks(start_token + len(token_ids))
        skipped = self._make_room(entry, num_blocks)
        if skipped is not None:
            self._counters.skipped_saves[skipped] += 1
            return None
        if self._entries.get(key) is None:
            self._entries.add(entry)
        self._entries.use(entry, now_s)
        grown = self._dram.allocator.alloc(
            num_blocks - len(entry.block_ids), after=entry.block_ids[-1] if entry.block_ids else None
        )
        if grown is None:
            raise RuntimeError(f"room for {num_blocks} blocks of {key!r} was made and is not there: books are wrong")
        entry.block_ids.extend(grown)
        ticket = SaveTicket(self._dram, key, start_token, token_ids, np.array(entry.block_ids))
        entry.open_saves.append(ticket)
        return ticket

    def complete_save(self, ticket: SaveTicket) -> bool:
        """Publishes a save: from here on its tokens can be loaded. Waits for writes under way.

        Returns:
          Whether it was published: False if an earlier save of the session was aborted, and this one with it.

        Raises:
          ValueError: the ticket is not fully written, not the session's oldest open one, completed already, or not of
            this store. It stays as it was.
        """
        self._check_open()
        if ticket.state is TicketState.ABORTED:
            return False
        entry = self._entry_of(ticket)
        if entry.open_saves[0] is not ticket:
            raise ValueError(
                f"saves of {ticket.key!r} complete in order: wanted the one from token "
                f"{entry.open_saves[0].start_token}, found the one from {ticket.start_token}"
            )
        if ticket.num_missing:
            raise ValueError(
                f"save of {ticket.key!r} wanted KV of {ticket.num_tokens} tokens in {self._layout.num_layers} layers, "
                f"found {ticket.num_missing} (layer, token) pairs not written"
            )
        ticket.close(TicketState.DONE)
        del entry.open_saves[0]
        entry.token_ids = np.concatenate([entry.token_ids, ticket.token_ids])
        self._entries.use(entry, self._clock())
        self._counters.num_saves += 1
        self._counters.saved_bytes += ticket.num_tokens * self._layout.token_bytes
        return True

    def abort_save(self, ticket: SaveTicket) -> None:
        """Gives a save up, and all later ones of its session; their blocks are free again. Waits for writes under way.

        Raises:
          ValueError: the ticket is completed already, or not of this store.
        """
        self._check_open()
        if ticket.state is not TicketState.ABORTED:
            self._abort_saves(self._entry_of(ticket), first=ticket)

    # Loads.

    def prepare_load(self, key: str, token_ids: npt.ArrayLike) -> LoadTicket | None:
        """Holds the longest published prefix of `token_ids` for reading, until it is completed or aborted.

        A caller that gets fewer tokens than are stored wants other tokens from there on, and truncates before it saves.

        Args:
          key: session id.
          token_ids: `[T]`, T > 0, the tokens whose KV is wanted.

        Returns:
          A ticket to read by; None where nothing can be served (a miss, counted with its reason).

        Raises:
          ValueError: `token_ids` is empty or not a list of int32.
        """
        self._check_open()
        token_ids = _as_token_ids(token_ids)
        entry = self._entries.get(key)
        if entry is None:
            self._counters.misses[MissReason.ABSENT] += 1
            return None
        self._entries.use(entry, self._clock())
        if not entry.num_tokens:
            self._counters.misses[MissReason.PENDING] += 1
            return None
        num_tokens = _common_prefix(entry.token_ids, token_ids)
        if not num_tokens:
            self._counters.misses[MissReason.MISMATCH] += 1
            return None
        block_ids = np.array(entry.block_ids[: self._layout.num_blocks(num_tokens)])
        ticket = LoadTicket(self._dram, key, num_tokens, block_ids)
        entry.num_open_loads += 1
        self._open_loads[ticket] = entry
        return ticket

    def complete_load(self, ticket: LoadTicket) -> None:
        """Ends a load, a hit. Waits for copies under way.

        Raises:
          ValueError: the ticket is closed, or not of this store.
        """
        self._end_load(ticket, TicketState.DONE)
        self._counters.num_hits += 1
        self._counters.loaded_bytes += ticket.num_tokens * self._layout.token_bytes

    def abort_load(self, ticket: LoadTicket) -> None:
        """Gives a load up, a miss. Waits for copies under way.

        Raises:
          ValueError: the ticket is closed, or not of this store.
        """
        self._end_load(ticket, TicketState.ABORTED)
        self._counters.misses[MissReason.ABORTED] += 1

    # Forgetting.

    def truncate(self, key: str, num_tokens: int) -> int:
        """Keeps only a session's first `num_tokens` published tokens, if it has more. Blocks are free at once.

        Returns:
          Tokens that are kept; 0 for a session that is not stored (any more).

        Raises:
          ValueError: num_tokens is negative.
          EntryInUseError: a load or save of it is open.
        """
        self._check_open()
        if num_tokens < 0:
            raise ValueError(f"wanted num_tokens >= 0, found {num_tokens}")
        entry = self._entries.get(key)
        if entry is None:
            return 0
        if entry.in_use:
            raise EntryInUseError(
                f"wanted no open load or save of {key!r}, found {entry.num_open_loads} loads and "
                f"{len(entry.open_saves)} saves"
            )
        if num_tokens < entry.num_tokens:
            entry.token_ids = entry.token_ids[:num_tokens].copy()
            self._free_beyond(entry, num_tokens)
        return entry.num_tokens

    def drop(self, key: str) -> bool:
        """Forgets a session's KV.

        Returns:
          Whether there was any.

        Raises:
          EntryInUseError: a load or save of it is open.
        """
        self._check_open()
        found = self._entries.get(key) is not None
        self.truncate(key, 0)
        return found

    def close(self) -> None:
        """Ends every open load and save, waits for their copies, and lets go of the memory. May be called again."""
        if self._closed:
            return
        for entry in tuple(self._entries):
            if entry.open_saves:
                self._abort_saves(entry, first=entry.open_saves[0])
        for ticket in tuple(self._open_loads):
            self.abort_load(ticket)
        self._closed = True
        self._dram.close()

    # The books.

    def _make_room(self, entry: Entry, num_blocks: int) -> SkipReason | None:
        """Evicts until `entry` can hold `num_blocks` blocks; all the room, or none and the reason."""
        if not self._dram.num_blocks:
            return SkipReason.STORE_OFF
        if num_blocks > self._dram.num_blocks:
            return SkipReason.TOO_LARGE
        lacking = num_blocks - len(entry.block_ids) - self._dram.allocator.num_free
        if lacking <= 0:
            return None

        def must_stay(other: Entry) -> bool:
            return other is entry or other.in_use or other.key in self._pins

        keys = self._policy.choose_victims(self._entries.view(must_stay), lacking)
        if not keys:
            return SkipReason.NO_ROOM
        victims = [victim for key in keys if (victim := self._entries.get(key)) and not must_stay(victim)]
        num_freed = sum(len(victim.block_ids) for victim in victims)
        if len({*keys}) != len(victims) or num_freed < lacking:
            raise RuntimeError(
                f"{type(self._policy).__name__} wanted to free {lacking} blocks by evicting {keys}; "
                f"found {len(victims)} of them evictable, with {num_freed} blocks"
            )
        for victim in victims:
            self._counters.num_evictions += 1
            self._counters.evicted_bytes += len(victim.block_ids) * self._layout.block_bytes
            self._free_beyond(victim, 0)
        return None

    def _abort_saves(self, entry: Entry, first: SaveTicket) -> None:
        """Aborts `first` and the later saves of `entry`."""
        position = entry.open_saves.index(first)
        for ticket in entry.open_saves[position:]:
            ticket.close(TicketState.ABORTED)
            self._counters.num_aborted_saves += 1
        del entry.open_saves[position:]
        self._free_beyond(entry, entry.num_reserved_tokens)

    def _free_beyond(self, entry: Entry, num_tokens: int) -> None:
        """Frees the blocks past the first `num_tokens`; an entry of no tokens goes altogether."""
        num_blocks = self._layout.num_blocks(num_tokens)
        self._dram.allocator.free(entry.block_ids[num_blocks:])
        del entry.block_ids[num_blocks:]
        if not num_tokens:
            self._entries.remove(entry)

    def _end_load(self, ticket: LoadTicket, state: TicketState) -> None:
        self._check_open()
        entry = self._open_loads.pop(ticket, None)
        if entry is None:
            raise ValueError(
                f"wanted an open load of this store, found one of {ticket.key!r} that is {ticket.state.value}"
            )
        ticket.close(state)
        entry.num_open_loads -= 1
        self._entries.use(entry, self._clock())

    def _entry_of(self, ticket: SaveTicket) -> Entry:
        entry = self._entries.get(ticket.key)
        if entry is None or ticket not in entry.open_saves:
            raise ValueError(
                f"wanted an open save of this store, found one of {ticket.key!r} that is {ticket.state.value}"
            )
        return entry

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("wanted an open AttentionStore, found one that is closed")


def _as_token_ids(token_ids: npt.ArrayLike) -> np.ndarray:
    given = np.asarray(token_ids)
    if given.ndim != 1 or not given.size or not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"token_ids wanted a non-empty list of integers, found {given.dtype}{list(given.shape)}")
    ids = given.astype(np.int32)
    if not np.array_equal(ids, given):
        raise ValueError(f"token_ids wanted int32, found values in [{given.min()}, {given.max()}]")
    ids.flags.writeable = False
    return ids


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if differs.size else length
