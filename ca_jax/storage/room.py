"""Room in a tier: whom to evict so that a number of blocks fits, and a tenant stays under its quota.

Sessions may share blocks, and then what the eviction of several frees is no sum: a block goes with the last that holds
it. Policies choose by how many blocks sessions hold; `FreeingPolicy` asks them for more until what they name is enough.

Not here: the choice among sessions (policy), who holds which block (quota), carrying it out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ca_jax.storage.policy import EvictionPolicy, StoreView
from ca_jax.storage.quota import ChargedBlocks


class FreeingPolicy:
    """Another policy's choice, with the blocks counted that are freed, and not those that are held.

    Nobody is named whose eviction frees nothing. Where blocks are shared the policy is asked O(log n) times.

    Args:
      policy: who chooses.
      blocks: who knows which are shared.
      table_of: blocks that a session holds; none for one that must stay.

    Raises:
      RuntimeError: of any choice: the policy named too few, one twice, or one that must stay.
    """

    def __init__(self, policy: EvictionPolicy, blocks: ChargedBlocks, table_of: Callable[[str], Sequence[int]]) -> None:
        self._policy = policy
        self._blocks = blocks
        self._table_of = table_of

    def choose_victims(self, view: StoreView, num_blocks: int, *, needed_at: int | None = None) -> tuple[str, ...]:
        """See `EvictionPolicy`; what is named frees at least `num_blocks` blocks."""
        wanted, asked_for_all = num_blocks, False
        while True:
            keys = self._policy.choose_victims(view, wanted, needed_at=needed_at)
            if keys:
                tables = self._tables_of(keys, wanted)
                freed = self._blocks.frees(tables)
                if freed[-1] >= num_blocks:
                    return self._that_count(keys, tables, freed, num_blocks)
                wanted *= 2
            if asked_for_all:
                return ()
            if not keys:  # So many are not held, and what is held may be enough.
                wanted, asked_for_all = _num_held(view, needed_at), True
                if wanted < num_blocks:
                    return ()

    def frees(self, keys: Sequence[str]) -> int:
        """How many blocks the eviction of sessions frees."""
        return self._blocks.frees(map(self._table_of, keys))[-1] if keys else 0

    def _tables_of(self, keys: tuple[str, ...], num_blocks: int) -> list[Sequence[int]]:
        """What sessions hold that the policy named, checked."""
        tables = [self._table_of(key) for key in keys]
        sizes = [len(table) for table in tables]
        if len({*keys}) != len(keys) or not all(sizes) or sum(sizes) < num_blocks:
            raise RuntimeError(
                f"{type(self._policy).__name__} wanted to free {num_blocks} blocks by evicting {keys}; "
                f"found that these may free {sizes}"
            )
        return tables

    def _that_count(
        self, keys: tuple[str, ...], tables: list[Sequence[int]], freed: list[int], num_blocks: int
    ) -> tuple[str, ...]:
        """The first ones that are enough, without those of whose blocks none is freed."""
        num_keys = next(index for index, number in enumerate(freed, 1) if number >= num_blocks)
        if all(more > less for less, more in zip((0, *freed), freed[:num_keys], strict=False)):
            return keys[:num_keys]
        goes = self._blocks.held_by_none_but(tables[:num_keys])
        return tuple(key for key, table in zip(keys[:num_keys], tables, strict=False) if not goes.isdisjoint(table))


def choose_room(
    policy: FreeingPolicy,
    view: Callable[[str | None], StoreView],
    *,
    tenant: str,
    lacking: int,
    excess: int,
) -> tuple[str, ...] | None:
    """Names sessions to evict, all that is needed or none.

    Args:
      policy: who chooses.
      view: of the tier, of one tenant's sessions or (None) of everybody's.
      tenant: whose sequence the room is for.
      lacking: blocks the tier lacks; none, if not positive.
      excess: blocks that `tenant` has to give up itself.

    Returns:
      Keys in the order in which they should go; None where there is not enough that may go.

    Raises:
      RuntimeError: the policy named too few, or one that must stay.
    """
    victims = policy.choose_victims(view(tenant), excess) if excess > 0 else ()
    if excess > 0 and not victims:
        return None
    if policy.frees(victims) >= lacking:
        return victims
    others = policy.choose_victims(view(None), lacking)  # Whoever is named already may be named again.
    return tuple(dict.fromkeys(victims + others)) if others else None


def _num_held(view: StoreView, needed_at: int | None) -> int:
    """Blocks of all sessions that may be evicted, for a job in that place; those that several share count for each."""
    return sum(
        entry.num_blocks
        for entry in view.by_last_used
        if not entry.pinned and (needed_at is None or entry.queue_position is None or entry.queue_position > needed_at)
    )
