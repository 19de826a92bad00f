"""What is learned of returns, against counts taken by hand, and what it is worth, against simulated waits.

How soon what was evicted is wanted again: the book alone, and a store of each kind.
"""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from ca_jax.storage.placement import returns
from ca_jax.storage.placement.returns import NUM_GROUPS, ReturnTimes, ReuseGaps, best_rates
from ca_jax.storage.records import GAP_BOUNDS_S, GapHistogram, Residency
from ca_jax.storage.store import AttentionStore

from .store_helpers import LAYOUT, PATIENCE_S, StoppedClock, ids, load, make_kv, make_store, put, save, wait_until


def serve(times: ReturnTimes, clock: StoppedClock, turns: list[tuple[float, str]]) -> None:
    """Turns that take no time."""
    for now_s, key in sorted(turns):
        clock.now_s = now_s
        times.came(key)
        times.left(key)


def test_people_who_read_first_are_worth_more_when_they_are_about_to_come_back():
    """All come back after 40 to 60 s, if at all; the rate rises until then, and what stayed away is worth little."""
    clock = StoppedClock()
    times = ReturnTimes(clock)
    rng = np.random.default_rng(0)
    began_s = rng.uniform(0, 5000, 1000)
    turns = [(now_s, f"s{i}") for i, now_s in enumerate(began_s)]
    turns += [(now_s + rng.uniform(40, 60), f"s{i}") for i, now_s in enumerate(began_s) if i % 3 == 0]
    serve(times, clock, turns)
    new, reading, due, late, gone = (times.rate(0, clock.now_s - wait_s) for wait_s in (0.0, 20.0, 46.0, 100.0, 1000.0))
    assert gone < late < new < reading < due
    assert 1 / 3 / 60 < new < 1 / 3 / 40  # One in three comes back, and those who do not are given up by then.


def test_counts_are_those_of_a_plain_tally():
    """Against returns and waits sorted into the bins all at once, for the sessions of each number of turns."""
    clock = StoppedClock()
    times = ReturnTimes(clock)
    rng = np.random.default_rng(1)
    turns = [(float(now_s), f"s{int(rng.integers(80))}") for now_s in np.cumsum(rng.exponential(3.0, 1500))]
    serve(times, clock, turns)
    starts, ends = np.array(returns._STARTS_S), np.array(returns._ENDS_S)
    num_returns, exposure = np.zeros((2, NUM_GROUPS, len(starts)))
    for key in {key for _, key in turns}:
        own = [now_s for now_s, other in turns if other == key]
        for i, now_s in enumerate(own):
            group = min(i, NUM_GROUPS - 1)
            wait_s = (own[i + 1] if i + 1 < len(own) else clock.now_s) - now_s
            exposure[group] += np.clip(wait_s - starts, 0, ends - starts) / (ends - starts)
            if i + 1 < len(own):
                num_returns[group, np.searchsorted(starts, wait_s, side="right") - 1] += 1
    np.testing.assert_array_equal(times._num_returns, num_returns)
    np.testing.assert_allclose(times._exposed(), exposure, atol=1e-6)


def test_who_stays_away_for_long_is_forgotten_whether_a_turn_came_or_not():
    clock = StoppedClock()
    times = ReturnTimes(clock)
    serve(times, clock, [(float(i), f"s{i % 50}") for i in range(200)])
    times.came("s0")  # And never ends.
    clock.now_s = 20 * 3600.0
    times.came("other")
    assert not times._last


def test_a_clock_that_goes_back_is_borne(clock):
    times = ReturnTimes(clock)
    for now_s in (100.0, 50.0, 120.0, 80.0):
        clock.now_s = now_s
        times.came("a")
        times.left("a")
    assert np.all(times._fit() > 0)
    assert times.rate(0, 1e6) > 0


def test_another_process_goes_on_with_what_was_learnt():
    """Who waits at the end counts with the time so far; what came before counts as if it had been seen here."""
    clock = StoppedClock()
    first, second = ReturnTimes(clock), ReturnTimes(clock)
    serve(first, clock, [(3.0 * i, f"s{i % 7}") for i in range(100)])
    clock.now_s += 500.0
    second.adopt(json.loads(json.dumps(first.learnt())))
    np.testing.assert_array_equal(second._num_returns, first._num_returns)
    np.testing.assert_array_equal(second._exposed(), first._exposed())
    assert [second.rate(3, clock.now_s - wait_s) for wait_s in (1.0, 20.0, 90.0)] == [
        first._fit()[3][returns._bin_of(wait_s)] for wait_s in (1.0, 20.0, 90.0)
    ]
    assert second.group("s0") == 0, "sessions themselves are not known"


@pytest.mark.parametrize(
    ("learnt", "told"),
    [
        ([], "must be tables of numbers"),
        ({"num_returns": [[1.0]]}, "must be tables of numbers"),
        ({"num_returns": [[1.0]], "exposure": [[1.0]]}, r"got \(1, 1\)"),
        ({"num_returns": [[-1.0] * 32] * 4, "exposure": [[1.0] * 32] * 4}, "numbers >= 0"),
        ({"num_returns": [[1.0] * 32] * 4, "exposure": [[float("nan")] * 32] * 4}, "numbers >= 0"),
        ({"num_returns": [[1.0], [1.0, 2.0]], "exposure": [[1.0]]}, "inhomogeneous"),
    ],
)
def test_what_is_nothing_learnt_is_refused(learnt, told):
    times = ReturnTimes(StoppedClock())
    before = times.learnt()
    with pytest.raises(ValueError, match=told):
        times.adopt(learnt)
    assert times.learnt() == before


def test_a_directory_s_next_store_knows_who_comes_back(open_store, directory, clock, caplog):
    """Sessions of two turns came back, those of one did not: the next store evicts by that from its first turn on."""

    def rates(store: AttentionStore) -> list[float]:
        return [store._returns.rate(group, clock.now_s - 20) for group in range(NUM_GROUPS)]

    store = open_store(8, clock=clock, eviction_policy="return_aware")
    unknown = rates(store)
    for i in range(40):
        for turn in range(3 if i % 2 else 1):
            clock.now_s += 20 if turn else 1
            store.enqueue((i, turn), f"s{i}")
            store.pin(f"s{i}")
            store.dequeue((i, turn))
            store.unpin(f"s{i}")
    store.close()
    assert not list(directory.glob("*.new"))
    known = rates(open_store(8, clock=clock, eviction_policy="return_aware"))
    assert known[1] > 2 * known[0] > 0
    assert known != unknown

    open_store(8, clock=clock, eviction_policy="lru").close()
    assert (directory / "returns.json").exists(), "one that learns nothing leaves it"
    (directory / "returns.json").write_text("{")
    assert rates(open_store(8, clock=clock, eviction_policy="return_aware")) == unknown
    assert "what was learnt of returns is not used" in caplog.text


@pytest.mark.parametrize("answers", [True, False])
def test_a_store_whose_disk_does_not_answer_leaves_what_was_learnt_alone(open_store, directory, gates, clock, answers):
    open_store(8, clock=clock, eviction_policy="return_aware").close()
    before = (directory / "returns.json").read_bytes()
    store = open_store(8, clock=clock, eviction_policy="return_aware")
    if not answers:
        gates[-1].writes.close()
    save(store, "a", ids(4), make_kv(LAYOUT, 4))
    for turn in range(3):
        clock.now_s += 20
        store.enqueue(turn, "a")
        store.pin("a")
        store.dequeue(turn)
        store.unpin("a")
    store.close(PATIENCE_S if answers else 0.05)
    gates[-1].writes.open()
    assert ((directory / "returns.json").read_bytes() == before) != answers


def test_the_rate_is_that_of_the_best_time_to_give_up():
    """Against a plain search, bin by bin, over each time at which one might give up."""
    rng = np.random.default_rng(2)
    hazard = rng.exponential(0.5, (3, 7))
    widths_s = rng.uniform(0.5, 2.0, 7)
    rates = best_rates(hazard, widths_s)
    for group in range(3):
        for begin in range(7):
            best, away, wait_s = 0.0, 1.0, 0.0
            for i in range(begin, 7):
                stays = np.exp(-hazard[group, i])
                wait_s += away * widths_s[i] * (1 - stays) / hazard[group, i]
                away *= stays
                best = max(best, (1 - away) / wait_s)
            assert rates[group, begin] == pytest.approx(best)


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


def test_the_oldest_evictions_are_forgotten(clock, monkeypatch):
    monkeypatch.setattr(returns, "_MAX_KEYS", 3)
    gaps = ReuseGaps(clock)
    for key in "abcab":  # The order is then c, a, b.
        gaps.evicted(key)
    gaps.evicted("d")
    assert len(gaps._evicted_s) == 3
    gaps.wanted("c")
    assert sum(gaps.histogram().counts) == 0
    for key in "abd":
        gaps.wanted(key)
    assert sum(gaps.histogram().counts) == 3


@pytest.mark.parametrize("way", ["load", "enqueue", "request"])
def test_a_miss_behind_an_eviction_from_dram_alone(clock, way):
    store = make_store(4, clock=clock)
    for key in "abc":
        assert save(store, key, ids(8), make_kv(LAYOUT, 8))
    assert store.residency("a") is Residency.ABSENT
    assert store.stats().evict_to_reuse == GapHistogram(), "looking where it is is no wish"
    clock.now_s += 20
    wish = {"load": lambda: load(store, "a", ids(8)), "enqueue": lambda: store.enqueue(0, "a")}
    wish |= {"request": lambda: store.request("a")}
    wish[way]()
    assert load(store, "a", ids(8)) is None
    assert load(store, "b", ids(8)) is not None
    assert load(store, "never there", ids(8)) is None
    stats = store.stats()
    assert (stats.evict_to_reuse, stats.num_evictions, stats.ssd) == (gaps_of(20), 1, None)


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


# What clients say of it.


@pytest.mark.parametrize("policy", ["scheduler_aware", "return_aware"])
def test_whose_client_says_that_it_will_be_back_soon_stays(policy):
    clock = StoppedClock()
    store = make_store(6, eviction_policy=policy, clock=clock)
    for key in "abc":
        put(store, key, 8)
        clock.now_s += 100
    store.expect_back("a", 20)
    store.expect_back("c", 10_000)
    put(store, "d", 8)
    assert [info.key for info in store.list()] == ["a", "b", "d"], "c was used last, and will be away for longest"
    clock.now_s += 31
    put(store, "e", 8)
    assert [info.key for info in store.list()] == ["a", "d", "e"], "a was to be back by then, but 1 s ago"
    clock.now_s += 100
    put(store, "f", 8)
    put(store, "g", 8)
    assert [info.key for info in store.list()] == ["e", "f", "g"], "what was said does not hold for ever"


def test_what_is_said_during_a_turn_counts_from_its_end_and_until_the_next():
    clock = StoppedClock()
    store = make_store(6, clock=clock)

    def expected_s():
        return {info.key: info.expected_s for info in store.list()}.get("a")

    store.enqueue(0, "a")
    store.pin("a")
    store.expect_back("a", 20)
    store.dequeue(0)
    put(store, "a", 8)
    clock.now_s = 50
    assert expected_s() is None
    store.unpin("a")
    assert expected_s() == 80
    store.enqueue(1, "a")
    assert expected_s() is None
    store.dequeue(1)
    store.expect_back("a", 4)
    assert expected_s() == 56
    store.expect_back("a", None)
    assert expected_s() is None
    with pytest.raises(ValueError, match="seconds must be a number of seconds >= 0"):
        store.expect_back("a", -1.0)


def test_what_is_said_of_a_session_that_never_is_stored_is_forgotten():
    clock = StoppedClock()
    said = returns.SaidReturns(clock)
    said.say("a", 10, is_busy=True)
    assert said.until_s("a") is None
    said.left("a")
    assert (said.until_s("a"), said.away_s("a", -5.0), said.rate("a")) == (15, 15, 1 / 15)
    said.forget("a")
    assert (said.until_s("a"), said.away_s("a", -5.0), said.rate("a")) == (None, 5, None)


def test_what_is_said_of_a_key_of_which_nothing_is_stored_is_not_kept(clock):
    store = make_store(6, clock=clock)
    for key in ("never stored", "a"):
        store.expect_back(key, 20)
    assert not store._index.said._due_s
    put(store, "a", 8)
    assert [info.expected_s for info in store.list()] == [None]


@pytest.fixture
def soon_back(open_store, clock):
    """A store of room for two sessions: `a` is on SSD alone and b and c are in DRAM, used at 0, 100 and 200 s."""
    store = open_store(4, clock=clock, eviction_policy="scheduler_aware")
    for key in "abc":
        put(store, key, 8)
        clock.now_s += 100
    assert [store.residency(key) for key in "abc"] == [Residency.SSD, Residency.DRAM, Residency.DRAM]
    return store


def test_what_is_expected_within_seconds_is_fetched_in_place_of_what_will_be_away_for_longer(soon_back, clock):
    store = soon_back
    store.expect_back("a", 60)
    store.poll()
    assert store.residency("a") is Residency.SSD, "a minute is no reason to hold DRAM"
    clock.now_s += 55
    store.poll()
    wait_until(store, lambda: store.residency("a") is Residency.DRAM)
    assert [store.residency(key) for key in "bc"] == [Residency.SSD, Residency.DRAM]
    assert store.stats().ssd.num_fetches == 1


@pytest.mark.parametrize("others", ["sooner", "queued"])
def test_nothing_is_fetched_early_in_place_of_what_is_wanted_sooner(soon_back, clock, others):
    store = soon_back
    for number, key in enumerate("bc"):
        if others == "sooner":
            store.expect_back(key, 2)
        else:
            store.enqueue(number, key)
    store.expect_back("a", 5)
    store.poll()
    assert [store.residency(key) for key in "abc"] == [Residency.SSD, Residency.DRAM, Residency.DRAM]


def test_what_is_expected_is_fetched_once_and_not_after_it_has_come(soon_back, clock):
    store = soon_back
    store.expect_back("a", 5)
    store.expect_back("a", None)
    store.poll()
    assert store.residency("a") is Residency.SSD
    store.expect_back("a", 5)
    store.drop("b")
    store.poll()
    wait_until(store, lambda: store.residency("a") is Residency.DRAM)
    assert store.stats().ssd.num_fetches == 1


@pytest.mark.parametrize("first", ["early", "for a job"])
def test_an_early_fetch_waits_while_another_fetch_runs(open_store, gates, clock, first):
    """What is fetched early would have others wait for the SSD, a job or one that is back sooner."""
    store = open_store(6, clock=clock, eviction_policy="scheduler_aware")
    for key in "abcde":
        put(store, key, 8)
        clock.now_s += 100
    gates[0].reads.close()
    if first == "early":
        store.expect_back("a", 5)
    else:
        store.enqueue(0, "a")
    store.expect_back("b", 6)
    for _ in range(3):
        store.poll()
        assert [store.residency(key) for key in "ab"] == [Residency.PENDING, Residency.SSD]
    gates[0].reads.open()
    wait_until(store, lambda: store.residency("b") is Residency.DRAM)
    assert [store.residency(key) for key in "acde"] == [Residency.DRAM, Residency.SSD, Residency.SSD, Residency.DRAM]
    assert store.stats().ssd.num_fetches == 2
