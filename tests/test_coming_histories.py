"""Turns that begin while their KV is still being read from what replicas share: right, whatever becomes of the rest.

A gate before the layers that come last has a turn begin without them. A single engine that serves the conversation
alone says what each answer must be.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ca_jax.engine import Engine
from ca_jax.kv import costs, object_transfers
from ca_jax.kv.history import History
from ca_jax.kv.object_transfers import Arrival
from ca_jax.session import Session
from ca_jax.storage.objects import parts
from ca_jax.storage.objects.manifest import Manifest
from ca_jax.storage.objects.store import ObjectsError
from tests import engine_kit as kit
from tests.replica_kit import RUN_BLOCKS, SAID, claimed, make_replica, say, say_and_publish, serial

PATIENCE_S = 60.0


class Gate:
    """Holds up what is read of layers from one on, or breaks it."""

    def __init__(self, engine: Engine, first_held: int = 1) -> None:
        self.opened = threading.Event()
        self.error: Exception | None = None
        objects = engine._kv.shared.objects
        begin_read, layout = objects.begin_read, engine._kv.store.layout

        def gated(name: str, start: int = 0, stop: int | None = None, **how: bool) -> Callable[[], object]:
            reading = begin_read(name, start, stop, **how)
            if "/kv/" not in name or stop is None or start < 8192:
                return reading
            layer = (start - 8192) // ((stop - start) or 1)

            def wait() -> object:
                if layer >= first_held:
                    assert self.opened.wait(PATIENCE_S)
                    if self.error is not None:
                        raise self.error
                return reading()

            return wait

        assert len(layout.groups) == 1, "layers of one size"
        objects.begin_read = gated


@pytest.fixture
def replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Makes engines that share a directory, read a layer a request, and count on what comes to come at once."""
    monkeypatch.setattr(parts, "RUN_BYTES", RUN_BLOCKS * kit.BLOCK_TOKENS * kit.TOKEN_BYTES)
    monkeypatch.setattr(object_transfers, "_READ_BYTES", 1)
    monkeypatch.setattr(object_transfers, "_SAFETY", 1e12)
    monkeypatch.setattr("ca_jax.kv.load._MAX_WAIT_S", PATIENCE_S)
    made: list[Engine] = []

    def make(**changes: object) -> Engine:
        made.append(make_replica(tmp_path, **changes))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def learn_rates(engine: Engine) -> None:
    """Has an engine load and prefill, so that it knows how fast it does; its saves are too small to be measured."""
    engine._kv.meter.add_save(1 << 20, 1e-3)
    session = engine.session(session_id="before")
    for text in ("What is the time?", "And now?", "And a little later than that?"):
        say(session, text)
    assert engine._kv.meter.rates is not None


def begun(replica: Callable[..., Engine], **changes: object) -> tuple[Engine, Session, list[str]]:
    """A replica that knows its rates, and a session that it has just taken over from another; what was answered."""
    first, second = replica(**changes), replica(**changes)
    session = first.session(session_id="s")
    answers = [say_and_publish(first, session, text) for text in SAID[:2]]
    learn_rates(second)
    return second, claimed(second), answers


def last_object(directory: Path) -> Path:
    """The file that has the last tokens of session `s`."""
    found = [path for path in (directory / "shared").rglob("*") if path.is_file() and "/sessions/" in str(path)]
    [manifest] = [each for each in (Manifest.from_bytes(path.read_bytes()) for path in found) if each.session_id == "s"]
    return directory / "shared" / manifest.parts[-1].name


def say_meanwhile(engine: Engine, session: Session, text: str, gate: Gate) -> str:
    """Sends a turn, and opens the gate once its load has begun without what is held up; else it stays shut."""
    histories, opened = engine._kv.histories, engine._kv.histories.open

    def open_gate(*of: Any) -> History:
        history = opened(*of)
        if any(ticket.coming and not ticket.has(1) for ticket in history.tickets):
            gate.opened.set()
        return history

    histories.open = open_gate
    try:
        return say(session, text)
    finally:
        histories.open = opened


def test_a_turn_begins_before_the_last_layer_is_there(replica) -> None:
    engine, session, answers = begun(replica)
    gate, num_before = Gate(engine), len(session.token_ids)
    answers.append(say_meanwhile(engine, session, SAID[2], gate))
    assert answers == serial(SAID[:3])
    assert engine.metrics.streamed_restores == 1
    assert engine.metrics.restored_tokens == num_before - 1
    assert session.usage.cached_tokens == {"objects": num_before - 1}
    assert (engine.metrics.failed_restores, engine.metrics.failed_loads) == (0, 0)
    # What has come is there for the next turn, and it is published behind it.
    num_before = len(session.token_ids)
    answers.append(say_and_publish(engine, session, SAID[3]))
    assert answers == serial()
    assert session.usage.cached_tokens == {"dram": num_before - 1}
    there = claimed(replica())
    assert there.token_ids == session.token_ids


def test_what_comes_wakes_the_engine(replica, monkeypatch) -> None:
    """Nothing else would, while its turn is the only one."""
    engine, session, _ = begun(replica)
    gate, woken = Gate(engine), threading.Event()
    monkeypatch.setattr(engine._kv.shared, "_wake", woken.set)
    job = session.submit(SAID[2])
    assert woken.wait(PATIENCE_S), "the first layer is there, and the others are held up"
    gate.opened.set()
    engine.cancel(job)


def test_what_a_turn_saves_behind_kv_that_came_stays_once_it_has_ended(replica, monkeypatch) -> None:
    """Also where the next turn is queued before it was taken in that all has come."""
    engine, session, _ = begun(replica)
    gate = Gate(engine)
    with monkeypatch.context() as patched:
        patched.setattr(engine._kv.shared, "collect", lambda: None)
        say_meanwhile(engine, session, SAID[2], gate)
        assert engine._kv.shared.is_coming(session.key)
        engine._kv.shared.stop(session.key)
    assert kit.store_in(engine).num_readable(session.key) == len(session.token_ids) - 1


def test_a_new_session_that_begins_alike_begins_before_it_is_all_there(replica) -> None:
    engine, _, answers = begun(replica)
    gate = Gate(engine)
    session = engine.session(session_id="t")
    assert say_meanwhile(engine, session, SAID[0], gate) == answers[0]
    run = RUN_BLOCKS * kit.BLOCK_TOKENS
    assert session.usage.cached_tokens == {"objects": (session.usage.prompt_tokens - 1) // run * run}
    assert engine.metrics.streamed_restores == 1


@pytest.mark.parametrize("is_damaged", [True, False], ids=["damaged", "unreachable"])
def test_what_breaks_once_the_turn_has_begun_is_computed(replica, tmp_path, is_damaged) -> None:
    engine, session, answers = begun(replica)
    gate = Gate(engine)
    if is_damaged:
        path = last_object(tmp_path)
        path.write_bytes(path.read_bytes()[:-8] + b"damaged.")
    else:
        gate.error = ObjectsError("no answer")
    answers.append(say_meanwhile(engine, session, SAID[2], gate))
    assert answers == serial(SAID[:3])
    assert session.usage.cached_tokens == {"objects": 0}
    assert (engine.metrics.streamed_restores, engine.metrics.failed_loads, engine.metrics.failed_restores) == (1, 1, 1)
    # What is damaged is written anew with the turn, and found whole elsewhere.
    kit.until(engine, lambda: engine.metrics.publishes > 0 and not engine._kv.shared._unpublished)
    there = claimed(replica())
    num_before = len(there.token_ids)
    answers.append(say(there, SAID[3]))
    assert answers == serial()
    assert there.usage.cached_tokens == {"objects": num_before - 1}


def test_what_does_not_come_in_time_is_computed(replica, monkeypatch) -> None:
    """A store that stalls holds up the engine, and with it everybody's answers, for a bounded time."""
    monkeypatch.setattr("ca_jax.kv.load._MAX_WAIT_S", 0.05)
    engine, session, answers = begun(replica)
    monkeypatch.setattr(engine._kv.histories, "layer_compute_s", lambda *_: 1e-6)
    gate = Gate(engine)
    answers.append(say(session, SAID[2]))
    assert engine.metrics.failed_restores == 0, "the turn has ended, and what is held up is still waited for"
    gate.opened.set()
    assert answers == serial(SAID[:3])
    assert session.usage.cached_tokens == {"objects": 0}
    assert (engine.metrics.streamed_restores, engine.metrics.failed_loads) == (1, 1)
    assert not engine._kv.shared._shared[session.key].damaged


def test_a_turn_that_is_given_up_leaves_what_comes_to_come(replica) -> None:
    engine, session, answers = begun(replica)
    gate, num_before = Gate(engine), len(session.token_ids)
    job = session.submit(SAID[2])
    kit.until(engine, lambda: engine._kv.ready(job, True))
    history = engine._kv.histories.open(job, session)
    assert any(ticket.coming for ticket in history.tickets)
    engine._kv.histories.release(history)
    engine.cancel(job)
    gate.opened.set()
    kit.until(engine, lambda: engine.metrics.restored_tokens > 0)
    answers.append(say(session, SAID[2]))
    assert answers == serial(SAID[:3])
    assert session.usage.cached_tokens == {"objects": num_before - 1}


def say_while_it_ends(engine: Engine, session: Session, text: str, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> str:
    """Sends a turn whose restore ends, and is taken in, between its load and its pass: as between two steps."""
    histories = engine._kv.histories
    opened = histories.open

    def open_gate(*of: Any) -> History:
        history = opened(*of)
        gate.opened.set()
        engine._kv.shared._shared[session.key].restoring.done.result(PATIENCE_S)
        engine._kv.shared.collect()
        return history

    with monkeypatch.context() as patched:
        patched.setattr(histories, "open", open_gate)
        return say(session, text)


def test_what_breaks_between_a_load_and_its_pass_is_computed(replica, monkeypatch) -> None:
    engine, session, answers = begun(replica)
    gate = Gate(engine)
    gate.error = ObjectsError("no answer")
    answers.append(say_while_it_ends(engine, session, SAID[2], gate, monkeypatch))
    assert answers == serial(SAID[:3])
    assert (engine.metrics.streamed_restores, engine.metrics.failed_loads) == (1, 1)


def test_what_ends_between_a_load_and_its_pass_is_counted_as_brought_once(replica, monkeypatch) -> None:
    engine, session, answers = begun(replica)
    gate, num_before = Gate(engine), len(session.token_ids)
    answers.append(say_while_it_ends(engine, session, SAID[2], gate, monkeypatch))
    assert session.usage.cached_tokens == {"objects": num_before - 1}
    num_before = len(session.token_ids)
    answers.append(say(session, SAID[3]))
    assert answers == serial()
    assert session.usage.cached_tokens == {"dram": num_before - 1}


def test_a_history_that_is_cut_or_repaired_waits_for_all_of_it(replica, monkeypatch) -> None:
    engine, session, _ = begun(replica)
    kv, job = engine._kv, session.submit(SAID[2])
    monkeypatch.setattr(kv.shared, "in_time", lambda *_: True)
    coming = kv._comes_in_time(job, session.key)
    kept = session.conversation
    for changed in ({"num_to_repair": 1}, {"num_slid": 1}):
        monkeypatch.setattr(session, "conversation", type("Kept", (), {**vars_of(kept), **changed}))
        assert not kv._comes_in_time(job, session.key)
        monkeypatch.setattr(session, "conversation", kept)
    assert coming
    asks_more = dataclasses.replace(job.params, prompt_logprobs=1, prompt_logprobs_from=2)
    monkeypatch.setattr(job, "params", asks_more)
    assert not kv._comes_in_time(job, session.key), "of the prompt's logprobs nearly all must be computed"
    engine.cancel(job)


def vars_of(kept: object) -> dict[str, object]:
    return {name: getattr(kept, name) for name in ("num_to_repair", "num_slid", "to_drift", "kv_lineage")}


def test_the_time_that_counts_is_what_was_measured(replica) -> None:
    """Nothing patched: a turn begins early by this engine's own rates, and without any it waits for all of its KV."""
    engine = replica()
    histories, meter = engine._kv.histories, engine._kv.meter
    assert meter.rates is None
    assert histories.layer_compute_s(100, 20) is None
    learn_rates(engine)
    padded = engine._kv.histories._runner.padded
    assert histories.layer_compute_s(100, 20) == costs.layer_compute_s(meter.rates, *padded(100, 20))
    most = kit.SMALL.max_num_batched_tokens
    assert histories.layer_compute_s(100, 10 * most) == histories.layer_compute_s(100, most), "of its first pass"


def test_a_turn_whose_kv_is_not_in_time_waits_for_all_of_it(replica, monkeypatch) -> None:
    engine, session, answers = begun(replica)
    gate, num_asked, num_before = Gate(engine), 0, len(session.token_ids)

    def never(arrival: Arrival, layer_compute_s: float) -> bool:
        nonlocal num_asked
        num_asked += 1
        gate.opened.set()
        return False

    monkeypatch.setattr(Arrival, "is_in_time", never)
    answers.append(say(session, SAID[2]))
    assert answers == serial(SAID[:3])
    assert num_asked > 0
    assert engine.metrics.streamed_restores == 0
    assert session.usage.cached_tokens == {"objects": num_before - 1}
