"""Files and the page cache: what is read is what a tier wrote, and what is in memory is told."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.disk import PlainDisk, block_extents
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
