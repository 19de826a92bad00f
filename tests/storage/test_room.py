"""Room in a tier: all that is needed, of the tenant's own first, or nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ca_jax.storage.lookahead import LookAhead
from ca_jax.storage.orders import TierOrders
from ca_jax.storage.policy import FifoPolicy, LruPolicy, SchedulerAwarePolicy
from ca_jax.storage.room import choose_room

from .policy_simulator import Stored, describe

SIZES = {"x1": 2, "y1": 3, "x2": 1, "y2": 2}  # Stored in this order; tenant x has three blocks, y has five.


def room(lacking: int, excess: int = 0, tenant: str = "x", held: str = "", policy=None):
    orders = TierOrders(LookAhead())
    for key, size in SIZES.items():
        orders.add(key, Stored(key, size), key[0])
        orders.set_held(key, key == held)
    return choose_room(
        policy or LruPolicy(),
        lambda tenant: orders.view(describe, tenant),
        tenant=tenant,
        lacking=lacking,
        excess=excess,
        size_of=lambda key: 0 if key == held else SIZES[key],
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


@given(
    lacking=st.integers(-2, 9),
    excess=st.integers(0, 6),
    tenant=st.sampled_from("xyz"),
    held=st.sampled_from(["", *SIZES]),
    policy=st.sampled_from([LruPolicy(), FifoPolicy(), SchedulerAwarePolicy()]),
)
def test_it_is_enough_or_could_not_be(lacking, excess, tenant, held, policy):
    victims = room(lacking, excess, tenant, held, policy)
    free = {key: size for key, size in SIZES.items() if key != held}
    own = sum(size for key, size in free.items() if key[0] == tenant)
    if victims is None:
        assert own < excess or sum(free.values()) < lacking
    else:
        assert len(set(victims)) == len(victims)
        assert set(victims) <= free.keys()
        assert sum(free[key] for key in victims) >= lacking
        assert sum(free[key] for key in victims if key[0] == tenant) >= excess
