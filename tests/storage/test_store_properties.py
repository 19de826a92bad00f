"""Random operations on the AttentionStore against a store that is a dict, with DRAM alone and with either SSD.

KV is a function of the tokens before it, of those too that were discarded since, so that whatever is loaded can be held
against what it must be. The reference knows tokens, and not blocks or threads: it learns from the store what was
evicted, flushed and fetched meanwhile, and holds each against the rules. With an ample SSD nothing may ever be lost;
with a small one, what did not fit may. Reads, writes and the catalog can be held back, so that whatever else may happen
does so while they are under way.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import itertools
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from ca_jax.storage.catalog.catalog import CatalogReader
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.placement.blocks import ChargedBlocks
from ca_jax.storage.records import EntryInUseError, FlushFailure, MissReason, Owner, Residency
from ca_jax.storage.tickets import LoadTicket, SaveTicket
from ca_jax.storage.tiers.mover import FlushTask
from ca_jax.storage.tokens import PLAIN, Lineage, SsdCopy, TokenPlaces

from . import store_helpers as kit

NUM_BLOCKS = 6
AMPLE = 64  # Blocks of SSD that hold all there can be, old and new states together.
KEYS = st.sampled_from("abcd")
LENGTHS = st.integers(1, 11)
WHICH = st.integers(0, 1 << 20)  # One of those there are, which depends on threads: what is drawn must not.
NOWHERE = TokenPlaces()
TENANTS = {"a": "x", "b": "x", "c": "x", "d": "y"}


class Token(NamedTuple):
    """A token whose KV is known."""

    token_id: int
    seen: bytes
    """A digest of all that its KV was computed behind, and of itself."""


def tokens_of(token_ids: list[int], behind: list[Token]) -> list[Token]:
    """Tokens that are computed behind others."""
    seen, tokens = behind[-1].seen if behind else b"", []
    for token_id in token_ids:
        seen = hashlib.shake_128(seen + token_id.to_bytes(4, "little", signed=True)).digest(16)
        tokens.append(Token(token_id, seen))
    return tokens


def ids_of(tokens: list[Token]) -> list[int]:
    return [token.token_id for token in tokens]


def kv_of(layout: KVLayout, tokens: list[Token]) -> np.ndarray:
    """Their KV, `[L, 2, T, K, H]`: any bits."""
    return np.stack([row_of(layout, token.seen) for token in tokens], axis=2)


@functools.lru_cache(maxsize=1 << 14)
def row_of(layout: KVLayout, seen: bytes) -> np.ndarray:
    """KV of one token, `[L, 2, K, H]`."""
    shape = (layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)
    num_bytes = int(np.prod(shape)) * layout.numpy_dtype.itemsize
    return np.frombuffer(hashlib.shake_128(seen).digest(num_bytes), layout.numpy_dtype).reshape(shape)


def lineage_after(lineage: Lineage, mask: list[bool], num_stored: int) -> Lineage:
    """What has been dropped once a mask was."""
    stays = [i for i, gone in enumerate(mask) if not gone] + list(range(len(mask), num_stored))
    dropped = [i for i, gone in enumerate(mask) if gone and stays and i < stays[-1]]
    if not dropped:
        return lineage
    num_plain = dropped[0] if lineage.num_plain is None else min(dropped[0], lineage.num_plain)
    return Lineage(lineage.num_dropped + len(dropped), num_plain)


def num_common(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))


def num_blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // kit.BLOCK_TOKENS)


@dataclasses.dataclass
class Reference:
    """What should be known of one session."""

    tokens: list[Token] = dataclasses.field(default_factory=list)
    """Published in DRAM."""
    places: TokenPlaces = NOWHERE
    """Where they lie."""
    lineage: Lineage = PLAIN
    ssd: list[Token] | None = None
    ssd_blocks: tuple[int, ...] = ()
    ssd_copy: SsdCopy | None = None
    """The books' own, when it was looked at last: another one after each flush, even into the same blocks."""
    num_flushes: int = 0
    """Of all sessions, by then: a cut makes another copy too."""
    ssd_lineage: Lineage = PLAIN
    flush: FlushTask | None = None
    """Under way when it was looked at last."""
    flushed: list[Token] = dataclasses.field(default_factory=list)
    """What it writes."""
    flushed_left: list[Token] = dataclasses.field(default_factory=list)
    """What is left of it by now."""
    flushed_lineage: Lineage = PLAIN
    has_left: bool = False
    """Whether it is another state than what is in DRAM."""
    is_cut_after_flush: bool = False
    """Whether a flush was under way when tokens left: SSD forgets them when it has ended."""
    saves: list[tuple[SaveTicket, list[Token]]] = dataclasses.field(default_factory=list)
    loads: list[LoadTicket] = dataclasses.field(default_factory=list)
    is_borrowed: bool = False
    """Whether it has nothing but what it began with, which was another's: SSD does not get that."""
    note: bytes = b""
    pinned: bool = False
    ttl_s: float | None = None
    deferred_s: float = -1.0
    """When its time was over last while it had to stay."""

    @property
    def stop(self) -> int:
        return self.saves[-1][0].stop_token if self.saves else len(self.tokens)

    @property
    def stop_place(self) -> int:
        return self.places.num_places + sum(len(tokens) for _, tokens in self.saves)

    @property
    def in_use(self) -> bool:
        return bool(self.saves or self.loads)

    def readable(self) -> tuple[list[Token], Lineage]:
        """What can be loaded, perhaps after a fetch."""
        return (self.tokens, self.lineage) if self.tokens else (self.ssd or [], self.ssd_lineage)


class StoreMachine(RuleBasedStateMachine):
    """Drives the store and the reference alike."""

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
        self.catalog: kit.Stall | None = None

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
        return collections.Counter(itertools.chain(*tables, *(move.dram_blocks for move in moves)))

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
        self.may_evict = True
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
        ticket.write_all(self.kv_of_save(key, i))
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
                ticket.write_all(self.kv_of_save(key, 0))
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

    # Forgetting and keeping.

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
            self.catalog = kit.Stall()
            self.store._ssd._mover._put_change(self.catalog)

    @rule()
    def go_on(self):
        """Holds nothing back any more."""
        for tier in self.gates:
            tier.reads.open()
            tier.writes.open()
        if self.catalog is not None:
            self.catalog.end()
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

    @rule(key=KEYS, priority=st.integers(-1, 1))
    def enqueue(self, key, priority):
        self.num_jobs += 1
        self.jobs.append((self.num_jobs, key))
        self.store.enqueue(*self.jobs[-1], priority)

    @rule(which=WHICH)
    def dequeue(self, which):
        if self.jobs:
            self.store.dequeue(self.jobs.pop(which % len(self.jobs))[0])

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
                assert entry.ssd.num_tokens <= len(flushed), "on SSD is what nobody saved"
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
            reference.flush, reference.is_cut_after_flush, reference.has_left = flush, False, False
            reference.flushed = reference.tokens[: flush.record.num_tokens] if flush else []
            reference.flushed_left = reference.flushed
            reference.flushed_lineage = flush.record.lineage if flush else PLAIN
        stored = [] if entry is None else entry.token_ids.tolist()
        if stored and not reference.tokens:  # Fetched.
            assert stored == ids_of(reference.ssd)
            reference.tokens, reference.lineage = reference.ssd, reference.ssd_lineage
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


def check_books(blocks: ChargedBlocks, tables: list[tuple[str, list[int]]]) -> int:
    """Blocks are taken, counted and charged as tenants' tables hold them; how many."""
    held = collections.Counter(block for _, table in tables for block in table)
    taken = {block for block, is_taken in enumerate(blocks._taken) if is_taken}
    assert taken == held.keys()
    assert blocks.num_free + len(held) == blocks.num_blocks
    assert blocks._others == {block: number - 1 for block, number in held.items() if number > 1}
    holders = {(tenant, block) for tenant, table in tables for block in table}
    assert len(holders) == len(held), "no two tenants hold a block"
    assert collections.Counter(tenant for tenant, _ in holders) == collections.Counter(blocks._used)
    return len(held)


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
