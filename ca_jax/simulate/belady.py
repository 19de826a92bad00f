"""The best that any eviction policy could do: the one that knows the future.

Not here: policies that can be had (`ca_jax.storage.placement.policy`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from ca_jax.storage.placement.policy import StoredEntry, StoreView, last_needed_first


class BeladyPolicy:
    """Evicts what is needed last. For sessions of equal size no policy hits more often.

    Sessions with a waiting job are needed in the queue's order, and before all others, of which it knows more than a
    server can.

    Args:
      next_use: when a session without a waiting job is needed next, in any unit; infinity for never.

    Source: Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal, 1966.
    """

    def __init__(self, next_use: Callable[[str], float]):
        self._next_use = next_use

    def order(self, view: StoreView, needed_at: int | None = None) -> Iterator[StoredEntry]:
        """See `EvictionPolicy`. Sorts all that will return and do not wait: for comparisons, not for service."""
        returning = []
        for entry in view.idle:
            if (next_use := self._next_use(entry.key)) == math.inf:
                yield entry
            else:
                returning.append((next_use, entry))
        yield from (entry for _, entry in sorted(returning, key=lambda each: each[0], reverse=True))
        yield from last_needed_first(view, needed_at)
