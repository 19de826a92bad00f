"""Other projects' routers, as they are, in front of two servers that share objects.

One server is killed in the middle. A turn is then right, or the client is told: it never gets another conversation's
answer, or one of an older state.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import importlib.util
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import engine_kit as kit
from tests import server_kit as sk

pytestmark = pytest.mark.timeout(600)
REPOSITORY = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
START_S = 120.0
NUM_CLIENTS = 8
MAX_TOKENS = 8
TEXTS = ("What happened on day {}?", "And in its night?", "Who saw it?")
GONE = frozenset({500, 502, 503, 504})  # The router's words for a server that went away: to be sent again.
MOVED = frozenset({404, 409})  # The server's: the conversation is not there, or stands elsewhere.


@dataclasses.dataclass(frozen=True)
class Router:
    """A router of another project."""

    module: str
    arguments: tuple[str, ...]
    session_header: str
    """By which it sends a conversation's requests to one server."""


ROUTERS = {
    "vllm-router": Router(
        "vllm_router.launch_router",
        ("--policy=consistent_hash", "--worker-startup-check-interval=1", "--health-check-interval-secs=1"),
        "x-session-id",
    ),
    "smg": Router(
        "smg.launch_router",
        ("--policy=consistent_hashing", "--worker-startup-check-interval=1", "--health-check-interval-secs=1"),
        "x-smg-routing-key",
    ),
}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def program(log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python module that runs as a program, and is killed behind the block if it still does."""
    environment = os.environ | {"HOME": str(log.parent), "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    with open(log, "ab") as file:
        process = subprocess.Popen([sys.executable, "-m", *arguments], env=environment, stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Client:
    """One conversation through a router.

    Args:
      url: of the router.
      header: the router's header for sessions.
      number: of the conversation.
      by_name: whether turns behind the first name the conversation; else they send the whole history.
    """

    def __init__(self, url: str, header: str, number: int, *, by_name: bool) -> None:
        self.url, self.number, self.by_name = url, number, by_name
        self.headers = {header: f"conversation-{number}"}
        self.messages: list[dict[str, str]] = []
        self.answers: list[str] = []
        self.named: dict[str, str] = {}
        self.told: list[int] = []

    def say(self) -> None:
        """The next turn: sent again while its server is gone, and with the whole history once it has moved."""
        self.messages.append(sk.user(TEXTS[len(self.answers)].format(self.number)))
        names = self.named if self.by_name else {}
        with sk.http(self.url) as http:
            for _ in range(200):
                messages = self.messages[-1:] if names else self.messages
                asked: dict[str, Any] = {"model": sk.MODEL, "messages": messages, "max_tokens": MAX_TOKENS}
                answer = http.post(CHAT, json={**asked, "temperature": 0, **names}, headers=self.headers)
                if answer.status_code == 200:
                    break
                self.told.append(answer.status_code)
                assert answer.status_code in GONE | MOVED, answer.text
                if answer.status_code in MOVED:
                    names = {}
                threading.Event().wait(0.1)
        assert answer.status_code == 200, answer.text
        said = answer.json()
        text = said["choices"][0]["message"]["content"]
        self.named = {name: said[name] for name in ("session_id", "session_state")}
        self.messages.append(sk.assistant(text))
        self.answers.append(text)


def serial(number: int) -> list[str]:
    with kit.small_engine() as engine:
        session = engine.session()
        return ["".join(session.send(text.format(number), max_tokens=MAX_TOKENS)) for text in TEXTS]


@pytest.fixture(params=ROUTERS)
def router(request) -> Router:
    found = ROUTERS[request.param]
    if importlib.util.find_spec(found.module.partition(".")[0]) is None:
        pytest.skip(f"{request.param} is not installed")
    return found


def test_no_answer_is_wrong_when_a_server_is_killed(router, tmp_path, record_property) -> None:
    kit.write_tiny_model(tmp_path / "model")
    flags = [f"--model={tmp_path / 'model'}", f"--served_model_name={sk.MODEL}", "--dtype=float32", "--nowarmup"]
    flags += [f"--context_window={kit.WINDOW}", "--dram_gib=0.05", f"--objects_url=file://{tmp_path / 'shared'}"]
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                program(tmp_path / f"server-{port}.log", "ca_jax.launch.serve", f"--port={port}", *flags)
            )
            for port in ports
        ]
        sk.wait_for(lambda: all(map(sk.is_ready, urls)), START_S, 0.1)
        port = free_port()
        asked = [router.module, *router.arguments, "--host=127.0.0.1", f"--port={port}"]
        asked += [f"--prometheus-port={free_port()}", "--worker-urls", *urls]
        stack.enter_context(program(tmp_path / "router.log", *asked))
        url = f"http://127.0.0.1:{port}"

        def knows_its_servers() -> bool:
            with contextlib.suppress(OSError, sk.httpx2.HTTPError), sk.http(url) as http:
                return [each["id"] for each in http.get("/v1/models").json().get("data", ())] == [sk.MODEL]
            return False

        sk.wait_for(knows_its_servers, START_S, 0.1)
        numbers = range(2 * NUM_CLIENTS)
        clients = [Client(url, router.session_header, each, by_name=each < NUM_CLIENTS) for each in numbers]
        threads = stack.enter_context(concurrent.futures.ThreadPoolExecutor(len(clients)))
        list(threads.map(Client.say, clients))
        held = [num_sessions(each) for each in urls]
        assert all(held), f"the router must use both servers, they hold {held}"

        going_on = [threads.submit(each.say) for each in clients]
        concurrent.futures.wait(going_on, return_when=concurrent.futures.FIRST_COMPLETED)
        servers[0].kill()
        for each in going_on:
            each.result()
        list(threads.map(Client.say, clients))
    for each in clients:
        assert each.answers == serial(each.number)
    record_property("held", held)
    record_property("told", sorted(status for each in clients for status in each.told))


def num_sessions(url: str) -> int:
    """Conversations that a server has."""
    with sk.http(url) as http:
        return len(http.get("/v1/sessions", params={"limit": 100}).json()["data"])
