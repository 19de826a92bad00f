"""What moves between the tiers and when, told at a few blocks of four tokens."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from ca_jax.storage.records import FlushFailure, Owner, Residency, SkipReason

from . import store_helpers as kit


@pytest.fixture
def open_store(open_store):
    """The same; who is needed last goes first, and no part of DRAM is kept free, by default."""
    return functools.partial(open_store, dram_free_fraction=0.0, eviction_policy="scheduler_aware")


def where(store, residency: Residency) -> str:
    """The keys of the sessions that are there."""
    return "".join(sorted(info.key for info in store.list() if info.residency is residency))


def on_ssd(open_store, sizes: dict[str, int], num_blocks: int = 6, **options):
    """A store of sessions of so many tokens, all of which are on SSD only."""
    store = open_store(num_blocks, **options)
    for key, num_tokens in sizes.items():
        kit.put(store, key, num_tokens)
    store.close()
    return open_store(num_blocks, **options)


# Ahead of need.


def test_a_part_of_dram_is_kept_free_of_what_is_on_ssd(open_store, gates):
    store = open_store(6, dram_free_fraction=0.5, eviction_policy="lru")
    gates[0].writes.close()
    for key in "abcde":
        kit.save(store, key, kit.ids(4), kit.make_kv(kit.LAYOUT, 4))
        store.poll()
    assert where(store, Residency.DRAM) == "abcde", "evicted what is not on SSD"
    gates[0].writes.open()
    assert store.settle(kit.PATIENCE_S)
    stats = store.stats()
    assert kit.used_blocks(store) == 3
    assert (stats.num_evictions, stats.num_sessions, stats.ssd.num_sessions) == (2, 5, 5)
    assert len(where(store, Residency.SSD)) == 2


def test_waiting_jobs_are_fetched_in_the_order_of_the_queue(open_store, gates):
    store = on_ssd(open_store, {"a": 8, "b": 7, "c": 6, "d": 5}, num_blocks=4)
    gates[1].reads.close()
    for job, key in enumerate("cadb"):
        store.enqueue(job, key)
    store.poll()
    assert where(store, Residency.PENDING) == "ac", "there is room for two"
    gates[1].reads.open()
    kit.wait_until(store, lambda: where(store, Residency.DRAM) == "ac")
    store.settle()
    assert where(store, Residency.SSD) == "bd", "what waits longer pushes nothing out"
    store.dequeue(0)
    store.settle()
    assert where(store, Residency.DRAM) == "ad", "c has run: it makes room for the next in the queue"
    assert store.stats().ssd.num_fetches == 3
    for key, num_tokens in (("a", 8), ("d", 5)):
        kit.assert_same(kit.load(store, key, kit.ids(num_tokens)), kit.make_kv(kit.LAYOUT, num_tokens))
    assert store.stats().num_hits_from_ssd == 2


def test_a_late_ssd_evicts_nothing_for_what_is_not_fetched(open_store, gates):
    store = on_ssd(open_store, {"a": 8, "b": 8}, num_blocks=4)
    gates[1].reads.close()
    store.enqueue(0, "a")
    assert store.request("a")
    gates[1].reads.wait_held()
    gates[1].let_time_pass(6)
    kit.wait_until(store, lambda: store.residency("a") is Residency.SSD)
    kit.save(store, "n", kit.ids(8), kit.make_kv(kit.LAYOUT, 8))
    store.enqueue(1, "b")
    store.poll()
    assert where(store, Residency.DRAM) == "n"
    assert store.stats().num_evictions == 0
    gates[1].reads.open()
    kit.wait_until(store, lambda: not store._ssd._mover.is_late)
    store._ssd._late_until_s = -np.inf  # The pause is over: n may be written, and leave.
    kit.wait_until(store, lambda: store.residency("b") is Residency.DRAM)


# When it is needed.


def test_a_request_waits_for_a_flush_that_will_make_room(open_store, gates):
    store = on_ssd(open_store, {"a": 8}, num_blocks=4)
    gates[1].writes.close()
    kit.save(store, "n", kit.ids(12), kit.make_kv(kit.LAYOUT, 12))
    kit.begin_flush(store, gates[1])
    store.enqueue(0, "a")
    assert store.request("a"), "n may leave once it is on SSD"
    assert store.residency("a") is Residency.SSD
    gates[1].writes.open()
    kit.fetch(store, "a")
    kit.assert_same(kit.load(store, "a", kit.ids(8)), kit.make_kv(kit.LAYOUT, 8))
    assert store.residency("n") is Residency.SSD


# SSD full, and quotas.


@pytest.mark.parametrize(("policy", "goes"), [("scheduler_aware", "b"), ("lru", "a"), ("fifo", "a")])
def test_on_a_full_ssd_the_policy_chooses_and_waiting_sessions_stay_while_there_are_others(open_store, policy, goes):
    store = open_store(6, ssd_blocks=4, eviction_policy=policy)
    kit.put(store, "a", 8)
    kit.put(store, "b", 8)
    store.enqueue(0, "a")
    kit.put(store, "c", 8)
    assert {info.key for info in store.list() if info.ssd_tokens} == {*"abc"} - {goes}
    stats = store.stats().ssd
    assert (stats.num_evictions, stats.evicted_bytes) == (1, 2 * kit.SLOT_BYTES)
    assert store.residency(goes) is Residency.DRAM
    kit.put(store, "d", 16)
    assert [info.key for info in store.list() if info.ssd_tokens] == ["d"], "waiting sessions too, if need be"
    kit.put(store, "e", 20)
    assert store.stats().ssd.failed_flushes[FlushFailure.TOO_LARGE] == 1


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


def test_a_tenant_over_its_quota_loses_its_own_sessions_only(open_store):
    store = open_store(40, quota_bytes=4 * kit.SLOT_BYTES)
    alice, bob = Owner(tenant="alice"), Owner(tenant="bob")
    kit.put(store, "a", 8, owner=alice)
    kit.put(store, "x", 8, owner=bob)
    kit.put(store, "b", 8, owner=alice)
    kit.put(store, "c", 8, owner=alice)
    kept = {info.key for info in store.list() if info.ssd_tokens}
    assert kept == {"b", "c", "x"}
    kit.put(store, "d", 20, owner=alice)
    assert store.stats().ssd.failed_flushes[FlushFailure.TOO_LARGE] == 1
    assert {info.key for info in store.list() if info.ssd_tokens} == kept
    assert store.stats().num_evictions == 0, "in DRAM she is within it"


def test_what_is_prefetched_for_a_tenant_fits_its_quota_together(open_store):
    options = {"num_blocks": 40, "quota_bytes": 4 * kit.SLOT_BYTES}  # 17 blocks of DRAM, 4 of SSD.
    alice, bob = Owner(tenant="alice"), Owner(tenant="bob")
    store = open_store(**options)
    for key, owner in (("a", alice), ("b", alice), ("x", bob)):
        kit.put(store, key, 8, owner=owner)
    store = open_store(**options)
    with store.pinned("big"):
        assert kit.save(
            store, "big", range(56), kit.make_kv(kit.LAYOUT, 56), owner=alice
        )  # Beside it either of hers has room.
        for job, key in enumerate("abx"):
            store.enqueue(job, key)
        store.settle()
        assert where(store, Residency.DRAM) == "abigx", "hers in the queue's order, his as if she were not there"
        assert store.stats().num_evictions == 0


def test_a_tenant_at_its_quota_does_not_fill_the_places_of_fetches(open_store):
    options = {"num_blocks": 60, "ssd_blocks": 20, "quota_bytes": 9 * kit.SLOT_BYTES}  # 38 blocks of DRAM.
    alice, bob = Owner(tenant="alice"), Owner(tenant="bob")
    store = open_store(**options)
    hers = "abcdefghi"
    for key in hers:
        kit.put(store, key, 4, owner=alice)
    kit.put(store, "x", 4, owner=bob)
    store = open_store(**options)
    with store.pinned("0"):
        assert kit.save(store, "0", range(152), kit.make_kv(kit.LAYOUT, 152), owner=alice)
        kit.put(store, "1", 60, owner=bob)
        for job, key in enumerate(f"{hers}x"):
            store.enqueue(job, key)
        store.settle()
        assert where(store, Residency.DRAM) == "01x"
        assert store.stats().num_evictions == 0, "room was made for fetches that may not be"


def test_a_session_is_forgotten_in_both_tiers_when_its_time_is_over(open_store):
    clock = kit.StoppedClock()
    store = open_store(8, clock=clock, ttl_s=10.0)
    kit.put(store, "a", 4)
    kit.put(store, "b", 4, owner=Owner(ttl_s=100.0))
    kit.put(store, "c", 4)
    kit.put(store, "d", 4)
    kit.put(store, "e", 4)
    store.set_pinned("c", True)
    store.enqueue(0, "d")
    clock.now_s = 9.0
    kit.use(store, "e")
    clock.now_s = 10.0
    store.poll()
    assert where(store, Residency.DRAM) == "bcde"
    assert store.stats().num_expired == 1
    assert store.stats().ssd.num_sessions == 4
    store.close()
    clock.now_s = 50.0
    store = open_store(8, clock=clock, ttl_s=10.0)
    store.poll()
    assert where(store, Residency.SSD) == "bc", "whose job no longer waits is forgotten after a restart too"
    store.set_ttl("b", None)
    clock.now_s = 1e6
    store.poll()
    assert where(store, Residency.SSD) == "bc"


@pytest.mark.parametrize("restarts", [False, True], ids=["", "over a restart"])
def test_what_is_pinned_leaves_dram_and_not_the_ssd(open_store, restarts):
    store = open_store(4, ssd_blocks=4)
    kit.put(store, "a", 8)
    store.set_pinned("a", True)
    if restarts:
        assert store.settle(kit.PATIENCE_S)
        store = open_store(4, ssd_blocks=4)
    kit.put(store, "b", 12)
    assert store.stats().ssd.failed_flushes[FlushFailure.NO_ROOM] >= 1
    assert store.residency("a") is Residency.SSD
    store.set_pinned("a", False)
    kit.save(store, "b", [7], kit.make_kv(kit.LAYOUT, 1), start_token=12)
    store.settle()
    assert [info.key for info in store.list()] == ["b"]


def test_what_is_saved_behind_a_flush_that_found_no_room_is_written_at_once(open_store):
    store = open_store(4, ssd_blocks=4, clock=kit.StoppedClock())
    kit.put(store, "a", 8)
    store.set_pinned("a", True)
    assert store.settle(kit.PATIENCE_S)
    assert kit.save(store, "b", kit.ids(12), kit.make_kv(kit.LAYOUT, 12))
    store.poll()
    assert store.stats().ssd.failed_flushes[FlushFailure.NO_ROOM] == 1
    store.set_pinned("a", False)
    kit.save(store, "b", [7], kit.make_kv(kit.LAYOUT, 1), start_token=12)
    assert store.settle(kit.PATIENCE_S)
    assert kit.ssd_tokens(store, "b") == 13
