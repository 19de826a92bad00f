"""The DRAM tier: one slab of host memory, allocated once, wrapped by TensorStore.

Not here: who owns which block, or what is evicted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import numpy as np
import tensorstore as ts

from ca_jax.storage.host_memory import host_array, touch
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.tier import BlockAllocator


class DramTier:
    """Blocks in host memory. See `BlockTier`.

    Raises:
      ValueError: a capacity that is negative, under one block (0 is none at all), or above the machine's memory.
      MemoryError: the system does not grant that much.
    """

    def __init__(self, layout: KVLayout, capacity_bytes: int):
        _check_capacity(layout, capacity_bytes)
        self._layout = layout
        self._num_blocks = capacity_bytes // layout.block_bytes
        self._allocator = BlockAllocator(self._num_blocks)
        self._slab = host_array((self._num_blocks, *layout.block_shape), layout.numpy_dtype)
        self._blocks = ts.array(self._slab)
        self._closed = threading.Event()

    @property
    def layout(self) -> KVLayout:
        """The shape of a block."""
        return self._layout

    @property
    def num_blocks(self) -> int:
        """How many blocks the capacity holds."""
        return self._num_blocks

    @property
    def allocator(self) -> BlockAllocator:
        """Who knows which blocks are free."""
        return self._allocator

    @property
    def blocks(self) -> ts.TensorStore:
        """`[num_blocks, L, 2, block_tokens, K, H]`: the slab, as TensorStore sees it. For whole blocks."""
        return self._blocks

    @property
    def slab(self) -> np.ndarray:
        """`[num_blocks, L, 2, block_tokens, K, H]`: the slab itself. For parts of blocks."""
        return self._slab

    def touch(self, stopped: Callable[[], bool] = lambda: False) -> float:
        """Makes the slab resident, keeping what it holds; meant for a background thread. Ends early on `close`.

        Args:
          stopped: asked now and then; True ends it early too.

        Returns:
          Seconds it took.
        """
        return touch(self._slab, stopped=lambda: self._closed.is_set() or stopped())

    def close(self) -> None:
        """Lets go of the slab. No copy may be under way."""
        self._closed.set()
        self._slab = np.zeros((0, *self._layout.block_shape), self._layout.numpy_dtype)
        self._blocks = ts.array(self._slab)


def _check_capacity(layout: KVLayout, capacity_bytes: int) -> None:
    if capacity_bytes < 0:
        raise ValueError(f"DRAM capacity must not be negative, found {capacity_bytes} bytes")
    if 0 < capacity_bytes < layout.block_bytes:
        raise ValueError(
            f"DRAM capacity wanted at least one block of {layout.block_bytes} bytes ({layout.block_tokens} tokens), "
            f"found {capacity_bytes} bytes"
        )
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if capacity_bytes > machine_bytes:
        raise ValueError(
            f"DRAM capacity wanted at most this machine's {machine_bytes} bytes of memory, found {capacity_bytes}"
        )
