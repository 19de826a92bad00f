"""One entry per session, in the orders that policies ask for.

Not here: bytes, blocks' memory, decisions, or what moves (store, ssd).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from sortedcontainers import SortedList

from ca_jax.storage.catalog.records import SessionRecord
from ca_jax.storage.placement.blocks import ChargedBlocks
from ca_jax.storage.placement.orders import LookAhead, TierOrders
from ca_jax.storage.placement.policy import EvictionPolicy, StoredEntry
from ca_jax.storage.placement.returns import ReturnTimes, SaidReturns
from ca_jax.storage.records import MissReason, Owner, Residency, StoreRuntime, StoreStats
from ca_jax.storage.tickets import SaveTicket
from ca_jax.storage.tiers.dram import DramTier
from ca_jax.storage.tiers.tasks import FetchTask, FlushTask
from ca_jax.storage.tokens import (
    HASH_BYTES,
    PLAIN,
    TOKEN_BYTES,
    Lineage,
    PlainPrefix,
    PrefixIndex,
    Published,
    SsdCopy,
    TokenPlaces,
    as_token_ids,
    as_units,
    prefix_hashes,
)

_NO_TOKENS, _NOWHERE = np.zeros(0, np.int32), TokenPlaces()


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Entry:
    """What is known of one session."""

    key: str
    owner: Owner
    created_s: float
    last_used_s: float
    ttl_s: float | None = None
    expires_s: float | None = None
    """When that is over; None: never."""
    pinned: bool = False
    """By its owner, durably."""
    num_pins: int = 0
    """By its users now."""

    token_ids: np.ndarray = dataclasses.field(default_factory=lambda: _NO_TOKENS)
    """Of the tokens published in DRAM, int32."""
    places: TokenPlaces = _NOWHERE
    """Where these lie in the blocks."""
    lineage: Lineage = PLAIN
    """What was dropped from what is in DRAM."""
    block_ids: list[int] = dataclasses.field(default_factory=list)
    """The block table in DRAM: blocks in token order, those of unfinished saves included."""
    open_saves: list[SaveTicket] = dataclasses.field(default_factory=list)
    """In token order; each begins where the one before ends."""
    num_open_loads: int = 0
    replaced_blocks: list[int] = dataclasses.field(default_factory=list)
    """Blocks of DRAM that it shared and has copies of now: its open loads read them yet."""
    share_group: dict[str, None] | None = None
    """Keys of the sessions in DRAM that may share blocks with it, its own among them: the same dict for all of them.
    None where there never was another."""
    fetched: bool = False
    """Whether its KV in DRAM was fetched from SSD and not loaded since."""
    fetch_span_s: tuple[float, float] | None = None
    """When that fetch began and ended, on the timeline's clock; None where nobody measured."""

    ssd: SsdCopy | None = None
    num_same_tokens: int = 0
    """Leading tokens in DRAM that are those on SSD."""
    fetch: FetchTask | None = None
    """On its way to DRAM."""
    flush: FlushTask | None = None
    """On its way to SSD."""
    waits_for_flush: bool = False
    """DRAM has what SSD has not: it must not leave DRAM before it is flushed."""
    note: bytes | None = None
    """What its owner wants kept with it and is not on SSD yet, durably."""
    noted: int = -1
    """Generation of what is kept with it on SSD, durably; -1 where that is not known: of an earlier process, say."""
    pause_s: float = 0.0
    """How long after the last failure it is written again."""
    requested: bool = False
    """A job of it would run if its KV were here: what is fetched stays until it does."""
    miss: MissReason | None = None
    """Why the last fetch failed: what the next load's miss is counted under."""

    @classmethod
    def of(cls, record: SessionRecord) -> Entry:
        """Of a session that an earlier process published."""
        return cls(
            key=record.key,
            owner=Owner(tenant=record.tenant, session_id=record.session_id, ttl_s=record.ttl_s, variant=record.variant),
            ssd=record,
            created_s=record.created_s,
            last_used_s=record.last_used_s,
            ttl_s=record.ttl_s,
            pinned=record.pinned,
        )

    @property
    def num_tokens(self) -> int:
        """Published tokens in DRAM."""
        return len(self.token_ids)

    @property
    def num_reserved_tokens(self) -> int:
        """Published tokens in DRAM and those of unfinished saves."""
        return self.open_saves[-1].stop_token if self.open_saves else self.num_tokens

    @property
    def num_reserved_places(self) -> int:
        """Rows up to the last of these tokens."""
        return self.open_saves[-1].stop_place if self.open_saves else self.places.num_places

    @property
    def num_same_rows(self) -> int:
        """Leading rows of the block table in DRAM that are rows of that on SSD, byte for byte."""
        return 0 if self.ssd is None else self.places.num_same_rows(self.ssd.places, self.num_same_tokens)

    @property
    def num_readable(self) -> int:
        """Tokens that can be read now, or that a fetch would bring."""
        return self.num_tokens or (0 if self.ssd is None else self.ssd.num_tokens)

    @property
    def known_lineage(self) -> Lineage:
        """What was dropped from what can be read now, or after a fetch."""
        return self.lineage if self.ssd is None or self.num_reserved_tokens else self.ssd.lineage

    @property
    def is_far(self) -> bool:
        """Whether it is on SSD only, and does not move."""
        return self.ssd is not None and not (self.block_ids or self.fetch or self.flush)

    @property
    def in_use(self) -> bool:
        """Whether a load or a save is open."""
        return bool(self.open_saves or self.num_open_loads)

    @property
    def residency(self) -> Residency:
        """Where what can be read is."""
        if self.num_tokens:
            return Residency.DRAM
        if self.fetch is not None or self.open_saves:
            return Residency.PENDING
        if self.ssd is not None:
            return Residency.SSD
        return Residency.ABSENT if self.flush is None else Residency.PENDING


class SessionIndex:
    """Entries by key, and of each tier in the orders that policies ask for, so that no choice has to sort.

    Args:
      look_ahead: the job queue.
      max_fetched_blocks: no larger session can be fetched.
      block_tokens: tokens in a block: no shorter prefix is worth finding.
      clock: seconds.
      returns: learns when they do, and is asked; None where the policy does not ask.
    """

    def __init__(
        self,
        look_ahead: LookAhead,
        max_fetched_blocks: int,
        block_tokens: int,
        clock: Callable[[], float],
        returns: ReturnTimes | None = None,
    ) -> None:
        self._look_ahead = look_ahead
        self._max_fetched_blocks = max_fetched_blocks
        self._entries: dict[str, Entry] = {}
        self._returns, self.said = returns, SaidReturns(clock)
        asked = None if returns is None else returns.group, self.said
        self.in_dram: TierOrders[Entry] = TierOrders(look_ahead, self._describe, *asked)
        """Sessions that hold blocks of DRAM."""
        self.on_ssd: TierOrders[Entry] = TierOrders(look_ahead, self._describe_on_ssd, *asked)
        """Sessions that are on SSD."""
        self.to_fetch: TierOrders[Entry] = TierOrders(look_ahead, self._describe_on_ssd)
        """Those on SSD only that can be fetched and have a job waiting."""
        self._tiers = self.in_dram, self.on_ssd, self.to_fetch
        self._by_name: dict[str, tuple[str, ...]] = {}
        self._pins: collections.Counter[str] = collections.Counter()  # Of keys, whether they have an entry or not.
        self._by_expiry: SortedList[tuple[float, str]] = SortedList()  # Entries that do not live for ever.
        self._notes: dict[str, bytes] = {}  # Of pinned keys that have no entry yet.
        self._block_tokens = block_tokens
        self._prefixes = PrefixIndex(self._published, TOKEN_BYTES, block_tokens)
        self._far_prefixes = PrefixIndex(self._published_on_ssd, HASH_BYTES)
        self.watched: dict[str, None] | None = None
        """Keys whose entries changed since they were last taken from here; None: nobody watches."""
        look_ahead.watch(self._requeue)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """In the order in which they were added."""
        return iter(self._entries.values())

    def __reversed__(self) -> Iterator[Entry]:
        """The other way round."""
        return reversed(self._entries.values())

    def get(self, key: str) -> Entry | None:
        """The entry of that key, if there is one."""
        return self._entries.get(key)

    def of_name(self, session_id: str) -> tuple[Entry, ...]:
        """The entries of that session id, of whatever tenant."""
        return tuple(self._entries[key] for key in sorted(self._by_name.get(session_id, ())))

    def find_prefix(self, domain: str, token_ids: npt.ArrayLike, *, in_dram: bool = False) -> str | None:
        """The domain's session that begins with the same tokens for longest, at least a block of them. Not a use.

        In DRAM each token counts, on SSD each full block: what one there has of the next block is less than a fetch is
        worth. Of equals the one in DRAM. Less than a block is not found: nothing of it could be shared, and computing
        it anew costs no more than what else a first token takes. Of a session from which tokens were dropped only those
        before the first of them count.

        Costs what the prompt is long, however many sessions begin like it. Reads no file.

        Args:
          domain: whose sessions, see `Owner.domain`; others' are never found.
          token_ids: `[T]`, T > 0.
          in_dram: look there alone.

        Returns:
          Its key; None where there is none.
        """
        wanted = as_token_ids(token_ids)
        num_tokens, near = self._prefixes.find(domain, as_units(wanted))
        if not in_dram and len(self.on_ssd):
            num_blocks, far = self._far_prefixes.find(domain, prefix_hashes(wanted, self._block_tokens))
            if num_blocks * self._block_tokens > num_tokens:
                return far
        return near or None

    def plain_prefix(self, key: str) -> PlainPrefix | None:
        """What of a session's tokens any session of its domain may use; None of one that is not stored. Not a use.

        None too of what is stored under negative ids, which are no tokens.
        """
        entry = self._entries.get(key)
        if entry is None or (entry.token_ids[:1] < 0).any():
            return None
        num_plain = entry.lineage.plain_tokens(entry.num_tokens)
        on_ssd = b"" if entry.ssd is None else entry.ssd.prefixes
        return PlainPrefix(entry.owner.domain, entry.token_ids[:num_plain], on_ssd)

    def adopt(self, entries: Sequence[Entry]) -> None:
        """Adds the sessions on SSD that an earlier process left, the least recently used first, before any other.

        Gives what adding and then using each would give, faster: a directory may have 100,000.
        """
        created = sorted(entries, key=lambda entry: entry.created_s)
        for entry in created:
            self._register(entry)
        self.on_ssd.adopt(
            [(entry.key, entry, entry.owner.tenant) for entry in created], [entry.key for entry in entries]
        )
        with self._far_prefixes.loading():
            for entry in entries:
                self._far_prefixes.changed(entry.key)
                if entry.ttl_s is not None:
                    self._expire_at(entry, entry.last_used_s + entry.ttl_s)
                if entry.pinned:
                    self.place(entry)

    def add(self, entry: Entry) -> None:
        """Adds a new entry, as the last created and the last used, with the note that waits for it."""
        self._register(entry)
        entry.note = self._notes.pop(entry.key, entry.note)
        self.place(entry)

    def remove(self, entry: Entry) -> None:
        """Takes an entry out of everything."""
        del self._entries[entry.key]
        self._share_changed(entry.key)
        self._expire_at(entry, None)
        if not self._pins[entry.key]:
            self.said.forget(entry.key)
        others = tuple(key for key in self._by_name.pop(entry.owner.session_id) if key != entry.key)
        if others:
            self._by_name[entry.owner.session_id] = others
        for orders in self._tiers:
            self._put(orders, entry, False)

    def num_pins(self, key: str) -> int:
        """How many pins a key has from its current users."""
        return self._pins.get(key, 0)

    def add_pins(self, key: str, num_pins: int) -> None:
        """Pins a key so many times more, or less; it need not have an entry."""
        self._pins[key] += num_pins
        if not self._pins[key]:
            del self._pins[key]
            self._notes.pop(key, None)
            if self._returns is not None:
                self._returns.left(key)  # A turn pins its session as long as it runs.
            (self.said.left if key in self._entries else self.said.forget)(key)
        entry = self._entries.get(key)
        if entry is not None:
            entry.num_pins += num_pins
            self.place(entry)

    def expect_back(self, key: str, seconds: float | None) -> None:
        """A session will be back so long after its turn, or from now where it has none; None: nobody knows.

        Of one without a turn of which nothing is stored nothing is kept.
        """
        is_busy = self._look_ahead.next_ticket(key) is not None or bool(self._pins[key])
        self.said.say(key, seconds if is_busy or key in self._entries else None, is_busy=is_busy)
        for orders in self._tiers:
            if key in orders:
                orders.said_anew(key)

    def expect(self, key: str, note: bytes | None) -> None:
        """Keeps a note for an entry that is not there yet, while its key is pinned; None: keeps none."""
        if note is not None and self._pins[key]:
            self._notes[key] = note
        else:
            self._notes.pop(key, None)

    def clear_pins(self) -> None:
        """Takes all such pins back."""
        for key, num_pins in tuple(self._pins.items()):
            self.add_pins(key, -num_pins)

    def use(self, entry: Entry, now_s: float) -> None:
        """Marks an entry as the last used, from when on its time to live counts."""
        entry.last_used_s = now_s
        self.expire_after(entry, now_s)
        for orders in self._tiers:
            if entry.key in orders:
                orders.use(entry.key)

    def expire_after(self, entry: Entry, used_s: float) -> None:
        """Counts an entry's time to live from then on; not of one that is gone."""
        if self._entries.get(entry.key) is entry:
            self._expire_at(entry, None if entry.ttl_s is None else used_s + entry.ttl_s)

    def pop_expired(self, now_s: float) -> Iterator[Entry]:
        """The entries whose time is over, each once: of one that stays it is to be counted anew."""
        while self._by_expiry and self._by_expiry[0][0] <= now_s:
            entry = self._entries[self._by_expiry[0][1]]
            self._expire_at(entry, None)
            yield entry

    def place(self, entry: Entry) -> None:
        """Brings an entry into the orders of the tiers it is in now, held where it must stay. After every change.

        An entry that is nowhere any more, and is not in use, goes altogether.
        """
        if self._entries.get(entry.key) is not entry:  # Gone, and there may be another one of its name.
            return
        self._share_changed(entry.key)
        if not entry.requested and self._look_ahead.next_ticket(entry.key) is None:
            entry.miss = None  # No job is left to be told.
        in_dram = bool(entry.block_ids)
        if not (in_dram or entry.open_saves or entry.ssd or entry.fetch or entry.flush or entry.miss):
            self.remove(entry)
            return
        self._put(self.in_dram, entry, in_dram, self.must_stay(entry))
        held = entry.pinned or bool(entry.num_pins) or entry.in_use or bool(entry.fetch or entry.flush)
        self._put(self.on_ssd, entry, entry.ssd is not None, held)
        fetchable = (
            self._look_ahead.next_ticket(entry.key) is not None
            and entry.miss is None
            and entry.ssd is not None
            and entry.is_far
            and len(entry.ssd.block_ids) <= self._max_fetched_blocks
        )
        self._put(self.to_fetch, entry, fetchable)

    def must_stay(self, entry: Entry) -> bool:
        """Whether a session must not leave DRAM."""
        return bool(
            (entry.pinned and entry.ssd is None)
            or entry.num_pins
            or entry.in_use
            or entry.requested
            or entry.flush is not None
            or entry.waits_for_flush
        )

    @contextlib.contextmanager
    def kept(self, entry: Entry) -> Iterator[None]:
        """Keeps an entry from being named as a victim for the length of a `with` block."""
        entry.num_pins += 1
        self.place(entry)
        try:
            yield
        finally:
            entry.num_pins -= 1
            self.place(entry)

    def _register(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        name = entry.owner.session_id
        self._by_name[name] = (*self._by_name.get(name, ()), entry.key)

    def _requeue(self, key: str, before: int | None, after: int | None) -> None:
        """A session's next job is another one now: only what a job waits for is fetched."""
        if before is None:
            self.said.forget(key)
            if self._returns is not None:
                self._returns.came(key)
        entry = self._entries.get(key)
        if entry is not None and (before is None) != (after is None):
            self.place(entry)

    def _expire_at(self, entry: Entry, expires_s: float | None) -> None:
        """Says when an entry expires; None: never."""
        if entry.expires_s is not None:
            self._by_expiry.remove((entry.expires_s, entry.key))
        entry.expires_s = expires_s
        if expires_s is not None:
            self._by_expiry.add((expires_s, entry.key))

    def _share_changed(self, key: str) -> None:
        self._prefixes.changed(key)
        self._far_prefixes.changed(key)
        if self.watched is not None:
            self.watched[key] = None

    def _published(self, key: str) -> Published | None:
        entry = self._entries.get(key)
        if entry is None or not entry.num_tokens:
            return None
        num_plain = entry.lineage.plain_tokens(entry.num_tokens)
        return entry.owner.domain, entry.token_ids, num_plain

    def _published_on_ssd(self, key: str) -> Published | None:
        entry = self._entries.get(key)
        if entry is None or entry.ssd is None or entry.num_reserved_tokens:  # Otherwise it would be fetched.
            return None
        prefixes = entry.ssd.prefixes
        return entry.owner.domain, prefixes, len(prefixes) // HASH_BYTES

    def _put(self, orders: TierOrders[Entry], entry: Entry, belongs: bool, held: bool = False) -> None:
        if belongs != (entry.key in orders):
            if belongs:
                orders.add(entry.key, entry, entry.owner.tenant)
            else:
                orders.remove(entry.key)
        if belongs:
            orders.set_held(entry.key, held)

    def _describe(self, entry: Entry, queue_position: int | None, num_blocks: int | None = None) -> StoredEntry:
        rate = away_s = 0.0
        if queue_position is None:
            away_s = self.said.away_s(entry.key, entry.last_used_s)
            if self._returns is not None:
                group = self._returns.group(entry.key)
                rate = self.said.rate(entry.key) or self._returns.rate(group, entry.last_used_s)
        return StoredEntry(
            key=entry.key,
            tenant=entry.owner.tenant,
            num_blocks=len(entry.block_ids) if num_blocks is None else num_blocks,
            last_used_s=entry.last_used_s,
            created_s=entry.created_s,
            queue_position=queue_position,
            return_rate=rate,
            away_s=away_s,
        )

    def _describe_on_ssd(self, entry: Entry, queue_position: int | None) -> StoredEntry:
        return self._describe(entry, queue_position, 0 if entry.ssd is None else entry.ssd.num_blocks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreParts:
    """What the parts of one store share. All of it belongs to the bookkeeping thread."""

    index: SessionIndex
    look_ahead: LookAhead
    dram: DramTier
    blocks: ChargedBlocks
    """Which of DRAM are free, and who holds which."""
    policy: EvictionPolicy
    """Who is evicted, from either tier."""
    counters: StoreStats
    """Where outcomes are counted; sizes are 0 in it."""
    runtime: StoreRuntime
    """A clock, and what is told of progress."""
