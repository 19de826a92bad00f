"""The blocks of a tier: which are free, and who holds which: each is charged to its tenant and its holders counted.

Whose sessions go when a tenant is over its quota is the eviction policy's choice among that tenant's own:
`TierOrders.view` with its `tenant`, for the blocks that `excess` says.

Not here: that choice, who a tenant is, or which sessions share blocks.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np


class ChargedBlocks:
    """A tier's free list, with every block charged to the tenant that holds it, and counted how often it is held.

    Sequences of one tenant may share a block: each holds it, and it is free when all have given it back. However many
    of them hold it, the tenant is charged for it once: sharing takes no room and no quota, and what one sequence gives
    back counts against a quota just where it counts against the tier, with its last holder. A block never has holders
    of two tenants, so that no tenant's use depends on what another does.

    Deterministic: the same calls give the same ids, the lowest that are free. Neighbours are not sought: rows of one
    layer are apart in memory whatever the ids, and each block is moved to disk by itself. Not thread-safe: it belongs
    to the bookkeeping thread.

    Args:
      num_blocks: of the tier.
      quota_bytes: most that a tenant may hold that is not named; None for no limit. As many whole blocks as fit.
      of_tenants: most bytes of those that are named, in its place.
      block_bytes: bytes of a block.
    """

    def __init__(
        self,
        num_blocks: int,
        quota_bytes: int | None = None,
        of_tenants: Mapping[str, int] | Iterable[tuple[str, int]] = (),
        block_bytes: int = 1,
    ) -> None:
        self.num_blocks = num_blocks
        """Free and taken blocks together."""
        self.num_free = num_blocks
        """Free blocks."""
        self._quota_blocks = math.inf if quota_bytes is None else quota_bytes // block_bytes
        self._of_tenants = {tenant: quota // block_bytes for tenant, quota in dict(of_tenants).items()}
        self._used: collections.Counter[str] = collections.Counter()  # By tenant; those that hold none are left out.
        self._taken = bytearray(num_blocks)
        self._others: dict[int, int] = {}  # Of shared blocks: holders beside the first.
        self._first_unused = 0  # From here on all are free.
        self._returned: list[int] = []  # The free ones before that, as a heap.

    def admits(self, tenant: str, num_blocks: int) -> bool:
        """Whether one sequence of `num_blocks` blocks fits tier and quota at all."""
        return num_blocks <= min(self.num_blocks, self._quota(tenant))

    def lacking(self, num_blocks: int) -> int:
        """Blocks to be freed before so many more can be taken; none, if not positive."""
        return num_blocks - self.num_free

    def excess(self, tenant: str, num_blocks: int) -> int:
        """Blocks of its own that a tenant has to give up before it may take so many more; 0 for none."""
        return int(max(0, self._used[tenant] + num_blocks - self._quota(tenant)))

    def alloc(self, tenant: str, num_blocks: int) -> tuple[int, ...]:
        """Takes blocks, all or nothing. Whether they fit the tenant's quota is not looked at.

        Returns:
          Their ids, in the order in which they should be filled.

        Raises:
          RuntimeError: fewer are free, so what the caller counted is wrong: room is made first.
        """
        if num_blocks > self.num_free:
            raise RuntimeError(f"{num_blocks} blocks for {tenant!r} must be free, got {self.num_free}")
        ids = [heapq.heappop(self._returned) for _ in range(min(num_blocks, len(self._returned)))]
        unused = range(self._first_unused, self._first_unused + num_blocks - len(ids))
        self._first_unused = unused.stop
        ids += unused
        for block in ids:
            self._taken[block] = 1
        self.num_free -= num_blocks
        self._charge(tenant, num_blocks)
        return tuple(ids)

    def adopt(self, tables: Iterable[tuple[str, np.ndarray]]) -> None:
        """Takes the blocks that a catalog says are held, before any other: a second or so for millions.

        Args:
          tables: tenant and int64 `[n]` of each sequence. A block that is in several has so many holders.
        """
        tables = list(tables)
        ids = np.concatenate([np.zeros(0, np.int64), *(table for _, table in tables)])
        if not ids.size:
            return
        holders = np.bincount(ids)
        np.frombuffer(self._taken, np.uint8)[: len(holders)] = holders > 0  # A view: what is set here is set there.
        shared = np.flatnonzero(holders > 1)
        self._others = dict(zip(shared.tolist(), (holders[shared] - 1).tolist(), strict=True))
        of_block = np.empty(len(holders), np.int64)
        of_block[ids] = np.repeat(np.arange(len(tables)), [len(table) for _, table in tables])
        charged = np.bincount(of_block[holders > 0], minlength=len(tables))
        for (tenant, _), num_blocks in zip(tables, charged.tolist(), strict=True):
            self._charge(tenant, num_blocks)
        self.num_free -= int(np.count_nonzero(holders))
        self._first_unused = len(holders)
        self._returned = np.flatnonzero(holders == 0).tolist()  # Ascending, and so a heap.

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds a holder, of the same tenant, to blocks that are taken."""
        for block in block_ids:
            self._others[block] = self._others.get(block, 0) + 1

    @property
    def are_shared(self) -> bool:
        """Whether any block has more than one holder."""
        return bool(self._others)

    def is_shared(self, block: int) -> bool:
        """Whether a block has more than one holder."""
        return block in self._others

    def free(self, tenant: str, block_ids: Sequence[int]) -> None:
        """Takes a holder from each block, all or nothing. Those that have none left are free, and charged no more.

        Raises:
          ValueError: an id that is out of range, or a block is given back more often than it, or its tenant, holds.
        """
        left: dict[int, int] = {}
        unheld: list[int] = []
        for block in block_ids:
            others = left.get(block, self._others.get(block, 0))
            if others:
                left[block] = others - 1
            else:
                unheld.append(block)
        unheld.sort()
        for i, block in enumerate(unheld):
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"a block id must be in [0, {self.num_blocks}), got {block}")
            if not self._taken[block] or (i and unheld[i - 1] == block):
                raise ValueError(f"block {block} is freed twice")
        self._charge(tenant, -len(unheld))
        for block in unheld:
            self._taken[block] = 0
            heapq.heappush(self._returned, block)
        self.num_free += len(unheld)
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
        return self._of_tenants.get(tenant, self._quota_blocks)

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
