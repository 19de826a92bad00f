"""Sizes of blocks, the falling of tokens onto blocks, and what configs refuse."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from ca_jax.storage import KVLayout, StoreConfig


def smollm2_layout(**changes) -> KVLayout:
    sizes = {"num_layers": 30, "num_kv_heads": 3, "head_dim": 64, "dtype": "float32", "block_tokens": 128}
    return KVLayout(**(sizes | changes))


def test_sizes_of_a_block_follow_from_its_shape():
    layout = smollm2_layout()
    assert layout.block_shape == (30, 2, 128, 3, 64)
    assert layout.block_bytes == 30 * 2 * 128 * 3 * 64 * 4
    assert layout.layer_block_bytes == 2 * 128 * 3 * 64 * 4
    assert layout.token_bytes == 30 * 2 * 3 * 64 * 4
    half = smollm2_layout(dtype="bfloat16")
    assert half.numpy_dtype == np.dtype(ml_dtypes.bfloat16)
    assert half.block_bytes * 2 == layout.block_bytes


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (127, 1), (128, 1), (129, 2), (256, 2)])
def test_the_last_block_may_be_partly_filled(num_tokens, num_blocks):
    assert smollm2_layout().num_blocks(num_tokens) == num_blocks


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "block_tokens"])
def test_a_layout_refuses_sizes_that_are_not_positive(field):
    with pytest.raises(ValueError, match=f"{field} must be positive, found 0"):
        smollm2_layout(**{field: 0})


def test_a_layout_refuses_an_unknown_dtype():
    with pytest.raises(ValueError, match="float32, float16, bfloat16, int8; found 'int7'"):
        smollm2_layout(dtype="int7")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dram_gib": -1.0}, "dram_gib wanted .* >= 0, found -1.0"),
        ({"dram_gib": math.inf}, "dram_gib wanted .* found inf"),
        ({"dram_gib": math.nan}, "dram_gib wanted .* found nan"),
        ({"block_tokens": 0}, "block_tokens must be positive, found 0"),
        ({"ssd_gib": -1.0}, "ssd_gib wanted .* >= 0, found -1.0"),
        ({"ssd_free_floor_gib": -1.0}, "ssd_free_floor_gib wanted .* found -1.0"),
        ({"tenant_quota_gib": math.nan}, "tenant_quota_gib wanted .* found nan"),
        ({"dram_free_fraction": 1.0}, r"dram_free_fraction wanted a share in \[0, 1\), found 1.0"),
        ({"ssd_deadline_s": 0.0}, "ssd_deadline_s wanted seconds above 0, found 0.0"),
        ({"ttl_s": -1.0}, "ttl_s wanted .* found -1.0"),
        ({"ssd_dir": ""}, "ssd_dir wanted a directory, found an empty name"),
        ({"ssd_dir": "d", "ssd_gib": 0.0}, "d wanted ssd_gib above 0, found 0"),
        ({"ssd_dir": "d", "dram_gib": 0.0}, "wanted dram_gib above 0"),
        ({"ssd_url": "memory://"}, "wanted an ssd_dir for its catalog, found none"),
        ({"ssd_dir": "d", "ssd_url": "memory://", "ssd_driver": "raw"}, "wanted ssd_driver zarr3, found raw"),
        ({"ssd_driver": "zarr2"}, "one of zarr3, raw; found 'zarr2'"),
        ({"eviction_policy": "random"}, "one of scheduler_aware, return_aware, lru, fifo; found 'random'"),
    ],
)
def test_a_store_config_refuses_what_it_cannot_serve(changes, message):
    with pytest.raises(ValueError, match=message):
        StoreConfig(**changes)


def test_dram_gib_is_in_bytes_of_1024_cubed():
    assert StoreConfig(dram_gib=1.5).dram_bytes == 3 * 2**29
