"""Transfers held at a gate: others go on meanwhile, and whoever is given up or overtaken waits for its own reads alone.

And the guard of staging, seen from the engine: with it answers are right, without it they are not.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator

import jax
import pytest

from ca_jax.device import transfer
from ca_jax.device.transfer import to_device
from ca_jax.engine import Engine
from ca_jax.kv.load import LayerLoad, LayerLoader, ReadBuffer, _Stage
from ca_jax.session import Session
from ca_jax.storage.records import MissReason
from tests import engine_kit as kit
from tests import overlap_kit
from tests.overlap_kit import NUM_LAYERS
from tests.storage.store_helpers import make_kv
from tests.test_invariants import LAYER_BYTES, LAYOUT, LateSum, open_layers, open_load, store_with
from tests.transfers_kit import GatedTransfers

LAYERS = list(range(NUM_LAYERS))

on_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="only on CPU is staging the memory of the device array"
)


@pytest.fixture
def loads() -> GatedTransfers:
    return overlap_kit.open_gate()


@pytest.fixture
def saves() -> GatedTransfers:
    return overlap_kit.open_gate()


@contextlib.contextmanager
def one_at_a_time(
    loads: GatedTransfers, saves: GatedTransfers, *, staged_layers: int = NUM_LAYERS, **changes: object
) -> Iterator[Engine]:
    """An engine of one decode slot, so that whoever comes second waits; in the end nothing of anybody is held."""
    wrapper = overlap_kit.controlled(loads=loads, saves=saves)
    with kit.small_engine(store_wrapper=wrapper, max_batch_size=1, **changes) as engine:
        overlap_kit.poison(engine, staged_layers=staged_layers)
        try:
            yield engine
        finally:  # Else it could not close.
            loads.open()
            saves.open()
        overlap_kit.assert_nothing_is_held(engine)
        assert (engine.metrics.failed_loads, engine.metrics.failed_saves) == (0, 0)


def with_history(engine: Engine, seed: int) -> Session:
    """A session of 71 tokens whose KV is in the store."""
    session = engine.session()
    kit.say(session, kit.prompt(60, seed))
    engine.wait_for_saves()
    return session


def held_layers(gate: GatedTransfers, session: Session | None = None) -> list[int | None]:
    """Layers that stand before the gate, of all sessions or of one."""
    key = None if session is None else session._engine._kv.key(session.session_id)
    return [transfer.layer for transfer in gate.held if key in (None, transfer.key)]


def let_layer_through(gate: GatedTransfers, layer: int) -> None:
    gate.let_through(next(transfer for transfer in gate.held if transfer.layer == layer))


# Loads.


@pytest.mark.parametrize(
    ("read_buffer", "layers"), [("all", LAYERS), ("auto", LAYERS), (2, [0, 1]), (1, [0]), (0, []), ("off", [])]
)
def test_while_the_next_jobs_loads_are_held_the_running_one_decodes_on(loads, saves, read_buffer, layers):
    with one_at_a_time(loads, saves, read_buffer=read_buffer) as engine:
        waits, runs = with_history(engine, 1), with_history(engine, 2)
        running, waiting = runs.send_ids(kit.prompt(20), max_tokens=30), waits.send_ids(kit.prompt(20), max_tokens=8)
        next(running)
        with overlap_kit.shut(loads):
            overlap_kit.take(running, 20)
            assert held_layers(loads) == layers
        kit.drain(running, waiting)
        overlap_kit.expect_right(runs, waits)
        assert waits.usage.num_cached_tokens == 71
        assert engine.metrics.preloads == bool(layers)


@pytest.mark.parametrize("read_buffer", ["all", 1, "off"])
@pytest.mark.parametrize("order", list(itertools.permutations(LAYERS)))
def test_in_whatever_order_layers_arrive_the_answer_is_right(loads, saves, read_buffer, order):
    with one_at_a_time(loads, saves, read_buffer=read_buffer) as engine:
        session = with_history(engine, 1)
        answer = session.send_ids(kit.prompt(20), max_tokens=8)
        with overlap_kit.shut(loads), overlap_kit.in_thread(lambda: kit.drain(answer)):
            loads.wait_held(NUM_LAYERS)
            for layer in order:
                let_layer_through(loads, layer)
        overlap_kit.expect_right(session)
        assert session.usage.num_cached_tokens == 71


@pytest.fixture
def being_released(monkeypatch) -> threading.Event:
    """Set when a load is about to be let go of."""
    begun = threading.Event()

    def release(load: LayerLoad, original: Callable = LayerLoad.release) -> None:
        begun.set()
        original(load)

    monkeypatch.setattr(LayerLoad, "release", release)
    return begun


def test_a_job_given_up_amid_its_reads_gives_its_staging_back_when_they_have_ended(loads, saves, being_released):
    with one_at_a_time(loads, saves) as engine:
        goes, runs = with_history(engine, 1), with_history(engine, 2)
        running, going = runs.send_ids(kit.prompt(20), max_tokens=30), goes.send_ids(kit.prompt(20), max_tokens=8)
        next(running)
        with overlap_kit.shut(loads):
            overlap_kit.take(running, 5)
            being_released.clear()
            with overlap_kit.in_thread(going.close):
                assert being_released.wait(overlap_kit.PATIENCE_S)
                for layer in (2, 0, 1):
                    assert len(engine._kv._loader.staged) == NUM_LAYERS, "given back while somebody writes there"
                    let_layer_through(loads, layer)
            assert not engine._kv._loader.staged
            overlap_kit.take(running, 5)
        kit.drain(running)
        assert engine.store_stats().misses[MissReason.CANCELLED] == 1
        kit.say(goes, kit.prompt(20))
        overlap_kit.expect_right(runs, goes)
        assert goes.usage.num_cached_tokens == 71


@pytest.mark.parametrize("has_history", [True, False])
def test_an_urgent_job_overtakes_one_whose_load_has_begun(loads, saves, has_history):
    with one_at_a_time(loads, saves) as engine:
        waits, runs = with_history(engine, 1), with_history(engine, 2)
        urgent = with_history(engine, 3) if has_history else engine.session()
        running, waiting = runs.send_ids(kit.prompt(20), max_tokens=12), waits.send_ids(kit.prompt(20), max_tokens=8)
        next(running)
        with overlap_kit.shut(loads):
            overlap_kit.take(running, 3)  # Behind its first decode step its own staging is free.
            assert held_layers(loads, waits) == LAYERS
            overtaking = urgent.send_ids(kit.prompt(20), max_tokens=8, priority=-1)
            with overlap_kit.in_thread(lambda: kit.drain(running, overtaking)):
                loads.wait_held(NUM_LAYERS)
                for _ in LAYERS:  # The first load is given up only when its reads have ended.
                    loads.let_through()
                if has_history:
                    loads.wait_held(NUM_LAYERS)
                    assert held_layers(loads, urgent) == LAYERS
                    for layer in (1, 2, 0):
                        let_layer_through(loads, layer)
        kit.drain(waiting)
        overlap_kit.expect_right(runs, waits, urgent)
        assert urgent._job.first_token_s < waits._job.first_token_s
        assert waits.usage.num_cached_tokens == 71
        assert engine.store_stats().misses[MissReason.CANCELLED] == 1


def test_a_job_ended_by_another_thread_while_its_prefill_waits_for_a_layer(loads, saves):
    with one_at_a_time(loads, saves) as engine:
        session = with_history(engine, 1)
        answer = session.send_ids(kit.prompt(20), max_tokens=60)
        with (
            overlap_kit.shut(loads),
            overlap_kit.in_thread(lambda: kit.drain(answer)),
            overlap_kit.in_thread(answer.close),
        ):
            loads.wait_held(NUM_LAYERS)
            loads.open()
        assert engine._scheduler.idle
        kit.say(session, kit.prompt(10))
        overlap_kit.expect_right(session)


# Saves.


def test_while_saves_are_held_the_slot_is_free_and_others_go_on(loads, saves):
    """The next turn of the session whose KV is held waits, even if it is urgent; it can be given up meanwhile."""
    with one_at_a_time(loads, saves) as engine:
        first, second = engine.session(), engine.session()
        with overlap_kit.shut(saves):
            kit.say(first, kit.prompt(30))
            assert engine._scheduler.idle
            assert engine._kv.write_buffer.num_bytes > 0
            given_up = first.send_ids(kit.prompt(10), priority=-1)
            kit.say(second, kit.prompt(30, seed=1))
            assert given_up._job.slot is None, "it ran before its history was saved"
            given_up.close()
            going_on = first.send_ids(kit.prompt(10), max_tokens=8, priority=-1)
            kit.say(engine.session(), kit.prompt(30, seed=2))
        kit.drain(going_on)
        overlap_kit.expect_right(first, second)
        assert first.usage.num_cached_tokens == 41


# The guard of staging.


def answers_when_staging_is_scarce(loads: GatedTransfers, saves: GatedTransfers) -> list[int]:
    """How many tokens are wrong of two answers: the second's layers want the regions that hold the first's.

    The read buffer has room for one history. The second's load is opened before the first's prefill is dispatched, and
    its layers arrive as soon as they have a region: before the first's history is in its decode slot, if they may.
    """
    with one_at_a_time(loads, saves) as engine:
        sessions = [with_history(engine, 1), with_history(engine, 2)]
        kit.drain(*(session.send_ids(kit.prompt(20), max_tokens=12) for session in sessions))
        assert engine.metrics.preloads == 1
        return [overlap_kit.num_wrong(s.token_ids, [overlap_kit.last_answer(s)]) for s in sessions]


def test_staging_is_rewritten_only_when_it_is_in_the_decode_slot(loads, saves):
    assert answers_when_staging_is_scarce(loads, saves) == [0, 0]


def is_idle_when_computed(stage: _Stage) -> bool:
    """As if the prefill were the only one that reads a region."""
    return stage.is_free or (stage.computed is not None and transfer.is_ready(stage.computed))


def is_always_idle(stage: _Stage) -> bool:
    """As if nobody read a region any more."""
    return True


@on_cpu
@pytest.mark.parametrize("guard", [is_idle_when_computed, is_always_idle])
@pytest.mark.parametrize("is_poisoned", [True, False])
def test_without_the_guard_an_answer_is_seen_to_go_wrong(loads, saves, monkeypatch, guard, is_poisoned):
    monkeypatch.setattr(_Stage, "is_idle", guard)
    if not is_poisoned:  # Then it is the second's KV that the first's slot is filled with.
        monkeypatch.setattr(overlap_kit, "PoisonedBuffer", ReadBuffer)
    num_wrong = answers_when_staging_is_scarce(loads, saves)
    assert num_wrong[0] > 6


@pytest.mark.parametrize("is_late", ["computed", "used"])
def test_a_region_is_held_until_the_later_of_its_two_readers_has_read_it(is_late):
    """Each of the two alone keeps the next load out, whichever the device comes to last."""
    loader = LayerLoader(LAYOUT, LAYOUT.num_layers * LAYER_BYTES)
    done = to_device(0.0).block_until_ready()
    with store_with(LAYOUT, a=make_kv(LAYOUT, 16), b=make_kv(LAYOUT, 16, seed=1)) as store:
        first = open_layers(loader, store, "a")
        late = [LateSum(first.layer(layer)) for layer in range(LAYOUT.num_layers)]
        for layer, reader in enumerate(late):
            first.computed(layer, reader if is_late == "computed" else done)
            first.used(layer, reader if is_late == "used" else done)
        first.release()
        second = open_layers(loader, store, "b")
        assert second.num_issued == 0, "staging is written to that is still to be read"
        late[0].block_until_ready()
        loader.pump()
        assert second.num_issued == 1
        for layer in range(LAYOUT.num_layers):
            second.layer(layer)
        second.release()
        for load in (first, second):
            store.complete_load(load.ticket)


def test_a_layer_is_had_though_the_ring_has_no_room_for_the_one_in_front_of_it():
    """As on an accelerator, which wants that too before the layer is dispatched.

    Two layers of 16 tokens fit, but not if the first begins amid the ring, behind what is left of another load:

        mmmmmmMMMMMMssss    m, M: layers 0 and 1 of 12 tokens    s: layer 0 of 8
        SSSS..MMMMMMssss    S: its layer 1, where m was
        SSSSLLLLLLLL....    L: layer 0 of 16; without S there is no room for layer 1 either
    """
    loader = LayerLoader(LAYOUT, 2 * LAYER_BYTES)
    loader.device_ahead = 1
    done = to_device(0.0).block_until_ready()
    with store_with(LAYOUT, **{str(n): make_kv(LAYOUT, n) for n in (8, 12, 16)}) as store:
        last_readers = []
        for num_tokens in (12, 8):
            load = loader.open(open_load(store, str(num_tokens)), num_tokens, LAYOUT.num_layers)
            load.begin(lambda layer: done)
            last_readers.append(LateSum(load.layer(1)))
            for layer, reader in enumerate((done, last_readers[-1])):
                load.computed(layer, done)
                load.used(layer, reader)
            load.release()
            store.complete_load(load.ticket)
        last_readers[0].block_until_ready()
        long = loader.open(open_load(store, "16"), 16, LAYOUT.num_layers)
        assert long.num_issued == 1
        long.begin(lambda layer: done)
        last_readers[1].block_until_ready()
        for layer in range(LAYOUT.num_layers):
            long.layer(layer)
            assert long.num_issued == layer + 1
            long.computed(layer, done)
        long.release()
        store.complete_load(long.ticket)
