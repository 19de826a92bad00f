"""What most tests of the server share: one over the tiny model, and a client of it."""

import functools
import json
import threading

import jsonschema
import pytest

from tests import page_kit
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
def check(recorded_data):
    """Holds a body against a schema of OpenAI's own description of its API, by name."""
    schemas = json.loads((recorded_data / "openai_schemas.json").read_text())["$defs"]

    @functools.cache
    def validator(name):
        return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": schemas})

    return lambda name, body: validator(name).validate(body)


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


@pytest.fixture(scope="module")
def browser():
    with page_kit.chromium() as launched:
        yield launched


@pytest.fixture
def open_page(browser):
    with page_kit.pages_of(browser) as opened:
        yield opened


@pytest.fixture
def page(server, open_page):
    page = open_page(server.url)
    page_kit.is_live(page)
    return page
