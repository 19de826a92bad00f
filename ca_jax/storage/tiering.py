"""What moves between the tiers and out of them, and when: the job queue turned into fetches, flushes and evictions.

    a turn ends          -> flush it to SSD, in the background
    DRAM nearly full     -> evict from DRAM who is needed last; on SSD it stays
    a job is queued      -> fetch its session before it runs, if it is on SSD only
    a session's TTL ends -> forget it

Nothing here waits. Belongs to the bookkeeping thread.

Not here: the choices (policy), the SSD's blocks and moves (ssd), saves and loads (transfers).

Source: CachedAttention (Gao et al., USENIX ATC 2024), section 3.3.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from ca_jax.storage.placement.policy import FifoPolicy, LruPolicy, Room, look_ahead_window
from ca_jax.storage.records import LookAheadWindows, MissReason, Residency, SkipReason
from ca_jax.storage.sessions import Entry, StoreParts
from ca_jax.storage.ssd import SsdIndex
from ca_jax.storage.tokens import PLAIN, TokenPlaces

_MAX_FETCHES = 8  # Sessions on their way to DRAM at once.
_FIRST_PAUSE_S = 2.0  # Before what could not be written to SSD is tried again; each time twice as long,
_LONGEST_PAUSE_S = 120.0  # up to this.


class Placement:
    """Decides and begins moves. See the module.

    Args:
      free_fraction: share of DRAM kept free in the background, if there is an SSD.
    """

    def __init__(self, parts: StoreParts, ssd: SsdIndex | None, *, free_fraction: float) -> None:
        self._layout = parts.dram.layout
        self._look_ahead = parts.look_ahead
        self._index = parts.index
        self._blocks = parts.blocks
        self._ssd = ssd
        self._looks_at_queue = not isinstance(parts.policy, LruPolicy | FifoPolicy)
        self._clock = parts.runtime.clock
        self.room = Room(parts.policy, parts.blocks, parts.index.in_dram.view, self._evictable_blocks, self._clock)
        """Who is evicted from DRAM."""
        self._counters = parts.counters
        self._reserve_blocks = int(free_fraction * parts.blocks.num_blocks) if ssd is not None else 0
        self._dirty: dict[str, float] = {}  # What is to be written to SSD, oldest first; from when on, by the clock.

    # What happens.

    def used(self, entry: Entry) -> None:
        """A session was used now."""
        self._index.use(entry, self._clock())

    def wanted(self, key: str) -> None:
        """A session's KV is wanted. If a tier evicted it, and no tier has it at hand, this is how soon it is missed."""
        entry = self._index.get(key)
        in_dram = entry is not None and bool(entry.block_ids)
        on_ssd = entry is not None and entry.ssd is not None
        self.room.wanted(key, in_dram)
        if self._ssd is not None and (on_ssd or not in_dram):
            self._ssd.room.wanted(key, on_ssd)

    def give_up(self, key: str) -> None:
        """A session is forgotten by its owner, stored or not: what was evicted of it will not be wanted."""
        self.room.gaps.forget(key)
        if self._ssd is not None:
            self._ssd.room.gaps.forget(key)

    def changed(self, entry: Entry) -> None:
        """A session has what SSD has not, in DRAM or kept with it."""
        if self._ssd is not None:
            entry.waits_for_flush = bool(entry.block_ids) and not self._ssd.is_late
            self._dirty[entry.key] = 0.0
        self._index.place(entry)

    def set_note(self, key: str, note: bytes | None) -> None:
        """Has `note` kept with a session, on SSD, from its next flush on, or without one if it is in no other place.

        For a pinned key of which nothing is stored it waits until something is: a turn may have ended before the store
        had room for any of its KV. None keeps what is kept.
        """
        entry = self._index.get(key)
        if self._ssd is None or note is None:
            return
        if entry is None:
            self._index.expect(key, note)
            return
        entry.note = note
        self.changed(entry)

    def saving(self, entry: Entry) -> None:
        """A save of a session was begun."""
        if self._ssd is not None:
            self._dirty[entry.key] = 0.0

    def enqueue(self, job: Hashable, key: str, priority: int = 0) -> None:
        """Says that a job of a session waits, behind all others of its priority: the future that placement looks at.

        Args:
          job: anything that tells it from other jobs.
          key: of the session.
          priority: lower values run first.

        Raises:
          ValueError: the job waits already.
        """
        self.wanted(key)
        self._look_ahead.append(job, key, priority)

    def dequeue(self, job: Hashable) -> None:
        """Says that a job waits no more: its load is open, or it was given up.

        Raises:
          ValueError: it does not wait.
        """
        key = self._look_ahead.remove(job)
        entry = self._index.get(key)
        if entry is not None:
            entry.requested = False  # The job behind it asks again.
            if self._look_ahead.next_ticket(key) is None:
                entry.miss = None
            self._index.place(entry)

    def request(self, key: str) -> bool:
        """Asks for a session's KV now, since a waiting job of it could run. Never blocks.

        Returns:
          Whether it is on its way to DRAM and worth waiting for: `on_progress` tells when to ask again. If not, the
          next load says why, or succeeds.
        """
        self.wanted(key)
        entry = self._index.get(key)
        if entry is None or self._ssd is None:
            return False
        entry.requested = True  # What comes must not go again before the job has run.
        if entry.residency is Residency.SSD and entry.ssd is not None and not (entry.miss or entry.flush):
            if self._ssd.is_late:
                entry.miss = MissReason.DEADLINE
            elif (skipped := self.make_room(entry, entry.ssd.num_blocks)) is None:
                self._ssd.fetch(entry)
            elif skipped is SkipReason.NO_ROOM and self._room_will_come():
                return True
            else:
                entry.miss = MissReason.NO_ROOM
        self._index.place(entry)
        return entry.fetch is not None

    def step(self) -> None:
        """Takes in what has ended and begins what is due."""
        if self._ssd is not None:
            for entry in self._ssd.poll():
                self.changed(entry)
            self._put_off_failed()
            if self._ssd.is_late:
                self._stop_waiting()
            self._flush()
            self._put_off_failed()  # Now: what is saved of them until the next step is no failure.
            self._evict_ahead()
            self._prefetch()
        self._expire()

    def retry(self) -> None:
        """Has what was put off tried again at the next step."""
        self._dirty = dict.fromkeys(self._dirty, 0.0)

    @property
    def moves(self) -> bool:
        """Whether anything moves."""
        return self._ssd is not None and self._ssd.busy

    @property
    def busy(self) -> bool:
        """Whether anything moves, or could be flushed now and was not put off."""
        return self.moves or any(not self._dirty[entry.key] for entry in self._due())

    @property
    def windows(self) -> LookAheadWindows:
        """How far over the job queue it looks now."""
        num_looked_at = len(self._look_ahead) if self._looks_at_queue else 0
        return LookAheadWindows(prefetch_jobs=self._prefetch_window(), eviction_jobs=num_looked_at)

    @property
    def is_late(self) -> bool:
        """Whether SSD missed a deadline: nothing should wait for it."""
        return self._ssd is not None and self._ssd.is_late

    # Room in DRAM.

    def make_room(self, entry: Entry, num_blocks: int, num_replaced: int = 0) -> SkipReason | None:
        """Evicts from DRAM until `entry` can take `num_blocks` more; all the room, or none and the reason.

        Args:
          entry: of the session.
          num_blocks: blocks it is to take.
          num_replaced: how many of them take the place of blocks that it has.
        """
        if not self._blocks.num_blocks:
            return SkipReason.STORE_OFF
        if not self._blocks.admits(entry.owner.tenant, len(entry.block_ids) + num_blocks - num_replaced):
            return SkipReason.TOO_LARGE
        victims = self._victims(entry, num_blocks)
        if victims is None:
            return SkipReason.NO_ROOM
        self._evict(victims)
        return None

    def has_free(self, tenant: str, num_tokens: int) -> bool:
        """Whether a tenant may take twice so many more tokens of DRAM without anybody else having to leave."""
        num_blocks = 2 * self._layout.num_blocks(num_tokens)
        return self._blocks.lacking(num_blocks + self._reserve_blocks) <= 0 and not self._blocks.excess(
            tenant, num_blocks
        )

    def room_is_coming(self, entry: Entry, num_blocks: int, num_replaced: int) -> bool:
        """Whether `entry` cannot take so many more now, and so many in place of own ones, but soon."""
        return (
            self._blocks.admits(entry.owner.tenant, len(entry.block_ids) + num_blocks)
            and self._room_will_come()
            and self._victims(entry, num_blocks + num_replaced) is None
        )

    def give_up_fetch(self, entry: Entry) -> None:
        """Gives up what of a session is on its way to DRAM."""
        if entry.fetch is not None and self._ssd is not None:
            self._ssd.cancel(entry)
            self._index.place(entry)

    def free_unused(self, entry: Entry) -> None:
        """Frees a session's blocks of DRAM behind its last token, published or being saved: all, if there is none."""
        num_blocks = self._layout.num_blocks(entry.num_reserved_places)
        self._blocks.free(entry.owner.tenant, entry.block_ids[num_blocks:])
        del entry.block_ids[num_blocks:]
        if not num_blocks:
            if entry.share_group is not None:
                del entry.share_group[entry.key]
                entry.share_group = None
            entry.lineage = PLAIN
            entry.num_same_tokens = 0
            entry.waits_for_flush = entry.fetched = False
            if entry.ssd is None:
                self._dirty.pop(entry.key, None)
            elif entry.key in self._dirty:  # What is kept with it can be written without its KV.
                self._dirty[entry.key] = 0.0
        self._index.place(entry)

    def leave_dram(self, entry: Entry) -> None:
        """Forgets what of a session is in DRAM."""
        entry.token_ids, entry.places = np.zeros(0, np.int32), TokenPlaces()
        self.free_unused(entry)

    def forget(self, entry: Entry) -> None:
        """Forgets a session in both tiers, and what is on its way; it must not be in use."""
        if self._ssd is not None:
            self._ssd.cancel(entry)
            self._ssd.forget(entry)
        entry.miss = entry.note = None
        self.leave_dram(entry)

    # How.

    def _victims(self, entry: Entry, num_blocks: int) -> tuple[str, ...] | None:
        """Who would have to leave DRAM for `entry` to take so many blocks; None if that cannot be had."""
        tenant = entry.owner.tenant
        if self._blocks.lacking(num_blocks) <= 0 and not self._blocks.excess(tenant, num_blocks):
            return ()
        with self._index.kept(entry):
            return self.room.victims(tenant, num_blocks)

    def _room_will_come(self) -> bool:
        """Whether sessions that do not run are on their way to SSD, or are about to be: they may leave DRAM then."""
        if self.is_late:
            return False
        entries = filter(None, map(self._index.get, self._dirty))
        return self.busy or any(entry.open_saves and not entry.num_pins for entry in entries)

    def _evict(self, keys: Sequence[str]) -> None:
        entries = {key: found for key in keys if (found := self._index.get(key)) is not None}
        self.room.evict(entries, lambda key: self.leave_dram(entries[key]))

    def _evictable_blocks(self, key: str) -> Sequence[int]:
        entry = self._index.get(key)
        return () if entry is None or self._index.must_stay(entry) else entry.block_ids

    def _flush(self) -> None:
        if self._ssd is None or not self._ssd.can_flush:
            return
        for entry in self._due():
            if not entry.num_tokens:
                self._ssd.write_down(entry)
                self._ssd.set_note(entry)
                del self._dirty[entry.key]
            elif self._ssd.flush(entry):
                del self._dirty[entry.key]
            if not self._ssd.can_flush:
                return

    def _due(self) -> Iterator[Entry]:
        """What can be written to SSD now."""
        now_s = self._clock() if any(self._dirty.values()) else 0.0
        for key, from_s in tuple(self._dirty.items()):
            entry = self._index.get(key)
            if entry is None:
                del self._dirty[key]
            elif from_s > now_s or entry.num_pins or not (entry.num_tokens or entry.ssd):
                continue  # Most that are dirty run, and are pinned.
            elif not (entry.open_saves or entry.flush or entry.fetch):  # Nothing of it is about to change, or moves.
                yield entry

    def _put_off_failed(self) -> None:
        """What could not be written is tried again, later each time, and does not stay in DRAM for that."""
        for entry in () if self._ssd is None else self._ssd.take_failed():
            is_put_off = self._dirty.get(entry.key)  # For another part of the same try.
            if not is_put_off and self._index.get(entry.key) is entry:
                entry.pause_s = min(max(_FIRST_PAUSE_S, 2 * entry.pause_s), _LONGEST_PAUSE_S)
                entry.waits_for_flush = False
                self._dirty[entry.key] = self._clock() + entry.pause_s
                self._index.place(entry)

    def _stop_waiting(self) -> None:
        """Lets sessions leave DRAM that SSD does not have: it is late, and DRAM is wanted."""
        for entry in filter(None, map(self._index.get, self._dirty)):
            if entry.waits_for_flush:
                entry.waits_for_flush = False
                self._index.place(entry)

    def _evict_ahead(self) -> None:
        """Keeps a part of DRAM free, one session at a time, so that saves and fetches find room."""
        while self._blocks.num_free < self._reserve_blocks:
            victims = self.room.choose(1)
            if not victims:
                return
            self._evict(victims)

    def _prefetch(self) -> None:
        if self._ssd is None or self._ssd.is_late or not len(self._index.on_ssd):
            return
        num_fetches = _MAX_FETCHES - self._ssd.num_fetching
        if num_fetches > 0 and len(self._look_ahead):
            self._fetch_waiting(self._ssd, num_fetches)
        if self._looks_at_queue:
            self._fetch_expected(self._ssd)

    def _fetch_waiting(self, ssd: SsdIndex, num_fetches: int) -> None:
        """Fetches for the first jobs of the queue."""
        waiting, window_jobs = self._index.to_fetch.view(), self._prefetch_window()
        fetch, evict = self.room.plan_fetches(waiting, window_jobs, num_fetches, self._reserve_blocks)
        self._evict(evict)
        for entry in filter(None, map(self._index.get, fetch)):
            if entry.ssd is not None and self._blocks.lacking(len(entry.ssd.block_ids)) <= 0:
                ssd.fetch(entry)

    def _fetch_expected(self, ssd: SsdIndex) -> None:
        """Fetches who is about to come back, as clients say, in place of those that will be away for longer.

        One at a time, and only while no job waits for the SSD: what is fetched early is no sooner there for that, and
        where the SSD is what limits, others would be later.
        """
        said = self._index.said
        while not ssd.num_fetching and (key := said.take_due()) is not None:
            entry = self._index.get(key)
            if entry is None or entry.ssd is None or not entry.is_far:
                continue
            away_s = said.away_s(key, entry.last_used_s)
            victims = self._victims(entry, entry.ssd.num_blocks)
            if victims is not None and all(self._is_away_for(other, away_s) for other in victims):
                self._evict(victims)
                ssd.fetch(entry)
                self._index.place(entry)

    def _is_away_for(self, key: str, seconds: float) -> bool:
        """Whether a session has no job waiting and will be away for longer than that, as far as anybody knows."""
        entry = self._index.get(key)
        if entry is None or self._look_ahead.next_ticket(key) is not None:
            return False
        return self._index.said.away_s(key, entry.last_used_s) > seconds

    def _prefetch_window(self) -> int:
        """How many jobs from the queue's head on are fetched for."""
        if self._ssd is None or not len(self._index.on_ssd):
            return 0
        block_bytes = self._layout.block_bytes
        mean_bytes = self._ssd.num_used_blocks * block_bytes / len(self._index.on_ssd)
        return look_ahead_window(self._blocks.num_blocks * block_bytes, mean_bytes)

    def _expire(self) -> None:
        now_s = self._clock()
        for entry in tuple(self._index.pop_expired(now_s)):
            if entry.in_use or entry.pinned or entry.num_pins or self._look_ahead.next_ticket(entry.key) is not None:
                self._index.expire_after(entry, now_s)
                continue
            self._counters.num_expired += 1
            self.give_up(entry.key)
            self.forget(entry)
