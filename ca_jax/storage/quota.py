"""How much of a tier each tenant holds, and how much it is over what it may.

Whose sessions go when a tenant is over is the eviction policy's choice among that tenant's own: `TierOrders.view` with
its `tenant`, for the blocks that `excess` says.

Not here: that choice, or who a tenant is.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from ca_jax.storage.tier import BlockAllocator


class TenantQuota:
    """Blocks held by tenant, against one quota for each. Belongs to the thread that keeps the books.

    Args:
      quota_blocks: most blocks a tenant may hold; None for no limit.

    Raises:
      ValueError: the quota is negative.
    """

    def __init__(self, quota_blocks: int | None):
        if quota_blocks is not None and quota_blocks < 0:
            raise ValueError(f"quota wanted a number of blocks >= 0, or None, found {quota_blocks}")
        self._quota_blocks = quota_blocks
        self._used: collections.Counter[str] = collections.Counter()

    @property
    def used(self) -> Mapping[str, int]:
        """Blocks held, by tenant; those that hold none are left out."""
        return self._used

    def charge(self, tenant: str, num_blocks: int) -> None:
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

    def admits(self, num_blocks: int) -> bool:
        """Whether one sequence of `num_blocks` blocks fits a tenant's quota at all."""
        return self._quota_blocks is None or num_blocks <= self._quota_blocks

    def excess(self, tenant: str, wanted_blocks: int = 0) -> int:
        """Blocks of its own that a tenant has to give up before it may take `wanted_blocks` more; 0 for none."""
        if self._quota_blocks is None:
            return 0
        return max(0, self._used[tenant] + wanted_blocks - self._quota_blocks)


class ChargedBlocks:
    """A tier's free list, with every block charged to the tenant that holds it.

    Args:
      allocator: the free list.
      quota_blocks: most blocks a tenant may hold; None for no limit.
    """

    def __init__(self, allocator: BlockAllocator, quota_blocks: int | None):
        self._allocator = allocator
        self._quota = TenantQuota(quota_blocks)

    @property
    def num_blocks(self) -> int:
        """Free and taken blocks together."""
        return self._allocator.num_blocks

    @property
    def num_free(self) -> int:
        """Free blocks."""
        return self._allocator.num_free

    def admits(self, num_blocks: int) -> bool:
        """Whether one sequence of `num_blocks` blocks fits tier and quota at all."""
        return num_blocks <= self.num_blocks and self._quota.admits(num_blocks)

    def lacking(self, num_blocks: int) -> int:
        """Blocks to be freed before so many more can be taken; none, if not positive."""
        return num_blocks - self._allocator.num_free

    def excess(self, tenant: str, num_blocks: int) -> int:
        """Blocks of its own that a tenant has to give up before it may take so many more."""
        return self._quota.excess(tenant, num_blocks)

    def alloc(self, tenant: str, num_blocks: int, after: int | None = None) -> tuple[int, ...] | None:
        """Takes blocks, all or none; see `BlockAllocator.alloc`."""
        ids = self._allocator.alloc(num_blocks, after)
        if ids:
            self._quota.charge(tenant, len(ids))
        return ids

    def adopt(self, tenant: str, num_blocks: int) -> None:
        """Charges blocks that were taken from the free list before."""
        self._quota.charge(tenant, num_blocks)

    def free(self, tenant: str, block_ids: Sequence[int]) -> None:
        """Gives blocks back."""
        self._allocator.free(block_ids)
        if block_ids:
            self._quota.charge(tenant, -len(block_ids))
