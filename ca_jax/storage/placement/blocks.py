"""Free lists, and who holds which block: each block is charged to its tenant, and counted how often it is held.

Whose sessions go when a tenant is over its quota is the eviction policy's choice among that tenant's own:
`TierOrders.view` with its `tenant`, for the blocks that `excess` says.

Not here: that choice, who a tenant is, or which sessions share blocks.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from sortedcontainers import SortedDict, SortedList


class BlockAllocator:
    """The free list of a tier: hands out block ids, runs of consecutive ids where there are any.

    Deterministic: the same calls give the same ids. Not thread-safe: it belongs to the bookkeeping thread.
    """

    def __init__(self, num_blocks: int):
        if num_blocks < 0:
            raise ValueError(f"num_blocks must not be negative, got {num_blocks}")
        self.num_blocks = num_blocks
        """Free and taken blocks together."""
        self.num_free = num_blocks
        """Blocks that `alloc` can still hand out."""
        self._taken = bytearray(num_blocks)
        # The free blocks as runs: how many there are from each first id on. Neighbours are always merged.
        self._run_length: SortedDict[int, int] = SortedDict({0: num_blocks} if num_blocks else {})
        self._by_length = SortedList((length, start) for start, length in self._run_length.items())

    def alloc(self, num_blocks: int, after: int | None = None) -> tuple[int, ...] | None:
        """Takes `num_blocks` blocks, all or nothing.

        The ids that follow `after` come first, then the smallest run that holds the rest, then, where none does, the
        longest runs. O(log r) in the number r of free runs, for each run that is taken from.

        Args:
          num_blocks: how many, >= 0.
          after: last block of the sequence that grows, so that its run goes on.

        Returns:
          Their ids, in the order in which they should be filled; None if fewer are free.

        Raises:
          ValueError: num_blocks is negative.
        """
        if num_blocks < 0:
            raise ValueError(f"num_blocks must be at least 0, got {num_blocks}")
        if num_blocks > self.num_free:
            return None
        ids: list[int] = []
        if after is not None and after + 1 in self._run_length:
            ids += self._take(after + 1, min(num_blocks, self._run_length[after + 1]))
        while len(ids) < num_blocks:
            wanted = num_blocks - len(ids)
            at_least = min(wanted, self._by_length[-1][0])
            length, start = next(self._by_length.irange((at_least, -1)))
            ids += self._take(start, min(length, wanted))
        return tuple(ids)

    def take(self, ids: Iterable[int]) -> None:
        """Takes the blocks that are named, all or nothing: those a catalog says are held.

        Looks at every block: 1.7 million of them, in 100,000 runs, take a fraction of a second.

        Args:
          ids: in any order. A numpy array of integers is taken as it is.

        Raises:
          ValueError: an id that is out of range, taken already, or named twice.
        """
        wanted = np.sort(ids if isinstance(ids, np.ndarray) else np.array(list(ids)))
        if not wanted.size:
            return
        if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
            raise ValueError(f"block ids must be integers[n], got {wanted.dtype}{list(wanted.shape)}")
        for end in (wanted[0], wanted[-1]):
            if not 0 <= end < self.num_blocks:
                raise ValueError(f"a block id must be in [0, {self.num_blocks}), got {end}")
        wanted = wanted.astype(np.int64)
        is_taken = np.frombuffer(self._taken, np.uint8)  # A view: what is set here is set there.
        again = wanted[is_taken[wanted] != 0].tolist() + wanted[1:][wanted[1:] == wanted[:-1]].tolist()
        if again:
            raise ValueError(f"block {again[0]} is taken twice")
        is_taken[wanted] = 1
        self.num_free -= len(wanted)
        edges = np.flatnonzero(np.diff(is_taken, prepend=1, append=1))  # Of free runs: starts and ends, in turn.
        starts, lengths = edges[::2].tolist(), (edges[1::2] - edges[::2]).tolist()
        self._run_length = SortedDict(zip(starts, lengths, strict=True))
        self._by_length = SortedList(zip(lengths, starts, strict=True))

    def free(self, ids: Iterable[int]) -> None:
        """Gives blocks back, all or nothing.

        Raises:
          ValueError: an id that is out of range, already free, or named twice.
        """
        ids = sorted(ids)
        for i, block in enumerate(ids):
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"a block id must be in [0, {self.num_blocks}), got {block}")
            if not self._taken[block] or (i and ids[i - 1] == block):
                raise ValueError(f"block {block} is freed twice")
        start = 0
        for i, block in enumerate(ids):
            self._taken[block] = 0
            if i + 1 == len(ids) or ids[i + 1] != block + 1:
                self._put(ids[start], i + 1 - start)
                start = i + 1
        self.num_free += len(ids)

    def _take(self, start: int, num_blocks: int) -> range:
        """Takes the first `num_blocks` of the free run at `start`."""
        length = self._drop_run(start)
        if length > num_blocks:
            self._add_run(start + num_blocks, length - num_blocks)
        self.num_free -= num_blocks
        self._taken[start : start + num_blocks] = b"\x01" * num_blocks
        return range(start, start + num_blocks)

    def _put(self, start: int, length: int) -> None:
        """Adds a run to the free ones, merged with its neighbours."""
        if start + length in self._run_length:
            length += self._drop_run(start + length)
        before = next(self._run_length.irange(maximum=start, reverse=True), None)
        if before is not None and before + self._run_length[before] == start:
            start, length = before, length + self._drop_run(before)
        self._add_run(start, length)

    def _add_run(self, start: int, length: int) -> None:
        self._run_length[start] = length
        self._by_length.add((length, start))

    def _drop_run(self, start: int) -> int:
        """Takes a run out of the free ones; how long it was."""
        length: int = self._run_length.pop(start)
        self._by_length.remove((length, start))
        return length


class ChargedBlocks:
    """A tier's free list, with every block charged to the tenant that holds it, and counted how often it is held.

    Sequences of one tenant may share a block: each holds it, and it is free when all have given it back. However many
    of them hold it, the tenant is charged for it once: sharing takes no room and no quota, and what one sequence gives
    back counts against a quota just where it counts against the tier, with its last holder. A block never has holders
    of two tenants, so that no tenant's use depends on what another does.

    Args:
      allocator: the free list.
      quota_blocks: most blocks a tenant may hold that is not named; None for no limit.
      of_tenants: most blocks of those that are named, in its place.

    Raises:
      ValueError: a quota is negative.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        quota_blocks: int | None = None,
        of_tenants: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        for quota in (quota_blocks, *of_tenants.values()):
            if quota is not None and quota < 0:
                raise ValueError(f"quota must be a number of blocks >= 0, or None, got {quota}")
        self._allocator = allocator
        self._quota_blocks = quota_blocks
        self._of_tenants = dict(of_tenants)
        self._used: collections.Counter[str] = collections.Counter()  # By tenant; those that hold none are left out.
        self._others: dict[int, int] = {}  # Of shared blocks: holders beside the first.

    @classmethod
    def in_bytes(
        cls,
        allocator: BlockAllocator,
        quota_bytes: int | None,
        of_tenants: Mapping[str, int] | Iterable[tuple[str, int]],
        block_bytes: int,
    ) -> ChargedBlocks:
        """With quotas that are given in bytes: as many whole blocks of `block_bytes` as they hold."""
        quotas = {tenant: num_bytes // block_bytes for tenant, num_bytes in dict(of_tenants).items()}
        return cls(allocator, None if quota_bytes is None else quota_bytes // block_bytes, quotas)

    @property
    def num_blocks(self) -> int:
        """Free and taken blocks together."""
        return self._allocator.num_blocks

    @property
    def num_free(self) -> int:
        """Free blocks."""
        return self._allocator.num_free

    def admits(self, tenant: str, num_blocks: int) -> bool:
        """Whether one sequence of `num_blocks` blocks fits tier and quota at all."""
        return num_blocks <= min(self.num_blocks, self._quota(tenant))

    def lacking(self, num_blocks: int) -> int:
        """Blocks to be freed before so many more can be taken; none, if not positive."""
        return num_blocks - self._allocator.num_free

    def excess(self, tenant: str, num_blocks: int) -> int:
        """Blocks of its own that a tenant has to give up before it may take so many more; 0 for none."""
        return int(max(0, self._used[tenant] + num_blocks - self._quota(tenant)))

    def alloc(self, tenant: str, num_blocks: int, after: int | None = None) -> tuple[int, ...] | None:
        """Takes blocks, all or none; see `BlockAllocator.alloc`."""
        ids = self._allocator.alloc(num_blocks, after)
        if ids:
            self._charge(tenant, len(ids))
        return ids

    def alloc_room(self, tenant: str, num_blocks: int, after: int | None = None) -> tuple[int, ...]:
        """Takes blocks for which room was made.

        Raises:
          RuntimeError: the room is not there, so what is counted is wrong.
        """
        ids = self.alloc(tenant, num_blocks, after)
        if ids is None:
            raise RuntimeError(f"room for {num_blocks} blocks of {tenant!r} was made, and {self.num_free} are free")
        return ids

    def adopt(self, tables: Iterable[tuple[str, np.ndarray]]) -> None:
        """Charges blocks that were taken from the free list before, to those that hold them.

        Args:
          tables: tenant and int64 `[n]` of each sequence. A block that is in several has so many holders.
        """
        tables = list(tables)
        ids = np.concatenate([np.zeros(0, np.int64), *(table for _, table in tables)])
        found, first, counts = np.unique(ids, return_index=True, return_counts=True)
        is_shared = counts > 1
        others = zip(found[is_shared].tolist(), (counts[is_shared] - 1).tolist(), strict=True)
        self._others.update(others)
        of_table = np.repeat(np.arange(len(tables)), [len(table) for _, table in tables])
        charges = np.bincount(of_table[first], minlength=len(tables)).tolist()
        for (tenant, _), num_blocks in zip(tables, charges, strict=True):
            if num_blocks:
                self._charge(tenant, num_blocks)

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds a holder, of the same tenant, to blocks that are taken."""
        for block in block_ids:
            self._others[block] = self._others.get(block, 0) + 1

    def is_shared(self, block: int) -> bool:
        """Whether a block has more than one holder."""
        return block in self._others

    def free(self, tenant: str, block_ids: Sequence[int]) -> None:
        """Takes a holder from each block. Those that have none left are free, and charged no more.

        Raises:
          ValueError: a block is given back more often than it is held. Nothing is free then that was not.
        """
        left: dict[int, int] = {}
        unheld = list(block_ids)
        if self._others:
            unheld = []
            for block in block_ids:
                others = left.get(block, self._others.get(block, 0))
                if others:
                    left[block] = others - 1
                else:
                    unheld.append(block)
        self._allocator.free(unheld)
        if unheld:
            self._charge(tenant, -len(unheld))
        for block, others in left.items():
            if others:
                self._others[block] = others
            else:
                del self._others[block]

    def frees(self, tables: Iterable[Sequence[int]]) -> Iterator[int]:
        """How many blocks would be free once sequences gave all their blocks back: after each, with those before.

        Args:
          tables: the blocks of each, in the order in which they go; taken from as it goes on.
        """
        left: dict[int, int] = {}
        freed = 0
        for table in tables:
            if self._others:
                for block in table:
                    others = left[block] = left.get(block, self._others.get(block, 0) + 1) - 1
                    freed += not others
            else:
                freed += len(table)
            yield freed

    def held_by_none_but(self, tables: Iterable[Sequence[int]]) -> set[int]:
        """The blocks that would be free then."""
        holders = collections.Counter(itertools.chain.from_iterable(tables))
        return {block for block, number in holders.items() if number > self._others.get(block, 0)}

    def _quota(self, tenant: str) -> float:
        quota = self._of_tenants.get(tenant, self._quota_blocks)
        return math.inf if quota is None else quota

    def _charge(self, tenant: str, num_blocks: int) -> None:
        """Counts blocks that a tenant took, or gave back if negative.

        Raises:
          ValueError: more is given back than the tenant holds.
        """
        used = self._used[tenant] + num_blocks
        if used < 0:
            raise ValueError(f"tenant {tenant!r} gives {-num_blocks} blocks back, but holds {self._used[tenant]}")
        if used:
            self._used[tenant] = used
        else:
            del self._used[tenant]
