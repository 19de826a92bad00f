"""Which sessions are on SSD, in which blocks, and what is on its way there or back.

A session is flushed after each turn: its full blocks that are on SSD already stay, all others are written to blocks
that no session refers to, and then it is published. Leaving DRAM costs nothing by then.

What a session shares in DRAM with one that is on SSD, it shares on SSD too: both refer to the same blocks, which are
free once neither does.

Nothing here waits for a disk. Memory and blocks of a move that failed are free only once it has settled.

Not here: when something is flushed, fetched or evicted from DRAM (tiering), threads and catalog (tiers.mover).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Sequence

import numpy as np

from ca_jax.storage.catalog.file import CatalogError, CatalogLateError
from ca_jax.storage.catalog.records import SessionRecord
from ca_jax.storage.config import StoreConfig
from ca_jax.storage.placement.blocks import ChargedBlocks
from ca_jax.storage.placement.policy import Room
from ca_jax.storage.records import BlockIoError, FlushFailure, IoFailure, MissReason, Note, SsdStats
from ca_jax.storage.sessions import Entry, StoreParts
from ca_jax.storage.tiers.tasks import Changed, Cut, FetchTask, FlushTask, SsdMover, Task, TaskEnd
from ca_jax.storage.tokens import HASH_BYTES, Lineage, num_common, prefix_hashes

_LATE_PAUSE_S = 30.0  # After a missed deadline nothing waits for SSD for so long: each job would wait as long again.
_MAX_FLUSHES = 2  # Sessions written at once; each is many blocks.


class SsdIndex:
    """The SSD tier as the AttentionStore sees it. Belongs to the bookkeeping thread.

    Args:
      mover: does what is decided here.
      records: the sessions that are there, the least recently used first.
      num_lost: how many more were there, and cannot be served.
      config: says what tenants may hold there.
      parts: of the store; the entries' parts about SSD are changed here alone.
    """

    def __init__(
        self,
        mover: SsdMover,
        records: Sequence[SessionRecord] = (),
        num_lost: int = 0,
        *,
        config: StoreConfig,
        parts: StoreParts,
    ) -> None:
        self._mover = mover
        self.stored_block_bytes = mover.stored_block_bytes
        """What a block takes on disk."""
        self._layout = mover.layout
        self._index = parts.index
        self._dram = parts.dram
        self._dram_blocks = parts.blocks
        self._blocks = ChargedBlocks(
            mover.num_blocks, config.tenant_quota_bytes, config.tenant_quotas, self.stored_block_bytes
        )
        self.room = Room(parts.policy, self._blocks, parts.index.on_ssd.view, self._blocks_on_ssd, parts.runtime.clock)
        """Who is evicted from SSD."""
        self._counters = SsdStats(num_lost_sessions=num_lost)
        self._tasks: dict[Task, None] = {}  # Not settled.
        self._failed: list[Entry] = []  # What could not be written since they were last taken.
        self._late_until_s = -np.inf
        self._blocks.adopt((record.tenant, record.block_ids) for record in records)
        parts.index.adopt([Entry.of(record) for record in records])

    @property
    def can_flush(self) -> bool:
        """Whether another flush may begin now."""
        return len(self._tasks) - self.num_fetching < _MAX_FLUSHES

    @property
    def num_fetching(self) -> int:
        """Fetches that have not settled."""
        return sum(isinstance(task, FetchTask) for task in self._tasks)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that are held."""
        return self._blocks.num_blocks - self._blocks.num_free

    @property
    def busy(self) -> bool:
        """Whether a task has not settled, or a change of the catalog has not been tried."""
        return bool(self._tasks or self._mover.num_changes)

    @property
    def is_late(self) -> bool:
        """Whether a deadline was missed and the disk is not known to work again: nothing should wait for it."""
        return time.monotonic() < self._late_until_s or self._mover.is_late

    def stats(self) -> SsdStats:
        """Sizes now, and counts since the store was made."""
        return dataclasses.replace(
            self._counters,
            **self.room.stats(self.stored_block_bytes),
            num_sessions=len(self._index.on_ssd),
            failed_flushes=dict(self._counters.failed_flushes),
        )

    # Moves.

    def fetch(self, entry: Entry) -> None:
        """Begins to bring a session from SSD to DRAM, where there is room: into blocks of the task's."""
        if entry.ssd is None:
            return
        block_ids = self._dram_blocks.alloc(entry.owner.tenant, entry.ssd.num_blocks)
        entry.fetch = FetchTask(
            key=entry.key,
            tenant=entry.owner.tenant,
            dram_blocks=block_ids,
            copy=entry.ssd,
            into=[self._dram.slab[block] for block in block_ids],
        )
        self._begin(entry, entry.fetch)

    def flush(self, entry: Entry) -> bool:
        """Begins to write what of a session is not on SSD yet, evicting others where room lacks.

        Returns:
          Whether that is decided: it has begun, or cannot, which is counted, and the session does not wait for it any
          more; `take_failed` says whether to try again. If not, room may come when other moves have settled.
        """
        num_blocks = self._layout.num_blocks(entry.places.num_places)
        if not self._blocks.admits(entry.owner.tenant, num_blocks):
            return self._skip_flush(entry, FlushFailure.TOO_LARGE)
        num_kept, shared = self._num_kept_blocks(entry), self._shared_blocks(entry)
        if shared is None:
            return False
        shares_with, shared_ids = shared
        self._blocks.share(shared_ids)  # First: the session that has them may be evicted for the others' room.
        failure = self._make_room(entry, num_blocks - num_kept - len(shared_ids))
        if failure is not None and self._tasks:
            self._blocks.free(entry.owner.tenant, shared_ids)
            return False
        if failure is FlushFailure.NO_ROOM and entry.ssd is not None:  # Rather its new state alone than its old one.
            failure = self._make_room(entry, num_blocks - self.room.frees([entry.key]))
            if failure is None:
                self._forget_copy(entry)
                num_kept = 0
        if failure is not None:
            self._blocks.free(entry.owner.tenant, shared_ids)
            return self._skip_flush(entry, failure)
        new_ids = self._blocks.alloc(entry.owner.tenant, num_blocks - num_kept - len(shared_ids))
        kept_ids = [] if entry.ssd is None else entry.ssd.block_ids[:num_kept].tolist()
        dram_ids = entry.block_ids[num_kept:num_blocks]
        entry.flush = FlushTask(
            key=entry.key,
            tenant=entry.owner.tenant,
            dram_blocks=dram_ids,
            ssd_blocks=[*shared_ids, *new_ids],
            record=self._record_of(entry, [*kept_ids, *shared_ids, *new_ids]),
            token_ids=entry.token_ids,
            num_kept_blocks=num_kept,
            num_shared_blocks=len(shared_ids),
            shares_with=shares_with,
            sources=[self._dram.slab[block] for block in dram_ids],
            note=entry.note,
        )
        entry.waits_for_flush = False
        self._dram_blocks.share(dram_ids)  # Nothing is written to a block with two holders: saves go on in a copy.
        self._begin(entry, entry.flush)
        return True

    def take_failed(self) -> list[Entry]:
        """Sessions of which something could not be written since this was last called."""
        failed, self._failed = self._failed, []
        return failed

    def poll(self) -> list[Entry]:
        """Takes in what the worker has done, and returns sessions that SSD had to forget and DRAM has. Never waits."""
        lost: list[Entry] = []
        if self._mover.is_late:
            self._missed_deadline()
        while (end := self._mover.take_ended()) is not None:
            if isinstance(end, Changed):
                entry = self._index.get(end.key)
                if entry is None or entry.ssd is None:
                    continue
                if not end.is_lost:
                    self._take_in_note(entry, end.note, end.error)
                    continue
                self._let_go(entry)
                if entry.num_tokens:
                    lost.append(entry)
                continue
            task = end.task
            if task not in self._tasks:  # Settled already: reported twice, in the other order.
                continue
            entry = self._index.get(task.key)
            if entry is not None and task is entry.fetch:
                self._end_fetch(entry, task, end)
            elif entry is not None and task is entry.flush:
                self._end_flush(entry, task, end)
            if end.error is not None and end.error.reason is IoFailure.DEADLINE:
                self._missed_deadline()
            if end.settled:
                del self._tasks[task]
                self._dram_blocks.free(task.tenant, task.dram_blocks)
                self._blocks.free(task.tenant, task.ssd_blocks)
            if entry is not None:
                self._index.place(entry)
        return lost

    # Forgetting.

    def discard(self, entry: Entry, kept: np.ndarray, lineage: Lineage, note: bytes | None) -> None:
        """Forgets tokens of a session on SSD, or on their way. DRAM is cut already.

        A flush that is under way is published as it began, and cut then.

        Args:
          entry: of the session.
          kept: bool `[T]`, which of the tokens stay that were in DRAM, or on SSD alone.
          lineage: what has been dropped then.
          note: what to keep with the session from then on; None keeps what is kept.
        """
        cut = Cut(kept, lineage, note)
        if entry.fetch is not None and (lineage != entry.fetch.copy.lineage or not kept.all()):
            self._cancel_fetch(entry)
        if entry.flush is not None:
            if not entry.flush.detached:
                entry.flush.cuts.append(cut)
                return
            self.cancel(entry)
        # What SSD has behind the tokens in DRAM, or instead of them, is of a state that was given up.
        self._cut_copy(entry, cut, entry.num_same_tokens if entry.num_tokens else len(kept))

    def detach(self, entry: Entry) -> None:
        """A session leaves DRAM and will be saved there anew: what a flush brings to SSD is another state of it."""
        if entry.flush is not None:
            entry.flush.detached = True

    def cancel(self, entry: Entry) -> None:
        """Gives up what of a session is on its way. A flush may be too far for that: then SSD forgets the session."""
        self._cancel_fetch(entry)
        if entry.flush is not None:
            entry.flush.cancelled = True
            self._counters.failed_flushes[FlushFailure.CANCELLED] += 1
            entry.flush = None
            self._forget_copy(entry, published=True)

    def forget(self, entry: Entry, *, published: bool = False) -> None:
        """Forgets what of a session is on SSD; where `published`, the catalog may know of it and the index does not."""
        if entry.ssd is not None or published:
            self._let_go(entry)
            self._mover.forget([entry.key])

    # What the catalog knows and the index does not.

    def note(self, key: str) -> bytes:
        """What was kept with a session; empty where nothing was or where the catalog cannot be read. Reads a file.

        Raises:
          CatalogLateError: it has not been read in time: something may be there.
        """
        try:
            contents = self._mover.contents(key)
        except CatalogLateError:
            self._missed_deadline()
            raise
        except CatalogError:
            return b""
        return b"" if contents is None else contents.note

    def write_down(self, entry: Entry) -> None:
        """Writes a session's pin and time to live down, if it is on SSD."""
        if entry.ssd is not None:
            key, pinned, ttl_s = entry.key, entry.pinned, entry.ttl_s
            self._mover.change(key, lambda catalog: catalog.set_kept(key, pinned, ttl_s))

    def set_note(self, entry: Entry) -> None:
        """Writes down what a session's owner wants kept with it; its KV there stays as it is. No flush may run."""
        key, note = entry.key, entry.note
        if entry.ssd is not None and note is not None:
            self._mover.change(key, lambda catalog: catalog.set_note(key, note), note)

    def close(self, timeout_s: float) -> bool:
        """Ends the worker and closes the files. To let moves end first, poll until there are none.

        Returns:
          Whether all has settled.
        """
        return self._mover.close(
            timeout_s, {entry.key: entry.last_used_s for entry in self._index if entry.ssd is not None}
        )

    # How.

    def _missed_deadline(self) -> None:
        self._late_until_s = time.monotonic() + _LATE_PAUSE_S

    def _begin(self, entry: Entry, task: Task) -> None:
        self._tasks[task] = None
        self._index.place(entry)
        self._mover.submit(task)

    def _end_fetch(self, entry: Entry, task: FetchTask, end: TaskEnd) -> None:
        entry.fetch = None
        if end.error is None and end.contents is not None:
            block_ids, task.dram_blocks = task.dram_blocks, ()
            entry.token_ids, entry.block_ids, entry.fetched = end.contents.token_ids, list(block_ids), True
            entry.places, entry.lineage, entry.fetch_span_s = task.copy.places, task.copy.lineage, end.span_s
            entry.num_same_tokens = entry.num_tokens
            self._counters.num_fetches += 1
            self._counters.fetched_bytes += task.copy.num_blocks * self._layout.block_bytes
            return
        reason = IoFailure.DEVICE if end.error is None else end.error.reason
        entry.miss = MissReason(reason) if reason in set(MissReason) else MissReason.DEVICE
        if reason in (IoFailure.CORRUPT, IoFailure.MISSING):
            self.forget(entry)

    def _end_flush(self, entry: Entry, task: FlushTask, end: TaskEnd) -> None:
        entry.flush = None
        if end.error is None:
            self._take_in_flush(entry, task)
        else:
            reason = end.error.reason
            if reason is IoFailure.CORRUPT:  # What the catalog says of it: then it cannot be written on.
                self.forget(entry)
                reason = IoFailure.CATALOG
            self._failed.append(entry)
            known = reason in set(FlushFailure)
            self._counters.failed_flushes[FlushFailure(reason) if known else FlushFailure.DEVICE] += 1
        for cut in task.cuts:
            self._cut_copy(entry, cut, entry.num_same_tokens)
        if task.detached:
            entry.num_same_tokens = 0

    def _take_in_flush(self, entry: Entry, task: FlushTask) -> None:
        old = np.zeros(0, np.int64) if entry.ssd is None else entry.ssd.block_ids
        self._blocks.free(entry.owner.tenant, old[task.num_kept_blocks :].tolist())
        entry.ssd = task.record
        entry.num_same_tokens = entry.ssd.num_tokens
        self._take_in_note(entry, task.note)
        if (entry.pinned, entry.ttl_s) != (task.record.pinned, task.record.ttl_s):  # Changed while it was on its way.
            self.write_down(entry)
        self._counters.num_flushes += 1
        self._counters.flushed_bytes += task.num_moved_blocks * self._layout.block_bytes
        task.ssd_blocks = ()

    def _take_in_note(self, entry: Entry, note: bytes | None, error: BlockIoError | None = None) -> None:
        """SSD keeps this with a session now, or could not. Its owner may want something else by now."""
        if error is not None:
            self._failed.append(entry)
            return
        entry.pause_s = 0.0
        if note is not None:
            entry.noted = note.generation if isinstance(note, Note) else 0
            if entry.note is note:
                entry.note = None

    def _num_kept_blocks(self, entry: Entry) -> int:
        """How many leading blocks are on SSD as they should be: full ones, or all if only the note is new."""
        if entry.ssd is None:
            return 0
        is_same = entry.num_same_tokens == entry.num_tokens == entry.ssd.num_tokens
        if is_same and entry.num_same_rows == entry.places.num_places:
            return entry.ssd.num_blocks
        return entry.num_same_rows // self._layout.block_tokens

    def _shared_blocks(self, entry: Entry) -> tuple[str, list[int]] | None:
        """Leading blocks of a session that is not on SSD, which are there as another's that shares them in DRAM.

        Returns:
          The other's key, and their ids on SSD; None where more of them are on their way there.
        """
        holder, found = "", list[int]()
        if entry.ssd is not None or entry.share_group is None:
            return holder, found
        size = self._layout.block_tokens
        full = entry.block_ids[: entry.places.num_places // size]
        shared = list(itertools.takewhile(self._dram_blocks.is_shared, full))
        num_coming = 0
        for other in filter(None, map(self._index.get, reversed(entry.share_group))):  # Of many, the last ones first.
            if len(found) == len(shared):
                break
            if other is entry:
                continue
            num_alike = num_common(np.array(shared), np.array(other.block_ids))
            if other.flush is not None:  # What it has there is not certain, cut as it may be when that has ended.
                num_coming = max(num_coming, min(num_alike, other.flush.record.num_tokens // size))
            elif other.ssd is not None and (num_alike := min(num_alike, other.num_same_rows // size)) > len(found):
                holder, found = other.key, other.ssd.block_ids[:num_alike].tolist()
        return (holder, found) if num_coming <= len(found) else None

    def _record_of(self, entry: Entry, block_ids: Sequence[int]) -> SessionRecord:
        """What the catalog is to say of a session in DRAM that has these blocks on SSD."""
        size = self._layout.block_tokens
        num_plain = entry.lineage.plain_tokens(entry.num_tokens)
        num_known = min(entry.num_same_tokens, num_plain) // size
        known = b"" if entry.ssd is None else entry.ssd.prefixes[: num_known * HASH_BYTES]
        return SessionRecord(
            key=entry.key,
            tenant=entry.owner.tenant,
            variant=entry.owner.variant,
            session_id=entry.owner.session_id,
            block_ids=np.array(block_ids, np.int64),
            places=entry.places,
            lineage=entry.lineage,
            prefixes=prefix_hashes(entry.token_ids[:num_plain], size, known),
            created_s=entry.created_s,
            last_used_s=entry.last_used_s,
            pinned=entry.pinned,
            ttl_s=entry.ttl_s,
        )

    def _make_room(self, entry: Entry, num_blocks: int) -> FlushFailure | None:
        """Evicts from SSD until `num_blocks` more fit beside what `entry` has; or says why not, and evicts nothing."""
        with self._index.kept(entry):
            victims = self.room.victims(entry.owner.tenant, num_blocks)
        if victims is None:
            return FlushFailure.NO_ROOM
        evicted = {key: found for key in victims if (found := self._index.get(key)) is not None}
        try:
            for victim in evicted.values():
                self._take_note_back(victim)
        except CatalogLateError:
            return FlushFailure.DEADLINE
        self.room.evict(evicted, lambda key: self._let_go(evicted[key]))
        if victims:
            self._mover.forget(victims)
        return None

    def _skip_flush(self, entry: Entry, failure: FlushFailure) -> bool:
        self._counters.failed_flushes[failure] += 1
        entry.waits_for_flush = False
        self.set_note(entry)
        if failure is not FlushFailure.TOO_LARGE:  # Room may come; what is too large stays so.
            self._failed.append(entry)
        self._index.place(entry)
        return True

    def _cut_copy(self, entry: Entry, cut: Cut, num_own: int) -> None:
        """Forgets tokens of what is on SSD: those that a cut does not keep, and all behind the first `num_own`."""
        if entry.ssd is None:
            return
        kept = np.zeros(entry.ssd.num_tokens, bool)
        num_own = min(num_own, len(cut.kept), len(kept))
        kept[:num_own] = cut.kept[:num_own]
        if not kept.any():
            self._forget_copy(entry)
        elif not (kept.all() and cut.lineage == entry.ssd.lineage and cut.note is None):
            block_ids = entry.ssd.block_ids
            entry.ssd, table = entry.ssd.keep(kept, cut.lineage, self._layout.block_tokens)
            entry.num_same_tokens = int(np.count_nonzero(kept[: entry.num_same_tokens]))
            self._blocks.free(entry.owner.tenant, np.delete(block_ids, table).tolist())
            key, lineage, note = entry.key, cut.lineage, cut.note
            self._mover.change(key, lambda catalog: catalog.cut(key, kept, lineage, note) is not None, note, cuts=True)

    def _cancel_fetch(self, entry: Entry) -> None:
        if entry.fetch is not None:
            entry.fetch.cancelled = True
            entry.fetch = None

    def _forget_copy(self, entry: Entry, *, published: bool = False) -> None:
        """Forgets what is on SSD of a session that goes on in DRAM, with its note."""
        with contextlib.suppress(CatalogLateError):
            self._take_note_back(entry)
        self.forget(entry, published=published)

    def _take_note_back(self, entry: Entry) -> None:
        """Keeps a session's note for its next flush, before SSD forgets it.

        Raises:
          CatalogLateError: it cannot be read in time.
        """
        if entry.note is None and entry.ssd is not None and entry.num_tokens:
            note = self.note(entry.key)
            entry.note = Note(note, entry.noted if note else -1)

    def _blocks_on_ssd(self, key: str) -> Sequence[int]:
        entry = self._index.get(key)
        return () if entry is None or entry.ssd is None else entry.ssd.block_ids.tolist()

    def _let_go(self, entry: Entry) -> None:
        if entry.ssd is not None:
            self._blocks.free(entry.owner.tenant, entry.ssd.block_ids.tolist())
        entry.ssd, entry.noted = None, -1
        entry.num_same_tokens = 0
        self._index.place(entry)
