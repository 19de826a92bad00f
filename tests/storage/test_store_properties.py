"""Random operations on the AttentionStore against a store that is a dict, with DRAM alone and with either SSD."""

from __future__ import annotations

import shutil
import sys

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from ca_jax.storage.records import EntryInUseError, MissReason, Owner
from ca_jax.storage.tokens import Lineage, TokenPlaces

from . import store_helpers as kit
from .store_machine import KEYS, LENGTHS, TENANTS, WHICH, WatchedStore
from .store_reference import NOWHERE, Reference, ids_of, kv_of, lineage_after, num_blocks_of, num_common, tokens_of


class StoreMachine(WatchedStore):
    """What is asked of the store and the reference alike."""

    # Saves.

    @rule(key=KEYS, num_tokens=LENGTHS, goes_on=st.booleans(), num_dropped=st.integers(0, 2))
    def prepare_save(self, key, num_tokens, goes_on, num_dropped=0):
        reference = self.reference.get(key) or Reference()
        start = reference.stop
        token_ids = self.random_ids(num_tokens)
        if not start and goes_on and reference.ssd:  # Recomputed, as after a miss.
            token_ids = [*ids_of(reference.ssd), *token_ids][:num_tokens]
        free, evictable = self.free_blocks(), self.evictable_blocks(key)
        table = self.entry(key).block_ids if self.entry(key) else []
        would_write_to_others = reference.stop_place % kit.BLOCK_TOKENS and self.holders()[table[-1]] > 1
        held = len(table) - bool(would_write_to_others)
        in_dram = {name for name, other in self.reference.items() if other.tokens}
        ticket = self.store.prepare_save(key, start, token_ids, Owner(tenant=TENANTS[key]), num_dropped=num_dropped)

        needed = num_blocks_of(reference.stop_place + num_tokens) - held
        assert (ticket is not None) == (needed <= free + evictable), "skipped although room could be made, or not"
        evicted = {name for name in in_dram if self.entry(name) is None or not self.entry(name).num_tokens}
        assert not evicted or (ticket is not None and needed > free), "evicted without need"
        self.may_evict = True
        if ticket is not None:
            if not start:
                reference.lineage = Lineage(num_dropped)
            behind = reference.tokens + [token for _, tokens in reference.saves for token in tokens]
            reference.saves.append((ticket, tokens_of(token_ids, behind)))
            reference.is_borrowed = False
            self.came(key, reference)

    @rule(key=KEYS, wrong=st.sampled_from([-1, 1, 5]))
    def prepare_save_with_a_gap(self, key, wrong):
        start = self.reference[key].stop if key in self.reference else 0
        with pytest.raises(ValueError, match="must start at token"):
            self.store.prepare_save(key, start + wrong, [1])

    def open_saves(self):
        return [(key, i) for key, ref in sorted(self.reference.items()) for i in range(len(ref.saves))]

    def open_save(self, which):
        """The key of one of the open saves, and its place among those of its session; None if there are none."""
        saves = self.open_saves()
        return saves[which % len(saves)] if saves else None

    def kv_of_save(self, key, i):
        return kv_of(self.layout, self.reference[key].saves[i][1])

    def write_in_pieces(self, key, i):
        """Layer by layer and in any order, of any strides."""
        ticket, _ = self.reference[key].saves[i]
        half = ticket.num_tokens // 2
        for layer, kv in reversed(list(enumerate(self.kv_of_save(key, i)))):
            assert ticket.write(layer, np.asfortranarray(kv[:, half:]), half)
            assert not half or ticket.write(layer, kv[:, :half], 0)

    @rule(which=WHICH, layer=st.integers(0, 2), first=st.integers(0, 10), num_tokens=LENGTHS)
    def write_part(self, which, layer, first, num_tokens):
        if (found := self.open_save(which)) is None:
            return
        ticket, kv = self.reference[found[0]].saves[found[1]][0], self.kv_of_save(*found)
        start = first % ticket.num_tokens
        stop = min(start + num_tokens, ticket.num_tokens)
        assert ticket.write(layer, kv[layer, :, start:stop], start)

    @rule(which=WHICH)
    def finish_save(self, which):
        if (found := self.open_save(which)) is None:
            return
        key, i = found
        reference = self.reference[key]
        ticket, _ = reference.saves[i]
        self.write_in_pieces(key, i)
        if i:
            with pytest.raises(ValueError, match="complete in order"):
                self.store.complete_save(ticket)
            return
        assert self.store.complete_save(ticket)
        self.published(reference)

    @rule(which=WHICH)
    def abort_save(self, which):
        if (found := self.open_save(which)) is None:
            return
        key, i = found
        reference = self.reference[key]
        aborted = [(ticket, self.kv_of_save(key, i + j)) for j, (ticket, _) in enumerate(reference.saves[i:])]
        self.store.abort_save(reference.saves[i][0])
        del reference.saves[i:]
        if not reference.tokens and not reference.saves and reference.ssd is None and reference.flush is None:
            del self.reference[key]  # But for what left DRAM before and is on its way to SSD.
        for ticket, kv in aborted:
            assert not ticket.write_all(kv)
            assert not self.store.complete_save(ticket)

    @rule(key=KEYS, num_tokens=LENGTHS)
    def take_a_turn(self, key, num_tokens):
        """What an engine does: fetch, load, save what is new, settle."""
        self.fetch_and_load(key)
        self.store_is_as_the_reference()
        self.save_at_once(key, num_tokens, True)
        self.store_is_as_the_reference()
        self.settle()

    @rule(key=KEYS, num_tokens=LENGTHS, goes_on=st.booleans(), holds=st.sampled_from(["", "writes", "catalog"]))
    def save_and_flush(self, key, num_tokens, goes_on, holds):
        """Leaves a flush under way, whose blocks are written or not."""
        self.hold(False, holds == "writes", holds == "catalog")
        self.save_at_once(key, num_tokens, goes_on)
        self.store_is_as_the_reference()
        self.poll()

    @rule(key=KEYS, num_tokens=LENGTHS, goes_on=st.booleans())
    def save_at_once(self, key, num_tokens, goes_on):
        if key not in self.reference or not self.reference[key].saves:
            self.prepare_save(key, num_tokens, goes_on)
            if key in self.reference and self.reference[key].saves:
                reference = self.reference[key]
                ((ticket, _),) = reference.saves
                self.write_in_pieces(key, 0)
                assert self.store.complete_save(ticket)
                self.published(reference)

    @rule(source=KEYS, key=KEYS, num_tokens=st.integers(1, 20))
    def copy_prefix(self, source, key, num_tokens):
        tokens = self.reference[source].tokens if source in self.reference else []
        wanted = [*ids_of(tokens[:num_tokens]), -1]
        owner = Owner(tenant=TENANTS[key])
        if key in self.reference or (source in self.reference and TENANTS[source] != TENANTS[key]):
            with pytest.raises(ValueError, match=r"which has|got another's"):
                self.store.copy_prefix(source, key, wanted, owner)
            return
        has_room = self.free_blocks() + self.evictable_blocks(key, source) > 0
        num_copied = self.store.copy_prefix(source, key, wanted, owner)
        expected = min(num_tokens, len(tokens))
        if tokens:
            expected = self.reference[source].lineage.plain_tokens(expected)
        assert num_copied == (expected if has_room else expected // kit.BLOCK_TOKENS * kit.BLOCK_TOKENS)
        num_shared = num_copied // kit.BLOCK_TOKENS
        if num_copied:
            assert self.entry(key).block_ids[:num_shared] == self.entry(source).block_ids[:num_shared]
        self.may_evict = True
        if num_copied:
            assert tokens[:num_copied] == tokens_of(wanted[:num_copied], []), "it has seen tokens that were dropped"
            places = TokenPlaces.dense(num_copied)
            self.came(key, Reference(tokens=tokens[:num_copied], places=places, is_borrowed=True))

    @rule(which=WHICH, key=st.sampled_from("abc"), num_tokens=st.integers(4, 20), num_more=st.integers(0, 6))
    def fork(self, which, key, num_tokens, num_more):
        """What an engine does for a history that was sent again: in place of another session, whose end is edited."""
        if key in self.reference and self.reference[key].in_use:
            return
        sources = [name for name in "abc" if name != key and name in self.reference and self.reference[name].tokens]
        if not sources:
            return
        self.drop(key)
        self.copy_prefix(sources[which % len(sources)], key, num_tokens)
        self.store_is_as_the_reference()
        if which % 2:
            self.take_over(key, num_tokens // 2, None, True)
            self.store_is_as_the_reference()
        if num_more:
            self.save_at_once(key, num_more, False)

    @rule(which=WHICH, key=st.sampled_from("abc"), num_tokens=st.integers(4, 20), num_more=st.integers(1, 6))
    def fork_what_is_on_ssd(self, which, key, num_tokens, num_more):
        """Two turns, the second of which begins with what is left of the first."""
        self.settle()
        self.fork(which, key, num_tokens, num_more)
        self.store_is_as_the_reference()
        self.poll()

    @rule(key=KEYS, num_tokens=LENGTHS, goes_on=st.booleans())
    def find_prefix(self, key, num_tokens, goes_on):
        """Of those in DRAM, whatever is on SSD."""
        known = self.reference[key].readable()[0] if key in self.reference else []
        wanted = [*ids_of(known[:num_tokens]), *(self.random_ids(3) if goes_on else [-1])]
        found = self.store.find_prefix(TENANTS[key], wanted, in_dram=True)
        common = {
            name: num_common(ids_of(other.tokens[: other.lineage.plain_tokens(len(other.tokens))]), wanted)
            for name, other in self.reference.items()
            if TENANTS[name] == TENANTS[key]
        }
        longest = max(common.values(), default=0)
        assert (found is not None) == (longest >= kit.BLOCK_TOKENS)
        assert found is None or common[found] == longest

    # Loads.

    @rule(key=KEYS, which=WHICH, num_others=st.integers(0, 3), num_dropped=st.none() | st.integers(0, 4))
    def load_prefix(self, key, which, num_others, num_dropped):
        """For its owner, or for a session from which other tokens were dropped."""
        reference = self.reference.get(key) or Reference()
        own = reference.lineage.num_dropped
        num_dropped = own if num_dropped is None else num_dropped
        kept = which % (len(reference.tokens) + 1)
        wanted = [*ids_of(reference.tokens[:kept]), *([-1] * (num_others if kept else 1))]
        found = kit.load(self.store, key, wanted, num_dropped)
        expected = reference.tokens[: kept if num_dropped == own else reference.lineage.plain_tokens(kept)]
        if not expected:
            assert found is None
            return
        kit.assert_same(found, kv_of(self.layout, expected))
        if num_dropped != own:
            assert expected == tokens_of(ids_of(expected), []), "it has seen tokens that were dropped"

    @rule(key=KEYS, which=WHICH, num_dropped=st.none() | st.integers(0, 4), goes_on=st.booleans())
    def take_over(self, key, which, num_dropped, goes_on):
        """Goes on behind what is served, as an engine does whose session has other tokens from there on."""
        reference = self.reference.get(key)
        if reference is None or not reference.tokens or reference.in_use:
            return
        num_dropped = reference.lineage.num_dropped if num_dropped is None else num_dropped
        wanted = 1 + which % len(reference.tokens)
        is_other = num_dropped != reference.lineage.num_dropped
        num_tokens = reference.lineage.plain_tokens(wanted) if is_other else wanted
        was_flushed, was_same = self.state_on_ssd(key)
        ticket = self.store.prepare_load(
            key, [*ids_of(reference.tokens[:wanted]), -1], truncate=True, num_dropped=num_dropped
        )
        if not num_tokens:
            assert ticket is None
            return
        assert ticket.num_tokens == num_tokens
        if num_tokens < len(reference.tokens):
            self.shortened(key, num_tokens, was_flushed, was_same)
        if is_other:
            reference.lineage = Lineage(num_dropped)
        if goes_on:  # It is saved behind what is being loaded.
            reference.loads.append(ticket)
        else:
            self.store.complete_load(ticket)

    @rule(key=KEYS)
    def fetch_and_load(self, key):
        """All that is known of a session is there, from whichever tier, or there is no room for it."""
        if key not in self.reference or not (self.reference[key].tokens or self.reference[key].ssd):
            return
        self.go_on()
        self.num_jobs += 1
        self.store.enqueue(self.num_jobs, key)
        self.jobs.append((self.num_jobs, key))

        while True:
            self.store._progress.clear()
            self.step(self.store.poll)
            self.store_is_as_the_reference()
            self.may_evict = True
            on_its_way = self.store.request(key)
            self.store_is_as_the_reference()
            if not (on_its_way and self.store._placement.busy):
                break
            assert self.store._progress.wait(kit.PATIENCE_S), "waits for nothing"
        reference = self.reference.get(key)
        if on_its_way:  # Whoever saves now will make room.
            assert any(other.saves and not self.pins[name] for name, other in self.reference.items())
        elif reference is not None and not reference.in_use:
            wanted, lineage = reference.readable()
            if self.entry(key).flush is not None and not reference.tokens:  # Another state of it is on its way to SSD.
                assert kit.load(self.store, key, ids_of(wanted), lineage.num_dropped) is None
                self.store.dequeue(self.jobs.pop()[0])
                return
            missed = self.store.stats().misses[MissReason.NO_ROOM]
            free, evictable = self.free_blocks(), self.evictable_blocks(key)
            found = kit.load(self.store, key, ids_of(wanted), lineage.num_dropped)
            if found is None:
                assert self.store.stats().misses[MissReason.NO_ROOM] == missed + 1, self.store.stats().misses
                assert len(reference.ssd_blocks) > free + evictable
            else:
                kit.assert_same(found, kv_of(self.layout, wanted))
        self.store.dequeue(self.jobs.pop()[0])

    @rule(key=KEYS)
    def request_and_hold(self, key):
        """Leaves a fetch under way."""
        self.hold(True, False, False)
        self.enqueue(key, 0)
        self.may_evict = True
        self.store.request(key)

    @rule(key=KEYS)
    def begin_load(self, key):
        if key in self.reference and self.reference[key].tokens:
            reference = self.reference[key]
            num_dropped = reference.lineage.num_dropped
            reference.loads.append(self.store.prepare_load(key, ids_of(reference.tokens), num_dropped=num_dropped))

    @rule(key=KEYS, completed=st.booleans())
    def end_load(self, key, completed):
        if key in self.reference and self.reference[key].loads:
            reference = self.reference[key]
            ticket = reference.loads.pop(0)
            kv = kv_of(self.layout, reference.tokens[: ticket.num_tokens])
            staging = np.zeros((2, ticket.num_tokens, *kv.shape[3:]), kv.dtype)
            ticket.read(1, staging).result()
            kit.assert_same(staging, kv[1])
            (self.store.complete_load if completed else self.store.abort_load)(ticket)

    @rule(key=KEYS, first=st.integers(0, 9), num_tokens=LENGTHS)
    def begin_part(self, key, first, num_tokens):
        reference = self.reference.get(key) or Reference()
        if tokens := reference.tokens[first : first + num_tokens]:
            has_room = (first + len(tokens)) % kit.BLOCK_TOKENS == 0 or self.free_blocks() + self.evictable_blocks(
                key
            ) > 0
            ticket = self.store.hold_part(key, ids_of(tokens), first)
            assert (ticket is not None) == (reference.places.is_dense and has_room)
            self.may_evict = True
            self.parts += [(ticket, tokens)] if ticket else []

    @rule(which=WHICH, completed=st.booleans())
    def end_part(self, which, completed):
        """Whatever has become of the session meanwhile."""
        if self.parts:
            ticket, tokens = self.parts.pop(which % len(self.parts))
            kv = kv_of(self.layout, tokens)
            staging = np.zeros((2, len(tokens), *kv.shape[3:]), kv.dtype)
            ticket.read(1, staging).result()
            kit.assert_same(staging, kv[1])
            (self.store.complete_load if completed else self.store.abort_load)(ticket)

    # Forgetting.

    @rule(key=KEYS, num_tokens=st.integers(0, 12))
    def truncate(self, key, num_tokens):
        reference = self.reference.get(key)
        if reference and reference.in_use:
            with pytest.raises(EntryInUseError):
                self.store.truncate(key, num_tokens)
            return
        was_flushed, was_same = (False, 0) if reference is None else self.state_on_ssd(key)
        kept = self.store.truncate(key, num_tokens)
        if not num_tokens:
            self.waiting_notes.pop(key, None)
        if reference is None:
            assert kept == 0
            return
        self.shortened(key, num_tokens, was_flushed, was_same)
        assert kept == len(reference.tokens or reference.ssd or [])
        if not kept:
            del self.reference[key]

    @rule(
        key=KEYS,
        mask=st.one_of(
            st.lists(st.booleans(), max_size=30),
            st.tuples(st.integers(0, 6), st.integers(0, 12)).map(lambda cut: [False] * cut[0] + [True] * cut[1]),
            st.integers(0, 15).map(lambda num_tokens: [True] * num_tokens),
        ),
        note=st.none() | st.binary(max_size=3),
    )
    def discard(self, key, mask, note):
        """Any tokens, the oldest behind the first ones, the oldest."""
        reference, entry = self.reference.get(key), self.entry(key)
        mask = np.array(mask, bool)
        if reference and reference.in_use:
            with pytest.raises(EntryInUseError):
                self.store.discard(key, mask)
            return
        if reference is None:
            assert self.store.discard(key, mask, note) == 0
            if note is not None and self.driver and self.pins[key]:
                self.waiting_notes[key] = note
            return
        tokens, lineage = reference.readable()
        stays = [i >= len(mask) or not mask[i] for i in range(len(tokens))]
        left = [token for token, is_left in zip(tokens, stays, strict=True) if is_left]
        lineage = lineage_after(lineage, mask.tolist(), len(tokens))
        was_flushed, was_same = entry.flush is not None, entry.num_same_tokens
        before = entry.ssd
        changes_nothing = all(stays) and lineage == reference.readable()[1] and note is None
        if not (reference.tokens or changes_nothing) and was_flushed:  # Another state was on its way: none is certain.
            left = []
        assert self.store.discard(key, mask, note) == len(left)
        if not left:
            if tokens:
                del self.reference[key]
            elif note is not None and self.driver:
                reference.note = note
            return
        reference.note = note if note is not None and self.driver else reference.note
        if changes_nothing:
            return
        if not reference.tokens:
            reference.ssd, reference.ssd_lineage = left, lineage
            reference.ssd_blocks = tuple(entry.ssd.block_ids.tolist())
            assert set(reference.ssd_blocks) <= set(before.block_ids.tolist())
            return
        reference.tokens, reference.lineage = left, lineage
        reference.places = reference.places.keep(np.array(stays), kit.BLOCK_TOKENS)[0]
        if entry.flush is not None:
            num_left = sum(stays[: len(reference.flushed_left)])
            reference.flushed_left, reference.is_cut_after_flush = left[:num_left], True
            reference.flushed_lineage = lineage
            return
        on_ssd = [token for token, is_left in zip(tokens[:was_same], stays, strict=False) if is_left]
        if before is None or was_flushed:  # The flush could not go on; it may have been too far to be undone alone.
            assert entry.ssd is None or before is not None
            on_ssd = on_ssd if entry.ssd is not None else []
        reference.ssd, reference.ssd_lineage = on_ssd or None, lineage
        assert (entry.ssd is None) == (not on_ssd)
        reference.ssd_blocks = tuple(entry.ssd.block_ids.tolist()) if on_ssd else ()

    @rule(key=KEYS)
    def leave_dram(self, key):
        """What is saved from here on is another state of the session."""
        reference = self.reference.get(key)
        if reference is None or not reference.tokens:
            self.store.leave_dram(key)
            return
        if reference.in_use:
            with pytest.raises(EntryInUseError):
                self.store.leave_dram(key)
            return
        self.store.leave_dram(key)
        reference.tokens, reference.places, reference.has_left = [], NOWHERE, reference.flush is not None
        if self.entry(key) is None:
            assert reference.ssd is None
            del self.reference[key]

    @rule(key=KEYS)
    def drop(self, key):
        if key in self.reference and self.reference[key].in_use:
            with pytest.raises(EntryInUseError):
                self.store.drop(key)
        else:
            assert self.store.drop(key) == (key in self.reference)
            self.reference.pop(key, None)
            self.waiting_notes.pop(key, None)

    def teardown(self):
        if hasattr(self, "store"):
            self.go_on()
            try:
                if self.driver and sys.exc_info()[0] is None:  # What is on SSD in the end is looked at, all of it.
                    self.restart(crash=False, is_time=0)
                    for key in "abcd":
                        self.fetch_and_load(key)
                self.store.close()
            finally:
                if self.directory is not None:
                    shutil.rmtree(self.directory)


class Zarr3Machine(StoreMachine):
    driver = "zarr3"


class RawMachine(StoreMachine):
    driver = "raw"


NUM_EXAMPLES = 25
# What fails may depend on threads: no use in shrinking it.
WITH_THREADS = [Phase.explicit, Phase.reuse, Phase.generate]


def run(machine: type[StoreMachine], max_examples: int) -> None:
    phases = WITH_THREADS if machine.driver else list(Phase)
    options = settings(max_examples=max_examples, stateful_step_count=40, deadline=None, phases=phases)
    run_state_machine_as_test(machine, settings=options)


MACHINES = pytest.mark.parametrize("machine", [StoreMachine, Zarr3Machine, RawMachine])


@MACHINES
def test_it_is_as_the_reference(machine):
    run(machine, NUM_EXAMPLES)


@pytest.mark.slow
@MACHINES
def test_it_is_as_the_reference_for_long(machine):
    run(machine, 40 * NUM_EXAMPLES)
