"""Room in a tier: all that is needed, of the tenant's own first, or nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ca_jax.storage.placement.blocks import BlockAllocator, ChargedBlocks, TenantQuota
from ca_jax.storage.placement.orders import LookAhead, TierOrders
from ca_jax.storage.placement.policy import (
    FifoPolicy,
    FreeingPolicy,
    LruPolicy,
    ReturnAwarePolicy,
    SchedulerAwarePolicy,
    choose_room,
)

from .policy_simulator import Stored, describe

# Stored in this order; tenant x has three blocks, y has five.
TABLES = {"x1": [0, 1], "y1": [2, 3, 4], "x2": [5], "y2": [6, 7]}
# The same with four that share: x3 and x4 all they have, x5 one block with them.
SHARED = {**TABLES, "x3": [8, 9, 10], "x4": [8, 9, 10], "x5": [8, 11]}


def room(lacking: int, excess: int = 0, tenant: str = "x", held: str = "", policy=None, tables=TABLES):
    orders, allocator = TierOrders(LookAhead()), BlockAllocator(12)
    blocks = ChargedBlocks(allocator, TenantQuota(None))
    allocator.take({block for table in tables.values() for block in table})
    blocks.adopt((key[0], np.array(table)) for key, table in tables.items())
    for key, table in tables.items():
        orders.add(key, Stored(key, len(table)), key[0])
        orders.set_held(key, key in held.split())
    return choose_room(
        FreeingPolicy(policy or LruPolicy(), blocks, lambda key: () if key in held.split() else tables[key]),
        lambda tenant: orders.view(describe, tenant),
        tenant=tenant,
        lacking=lacking,
        excess=excess,
    )


def test_where_there_is_room_nobody_goes():
    assert room(lacking=0) == ()
    assert room(lacking=-3) == ()


def test_anybody_makes_room_in_the_tier():
    assert room(lacking=2) == ("x1",)
    assert room(lacking=3) == ("x1", "y1")
    assert room(lacking=8) == ("x1", "y1", "x2", "y2")


def test_more_than_there_is_evicts_nobody():
    assert room(lacking=9) is None
    assert room(lacking=8, held="y2") is None
    assert room(lacking=6, held="y2") == ("x1", "y1", "x2")


def test_a_tenant_makes_room_for_itself_first():
    assert room(lacking=0, excess=1, tenant="y") == ("y1",)
    assert room(lacking=3, excess=1, tenant="y") == ("y1",), "which is enough for the tier too"
    assert room(lacking=4, excess=1, tenant="y") == ("y1", "x1")
    assert room(lacking=0, excess=4, tenant="x") is None, "it has three blocks, and others' do not count"
    assert room(lacking=0, excess=2, tenant="x", held="x1") is None
    assert room(lacking=0, excess=1, tenant="nobody") is None


class _Names:
    """A policy that names what it is told."""

    def __init__(self, *keys: str):
        self.keys = keys

    def choose_victims(self, view, num_blocks, *, needed_at=None):
        return self.keys


@pytest.mark.parametrize("keys", [("x2",), ("y1", "y1"), ("y1", "x1")])
def test_a_policy_that_names_too_few_or_who_must_stay_or_one_twice_is_refused(keys):
    with pytest.raises(RuntimeError, match="_Names wanted to free 3 blocks by evicting"):
        room(lacking=3, held="x1", policy=_Names(*keys))


def test_of_those_that_share_a_block_all_go_or_none_goes_for_it():
    kinds = {"tables": SHARED, "held": "x1 x2 y1 y2"}
    assert room(lacking=1, **kinds) == ("x3", "x4"), "two blocks are theirs alone"
    assert room(lacking=3, **kinds) == ("x3", "x4", "x5")
    assert room(lacking=0, excess=4, **kinds) == ("x3", "x4", "x5")
    assert room(lacking=5, **kinds) is None, "what three hold twice is not six blocks"
    kinds["held"] += " x4"
    assert room(lacking=1, **kinds) == ("x5",), "no use in evicting x3"
    assert room(lacking=2, **kinds) is None


@given(
    lacking=st.integers(-2, 13),
    excess=st.integers(0, 9),
    tenant=st.sampled_from("xyz"),
    held=st.sampled_from(["", *SHARED]),
    policy=st.sampled_from([LruPolicy(), FifoPolicy(), SchedulerAwarePolicy(), ReturnAwarePolicy()]),
    tables=st.sampled_from([TABLES, SHARED]),
)
def test_it_is_enough_or_could_not_be(lacking, excess, tenant, held, policy, tables):
    victims = room(lacking, excess, tenant, held, policy, tables)

    def freed_by(going) -> int:
        stay = {block for key, table in tables.items() if key not in going for block in table}
        return len({block for key in going for block in tables[key]} - stay)

    free = tables.keys() - {held}
    if victims is None:
        assert freed_by([key for key in free if key[0] == tenant]) < excess or freed_by(free) < lacking
    else:
        assert len(set(victims)) == len(victims)
        assert set(victims) <= free
        assert freed_by(victims) >= lacking
        assert freed_by([key for key in victims if key[0] == tenant]) >= excess
        assert all(freed_by(victims) > freed_by(set(victims) - {key}) for key in victims), "without need"
