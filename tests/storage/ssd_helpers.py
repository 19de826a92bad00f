"""SSD tiers of every kind, with blocks of three layers of four tokens, for the tests of `ca_jax.storage`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

from ca_jax.storage.layout import KVLayout
from ca_jax.storage.tiers.disk import DiskOptions, DiskTier
from ca_jax.storage.tiers.formats import RawTier, Zarr3Tier

from .store_helpers import make_kv, make_layout

NUM_BLOCKS = 8


@dataclasses.dataclass
class StoppedClock:
    """A clock that stands until a test moves it."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclasses.dataclass
class Disk:
    """A place for tiers of one kind: opening it again finds what the last one wrote."""

    kind: str
    open: Callable[..., DiskTier]
    path: Path

    def block_file(self, block: int) -> Path:
        """The file a block of the `file` kind is in."""
        return self.path / "zarr3" / f"{block // 1024:06d}" / f"c.{block % 1024}.0.0.0.0.0"

    def tensorstore(self, group: int = 0) -> ts.TensorStore:
        """A group of the `file` kind as TensorStore opens it alone: `[1024, L, 2, block_tokens, K, H]`."""
        path = self.path / "zarr3" / f"{group:06d}"
        return ts.open({"driver": "zarr3", "kvstore": path.as_uri()}, context=ts.Context()).result()


def make_disk(kind: str, path: Path) -> Disk:
    """A disk of kind `file`, `memory` or `raw`."""
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})

    def open_tier(layout: KVLayout | None = None, num_blocks: int = NUM_BLOCKS, **options: Any) -> DiskTier:
        layout, disk_options = layout or make_layout(), DiskOptions(**options)
        capacity_bytes = num_blocks * layout.stored_block_bytes
        if kind == "raw":
            return RawTier(layout, path, capacity_bytes, disk_options)
        if kind == "memory":
            return Zarr3Tier(layout, "memory://kv", capacity_bytes, disk_options, context=context)
        return Zarr3Tier(layout, path, capacity_bytes, disk_options)

    return Disk(kind=kind, open=open_tier, path=path)


def make_blocks(layout: KVLayout, num_blocks: int, seed: int = 0) -> np.ndarray:
    """`[n, L, 2, block_tokens, K, H]` of random bits."""
    return np.stack([make_kv(layout, layout.block_tokens, 100 * seed + i) for i in range(num_blocks)])


def read(tier: DiskTier, block_ids: list[int]) -> np.ndarray:
    """Reads whole blocks into memory full of other bits."""
    into = make_blocks(tier.layout, len(block_ids), seed=99)
    tier.read_blocks(block_ids, into).result()
    return into


@contextlib.contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[Path]:
    """A filesystem of its own; skips where the system does not let a test mount one."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", str(path)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"wants to mount a small filesystem, which the system refuses: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextlib.contextmanager
def unwritable(path: Path) -> Iterator[None]:
    """A directory without write permission; for root, whom modes do not stop, a filesystem that is read-only."""
    if os.geteuid():
        path.mkdir(mode=0o500)
        yield
        path.chmod(0o700)
        return
    with small_disk(path, 64 * 4096):
        subprocess.run(["mount", "-o", "remount,ro", str(path)], check=True)
        yield
