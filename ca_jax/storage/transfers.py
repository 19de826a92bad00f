"""Opens and closes tickets: room is reserved or blocks are held, bytes move, and what is complete is published.

Not here: what else happens to sessions (store), room (tiering), the copies themselves (tickets).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from ca_jax.storage.records import MissReason, Owner, Residency
from ca_jax.storage.sessions import Entry, StoreParts
from ca_jax.storage.tickets import LoadTicket, SaveTicket, TicketState
from ca_jax.storage.tiering import Placement
from ca_jax.storage.tokens import Lineage, TokenPlaces, as_token_ids, num_common
from ca_jax.storage.truncation import Truncation


class Transfers:
    """Saves and loads of sessions in DRAM. Belongs to the bookkeeping thread.

    Args:
      ttl_s: how long sessions are kept whose owner does not say.
    """

    def __init__(self, parts: StoreParts, placement: Placement, truncation: Truncation, *, ttl_s: float | None) -> None:
        self._dram = parts.dram
        self._layout = parts.dram.layout
        self._blocks = parts.blocks
        self._index = parts.index
        self._placement = placement
        self._truncation = truncation
        self._counters = parts.counters
        self._ttl_s = ttl_s
        self._clock = parts.runtime.clock
        self._open_loads: dict[LoadTicket, Entry] = {}

    # Saves.

    def prepare_save(
        self,
        key: str,
        start_token: int,
        token_ids: npt.ArrayLike,
        owner: Owner | None = None,
        *,
        num_dropped: int = 0,
        num_plain: int | None = None,
        may_be_read: bool = False,
    ) -> SaveTicket | None:
        """Reserves room for the KV of a session's next tokens, evicting others where it lacks.

        Several saves of one session may be open; they are completed in order. What is pinned or in use is not evicted.

        Args:
          key: session id.
          start_token: where the new tokens begin: the tokens published in DRAM plus those of saves still open.
          token_ids: `[T]`, T > 0, the new tokens.
          owner: whose session it is, if it is new here; by default of no tenant, and known by its key.
          num_dropped: tokens that the caller's session has dropped, as `EntryInfo.num_dropped` counts them. It and the
            next are looked at where `start_token` is 0: what is behind has the lineage of what is there.
          num_plain: leading tokens whose KV has seen no dropped token; None for all, as after a prefill of them.
          may_be_read: whether `prepare_load` may serve it as it is written.

        Returns:
          A ticket to write by; None where no room can be made (counted, with its reason). The next offer must begin
          at the same token then: a stored sequence has no gaps.

        Raises:
          ValueError: `start_token` is another, or `token_ids` is empty or not a list of int32.
        """
        token_ids = as_token_ids(token_ids)
        entry = self._index.get(key)
        reserved = entry.num_reserved_tokens if entry else 0
        if start_token != reserved:
            raise ValueError(f"save of {key!r} must start at token {reserved}, got start_token={start_token}")
        entry = entry or self._new_entry(key, owner)
        self._placement.give_up_fetch(entry)  # What comes would be older than what is saved now.
        start_place = entry.num_reserved_places
        num_blocks = self._layout.num_blocks(start_place + len(token_ids)) - len(entry.block_ids)
        num_copied = int(self._would_write_to_others(entry))
        skipped = self._placement.make_room(entry, num_blocks + num_copied, num_copied)
        if skipped is not None:
            self._counters.skipped_saves[skipped] += 1
            return None
        if self._would_write_to_others(entry):  # A session that shared it may have made the room.
            self._own_last_block(entry)
        entry.block_ids.extend(self._blocks.alloc(entry.owner.tenant, num_blocks))
        if not start_token:
            entry.lineage = Lineage(num_dropped, num_plain)
        block_ids = np.array(entry.block_ids)
        ticket = SaveTicket(self._dram, key, start_token, token_ids, block_ids, start_place, may_be_read=may_be_read)
        entry.open_saves.append(ticket)
        self._placement.saving(entry)
        self._keep(entry)
        return ticket

    def room_is_coming(self, key: str, num_tokens: int, owner: Owner | None = None) -> bool:
        """Whether a save of so many more tokens would not begin now, but soon: `on_progress` tells when to try."""
        entry = self._index.get(key) or self._new_entry(key, owner)
        num_blocks = self._layout.num_blocks(entry.num_reserved_places + num_tokens) - len(entry.block_ids)
        return self._placement.room_is_coming(entry, num_blocks, int(self._would_write_to_others(entry)))

    def complete_save(self, ticket: SaveTicket) -> bool:
        """Publishes a save: from here on its tokens can be loaded. Waits for writes under way.

        Returns:
          Whether it was published: False if an earlier save of the session was aborted, and this one with it.

        Raises:
          ValueError: the ticket is not fully written, not the session's oldest open one, completed already, or not of
            this store. It stays as it was.
        """
        if ticket.state is TicketState.ABORTED:
            return False
        entry = self._entry_of(ticket)
        if entry.open_saves[0] is not ticket:
            raise ValueError(
                f"saves of {ticket.key!r} complete in order: next must be the one from token "
                f"{entry.open_saves[0].start_token}, got the one from {ticket.start_token}"
            )
        if ticket.num_missing:
            raise ValueError(
                f"save of {ticket.key!r} must be of {ticket.num_tokens} tokens in {self._layout.num_layers} layers, "
                f"got {ticket.num_missing} (layer, token) pairs not written"
            )
        ticket.close(TicketState.DONE)
        del entry.open_saves[0]
        entry.token_ids = np.concatenate([entry.token_ids, ticket.token_ids])
        entry.places = entry.places.append(ticket.num_tokens)
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
        if ticket.state is TicketState.ABORTED:
            return
        entry = self._entry_of(ticket)
        position = entry.open_saves.index(ticket)
        for each in entry.open_saves[position:]:
            each.close(TicketState.ABORTED)
            self._counters.num_aborted_saves += 1
        del entry.open_saves[position:]
        self._placement.free_unused(entry)

    def abort_saves(self, key: str) -> None:
        """Gives up all open saves of a session. Waits for writes under way."""
        entry = self._index.get(key)
        if entry is not None and entry.open_saves:
            self.abort_save(entry.open_saves[0])

    # Loads.

    def prepare_load(
        self,
        key: str,
        token_ids: npt.ArrayLike,
        *,
        truncate: bool = False,
        num_dropped: int = 0,
        with_coming: bool = False,
    ) -> LoadTicket | None:
        """Holds the longest published prefix of `token_ids` for reading, until it is completed or aborted.

        A caller that gets fewer tokens than are stored wants other tokens from there on, and truncates before it saves.

        Of a session from which other tokens were dropped than from the caller's, only those are served whose KV has
        seen none of them: what is left of it may spell another text than its KV is of. What is served then, and kept
        alone by `truncate`, is the caller's from there on.

        Args:
          key: session id.
          token_ids: `[T]`, T > 0, the tokens whose KV is wanted.
          truncate: forget what is stored behind that prefix, so that a save may begin there while the load is open;
            after a miss nothing comes from SSD in between either.
          num_dropped: tokens that the caller's session has dropped, as `EntryInfo.num_dropped` counts them.
          with_coming: whether saves are served too whose layers may be read as they are written, all of each: see
            `LoadTicket.coming`.

        Returns:
          A ticket to read by; None where nothing can be served (a miss, counted with its reason).

        Raises:
          ValueError: `token_ids` is empty or not a list of int32.
        """
        token_ids = as_token_ids(token_ids)
        self._placement.wanted(key)
        entry = self._index.get(key)
        if entry is None:
            self._counters.misses[MissReason.ABSENT] += 1
            return None
        self._placement.used(entry)
        num_tokens = num_common(entry.token_ids, token_ids)
        if entry.lineage.num_dropped != num_dropped:
            num_tokens = entry.lineage.plain_tokens(num_tokens)
        coming: list[SaveTicket] = []
        if with_coming and num_tokens == entry.num_tokens and entry.lineage.num_dropped == num_dropped:
            coming = _coming(entry, token_ids)
        if not num_tokens and not coming:
            self._counters.misses[_miss_of(entry)] += 1
            entry.miss = None
            if truncate:  # What comes would come between this and the save from the first token.
                self._placement.give_up_fetch(entry)
            self._index.place(entry)
            return None
        if truncate and not entry.in_use:
            if num_tokens < entry.num_tokens:
                self._truncation.shorten(entry, num_tokens)
            if entry.lineage.num_dropped != num_dropped:  # All that is left has seen no dropped token.
                entry.lineage = Lineage(num_dropped)
                self._placement.changed(entry)
        places = entry.places.take(num_tokens)
        for save in coming:
            places = places.append(save.num_tokens)
        ticket = LoadTicket(self._dram, key, places, np.array(entry.block_ids), from_ssd=entry.fetched, coming=coming)
        ticket.fetch_span_s = entry.fetch_span_s if entry.fetched else None
        entry.fetched = False
        entry.num_open_loads += 1
        self._open_loads[ticket] = entry
        self._index.place(entry)
        return ticket

    def serves_coming(self, key: str, token_ids: npt.ArrayLike, *, num_dropped: int = 0) -> bool:
        """Whether `prepare_load(with_coming=True)` would serve all that is stored of a session and all that comes."""
        entry, token_ids = self._index.get(key), as_token_ids(token_ids)
        if entry is None or entry.lineage.num_dropped != num_dropped:
            return False
        is_same = num_common(entry.token_ids, token_ids) == entry.num_tokens
        return is_same and len(_coming(entry, token_ids)) == len(entry.open_saves) > 0

    def complete_load(self, ticket: LoadTicket, *, was_read: bool = True) -> None:
        """Ends a load, a hit. Waits for copies under way. What came while it was read is published.

        Args:
          was_read: whether its bytes were: whoever has them already uses what is stored all the same.

        Raises:
          ValueError: the ticket is closed, or not of this store, or some of it has not come.
        """
        for save in ticket.coming:
            if save.state is TicketState.OPEN:
                self.complete_save(save)
        self._end_load(ticket, TicketState.DONE)
        self._counters.num_hits += 1
        self._counters.num_hits_from_ssd += ticket.from_ssd
        if was_read:
            self._counters.loaded_bytes += ticket.num_tokens * self._layout.token_bytes - ticket.skipped_bytes

    def abort_load(self, ticket: LoadTicket, reason: MissReason = MissReason.ABORTED) -> None:
        """Gives a load up, a miss. Waits for copies under way.

        Raises:
          ValueError: the ticket is closed, or not of this store.
        """
        self._end_load(ticket, TicketState.ABORTED)
        self._counters.misses[reason] += 1

    def hold(self, key: str, token_ids: np.ndarray, *, num_dropped: int = 0) -> LoadTicket | None:
        """Holds what DRAM has of the first of these tokens for reading, as `prepare_load` does; it counts as no use.

        What lasts longer than a load ends with `let_go`. None: nothing of them is in DRAM.

        Args:
          token_ids: int32 `[T]`.
        """
        entry = self._index.get(key)
        if entry is None:
            return None
        num_tokens = num_common(entry.token_ids, token_ids)
        if entry.lineage.num_dropped != num_dropped:
            num_tokens = entry.lineage.plain_tokens(num_tokens)
        if not num_tokens:
            return None
        ticket = LoadTicket(self._dram, key, entry.places.take(num_tokens), np.array(entry.block_ids))
        ticket.num_plain = entry.lineage.plain_tokens(num_tokens)
        entry.num_open_loads += 1
        self._open_loads[ticket] = entry
        self._index.place(entry)
        return ticket

    def let_go(self, ticket: LoadTicket) -> None:
        """Ends what `hold` began. Raises ValueError where it is ended, or not of this store."""
        self._end_load(ticket, TicketState.DONE, is_use=False)

    def copy_prefix(
        self, source: str, key: str, token_ids: npt.ArrayLike, owner: Owner | None = None, *, num_dropped: int = 0
    ) -> int:
        """Has a new session begin with what a session in DRAM has of the beginning of `token_ids`.

        Full blocks are shared: both hold them from here on, each may forget them, and neither writes to them. The
        tokens in the last one, where it is not full, are copied; where there is no room for that they are left out.
        Both sessions go on as if all had been copied. The source may be in use: what it has published counts.

        Only KV that has seen no dropped token is given away. It goes to SSD once something is saved behind it, or kept
        with it: until then it has nothing that the source has not, and SSD would have KV of no conversation.

        Args:
          source: session id of the one that has it.
          key: session id of the new one, of which nothing is stored.
          token_ids: `[T]`, T > 0, the tokens whose KV is wanted.
          owner: whose the new session is: of the source's domain, since prefixes never cross domains.
          num_dropped: tokens that the new session has dropped, as `EntryInfo.num_dropped` counts them.

        Returns:
          How many tokens it has now; 0 where none agree, or where they are less than a block and no room can be made.

        Raises:
          ValueError: something is stored under `key`, the source is another domain's, or `token_ids` is empty or not a
            list of int32.
        """
        token_ids = as_token_ids(token_ids)
        entry = self._index.get(key)
        if entry is not None and entry.residency is not Residency.ABSENT:
            raise ValueError(f"the new session must have nothing stored, got {key!r}, which has")
        from_entry = self._index.get(source)
        if from_entry is None:
            return 0
        entry = entry or self._new_entry(key, owner)
        if entry.owner.domain != from_entry.owner.domain:
            raise ValueError(f"the source must be of domain {entry.owner.domain!r}, got another's")
        wanted = from_entry.lineage.plain_tokens(num_common(from_entry.token_ids, token_ids))
        num_tokens = self._share_blocks(entry, from_entry, 0, wanted)
        if not num_tokens:
            return 0
        entry.token_ids = from_entry.token_ids[:num_tokens].copy()
        entry.places, entry.lineage = from_entry.places.take(num_tokens), Lineage(num_dropped)
        entry.fetched, from_entry.fetched = from_entry.fetched, False
        entry.fetch_span_s = from_entry.fetch_span_s
        if entry.miss is not None:  # What SSD had of it was lost.
            self._counters.misses[entry.miss] += 1
            entry.miss = None
        if from_entry.share_group is None:
            from_entry.share_group = {source: None}
        from_entry.share_group[key] = None
        entry.share_group = from_entry.share_group
        self._placement.used(from_entry)
        self._keep(entry)
        return num_tokens

    def hold_part(self, source: str, token_ids: npt.ArrayLike, first_token: int) -> LoadTicket | None:
        """Holds tokens in the middle of a session in DRAM for reading, until that is completed or aborted.

        Blocks are shared as by `copy_prefix`: the session goes on, is cut or dropped as if nobody read. KV that has
        seen dropped tokens is served too.

        Args:
          source: session id.
          token_ids: `[T]`, T > 0, the tokens whose KV is wanted.
          first_token: place of the first of them in the session.

        Returns:
          A ticket to read them all; None where they are not there, or for want of room (a counted miss).

        Raises:
          ValueError: `token_ids` is empty or not a list of int32.
        """
        self._placement.wanted(source)
        token_ids = as_token_ids(token_ids)
        entry, stop = self._index.get(source), first_token + len(token_ids)
        is_there = entry is not None and np.array_equal(entry.token_ids[first_token:stop], token_ids)
        if entry is None or not (is_there and entry.places.is_dense):
            self._counters.misses[MissReason.ABSENT if entry is None else _miss_of(entry)] += 1
            return None
        self._placement.used(entry)
        part, first_block = self._new_entry("", entry.owner), first_token // self._layout.block_tokens
        if self._share_blocks(part, entry, first_block, stop) < stop:
            self._blocks.free(part.owner.tenant, part.block_ids)
            self._counters.misses[MissReason.NO_ROOM] += 1
            return None
        places = TokenPlaces.of(np.arange(first_token, stop) - first_block * self._layout.block_tokens)
        ticket = LoadTicket(self._dram, source, places, np.array(part.block_ids), from_ssd=entry.fetched)
        ticket.fetch_span_s = entry.fetch_span_s if entry.fetched else None
        entry.fetched = False
        self._open_loads[ticket] = part
        return ticket

    def abort_all(self) -> None:
        """Gives up every open save and load, and waits for their copies."""
        for entry in tuple(self._index):
            self.abort_saves(entry.key)
        for ticket in tuple(self._open_loads):
            self.abort_load(ticket)

    # Entries and blocks.

    def _share_blocks(self, entry: Entry, source: Entry, first_block: int, stop: int) -> int:
        """Has an entry without blocks share those of another whose tokens are dense, up to a token of it.

        Tokens in a last block that is not full are copied to one of its own; without room for that they are left out.
        Returns up to which token it has them.
        """
        last, num_rows = divmod(stop, self._layout.block_tokens)
        entry.block_ids = source.block_ids[first_block:last]
        self._blocks.share(entry.block_ids)
        with self._index.kept(source):
            if num_rows and self._placement.make_room(entry, 1) is not None:
                return stop - num_rows
        if num_rows:
            (own,) = self._blocks.alloc(entry.owner.tenant, 1)
            self._copy_rows(source.block_ids[last], own, num_rows)
            entry.block_ids.append(own)
        return stop

    def _would_write_to_others(self, entry: Entry) -> bool:
        """Whether the next token goes to a block that others hold too: sessions, of one that was cut, or a flush."""
        has_part = entry.num_reserved_places % self._layout.block_tokens
        return bool(has_part) and self._blocks.is_shared(entry.block_ids[-1])

    def _own_last_block(self, entry: Entry) -> None:
        """Has a session copy its last block: no block that others hold is ever written to. There is room."""
        shared = entry.block_ids.pop()
        (own,) = self._blocks.alloc(entry.owner.tenant, 1)
        self._copy_rows(shared, own, entry.num_reserved_places % self._layout.block_tokens)
        entry.block_ids.append(own)
        if entry.num_open_loads:
            entry.replaced_blocks.append(shared)
        else:
            self._blocks.free(entry.owner.tenant, [shared])

    def _copy_rows(self, source: int, block: int, num_rows: int) -> None:
        """Copies the first rows of a block of DRAM to another. Those behind may be written meanwhile."""
        for blocks in self._dram.groups:
            np.copyto(blocks[block, :, :, :num_rows], blocks[source, :, :, :num_rows])

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
            num_pins=self._index.num_pins(key),
        )

    def _keep(self, entry: Entry) -> None:
        """Enters an entry that has blocks now, if it is new, as the last used."""
        if self._index.get(entry.key) is None:
            self._index.add(entry)
        self._index.place(entry)
        self._placement.used(entry)

    def _end_load(self, ticket: LoadTicket, state: TicketState, *, is_use: bool = True) -> None:
        entry = self._open_loads.pop(ticket, None)
        if entry is None:
            raise ValueError(
                f"the load must be an open one of this store, got one of {ticket.key!r} that is {ticket.state.value}"
            )
        ticket.close(state)
        if not entry.num_open_loads:  # Of `hold_part`: it has its blocks for this load alone, and nobody finds it.
            self._blocks.free(entry.owner.tenant, entry.block_ids)
            return
        entry.num_open_loads -= 1
        if not entry.num_open_loads and entry.replaced_blocks:
            replaced, entry.replaced_blocks = entry.replaced_blocks, []
            self._blocks.free(entry.owner.tenant, replaced)
        self._index.place(entry)
        if is_use:
            self._placement.used(entry)

    def _entry_of(self, ticket: SaveTicket) -> Entry:
        entry = self._index.get(ticket.key)
        if entry is None or ticket not in entry.open_saves:
            raise ValueError(
                f"the save must be an open one of this store, got one of {ticket.key!r} that is {ticket.state.value}"
            )
        return entry


def _coming(entry: Entry, token_ids: np.ndarray) -> list[SaveTicket]:
    """The first saves under way of a session that may be read as they are written, and are of these tokens."""
    found: list[SaveTicket] = []
    for save in entry.open_saves:
        wanted = token_ids[save.start_token : save.stop_token]
        if not save.may_be_read or save.is_broken or not np.array_equal(wanted, save.token_ids):
            break
        found.append(save)
    return found


def _miss_of(entry: Entry) -> MissReason:
    """Why a load of a session serves nothing."""
    if entry.num_tokens:
        return MissReason.MISMATCH
    if entry.miss is not None:
        return entry.miss
    return MissReason.ABSENT if entry.residency is Residency.ABSENT else MissReason.PENDING
