"""How soon what was evicted is wanted again: the book alone, and a store of each kind."""

from __future__ import annotations

import itertools

import pytest

from ca_jax.storage import Residency
from ca_jax.storage.placement.returns import ReuseGaps
from ca_jax.storage.records import GAP_BOUNDS_S, GapHistogram

from .ssd_helpers import StoppedClock
from .store_helpers import LAYOUT, fetch, ids, load, make_kv, make_store, put, save


def gaps_of(*gaps_s: float) -> GapHistogram:
    """What these gaps are as a histogram, counted bucket by bucket."""
    bounds = [float("-inf"), *GAP_BOUNDS_S, float("inf")]
    counts = tuple(sum(low < gap <= high for gap in gaps_s) for low, high in itertools.pairwise(bounds))
    return GapHistogram(counts=counts, sum_s=sum(gaps_s))


@pytest.fixture
def clock() -> StoppedClock:
    return StoppedClock(1000.0)


def test_a_gap_is_from_the_last_eviction_to_the_first_wish(clock):
    gaps = ReuseGaps(clock)
    gaps.evicted("a")
    clock.now_s += 2
    gaps.evicted("a")
    gaps.evicted("b")
    clock.now_s += 5  # On a bound.
    gaps.wanted("a")
    clock.now_s += 100_000
    for key in ("a", "b", "never there"):
        gaps.wanted(key)
    assert gaps.histogram() == gaps_of(5, 100_005)
    assert sum(gaps.histogram().counts) == 2


def test_what_comes_back_by_itself_and_what_is_given_up_is_no_gap(clock):
    gaps = ReuseGaps(clock)
    gaps.evicted("a")
    gaps.forget("a")
    gaps.forget("never there")
    gaps.wanted("a")
    assert gaps.histogram() == GapHistogram()


def test_a_clock_that_is_set_back_gives_no_negative_gap(clock):
    gaps = ReuseGaps(clock)
    gaps.evicted("a")
    clock.now_s -= 60
    gaps.wanted("a")
    assert gaps.histogram() == gaps_of(0)


def test_the_oldest_evictions_are_forgotten(clock):
    gaps = ReuseGaps(clock, max_keys=3)
    for key in "abcab":  # The order is then c, a, b.
        gaps.evicted(key)
    gaps.evicted("d")
    assert len(gaps._evicted_s) == 3
    gaps.wanted("c")
    assert sum(gaps.histogram().counts) == 0
    for key in "abd":
        gaps.wanted(key)
    assert sum(gaps.histogram().counts) == 3


@pytest.mark.parametrize("way", ["load", "enqueue", "request", "lookup"])
def test_a_miss_behind_an_eviction_from_dram_alone(clock, way):
    store = make_store(4, clock=clock)
    for key in "abc":
        assert save(store, key, ids(8), make_kv(LAYOUT, 8))
    assert store.residency("a") is Residency.ABSENT
    assert store.stats().evict_to_reuse == GapHistogram(), "looking where it is is no wish"
    clock.now_s += 20
    wish = {"load": lambda: load(store, "a", ids(8)), "enqueue": lambda: store.enqueue(0, "a")}
    wish |= {"request": lambda: store.request("a"), "lookup": lambda: store.lookup("a")}
    wish[way]()
    assert load(store, "a", ids(8)) is None
    assert load(store, "b", ids(8)) is not None
    assert load(store, "never there", ids(8)) is None
    stats = store.stats()
    assert (stats.evict_to_reuse, stats.num_evictions, stats.ssd) == (gaps_of(20), 1, None)


def test_a_hit_on_ssd_behind_an_eviction_from_dram(open_store, clock, driver):
    store = open_store(4, ssd_driver=driver, clock=clock)
    put(store, "a", 8)
    put(store, "b", 8, seed=1)
    assert save(store, "c", ids(8), make_kv(LAYOUT, 8))
    assert store.residency("a") is Residency.SSD
    clock.now_s += 400
    fetch(store, "a")
    clock.now_s += 1
    assert load(store, "a", ids(8)) is not None
    stats = store.stats()
    assert (stats.evict_to_reuse, stats.ssd.evict_to_reuse) == (gaps_of(400), GapHistogram())


def test_each_tier_counts_what_it_evicted(open_store, clock):
    """First out of SSD and still in DRAM, where it is served; then out of DRAM too, and missed."""
    store = open_store(6, ssd_blocks=4, clock=clock)
    put(store, "a", 8)
    put(store, "b", 8)
    put(store, "c", 8)
    assert store.residency("a") is Residency.DRAM
    assert [info.key for info in store.list() if info.ssd_tokens] == ["b", "c"]
    clock.now_s += 3
    assert load(store, "a", ids(8)) is not None
    assert store.stats().ssd.evict_to_reuse == GapHistogram(), "DRAM had it: nothing was missed"
    put(store, "d", 16)
    put(store, "e", 16)
    assert store.residency("a") is Residency.ABSENT
    clock.now_s += 10
    store.enqueue(0, "a")
    assert load(store, "a", ids(8)) is None
    stats = store.stats()
    assert (stats.evict_to_reuse, stats.ssd.evict_to_reuse) == (gaps_of(10), gaps_of(13))


@pytest.mark.parametrize("way", ["drop", "expire"])
def test_what_its_owner_has_dropped_or_has_expired_is_not_waited_for(open_store, clock, way):
    store = open_store(4, clock=clock)
    put(store, "a", 8)
    store.set_ttl("a", 50)
    put(store, "b", 8, seed=1)
    assert save(store, "c", ids(8), make_kv(LAYOUT, 8))
    assert store.residency("a") is Residency.SSD
    clock.now_s += 60
    if way == "drop":
        store.drop("a")
    store.poll()
    assert store.residency("a") is Residency.ABSENT
    assert load(store, "a", ids(8)) is None
    assert store.stats().evict_to_reuse == GapHistogram()
