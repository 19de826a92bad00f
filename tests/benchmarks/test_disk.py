"""Files and the page cache: what is read is what a tier wrote, and what is in memory is told."""

import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks.disk import PlainDisk, block_extents, cached_share, drop_cached, is_dropped
from benchmarks.harness import BenchError
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.tiers.formats import FORMATS


@pytest.mark.parametrize("driver", FORMATS)
def test_plain_reads_give_what_the_tier_wrote(tmp_path: Path, driver: str) -> None:
    layout = KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=16, dtype="float32", block_tokens=32)
    tier = FORMATS[driver](layout, tmp_path, 12 * layout.stored_block_bytes)
    blocks = np.random.default_rng(0).standard_normal((11, *layout.block_shape)).astype(np.float32)
    tier.write_blocks(range(11), blocks)
    extents = block_extents(tmp_path, layout.block_bytes, tier.stored_block_bytes, 11)
    into = np.zeros((11, layout.block_bytes), np.uint8)
    PlainDisk(3).read(extents, into)
    tier.close()
    assert into.tobytes() == blocks.tobytes()
    with pytest.raises(BenchError, match="must hold 99 blocks, got"):
        block_extents(tmp_path, layout.block_bytes, tier.stored_block_bytes, 99)


def test_what_is_in_memory_is_told_and_dropped(disk: Path) -> None:
    disk.mkdir()
    path = disk / "file"
    path.write_bytes(bytes(1 << 20))
    assert cached_share(path) == 1.0
    assert not is_dropped([path])
    drop_cached([path])
    assert cached_share(path) == 0.0
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # No more than is asked for.
        os.pread(file.fileno(), 4096, 8192)
    assert 0 < cached_share(path) < 0.5
    (disk / "empty").touch()
    assert cached_share(disk / "empty") == 0.0
