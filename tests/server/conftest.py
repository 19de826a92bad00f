"""What most tests of the server share: one over the tiny model, a client of it, and what an engine alone answers."""

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
