"""Sessions in DRAM that tokens are forgotten from: which stay, where, and whose KV they are served as."""

from __future__ import annotations

import numpy as np
import pytest

from ca_jax.storage import truncation

from . import store_helpers as kit


def assert_serves(store, key: str, token_ids, kv: np.ndarray, num_dropped: int) -> None:
    """These tokens are served with this KV, and what follows them is another's."""
    found = kit.load(store, key, [*token_ids, -1], num_dropped)
    assert found is not None, store.stats().misses
    kit.assert_same(found, kv)


def test_a_shortened_load_of_a_cut_session():
    store = kit.make_store(6)
    kv = kit.make_kv(kit.LAYOUT, 20)
    kit.save(store, "a", kit.ids(20), kv)
    kept = np.array([0, 1, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 19])
    store.discard("a", ~np.isin(np.arange(20), kept))
    for num_tokens in range(1, len(kept) + 1):
        ticket = store.prepare_load("a", 100 + kept, num_dropped=6)
        ticket.shorten(num_tokens)
        staging = np.zeros((2, len(kept), kit.LAYOUT.groups[0].num_kv_heads, kit.LAYOUT.groups[0].head_dim), np.float32)
        ticket.read(1, staging).result()
        store.complete_load(ticket)
        kit.assert_same(staging[:, :num_tokens], np.ascontiguousarray(kv[1][:, kept[:num_tokens]]))
        assert not staging[:, num_tokens:].any()


@pytest.mark.parametrize("wrong", [[0, 1], [[True]], True, np.zeros(3), "no", [True, None]])
def test_a_mask_that_is_none_is_refused(store, wrong):
    kit.save(store, "a", kit.ids(4), kit.make_kv(kit.LAYOUT, 4))
    with pytest.raises(ValueError, match=r"discarded must be bool\[T\], got"):
        store.discard("a", wrong)
    assert kit.info(store, "a").num_tokens == 4
    with pytest.raises(ValueError, match="discarded must be"):
        store.discard("nobody", wrong)
    assert store.discard("nobody", [True]) == 0


def test_repeated_cuts_stay_within_the_blocks_their_tokens_need():
    """Of the oldest tokens nothing is ever copied; of scattered ones what is left is copied together."""
    rng = np.random.default_rng(1)
    for scattered in (False, True):
        store = kit.make_store(40)
        num_tokens, num_cuts, next_token = 0, 0, 0
        kv = kit.make_kv(kit.LAYOUT, 16)
        tokens: list[int] = []
        rows: list[np.ndarray] = []
        while num_cuts < 200:
            new = int(rng.integers(1, 16))
            assert kit.save(store, "a", range(next_token, next_token + new), kv[:, :, :new], start_token=num_tokens)
            tokens += range(next_token, next_token + new)
            rows += [kv[:, :, i] for i in range(new)]
            next_token, num_tokens = next_token + new, num_tokens + new
            if num_tokens < 40:
                continue
            before = kit.info(store, "a").num_blocks
            mask = rng.random(num_tokens) < 0.3 if scattered else kit.mask_of(num_tokens, range(4, 4 + num_tokens // 2))
            mask[-1] = False
            num_tokens = store.discard("a", mask)
            num_cuts += 1
            tokens = [token for token, gone in zip(tokens, mask, strict=True) if not gone]
            rows = [row for row, gone in zip(rows, mask, strict=True) if not gone]
            store.settle()
            held = kit.info(store, "a").num_blocks
            assert held <= kit.LAYOUT.num_blocks(num_tokens) + 2
            assert held == kit.used_blocks(store) <= before
            assert len(store._entries.get("a").places.runs) <= (num_tokens if scattered else 2)
        found = kit.load(store, "a", tokens, kit.info(store, "a").num_dropped)
        kit.assert_same(found, np.stack(rows, axis=2))


def test_without_room_a_session_is_not_copied_together():
    store = kit.make_store(8)
    kv = kit.make_kv(kit.LAYOUT, 32)
    kit.save(store, "a", kit.ids(32), kv)
    kept = np.arange(3, 32, 4)  # One token of each block.
    assert store.discard("a", ~np.isin(np.arange(32), kept)) == 8
    store.settle()
    assert kit.used_blocks(store) == 8
    assert_serves(store, "a", 100 + kept, kv[:, :, kept], 24)
    assert store.discard("a", kit.mask_of(8, [5, 6])) == 6, "two are free now, which are enough"
    kept = np.delete(kept, [5, 6])
    store.settle()
    assert kit.used_blocks(store) == 2
    assert_serves(store, "a", 100 + kept, kv[:, :, kept], 26)


@pytest.mark.parametrize("change", ["nothing", "save", "open save", "open load", "cut", "drop", "begin anew"])
def test_a_session_that_changes_while_it_is_copied_stays_as_it_is(change):
    """What is read meanwhile is not written, and in the end it is copied as it is then: nobody waits for that."""
    store = kit.make_store(30)
    kv = kit.make_kv(kit.LAYOUT, 44)
    kit.save(store, "a", kit.ids(40), kv[:, :, :40])
    kept = np.arange(3, 40, 4)
    store.discard("a", ~np.isin(np.arange(40), kept))
    with kit.stalled((truncation, "copy_together")) as copying:
        store.poll()
        copying.wait_held()
        tokens, rows, num_dropped, ticket = 100 + kept, kv[:, :, kept], 30, None
        assert (kit.info(store, "a").num_blocks, kit.used_blocks(store)) == (10, 13)
        assert_serves(store, "a", tokens, rows, num_dropped)
        if change == "save":
            assert kit.save(store, "a", kit.ids(4, 140), kv[:, :, 40:], start_token=10)
            tokens, rows = np.append(tokens, kit.ids(4, 140)), np.concatenate([rows, kv[:, :, 40:]], axis=2)
        elif change == "open save":
            ticket = store.prepare_save("a", 10, kit.ids(4, 140))
        elif change == "open load":
            ticket = store.prepare_load("a", tokens, num_dropped=num_dropped)
        elif change == "cut":
            store.discard("a", kit.mask_of(10, [1]))
            tokens, rows, num_dropped = np.delete(tokens, 1), np.delete(rows, 1, axis=2), 31
        elif change != "nothing":
            store.drop("a")
            tokens, rows = np.array([], int), rows[:, :, :0]
        if change == "begin anew":
            tokens, rows, num_dropped = kit.ids(40), kit.make_kv(kit.LAYOUT, 40, seed=1), 0
            assert kit.save(store, "a", kit.ids(10, 900), kit.make_kv(kit.LAYOUT, 10, seed=2))
            store.drop("a")
            assert kit.save(store, "a", tokens, rows)
    if ticket is not None:
        while store._truncation.busy:
            store._progress.wait(kit.PATIENCE_S)
            store.poll()
        assert kit.info(store, "a").num_blocks >= 10
        if change == "open save":
            store.abort_save(ticket)
        else:
            staging = np.zeros((2, 10, kit.LAYOUT.groups[0].num_kv_heads, kit.LAYOUT.groups[0].head_dim), np.float32)
            ticket.read(1, staging).result()
            kit.assert_same(staging, np.ascontiguousarray(rows[1]))
            store.complete_load(ticket)
    store.settle()
    assert kit.used_blocks(store) == -(-len(tokens) // 4)
    if len(tokens):
        assert_serves(store, "a", tokens, rows, num_dropped)
