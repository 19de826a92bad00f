"""Sizes and checksums of blocks, the falling of tokens onto blocks, and what configs refuse."""

from __future__ import annotations

import math

import crc32c
import ml_dtypes
import numpy as np
import pytest

from ca_jax.storage import KVLayout, StoreConfig
from ca_jax.storage.layout import layer_sums

from .store_helpers import as_bits, make_kv, make_layout


def smollm2_layout(**changes) -> KVLayout:
    sizes = {"num_layers": 30, "num_kv_heads": 3, "head_dim": 64, "dtype": "float32", "block_tokens": 128}
    return KVLayout(**(sizes | changes))


def test_sizes_of_a_block_follow_from_its_shape():
    layout = smollm2_layout()
    assert layout.block_shape == (30, 2, 128, 3, 64)
    assert layout.block_bytes == 30 * 2 * 128 * 3 * 64 * 4
    assert layout.stored_block_bytes == layout.block_bytes  # Whole pages.
    assert smollm2_layout(block_tokens=1).stored_block_bytes == 12 * 4096 > 30 * 2 * 3 * 64 * 4
    assert layout.token_bytes == 30 * 2 * 3 * 64 * 4
    half = smollm2_layout(dtype="bfloat16")
    assert half.numpy_dtype == np.dtype(ml_dtypes.bfloat16)
    assert half.block_bytes * 2 == layout.block_bytes


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (127, 1), (128, 1), (129, 2), (256, 2)])
def test_the_last_block_may_be_partly_filled(num_tokens, num_blocks):
    assert smollm2_layout().num_blocks(num_tokens) == num_blocks


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "block_tokens"])
def test_a_layout_refuses_sizes_that_are_not_positive(field):
    with pytest.raises(ValueError, match=f"{field} must be positive, got 0"):
        smollm2_layout(**{field: 0})


def test_a_layout_refuses_an_unknown_dtype():
    with pytest.raises(ValueError, match="float32, float16, bfloat16, int8; got 'int7'"):
        smollm2_layout(dtype="int7")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dram_gib": -1.0}, "dram_gib must be .* >= 0, got -1.0"),
        ({"dram_gib": math.inf}, "dram_gib must be .* got inf"),
        ({"dram_gib": math.nan}, "dram_gib must be .* got nan"),
        ({"block_tokens": 0}, "block_tokens must be positive, got 0"),
        ({"ssd_gib": -1.0}, "ssd_gib must be .* >= 0, got -1.0"),
        ({"ssd_free_floor_gib": -1.0}, "ssd_free_floor_gib must be .* got -1.0"),
        ({"tenant_quota_gib": math.nan}, "tenant_quota_gib must be .* got nan"),
        ({"dram_free_fraction": 1.0}, r"dram_free_fraction must be a share in \[0, 1\), got 1.0"),
        ({"ssd_deadline_s": 0.0}, "ssd_deadline_s must be seconds above 0, got 0.0"),
        ({"ttl_s": -1.0}, "ttl_s must be .* got -1.0"),
        ({"ttl_s": math.inf}, "ttl_s must be .* got inf"),
        ({"ssd_dir": ""}, "ssd_dir must be a directory, got an empty name"),
        ({"ssd_dir": "d", "ssd_gib": 0.0}, "ssd_gib must be above 0 with an ssd_dir, got 0 for d"),
        ({"ssd_dir": "d", "dram_gib": 0.0}, "dram_gib must be above 0"),
        ({"ssd_url": "memory://"}, "ssd_url must have an ssd_dir for its catalog, got none"),
        (
            {"ssd_dir": "d", "ssd_url": "memory://", "ssd_driver": "raw"},
            "ssd_driver must be zarr3 with an ssd_url, got raw",
        ),
        ({"ssd_driver": "zarr2"}, "one of zarr3, raw; got 'zarr2'"),
        ({"eviction_policy": "random"}, "one of scheduler_aware, return_aware, lru, fifo; got 'random'"),
    ],
)
def test_a_store_config_refuses_what_it_cannot_serve(changes, message):
    with pytest.raises(ValueError, match=message):
        StoreConfig(**changes)


def test_dram_gib_is_in_bytes_of_1024_cubed():
    assert StoreConfig(dram_gib=1.5).dram_bytes == 3 * 2**29


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_checksums_are_crc32c_of_each_layers_bytes(dtype):
    block = make_kv(make_layout(dtype), 4)
    sums = layer_sums(block)
    assert sums.dtype == np.uint32
    assert sums.tolist() == [crc32c.crc32c(layer.tobytes()) for layer in block]
    for layer in range(3):
        changed = block.copy()
        as_bits(changed)[layer, 1, 2, 1, 3] ^= 1
        assert (layer_sums(changed) == sums).tolist() == [each != layer for each in range(3)]
