"""How much of a tier each tenant holds, and how much it is over what it may.

Whose sessions go when a tenant is over is the eviction policy's choice among that tenant's own: `TierOrders.view` with
its `tenant`, for the blocks that `excess` says.

Not here: that choice, or who a tenant is.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping


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
