"""The savers of all turns together: the cap on what waits, and when whose KV is in the store."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.paced import ControlledStore
from ca_jax.config import EngineConfig
from ca_jax.device.transfer import to_device
from ca_jax.kv.save import AsyncSaver, TurnKV, TurnSaver
from ca_jax.kv.write_buffer import WriteBuffer
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.records import Owner
from ca_jax.storage.store import AttentionStore
from ca_jax.telemetry.metrics import EngineMetrics
from tests.storage.store_helpers import as_bits, load, make_kv
from tests.transfers_kit import GatedTransfers

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", block_tokens=4)
TOKEN_BYTES = LAYOUT.token_bytes
KV = make_kv(LAYOUT, 40)
MAX_TOKENS = 10  # Of the write buffer.
PATIENCE_S = 60


class Rig:
    """A write buffer of 10 tokens before a store whose saves stand at a gate, and whose room a test may say comes."""

    def __init__(self, store: AttentionStore, *, is_async: bool = True) -> None:
        self.gate = GatedTransfers()
        self.store = ControlledStore(store, saves=self.gate)
        self.store.room_is_coming = lambda *_: self.is_room_coming
        self.is_room_coming = False
        self.metrics = EngineMetrics()
        self.saver = AsyncSaver()
        config = EngineConfig(write_buffer_gib=MAX_TOKENS * TOKEN_BYTES / GIB, save_group_tokens=4, async_save=is_async)
        self.buffer = WriteBuffer(self.store, self.saver, config, self.metrics)

    def begin(self, key: str, num_tokens: int, start: int = 0) -> TurnSaver:
        """A turn that prefills so many tokens behind those that are stored, and has not ended."""
        turn = self.buffer.begin(TurnKV(key=key, owner=Owner(), start_token=start))
        turn.begin_pass(range(start, start + num_tokens), start)
        for layer in range(LAYOUT.num_layers):
            turn.add_layer(layer, to_device(KV[layer, :, start : start + num_tokens]))
        turn.end_pass()
        return turn

    def write_out(self, num_transfers: int) -> None:
        for _ in range(num_transfers):
            self.gate.wait_held()
            self.gate.let_through()

    def expect_stored(self, key: str, num_tokens: int) -> None:
        found = load(self.store.store, key, range(100))
        if not num_tokens:
            assert found is None
            return
        assert found.shape[2] == num_tokens
        np.testing.assert_array_equal(as_bits(found), as_bits(KV[:, :, :num_tokens]))

    @property
    def num_tokens(self) -> float:
        return self.buffer.num_bytes / TOKEN_BYTES


@pytest.fixture
def store() -> Iterator[AttentionStore]:
    store = AttentionStore(LAYOUT, StoreConfig(dram_gib=16 * LAYOUT.block_bytes / GIB, block_tokens=4))
    yield store
    store.close()


@pytest.fixture
def rig(store) -> Iterator[Rig]:
    rig = Rig(store)
    yield rig
    rig.gate.open()
    rig.saver.close()


def test_what_waits_counts_until_it_is_written(rig):
    assert (rig.num_tokens, rig.buffer.admits(MAX_TOKENS), rig.buffer.admits(100)) == (0, True, True), "it is empty"
    rig.begin("a", 6)
    assert rig.num_tokens == 6
    assert [rig.buffer.admits(more) for more in (4, 5)] == [True, False]
    rig.write_out(1)
    rig.saver.wait_until_pending(3 * TOKEN_BYTES)
    assert [rig.buffer.admits(more) for more in (7, 8)] == [True, False]
    rig.is_room_coming = True
    rig.begin("b", 5)
    assert rig.num_tokens == 3 + 5, "what waits for room in the store is on the device too"


def test_making_room_waits_for_copies_and_no_longer(rig):
    rig.begin("a", 8)
    waiting = threading.Thread(target=rig.buffer.make_room, args=(6,), daemon=True)
    rig.buffer.make_room(2)
    assert rig.metrics.write_stall_s == 0
    waiting.start()
    rig.gate.wait_held()
    assert waiting.is_alive()
    rig.write_out(1)
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert rig.num_tokens == 4
    assert rig.metrics.write_stall_s > 0
    rig.write_out(1)
    rig.buffer.make_room(100)
    assert rig.num_tokens == 0, "more than it holds comes when it is empty"


def test_what_waits_for_the_store_is_given_up_oldest_first_where_nothing_else_makes_room(rig):
    rig.is_room_coming = True
    for key in ("a", "b", "c"):
        rig.buffer.end(rig.begin(key, 3))
    assert rig.num_tokens == 9
    rig.buffer.make_room(4)
    assert rig.num_tokens == 6
    assert [rig.buffer.is_unsaved(key) for key in "abc"] == [False, True, True]
    rig.is_room_coming = False
    rig.gate.open()
    rig.buffer.settle()
    for key, num_tokens in (("a", 0), ("b", 3), ("c", 3)):
        rig.expect_stored(key, num_tokens)
    assert not any(info.pinned for info in rig.store.list())


def test_what_waits_has_its_room_as_soon_as_there_is_some(rig):
    rig.is_room_coming = True
    rig.buffer.end(rig.begin("a", 8))
    rig.is_room_coming = False
    rig.gate.open()
    rig.buffer.make_room(6)
    rig.buffer.collect(wait=True)
    rig.expect_stored("a", 8)


def test_a_turn_runs_until_it_ends_and_is_unsaved_until_its_saves_are_taken_in(rig):
    turn = rig.begin("a", 6)
    assert (rig.buffer.is_running("a"), rig.buffer.is_running("b")) == (True, False)
    assert rig.store.list()[0].pinned, "what a turn builds on may be evicted"
    rig.buffer.end(turn)
    assert (rig.buffer.is_running("a"), rig.buffer.is_unsaved("a")) == (False, True)
    rig.buffer.collect()
    rig.expect_stored("a", 0)
    rig.gate.open()
    rig.buffer.collect(wait=True, key="a")
    assert not rig.buffer.is_unsaved("a")
    assert not rig.store.list()[0].pinned
    rig.expect_stored("a", 6)
    rig.buffer.end(rig.begin("a", 5, start=6))
    rig.buffer.settle()
    rig.expect_stored("a", 11)


def test_a_held_turn_does_not_run_and_is_unsaved(rig):
    rig.is_room_coming = True
    rig.buffer.end(rig.begin("a", 6))
    assert (rig.buffer.is_running("a"), rig.buffer.is_unsaved("a")) == (False, True)
    assert rig.num_tokens == 6


def test_what_waits_for_a_session_to_be_saved_is_done_in_order_and_the_session_is_unsaved_until_then(rig):
    done = []
    rig.buffer.when_saved("a", lambda: done.append(0))
    assert done == [0], "nothing of it is unsaved"
    for key in ("a", "b"):
        rig.buffer.end(rig.begin(key, 3))
    for number in (1, 2):
        rig.buffer.when_saved("a", lambda number=number: done.append(number))
    rig.buffer.collect()
    assert (done, rig.buffer.is_unsaved("a")) == ([0], True)
    rig.write_out(LAYOUT.num_layers)
    rig.buffer.collect(wait=True, key="a")
    assert done == [0, 1, 2]
    assert (rig.buffer.is_unsaved("a"), rig.buffer.is_unsaved("b")) == (False, True)
    rig.expect_stored("a", 3)


def test_what_was_given_up_with_its_session_says_nothing_of_the_turn_behind_it(rig):
    rig.buffer.end(rig.begin("a", 3))
    rig.buffer.when_saved("a", lambda: pytest.fail("it is not saved"))
    rig.gate.wait_held()
    rig.buffer.give_up("a")
    rig.expect_stored("a", 0)
    turn = rig.begin("a", 4)
    rig.gate.let_through(error=OSError("worn out"))
    rig.gate.open()
    rig.buffer.end(turn)
    rig.buffer.settle()
    rig.expect_stored("a", 4)


def test_settling_gives_up_what_the_store_has_no_room_for_in_the_end(rig):
    settled = []

    def settle() -> bool:
        settled.append(len(settled))
        return len(settled) < 3

    rig.store.settle = settle
    rig.is_room_coming = True
    rig.gate.open()
    rig.buffer.end(rig.begin("a", 3))
    rig.buffer.settle()
    assert settled == [0, 1, 2]
    assert (rig.buffer.is_unsaved("a"), rig.num_tokens) == (False, 0)
    rig.expect_stored("a", 0)
    assert not any(info.pinned for info in rig.store.list())


def test_a_save_that_breaks_is_counted_and_ends_the_saving_of_its_turn(rig):
    turn = rig.begin("a", 6)
    rig.gate.wait_held()
    rig.gate.let_through(error=OSError("worn out"))
    rig.gate.open()
    rig.buffer.collect(wait=True)
    for token in range(6, 16):
        turn.add_decoded(token, to_device(KV[:, :, token : token + 1]), 0)
    rig.buffer.end(turn)
    rig.buffer.collect(wait=True)
    assert rig.metrics.failed_saves == 1
    rig.expect_stored("a", 0)
    assert rig.store.stats().used_bytes == 0


def test_a_pass_that_was_given_up_is_no_failure_of_a_save(rig):
    rig.gate.open()
    turn = rig.begin("a", 3)
    turn.begin_pass(range(3, 8), 3)
    rig.buffer.end(turn)
    rig.buffer.collect(wait=True)
    assert rig.metrics.failed_saves == 0
    rig.expect_stored("a", 3)


def test_blocking_saves_are_in_the_store_when_their_turn_has_ended(store):
    rig = Rig(store, is_async=False)
    rig.gate.open()
    turn = rig.begin("a", 8)
    rig.buffer.make_room(6)
    assert rig.num_tokens == 8, "nothing is saved before the end, so there is nothing to wait for"
    rig.buffer.end(turn)
    assert (rig.num_tokens, rig.buffer.is_unsaved("a")) == (0, False)
    rig.expect_stored("a", 8)
    rig.saver.close()
