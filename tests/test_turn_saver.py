"""Saving one turn: what is stored of it whatever comes in between, without gaps and nothing twice."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ca_jax.device.transfer import to_device
from ca_jax.kv.save import AsyncSaver, DecodedPart, LayerPart, SaveAbandonedError, TurnKV, TurnSaver
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.records import Owner
from ca_jax.storage.store import AttentionStore
from tests.storage.store_helpers import as_bits, load, make_kv, save

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32", block_tokens=4)
NUM_TOKENS, NUM_BLOCKS, GROUP_TOKENS = 40, 12, 4
KV = make_kv(LAYOUT, NUM_TOKENS)
TOKENS = list(range(100, 100 + NUM_TOKENS))
PADDING = make_kv(LAYOUT, 8, seed=5)
OWNER = Owner(tenant="t", session_id="s")


class Rig:
    """A turn of session "s" over a real store, whose room a test may say is on its way."""

    def __init__(self, monkeypatch) -> None:
        self.store = AttentionStore(LAYOUT, StoreConfig(dram_gib=NUM_BLOCKS * LAYOUT.block_bytes / GIB, block_tokens=4))
        self.saver = AsyncSaver()
        self.is_room_coming = False
        monkeypatch.setattr(self.store, "room_is_coming", lambda *_: self.is_room_coming)

    def begin(self, start_token: int = 0, **options: object) -> TurnSaver:
        turn = TurnKV(key="s", owner=OWNER, start_token=start_token)
        return TurnSaver(self.store, self.saver, turn, GROUP_TOKENS, **options)

    def publish(self) -> list[Exception]:
        """Waits for what was handed in, and does with it as the engine does; what was given up, why."""
        errors = []
        for result in self.saver.poll(wait=True):
            if result.error is None:
                self.store.complete_save(result.ticket)
            else:
                self.store.abort_save(result.ticket)
                errors.append(result.error)
        return errors

    def expect_stored(self, num_tokens: int) -> None:
        """Just the turn's first tokens are stored, with their KV."""
        found = load(self.store, "s", TOKENS)
        if not num_tokens:
            assert found is None
            return
        assert found.shape[2] == num_tokens
        np.testing.assert_array_equal(as_bits(found), as_bits(KV[:, :, :num_tokens]))
        (info,) = self.store.list()
        assert (info.tenant, info.session_id, info.num_tokens) == ("t", "s", num_tokens)
        assert not info.in_use, "a save is open still"

    @property
    def num_saved(self) -> int:
        """Tokens published since the store was made."""
        return self.store.stats().saved_bytes // LAYOUT.token_bytes


@pytest.fixture
def rig(monkeypatch) -> Iterator[Rig]:
    rig = Rig(monkeypatch)
    yield rig
    rig.saver.close()
    rig.store.close()


def padded(layer: int, start: int, stop: int):
    """One layer of a pass over tokens [start, stop), with padding behind that is like nothing else."""
    return to_device(np.concatenate([KV[layer, :, start:stop], PADDING[layer]], axis=1))


def run_layers(turn: TurnSaver, start: int, stop: int, layers: range = range(LAYOUT.num_layers)) -> None:
    for layer in layers:
        turn.add_layer(layer, padded(layer, start, stop))


def run_pass(turn: TurnSaver, start: int, stop: int) -> None:
    turn.begin_pass(TOKENS[start:stop], start)
    run_layers(turn, start, stop)
    turn.end_pass()


def decode(turn: TurnSaver, start: int, stop: int) -> None:
    """Decodes tokens in changing company."""
    for token in range(start, stop):
        rows = np.stack([KV[:, :, (token + other) % NUM_TOKENS] for other in range(3)], axis=2)
        turn.add_decoded(TOKENS[token], to_device(np.roll(rows, token % 3, axis=2)), token % 3)


def test_a_turn_in_passes_and_groups_is_stored_whole(rig):
    turn = rig.begin()
    run_pass(turn, 0, 10)
    run_pass(turn, 10, 15)
    decode(turn, 15, 26)
    assert turn.held_bytes == 3 * LAYOUT.token_bytes, "two groups of 4 are on their way, 3 tokens are not"
    turn.end()
    assert (turn.is_held, turn.held_bytes) == (False, 0)
    assert rig.publish() == []
    rig.expect_stored(26)
    assert (rig.num_saved, rig.store.stats().num_saves) == (26, 5)


@pytest.mark.parametrize("num_stored", [1, 5, 10, 12, 15])
def test_what_is_stored_already_is_not_saved_again(rig, num_stored):
    """A history that is recomputed is handed in again, in passes that begin within it, end within it, or at its end."""
    save(rig.store, "s", TOKENS[:num_stored], KV[:, :, :num_stored], owner=OWNER)
    turn = rig.begin(num_stored)
    run_pass(turn, 0, 10)
    run_pass(turn, 10, 15)
    decode(turn, 15, 18)
    turn.end()
    assert rig.publish() == []
    rig.expect_stored(18)
    assert rig.num_saved == 18


def test_layers_leave_as_they_come(rig):
    turn = rig.begin()
    turn.begin_pass(TOKENS[:10], 0)
    turn.add_layer(0, padded(0, 0, 10))
    rig.saver.wait_until_pending(0)
    (ticket,) = rig.store._entries.get("s").open_saves
    assert ticket.num_missing == 2 * 10, "layer 0 was not written before the pass had ended"
    run_layers(turn, 0, 10, range(1, 3))
    assert rig.saver.num_open == 0
    turn.end_pass()
    assert rig.publish() == []
    rig.expect_stored(10)


# Where room is on its way.


def test_what_waits_for_room_is_held_in_order_and_goes_when_there_is_some(rig):
    turn = rig.begin()
    run_pass(turn, 0, 10)
    rig.is_room_coming = True
    run_pass(turn, 10, 14)
    decode(turn, 14, 20)
    turn.end()
    assert turn.is_held
    assert turn.held_bytes == (3 * PADDING[0].nbytes + 4 * LAYOUT.token_bytes) + 6 * LAYOUT.token_bytes
    assert rig.publish() == []
    rig.expect_stored(10)
    turn.submit_held()
    assert turn.is_held, "there is no room yet"
    rig.is_room_coming = False
    turn.submit_held()
    assert (turn.is_held, turn.held_bytes) == (False, 0)
    assert rig.publish() == []
    rig.expect_stored(20)


@pytest.mark.parametrize("num_layers_before", [0, 1, 3])
def test_room_may_come_in_the_middle_of_a_pass(rig, num_layers_before):
    turn = rig.begin()
    rig.is_room_coming = True
    turn.begin_pass(TOKENS[:10], 0)
    run_layers(turn, 0, 10, range(num_layers_before))
    assert turn.is_held
    rig.is_room_coming = False
    turn.submit_held()
    assert not turn.is_held
    assert rig.saver.num_open == 0, "a pass that has not ended was ended"
    run_layers(turn, 0, 10, range(num_layers_before, LAYOUT.num_layers))
    turn.end_pass()
    decode(turn, 10, 12)
    turn.end()
    assert rig.publish() == []
    rig.expect_stored(12)


def test_what_is_held_can_be_given_up(rig):
    turn = rig.begin()
    run_pass(turn, 0, 10)
    rig.is_room_coming = True
    decode(turn, 10, 20)
    turn.end()
    turn.give_up()
    assert (turn.is_held, turn.held_bytes) == (False, 0)
    rig.is_room_coming = False
    turn.submit_held()
    assert rig.publish() == []
    rig.expect_stored(10)


# Where there is none.


def test_what_finds_no_room_ends_the_saving_and_what_is_stored_has_no_gap(rig):
    num_kept = 3 * GROUP_TOKENS
    save(rig.store, "other", range(4 * (NUM_BLOCKS - 3)), np.resize(KV, (3, 2, 4 * (NUM_BLOCKS - 3), 2, 8)))
    rig.store.pin("other")
    turn = rig.begin()
    decode(turn, 0, num_kept + GROUP_TOKENS)
    assert turn.held_bytes == 0, "what is not saved is not held either"
    rig.publish()
    rig.store.unpin("other")
    rig.store.drop("other")
    decode(turn, num_kept + GROUP_TOKENS, NUM_TOKENS)
    run_pass(turn, 0, 10)
    turn.end()
    assert (turn.is_held, rig.publish()) == (False, [])
    rig.expect_stored(num_kept)


def test_a_pass_that_finds_no_room_is_computed_and_not_saved(rig):
    save(rig.store, "other", range(4 * NUM_BLOCKS), np.resize(KV, (3, 2, 4 * NUM_BLOCKS, 2, 8)))
    rig.store.pin("other")
    turn = rig.begin()
    run_pass(turn, 0, 10)
    decode(turn, 10, 20)
    turn.end()
    assert (turn.is_held, turn.held_bytes, rig.publish(), rig.saver.pending_bytes) == (False, 0, [], 0)
    assert rig.store.list()[0].key == "other"


# Given up.


@pytest.mark.parametrize("how", ["give_up", "end"])
@pytest.mark.parametrize("num_layers", [0, 2, 3])
def test_a_pass_that_is_given_up_in_the_middle_takes_nothing_with_it(rig, num_layers, how):
    turn = rig.begin()
    run_pass(turn, 0, 10)
    turn.begin_pass(TOKENS[10:20], 10)
    run_layers(turn, 10, 20, range(num_layers))
    getattr(turn, how)()
    run_layers(turn, 10, 20, range(num_layers, 3))  # A failure may be seen late.
    turn.end_pass()
    decode(turn, 20, 30)
    turn.end()
    errors = rig.publish()
    assert [type(error) for error in errors] == [SaveAbandonedError]
    assert str(errors[0]) == "the pass over 10 tokens was given up"
    rig.expect_stored(10)
    assert rig.store.stats().used_bytes == 3 * LAYOUT.block_bytes
    next_turn = rig.begin(10)
    run_pass(next_turn, 10, 24)
    next_turn.end()
    assert rig.publish() == []
    rig.expect_stored(24)


def test_a_pass_that_is_held_can_be_given_up_in_the_middle(rig):
    turn = rig.begin()
    rig.is_room_coming = True
    turn.begin_pass(TOKENS[:10], 0)
    run_layers(turn, 0, 10, range(1))
    turn.give_up()
    assert (turn.is_held, turn.held_bytes) == (False, 0)
    rig.is_room_coming = False
    run_layers(turn, 0, 10, range(1, 3))
    turn.end_pass()
    turn.end()
    assert (rig.publish(), rig.saver.pending_bytes) == ([], 0)
    rig.expect_stored(0)


def test_decoded_tokens_that_are_given_up_are_not_saved_later(rig):
    turn = rig.begin()
    run_pass(turn, 0, 10)
    decode(turn, 10, 16)  # A group of 4, and 2 that wait for theirs.
    turn.give_up()
    decode(turn, 16, 20)
    turn.end()
    assert rig.publish() == []
    rig.expect_stored(14)


# At the end of the turn.


def test_blocking_saves_begin_at_the_end_of_the_turn_and_are_all_there_then(rig):
    turn = rig.begin(at_end=True)
    run_pass(turn, 0, 10)
    run_pass(turn, 10, 15)
    decode(turn, 15, 21)
    turn.submit_held()
    assert (rig.saver.num_open, rig.saver.pending_bytes, rig.store.list()) == (0, 0, ())
    assert turn.is_held
    assert turn.held_bytes == 2 * 3 * PADDING[0].nbytes + 21 * LAYOUT.token_bytes
    turn.end()
    assert not turn.is_held
    assert rig.publish() == []
    rig.expect_stored(21)


def test_blocking_saves_of_a_turn_that_is_given_up_never_begin(rig):
    turn = rig.begin(at_end=True)
    run_pass(turn, 0, 10)
    turn.give_up()
    turn.end()
    assert (turn.is_held, rig.publish()) == (False, [])
    rig.expect_stored(0)


@pytest.mark.parametrize("at", ["a layer", "a group"])
def test_a_copy_that_cannot_begin_ends_the_saving_and_not_the_turn(rig, monkeypatch, at):
    """As where the host has no pinned memory left; what was saved before stands, and the ticket is closed."""
    turn = rig.begin()
    run_pass(turn, 0, 8)
    if at == "a layer":
        turn.begin_pass(TOKENS[8:16], 8)
        turn.add_layer(0, padded(0, 8, 16))
    with monkeypatch.context() as patch:
        patch.setattr(LayerPart if at == "a layer" else DecodedPart, "on_host", broken)
        if at == "a layer":
            for layer in (1, 2):
                turn.add_layer(layer, padded(layer, 8, 16))
            turn.end_pass()
        else:
            decode(turn, 8, 12)
    decode(turn, 16, 20)
    turn.end()
    (error,) = rig.publish()
    assert str(error) == "no memory"
    rig.expect_stored(8)
    assert rig.saver.pending_bytes == 0


def broken(_: object) -> None:
    raise MemoryError("no memory")
