"""Random operations on the AttentionStore against a store that is a dict.

The reference knows tokens and bytes, and not blocks: it learns from the store only which sessions were evicted, and
holds each eviction against the rules (something needed the room; what went was neither pinned nor in use).
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ca_jax.storage import LoadTicket, Residency, SaveTicket

from .store_helpers import BLOCK_TOKENS, as_bits, load, make_kv, make_store

NUM_BLOCKS = 6
KEYS = st.sampled_from("abcd")
LENGTHS = st.integers(1, 11)


@dataclasses.dataclass
class Reference:
    """What one session's stored sequence should be."""

    token_ids: list[int]
    kv: np.ndarray
    saves: list[tuple[SaveTicket, np.ndarray]] = dataclasses.field(default_factory=list)
    loads: list[LoadTicket] = dataclasses.field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        reserved = self.saves[-1][0].stop_token if self.saves else len(self.token_ids)
        return -(-reserved // BLOCK_TOKENS)


class StoreMachine(RuleBasedStateMachine):
    """Drives the store and the reference alike."""

    @initialize(
        dtype=st.sampled_from(["float32", "bfloat16"]), policy=st.sampled_from(["lru", "fifo"]), seed=st.integers(0, 99)
    )
    def open_store(self, dtype, policy, seed):
        self.store = make_store(NUM_BLOCKS, dtype=dtype, eviction_policy=policy)
        self.layout = self.store.layout
        self.random = np.random.default_rng(seed)
        self.reference: dict[str, Reference] = {}
        self.pins: collections.Counter[str] = collections.Counter()
        self.num_evictions = 0

    def random_kv(self, num_tokens: int) -> np.ndarray:
        return make_kv(self.layout, num_tokens, seed=int(self.random.integers(1 << 30)))

    def random_ids(self, num_tokens: int) -> list[int]:
        return self.random.integers(0, 1000, num_tokens).tolist()

    def forget_if_empty(self, key: str) -> None:
        reference = self.reference[key]
        if not reference.token_ids and not reference.saves:
            del self.reference[key]

    @rule(key=KEYS, num_tokens=LENGTHS)
    def prepare_save(self, key, num_tokens):
        reference = self.reference.get(key) or Reference([], self.random_kv(0))
        start = reference.saves[-1][0].stop_token if reference.saves else len(reference.token_ids)
        token_ids = self.random_ids(num_tokens)
        ticket = self.store.prepare_save(key, start, token_ids)

        needed = -(-(start + num_tokens) // BLOCK_TOKENS) - reference.num_blocks
        free = NUM_BLOCKS - sum(other.num_blocks for other in self.reference.values())
        evictable = {
            name: other
            for name, other in self.reference.items()
            if name != key and not self.pins[name] and not other.saves and not other.loads
        }
        room = free + sum(other.num_blocks for other in evictable.values())
        assert (ticket is not None) == (needed <= room), "skipped although room could be made, or the reverse"
        stored = {info.key for info in self.store.list()}
        evicted = self.reference.keys() - stored
        assert evicted <= evictable.keys(), "evicted what is pinned or in use"
        assert not evicted or (ticket is not None and needed > free), "evicted without need"
        self.num_evictions += len(evicted)
        for name in evicted:
            del self.reference[name]
        if ticket is not None:
            reference.saves.append((ticket, self.random_kv(num_tokens)))
            self.reference[key] = reference

    @rule(key=KEYS, wrong=st.sampled_from([-1, 1, 5]))
    def prepare_save_with_a_gap(self, key, wrong):
        reference = self.reference.get(key)
        start = 0
        if reference:
            start = reference.saves[-1][0].stop_token if reference.saves else len(reference.token_ids)
        try:
            self.store.prepare_save(key, start + wrong, [1])
        except ValueError:
            return
        raise AssertionError("a save with a gap was accepted")

    def open_saves(self):
        return [(key, i) for key, ref in sorted(self.reference.items()) for i in range(len(ref.saves))]

    @precondition(lambda self: self.open_saves())
    @rule(data=st.data())
    def write_part(self, data):
        key, i = data.draw(st.sampled_from(self.open_saves()))
        ticket, kv = self.reference[key].saves[i]
        layer = data.draw(st.integers(0, self.layout.num_layers - 1))
        start = data.draw(st.integers(0, ticket.num_tokens - 1))
        stop = data.draw(st.integers(start + 1, ticket.num_tokens))
        assert ticket.write(layer, kv[layer, :, start:stop], start)

    @precondition(lambda self: self.open_saves())
    @rule(data=st.data())
    def finish_save(self, data):
        key, i = data.draw(st.sampled_from(self.open_saves()))
        reference = self.reference[key]
        ticket, kv = reference.saves[i]
        ticket.write_all(kv)
        if i:
            try:
                self.store.complete_save(ticket)
            except ValueError:
                return
            raise AssertionError("a save was completed before an earlier one")
        assert self.store.complete_save(ticket)
        reference.saves.pop(0)
        reference.token_ids = reference.token_ids + ticket.token_ids.tolist()
        reference.kv = np.concatenate([reference.kv, kv], axis=2)

    @precondition(lambda self: self.open_saves())
    @rule(data=st.data())
    def abort_save(self, data):
        key, i = data.draw(st.sampled_from(self.open_saves()))
        reference = self.reference[key]
        aborted = reference.saves[i:]
        self.store.abort_save(reference.saves[i][0])
        del reference.saves[i:]
        self.forget_if_empty(key)
        for ticket, kv in aborted:
            assert not ticket.write_all(kv)
            assert not self.store.complete_save(ticket)

    @rule(key=KEYS, num_tokens=LENGTHS)
    def save_at_once(self, key, num_tokens):
        reference = self.reference.get(key)
        if reference is None or not reference.saves:
            self.prepare_save(key, num_tokens)
            if key in self.reference and self.reference[key].saves:
                ((ticket, kv),) = self.reference[key].saves
                ticket.write_all(kv)
                assert self.store.complete_save(ticket)
                reference = self.reference[key]
                reference.saves.clear()
                reference.token_ids = reference.token_ids + ticket.token_ids.tolist()
                reference.kv = np.concatenate([reference.kv, kv], axis=2)

    @rule(key=KEYS, data=st.data())
    def load_prefix(self, key, data):
        reference = self.reference.get(key)
        stored = reference.token_ids if reference else []
        kept = data.draw(st.integers(0, len(stored)))
        wanted = [*stored[:kept], *([-1] * data.draw(st.integers(0 if kept else 1, 3)))]
        found = load(self.store, key, wanted)
        if not kept:
            assert found is None
        else:
            np.testing.assert_array_equal(as_bits(found), as_bits(reference.kv[:, :, :kept]))

    @rule(key=KEYS)
    def begin_load(self, key):
        reference = self.reference.get(key)
        if reference and reference.token_ids:
            reference.loads.append(self.store.prepare_load(key, reference.token_ids))

    @rule(key=KEYS, completed=st.booleans())
    def end_load(self, key, completed):
        reference = self.reference.get(key)
        if reference and reference.loads:
            ticket = reference.loads.pop(0)
            staging = np.zeros((2, ticket.num_tokens, *reference.kv.shape[3:]), reference.kv.dtype)
            ticket.read(1, staging).result()
            np.testing.assert_array_equal(as_bits(staging), as_bits(reference.kv[1, :, : ticket.num_tokens]))
            (self.store.complete_load if completed else self.store.abort_load)(ticket)

    @rule(key=KEYS, num_tokens=st.integers(0, 12))
    def truncate(self, key, num_tokens):
        reference = self.reference.get(key)
        if reference and (reference.saves or reference.loads):
            try:
                self.store.truncate(key, num_tokens)
            except RuntimeError:
                return
            raise AssertionError("truncated what is in use")
        kept = self.store.truncate(key, num_tokens)
        assert kept == min(num_tokens, len(reference.token_ids) if reference else 0)
        if reference:
            reference.token_ids = reference.token_ids[:num_tokens]
            reference.kv = reference.kv[:, :, :num_tokens]
            self.forget_if_empty(key)

    @rule(key=KEYS)
    def pin(self, key):
        self.store.pin(key)
        self.pins[key] += 1

    @rule(key=KEYS)
    def unpin(self, key):
        if self.pins[key]:
            self.store.unpin(key)
            self.pins[key] -= 1

    @invariant()
    def books_are_exact(self):
        stats = self.store.stats()
        num_blocks = sum(reference.num_blocks for reference in self.reference.values())
        assert stats.used_bytes == num_blocks * self.layout.block_bytes
        assert stats.used_bytes + stats.free_bytes == stats.capacity_bytes == NUM_BLOCKS * self.layout.block_bytes
        assert stats.num_evictions == self.num_evictions
        infos = {info.key: info for info in self.store.list()}
        assert infos.keys() == self.reference.keys()
        for key, reference in self.reference.items():
            info = infos[key]
            assert info.num_tokens == len(reference.token_ids)
            assert info.num_blocks == reference.num_blocks
            assert info.pinned == bool(self.pins[key])
            assert info.in_use == bool(reference.saves or reference.loads)
            assert info.residency is (Residency.DRAM if reference.token_ids else Residency.PENDING)

    def teardown(self):
        if hasattr(self, "store"):
            for reference in self.reference.values():
                for ticket in reference.loads:
                    self.store.abort_load(ticket)
            for key, reference in self.reference.items():
                if reference.token_ids:
                    np.testing.assert_array_equal(
                        as_bits(load(self.store, key, reference.token_ids)), as_bits(reference.kv)
                    )
            self.store.close()


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStoreAgainstReference = StoreMachine.TestCase
