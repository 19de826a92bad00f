"""A store beside its reference: opened, held back and opened anew, and compared with it after every operation.

The reference learns from the store what was evicted, flushed and fetched meanwhile, and each is held against the rules.
With an ample SSD nothing may ever be lost; with a small one, what did not fit may. Reads, writes and the catalog can be
held back, so that whatever else may happen does so while they are under way.
"""

from __future__ import annotations

import collections
import itertools
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ca_jax.storage.catalog.catalog import CatalogReader
from ca_jax.storage.records import FlushFailure, MissReason, Residency
from ca_jax.storage.sessions import Entry
from ca_jax.storage.tokens import PLAIN, TokenPlaces

from . import store_helpers as kit
from .store_reference import NOWHERE, Reference, check_books, ids_of, kv_of, num_blocks_of

NUM_BLOCKS = 6
AMPLE = 64  # Blocks of SSD that hold all there can be, old and new states together.
KEYS = st.sampled_from("abcd")
LENGTHS = st.integers(1, 11)
WHICH = st.integers(0, 1 << 20)  # One of those there are, which depends on threads: what is drawn must not.
TENANTS = {"a": "x", "b": "x", "c": "x", "d": "y"}


class WatchedStore(RuleBasedStateMachine):
    """What may happen to a store whatever is asked of it, and what must be so then."""

    driver: str | None = None

    @initialize(
        dtype=st.sampled_from(["float32", "float16", "bfloat16", "int8"]),
        policy=st.sampled_from(["lru", "fifo", "scheduler_aware", "return_aware"]),
        ssd_blocks=st.sampled_from([9, AMPLE]),
        free_fraction=st.sampled_from([0.0, 0.4]),
        seed=st.integers(0, 99),
        lengths=st.lists(LENGTHS, max_size=4),
    )
    def open_store(self, dtype, policy, ssd_blocks, free_fraction, seed, lengths):
        self.directory = Path(tempfile.mkdtemp()) if self.driver else None
        self.clock = kit.StoppedClock()
        self.ample = ssd_blocks == AMPLE and self.driver is not None
        self.options = {
            "dtype": dtype,
            "eviction_policy": policy,
            "dram_free_fraction": free_fraction,
            "clock": self.clock,
            "ssd_dir": self.directory,
            "ssd_blocks": ssd_blocks,
            "ssd_driver": self.driver or "zarr3",
        }
        self.make_store()
        self.layout = self.store.layout
        self.random = np.random.default_rng(seed)
        self.reference: dict[str, Reference] = {}
        self.pins: collections.Counter[str] = collections.Counter()
        self.waiting_notes: dict[str, bytes] = {}  # Of pinned keys of which nothing is stored.
        self.jobs: list[tuple[int, str]] = []
        self.num_jobs = 0
        self.may_evict = False
        for key, num_tokens in zip("abcd", lengths, strict=False):
            self.save_at_once(key, num_tokens, False)
            self.store_is_as_the_reference()

    # What the rules share.

    def make_store(self):
        with pytest.MonkeyPatch.context() as patch:
            self.gates = kit.open_gated(patch)
            self.store = kit.make_store(NUM_BLOCKS, **self.options)
        self.parts: list[tuple] = []  # Open loads of tokens in the middle of a session, and these.
        self.catalog: kit.Gate | None = None

    def entry(self, key):
        return self.store._entries.get(key)

    def evictable_blocks(self, *but: str) -> int:
        """Blocks of DRAM that others may have to give: those that nobody else holds."""
        held = self.holders()
        for key, reference in self.reference.items():
            entry = self.entry(key)
            if key in but or self.pins[key] or reference.in_use or (reference.pinned and reference.ssd is None):
                continue
            if entry.requested or entry.flush is not None or entry.waits_for_flush:
                continue
            held.subtract(entry.block_ids)
        return sum(not number for number in held.values())

    def holders(self) -> collections.Counter[int]:
        """How often each block of DRAM is held."""
        moves = [] if self.store._ssd is None else self.store._ssd._tasks
        tables = [[*entry.block_ids, *entry.replaced_blocks] for entry in self.store._entries]
        tables += [part.block_ids for part in self.parts_read()]
        return collections.Counter(itertools.chain(*tables, *(move.dram_blocks for move in moves)))

    def parts_read(self) -> list[Entry]:
        """What holds blocks of a session's middle for a load."""
        return [part for part in self.store._transfers._open_loads.values() if not part.num_open_loads]

    def free_blocks(self) -> int:
        return self.store.stats().free_bytes // self.layout.block_bytes

    def random_ids(self, num_tokens: int) -> list[int]:
        """Of few, so that what is left of a session may spell another text."""
        return self.random.choice([0, 1, 256], num_tokens).tolist()

    def step(self, call) -> None:
        """Calls what expires sessions too: `poll`, `settle`, `close`."""
        due = set()
        for key, reference in self.reference.items():
            entry = self.entry(key)
            since_s = max(entry.last_used_s, reference.deferred_s)
            if reference.ttl_s is None or since_s + reference.ttl_s > self.clock.now_s:
                continue
            if reference.in_use or reference.pinned or self.pins[key] or key in (key for _, key in self.jobs):
                reference.deferred_s = self.clock.now_s
            else:
                due.add(key)
        self.may_evict = self.driver is not None  # Without an SSD only what needs room evicts.
        call()
        for key in due:
            del self.reference[key]

    def came(self, key: str, reference: Reference) -> None:
        """Something of a session is stored, perhaps for the first time: it takes the note that waits for it."""
        reference.note = self.waiting_notes.pop(key, reference.note)
        self.reference[key] = reference

    def published(self, reference: Reference) -> None:
        """The oldest open save is complete."""
        _, tokens = reference.saves.pop(0)
        reference.tokens = reference.tokens + tokens
        reference.places = reference.places.append(len(tokens))

    def state_on_ssd(self, key: str) -> tuple[bool, int]:
        """Whether a flush is under way, and how many of a session's first tokens SSD has as they are now."""
        entry = self.entry(key)
        return entry.flush is not None, entry.num_same_tokens if entry.num_tokens else sys.maxsize

    def shortened(self, key: str, num_tokens: int, was_flushed: bool, was_same: int) -> None:
        """A session was, in both tiers; of what SSD has of another state nothing is left."""
        reference, entry = self.reference[key], self.entry(key)
        if num_tokens and num_tokens >= len(reference.readable()[0]):
            return
        reference.tokens = reference.tokens[:num_tokens]
        reference.places = reference.places.take(num_tokens)
        if was_flushed and entry is not None and entry.flush is not None:
            reference.is_cut_after_flush = True
            reference.flushed_left, reference.flushed_lineage = reference.flushed_left[:num_tokens], reference.lineage
            return
        if reference.ssd is not None:
            reference.ssd = reference.ssd[: min(num_tokens, was_same)] or None
            reference.ssd_blocks = reference.ssd_blocks[: len(entry.ssd.block_ids) if entry and entry.ssd else 0]
        if was_flushed and (entry is None or entry.ssd is None):  # The flush may have been too far to be undone alone.
            reference.ssd = None

    # Keeping, and the queue.

    @rule(key=KEYS)
    def pin_or_unpin(self, key):
        if self.pins[key]:
            self.store.unpin(key)
            self.pins[key] -= 1
            self.waiting_notes.pop(key, None)
        else:
            self.store.pin(key)
            self.pins[key] += 1

    @rule(key=KEYS, pinned=st.booleans())
    def set_pinned(self, key, pinned):
        assert self.store.set_pinned(key, pinned) == (key in self.reference)
        if key in self.reference:
            self.reference[key].pinned = pinned

    @rule(key=KEYS, ttl_s=st.sampled_from([None, 0.0, 5.0, 50.0]), seconds=st.sampled_from([0.0, 10.0]))
    def set_ttl(self, key, ttl_s, seconds):
        self.clock.now_s += seconds
        assert self.store.set_ttl(key, ttl_s) == (key in self.reference)
        if key in self.reference:
            self.reference[key].ttl_s = ttl_s

    @rule(key=KEYS, note=st.binary(max_size=3))
    def set_note(self, key, note):
        self.store.set_note(key, note)
        if key in self.reference and self.driver:
            self.reference[key].note = note
        elif self.driver and self.pins[key]:
            self.waiting_notes[key] = note

    @rule(key=KEYS)
    def read_note(self, key):
        found = self.store.note(key)
        expected = self.reference[key].note if key in self.reference else b""
        assert found == expected or not (found or self.ample)

    @rule(key=KEYS, priority=st.integers(-1, 1))
    def enqueue(self, key, priority):
        self.num_jobs += 1
        self.jobs.append((self.num_jobs, key))
        self.store.enqueue(*self.jobs[-1], priority)

    @rule(which=WHICH)
    def dequeue(self, which):
        if self.jobs:
            self.store.dequeue(self.jobs.pop(which % len(self.jobs))[0])

    # What goes on in the background.

    @rule(reads=st.booleans(), writes=st.booleans(), catalog=st.booleans())
    def hold(self, reads, writes, catalog):
        """Holds what begins from now on, until all may go on."""
        if not self.driver:
            return
        if reads:
            self.gates[0].reads.close()
        if writes:
            self.gates[0].writes.close()
        if catalog and self.catalog is None:
            self.catalog = kit.Gate(is_closed=True)
            self.store._ssd._mover._put_change(self.catalog)

    @rule()
    def go_on(self):
        """Holds nothing back any more."""
        for tier in self.gates:
            tier.reads.open()
            tier.writes.open()
        if self.catalog is not None:
            self.catalog.open()
            self.catalog = None

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def let_time_pass(self, seconds):
        self.clock.now_s += seconds
        self.poll()

    @rule()
    def poll(self):
        self.step(self.store.poll)

    @rule()
    def settle(self):
        self.go_on()
        self.step(lambda: self.store.settle(kit.PATIENCE_S))
        assert not self.store._placement.busy
        self.store_is_as_the_reference()
        for key, reference in self.reference.items():
            if self.ample and reference.tokens and not (reference.saves or self.pins[key] or reference.is_borrowed):
                assert reference.ssd == reference.tokens, "settled, and not on SSD"
                assert sum(block.ssd_tokens for block in self.store.blocks(key)) == len(reference.tokens)
        if self.driver:
            self.store.poll()  # What has settled is free.
            assert len(self.holders()) * self.layout.block_bytes == self.store.stats().used_bytes
            tables = [entry.ssd.block_ids.tolist() for entry in self.store._entries if entry.ssd is not None]
            ssd_bytes = len({block for table in tables for block in table}) * self.store._ssd.stored_block_bytes
            assert ssd_bytes == self.store.stats().ssd.used_bytes
            is_one_state = all(
                not other.saves and (not other.tokens or other.ssd == other.tokens) for other in self.reference.values()
            )
            for key, reference in self.reference.items():
                on_ssd = ids_of((reference.ssd or [])[: reference.ssd_lineage.num_plain])
                num_full = len(on_ssd) // kit.BLOCK_TOKENS * kit.BLOCK_TOKENS
                if num_full and is_one_state:
                    found = self.store.find_prefix(TENANTS[key], [*on_ssd, -1])
                    assert ids_of(self.reference[found].readable()[0])[:num_full] == on_ssd[:num_full]

    @rule(crash=st.booleans(), is_time=st.integers(0, 2))
    def restart(self, crash, is_time):
        """Closes the store, or leaves it as a process that dies does, and opens its directory again."""
        if is_time:  # Not too often.
            return
        self.go_on()
        candidates = {}
        for key, reference in tuple(self.reference.items()):
            flush = self.entry(key).flush
            candidates[key] = [(reference.ssd, reference.ssd_lineage)]
            if flush:
                candidates[key].append((reference.flushed, flush.record.lineage))
            if not crash:  # What `close` would do first.
                for ticket in reference.loads:
                    self.store.abort_load(ticket)
                if reference.saves:
                    self.store.abort_save(reference.saves[0][0])
                reference.saves.clear()
                reference.loads.clear()
                candidates[key] = [reference.readable()]
                if reference.has_left and not reference.tokens:
                    candidates[key] = [(reference.flushed_left, reference.flushed_lineage)]
                if not self.ample or reference.is_borrowed:
                    candidates[key] += [(reference.ssd, reference.ssd_lineage), (None, PLAIN)]
                if self.entry(key) is None:
                    del self.reference[key]
        if crash:
            if self.store._ssd is not None:
                assert self.store._ssd.close(kit.PATIENCE_S)
        else:
            self.pins.clear()
            self.step(self.store.close)
        before, self.reference = self.reference, {}
        self.pins.clear()
        self.waiting_notes.clear()
        self.jobs.clear()
        self.may_evict = False
        self.make_store()
        if not self.driver:
            return
        assert self.store.stats().ssd.num_lost_sessions == 0
        with CatalogReader(self.directory, self.store._ssd._mover._reader.namespace) as reader:
            assert reader.integrity_check() == ()
        for key, old in before.items():
            contents, entry = self.store._ssd._mover.contents(key), self.entry(key)
            token_ids = [] if contents is None else contents.token_ids.tolist()
            lineage = PLAIN if entry is None else entry.ssd.lineage
            matching = [
                tokens
                for tokens, its_lineage in candidates[key]
                if ids_of(tokens or []) == token_ids and (not tokens or its_lineage == lineage)
            ]
            assert matching, "neither the state before nor the one after"
            if token_ids:
                new = self.reference[key] = Reference(
                    ssd=matching[0], ssd_lineage=lineage, note=old.note, pinned=old.pinned, ttl_s=old.ttl_s
                )
                new.ssd_blocks = tuple(entry.ssd.block_ids.tolist())
                if crash:  # What was said last may not have been written down.
                    new.note, new.pinned, new.ttl_s = contents.note, entry.pinned, entry.ttl_s
                assert (entry.pinned, entry.ttl_s) == (new.pinned, new.ttl_s)

    # What holds after every operation.

    @invariant()
    def store_is_as_the_reference(self):
        for key in "abcd":
            if key in self.reference:
                self.compare(key, self.entry(key), self.reference[key])
            else:
                assert self.entry(key) is None
        infos = {info.key: info for info in self.store.list()}
        assert infos.keys() == self.reference.keys()
        for key, reference in self.reference.items():
            info = infos[key]
            assert info.num_tokens == len(reference.tokens or reference.ssd or [])
            assert info.ssd_tokens == len(reference.ssd or [])
            assert info.num_blocks == num_blocks_of(reference.stop_place)
            on_ssd = reference.ssd_lineage if reference.ssd else PLAIN
            lineage = reference.lineage if reference.tokens or reference.saves else on_ssd
            assert info.num_dropped == lineage.num_dropped
            assert info.pinned == (bool(self.pins[key]) or reference.pinned)
            assert info.in_use == reference.in_use
            assert info.ttl_s == reference.ttl_s
            assert (info.residency is Residency.DRAM) == bool(reference.tokens)
            assert info.residency is not Residency.ABSENT
        self.may_evict = False

    def compare(self, key, entry, reference):
        """Takes in what happened to a session meanwhile, if it may have."""
        was_on_ssd = reference.ssd
        may_go = self.may_evict and not (self.pins[key] or reference.in_use)
        ssd_blocks = () if entry is None or entry.ssd is None else tuple(entry.ssd.block_ids.tolist())
        num_flushes = self.store.stats().ssd.num_flushes if self.driver else 0
        is_other = ssd_blocks and (
            entry.ssd.num_tokens != len(reference.ssd or [])
            or entry.ssd.lineage != reference.ssd_lineage
            or (entry.ssd is not reference.ssd_copy and num_flushes != reference.num_flushes and reference.tokens)
        )
        if ssd_blocks != reference.ssd_blocks or is_other:
            if ssd_blocks:  # Flushed.
                is_older = reference.has_left and set(ssd_blocks) <= set(reference.flush.record.block_ids.tolist())
                flushed = reference.flushed_left if is_older else reference.tokens
                told = f"on SSD is what nobody saved: {key}, {is_older}, {entry.ssd}, {len(flushed)}, {reference}"
                assert entry.ssd.num_tokens <= len(flushed), told
                reference.ssd, reference.ssd_lineage = flushed[: entry.ssd.num_tokens], entry.ssd.lineage
            else:
                gave_way = entry is not None and entry.flush is not None  # To its own new state.
                may_leave = gave_way or (may_go and not reference.pinned) or reference.is_cut_after_flush
                assert may_leave or reference.ssd is None, "left SSD although it had to stay"
                is_lost = reference.ssd is not None and not reference.is_cut_after_flush
                assert not (self.ample and is_lost), "left an SSD that has room"
                reference.ssd = None
            reference.ssd_blocks = ssd_blocks
        reference.ssd_copy, reference.num_flushes = None if entry is None else entry.ssd, num_flushes
        flush = None if entry is None else entry.flush
        if flush is not reference.flush:
            assert flush is None or not self.pins[key], "written while its turn runs"
            reference.flush, reference.is_cut_after_flush, reference.has_left = flush, False, False
            reference.flushed = reference.tokens[: flush.record.num_tokens] if flush else []
            reference.flushed_left = reference.flushed
            reference.flushed_lineage = flush.record.lineage if flush else PLAIN
        stored = [] if entry is None else entry.token_ids.tolist()
        if stored and not reference.tokens:  # Fetched, and it may have left SSD since, for another's flush.
            fetched = was_on_ssd if reference.ssd is None else reference.ssd
            assert stored == ids_of(fetched or [])
            reference.tokens, reference.lineage = fetched, reference.ssd_lineage
            reference.places = entry.places
        elif reference.tokens and not stored:  # Evicted.
            assert may_go, "left DRAM although it had to stay"
            is_safe = reference.ssd == reference.tokens or reference.is_borrowed
            assert not self.ample or is_safe, "left DRAM before it was on SSD"
            assert not reference.pinned or reference.ssd
            reference.tokens, reference.places = [], NOWHERE
        else:
            assert stored == ids_of(reference.tokens)
            if stored and entry.places != reference.places:  # Copied together.
                assert num_blocks_of(reference.places.num_places) > num_blocks_of(len(stored)) + 2
                assert entry.places == TokenPlaces.dense(len(stored))
                reference.places = entry.places
        if stored:
            assert entry.lineage == reference.lineage
        if entry is None and may_go and reference.ssd is None:
            del self.reference[key]
        assert (entry is not None) == (key in self.reference)

    @invariant()
    def books_are_exact(self):
        stats = self.store.stats()
        moves = [] if self.store._ssd is None else list(self.store._ssd._tasks)
        tables = [(entry.owner.tenant, [*entry.block_ids, *entry.replaced_blocks]) for entry in self.store._entries]
        tables += [(move.tenant, move.dram_blocks) for move in moves]
        tables += [(part.owner.tenant, part.block_ids) for part in self.parts_read()]
        num_held = check_books(self.store._blocks, tables)
        assert stats.used_bytes == num_held * self.layout.block_bytes
        assert stats.used_bytes + stats.free_bytes == stats.capacity_bytes == NUM_BLOCKS * self.layout.block_bytes
        if self.store._ssd is None:
            return
        entries = [entry for entry in self.store._entries if entry.ssd is not None]
        tables = [(entry.owner.tenant, entry.ssd.block_ids.tolist()) for entry in entries]
        tables += [(move.tenant, move.ssd_blocks) for move in moves]
        num_held = check_books(self.store._ssd._blocks, tables)
        assert stats.ssd.used_bytes == num_held * self.store._ssd.stored_block_bytes
        assert stats.ssd.used_bytes + stats.ssd.free_bytes == stats.ssd.capacity_bytes
        assert stats.ssd.num_sessions == len(entries)
        failures = {reason for reason, number in stats.ssd.failed_flushes.items() if number}
        assert failures <= {FlushFailure.CANCELLED, *(() if self.ample else (FlushFailure.NO_ROOM, "too_large"))}
        assert not {reason for reason, number in stats.misses.items() if number} & {
            MissReason.CORRUPT,
            MissReason.MISSING,
            MissReason.DEVICE,
            MissReason.CATALOG,
        }

    @invariant()
    def what_is_told_of_blocks_is_so(self):
        for key, reference in self.reference.items():
            told = self.store.blocks(key)
            on_ssd = sum(block.ssd_tokens for block in told)
            if not (reference.tokens or reference.saves):
                assert on_ssd == len(reference.ssd or [])
                continue
            places = reference.places.append(sum(len(tokens) for _, tokens in reference.saves))
            _, first, number = np.unique(places.to_array() // kit.BLOCK_TOKENS, return_index=True, return_counts=True)
            assert [(block.first_token, block.dram_tokens + block.saving_tokens) for block in told] == list(
                zip(first, number, strict=True)
            )
            assert sum(block.dram_tokens for block in told) == len(reference.tokens)
            assert all(block.ssd_tokens <= block.dram_tokens for block in told)
            assert on_ssd <= len(reference.ssd or [])

    @invariant()
    def what_is_published_in_dram_is_what_was_saved(self):
        """Whoever shares blocks with whom."""
        for key, reference in self.reference.items():
            if reference.tokens:
                blocks, rows = np.divmod(reference.places.to_array(), kit.BLOCK_TOKENS)
                found = self.store._dram.slab[np.array(self.entry(key).block_ids)[blocks], :, :, rows]
                expected = kv_of(self.layout, reference.tokens)
                kit.assert_same(np.moveaxis(found, 0, 2), expected)
