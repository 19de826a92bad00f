"""Transfers at the pace of a link, after delays and before gates: when they end, in what order, and what they did."""

import threading

import hypothesis
import hypothesis.strategies as st
import pytest

from ca_jax.kv import costs
from ca_jax.testing.paced import DelayedTransfers, GatedTransfers, PacedLink, Transfer
from ca_jax.testing.timers import ManualTimer, TimerThread

PATIENCE_S = 60


def load_of(layer: int, num_bytes: int = 100) -> Transfer:
    return Transfer("load", "a", layer, 1, num_bytes)


def recorder(timer: ManualTimer):
    """Copies that note their name and when they ran."""
    ran = []
    return ran, lambda name: lambda: ran.append((name, timer.now_s()))


# Time.


def test_manual_time_runs_what_is_due_in_order_at_its_time_and_nothing_else():
    timer = ManualTimer()
    ran, note = recorder(timer)
    for name, due_s in (("c", 2.0), ("a", 1.0), ("b", 1.0), ("d", 2.5)):
        timer.call_at(due_s, note(name))
    timer.advance(0.5)
    assert (ran, timer.now_s()) == ([], 0.5)
    timer.advance(1.5)
    assert (ran, timer.now_s()) == ([("a", 1.0), ("b", 1.0), ("c", 2.0)], 2.0)
    timer.call_at(1.0, note("late"))
    timer.advance(0.0)
    assert ran[3:] == [("late", 2.0)], "time went backwards"
    timer.close()
    assert ran[4:] == [("d", 2.5)]


def test_an_action_may_ask_for_the_next():
    timer = ManualTimer()
    ran, note = recorder(timer)
    timer.call_at(1.0, lambda: timer.call_at(timer.now_s() + 1.0, note("next")))
    timer.advance(10)
    assert (ran, timer.now_s()) == ([("next", 2.0)], 10.0)


def test_the_timer_thread_runs_actions_in_order_of_time_and_all_of_them_before_it_closes():
    timer = TimerThread()
    ran, hold = [], threading.Event()
    timer.call_at(timer.now_s(), lambda: hold.wait(PATIENCE_S))  # While these come in the wrong order.
    due_s = timer.now_s()
    for i in (2, 0, 1, 3):
        timer.call_at(due_s + i * 1e-3, lambda i=i: ran.append((i, timer.now_s() - due_s, threading.get_ident())))
    hold.set()
    timer.close()
    assert [i for i, _, _ in ran] == [0, 1, 2, 3]
    assert all(since_s >= i * 1e-3 for i, since_s, _ in ran), "an action ran before its time"
    assert {thread for _, _, thread in ran} != {threading.get_ident()}
    with pytest.raises(ValueError, match="there must be an open timer"):
        timer.call_at(0.0, lambda: None)


def test_an_action_that_is_due_sooner_wakes_the_thread_up():
    timer = TimerThread()
    ran = threading.Event()
    timer.call_at(timer.now_s() + 3600, lambda: None)
    timer.call_at(timer.now_s(), ran.set)
    assert ran.wait(PATIENCE_S)


# A paced link.


def test_transfers_take_their_turns_on_the_link_and_bytes_arrive_at_the_end():
    timer = ManualTimer()
    link = PacedLink(100.0, timer=timer)
    ran, note = recorder(timer)
    futures = [link.submit(load_of(i, num_bytes), note(i)) for i, num_bytes in enumerate((100, 200, 50))]
    timer.advance(0.99)
    assert not ran
    assert not any(future.done() for future in futures)
    timer.advance(0.01)
    assert ran == [(0, 1.0)]
    assert [future.done() for future in futures] == [True, False, False]
    timer.advance(9.0)
    assert ran[1:] == [(1, 3.0), (2, 3.5)]
    link.submit(load_of(3), note(3))  # The link has been idle: nothing is made up for.
    timer.advance()
    assert ran[3:] == [(3, 11.0)]
    assert link.busy_s == 4.5


def test_layers_take_their_seconds_each_besides_their_bytes():
    link = PacedLink(100.0, layer_s=0.5, timer=ManualTimer())
    assert link.seconds(load_of(0, 100)) == 1.5
    assert link.seconds(Transfer("save", "a", None, 6, 100)) == 4.0
    assert PacedLink(layer_s=0.5, timer=ManualTimer()).seconds(load_of(0, 10**12)) == 0.5


def test_a_future_brings_what_its_copy_returned_or_raised():
    timer = ManualTimer()
    link = PacedLink(100.0, timer=timer)
    good, bad = link.submit(load_of(0), lambda: 7), link.submit(load_of(1), lambda: 1 // 0)
    after = link.submit(load_of(2), lambda: 8)
    assert not good.cancel(), "a copy under way cannot be called back"
    timer.advance()
    assert good.result(0) == 7
    with pytest.raises(ZeroDivisionError):
        bad.result(0)
    assert after.result(0) == 8


def test_a_link_in_the_time_of_the_machine_moves_everything_in_order_before_it_closes():
    ran = []
    with PacedLink(1e6) as link:
        futures = [link.submit(load_of(i, 1000), lambda i=i: ran.append(i)) for i in range(5)]
        futures[1].result(PATIENCE_S)
        assert ran[:2] == [0, 1]
    assert ran == list(range(5))
    assert all(future.done() for future in futures)


@hypothesis.given(
    load_ms=st.integers(0, 3000),
    compute_ms=st.integers(0, 3000),
    num_layers=st.integers(1, 12),
    depth=st.integers(0, 14),
    head_start_ms=st.integers(0, 20_000),
)
def test_a_job_over_the_link_takes_what_the_pipeline_is_predicted_to(
    load_ms, compute_ms, num_layers, depth, head_start_ms
):
    """Layers are submitted as their regions get free, as `costs.pipeline_s` says, and computed as they arrive."""
    timer = ManualTimer()
    link = PacedLink(layer_s=load_ms * 1e-3, timer=timer)
    loads = {}
    num_loaded = num_computed = 0
    device_busy = last_job_ended = False

    def go_on() -> None:
        nonlocal device_busy
        regions = depth + 2 * last_job_ended
        while len(loads) < min(num_layers, num_computed + regions):
            layer = len(loads)
            loads[layer] = link.submit(load_of(layer), lambda: None)
            loads[layer].add_done_callback(loaded)
        if last_job_ended and not device_busy and num_computed < num_loaded:
            device_busy = True
            timer.call_at(timer.now_s() + compute_ms * 1e-3, computed)

    def loaded(_: object) -> None:
        nonlocal num_loaded
        num_loaded += 1
        go_on()

    def computed() -> None:
        nonlocal num_computed, device_busy
        num_computed, device_busy = num_computed + 1, False
        go_on()

    def end_last_job() -> None:
        nonlocal last_job_ended
        last_job_ended = True
        go_on()

    timer.call_at(head_start_ms * 1e-3, end_last_job)
    go_on()
    timer.advance()
    assert num_computed == num_layers
    expected_s = costs.pipeline_s(load_ms * 1e-3, compute_ms * 1e-3, num_layers, depth, head_start_ms * 1e-3)
    assert timer.now_s() - head_start_ms * 1e-3 == pytest.approx(expected_s, abs=1e-9)


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({"bytes_per_s": 0}, "bytes_per_s must be a positive number, got 0"),
        ({"layer_s": -1}, "layer_s must be at least 0, got -1"),
    ],
)
def test_a_link_that_cannot_be_is_refused(arguments, wrong):
    with pytest.raises(ValueError, match=wrong):
        PacedLink(**arguments)


# Random delays.


def delays_of(seed: int, transfers: list[Transfer]) -> dict[Transfer, list[float]]:
    timer = ManualTimer()
    delayed = DelayedTransfers(1.0, seed=seed, timer=timer)
    ended = {transfer: [] for transfer in transfers}
    for transfer in transfers:
        delayed.submit(transfer, lambda transfer=transfer: ended[transfer].append(timer.now_s()))
    timer.advance()
    return ended


def test_delays_are_random_within_bounds_and_let_transfers_overtake_one_another():
    delays_s = [delay_s for (delay_s,) in delays_of(0, [load_of(layer) for layer in range(30)]).values()]
    assert len(set(delays_s)) == 30
    assert 0 <= min(delays_s) < 0.2
    assert 0.8 < max(delays_s) <= 1
    assert delays_s != sorted(delays_s)


def test_delays_depend_on_seed_and_transfer_and_not_on_who_came_first():
    transfers = [load_of(0), load_of(1), load_of(0), Transfer("save", "a", 0, 1, 100)]
    ended = delays_of(3, transfers)
    assert delays_of(3, transfers[::-1]) == ended
    assert len({delay_s for delays_s in ended.values() for delay_s in delays_s}) == 4
    assert delays_of(4, transfers) != ended


def test_delayed_transfers_have_all_ended_when_closed():
    with DelayedTransfers(0.01, seed=0) as delayed:
        futures = [delayed.submit(load_of(i), lambda i=i: i) for i in range(10)]
    assert [future.result(0) for future in futures] == list(range(10))
    with pytest.raises(ValueError, match="max_delay_s must be at least 0, got -1"):
        DelayedTransfers(-1, seed=0)


# Gates.


def test_nothing_passes_a_gate_but_what_is_let_through():
    gate, ran = GatedTransfers(), []
    futures = [gate.submit(load_of(i), lambda i=i: ran.append(i)) for i in range(4)]
    assert gate.held == tuple(load_of(i) for i in range(4))
    assert ran == []
    assert gate.let_through() == load_of(0)
    assert gate.let_through(load_of(2)) == load_of(2)
    assert ran == [0, 2]
    assert [future.done() for future in futures] == [True, False, True, False]
    assert gate.held == (load_of(1), load_of(3))
    with pytest.raises(ValueError, match=r"there must be Transfer\(.*layer=2.* before the gate, got 2 others"):
        gate.let_through(load_of(2))


def test_an_open_gate_lets_everyone_pass_until_it_is_shut():
    gate, ran = GatedTransfers(), []
    for i in range(2):
        gate.submit(load_of(i), lambda i=i: ran.append(i))
    gate.open()
    assert gate.submit(load_of(2), lambda: ran.append(2)).done()
    assert ran == [0, 1, 2]
    gate.shut()
    assert not gate.submit(load_of(3), lambda: ran.append(3)).done()
    assert ran == [0, 1, 2]
    with pytest.raises(ValueError, match="there must be a transfer before the gate, got 0"):
        GatedTransfers().let_through()


def test_a_transfer_can_be_made_to_break():
    gate, ran = GatedTransfers(), []
    future = gate.submit(load_of(0), lambda: ran.append(0))
    gate.let_through(error=OSError("broken"))
    with pytest.raises(OSError, match="broken"):
        future.result(0)
    assert ran == []


def test_whoever_is_told_of_an_end_may_submit_the_next():
    gate, ended = GatedTransfers(), []
    gate.submit(load_of(0), lambda: None).add_done_callback(lambda _: gate.submit(load_of(1), lambda: ended.append(1)))
    gate.open()
    assert ended == [1]


def test_a_test_can_wait_for_those_who_come_to_the_gate():
    gate = GatedTransfers()
    with pytest.raises(TimeoutError, match="there must be 1 transfers before the gate, got 0"):
        gate.wait_held(timeout_s=0)
    results = []
    thread = threading.Thread(target=lambda: results.append(gate.submit(load_of(5), lambda: 5).result(PATIENCE_S)))
    thread.start()
    assert gate.wait_held() == (load_of(5),)
    gate.let_through()
    thread.join(PATIENCE_S)
    assert results == [5]


# Copies that are early.


def test_an_early_copy_runs_when_its_transfer_begins_and_takes_nothing_off_its_time():
    timer = ManualTimer()
    ran, note = recorder(timer)
    link = PacedLink(100.0, timer=timer, copies_early=True)
    first, second = (link.submit(load_of(layer), note(layer)) for layer in range(2))
    timer.advance(0.0)
    assert (ran, first.done()) == ([(0, 0.0)], False)
    timer.advance(1.0)
    assert (ran, first.done(), second.done()) == ([(0, 0.0), (1, 1.0)], True, False)
    timer.advance(1.0)
    assert (len(ran), second.done()) == (2, True)


def test_an_early_copy_that_breaks_breaks_its_transfer_at_its_end():
    timer = ManualTimer()
    link = PacedLink(100.0, timer=timer, copies_early=True)

    def broken() -> None:
        raise OSError("broken")

    future = link.submit(load_of(0), broken)
    timer.advance(0.5)
    assert not future.done()
    timer.advance(0.5)
    with pytest.raises(OSError, match="broken"):
        future.result(0)
