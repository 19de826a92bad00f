"""Sizes of blocks, the falling of tokens onto blocks, and what configs refuse.

Seals: an intact block that is not the one that was meant is told apart.
"""

from __future__ import annotations

import hashlib
import math

import ml_dtypes
import numpy as np
import pytest

from ca_jax.storage import KVLayout, StoreConfig
from ca_jax.storage.layout import seal_block, verify_block

from .ssd_helpers import make_blocks, make_disk, read
from .store_helpers import as_bits, make_kv, make_layout


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
    with pytest.raises(ValueError, match=f"{field} must be positive, got 0"):
        smollm2_layout(**{field: 0})


def test_a_layout_refuses_an_unknown_dtype():
    with pytest.raises(ValueError, match="float32, float16, bfloat16, int8; got 'int7'"):
        smollm2_layout(dtype="int7")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dram_gib": -1.0}, "dram_gib must be .* >= 0, got -1.0"),
        ({"dram_gib": math.inf}, "dram_gib must .* got inf"),
        ({"dram_gib": math.nan}, "dram_gib must .* got nan"),
        ({"block_tokens": 0}, "block_tokens must be positive, got 0"),
        ({"ssd_gib": -1.0}, "ssd_gib must be .* >= 0, got -1.0"),
        ({"ssd_free_floor_gib": -1.0}, "ssd_free_floor_gib must .* got -1.0"),
        ({"tenant_quota_gib": math.nan}, "tenant_quota_gib must .* got nan"),
        ({"dram_free_fraction": 1.0}, r"dram_free_fraction must be a share in \[0, 1\), got 1.0"),
        ({"ssd_deadline_s": 0.0}, "ssd_deadline_s must be seconds above 0, got 0.0"),
        ({"ttl_s": -1.0}, "ttl_s must .* got -1.0"),
        ({"ssd_dir": ""}, "ssd_dir must be a directory, got an empty name"),
        ({"ssd_dir": "d", "ssd_gib": 0.0}, "d must have ssd_gib above 0, got 0"),
        ({"ssd_dir": "d", "dram_gib": 0.0}, "must have dram_gib above 0"),
        ({"ssd_url": "memory://"}, "must have an ssd_dir for its catalog, got none"),
        ({"ssd_dir": "d", "ssd_url": "memory://", "ssd_driver": "raw"}, "must have ssd_driver zarr3, got raw"),
        ({"ssd_driver": "zarr2"}, "one of zarr3, raw; got 'zarr2'"),
        ({"eviction_policy": "random"}, "one of scheduler_aware, return_aware, lru, fifo; got 'random'"),
    ],
)
def test_a_store_config_refuses_what_it_cannot_serve(changes, message):
    with pytest.raises(ValueError, match=message):
        StoreConfig(**changes)


def test_dram_gib_is_in_bytes_of_1024_cubed():
    assert StoreConfig(dram_gib=1.5).dram_bytes == 3 * 2**29


DTYPES = ["float32", "float16", "bfloat16", "int8"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_seal_fits_its_block_and_says_nothing_of_rows_that_do_not_count(dtype):
    block = make_kv(make_layout(dtype), 4)
    for num_tokens in (1, 3, 4):
        seals = seal_block(block, num_tokens)
        assert seals.shape == (3,)
        assert seals.dtype == np.uint64
        other = block.copy()
        as_bits(other)[:, :, num_tokens:] ^= 1
        assert verify_block(other, num_tokens, seals)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_of_another_token_breaks_the_seal_of_its_layer_alone(dtype):
    block, other = make_kv(make_layout(dtype), 4, seed=1), make_kv(make_layout(dtype), 4, seed=2)
    seals = seal_block(block, 4)
    for layer in range(3):
        for part in range(2):
            for token in range(4):
                changed = block.copy()
                changed[layer, part, token] = other[layer, part, token]
                assert not verify_block(changed, 4, seals)
                assert (seal_block(changed, 4) == seals).tolist() == [each != layer for each in range(3)]


def test_rows_keys_and_layers_in_another_order_break_the_seal():
    block = make_kv(make_layout(), 4)
    seals = seal_block(block, 4)
    assert not verify_block(block[:, :, [1, 0, 2, 3]], 4, seals)
    assert not verify_block(block[:, [1, 0]], 4, seals)
    assert not verify_block(block[[1, 0, 2]], 4, seals)


def test_a_shorter_older_version_breaks_the_seal_of_the_longer_one_and_the_reverse():
    longer = make_kv(make_layout(), 4, seed=1)
    shorter = longer.copy()
    shorter[:, :, 3:] = 0
    assert not verify_block(shorter, 4, seal_block(longer, 4))
    assert verify_block(longer, 3, seal_block(shorter, 3))  # The three tokens are the same ones.
    assert not verify_block(longer, 4, seal_block(longer, 3))


def test_blocks_of_zeros_differ_by_how_many_tokens_count():
    zeros = np.zeros(make_layout().block_shape, np.float32)
    assert len({int(seal_block(zeros, num_tokens)[0]) for num_tokens in (1, 2, 3, 4)}) == 4


def test_a_seal_does_not_depend_on_strides():
    layers = make_kv(make_layout(), 11)  # [L, 2, 11, K, H]: tokens 4 to 8 as a view, with gaps between keys and values.
    view = layers[:, :, 4:8]
    assert not view.flags.c_contiguous
    assert np.array_equal(seal_block(view, 4), seal_block(view.copy(), 4))
    assert np.array_equal(seal_block(view[1:2], 4), seal_block(view, 4)[1:2])


def test_a_seal_looks_at_all_heads():
    layout = KVLayout(num_layers=1, num_kv_heads=4, head_dim=4, dtype="float32", block_tokens=8)
    block = make_kv(layout, 8)
    seals = seal_block(block, 8)
    for head in range(4):
        changed = block.copy()
        as_bits(changed)[:, :, :, head] ^= 1
        assert not verify_block(changed, 8, seals), head


@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "dtype"), [(1, 1, "float16"), (3, 1, "float16"), (1, 1, "float32")]
)
def test_rows_of_a_few_bytes_are_sealed_whole(num_kv_heads, head_dim, dtype):
    layout = KVLayout(num_layers=2, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, block_tokens=3)
    block = make_kv(layout, 3)
    seals = seal_block(block, 3)
    flat = as_bits(block.copy()).reshape(-1)
    for position in range(flat.size):
        changed = flat.copy()
        changed[position] ^= 1
        assert not verify_block(changed.view(layout.numpy_dtype).reshape(block.shape), 3, seals)


def test_seals_stay_the_same_between_runs_and_machines():
    block = np.arange(60, dtype=np.float32).reshape(1, 2, 3, 2, 5)
    # By hand: 8 bytes of each row of 40, moved on by 8 with each row; one blake2b, its salt the number of tokens.
    rows = block.tobytes()
    sample = b"".join(rows[40 * row :][8 * (row % 3) :][:8] for row in range(6))
    digest = hashlib.blake2b(sample, digest_size=8, salt=(3).to_bytes(8, "little")).digest()
    assert [int.from_bytes(digest, "little")] == seal_block(block, 3).tolist()


def test_what_does_not_fit_is_refused():
    block = make_kv(make_layout(), 4)
    with pytest.raises(ValueError, match=r"there must be num_tokens in \[1, 4\], got 5"):
        seal_block(block, 5)
    with pytest.raises(ValueError, match=r"there must be num_tokens in \[1, 4\], got 0"):
        seal_block(block, 0)
    with pytest.raises(ValueError, match=r"there must be a block \[L, 2, block_tokens, K, H\], got \[2, 4, 2, 5\]"):
        seal_block(block[0], 4)
    with pytest.raises(ValueError, match=r"one seal for each of 3 layers, got \[2\]"):
        verify_block(block, 4, seal_block(block, 4)[:2])


# With files: each is intact, so its checksums say nothing.


def test_swapped_files_are_told_apart(tmp_path):
    disk = make_disk("file", tmp_path)
    tier = disk.open()
    blocks = make_blocks(tier.layout, 2)
    tier.write_blocks([0, 1], blocks).result()
    seals = [seal_block(block, 4) for block in blocks]
    other = tmp_path / "other"
    disk.block_file(0).rename(other)
    disk.block_file(1).rename(disk.block_file(0))
    other.rename(disk.block_file(1))
    found = read(tier, [0, 1])
    assert np.array_equal(as_bits(found), as_bits(blocks[::-1]))
    assert not any(verify_block(block, 4, seal) for block, seal in zip(found, seals, strict=True))


def test_a_file_brought_back_from_before_is_told_apart(tmp_path):
    disk = make_disk("file", tmp_path)
    tier = disk.open()
    old, new = make_blocks(tier.layout, 1, seed=1), make_blocks(tier.layout, 1, seed=2)
    new[0][:, :, :2] = old[0][:, :, :2]  # The same session, two tokens longer.
    tier.write_blocks([0], old).result()
    before = disk.block_file(0).read_bytes()
    tier.write_blocks([0], new).result()
    seals = seal_block(new[0], 4)
    assert verify_block(read(tier, [0])[0], 4, seals)
    disk.block_file(0).write_bytes(before)
    assert not verify_block(read(disk.open(), [0])[0], 4, seals)
