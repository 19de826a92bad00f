"""Policies as what they are: pure choices over a view. And what those choices are worth, against Belady's.

Room in a tier: all that is needed, of the tenant's own first, or nothing.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.loop_workload import Stored, describe, hits_of_one_tier, loop_trace
from ca_jax.storage.placement.blocks import ChargedBlocks
from ca_jax.storage.placement.orders import LookAhead, TierOrders
from ca_jax.storage.placement.policy import (
    FifoPolicy,
    LruPolicy,
    ReturnAwarePolicy,
    Room,
    SchedulerAwarePolicy,
    StoredEntry,
    StoreView,
    look_ahead_window,
    make_policy,
)

NAMES = ["scheduler_aware", "return_aware", "lru", "fifo"]


def make_view(stored: list[StoredEntry]) -> StoreView:
    """The view that a store of these entries would give."""
    waiting = [entry for entry in stored if entry.queue_position is not None]
    by_last_used = sorted(stored, key=lambda entry: entry.last_used_s)
    idle = [entry for entry in by_last_used if entry.queue_position is None]
    return StoreView(
        by_last_used=by_last_used,
        by_created=sorted(stored, key=lambda entry: entry.created_s),
        idle=idle,
        by_next_job=sorted(waiting, key=lambda entry: entry.queue_position),
        idle_groups=[[entry for entry in idle if group_of(entry) == group] for group in (0, 1)],
        unsaid=idle,
        expected=[],
    )


def group_of(entry: StoredEntry) -> int:
    """One of two groups, of which neither is empty for long."""
    return ord(entry.key[-1]) % 2


def make_room(policy, stored: StoreView, num_free: int = 0) -> Room:
    """Room in a tier of these sessions, which share no block."""
    tables = {entry.key: range(entry.num_blocks) for entry in stored.by_created}
    blocks = ChargedBlocks(num_free)
    return Room(policy, blocks, lambda tenant: stored, lambda key: tables.get(key, ()), lambda: 0.0)


def choose(policy, stored: StoreView, num_blocks: int, needed_at: int | None = None) -> tuple[str, ...]:
    return make_room(policy, stored).choose(num_blocks, needed_at=needed_at)


# Scheduler-aware eviction.


def test_figure_9_of_the_paper():
    """Job 1 runs, jobs 2 to 9 wait; the host memory has room for two of them, the disks are full."""

    def stored(*jobs: int) -> StoreView:
        return make_view(
            [
                StoredEntry(key=str(job), num_blocks=1, last_used_s=job, created_s=job, queue_position=job - 2)
                for job in jobs
            ]
        )

    dram, ssd = stored(2, 4), stored(3, 5, 6, 7, 8, 9)  # And 1, which is in use.
    window_jobs = look_ahead_window(2.0, 1.0)
    assert make_room(SchedulerAwarePolicy(), dram).plan_fetches(ssd, window_jobs, 8) == (("3",), ("4",))
    assert choose(SchedulerAwarePolicy(), ssd, 1) == ("9",)


@pytest.mark.parametrize("name", ["scheduler_aware", "return_aware"])
def test_none_is_named_that_is_needed_sooner(name):
    waiting = [
        StoredEntry(key=str(place), num_blocks=1, last_used_s=place, created_s=place, queue_position=place)
        for place in (1, 5, 7)
    ]
    assert [entry.key for entry in make_policy(name).order(make_view(waiting), needed_at=3)] == ["7", "5"]
    assert choose(make_policy(name), make_view(waiting), 2, needed_at=3) == ("7", "5")
    assert choose(make_policy(name), make_view(waiting), 3, needed_at=3) == ()
    assert choose(make_policy(name), make_view(waiting), 3, needed_at=0) == ("7", "5", "1")


def test_what_is_used_and_free_is_all_there_is():
    blocks = ChargedBlocks(5)
    blocks.alloc("x", 2)
    tier = Room(SchedulerAwarePolicy(), blocks, lambda tenant: make_view([]), lambda key: (), lambda: 0.0).stats(10)
    assert (tier["capacity_bytes"], tier["used_bytes"], tier["free_bytes"]) == (50, 20, 30)


@st.composite
def entries(draw, prefix="s") -> list[StoredEntry]:
    count = draw(st.integers(0, 12))
    positions = draw(st.permutations(range(2 * count)))
    return [
        StoredEntry(
            key=f"{prefix}{i}",
            num_blocks=draw(st.integers(0, 5)),
            last_used_s=draw(st.integers(0, 1000)) + i / 100,
            created_s=float(i),
            queue_position=positions[i] if draw(st.booleans()) else None,
        )
        for i in range(count)
    ]


@given(stored=entries(), num_blocks=st.integers(1, 20), needed_at=st.none() | st.integers(0, 24), data=st.data())
def test_every_policy_keeps_the_rules(stored, num_blocks, needed_at, data):
    policy = make_policy(data.draw(st.sampled_from(NAMES)))
    by_key = {entry.key: entry for entry in stored}

    def may_go(entry):
        sooner = needed_at is not None and entry.queue_position is not None and entry.queue_position <= needed_at
        return entry.num_blocks and not sooner

    victims = [by_key[key] for key in choose(policy, make_view(stored), num_blocks, needed_at)]
    room = sum(entry.num_blocks for entry in stored if may_go(entry))
    if room < num_blocks:
        assert not victims
        return
    assert len({entry.key for entry in victims}) == len(victims)
    assert all(may_go(entry) for entry in victims)
    assert sum(entry.num_blocks for entry in victims) >= num_blocks
    assert sum(entry.num_blocks for entry in victims[:-1]) < num_blocks, "the last one was not needed"
    order = {
        "lru": lambda entry: entry.last_used_s,
        "fifo": lambda entry: entry.created_s,
        "scheduler_aware": lambda entry: (
            (0, entry.last_used_s) if entry.queue_position is None else (1, -entry.queue_position)
        ),
    }
    order["return_aware"] = order["scheduler_aware"]  # Of those that are all worth the same.
    key = next(order[name] for name in NAMES if type(make_policy(name)) is type(policy))
    assert victims == sorted(filter(may_go, stored), key=key)[: len(victims)]


# Return-aware eviction.


def idle_entry(key: str, used: float, rate: float) -> StoredEntry:
    return StoredEntry(key=key, num_blocks=1, last_used_s=used, created_s=0.0, return_rate=rate)


@given(rates=st.lists(st.floats(0, 1), max_size=12), num_blocks=st.integers(1, 12))
def test_where_worth_rises_and_then_falls_with_time_the_order_is_that_of_all(rates, num_blocks):
    half = len(rates) // 2
    groups = [sorted(each)[::2] + sorted(each)[1::2][::-1] for each in (rates[:half], rates[half:])]
    stored = [idle_entry(f"{i}{'ab'[group]}", i, rate) for group in (0, 1) for i, rate in enumerate(groups[group])]
    victims = choose(ReturnAwarePolicy(), make_view(stored), num_blocks)
    by_key = {entry.key: entry.return_rate for entry in stored}
    assert [by_key[key] for key in victims] == (sorted(rates)[:num_blocks] if num_blocks <= len(rates) else [])


# Prefetching.


@given(
    on_ssd=entries("ssd"),
    in_dram=entries("dram"),
    window_jobs=st.integers(0, 24),
    num_free=st.integers(0, 8),
    reserve=st.integers(0, 4),
    max_fetches=st.integers(0, 9),
    name=st.sampled_from(NAMES),
)
def test_a_plan_has_room_for_what_it_fetches(on_ssd, in_dram, window_jobs, num_free, reserve, max_fetches, name):
    room = make_room(make_policy(name), make_view(in_dram), num_free)
    fetch, evict = room.plan_fetches(make_view(on_ssd), window_jobs, max_fetches, reserve)
    by_key = {entry.key: entry for entry in (*on_ssd, *in_dram)}
    fetched = [by_key[key] for key in fetch]
    evicted = [by_key[key] for key in evict]
    waiting = sorted(
        (entry for entry in on_ssd if entry.queue_position is not None and entry.queue_position < window_jobs),
        key=lambda entry: entry.queue_position,
    )
    assert fetched == waiting[: len(fetched)]
    assert not evicted or fetched
    assert len(fetched) <= max_fetches
    if fetched:
        num_needed = sum(entry.num_blocks for entry in fetched) + reserve
        assert num_needed <= num_free + sum(entry.num_blocks for entry in evicted)
        last = fetched[-1].queue_position
        assert all(entry.queue_position is None or entry.queue_position > last for entry in evicted)
    assert (fetch, evict) == one_by_one(room, waiting[:max_fetches], reserve - num_free)


def one_by_one(room: Room, waiting: list[StoredEntry], lacking: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The plan as it is defined: one fetch after the other, up to the first that lacks room."""
    fetch, evict = [], ()
    for entry in waiting:
        lacking += entry.num_blocks
        if lacking > 0:
            victims = room.choose(lacking, needed_at=entry.queue_position)
            if not victims:
                break
            evict = victims
        fetch.append(entry.key)
    return tuple(fetch), evict


@pytest.mark.parametrize(
    ("available", "mean", "jobs"), [(100, 30, 3), (100, 100, 1), (10, 100, 1), (0, 100, 0), (100, 0, 0)]
)
def test_the_window_is_as_long_as_there_is_room_for_sessions(available, mean, jobs):
    assert look_ahead_window(available, mean) == jobs


# What the choices are worth.


def make_sizes(num_sessions: int, sizes: str, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    size = {
        "equal": lambda: 4,
        "uniform": lambda: rng.randint(1, 20),
        "skewed": lambda: 1 + int(rng.paretovariate(1.5)),
    }
    return {f"s{i}": min(40, size[sizes]()) for i in range(num_sessions)}


@pytest.mark.parametrize(("num_sessions", "seed", "sizes"), [(21, 0, "equal"), (63, 1, "uniform"), (210, 2, "skewed")])
def test_on_a_loop_over_capacity_lru_finds_nothing_and_the_queue_nearly_all_there_is(num_sessions, seed, sizes):
    size_of = make_sizes(num_sessions, sizes, seed)
    num_blocks = round(sum(size_of.values()) / 1.05)
    trace = loop_trace(num_sessions, 8)
    belady = hits_of_one_tier(trace, size_of, num_blocks, None, queue_jobs=0)
    found = [
        hits_of_one_tier(trace, size_of, num_blocks, SchedulerAwarePolicy(), queue_jobs)
        for queue_jobs in (num_sessions - 1, num_sessions // 2)
    ]
    assert min(found) >= 0.9 * belady
    assert hits_of_one_tier(trace, size_of, num_blocks, LruPolicy(), num_sessions - 1) <= 0.02 * belady
    # Not even keeping the smallest sessions for ever, which serves the most jobs, does much better.
    kept = room = 0
    for size in sorted(size_of.values()):
        room += size
        kept += room <= num_blocks
    assert found[0] >= 0.9 * 7 * kept


def test_belady_is_what_trying_all_choices_finds():
    """On a trace short enough to try them all: equal sizes, whom to evict at each miss, or to store nothing."""
    rng = random.Random(0)
    for _ in range(20):
        trace = [rng.choice("abcde") for _ in range(12)]

        def best(i: int, stored: frozenset[str], trace=trace) -> int:
            if i == len(trace):
                return 0
            if trace[i] in stored:
                return 1 + best(i + 1, stored)
            candidates = [stored, *((stored - {gone}) | {trace[i]} for gone in stored if len(stored) == 3)]
            if len(stored) < 3:
                candidates.append(stored | {trace[i]})
            return max(best(i + 1, candidate) for candidate in candidates)

        assert hits_of_one_tier(trace, dict.fromkeys("abcde", 1), 3, None, queue_jobs=0) == best(0, frozenset())


# Stored in this order; tenant x has three blocks, y has five.
TABLES = {"x1": [0, 1], "y1": [2, 3, 4], "x2": [5], "y2": [6, 7]}
# The same with four that share: x3 and x4 all they have, x5 one block with them.
SHARED = {**TABLES, "x3": [8, 9, 10], "x4": [8, 9, 10], "x5": [8, 11]}


class Lacking(ChargedBlocks):
    """Blocks of a tier that lacks so many, and of tenants that are so far over their quota."""

    num_lacking = num_excess = 0

    def lacking(self, num_blocks: int) -> int:
        return self.num_lacking

    def excess(self, tenant: str, num_blocks: int) -> int:
        return self.num_excess


def room(lacking: int, excess: int = 0, tenant: str = "x", held: str = "", policy=None, tables=TABLES):
    orders, blocks = TierOrders(LookAhead(), describe), Lacking(12)
    blocks.num_lacking, blocks.num_excess = lacking, excess
    blocks.adopt((key[0], np.array(table)) for key, table in tables.items())
    for key, table in tables.items():
        orders.add(key, Stored(key, len(table)), key[0])
        orders.set_held(key, key in held.split())

    def table_of(key: str):
        return () if key in held.split() else tables[key]

    return Room(policy or LruPolicy(), blocks, orders.view, table_of, lambda: 0.0).victims(tenant, 1)


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
