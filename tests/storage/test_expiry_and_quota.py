"""Who is out of time, and who is over what it may hold."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ca_jax.storage.placement.blocks import BlockAllocator, ChargedBlocks
from ca_jax.storage.records import Owner


@pytest.mark.parametrize("ttl_s", [-1.0, math.nan, math.inf])
def test_a_time_to_live_that_is_none_is_refused(ttl_s):
    with pytest.raises(ValueError, match="ttl_s must be a number of seconds >= 0"):
        Owner(ttl_s=ttl_s)


def test_a_quota_below_nothing_and_blocks_never_taken_are_refused():
    with pytest.raises(ValueError, match="quota must be a number of blocks >= 0, or None, got -1"):
        charged(quota_blocks=-1)
    with pytest.raises(ValueError, match="got -2"):
        ChargedBlocks(BlockAllocator(0), None, {"x": -2})
    blocks = charged()
    blocks.alloc("x", 3)
    blocks.alloc("y", 3)
    with pytest.raises(ValueError, match="'x' gives 4 blocks back, but holds 3"):
        blocks.free("x", [0, 1, 2, 3])


def charged(num_blocks: int = 6, quota_blocks: int | None = 4) -> ChargedBlocks:
    return ChargedBlocks(BlockAllocator(num_blocks), quota_blocks)


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
    blocks = ChargedBlocks(allocator, 4)
    blocks.adopt([("x", np.array([3])), ("y", np.array([], np.int64)), ("x", np.array([1, 3]))])
    assert (blocks.num_free, blocks.excess("x", 3), blocks.excess("y", 4)) == (4, 1, 0)
    blocks.free("x", [1, 3])
    assert (blocks.num_free, blocks.excess("x", 4)) == (5, 1), "the other one has block 3"
    blocks.free("x", [3])
    assert (blocks.num_free, blocks.excess("x", 4)) == (6, 0)


def test_a_tenant_that_is_named_has_a_quota_of_its_own():
    quota = ChargedBlocks.in_bytes(BlockAllocator(9), 29, (("x", 50), ("y", 0)), block_bytes=10)
    quota.alloc("x", 4)
    assert [quota.excess(tenant, 3) for tenant in "xyz"] == [2, 3, 1]
    assert [quota.admits(tenant, 3) for tenant in "xyz"] == [True, False, False]
    assert ChargedBlocks.in_bytes(BlockAllocator(9), None, (("x", 50),), block_bytes=10).excess("z", 1 << 60) == 0


def test_a_shared_block_is_charged_once_and_free_when_all_have_given_it_back():
    blocks = charged()
    assert blocks.alloc("x", 4) == (0, 1, 2, 3)
    blocks.share([0, 1])
    blocks.share([1])
    assert [blocks.is_shared(block) for block in range(4)] == [True, True, False, False]
    assert (blocks.num_free, blocks.excess("x", 1)) == (2, 1), "sharing takes neither room nor quota"
    # Held as 0 1 2, 0 1 3 and 1.
    assert list(blocks.frees([[0, 1, 2], [0, 1, 3], [1]])) == [1, 3, 4]
    assert list(blocks.frees([[1], [0, 1, 2]])) == [0, 1]
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
