"""Workloads through the real engine: the same answers however they are served, counts that add up, times that hold."""

import dataclasses

import numpy as np
import pytest

from ca_jax.replay.running import without_store
from ca_jax.replay.scripts import Exchange
from ca_jax.replay.serving import serve
from ca_jax.replay.summary import Spread, compare, summarize
from ca_jax.replay.workload import ReplaySession, ReplayTurn, Workload
from tests import engine_kit as kit


def turn(num_tokens, answer_tokens, *, seed, not_before_s=0.0, think_s=0.0):
    message = tuple(kit.prompt(num_tokens, seed))
    return ReplayTurn(exchange=Exchange(message, answer_tokens), not_before_s=not_before_s, think_s=think_s)


def made(*sessions, window=kit.WINDOW):
    return Workload(
        sessions=tuple(ReplaySession(session_id=f"s{i}", turns=tuple(turns)) for i, turns in enumerate(sessions)),
        window=window,
        cut_turns=0,
        cut_tokens=0,
        left_out_turns=0,
        skipped_rows=0,
        first_skipped=None,
    )


def crowd(num_sessions=20, num_turns=3):
    """Conversations of different lengths, all at once, none of which fills the window."""
    rng = np.random.default_rng(3)
    return made(
        *(
            [turn(int(rng.integers(20, 90)), int(rng.integers(2, 9)), seed=10 * i + j) for j in range(num_turns)]
            for i in range(num_sessions)
        )
    )


CROWD = crowd()
LITTLE_ROOM = dataclasses.replace(kit.store_of(100), dram_free_fraction=0.0)


@pytest.fixture(scope="module")
def recomputed():
    with kit.small_engine(store=kit.STORE_OFF) as engine:
        return serve(engine, CROWD)


@pytest.fixture(scope="module", params=["dram", "small dram", "ssd"])
def stored(request, tmp_path_factory):
    store = kit.SMALL.store if request.param == "dram" else LITTLE_ROOM
    if request.param == "ssd":
        directory = str(tmp_path_factory.mktemp("ssd"))
        store = dataclasses.replace(store, ssd_dir=directory, ssd_gib=0.1, ssd_free_floor_gib=0.0)
    with kit.small_engine(store=store) as engine:
        return request.param, serve(engine, CROWD)


def history(session, index):
    return sum(each.exchange.num_tokens for each in CROWD.sessions[session].turns[:index])


def test_store_and_recompute_do_the_same_work(stored, recomputed):
    _, served = stored
    assert served.answers == recomputed.answers
    for ours, other in zip(
        *(sorted(run.turns, key=lambda t: (t.session, t.turn)) for run in (served, recomputed)), strict=True
    ):
        exchange = CROWD.sessions[ours.session].turns[ours.turn].exchange
        lengths = (history(ours.session, ours.turn), len(exchange.message), exchange.answer_tokens)
        assert (ours.history_tokens, ours.message_tokens, ours.answer_tokens) == lengths
        assert (other.history_tokens, other.message_tokens, other.answer_tokens) == lengths
        assert len(served.answers[ours.session, ours.turn]) == exchange.answer_tokens
    found = compare(served, recomputed)
    assert (found.same_answers, found.comparable_answers) == (CROWD.num_turns, CROWD.num_turns)


def test_what_is_counted_adds_up(stored, recomputed):
    kind, served = stored
    summary = summarize(served)
    assert (summary.turns, summary.returning_turns) == (60, 40)
    assert summary.dram_hits + summary.ssd_hits + summary.misses == summary.returning_turns
    assert summary.loaded_tokens + summary.recomputed_tokens == summary.history_tokens
    assert summary.prefill_tokens == summary.prompt_tokens - summary.loaded_tokens
    assert summary.output_tokens == sum(each.exchange.answer_tokens for s in CROWD.sessions for each in s.turns)
    assert summary.totals.failed_loads == summary.totals.failed_saves == 0
    if kind == "small dram":
        assert 0 < summary.misses < summary.returning_turns
    elif kind == "dram":
        assert (summary.misses, summary.hit_rate) == (0, 1.0)
        assert summary.recomputed_tokens == summary.returning_turns  # The last token of every answer.
    assert (summary.ssd_hits > 0) == (kind == "ssd")
    assert (summary.totals.fetched_bytes > 0) == (kind == "ssd")
    assert summary.totals.loaded_bytes == summary.loaded_tokens * kit.TOKEN_BYTES
    nothing = summarize(recomputed)
    assert (nothing.hit_rate, nothing.loaded_tokens, nothing.misses) == (0.0, 0, 40)
    assert nothing.totals.saved_bytes == nothing.totals.loaded_bytes == 0


def test_times_of_a_turn_are_in_order(stored):
    _, served = stored
    begins = [each.started_s for each in served.turns]
    assert begins == sorted(begins)
    for each in served.turns:
        assert each.due_s <= each.started_s
        assert 0 < each.prefill_s <= each.ttft_s <= each.latency_s
        assert each.latency_s == pytest.approx(each.ttft_s + each.decode_s)
    assert served.samples[-1].ended == CROWD.num_turns
    totals = served.totals
    assert sum(each.prefill_s for each in served.turns) == pytest.approx(totals.prefill_s)
    assert sum(each.load_stall_s for each in served.turns) == pytest.approx(totals.load_stall_s)
    assert totals.prefill_s + totals.decode_s <= totals.elapsed_s  # Passes that decode steps wait for count once.
    assert [sample.time_s for sample in served.samples] == sorted(sample.time_s for sample in served.samples)


class StoppedClock:
    """Time passes only where somebody sleeps."""

    def __init__(self):
        self.now_s = 100.0
        self.slept_s = []

    def __call__(self):
        return self.now_s

    def sleep(self, seconds):
        self.slept_s.append(seconds)
        self.now_s += seconds


def test_turns_come_when_they_are_due_and_not_before():
    workload = made(
        [turn(20, 3, seed=1, not_before_s=7.0), turn(20, 3, seed=2, not_before_s=7.0, think_s=30.0)],
        [turn(20, 3, seed=3, not_before_s=0.0), turn(20, 3, seed=4, not_before_s=50.0, think_s=10.0)],
        [turn(20, 3, seed=5, not_before_s=7.0)],
    )
    clock = StoppedClock()
    with kit.small_engine(store=kit.STORE_OFF) as engine:
        served = serve(engine, workload, clock=clock, sleep=clock.sleep)
    assert {(each.session, each.turn): each.due_s for each in served.turns} == {
        (1, 0): 0.0,
        (0, 0): 7.0,
        (2, 0): 7.0,
        (0, 1): 37.0,
        (1, 1): 50.0,
    }
    assert clock.slept_s == [7.0, 30.0, 13.0]
    assert [(each.session, each.turn) for each in served.turns] == [(1, 0), (0, 0), (2, 0), (0, 1), (1, 1)]
    assert served.totals.elapsed_s == 50.0


def test_the_warm_up_is_served_and_not_counted():
    with kit.small_engine() as engine:
        served = serve(engine, CROWD, warmup_turns=25)
        metrics = engine.metrics
    assert [each.is_counted for each in served.turns] == [False] * 25 + [True] * 35
    summary = summarize(served)
    assert summary.turns == 35
    counted = served.turns[25:]
    assert summary.prompt_tokens == sum(each.history_tokens + each.message_tokens for each in counted)
    assert summary.totals.prefill_s == pytest.approx(sum(each.prefill_s for each in counted))
    assert summary.totals.prefill_s < metrics.prefill_s
    with pytest.raises(ValueError, match="warmup_turns must be fewer than the 25 turns"):
        summarize(dataclasses.replace(served, turns=served.turns[:25]))


def test_a_context_that_overflows_goes_on():
    workload = made([turn(180, 40, seed=each) for each in range(5)])
    with kit.small_engine() as engine:
        served = serve(engine, workload)
    assert [each.answer_tokens for each in served.turns] == [40] * 5
    assert max(each.history_tokens + each.message_tokens for each in served.turns) < kit.WINDOW
    assert served.turns[-1].dropped_tokens > 0
    assert served.totals.truncations > 0
    assert summarize(served).hit_rate == 1.0


def test_another_window_than_the_workload_s_is_refused():
    with kit.small_engine(store=kit.STORE_OFF) as engine, pytest.raises(ValueError, match="a window of 256 tokens"):
        serve(engine, made([turn(9, 2, seed=0)], window=256))


def test_a_spread_is_of_its_values():
    found = Spread.of(range(101))
    assert (found.mean, found.p50, found.p90, found.p99) == (50.0, 50.0, 90.0, 99.0)


def test_without_a_store_there_is_none_of_its_tiers(tmp_path):
    config = dataclasses.replace(kit.SMALL, store=dataclasses.replace(kit.SMALL.store, ssd_dir=str(tmp_path)))
    store = without_store(config).store
    assert (store.dram_gib, store.ssd_dir, store.block_tokens) == (0.0, None, kit.BLOCK_TOKENS)
