"""What most tests of the server share: one over the tiny model, a client of it, and what an engine alone answers."""

import threading

import pytest

from tests import engine_kit as kit
from tests import server_kit as sk


@pytest.fixture(scope="module")
def server():
    with sk.running() as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def said_by_engine():
    """What a session that was never served over HTTP answers to a whole history, greedily, with nothing stored."""
    with kit.small_engine(store=kit.STORE_OFF) as alone:
        yield lambda messages, max_tokens=8: "".join(alone.session().send(messages, max_tokens=max_tokens))


@pytest.fixture
def stops_behind(monkeypatch):
    """Lets an engine take so many more steps, and then none until the event that it gives is set, or the test ends."""
    let_go = threading.Event()

    def stop(engine, num_steps):
        left, step = iter(range(num_steps)), engine.step

        def gated_step():
            if next(left, None) is None:
                let_go.wait(sk.DEADLINE_S)
            return step()

        monkeypatch.setattr(engine, "step", gated_step)
        return let_go

    yield stop
    let_go.set()
