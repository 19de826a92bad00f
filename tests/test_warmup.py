"""Rates that are measured when an engine warms up, and memory that is made resident in the background."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from benchmarks.compiles import CompileCounter
from ca_jax.engine import Engine
from ca_jax.overflow.config import OverflowConfig
from ca_jax.storage import store
from ca_jax.storage.tiers import dram
from ca_jax.turns.requests import SamplingParams
from tests import engine_kit as kit
from tests import overlap_kit
from tests import server_kit as sk
from tests.transfers_kit import InstantTransfers

MODEL = kit.tiny_model().config
DEADLINE_S = 60.0  # Of what would wait for ever.


def warm_up(engine) -> None:
    engine.warmup(max_history_tokens=0, max_new_tokens=8)


@pytest.mark.parametrize("read_buffer_gib", [None, 0.0], ids=["", "staging holds less than a history"])
def test_warming_up_measures_rates_through_the_wrapped_store_and_leaves_nothing_in_it(read_buffer_gib):
    transfers = InstantTransfers()
    wrapper = overlap_kit.controlled(loads=transfers, saves=transfers)
    with kit.small_engine(store_wrapper=wrapper, read_buffer_gib=read_buffer_gib) as engine:
        assert engine.rates is None
        warm_up(engine)
        assert set(transfers.counts) == {(way, layer) for way in ("load", "save") for layer in range(MODEL.num_layers)}
        rates = engine.rates
        assert (rates.num_layers, rates.layer_token_bytes) == (MODEL.num_layers, kit.TOKEN_BYTES // MODEL.num_layers)
        assert rates.load.seconds(1 << 20) > 0
        assert rates.save.seconds(1 << 20) > 0
        assert rates.prefill.seconds(256, 16) > 0
        stats = engine.store_stats()
        assert (stats.num_sessions, stats.used_bytes, stats.num_aborted_saves) == (0, 0, 0)
        assert engine._kv._loader.room(engine._kv._loader.buffer.memory.nbytes) is not None, "staging is held"
        engine._kv._loader.buffer.give_back()
        measured = engine.metrics
        assert (measured.turns, measured.prefill_passes, measured.failed_saves, measured.loaded_histories) == (0,) * 4
        assert measured.failed_loads == 0
        kit.converse(session := engine.session(), ("Hello.", "Go on."))
        assert session.usage.num_cached_tokens > 0


@pytest.mark.parametrize("sized", [kit.STORE_OFF, kit.store_of(2)], ids=["off", "two blocks"])
def test_without_room_in_the_store_there_are_no_rates_and_turns_run_all_the_same(sized):
    with kit.small_engine(store=sized, max_tpot_ms=1.0, recompute_if_faster=True) as engine:
        warm_up(engine)
        assert engine.rates is None
        sessions = [engine.session() for _ in range(2)]
        kit.drain(*(session.send("Hello.", max_tokens=6) for session in sessions))
        kit.expect_right(*sessions)
        assert [len(kit.last_answer(session)) for session in sessions] == [6, 6]


@pytest.mark.parametrize("num_broken", [1, 2])
def test_a_measurement_that_breaks_is_left_out(num_broken):
    """Of a save: there is nothing to load then, and the engine goes on without rates or with those of the rest."""
    transfers = InstantTransfers(lambda _: transfers.counts.total() <= num_broken)
    with kit.small_engine(store_wrapper=overlap_kit.controlled(saves=transfers)) as engine:
        warm_up(engine)
        assert engine.store_stats().used_bytes == 0
        kit.say(engine.session(), "Hello.", 3)


# In the background.


def test_what_turns_need_is_compiled_in_a_thread_and_no_turn_waits_for_it_then():
    model = kit.model_of(head_dim=20)  # Like no other test's.
    with kit.small_engine(model, overflow=OverflowConfig()) as engine:
        engine._core.warm_in_background()
        with CompileCounter() as before:
            engine._core._warming.thread.join(DEADLINE_S)
            assert not engine._core._warming.thread.is_alive()
        with CompileCounter() as after:
            session = engine.session()
            for num_new in (9, 40, kit.WINDOW // 2, kit.WINDOW // 2):
                kit.say(session, kit.prompt(num_new))
            engine.generate([kit.prompt(20)] * 3, SamplingParams(max_tokens=3, temperature=0.7, top_p=0.9, logprobs=2))
            assert engine.metrics.truncations > 0
        assert before.count > after.count == 0


def test_an_engine_closes_while_functions_are_compiled():
    model = kit.model_of(head_dim=28)
    engine = kit.small_engine(model)
    engine._core.warm_in_background()
    warming = engine._core._warming
    kit.say(session := engine.session(), kit.prompt(9))
    kit.expect_right(session, model=model)
    engine.close()
    assert not warming.thread.is_alive()


def test_an_engine_that_is_let_go_of_is_warmed_up_no_further():
    engine = kit.small_engine(kit.model_of(head_dim=36))
    engine._core.warm_in_background()
    thread = engine._core._warming.thread
    with CompileCounter() as counted:
        del engine
        gc.collect()
        thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert counted.count < 20


# Memory.


class Gate:
    """Touches a store's memory once it is opened."""

    def __init__(self) -> None:
        self.begun, self.opened, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.stopped = lambda: False
        self._touch = dram.touch

    def touch(self, array, stopped):
        self.stopped = stopped
        self.begun.set()
        self.opened.wait()
        seconds = self._touch(array)  # All of it, whatever was asked for meanwhile.
        self.ended.set()
        return seconds


@pytest.fixture
def gate(monkeypatch):
    gate = Gate()
    monkeypatch.setattr(store, "touch", gate.touch)
    yield gate
    gate.opened.set()


def test_an_engine_closes_while_its_memory_is_being_touched_and_asks_for_an_end(gate):
    engine = kit.small_engine()
    assert gate.begun.wait(DEADLINE_S)
    assert not gate.stopped()
    with overlap_kit.in_thread(engine.close):
        pass
    assert gate.stopped()


def test_what_is_stored_before_its_memory_was_touched_stays_as_it_is(gate):
    with kit.small_engine() as engine:
        session = engine.session()
        said = kit.prompt(60)
        assert kit.say(session, said) == kit.greedy_answer(said, 12)
        before = kit.stored_kv(engine, session)
        gate.opened.set()
        engine.wait_until_ready()
        assert gate.ended.is_set()
        np.testing.assert_array_equal(kit.stored_kv(engine, session), before)
        kit.say(session, kit.prompt(10))
        assert session.usage.num_cached_tokens == before.shape[2]


def test_a_server_is_ready_before_its_memory_is(gate, tmp_path):
    kit.write_tiny_model(tmp_path)
    with sk.starting(lambda: Engine.from_pretrained(str(tmp_path), kit.SMALL)) as started:
        sk.wait_for(lambda: started.state.status == "ok", DEADLINE_S)
        assert sk.is_ready(started.url)
        assert not gate.ended.is_set()
