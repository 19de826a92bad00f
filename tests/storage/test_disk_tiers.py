"""The SSD tiers: what was written is read, by whichever kind, and anything else is an error with its reason."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

from ca_jax.storage.records import BlockIoError, IoFailure
from ca_jax.storage.tiers.dram import DramTier
from ca_jax.storage.tiers.formats import Zarr3Tier

from . import store_helpers as kit


@pytest.fixture(params=["zarr3", "memory", "raw"])
def disk(request, tmp_path) -> kit.Disk:
    return kit.Disk(request.param, tmp_path / "kv")


@pytest.fixture
def local_disk(driver, tmp_path) -> kit.Disk:
    return kit.Disk(driver, tmp_path / "kv")


def reason(move, *arguments: object) -> IoFailure:
    """Why a move fails."""
    with pytest.raises(BlockIoError) as raised:
        move(*arguments)
    return raised.value.reason


# What was written is read.


def test_whole_pages_come_back_too(disk):
    # Such blocks, in page-aligned memory, go past the page cache where the disk is a raw file.
    layout = kit.make_layout(num_kv_heads=4, head_dim=256)
    assert layout.stored_block_bytes == layout.block_bytes
    tier = disk.open(layout, num_blocks=4)
    dram = DramTier(layout, 4 * layout.block_bytes)
    dram.slab[:2] = kit.make_blocks(layout, 2)
    tier.write_blocks([1, 0], dram.slab[:2])
    tier.read_blocks([1, 0], [dram.slab[3], dram.slab[2]])
    kit.assert_same(dram.slab[2:], dram.slab[1::-1])


def test_a_write_is_done_only_after_its_bytes_and_name_are_synced(tmp_path, monkeypatch):
    raw, zarr3 = (kit.Disk(kind, tmp_path).open() for kind in ("raw", "zarr3"))
    synced: list[object] = []
    monkeypatch.setattr("os.fdatasync", lambda file: synced.append(raw.stored_block_ids()))
    monkeypatch.setattr("os.fsync", lambda file: synced.append(Path(os.readlink(f"/proc/self/fd/{file}")).name))
    raw.write_blocks([1, 2], kit.make_blocks(raw.layout, 2))
    assert synced == [[1, 2]]  # Once, after both.
    synced.clear()
    zarr3.write_blocks([1], kit.make_blocks(zarr3.layout, 1))
    assert synced == ["c.1.0.0.0.0.0.__lock", "000000"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_tensorstore_alone_reads_what_we_write_and_we_what_it_writes(tmp_path, dtype):
    disk, layout = kit.Disk("zarr3", tmp_path), kit.make_layout(dtype)
    tier = disk.open(layout, num_blocks=1030)
    blocks = kit.make_blocks(layout, 3)
    tier.write_blocks([1023, 1024], blocks[:2])
    groups = [
        ts.open({"driver": "zarr3", "kvstore": (tmp_path / "zarr3" / name).as_uri()}, context=ts.Context()).result()
        for name in ("000000", "000001")
    ]
    for block, wanted in zip([1023, 1024], blocks, strict=False):
        assert disk.block_file(block).read_bytes() == wanted.tobytes(), "side by side, and nothing else"
        kit.assert_same(groups[block // 1024][block % 1024].read().result(), wanted)
    groups[0][4].write(blocks[2]).result()
    kit.assert_same(kit.read(tier, [4])[0], blocks[2])


def test_a_write_that_fails_leaves_the_old_block_and_nothing_else(tmp_path, monkeypatch):
    tier = kit.Disk("zarr3", tmp_path).open()
    blocks = kit.make_blocks(tier.layout, 2)
    tier.write_blocks([0], blocks[:1])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        assert reason(tier.write_blocks, [0], blocks[1:]) is IoFailure.NO_SPACE
    kit.assert_same(kit.read(tier, [0]), blocks[:1])
    assert tier.sweep() == 0


# What is damaged is an error. Files are damaged behind TensorStore's back and within one tick of their clock, so that
# what it knows of them for a moment after a read would still seem to hold: such reads are another tier's.


def test_a_block_that_was_never_written_is_missing_and_zeros_are_not(disk):
    tier = disk.open()
    zeros = np.zeros((2, *tier.layout.block_shape), tier.layout.numpy_dtype)
    tier.write_blocks([0, 2], zeros)
    assert tier.stored_block_ids() == [0, 2]
    assert reason(tier.read_blocks, [0, 1, 2], kit.make_blocks(tier.layout, 3)) is IoFailure.MISSING
    kit.assert_same(kit.read(tier, [0, 2]), zeros)


def test_a_file_of_any_other_length_is_found(local_disk):
    tier, is_raw = local_disk.open(), local_disk.kind == "raw"
    tier.write_blocks([0], kit.make_blocks(kit.LAYOUT, 1))
    path, _ = local_disk.place(0)
    intact = path.read_bytes()
    for length in (0, 1, 100, kit.LAYOUT.block_bytes - 1, len(intact) + 1):
        if is_raw and length > len(intact):  # There is room behind each block.
            continue
        path.write_bytes((intact + b"?")[:length])
        reader = tier if is_raw else local_disk.open()
        wanted = IoFailure.MISSING if is_raw and not length else IoFailure.CORRUPT
        assert reason(reader.read_blocks, [0], kit.make_blocks(kit.LAYOUT, 1)) is wanted, length


# Space.


def test_writes_stop_at_the_floor_and_go_on_above_it(local_disk, monkeypatch):
    free_bytes = 100 * 4096
    monkeypatch.setattr("ca_jax.storage.tiers.disk.DiskTier._free_bytes", lambda self: free_bytes)
    tier = local_disk.open(num_blocks=4, free_floor_bytes=20 * 4096)
    blocks = kit.make_blocks(tier.layout, 2)
    free_bytes = 20 * 4096 + tier.stored_block_bytes
    tier.write_blocks([0], blocks[:1])
    with pytest.raises(BlockIoError, match=f"above a floor of {20 * 4096}") as raised:
        tier.write_blocks([0, 1], blocks)
    assert raised.value.reason is IoFailure.NO_SPACE
    assert tier.stored_block_ids() == [0]
    free_bytes += tier.stored_block_bytes
    tier.write_blocks([0, 1], blocks)
    tier.write_blocks([0, 1], blocks)  # What had been spoken for was given back.


def test_a_cap_that_the_floor_leaves_no_room_for_is_refused_at_start(local_disk, monkeypatch):
    free_bytes = 100 * 4096
    monkeypatch.setattr("ca_jax.storage.tiers.disk.DiskTier._free_bytes", lambda self: free_bytes)
    tier = local_disk.open(num_blocks=8)
    assert tier.num_blocks == 8
    capacity_bytes = 8 * tier.stored_block_bytes
    floor_bytes = free_bytes - capacity_bytes
    tier.write_blocks(list(range(8)), kit.make_blocks(tier.layout, 8))
    local_disk.open(num_blocks=8, free_floor_bytes=floor_bytes)
    free_bytes -= capacity_bytes  # What is stored already counts as room.
    local_disk.open(num_blocks=8, free_floor_bytes=floor_bytes)
    with pytest.raises(ValueError, match=rf"must be at most \d+ bytes \({free_bytes} free.*got {capacity_bytes}$"):
        local_disk.open(num_blocks=8, free_floor_bytes=floor_bytes + 5 * 4096)


# Files.


def test_directories_are_private_and_small(tmp_path):
    tier = Zarr3Tier(kit.make_layout(), tmp_path / "a" / "b", 2050 * 4096)
    tier.write_blocks([0, 1023, 1024, 2049], kit.make_blocks(tier.layout, 4))
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a" / "b" / "zarr3").stat().st_mode & 0o777 == 0o700
    entries = {path.name: sorted(os.listdir(path)) for path in (tmp_path / "a" / "b" / "zarr3").iterdir()}
    assert entries == {
        "000000": ["c.0.0.0.0.0.0", "c.1023.0.0.0.0.0", "zarr.json"],
        "000001": ["c.0.0.0.0.0.0", "zarr.json"],
        "000002": ["c.1.0.0.0.0.0", "zarr.json"],
    }
    assert (tmp_path / "a" / "b" / "zarr3" / "000000" / "c.0.0.0.0.0.0").stat().st_size <= tier.stored_block_bytes


def test_what_a_crash_left_half_written_is_swept_and_stops_no_write(tmp_path):
    disk = kit.Disk("zarr3", tmp_path)
    tier, blocks = disk.open(), kit.make_blocks(kit.LAYOUT, 1)
    leftover = disk.block_file(5).with_name("c.5.0.0.0.0.0.__lock")
    leftover.write_bytes(b"half")
    assert tier.stored_block_ids() == []
    assert tier.sweep() == 1
    assert not leftover.exists()
    leftover.write_bytes(b"half")
    tier.write_blocks([5], blocks)
    kit.assert_same(kit.read(tier, [5]), blocks)


@pytest.mark.parametrize(
    ("change", "named"), [({"head_dim": 6}, "6"), ({"dtype": "float16"}, "float16"), ({"num_layers": 4}, "4")]
)
def test_a_store_of_another_layout_is_refused_and_left_alone(disk, change, named):
    tier = disk.open()
    blocks = kit.make_blocks(tier.layout, 1)
    tier.write_blocks([0], blocks)
    with pytest.raises(ValueError, match=rf"must be of .*\b{named}\b.*, got another layout"):
        disk.open(kit.make_layout(**change))
    kit.assert_same(kit.read(disk.open(), [0]), blocks)


@pytest.mark.parametrize(("kind", "metadata"), [("zarr3", "000000/zarr.json"), ("raw", "layout.json")])
def test_metadata_that_is_none_is_refused(tmp_path, kind, metadata):
    kit.Disk(kind, tmp_path).open()
    (tmp_path / kind / metadata).write_text("{")
    with pytest.raises(ValueError, match=rf"{metadata} must be of .*, got another layout"):
        kit.Disk(kind, tmp_path).open()


def test_a_location_that_is_a_file_or_not_to_be_written_to_is_refused(local_disk):
    with (
        kit.unwritable(local_disk.path),
        pytest.raises(PermissionError, match=r"must be writable, got: .*(denied|Read-only)"),
    ):
        local_disk.open()
    local_disk.path.rmdir()
    local_disk.path.write_text("not a directory")
    with pytest.raises(NotADirectoryError, match=f"must be a directory, got a file: {local_disk.path}"):
        local_disk.open()


@pytest.mark.parametrize(
    ("location", "capacity_bytes", "message"),
    [
        ("nosuchscheme://x", 4096, "nosuchscheme"),
        ("memory://", 4095, r"at least one block of 4096 bytes \(4 tokens\), got 4095 bytes"),
    ],
)
def test_a_place_for_blocks_that_cannot_be_is_refused(location, capacity_bytes, message):
    with pytest.raises(ValueError, match=message):
        Zarr3Tier(kit.make_layout(), location, capacity_bytes)


def test_a_file_url_is_a_directory(tmp_path):
    blocks = kit.make_blocks(kit.make_layout(), 1)
    Zarr3Tier(kit.make_layout(), (tmp_path / "with space").as_uri(), 4096).write_blocks([0], blocks)
    kit.assert_same(kit.read(Zarr3Tier(kit.make_layout(), tmp_path / "with space", 4096), [0]), blocks)


# Arguments.


def test_what_does_not_fit_is_refused(disk):
    tier = disk.open()
    blocks = kit.make_blocks(tier.layout, 2)
    for move, block_ids, arrays, message in (
        (tier.write_blocks, [0, 8], blocks, r"block id must be in \[0, 8\), got 8"),
        (tier.read_blocks, [-1], blocks[:1], r"block id must be in \[0, 8\), got -1"),
        (tier.write_blocks, [3, 3], blocks, r"given once, got \[3, 3\]"),
        (tier.read_blocks, [0, 1, 2], blocks, "one array for each of 3 block ids, got 2"),
        (tier.read_blocks, [0], [blocks[0][:, :, :3]], r"float32\[3, 2, 4, 2, 5\], got float32\[3, 2, 3, 2, 5\]"),
        (tier.write_blocks, [0], np.zeros(blocks[:1].shape, np.float16), r"float32.*, got float16"),
        (tier.write_blocks, [0], [blocks[0][..., ::-1]], "C-contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            move(block_ids, arrays)
    assert tier.stored_block_ids() == []
