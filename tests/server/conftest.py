"""What most tests of the server share: one over the tiny model, and a client of it. Some files have their own."""

import pytest

from tests import server_kit as sk


@pytest.fixture(scope="module")
def server():
    with sk.running() as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client
