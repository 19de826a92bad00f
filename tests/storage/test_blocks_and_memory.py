"""The free list, who is charged for blocks, the slab, and host memory."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np
import pytest

from ca_jax.storage.placement.blocks import ChargedBlocks
from ca_jax.storage.tiers.dram import DramTier, host_array, touch

from .store_helpers import make_layout


def test_what_a_tenant_does_not_hold_is_not_freed_and_what_is_free_goes_lowest_first():
    blocks = ChargedBlocks(4, None)
    blocks.alloc("x", 3)
    with pytest.raises(ValueError, match="block 3 is freed twice"):
        blocks.free("x", [0, 3])
    with pytest.raises(ValueError, match="block 1 is freed twice"):
        blocks.free("x", [1, 1])
    with pytest.raises(ValueError, match=r"in \[0, 4\), got 4"):
        blocks.free("x", [4])
    assert blocks.num_free == 1
    blocks.alloc("y", 1)
    with pytest.raises(ValueError, match="'x' gives 4 blocks back, but holds 3"):
        blocks.free("x", [0, 1, 2, 3])
    blocks.free("y", [3])
    blocks.free("x", [0, 1, 2])
    assert blocks.alloc("x", 4) == (0, 1, 2, 3)
    for gone in ([2, 3], [0]):
        blocks.free("x", gone)
    assert blocks.alloc("x", 2) == (0, 2), "the lowest that are free"


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8])
def test_host_arrays_are_zeroed_aligned_and_of_their_own(dtype):
    a, b = host_array((3, 5, 7), dtype), host_array((3, 5, 7), dtype)
    assert a.dtype == dtype
    assert a.ctypes.data % 4096 == 0
    assert a.flags.c_contiguous
    assert a.flags.writeable
    a[...] = 1
    assert touch(a) > 0
    assert np.all(a == 1)
    assert np.all(b == 0)


def test_a_capacity_that_cannot_be_is_refused():
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for capacity_bytes, message in (
        (10, r"at least one block of 960 bytes \(4 tokens\), got 10"),
        (machine_bytes + 1, f"at most this machine's {machine_bytes} bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            DramTier(make_layout(), capacity_bytes)


def test_a_tenant_that_is_named_has_a_quota_of_its_own():
    quota = ChargedBlocks(9, 29, (("x", 50), ("y", 0)), block_bytes=10)
    quota.alloc("x", 4)
    assert [quota.excess(tenant, 3) for tenant in "xyz"] == [2, 3, 1]
    assert [quota.admits(tenant, 3) for tenant in "xyz"] == [True, False, False]
    assert ChargedBlocks(9, None, (("x", 50),), block_bytes=10).excess("z", 1 << 60) == 0
