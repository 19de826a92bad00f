"""Moves under one handle: in order, a few at a time, on time, and settled only when nothing touches memory any more."""

from __future__ import annotations

import concurrent.futures

import pytest

from ca_jax.storage.records import BlockIoError, IoFailure
from ca_jax.storage.tiers.io import IoQueue, close_all

from .ssd_helpers import StoppedClock


class Device:
    """Operations that begin when the queue says so and end when the test does."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.futures: dict[str, concurrent.futures.Future] = {}

    def operation(self, name: str):
        def begin() -> concurrent.futures.Future:
            self.begun.append(name)
            self.futures[name] = concurrent.futures.Future()
            return self.futures[name]

        return begin

    def operations(self, names: str) -> list:
        return [self.operation(name) for name in names]

    def end(self, name: str, error: Exception | None = None) -> None:
        if error is None:
            self.futures[name].set_result(None)
        else:
            self.futures[name].set_exception(error)


def describe(exception: BaseException) -> BlockIoError:
    return BlockIoError(IoFailure.DEVICE, f"described: {exception}")


@pytest.fixture
def clock() -> StoppedClock:
    return StoppedClock()


@pytest.fixture
def queue(clock) -> IoQueue:
    return IoQueue(max_in_flight=2, deadline_s=10.0, describe=describe, clock=clock)


@pytest.fixture
def device() -> Device:
    return Device()


def test_a_few_run_at_a_time_in_order(queue, device):
    first, second = queue.submit(device.operations("abc")), queue.submit(device.operations("d"))
    assert device.begun == ["a", "b"]
    device.end("b")
    assert device.begun == ["a", "b", "c"]
    device.end("a")
    assert device.begun == ["a", "b", "c", "d"]
    assert not first.done()
    device.end("c")
    assert first.done()
    assert first.settled
    assert first.error is None
    assert not second.done()
    device.end("d")
    second.result()


def test_the_last_operation_waits_for_all_others_and_goes_before_other_moves(queue, device):
    handle = queue.submit(device.operations("ab"), last=device.operation("z"))
    queue.submit(device.operations("cd"))
    device.end("a")
    assert device.begun == ["a", "b", "c"]
    device.end("b")
    assert device.begun == ["a", "b", "c", "z"]
    assert not handle.done()
    device.end("z")
    assert handle.done()


def test_the_first_failure_decides_and_memory_stays_taken_until_the_others_end(queue, device):
    handle = queue.submit(device.operations("abc"))
    device.end("a", OSError("broken"))
    assert handle.done()
    assert handle.error.reason is IoFailure.DEVICE
    assert not handle.settled
    assert device.begun == ["a", "b"]  # c never begins.
    device.end("b", OSError("another"))
    assert handle.settled
    with pytest.raises(BlockIoError, match="described: broken"):
        handle.result()


def test_an_operation_that_cannot_begin_fails_its_move_alone(queue, device):
    def broken() -> concurrent.futures.Future:
        raise OSError("cannot begin")

    handle = queue.submit([broken])
    other = queue.submit(device.operations("a"))
    assert str(handle.error) == "described: cannot begin"
    assert handle.settled
    device.end("a")
    other.result()


def test_no_progress_within_the_deadline_is_an_error_and_late_ends_change_nothing(queue, device, clock):
    handle = queue.submit(device.operations("abc"))
    clock.now_s = 9.0
    device.end("a")
    clock.now_s = 18.9  # 9.9 s after the last progress: the end of a, the begin of c.
    queue.poll()
    assert not handle.done()
    clock.now_s = 19.1
    queue.poll()
    assert handle.error.reason is IoFailure.DEADLINE
    assert "within 10.0 s" in str(handle.error)
    assert "2 operations are left, 2 of them begun" in str(handle.error)
    assert not handle.settled
    device.end("b")
    assert not handle.settled
    device.end("c", OSError("broken"))
    assert handle.settled
    assert handle.error.reason is IoFailure.DEADLINE


def test_to_stand_behind_others_that_move_is_not_to_be_late(queue, device, clock):
    queue.submit(device.operations("abcd"))
    waiting = queue.submit(device.operations("w"))
    clock.now_s = 8.0
    device.end("a")
    clock.now_s = 16.0
    device.end("b")
    queue.poll()
    assert device.begun == ["a", "b", "c", "d"]
    assert waiting.error is None  # 16 s old, and the device moves.
    clock.now_s = 26.0
    queue.poll()
    assert waiting.error.reason is IoFailure.DEADLINE


def test_behind_a_stalled_device_what_waits_is_late_too_and_never_begins(queue, device, clock):
    stalled, waiting = queue.submit(device.operations("ab")), queue.submit(device.operations("c"))
    clock.now_s = 10.0
    queue.poll()
    assert stalled.error.reason is waiting.error.reason is IoFailure.DEADLINE
    assert waiting.settled
    assert not stalled.settled
    device.end("a")
    device.end("b")
    assert device.begun == ["a", "b"]
    queue.submit(device.operations("d"))
    assert device.begun == ["a", "b", "d"]


def test_a_cancelled_move_begins_nothing_more(queue, device):
    handle, other = queue.submit(device.operations("abc")), queue.submit(device.operations("d"))
    handle.cancel()
    handle.cancel()
    assert handle.error.reason is IoFailure.CANCELLED
    assert not handle.settled
    device.end("a")
    assert device.begun == ["a", "b", "d"]
    device.end("b")
    assert handle.settled
    device.end("d")
    other.cancel()
    assert other.error is None


def test_callbacks_are_called_once_each_in_order_and_at_once_when_late(queue, device, clock):
    handle = queue.submit(device.operations("ab"))
    seen = []
    handle.add_done_callback(lambda each: seen.append(("done", each is handle)))
    handle.add_settled_callback(lambda each: seen.append(("settled", each is handle)))
    clock.now_s = 10.0
    queue.poll()
    assert seen == [("done", True)]
    device.end("a")
    device.end("b")
    assert seen == [("done", True), ("settled", True)]
    handle.add_done_callback(lambda each: seen.append("late done"))
    handle.add_settled_callback(lambda each: seen.append("late settled"))
    assert seen[2:] == ["late done", "late settled"]


def test_a_callback_may_submit_the_next_move(queue, device):
    handle = queue.submit(device.operations("a"))
    handle.add_done_callback(lambda each: queue.submit(device.operations("b")))
    device.end("a")
    assert device.begun == ["a", "b"]


def test_a_callback_that_raises_is_logged_and_stops_nothing(queue, device, caplog):
    handle = queue.submit(device.operations("abc"))
    handle.add_done_callback(lambda each: 1 / 0)
    other = queue.submit(device.operations("d"))
    for name in "abcd":
        device.end(name)
    other.result()
    assert "ZeroDivisionError" in caplog.text


def test_operations_that_end_at_once_do_not_pile_up(queue):
    def ended() -> concurrent.futures.Future:
        future: concurrent.futures.Future = concurrent.futures.Future()
        future.set_result(None)
        return future

    queue.submit([ended] * 5000).result()  # Far more than the interpreter's stack is deep.


def test_many_threads_end_operations():
    queue = IoQueue(max_in_flight=8, deadline_s=60.0, describe=describe)
    counts = [0] * 20
    with concurrent.futures.ThreadPoolExecutor(8) as threads:

        def count(i: int) -> None:
            counts[i] += 1  # One operation of a move at a time would be luck: eight run at once, each on its own i.

        handles = [
            queue.submit([lambda i=i: threads.submit(count, i) for i in range(20)], last=lambda: threads.submit(int))
            for _ in range(20)
        ]
        for handle in handles:
            handle.result(60)
            assert handle.wait_settled(60)
    assert sum(counts) == 400


def test_a_closed_queue_cancels_what_waits_and_refuses_what_comes(queue, device):
    running, waiting = queue.submit(device.operations("abx")), queue.submit(device.operations("c"))
    assert not close_all([queue], 0.0)
    assert waiting.error.reason is IoFailure.CANCELLED
    assert running.error is None
    late = queue.submit(device.operations("d"))
    assert late.done()
    assert late.settled
    assert late.error.reason is IoFailure.CANCELLED
    for name in "abx":
        device.end(name)
    assert running.error is None
    assert close_all([queue], 0.0)
    assert device.begun == ["a", "b", "x"]


def test_a_queue_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1 operation, got 0"):
        IoQueue(max_in_flight=0, deadline_s=1.0, describe=describe)
    for deadline_s in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"above 0 s, got {deadline_s} s"):
            IoQueue(max_in_flight=1, deadline_s=deadline_s, describe=describe)
