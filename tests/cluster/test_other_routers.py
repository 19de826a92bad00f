"""Other projects' routers, as they are, in front of two servers that share objects.

One server is killed in the middle. A turn is then right, or the client is told: it never gets another conversation's
answer, or one of an older state.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import importlib.util
import itertools
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
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
        "vllm_router.launch_router", ("--policy=consistent_hash", "--health-check-interval-secs=1"), "x-session-id"
    ),
    "smg": Router(
        "smg.launch_router", ("--policy=consistent_hashing", "--health-check-interval-secs=1"), "x-smg-routing-key"
    ),
}


@dataclasses.dataclass(frozen=True)
class Server:
    """A server of this project."""

    url: str
    process: subprocess.Popen[bytes]
    events: str
    """Where it tells what it stores, if it does."""
    replays: str


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


@contextlib.contextmanager
def two_servers(directory: Path, *flags: str, events: bool = False) -> Iterator[list[Server]]:
    """Servers of the tiny model, once they are ready."""
    kit.write_tiny_model(directory / "model")
    common = [f"--model={directory / 'model'}", f"--served_model_name={sk.MODEL}", "--dtype=float32", "--nowarmup"]
    common += [f"--context_window={kit.WINDOW}", "--dram_gib=0.05", *flags]
    servers = []
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            port, addresses = free_port(), [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
            told = [f"--kv_events_url={addresses[0]}", f"--kv_events_replay_url={addresses[1]}"] if events else []
            log = directory / f"server-{port}.log"
            process = stack.enter_context(program(log, "ca_jax.launch.serve", f"--port={port}", *common, *told))
            servers.append(Server(f"http://127.0.0.1:{port}", process, *addresses))
        sk.wait_for(lambda: all(sk.is_ready(each.url) for each in servers), START_S, 0.1)
        yield servers


@contextlib.contextmanager
def in_front(log: Path, module: str, servers: list[Server], *arguments: str) -> Iterator[str]:
    """The address of a router, once it knows its servers' model."""
    port = free_port()
    asked = [module, "--host=127.0.0.1", f"--port={port}", f"--prometheus-port={free_port()}", *arguments]
    asked += ["--worker-startup-check-interval=1", "--worker-urls", *(each.url for each in servers)]
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        with contextlib.suppress(OSError, httpx2.HTTPError), sk.http(url) as http:
            return [each["id"] for each in http.get("/v1/models").json().get("data", ())] == [sk.MODEL]
        return False

    with program(log, *asked):
        sk.wait_for(is_ready, START_S, 0.1)
        yield url


def test_no_answer_is_wrong_when_a_server_is_killed(router, tmp_path, record_property) -> None:
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(two_servers(tmp_path, f"--objects_url=file://{tmp_path / 'shared'}"))
        url = stack.enter_context(in_front(tmp_path / "router.log", router.module, servers, *router.arguments))
        numbers = range(2 * NUM_CLIENTS)
        clients = [Client(url, router.session_header, each, by_name=each < NUM_CLIENTS) for each in numbers]
        threads = stack.enter_context(concurrent.futures.ThreadPoolExecutor(len(clients)))
        list(threads.map(Client.say, clients))
        held = [num_sessions(each.url) for each in servers]
        assert all(held), f"the router must use both servers, they hold {held}"

        going_on = [threads.submit(each.say) for each in clients]
        concurrent.futures.wait(going_on, return_when=concurrent.futures.FIRST_COMPLETED)
        servers[0].process.kill()
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


def test_vllm_router_sends_a_prompt_to_the_server_that_has_its_kv(tmp_path) -> None:
    """It follows the servers' events, and has them render prompts. What was told before it came it does not know."""
    pytest.importorskip("vllm_router")
    pytest.importorskip("zmq")
    log, numbers = tmp_path / "router.log", itertools.count()

    def ask(url: str, number: int) -> int:
        """Asks at an address; how many of the prompt's tokens were stored there."""
        asked = {"model": sk.MODEL, "messages": [user_text(number)], "max_tokens": MAX_TOKENS, "temperature": 0}
        with sk.http(url) as http:
            answer = http.post(CHAT, json=asked)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    def num_told(server: Server) -> int:
        """Batches of a server's events that the router has taken."""
        text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text())
        return text.count(f"live sequence advanced source={server.url} ")

    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(two_servers(tmp_path, events=True))
        sources = [f"--kv-event-source={each.url}={each.events}" for each in servers]
        sources += [f"--kv-event-replay-source={each.url}={each.replays}" for each in servers]
        policy = ["--policy=kv_aware", "--kv-event-block-size=128", f"--kv-event-model={sk.MODEL}", "--log-level=debug"]
        url = stack.enter_context(in_front(log, "vllm_router.launch_router", servers, *policy, *sources))
        for each in servers:  # It connects in its own time.
            sk.wait_for(lambda each=each: ask(each.url, next(numbers)) == 0 and num_told(each) > 0, every_s=0.1)
        held = []
        for server in [*servers, *servers[::-1], *servers]:
            number, before = next(numbers), num_told(server)
            assert ask(server.url, number) == 0
            sk.wait_for(lambda server=server, before=before: num_told(server) > before, every_s=0.05)
            held.append(number)
        assert min(ask(url, number) for number in held) >= 256, "each goes to the server that has it"


def user_text(number: int) -> dict[str, str]:
    """A message of more than two blocks of tokens, which begins like no other."""
    return sk.user(f"{number} " + "is a day of which there is much to tell. " * 8)
