"""Transfers held at a gate: others go on meanwhile, and a job that is given up or overtaken waits for its own reads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest

from ca_jax.engine import Engine
from ca_jax.kv.layer_loader import LayerLoad
from ca_jax.session import Session
from ca_jax.storage.records import MissReason
from tests import engine_kit as kit
from tests import overlap_kit
from tests.transfers_kit import GatedTransfers

LAYERS = list(range(kit.NUM_LAYERS))


@contextlib.contextmanager
def one_at_a_time(**changes: object) -> Iterator[tuple[Engine, GatedTransfers, GatedTransfers]]:
    """An engine of one slot, so that whoever comes second waits, and its gates."""
    with overlap_kit.gated_engine(max_batch_size=1, staged_layers=kit.NUM_LAYERS, **changes) as gated:
        yield gated
        assert (gated[0].metrics.failed_loads, gated[0].metrics.failed_saves) == (0, 0)


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
def test_while_the_next_jobs_loads_are_held_the_running_one_decodes_on(read_buffer, layers):
    with one_at_a_time(read_buffer=read_buffer) as (engine, loads, _):
        waits, runs = with_history(engine, 1), with_history(engine, 2)
        next(running := runs.send_ids(kit.prompt(20), max_tokens=30))
        with overlap_kit.shut(loads):
            waiting = waits.send_ids(kit.prompt(20), max_tokens=8)
            overlap_kit.take(running, 20)
            assert held_layers(loads) == layers
        kit.drain(running, waiting)
        kit.expect_right(runs, waits)
        assert waits.usage.num_cached_tokens == 71
        assert engine.metrics.preloads == bool(layers)


@pytest.fixture
def being_released(monkeypatch) -> threading.Event:
    """Set when a load is about to be let go of."""
    begun = threading.Event()

    def release(load: LayerLoad, original: Callable = LayerLoad.release) -> None:
        begun.set()
        original(load)

    monkeypatch.setattr(LayerLoad, "release", release)
    return begun


def test_a_job_given_up_amid_its_reads_gives_its_staging_back_when_they_have_ended(being_released):
    with one_at_a_time() as (engine, loads, _):
        goes, runs = with_history(engine, 1), with_history(engine, 2)
        next(running := runs.send_ids(kit.prompt(20), max_tokens=30))
        with overlap_kit.shut(loads):
            going = goes.send_ids(kit.prompt(20), max_tokens=8)
            overlap_kit.take(running, 5)
            being_released.clear()
            with overlap_kit.in_thread(going.close):
                assert being_released.wait(overlap_kit.PATIENCE_S)
                for layer in (2, 0, 1):
                    assert len(engine._kv._loader.staged) == kit.NUM_LAYERS, "given back while somebody writes there"
                    let_layer_through(loads, layer)
            assert not engine._kv._loader.staged
            overlap_kit.take(running, 5)
        kit.drain(running)
        assert engine.store_stats().misses[MissReason.CANCELLED] == 1
        kit.expect_right(runs)
        assert kit.check_turn(goes, kit.prompt(20)).num_cached_tokens == 71


@pytest.mark.parametrize("has_history", [True, False])
def test_an_urgent_job_overtakes_one_whose_load_has_begun(has_history):
    with one_at_a_time() as (engine, loads, _):
        waits, runs = with_history(engine, 1), with_history(engine, 2)
        urgent = with_history(engine, 3) if has_history else engine.session()
        next(running := runs.send_ids(kit.prompt(20), max_tokens=12))
        with overlap_kit.shut(loads):
            waiting = waits.send_ids(kit.prompt(20), max_tokens=8)
            overlap_kit.take(running, 3)
            assert held_layers(loads, waits) == LAYERS
            overtaking = urgent.send_ids(kit.prompt(20), max_tokens=8, priority=-1)
            with overlap_kit.in_thread(lambda: kit.drain(running, overtaking)):
                loads.wait_held(kit.NUM_LAYERS)
                for _ in LAYERS:  # The first load is given up only when its reads have ended.
                    loads.let_through()
                if has_history:
                    loads.wait_held(kit.NUM_LAYERS)
                    assert held_layers(loads, urgent) == LAYERS
                    for layer in (1, 2, 0):
                        let_layer_through(loads, layer)
        kit.drain(waiting)
        kit.expect_right(runs, waits, urgent)
        assert urgent.job.first_token_s < waits.job.first_token_s
        assert waits.usage.num_cached_tokens == 71
        assert engine.store_stats().misses[MissReason.CANCELLED] == 1


def test_a_job_ended_by_another_thread_while_its_prefill_waits_for_a_layer():
    with one_at_a_time() as (engine, loads, _):
        session = with_history(engine, 1)
        answer = session.send_ids(kit.prompt(20), max_tokens=60)
        with (
            overlap_kit.shut(loads),
            overlap_kit.in_thread(lambda: kit.drain(answer)),
            overlap_kit.in_thread(answer.close),
        ):
            loads.wait_held(kit.NUM_LAYERS)
            loads.open()
        assert engine._scheduler.idle
        kit.check_turn(session, kit.prompt(10))


# Saves.


def test_while_saves_are_held_the_slot_is_free_and_others_go_on():
    """The next turn of the session whose KV is held waits, even if it is urgent; it can be given up meanwhile."""
    with one_at_a_time() as (engine, _, saves):
        first, second = engine.session(), engine.session()
        with overlap_kit.shut(saves):
            kit.say(first, kit.prompt(30))
            assert engine._scheduler.idle
            assert engine._kv.write_buffer.num_bytes > 0
            given_up = first.send_ids(kit.prompt(10), priority=-1)
            kit.say(second, kit.prompt(30, seed=1))
            assert given_up.job.slot is None, "it ran before its history was saved"
            given_up.close()
            going_on = first.send_ids(kit.prompt(10), max_tokens=8, priority=-1)
            kit.say(engine.session(), kit.prompt(30, seed=2))
        kit.drain(going_on)
        kit.expect_right(first, second)
        assert first.usage.num_cached_tokens == 41
