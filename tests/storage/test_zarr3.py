"""Our reader and writer of shards against TensorStore's, in both directions, and what is left to TensorStore."""

from __future__ import annotations

import crc32c
import numpy as np
import pytest

from ca_jax.storage.records import BlockIoError, IoFailure
from ca_jax.storage.tiers.zarr3 import ShardFiles, SsdTier

from .ssd_helpers import make_blocks, make_disk, read
from .store_helpers import as_bits, make_layout


@pytest.fixture(params=["float32", "bfloat16", "int8"])
def layout(request):
    return make_layout(request.param)


@pytest.fixture
def disk(tmp_path):
    return make_disk("file", tmp_path)


def test_tensorstore_reads_what_we_write(disk, layout):
    tier: SsdTier = disk.open(layout)
    blocks = make_blocks(layout, 3)
    tier.write_blocks([0, 5, 2], blocks).result()
    for block, wanted in zip([0, 5, 2], blocks, strict=True):
        np.testing.assert_array_equal(as_bits(disk.tensorstore()[block].read().result()), as_bits(wanted))
    assert not [path for path in disk.path.rglob("*") if path.name.endswith(".__lock")]


def test_we_read_what_tensorstore_writes(disk, layout):
    disk.open(layout)
    (block,) = make_blocks(layout, 1)
    disk.tensorstore()[4].write(block).result()
    found = np.zeros_like(block)
    assert ShardFiles(layout).read(disk.block_file(4), found), "laid out as we expect, or this reads nothing"
    np.testing.assert_array_equal(as_bits(found), as_bits(block))


def test_a_shard_whose_layers_lie_in_another_order_is_left_to_tensorstore(disk, layout):
    tier: SsdTier = disk.open(layout)
    (block,) = make_blocks(layout, 1)
    tier.write_blocks([1], [block]).result()
    chunks = [data + crc32c.crc32c(data).to_bytes(4, "little") for data in (layer.tobytes() for layer in block)]
    size = len(chunks[0])
    places = [(layout.num_layers - 1 - layer) * size for layer in range(layout.num_layers)]
    index = np.array([[place, size] for place in places], "<u8").tobytes()
    sealed = index + crc32c.crc32c(index).to_bytes(4, "little")
    disk.block_file(1).write_bytes(b"".join(reversed(chunks)) + sealed)
    assert not ShardFiles(layout).read(disk.block_file(1), np.zeros_like(block))
    np.testing.assert_array_equal(as_bits(read(tier, [1])[0]), as_bits(block))


@pytest.mark.parametrize("byte", [0, -1, -5, 100])
def test_every_byte_is_checked(disk, layout, byte):
    tier: SsdTier = disk.open(layout)
    tier.write_blocks([0], make_blocks(layout, 1)).result()
    data = bytearray(disk.block_file(0).read_bytes())
    data[byte] ^= 1
    disk.block_file(0).write_bytes(data)
    with pytest.raises(BlockIoError) as caught:
        read(tier, [0])
    assert caught.value.reason is IoFailure.CORRUPT


def test_a_write_that_fails_leaves_the_old_block_and_nothing_else(disk, layout, monkeypatch):
    tier: SsdTier = disk.open(layout)
    old, new = make_blocks(layout, 2)
    tier.write_blocks([0], [old]).result()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        handle = tier.write_blocks([0], [new])
        assert handle.wait(60)
        assert handle.error is not None
        assert handle.error.reason is IoFailure.NO_SPACE
    np.testing.assert_array_equal(as_bits(read(tier, [0])[0]), as_bits(old))
    assert tier.sweep() == 0
