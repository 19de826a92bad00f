"""Who is out of time, and who is over what it may hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ca_jax.storage.placement.blocks import BlockAllocator, ChargedBlocks, TenantQuota
from ca_jax.storage.placement.orders import ExpiryQueue, LookAhead, TierOrders
from ca_jax.storage.placement.policy import SchedulerAwarePolicy

from .policy_simulator import Stored, describe


def test_a_session_expires_its_time_after_its_last_use():
    queue = ExpiryQueue()
    queue.set("a", used_s=0.0, ttl_s=10.0)
    queue.set("b", used_s=0.0, ttl_s=5.0)
    queue.set("c", used_s=0.0, ttl_s=None)
    assert queue.pop_expired(4.9) == ()
    queue.set("b", used_s=4.0, ttl_s=5.0)
    assert queue.pop_expired(8.9) == ()
    assert queue.pop_expired(20.0) == ("b", "a")
    assert queue.pop_expired(math.inf) == ()
    assert len(queue) == 0


@pytest.mark.parametrize("ttl_s", [-1.0, math.nan, math.inf])
def test_a_time_to_live_that_is_none_is_refused(ttl_s):
    with pytest.raises(ValueError, match="ttl_s must be a number of seconds >= 0"):
        ExpiryQueue().set("a", 0.0, ttl_s)


@given(
    st.lists(
        st.tuples(st.sampled_from(["set", "forever", "discard", "pop"]), st.sampled_from("abc"), st.integers(0, 20)),
        max_size=60,
    )
)
def test_it_is_a_dict_that_is_searched(steps):
    queue, reference = ExpiryQueue(), {}
    for now, (what, key, number) in enumerate(steps):
        if what == "set":
            queue.set(key, now, number)
            reference[key] = now + number
        elif what == "forever":
            queue.set(key, now, None)
            reference.pop(key, None)
        elif what == "discard":
            queue.discard(key)
            reference.pop(key, None)
        else:
            expired = queue.pop_expired(now)
            assert set(expired) == {key for key, expires in reference.items() if expires <= now}
            times = [reference.pop(key) for key in expired]
            assert times == sorted(times)
        assert len(queue) == len(reference)


def test_a_tenant_gives_up_what_it_is_over():
    quota = TenantQuota(10)
    quota.charge("x", 8)
    quota.charge("y", 10)
    assert quota.excess("x", 2) == 0
    assert quota.excess("x", 5) == 3
    assert quota.excess("y", 1) == 1
    assert quota.excess("new", 10) == 0
    quota.charge("y", -10)
    assert dict(quota.used) == {"x": 8}
    assert quota.admits("x", 10)
    assert not quota.admits("x", 11)


def test_a_quota_below_nothing_and_blocks_never_taken_are_refused():
    with pytest.raises(ValueError, match="quota must be a number of blocks >= 0, or None, got -1"):
        TenantQuota(-1)
    with pytest.raises(ValueError, match="got -2"):
        TenantQuota(None, {"x": -2})
    quota = TenantQuota(10)
    quota.charge("x", 3)
    with pytest.raises(ValueError, match="'x' gives 4 blocks back, but holds 3"):
        quota.charge("x", -4)
    assert dict(quota.used) == {"x": 3}


def test_a_tenant_over_quota_loses_its_own_sessions_only():
    queue = LookAhead()
    orders = TierOrders(queue)
    quota = TenantQuota(4)
    for key, tenant in (("x1", "x"), ("y1", "y"), ("x2", "x"), ("y2", "y")):
        orders.add(key, Stored(key, 2), tenant)
        quota.charge(tenant, 2)
    queue.append(0, "x1")
    policy = SchedulerAwarePolicy()
    assert policy.choose_victims(orders.view(describe, tenant="x"), quota.excess("x", 2)) == ("x2",)
    assert policy.choose_victims(orders.view(describe, tenant="x"), quota.excess("x", 4)) == ("x2", "x1")
    assert policy.choose_victims(orders.view(describe, tenant="x"), quota.excess("x", 5)) == ()


def charged(num_blocks: int = 6, quota_blocks: int | None = 4) -> ChargedBlocks:
    return ChargedBlocks(BlockAllocator(num_blocks), TenantQuota(quota_blocks))


def test_blocks_are_charged_to_who_takes_them():
    blocks = charged()
    assert blocks.alloc("x", 3) == (0, 1, 2)
    assert blocks.alloc("y", 2, after=2) == (3, 4)
    assert (blocks.num_blocks, blocks.num_free, blocks.lacking(1), blocks.lacking(3)) == (6, 1, 0, 2)
    assert blocks.alloc("y", 2) is None
    assert (blocks.excess("x", 1), blocks.excess("x", 3), blocks.excess("y", 2), blocks.excess("z", 5)) == (0, 2, 0, 1)
    blocks.free("x", [1, 0])
    assert (blocks.num_free, blocks.excess("x", 3), blocks.excess("y", 3)) == (3, 0, 1)
    blocks.free("x", [])
    assert blocks.alloc("x", 0) == ()
    assert blocks.excess("x", 4) == 1


def test_what_was_taken_before_is_charged_afterwards():
    allocator = BlockAllocator(6)
    allocator.take([1, 3])
    blocks = ChargedBlocks(allocator, TenantQuota(4))
    blocks.adopt([("x", np.array([3])), ("y", np.array([], np.int64)), ("x", np.array([1, 3]))])
    assert (blocks.num_free, blocks.excess("x", 3), blocks.excess("y", 4)) == (4, 1, 0)
    blocks.free("x", [1, 3])
    assert (blocks.num_free, blocks.excess("x", 4)) == (5, 1), "the other one has block 3"
    blocks.free("x", [3])
    assert (blocks.num_free, blocks.excess("x", 4)) == (6, 0)


def test_a_tenant_that_is_named_has_a_quota_of_its_own():
    quota = TenantQuota.in_bytes(29, {"x": 50, "y": 0}, block_bytes=10)
    quota.charge("x", 4)
    assert [quota.excess(tenant, 3) for tenant in "xyz"] == [2, 3, 1]
    assert [quota.admits(tenant, 3) for tenant in "xyz"] == [True, False, False]
    assert TenantQuota.in_bytes(None, {"x": 50}, block_bytes=10).excess("z", 1 << 60) == 0


def test_a_shared_block_is_charged_once_and_free_when_all_have_given_it_back():
    blocks = charged()
    assert blocks.alloc("x", 4) == (0, 1, 2, 3)
    blocks.share([0, 1])
    blocks.share([1])
    assert [blocks.is_shared(block) for block in range(4)] == [True, True, False, False]
    assert (blocks.num_free, blocks.excess("x", 1)) == (2, 1), "sharing takes neither room nor quota"
    # Held as 0 1 2, 0 1 3 and 1.
    assert blocks.frees([[0, 1, 2], [0, 1, 3], [1]]) == [1, 3, 4]
    assert blocks.frees([[1], [0, 1, 2]]) == [0, 1]
    assert blocks.held_by_none_but([[1], [0, 1, 2]]) == {2}
    assert blocks.held_by_none_but([[0, 1, 3], [0, 1, 2]]) == {0, 2, 3}
    with pytest.raises(ValueError, match="block 3 is freed twice"):
        blocks.free("x", [1, 0, 3, 3])
    assert [blocks.is_shared(block) for block in range(4)] == [True, True, False, False]
    blocks.free("x", [1, 0, 2])
    assert (blocks.num_free, blocks.excess("x", 2)) == (3, 1)
    blocks.free("x", [1, 0, 3])
    assert (blocks.num_free, blocks.is_shared(1), blocks.excess("x", 3)) == (5, False, 0)
    blocks.free("x", [1])
    assert blocks.num_free == 6
