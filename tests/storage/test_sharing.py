"""Sessions that share blocks: what it takes, who may write, who goes when room is needed, and the same on SSD.

Blocks of four tokens. What holds whatever happens is in test_store_properties.
"""

from __future__ import annotations

from ca_jax.storage.records import Owner, SkipReason

from . import store_helpers as kit

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
