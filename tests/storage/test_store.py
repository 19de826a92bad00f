"""The AttentionStore, told at a capacity of four blocks of four tokens."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ca_jax.storage.config import StoreConfig
from ca_jax.storage.records import MissReason, Residency, SkipReason, StoreClosedError
from ca_jax.storage.store import AttentionStore

from . import store_helpers as kit


def keys(store: AttentionStore) -> set[str]:
    return {info.key for info in store.list()}


def test_a_save_is_complete_only_once_all_of_it_is_written(store):
    kit.save(store, "a", kit.ids(6), kit.make_kv(store.layout, 6))
    grown = store.prepare_save("a", 6, kit.ids(9)[6:])
    grown.write(0, kit.make_kv(store.layout, 3)[0])
    with pytest.raises(ValueError, match=r"of 3 tokens in 3 layers, got 6 \(layer, token\) pairs not written"):
        store.complete_save(grown)
    assert store.num_readable("a") == 6
    store.abort_save(grown)
    assert store.stats().num_aborted_saves == 1
    pending = store.prepare_save("b", 0, kit.ids(6))
    pending.write_all(kit.make_kv(store.layout, 6))
    assert store.prepare_load("b", kit.ids(6)) is None  # Written, yet not published.
    assert store.stats().misses[MissReason.PENDING] == 1


def serve_turn(store, key: str, num_turn: int) -> None:
    """A turn as an engine has it: queued, run with its session pinned, saved if it is not stored."""
    store.enqueue((key, num_turn), key)
    store.pin(key)
    store.dequeue((key, num_turn))
    if store.residency(key) is Residency.ABSENT:
        kit.save(store, key, kit.ids(4), kit.make_kv(store.layout, 4))
    else:
        kit.use(store, key)
    store.unpin(key)


@pytest.mark.parametrize(
    ("policy", "kept"), [("scheduler_aware", {"s101", "s102"}), ("return_aware", {"often", "s102"})]
)
def test_return_aware_eviction_learns_who_comes_back(policy, kept):
    now_s = 0.0
    store = kit.make_store(2, eviction_policy=policy, clock=lambda: now_s)
    for turn in range(103):  # Every fourth is of one session; those of the others are their only ones.
        now_s += 10.0
        serve_turn(store, f"s{turn}" if turn % 4 else "often", turn)
    assert keys(store) == kept


def test_an_aborted_load_is_a_miss(store):
    kit.save(store, "a", kit.ids(5), kit.make_kv(store.layout, 5))
    ticket = store.prepare_load("a", kit.ids(5))
    store.abort_load(ticket)
    stats = store.stats()
    assert (stats.num_hits, stats.misses[MissReason.ABORTED], stats.loaded_bytes) == (0, 1, 0)
    with pytest.raises(ValueError, match="load of 'a' must be open, got one that is aborted"):
        ticket.read(0, np.zeros((2, 5, 2, 5), np.float32))
    with pytest.raises(ValueError, match="an open one of this store, got one of 'a' that is aborted"):
        store.complete_load(ticket)


def test_a_ticket_is_closed_once_and_by_its_own_store(store):
    kv = kit.make_kv(store.layout, 5)
    ticket = store.prepare_save("a", 0, kit.ids(5))
    ticket.write_all(kv)
    stranger = kit.make_store()
    with pytest.raises(ValueError, match="the save must be an open one of this store"):
        stranger.complete_save(ticket)
    assert store.complete_save(ticket)
    for again in (store.complete_save, store.abort_save):
        with pytest.raises(ValueError, match="an open one of this store, got one of 'a' that is done"):
            again(ticket)
    assert not ticket.write_all(kv)
    with pytest.raises(ValueError, match="'a', which has no pin"):
        store.unpin("a")


def test_an_abort_waits_for_the_write_under_way(store):
    """Otherwise blocks that are free again, and soon another session's, would still be written to."""
    kv = kit.make_kv(store.layout, 8)
    ticket = store.prepare_save("a", 0, kit.ids(8))
    with kit.stalled((ticket, "_copy")) as copying:
        writer = threading.Thread(target=ticket.write_all, args=(kv,))
        writer.start()
        copying.wait_held()
        aborter = threading.Thread(target=store.abort_save, args=(ticket,))
        aborter.start()
        aborter.join(0.05)
        assert aborter.is_alive(), "the abort did not wait"
        assert kit.used_blocks(store) == 2
    aborter.join()
    writer.join()
    written = kit.as_bits(store._dram.slab[:2, :, 0, 0])
    np.testing.assert_array_equal(written, kit.as_bits(kv[:, 0, ::4].swapaxes(0, 1)))
    assert kit.used_blocks(store) == 0


def test_a_write_or_read_that_does_not_fit_is_refused(store):
    ticket = store.prepare_save("a", 0, kit.ids(6))
    for layer, shape, dtype, token_offset, message in (
        (0, (2, 6, 2, 5), "float64", 0, r"kv must be float32\[1, 2, 6, 2, 5\], got float64\[1, 2, 6, 2, 5\]"),
        (0, (6, 2, 5), "float32", 0, r"kv must be float32\[1, 2, any, 2, 5\]"),
        (0, (2, 2, 2, 5), "float32", 5, r"within \[0, 6\) of the save, got \[5, 7\)"),
        (0, (2, 2, 2, 5), "float32", -1, r"within \[0, 6\) of the save, got \[-1, 1\)"),
        (3, (2, 6, 2, 5), "float32", 0, "layer must be below 3, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            ticket.write(layer, np.zeros(shape, dtype), token_offset)
    assert ticket.num_missing == 18
    ticket.write_all(kit.make_kv(store.layout, 6))
    store.complete_save(ticket)
    ticket = store.prepare_load("a", kit.ids(6))
    read_only = np.zeros((2, 6, 2, 5), np.float32)
    read_only.flags.writeable = False
    for dst, message in (
        (np.zeros((2, 5, 2, 5), np.float32), "room for 6 tokens and be writable; got 5, writable"),
        (read_only, "room for 6 tokens and be writable; got 6, read-only"),
        (np.zeros((2, 6, 2, 5), np.float16), r"dst must be float32\[2, 6, 2, 5\], got float16"),
    ):
        with pytest.raises(ValueError, match=message):
            ticket.read(0, dst)
    with pytest.raises(ValueError, match="layer must be below 3, got -1"):
        ticket.read(-1, np.zeros((2, 6, 2, 5), np.float32))


@pytest.mark.parametrize("token_ids", [[], [1.5], [[1]], [2**31]])
def test_token_ids_must_be_int32(store, token_ids):
    with pytest.raises(ValueError, match="token_ids must be"):
        store.prepare_save("a", 0, token_ids)
    with pytest.raises(ValueError, match="token_ids must be"):
        store.prepare_load("a", token_ids)


def test_a_store_of_no_dram_skips_every_save():
    store = kit.make_store(num_blocks=0)
    assert store.prepare_save("a", 0, kit.ids(1)) is None
    assert store.prepare_load("a", kit.ids(1)) is None
    assert store.stats().skipped_saves[SkipReason.STORE_OFF] == 1
    assert store.stats().capacity_bytes == 0


def test_a_layout_of_other_blocks_is_refused():
    with pytest.raises(ValueError, match="blocks of 128 tokens, got 4"):
        AttentionStore(kit.make_layout(), StoreConfig())


def test_after_close_every_call_is_refused(store):
    kit.save(store, "a", kit.ids(4), kit.make_kv(store.layout, 4))
    reading = store.prepare_load("a", kit.ids(4))
    writing = store.prepare_save("b", 0, kit.ids(4))
    staging = np.zeros((2, 4, 2, 5), np.float32)
    future = reading.read(0, staging)
    store.close()
    assert future.done()
    assert np.any(staging != 0)
    assert not writing.write_all(kit.make_kv(store.layout, 4))
    for call in (
        lambda: store.list(),
        lambda: store.stats(),
        lambda: store.pin("a"),
        lambda: store.unpin("a"),
        lambda: store.prepare_save("a", 0, kit.ids(1)),
        lambda: store.prepare_load("a", kit.ids(1)),
        lambda: store.complete_save(writing),
        lambda: store.abort_save(writing),
        lambda: store.complete_load(reading),
        lambda: store.abort_load(reading),
        lambda: store.truncate("a", 1),
        lambda: store.drop("a"),
    ):
        with pytest.raises(StoreClosedError):
            call()
    store.close()
    store.touch(lambda: pytest.fail("touched a closed store"))
