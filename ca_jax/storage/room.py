"""Room in a tier: whom to evict so that a number of blocks fits, and a tenant stays under its quota.

Not here: the choice among sessions (policy), carrying it out.
"""

from __future__ import annotations

from collections.abc import Callable

from ca_jax.storage.policy import EvictionPolicy, StoreView


def choose_room(
    policy: EvictionPolicy,
    view: Callable[[str | None], StoreView],
    *,
    tenant: str,
    lacking: int,
    excess: int,
    size_of: Callable[[str], int],
) -> tuple[str, ...] | None:
    """Names sessions to evict, all that is needed or none.

    Args:
      policy: who chooses.
      view: of the tier, of one tenant's sessions or (None) of everybody's.
      tenant: whose sequence the room is for.
      lacking: blocks the tier lacks; none, if not positive.
      excess: blocks that `tenant` has to give up itself.
      size_of: blocks that the eviction of a session would free; 0 for one that must stay.

    Returns:
      Keys in the order in which they should go; None where there is not enough that may go.

    Raises:
      RuntimeError: the policy named too few, or one that must stay.
    """
    victims = _chosen(policy, view(tenant), excess, size_of) if excess > 0 else ()
    if victims is None:
        return None
    lacking -= sum(map(size_of, victims))
    if lacking <= 0:
        return victims
    # Whoever is named already may be named again, so what that frees has to come on top.
    others = _chosen(policy, view(None), lacking + sum(map(size_of, victims)), size_of)
    return None if others is None else tuple(dict.fromkeys(victims + others))


def _chosen(
    policy: EvictionPolicy, view: StoreView, num_blocks: int, size_of: Callable[[str], int]
) -> tuple[str, ...] | None:
    """The policy's choice, checked; None where there is none."""
    keys = policy.choose_victims(view, num_blocks)
    sizes = [size_of(key) for key in keys]
    if len({*keys}) != len(keys) or not all(sizes) or (keys and sum(sizes) < num_blocks):
        raise RuntimeError(
            f"{type(policy).__name__} wanted to free {num_blocks} blocks by evicting {keys}; "
            f"found that these may free {sizes}"
        )
    return keys or None
