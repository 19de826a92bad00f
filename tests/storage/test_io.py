"""Moves under one handle: in order, a few at a time, on time, and settled only when nothing touches memory any more."""

from __future__ import annotations

import threading

import pytest

from ca_jax.storage.records import BlockIoError, IoFailure
from ca_jax.storage.tiers.io import BusyPeriods, IoHandle, IoQueue

from .store_helpers import PATIENCE_S, StoppedClock


class Device:
    """Operations that begin when the queue says so and end when the test does."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._changed = threading.Condition()
        self._ends: dict[str, Exception | None] = {}

    def operation(self, name: str):
        def run() -> None:
            with self._changed:
                self.begun.append(name)
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: name in self._ends, PATIENCE_S)
            if self._ends[name] is not None:
                raise self._ends[name]

        return run

    def operations(self, names: str) -> list:
        return [self.operation(name) for name in names]

    def end(self, name: str, error: Exception | None = None) -> None:
        with self._changed:
            self._ends[name] = error
            self._changed.notify_all()

    def end_all(self, names: str) -> None:
        for name in names:
            self.end(name)

    def wait_begun(self, names: str) -> None:
        """Waits until these have begun, in any order, and no other."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= len(names), PATIENCE_S), self.begun
            assert sorted(self.begun) == sorted(names)


def wait_left(handle: IoHandle, num_left: int) -> None:
    """Waits until so many operations of a move are left."""
    ended = threading.Event()
    while handle._num_left > num_left:
        ended.wait(0.001)


@pytest.fixture
def clock() -> StoppedClock:
    return StoppedClock()


@pytest.fixture
def device():
    device = Device()
    yield device
    device.end_all("abcdefghijklmnopqrstuvwxyz")


@pytest.fixture
def queue(clock, device) -> IoQueue:
    return IoQueue(max_in_flight=2, deadline_s=10.0, clock=clock)


def test_a_few_run_at_a_time_in_order(queue, device):
    first, second = queue.submit(device.operations("abc")), queue.submit(device.operations("d"))
    device.wait_begun("ab")
    device.end("b")
    device.wait_begun("abc")
    device.end("a")
    device.wait_begun("abcd")
    assert device.begun[2:] == ["c", "d"]
    assert not first.done()
    device.end("c")
    first.result()
    assert first.settled
    assert not second.done()
    device.end("d")
    second.result()


def test_the_last_operation_waits_for_all_others_and_goes_before_other_moves(queue, device):
    handle = queue.submit(device.operations("ab"), last=device.operation("z"))
    queue.submit(device.operations("cd"))
    device.end("a")
    device.wait_begun("abc")
    device.end("b")
    device.wait_begun("abcz")
    assert not handle.done()
    device.end("z")
    handle.result()


def test_the_first_failure_decides_and_memory_stays_taken_until_the_others_end(queue, device):
    handle = queue.submit(device.operations("abc"))
    device.wait_begun("ab")
    device.end("a", OSError("broken"))
    with pytest.raises(BlockIoError, match="OSError: broken") as raised:
        handle.result()
    assert raised.value.reason is IoFailure.DEVICE
    assert not handle.settled
    device.end("b", OSError("another"))
    assert handle.wait_settled(PATIENCE_S)
    assert str(handle.error) == "OSError: broken"
    other = queue.submit(device.operations("d"))
    device.wait_begun("abd")  # c never begins.
    device.end("d")
    other.result()


def test_a_failure_counts_though_all_others_end_before_it_is_told(queue, device, monkeypatch):
    handle, advance = queue.submit(device.operations("ab")), queue._advance
    failed, others_ended = threading.Event(), threading.Event()

    def advance_last_where_failed(handle: IoHandle, error: BlockIoError | None = None) -> None:
        if error is not None:
            failed.set()
            assert others_ended.wait(PATIENCE_S)
        advance(handle, error)
        others_ended.set()

    monkeypatch.setattr(queue, "_advance", advance_last_where_failed)
    device.wait_begun("ab")
    device.end("a", OSError("broken"))
    assert failed.wait(PATIENCE_S)
    device.end("b")
    with pytest.raises(BlockIoError, match="OSError: broken"):
        handle.result()
    assert handle.settled


def test_no_progress_within_the_deadline_is_an_error_and_late_ends_change_nothing(queue, device, clock):
    handle = queue.submit(device.operations("abc"))
    device.wait_begun("ab")
    clock.now_s = 9.0
    device.end("a")
    device.wait_begun("abc")
    clock.now_s = 18.9  # 9.9 s after the last progress: the end of a, the begin of c.
    queue.poll()
    assert not handle.done()
    clock.now_s = 19.1
    queue.poll()
    assert handle.error.reason is IoFailure.DEADLINE
    assert "within 10.0 s, and has not; 2 operations are left, 2 of them begun" in str(handle.error)
    device.end("b")
    wait_left(handle, 1)
    assert not handle.settled
    device.end("c", OSError("broken"))
    assert handle.wait_settled(PATIENCE_S)
    assert handle.error.reason is IoFailure.DEADLINE


def test_to_stand_behind_others_that_move_is_not_to_be_late(queue, device, clock):
    others = queue.submit(device.operations("abcd"))
    waiting = queue.submit(device.operations("w"))
    device.wait_begun("ab")
    clock.now_s = 8.0
    device.end("a")
    wait_left(others, 3)
    clock.now_s = 16.0
    device.end("b")
    device.wait_begun("abcd")
    queue.poll()
    assert waiting.error is None  # 16 s old, and the device moves.
    clock.now_s = 26.0
    queue.poll()
    assert waiting.error.reason is IoFailure.DEADLINE


def test_behind_a_stalled_device_what_waits_is_late_too_and_never_begins(queue, device, clock):
    stalled, waiting = queue.submit(device.operations("ab")), queue.submit(device.operations("c"))
    device.wait_begun("ab")
    clock.now_s = 10.0
    queue.poll()
    assert stalled.error.reason is waiting.error.reason is IoFailure.DEADLINE
    assert waiting.settled
    assert not stalled.settled
    device.end_all("ab")
    queue.submit(device.operations("d"))
    device.wait_begun("abd")


def test_a_cancelled_move_begins_nothing_more(queue, device):
    handle, other = queue.submit(device.operations("abc")), queue.submit(device.operations("d"))
    device.wait_begun("ab")
    handle.cancel()
    handle.cancel()
    assert handle.error.reason is IoFailure.CANCELLED
    assert not handle.settled
    device.end("a")
    device.wait_begun("abd")
    device.end("b")
    assert handle.wait_settled(PATIENCE_S)
    device.end("d")
    other.result()
    other.cancel()
    assert other.error is None


def test_callbacks_are_called_once_each_in_order_and_at_once_when_late(queue, device, clock):
    handle = queue.submit(device.operations("ab"))
    device.wait_begun("ab")
    seen = []
    settled = threading.Event()
    handle.add_done_callback(lambda each: seen.append(("done", each is handle)))
    handle.add_settled_callback(lambda each: (seen.append(("settled", each is handle)), settled.set()))
    clock.now_s = 10.0
    queue.poll()
    assert seen == [("done", True)]
    device.end_all("ab")
    assert settled.wait(PATIENCE_S)
    assert seen == [("done", True), ("settled", True)]
    handle.add_done_callback(lambda each: seen.append("late done"))
    handle.add_settled_callback(lambda each: seen.append("late settled"))
    assert seen[2:] == ["late done", "late settled"]


def test_a_callback_may_submit_the_next_move_and_one_that_raises_stops_nothing(queue, device, caplog):
    handle = queue.submit(device.operations("a"))
    handle.add_done_callback(lambda each: 1 / 0)
    handle.add_done_callback(lambda each: queue.submit(device.operations("b")))
    device.end("a")
    device.wait_begun("ab")
    assert "ZeroDivisionError" in caplog.text


def test_a_closed_queue_cancels_what_waits_and_refuses_what_comes(queue, device):
    running, waiting = queue.submit(device.operations("abx")), queue.submit(device.operations("c"))
    device.wait_begun("ab")
    queue.close()
    assert not queue.wait_empty(0.0)
    assert waiting.error.reason is IoFailure.CANCELLED
    assert running.error is None
    late = queue.submit(device.operations("d"))
    assert late.done()
    assert late.settled
    assert late.error.reason is IoFailure.CANCELLED
    device.end_all("abx")
    running.result()
    assert queue.wait_empty(PATIENCE_S)
    device.wait_begun("abx")


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
def test_a_period_is_told_of_when_none_is_under_way_any_more_and_none_failed(clock, events, expected):
    told: list[tuple[int, float]] = []
    periods = BusyPeriods(lambda num_bytes, seconds: told.append((num_bytes, seconds)), clock)
    for now_s, move, *ended in events:
        clock.now_s = now_s
        if ended:
            periods.end(move, *ended)
        else:
            periods.begin(move)
    assert told == expected
