"""The AttentionStore: which session's KV is kept, and how it gets in and out.

Moves have two phases. A load or save is prepared (blocks are reserved or held), bytes move by its ticket, and it is
completed or aborted. What is not completed is never readable, and a failure only ever shortens a stored prefix.

Keys are opaque strings: whoever makes them (session, tenant salt, weights, layout) decides who may meet whose KV. The
token ids of what is stored are kept with it, so KV is never served for other tokens.

Bookkeeping belongs to one thread, the engine's; it never waits for bytes except where a docstring says so.

Source: CachedAttention (Gao et al., USENIX ATC 2024), section 3.3.

Not here: copies between host and device, what moves between the tiers and when (`placement`), the copies themselves
(`tickets`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Hashable, Iterator

import numpy as np
import numpy.typing as npt

from ca_jax.storage.books import Counters, Entry, EntryTable
from ca_jax.storage.catalog_records import Namespace
from ca_jax.storage.config import StoreConfig
from ca_jax.storage.dram import DramTier
from ca_jax.storage.expiry import check_ttl
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.lookahead import LookAhead
from ca_jax.storage.placement import Placement
from ca_jax.storage.policy import EvictionPolicy, make_policy
from ca_jax.storage.quota import ChargedBlocks
from ca_jax.storage.records import EntryInfo, Lookup, MissReason, Owner, Residency, StoreStats
from ca_jax.storage.ssd_books import SsdBooks, open_ssd_books
from ca_jax.storage.tickets import LoadTicket, SaveTicket, TicketState

_CLOSE_S = 60.0  # How long `close` waits for what is on its way to SSD.


class StoreClosedError(RuntimeError):
    """A call on a store that has been closed."""


class EntryInUseError(RuntimeError):
    """A session's KV was to be shortened or dropped while a load or save of it is open."""


class AttentionStore:
    """KV of many sessions in blocks of DRAM and, where the config names a directory, of SSD, under byte caps.

    With an SSD a session is written there in the background once its turn has ended; `poll` keeps that going, and is to
    be called whenever `on_progress` was, and now and then. What is on SSD is found again by the next store of the
    directory with the same weights and layout.

    Args:
      layout: the shape of a block; its `block_tokens` must be the config's.
      config: caps and policy.
      policy: who is evicted; by default the one that the config names.
      weights: fingerprint of the weights and of whatever else decides what KV they give; other KV is not found on SSD.
      clock: seconds since the epoch, which times to live are counted by.
      on_progress: called from any thread when `poll` has something to do.

    Raises:
      ValueError: layout and config disagree, or a cap is under one block, above the machine's memory, or above what the
        disk has free.
      MemoryError: the system does not grant the cap of DRAM.
      NotADirectoryError, PermissionError, CatalogError: the directory cannot be used; the message says why.
    """

    def __init__(
        self,
        layout: KVLayout,
        config: StoreConfig,
        policy: EvictionPolicy | None = None,
        *,
        weights: str = "",
        clock: Callable[[], float] = time.time,
        on_progress: Callable[[], None] | None = None,
    ):
        if layout.block_tokens != config.block_tokens:
            raise ValueError(f"layout wanted blocks of {config.block_tokens} tokens, found {layout.block_tokens}")
        self._layout = layout
        self._ttl_s = config.ttl_s
        self._clock = clock
        self._progress = threading.Event()
        self._on_progress = on_progress
        policy = make_policy(config.eviction_policy) if policy is None else policy
        quota = config.tenant_quota_bytes
        self._dram = DramTier(layout, config.dram_bytes)
        self._blocks = ChargedBlocks(self._dram.allocator, None if quota is None else quota // layout.block_bytes)
        look_ahead = LookAhead()
        self._entries = EntryTable(look_ahead, self._dram.num_blocks)
        self._counters = Counters()
        self._ssd: SsdBooks | None = None
        if config.ssd_dir is not None:
            self._ssd = open_ssd_books(
                config,
                Namespace(weights=weights, layout=layout),
                table=self._entries,
                dram=self._dram,
                dram_blocks=self._blocks,
                policy=policy,
                clock=clock,
                on_progress=self._progressed,
            )
        self._placement = Placement(
            layout,
            look_ahead,
            self._entries,
            self._blocks,
            self._ssd,
            policy,
            self._counters,
            free_fraction=config.dram_free_fraction,
            clock=clock,
        )
        self._pins: dict[str, int] = {}
        self._open_loads: dict[LoadTicket, Entry] = {}
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
        """Says where a session's KV is and how many of its tokens can be read, or fetched; counts as use."""
        self._check_open()
        entry = self._entries.get(key)
        if entry is None:
            return Lookup(residency=Residency.ABSENT, num_tokens=0)
        self._placement.used(entry)
        return Lookup(residency=entry.residency, num_tokens=_num_readable(entry))

    def residency(self, key: str) -> Residency:
        """Where a session's KV is. Not a use."""
        self._check_open()
        entry = self._entries.get(key)
        return Residency.ABSENT if entry is None else entry.residency

    def list(self) -> tuple[EntryInfo, ...]:
        """Describes every session stored or being stored, in the order in which they came. Not a use."""
        self._check_open()
        return tuple(self._describe(entry) for entry in self._entries)

    def of_name(self, session_id: str) -> tuple[EntryInfo, ...]:
        """Describes the sessions that their owners, of whatever tenant, know by a name. Not a use."""
        self._check_open()
        return tuple(self._describe(entry) for entry in self._entries.of_name(session_id))

    def stats(self) -> StoreStats:
        """Sizes now, and counts since the store was made."""
        self._check_open()
        free_bytes = self._blocks.num_free * self._layout.block_bytes
        capacity_bytes = self._blocks.num_blocks * self._layout.block_bytes
        return StoreStats(
            capacity_bytes=capacity_bytes,
            used_bytes=capacity_bytes - free_bytes,
            free_bytes=free_bytes,
            num_sessions=len(self._entries),
            ssd=None if self._ssd is None else self._ssd.stats(),
            **dataclasses.asdict(self._counters),
        )

    def note(self, key: str) -> bytes:
        """What the owner of a session on SSD wanted kept with it; empty if nothing. Reads a file: milliseconds."""
        self._check_open()
        entry = self._entries.get(key)
        if entry is None or self._ssd is None:
            return b""
        return entry.note if entry.note is not None else self._ssd.note(key)

    def set_note(self, key: str, note: bytes) -> None:
        """Has `note` kept with a session, on SSD, from its next flush on; forgotten with it."""
        self._check_open()
        entry = self._entries.get(key)
        if entry is not None and self._ssd is not None:
            entry.note = note
            if entry.block_ids:
                self._placement.changed(entry)

    def find_prefix(self, tenant: str, token_ids: npt.ArrayLike) -> str | None:
        """The tenant's session on SSD that begins with the same tokens for longest, at least a block of them.

        Reads a file: under a millisecond where the system has it in memory.

        Returns:
          Its key; None where there is none.
        """
        self._check_open()
        match = None if self._ssd is None else self._ssd.find_prefix(tenant, _as_token_ids(token_ids))
        return None if match is None or self._entries.get(match.key) is None else match.key

    # The job queue, and what goes on in the background.

    def enqueue(self, job: Hashable, key: str) -> None:
        """Says that a job of a session waits, behind all others: the future that placement looks at.

        Raises:
          ValueError: the job waits already.
        """
        self._check_open()
        self._placement.enqueue(job, key)

    def dequeue(self, job: Hashable) -> None:
        """Says that a job waits no more: its load is open, or nobody wants it.

        Raises:
          ValueError: it does not wait.
        """
        self._check_open()
        self._placement.dequeue(job)

    def request(self, key: str) -> bool:
        """Asks for a session's KV now, since a waiting job of it could run. Never blocks.

        Returns:
          Whether it is on its way to DRAM and worth waiting for: `on_progress` tells when to ask again.
        """
        self._check_open()
        return self._placement.request(key)

    def poll(self) -> None:
        """Takes in what has moved, begins what is due: flushes, fetches, evictions, expiry. Never blocks."""
        self._check_open()
        self._placement.step()

    def settle(self, timeout_s: float = _CLOSE_S) -> bool:
        """Waits until all that can be on SSD is there, durably, and nothing moves; at most `timeout_s` seconds.

        What a running turn holds is not waited for.

        Returns:
          Whether that is so.
        """
        self._check_open()
        give_up_s = time.monotonic() + timeout_s
        while True:
            self._progress.clear()
            self._placement.step()
            left_s = give_up_s - time.monotonic()
            if not self._placement.busy or left_s <= 0:
                return not self._placement.busy
            self._progress.wait(left_s)

    # Pins.

    def pin(self, key: str) -> None:
        """Keeps what is stored, or will be stored, under `key` from being evicted. Counted: each pin wants an unpin.

        A pin does not keep the owner from `truncate` and `drop`.
        """
        self._check_open()
        self._set_pins(key, self._pins.get(key, 0) + 1)

    def unpin(self, key: str) -> None:
        """Takes one pin back.

        Raises:
          ValueError: there is none.
        """
        self._check_open()
        if key not in self._pins:
            raise ValueError(f"wanted a pinned key, found {key!r}, which has no pin")
        self._set_pins(key, self._pins[key] - 1)

    @contextlib.contextmanager
    def pinned(self, key: str) -> Iterator[None]:
        """Pins `key` for the length of a `with` block."""
        self.pin(key)
        try:
            yield
        finally:
            self.unpin(key)

    def set_pinned(self, key: str, pinned: bool) -> bool:
        """Keeps a session in the store, or lets it go like others: no eviction, no expiry, over restarts too.

        It may still leave DRAM while it is on SSD. Not counted.

        Returns:
          Whether the session is stored.
        """
        self._check_open()
        entry = self._entries.get(key)
        if entry is None:
            return False
        entry.pinned = pinned
        if self._ssd is not None:
            self._ssd.set_pinned(entry)
        self._entries.place(entry)
        return True

    def set_ttl(self, key: str, ttl_s: float | None) -> bool:
        """Says how long a session lives after its last use, seconds; None: while room lasts. Counts as use.

        Returns:
          Whether the session is stored.

        Raises:
          ValueError: `ttl_s` is negative or not finite.
        """
        self._check_open()
        check_ttl(ttl_s)
        entry = self._entries.get(key)
        if entry is None:
            return False
        entry.ttl_s = ttl_s
        if self._ssd is not None:
            self._ssd.set_ttl(entry)
        self._placement.used(entry)
        return True

    # Saves.

    def prepare_save(
        self, key: str, start_token: int, token_ids: npt.ArrayLike, owner: Owner | None = None
    ) -> SaveTicket | None:
        """Reserves room for the KV of a session's next tokens, evicting others where it lacks.

        Several saves of one session may be open; they are completed in order. What is pinned or in use is not evicted.

        Args:
          key: session id.
          start_token: where the new tokens begin: the tokens published in DRAM plus those of saves still open.
          token_ids: `[T]`, T > 0, the new tokens.
          owner: whose session it is, if it is new here; by default nobody's, and known by its key.

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
        entry = entry or self._new_entry(key, owner)
        if entry.fetch is not None and self._ssd is not None:  # What comes would be older than what is saved now.
            self._ssd.cancel(entry)
        num_blocks = self._layout.num_blocks(start_token + len(token_ids)) - len(entry.block_ids)
        skipped = self._placement.make_room(entry, num_blocks)
        if skipped is not None:
            self._counters.skipped_saves[skipped] += 1
            return None
        grown = self._blocks.alloc(entry.owner.tenant, num_blocks, entry.block_ids[-1] if entry.block_ids else None)
        if grown is None:
            raise RuntimeError(f"room for {num_blocks} blocks of {key!r} was made and is not there: books are wrong")
        entry.block_ids.extend(grown)
        ticket = SaveTicket(self._dram, key, start_token, token_ids, np.array(entry.block_ids))
        entry.open_saves.append(ticket)
        self._keep(entry)
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
        self._placement.changed(entry)
        self._placement.used(entry)
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
        miss = self._miss_of(entry, token_ids)
        if entry is not None:
            self._placement.used(entry)
        if entry is None or miss is not None:
            self._counters.misses[miss or MissReason.ABSENT] += 1
            if entry is not None:
                entry.miss = None
                self._entries.place(entry)
            return None
        num_tokens = _common_prefix(entry.token_ids, token_ids)
        block_ids = np.array(entry.block_ids[: self._layout.num_blocks(num_tokens)])
        ticket = LoadTicket(self._dram, key, num_tokens, block_ids, from_ssd=entry.fetched)
        entry.fetched = False
        entry.num_open_loads += 1
        self._open_loads[ticket] = entry
        self._entries.place(entry)
        return ticket

    def complete_load(self, ticket: LoadTicket) -> None:
        """Ends a load, a hit. Waits for copies under way.

        Raises:
          ValueError: the ticket is closed, or not of this store.
        """
        self._end_load(ticket, TicketState.DONE)
        self._counters.num_hits += 1
        self._counters.num_hits_from_ssd += ticket.from_ssd
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

        What is on SSD only is kept in full blocks, so that up to a block more is forgotten.

        Returns:
          Tokens that are kept, in DRAM if there are any; 0 for a session that is not stored (any more).

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
        _check_idle(entry)
        if num_tokens:
            self._placement.shorten(entry, num_tokens)
        else:
            self._placement.forget(entry)
        return _num_readable(entry)

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

    def copy_prefix(self, source: str, key: str, token_ids: npt.ArrayLike, owner: Owner | None = None) -> int:
        """Copies what a session in DRAM has of the beginning of `token_ids` to a new session. Waits for the copy.

        Args:
          source: session id of the one that has it.
          key: session id of the new one, of which nothing is stored.
          token_ids: `[T]`, T > 0, the tokens whose KV is wanted.
          owner: whose the new session is.

        Returns:
          How many tokens it has now; 0 where none agree or no room can be made.

        Raises:
          ValueError: something is stored under `key`, or `token_ids` is empty or not a list of int32.
        """
        self._check_open()
        token_ids = _as_token_ids(token_ids)
        if self._entries.get(key) is not None:
            raise ValueError(f"wanted a session of which nothing is stored, found {key!r}, of which something is")
        from_entry = self._entries.get(source)
        num_tokens = 0 if from_entry is None else _common_prefix(from_entry.token_ids, token_ids)
        if from_entry is None or not num_tokens:
            return 0
        entry = self._new_entry(key, owner)
        num_blocks = self._layout.num_blocks(num_tokens)
        with self._entries.kept(from_entry):
            if self._placement.make_room(entry, num_blocks) is not None:
                return 0
        block_ids = self._blocks.alloc(entry.owner.tenant, num_blocks)
        if block_ids is None:
            raise RuntimeError(f"room for {num_blocks} blocks of {key!r} was made and is not there: books are wrong")
        for source_block, block in zip(from_entry.block_ids, block_ids, strict=False):
            np.copyto(self._dram.slab[block], self._dram.slab[source_block])
        entry.block_ids = list(block_ids)
        entry.token_ids = from_entry.token_ids[:num_tokens].copy()
        entry.fetched, from_entry.fetched = from_entry.fetched, False
        self._keep(entry)
        self._placement.changed(entry)
        return num_tokens

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Ends open loads and saves, writes to SSD what is complete, and lets go of memory and files.

        May be called again.

        Args:
          timeout_s: seconds it waits for SSD at most. What is not there by then is not on SSD, and that is all.
        """
        if self._closed:
            return
        for entry in tuple(self._entries):
            if entry.open_saves:
                self._abort_saves(entry, first=entry.open_saves[0])
        for ticket in tuple(self._open_loads):
            self.abort_load(ticket)
        for key in tuple(self._pins):
            self._set_pins(key, 0)
        self.settle(timeout_s)
        self._closed = True
        if self._ssd is not None:
            self._ssd.close(timeout_s)
        self._dram.close()

    # The books.

    def _new_entry(self, key: str, owner: Owner | None) -> Entry:
        owner = owner or Owner()
        if not owner.session_id:
            owner = dataclasses.replace(owner, session_id=key)
        now_s = self._clock()
        return Entry(
            key=key,
            owner=owner,
            created_s=now_s,
            last_used_s=now_s,
            ttl_s=self._ttl_s if owner.ttl_s is None else owner.ttl_s,
            num_pins=self._pins.get(key, 0),
        )

    def _keep(self, entry: Entry) -> None:
        """Enters an entry that has blocks now, if it is new, as the last used."""
        if self._entries.get(entry.key) is None:
            self._entries.add(entry)
        self._entries.place(entry)
        self._placement.used(entry)

    def _set_pins(self, key: str, num_pins: int) -> None:
        if num_pins:
            self._pins[key] = num_pins
        else:
            del self._pins[key]
        entry = self._entries.get(key)
        if entry is not None:
            entry.num_pins = num_pins
            self._entries.place(entry)

    def _miss_of(self, entry: Entry | None, token_ids: np.ndarray) -> MissReason | None:
        """Why a load of these tokens serves nothing; None if it serves some."""
        if entry is None:
            return MissReason.ABSENT
        if not entry.num_tokens:
            if entry.miss is not None:
                return entry.miss
            return MissReason.ABSENT if entry.residency is Residency.ABSENT else MissReason.PENDING
        return None if _common_prefix(entry.token_ids, token_ids) else MissReason.MISMATCH

    def _describe(self, entry: Entry) -> EntryInfo:
        ssd_blocks = 0 if entry.ssd is None else len(entry.ssd.block_ids)
        return EntryInfo(
            key=entry.key,
            tenant=entry.owner.tenant,
            session_id=entry.owner.session_id,
            residency=entry.residency,
            num_tokens=_num_readable(entry),
            num_blocks=len(entry.block_ids),
            num_bytes=len(entry.block_ids) * self._layout.block_bytes,
            ssd_tokens=0 if entry.ssd is None else entry.ssd.num_tokens,
            ssd_bytes=0 if self._ssd is None else ssd_blocks * self._ssd.stored_block_bytes,
            pinned=entry.pinned or bool(entry.num_pins),
            in_use=entry.in_use,
            created_s=entry.created_s,
            last_used_s=entry.last_used_s,
            ttl_s=entry.ttl_s,
        )

    def _progressed(self) -> None:
        self._progress.set()
        if self._on_progress is not None:
            self._on_progress()

    def _abort_saves(self, entry: Entry, first: SaveTicket) -> None:
        """Aborts `first` and the later saves of `entry`."""
        position = entry.open_saves.index(first)
        for ticket in entry.open_saves[position:]:
            ticket.close(TicketState.ABORTED)
            self._counters.num_aborted_saves += 1
        del entry.open_saves[position:]
        self._placement.leave_dram(entry, entry.num_reserved_tokens)

    def _end_load(self, ticket: LoadTicket, state: TicketState) -> None:
        self._check_open()
        entry = self._open_loads.pop(ticket, None)
        if entry is None:
            raise ValueError(
                f"wanted an open load of this store, found one of {ticket.key!r} that is {ticket.state.value}"
            )
        ticket.close(state)
        entry.num_open_loads -= 1
        self._entries.place(entry)
        self._placement.used(entry)

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


def _num_readable(entry: Entry) -> int:
    """Tokens that can be read now, or that a fetch would bring."""
    return entry.num_tokens or (0 if entry.ssd is None else entry.ssd.num_tokens)


def _check_idle(entry: Entry) -> None:
    if entry.in_use:
        raise EntryInUseError(
            f"wanted no open load or save of {entry.key!r}, found {entry.num_open_loads} loads and "
            f"{len(entry.open_saves)} saves"
        )


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
