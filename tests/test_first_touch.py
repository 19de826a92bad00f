"""Host memory that is made resident in the background: nothing waits for that, neither serving nor closing."""

import io
import threading

import numpy as np
import pytest
import rich.console

from ca_jax.launch import serve
from ca_jax.storage.tiers import dram
from tests import engine_kit as kit
from tests import server_kit as sk

DEADLINE_S = 20.0  # Of what would wait for ever.


class Gate:
    """Touches a store's memory once it is opened."""

    def __init__(self) -> None:
        self.begun, self.opened, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.stopped = lambda: False
        self._touch = dram.touch

    def touch(self, array, *, stopped):
        self.stopped = stopped
        self.begun.set()
        self.opened.wait()
        seconds = self._touch(array)  # All of it, whatever was asked for meanwhile.
        self.ended.set()
        return seconds


@pytest.fixture
def gate(monkeypatch):
    gate = Gate()
    monkeypatch.setattr(dram, "touch", gate.touch)
    yield gate
    gate.opened.set()


def test_an_engine_closes_while_its_memory_is_being_touched_and_asks_for_an_end(gate):
    engine = kit.small_engine()
    assert gate.begun.wait(DEADLINE_S)
    assert not gate.stopped()
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
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
    console = rich.console.Console(file=io.StringIO())
    with sk.starting(lambda: serve.load_engine(str(tmp_path), kit.SMALL, console=console)) as started:
        started.wait_until(lambda: started.state.status == "ok", DEADLINE_S)
        assert sk.health(started.url) == {"status": "ok"}
        assert not gate.ended.is_set()
