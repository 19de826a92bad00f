"""What a tier is: a TensorStore of blocks and the list of those that are free.

Not here: what the blocks hold, or whom they belong to.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import tensorstore as ts

from ca_jax.storage.layout import KVLayout


class BlockTier(Protocol):
    """One level of the AttentionStore.

    A move between tiers is a write of one tier's view into another's: `dst.blocks[ids].write(src.blocks[ids])`.
    """

    @property
    def layout(self) -> KVLayout:
        """The shape of a block."""
        ...

    @property
    def num_blocks(self) -> int:
        """How many blocks the tier's cap holds."""
        ...

    @property
    def blocks(self) -> ts.TensorStore:
        """`[num_blocks, L, 2, block_tokens, K, H]`."""
        ...

    @property
    def allocator(self) -> BlockAllocator:
        """Who knows which blocks are free."""
        ...

    def close(self) -> None:
        """Lets go of memory and files. No copy may be under way."""
        ...


class BlockAllocator:
    """The free list of a tier: hands out block ids, runs of consecutive ids where there are any.

    Deterministic: the same calls give the same ids. Not thread-safe: it belongs to the thread that keeps the books.
    """

    def __init__(self, num_blocks: int):
        if num_blocks < 0:
            raise ValueError(f"num_blocks must not be negative, found {num_blocks}")
        self._num_blocks = num_blocks
        self._num_free = num_blocks
        self._taken = bytearray(num_blocks)
        # The free blocks as runs: sorted first ids, and how many blocks follow from each. Neighbours are always merged.
        self._run_starts = [0] if num_blocks else []
        self._run_length = {0: num_blocks} if num_blocks else {}
        self._by_length = [(num_blocks, 0)] if num_blocks else []  # The same, as sorted (length, start).

    @property
    def num_blocks(self) -> int:
        """Free and taken blocks together."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that `alloc` can still hand out."""
        return self._num_free

    def alloc(self, num_blocks: int, after: int | None = None) -> tuple[int, ...] | None:
        """Takes `num_blocks` blocks, all or nothing.

        The ids that follow `after` come first, then the smallest run that holds the rest, then, where none does, the
        longest runs. O(log r) comparisons in the number r of free runs, and moves within lists of them, for each run
        that is taken from.

        Args:
          num_blocks: how many, >= 0.
          after: last block of the sequence that grows, so that its run goes on.

        Returns:
          Their ids, in the order in which they should be filled; None if fewer are free.

        Raises:
          ValueError: num_blocks is negative.
        """
        if num_blocks < 0:
            raise ValueError(f"wanted a number of blocks >= 0, found {num_blocks}")
        if num_blocks > self._num_free:
            return None
        ids: list[int] = []
        if after is not None and after + 1 in self._run_length:
            ids += self._take(after + 1, min(num_blocks, self._run_length[after + 1]))
        while len(ids) < num_blocks:
            wanted = num_blocks - len(ids)
            fitting = bisect.bisect_left(self._by_length, (wanted, -1))
            if fitting == len(self._by_length):  # The first of the longest.
                fitting = bisect.bisect_left(self._by_length, (self._by_length[-1][0], -1))
            length, start = self._by_length[fitting]
            ids += self._take(start, min(length, wanted))
        return tuple(ids)

    def take(self, ids: Iterable[int]) -> None:
        """Takes the blocks that are named, all or nothing: those a catalog says are held.

        O((n + r) log (n + r)) for n ids and r free runs; 1.7 million ids in 100,000 runs take a fraction of a second.

        Args:
          ids: in any order. A numpy array of integers is taken as it is.

        Raises:
          ValueError: an id that is out of range, taken already, or named twice.
        """
        wanted = np.sort(ids if isinstance(ids, np.ndarray) else np.array(list(ids)))
        if not wanted.size:
            return
        if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
            raise ValueError(f"wanted block ids as integers[n], found {wanted.dtype}{list(wanted.shape)}")
        for end in (wanted[0], wanted[-1]):
            if not 0 <= end < self._num_blocks:
                raise ValueError(f"wanted a block id in [0, {self._num_blocks}), found {end}")
        wanted = wanted.astype(np.int64)
        is_taken = np.frombuffer(self._taken, np.uint8)  # A view: what is set here is set there.
        again = wanted[is_taken[wanted] != 0].tolist() + wanted[1:][wanted[1:] == wanted[:-1]].tolist()
        if again:
            raise ValueError(f"block {again[0]} is taken twice")
        is_taken[wanted] = 1
        self._num_free -= len(wanted)
        # A free run goes from a start to the next end. Taking ids out ends it there, and starts it again behind them:
        #   ------####--####----   ->   starts 0 10 16, ends 6 12 20
        is_first = np.diff(wanted, prepend=-2) > 1
        first, last = wanted[is_first], wanted[np.roll(is_first, -1)]
        starts = np.array(self._run_starts, np.int64)
        lengths = np.fromiter(map(self._run_length.__getitem__, self._run_starts), np.int64, len(starts))
        ends = np.sort(np.concatenate([starts + lengths, first]))
        starts = np.sort(np.concatenate([starts, last + 1]))
        is_run = starts < ends
        self._run_starts = starts[is_run].tolist()
        self._run_length = dict(zip(self._run_starts, (ends - starts)[is_run].tolist(), strict=True))
        self._by_length = sorted((length, start) for start, length in self._run_length.items())

    def free(self, ids: Iterable[int]) -> None:
        """Gives blocks back, all or nothing.

        Raises:
          ValueError: an id that is out of range, already free, or named twice.
        """
        ids = sorted(ids)
        for i, block in enumerate(ids):
            if not 0 <= block < self._num_blocks:
                raise ValueError(f"wanted a block id below {self._num_blocks}, found {block}")
            if not self._taken[block] or (i and ids[i - 1] == block):
                raise ValueError(f"block {block} is freed twice")
        start = 0
        for i, block in enumerate(ids):
            self._taken[block] = 0
            if i + 1 == len(ids) or ids[i + 1] != block + 1:
                self._put(ids[start], i + 1 - start)
                start = i + 1
        self._num_free += len(ids)

    def _take(self, start: int, num_blocks: int) -> range:
        """Takes the first `num_blocks` of the free run at `start`."""
        length = self._drop_run(start)
        if length > num_blocks:
            self._add_run(start + num_blocks, length - num_blocks)
        self._num_free -= num_blocks
        self._taken[start : start + num_blocks] = b"\x01" * num_blocks
        return range(start, start + num_blocks)

    def _put(self, start: int, length: int) -> None:
        """Adds a run to the free ones, merged with its neighbours."""
        position = bisect.bisect_left(self._run_starts, start)
        if position < len(self._run_starts) and self._run_starts[position] == start + length:
            length += self._drop_run(start + length)
        if position:
            before = self._run_starts[position - 1]
            if before + self._run_length[before] == start:
                start, length = before, length + self._drop_run(before)
        self._add_run(start, length)

    def _add_run(self, start: int, length: int) -> None:
        bisect.insort(self._run_starts, start)
        bisect.insort(self._by_length, (length, start))
        self._run_length[start] = length

    def _drop_run(self, start: int) -> int:
        """Takes a run out of the free ones; how long it was."""
        length = self._run_length.pop(start)
        del self._run_starts[bisect.bisect_left(self._run_starts, start)]
        del self._by_length[bisect.bisect_left(self._by_length, (length, start))]
        return length
