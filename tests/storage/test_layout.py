"""Checksums of blocks, and what layouts and configs refuse."""

from __future__ import annotations

import math

import crc32c
import numpy as np
import pytest

from ca_jax.storage.config import StoreConfig
from ca_jax.storage.layout import KVLayout

from .store_helpers import as_bits, make_kv, make_layout


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


def test_a_layout_refuses_what_it_cannot_store():
    for name, value, message in (("head_dim", 0, "head_dim must be positive, got 0"), ("dtype", "int7", "got 'int7'")):
        with pytest.raises(ValueError, match=message):
            make_layout(**{name: value})


@pytest.mark.parametrize(
    ("dtype", "token_bytes", "stored_bytes"),
    [("bfloat16", 3 * 2 * 5 * 36 * 2, 77824), ("int8", 3 * 2 * 5 * 36, 40960), ("float32", 4320, 155648)],
)
def test_a_layout_says_what_tokens_and_blocks_take(dtype, token_bytes, stored_bytes):
    layout = KVLayout.uniform(num_layers=3, num_kv_heads=5, head_dim=36, dtype=dtype, block_tokens=36)
    assert layout.block_shape == (3, 2, 36, 5, 36)
    assert (layout.token_bytes, layout.block_bytes) == (token_bytes, token_bytes * 36)
    assert layout.block_bytes == np.empty(layout.block_shape, layout.numpy_dtype).nbytes
    assert layout.stored_block_bytes == stored_bytes, "whole pages of 4,096 bytes"
    assert [layout.num_blocks(count) for count in (0, 1, 35, 36, 37, 72, 73)] == [0, 1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_checksums_are_crc32c_of_each_layers_bytes(dtype):
    block = make_kv(make_layout(dtype), 4)
    sums = make_layout(dtype).layer_sums(block)
    assert sums.dtype == np.uint32
    assert sums.tolist() == [crc32c.crc32c(layer.tobytes()) for layer in block]
    for layer in range(3):
        changed = block.copy()
        as_bits(changed)[layer, 1, 2, 1, 3] ^= 1
        assert (make_layout(dtype).layer_sums(changed) == sums).tolist() == [each != layer for each in range(3)]
