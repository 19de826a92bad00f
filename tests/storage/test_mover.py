"""Moves of blocks: a few at a time, on time, and ended only when nothing touches memory any more."""

from __future__ import annotations

import concurrent.futures
import threading

import pytest

from ca_jax.storage.records import BlockIoError, IoFailure, MissReason, Residency
from ca_jax.storage.tiers.disk import MAX_READS, BusyPeriods

from .store_helpers import LAYOUT, PATIENCE_S, Disk, StoppedClock, ids, load, make_blocks, put, used_blocks, wait_until


class Device:
    """Reads that begin when the tier says so and end when the test does."""

    def __init__(self, tier, monkeypatch) -> None:
        self.begun: list[int] = []
        self._changed = threading.Condition()
        self._ends: dict[int, Exception | None] = {}
        self._read_it = tier._read
        monkeypatch.setattr(tier, "_read", self._read)

    def _read(self, block: int, dst) -> None:
        with self._changed:
            self.begun.append(block)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: block in self._ends, PATIENCE_S)
        if self._ends[block] is not None:
            raise self._ends[block]
        self._read_it(block, dst)

    def end(self, *blocks: int, error: Exception | None = None) -> None:
        with self._changed:
            self._ends |= dict.fromkeys(blocks, error)
            self._changed.notify_all()

    def wait_begun(self, num_blocks: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= num_blocks, PATIENCE_S), self.begun
            assert len(self.begun) == num_blocks


def test_the_first_failure_decides_and_is_told_when_the_others_that_begun_have_ended(tmp_path, monkeypatch):
    tier, blocks = Disk("zarr3", tmp_path).open(), range(MAX_READS + 2)
    tier.write_blocks(blocks, make_blocks(LAYOUT, len(blocks)))
    device = Device(tier, monkeypatch)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        move = threads.submit(tier.read_blocks, blocks, make_blocks(LAYOUT, len(blocks)))
        device.wait_begun(MAX_READS)
        device.end(0)
        device.wait_begun(MAX_READS + 1)
        assert sorted(device.begun) == [*range(MAX_READS + 1)], "in order"
        device.end(1, error=OSError("broken"))
        assert not concurrent.futures.wait([move], 0.05).done, "others are under way"
        device.end(*blocks[2:], error=OSError("another"))
        with pytest.raises(BlockIoError, match="OSError: broken") as raised:
            move.result(PATIENCE_S)
    assert raised.value.reason is IoFailure.DEVICE
    assert len(device.begun) == MAX_READS + 1, "what had not begun never did"


def test_to_stand_behind_others_that_move_is_not_to_be_late_but_behind_a_stalled_disk(open_store, gates, monkeypatch):
    store = open_store(12)
    for key, num_tokens in (("a", 20), ("b", 4)):
        put(store, key, num_tokens)
        store.leave_dram(key)
    device = Device(gates[0]._tier, monkeypatch)
    assert store.request("a")
    device.wait_begun(MAX_READS)
    assert store.request("b")  # Its one block stands behind the fifth of a.
    for num_begun in (1, 2):
        gates[0].let_time_pass(4.0)
        assert not store._ssd.is_late
        device.end(device.begun[num_begun - 1])
        device.wait_begun(MAX_READS + num_begun)
    assert store.residency("a") is store.residency("b") is Residency.PENDING, "8 s old, and the disk moves"
    gates[0].let_time_pass(5.1)
    wait_until(store, lambda: store.residency("a") is store.residency("b") is Residency.SSD)
    assert load(store, "b", ids(4)) is None
    assert store.stats().misses[MissReason.DEADLINE] == 1
    assert used_blocks(store) == 6, "bytes may still arrive"
    device.end(*device.begun)
    wait_until(store, lambda: used_blocks(store) == 0)
    assert len(device.begun) == MAX_READS + 2, "what had not begun never did"


# Moves side by side count once: bytes and seconds of the times in which any was under way.


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        # When, which move begins, or ends with how many bytes; None: it failed.
        ([(0, "a"), (1, "b"), (3, "a", 100), (4, "b", 30), (10, "c"), (12, "c", 7)], [(130, 4), (7, 2)]),
        ([(0, "a"), (0, "b"), (1, "a", None), (2, "b", 100), (2, "c"), (4, "c", 7)], [(7, 2)]),
        ([(0, "a"), (0, "b"), (1, "a", 100), (2, "b", None), (2, "c"), (4, "c", 7)], [(7, 2)]),
        # It never began; it failed before all it does had settled, and is told of again then.
        ([(0, "a", 100), (0, "a"), (0, "b"), (1, "a", None), (2, "a", None), (3, "b", 5)], []),
    ],
)
def test_a_period_is_told_of_when_none_is_under_way_any_more_and_none_failed(events, expected):
    clock = StoppedClock()
    told: list[tuple[int, float]] = []
    periods = BusyPeriods(lambda num_bytes, seconds: told.append((num_bytes, seconds)), clock)
    for now_s, move, *ended in events:
        clock.now_s = now_s
        if ended:
            periods.end(move, *ended)
        else:
            periods.begin(move)
    assert told == expected
