"""Moves side by side count once: bytes and seconds of the times in which any was under way."""

from __future__ import annotations

import pytest

from ca_jax.storage.tiers.io import BusyPeriods

from .ssd_helpers import StoppedClock


@pytest.fixture
def clock() -> StoppedClock:
    return StoppedClock()


@pytest.fixture
def told() -> list[tuple[int, float]]:
    return []


@pytest.fixture
def periods(clock, told) -> BusyPeriods:
    return BusyPeriods(lambda num_bytes, seconds: told.append((num_bytes, seconds)), clock)


def test_moves_that_overlap_are_one_period_and_one_alone_is_another(periods, clock, told):
    periods.begin("a")
    clock.now_s = 1.0
    periods.begin("b")
    clock.now_s = 3.0
    periods.end("a", 100)
    assert told == []
    clock.now_s = 4.0
    periods.end("b", 30)
    assert told == [(130, 4.0)]
    clock.now_s = 10.0
    periods.begin("c")
    clock.now_s = 12.0
    periods.end("c", 7)
    assert told == [(130, 4.0), (7, 2.0)]


@pytest.mark.parametrize("failing", ["a", "b"])
def test_a_period_with_a_move_that_failed_says_nothing(periods, clock, told, failing):
    for move in "ab":
        periods.begin(move)
    for move in "ab":
        periods.end(move, None if move == failing else 100)
    assert told == []
    periods.begin("c")
    clock.now_s = 2.0
    periods.end("c", 7)
    assert told == [(7, 2.0)]


def test_a_move_ends_once_and_one_that_never_began_does_not(periods, clock, told):
    periods.end("a", 100)
    periods.begin("a")
    periods.begin("b")
    periods.end("a", None)  # It failed before all it does had settled, and is told of again then.
    periods.end("a", None)
    assert told == []
    periods.end("b", 5)
    assert told == []
