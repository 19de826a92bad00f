"""A ring of host memory that layers are staged in: taken in order, given back in order.

Not here: what is staged when (layer_loader).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from ca_jax.storage.tiers.dram import host_array, touch

_ALIGNMENT = 128  # bytes: copies of unaligned memory run at half the speed, and CPU arrays would be copies.


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """A piece of the ring."""

    start: int
    """First byte."""
    stop: int
    """One past the last byte."""


class ReadBuffer:
    """Staging memory that is allocated once.

    Args:
      num_bytes: its size.
    """

    def __init__(self, num_bytes: int) -> None:
        self.memory = host_array((num_bytes,), np.uint8)
        """All of it."""
        self._regions: collections.deque[Region] = collections.deque()

    def touch(self, stopped: Callable[[], bool] = lambda: False) -> float:
        """Makes it resident, unless it is `stopped`; seconds it took. Any thread may call it."""
        return touch(self.memory, stopped=stopped)

    def take(self, num_bytes: int) -> Region | None:
        """The next free piece of that size; None where it lies in one that was not given back.

        Raises:
          ValueError: more than there is.
        """
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if size > self.memory.nbytes:
            raise ValueError(f"a piece must be at most the {self.memory.nbytes} bytes of the read buffer, got {size}")
        if not self._regions:
            start, room = 0, self.memory.nbytes
        else:
            oldest, newest = self._regions[0], self._regions[-1]
            start = newest.stop
            has_wrapped = newest.start < oldest.start
            room = (oldest.start if has_wrapped else self.memory.nbytes) - start
            if room < size and not has_wrapped:
                start, room = 0, oldest.start
        if room < size:
            return None
        region = Region(start, start + size)
        self._regions.append(region)
        return region

    def give_back(self, region: Region) -> None:
        """Frees the oldest piece.

        Raises:
          ValueError: it is another one.
        """
        if not self._regions or self._regions[0] is not region:
            raise ValueError(f"the oldest piece must be given back first, got [{region.start}, {region.stop})")
        self._regions.popleft()

    def view(self, region: Region, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A piece as an array of that shape and dtype, which fits in it."""
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        return self.memory[region.start : region.start + num_bytes].view(dtype).reshape(shape)
