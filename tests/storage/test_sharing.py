"""Sessions that share blocks: what it takes, who may write, who goes when room is needed, and the same on SSD.

Blocks of four tokens. What holds whatever happens is in test_store_properties.
"""

from __future__ import annotations

import numpy as np

from ca_jax.storage.records import Owner, Residency, SkipReason

from . import store_helpers as kit


def block_ids(store, key) -> list[int]:
    return store._entries.get(key).block_ids


def ssd_block_ids(store, key) -> list[int]:
    return store._entries.get(key).ssd.block_ids.tolist()


# In DRAM.


def test_a_tenant_pays_for_a_block_once():
    store = kit.make_store(8, quota_bytes=4 * kit.LAYOUT.block_bytes, tenant_quotas={"bob": kit.LAYOUT.block_bytes})
    alice, bob = Owner(tenant="alice"), Owner(tenant="bob")
    kit.save(store, "a", kit.ids(12), kit.make_kv(kit.LAYOUT, 12), owner=alice)
    for key in "bcd":
        assert store.copy_prefix("a", key, kit.ids(12), alice) == 12
    assert kit.save(store, "b", kit.ids(4, 700), kit.make_kv(kit.LAYOUT, 4), start_token=12)
    assert [kit.info(store, key) is not None for key in "abcd"] == [True] * 4, "four blocks in all"
    assert kit.save(store, "c", kit.ids(4, 700), kit.make_kv(kit.LAYOUT, 4), start_token=12)
    assert kit.info(store, "b") is None, "one more than it may hold, and b's eviction frees one"
    assert store.prepare_save("x", 0, kit.ids(5), bob) is None
    assert store.stats().skipped_saves[SkipReason.TOO_LARGE] == 1
    assert kit.save(store, "x", kit.ids(4), kit.make_kv(kit.LAYOUT, 4), owner=bob)


# On SSD.


def test_what_is_shared_is_written_once_and_read_by_all(open_store, driver):
    store = open_store(8)
    kv = kit.put(store, "a", 14)
    store.copy_prefix("a", "b", [*kit.ids(10), 7])
    more = kit.make_kv(kit.LAYOUT, 5, seed=1)
    kit.save(store, "b", kit.ids(5, 700), more, start_token=10)
    of_b = np.concatenate([kv[:, :, :10], more], axis=2)
    store.settle()
    assert ssd_block_ids(store, "a")[:2] == ssd_block_ids(store, "b")[:2]
    assert store.stats().ssd.flushed_bytes == (4 + 2) * kit.LAYOUT.block_bytes
    assert store.stats().ssd.used_bytes == 6 * kit.SLOT_BYTES
    store = open_store(8)
    assert (store.stats().ssd.used_bytes, store.stats().ssd.num_lost_sessions) == (6 * kit.SLOT_BYTES, 0)
    kit.assert_loads(store, "a", kit.ids(14), kv)
    store.drop("a")
    kit.put(store, "c", 12, first=500, seed=2)  # Into what a alone held.
    assert store.stats().ssd.used_bytes == (4 + 3) * kit.SLOT_BYTES
    kit.assert_loads(store, "b", kit.ids(10) + kit.ids(5, 700), of_b)
    store.truncate("b", 6)
    store = open_store(8)
    kit.assert_loads(store, "b", kit.ids(10), of_b[:, :, :6])


def test_a_branch_is_not_written_before_it_has_something_of_its_own(open_store):
    """A process may die before the branch's turn has ended: then there is no conversation that such KV is of."""
    store = open_store(8)
    kit.put(store, "a", 8)
    store.copy_prefix("a", "b", kit.ids(8), num_dropped=3)
    assert store.settle(kit.PATIENCE_S)
    assert (kit.ssd_tokens(store, "b"), kit.info(store, "b").num_dropped) == (0, 3)
    loading = store.prepare_load("b", kit.ids(8), truncate=True, num_dropped=3)
    assert store.settle(kit.PATIENCE_S)
    assert kit.ssd_tokens(store, "b") == 0
    store.complete_load(loading)
    kit.save(store, "b", [7], kit.make_kv(kit.LAYOUT, 1), start_token=8)
    store.settle()
    assert kit.ssd_tokens(store, "b") == 9


def test_a_branch_waits_for_what_its_source_is_writing(open_store, gates):
    store = open_store(8)
    gates[0].writes.close()
    kit.save(store, "a", kit.ids(9), kit.make_kv(kit.LAYOUT, 9))
    kit.begin_flush(store, gates[0])
    store.copy_prefix("a", "b", kit.ids(8))
    kit.save(store, "b", [7], kit.make_kv(kit.LAYOUT, 1), start_token=8)
    kit.save(store, "c", kit.ids(3, 500), kit.make_kv(kit.LAYOUT, 3))
    store.poll()
    assert [store._entries.get(key).flush is not None for key in "abc"] == [True, False, True]
    gates[0].writes.open()
    assert store.settle(kit.PATIENCE_S)
    assert ssd_block_ids(store, "b")[:2] == ssd_block_ids(store, "a")[:2]
    assert store.stats().ssd.flushed_bytes == (3 + 1 + 1) * kit.LAYOUT.block_bytes


def test_the_source_may_be_evicted_for_its_branch(open_store):
    """SSD has three blocks: what the branch shares of them stays, the rest of the source gives way."""
    store = open_store(8, ssd_blocks=3)
    kv = kit.put(store, "a", 12)
    store.copy_prefix("a", "b", kit.ids(8))
    more = kit.make_kv(kit.LAYOUT, 4, seed=1)
    kit.save(store, "b", kit.ids(4, 700), more, start_token=8)
    store.settle()
    assert (kit.ssd_tokens(store, "a"), kit.ssd_tokens(store, "b")) == (0, 12)
    assert store.stats().ssd.flushed_bytes == 4 * kit.LAYOUT.block_bytes
    assert store.stats().ssd.evicted_bytes == kit.SLOT_BYTES
    store.leave_dram("b")
    kit.assert_loads(store, "b", kit.ids(8) + kit.ids(4, 700), np.concatenate([kv[:, :, :8], more], axis=2))


def test_of_two_tiers_the_longer_prefix_counts_and_of_equals_that_in_dram(open_store):
    store = open_store(12)
    kit.put(store, "near", 9)
    kit.put(store, "far", 14)
    store.leave_dram("far")
    assert store.residency("far") is Residency.SSD
    assert store.find_prefix("", kit.ids(14)) == "far"
    assert store.find_prefix("", kit.ids(14), in_dram=True) == "near"
    assert store.find_prefix("", kit.ids(11)) == "near", "a part of a block is not worth a fetch"
    kit.fetch(store, "far")
    assert store.find_prefix("", kit.ids(11)) == "far"
    store.drop("far")
    kit.save(store, "far", kit.ids(8) + kit.ids(4, 700), kit.make_kv(kit.LAYOUT, 12))
    store.settle()
    store.leave_dram("far")
    assert store.find_prefix("", kit.ids(14)) == "near", "two blocks each"


def test_cutting_a_source_whose_flush_is_under_way_mixes_nothing_up(open_store, gates):
    """Both lose their first block while SSD has the source as it was: the same blocks of DRAM stand elsewhere there."""
    store = open_store(12)
    kit.put(store, "a", 12)
    store.copy_prefix("a", "b", kit.ids(12))
    kv, more = np.array(store._dram.slab[block_ids(store, "a")[1:]]), kit.make_kv(kit.LAYOUT, 4, seed=1)
    store.pin("b")
    kit.save(store, "a", kit.ids(4, 700), more, start_token=12)
    gates[0].writes.close()
    kit.begin_flush(store, gates[0])
    first_block = np.arange(12) < 4
    store.discard("a", first_block)
    store.discard("b", first_block)
    store.unpin("b")
    store.poll()
    gates[0].writes.open()
    assert store.settle(kit.PATIENCE_S)
    assert kit.ssd_tokens(store, "b") == 8
    store.leave_dram("b")
    expected = np.concatenate(list(kv), axis=2)
    kit.wait_until(store, lambda: not store.request("b"))
    kit.assert_same(kit.load(store, "b", kit.ids(8, 104), 4), expected)
