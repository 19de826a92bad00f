"""The best that any eviction policy could do: the one that knows the future.

Not here: policies that can be had.
"""

from __future__ import annotations

from collections.abc import Callable

from ca_jax.storage.policy import StoreView


class BeladyPolicy:
    """Evicts what is needed last. For sessions of equal size no policy hits more often.

    Args:
      next_use: when a session is needed next, in any unit; infinity for never.

    Source: Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal, 1966.
    """

    def __init__(self, next_use: Callable[[str], float]):
        self._next_use = next_use

    def choose_victims(self, view: StoreView, num_blocks: int, *, needed_at: int | None = None) -> tuple[str, ...]:
        """See `EvictionPolicy`. Sorts all there is: for comparisons, not for service. `needed_at` is of no concern."""
        victims = []
        entries = (entry for entry in view.by_last_used if entry.num_blocks and not entry.pinned)
        for entry in sorted(entries, key=lambda entry: -self._next_use(entry.key)):
            victims.append(entry.key)
            num_blocks -= entry.num_blocks
            if num_blocks <= 0:
                return tuple(victims)
        return ()
