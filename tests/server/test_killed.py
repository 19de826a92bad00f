"""The server's process killed in the middle of a load: the next one of its directory goes on with every conversation.

Clients hold conversations until nobody answers any more, and go on once the server is there again: half of them by
their whole history, half by name. What they were answered is known again, on SSD or not yet; who goes on by name says
where the conversation stands, since an answer may have been complete that did not get through: then all of it is sent.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import random
import socket
import subprocess
import sys
import threading
import urllib.error
from pathlib import Path

import openai
import pytest

from tests import engine_kit as kit
from tests import server_kit as sk
from tests.server import soak
from tests.server.soak import MAX_TOKENS, Asked
from tests.server_kit import assistant, user

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_TURNS = 6  # Of a conversation; so many fit the window.
BLOCK_TOKENS = 128  # The server's default.
START_S = 180.0


@dataclasses.dataclass
class Seen:
    """What clients have met in all rounds."""

    num_answers: int = 0
    num_broken_off: int = 0
    """Answers that a kill took."""
    num_ahead: int = 0
    """Conversations that the server knew an answer of which had not got through: 409, and all of it was sent."""
    num_by_name: int = 0
    """Conversations that were gone on with by name alone in another process."""
    num_resumed: int = 0
    """Conversations that were known to be on SSD, and gone on with from there."""
    failures: list[str] = dataclasses.field(default_factory=list)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def count(self, field: str, number: int = 1) -> None:
        with self.lock:
            setattr(self, field, getattr(self, field) + number)


class ServerProcess:
    """`ca_jax serve` over the tiny model and one directory, on a port of this machine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        kit.write_tiny_model(directory / "model")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns once it is ready."""
        sizes = ["--dram_gib=0.02", "--ssd_gib=0.2", "--ssd_free_floor_gib=0", f"--ssd_dir={self._directory / 'ssd'}"]
        tiny = ["--dtype=float32", f"--context_window={kit.WINDOW}", "--max_batch_size=8", "--norecompute_if_faster"]
        command = [sys.executable, "-m", "ca_jax.launch.serve", f"--model={self._directory / 'model'}", "--nowarmup"]
        with open(self._directory / "log", "ab") as log:
            self.process = subprocess.Popen(
                [*command, *tiny, *sizes, f"--served_model_name={sk.MODEL}", f"--port={self.port}"],
                cwd=REPOSITORY,
                env={**os.environ, "HOME": str(self._directory)},  # What is compiled is kept there.
                stdout=log,
                stderr=log,
            )
        sk.wait_for(self._is_ready, START_S)

    def _is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self._directory / "log").read_text()
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            return sk.health(f"http://127.0.0.1:{self.port}") == {"status": "ok"}
        return False

    def kill(self) -> None:
        """By SIGKILL, if it runs."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def client(self) -> openai.OpenAI:
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=sk.DEADLINE_S)


class Client:
    """One conversation, and what its client knows of it."""

    def __init__(self, number: int, seen: Seen) -> None:
        self._number = number
        self._seen = seen
        self._by_name = bool(number % 2)
        self.session_id: str | None = None
        self.session_state: str | None = None
        self.history: list[dict[str, str]] = []
        self.asked: list[Asked] = []

    @property
    def is_done(self) -> bool:
        return len(self.history) >= 2 * NUM_TURNS

    def talk(self, server: ServerProcess, on_ssd: set[str]) -> None:
        """Goes on until all is said or the server is gone; `on_ssd` are names that the server must know again."""
        is_known, is_restarted = self.session_id in on_ssd, self.session_id is not None
        try:
            with server.client() as client:
                while not self.is_done:
                    num_cached = self._turn(client, is_restarted)
                    is_restarted = False
                    if is_known and not num_cached:
                        self._seen.failures.append(f"client {self._number}: nothing was found of what was on SSD")
                    self._seen.count("num_resumed", is_known)
                    is_known = False
        except openai.APIConnectionError:
            self._seen.count("num_broken_off")
        except Exception as error:
            self._seen.failures.append(f"client {self._number}: {type(error).__name__}: {error}")

    def _turn(self, client: openai.OpenAI, is_restarted: bool) -> int:
        """Asks for one answer; how many of its tokens were cached."""
        answer = None
        if self._by_name and self.session_id is not None:
            stands = {"session_id": self.session_id, "session_state": self.session_state}
            try:
                answer = sk.chat(client, [self._said()], MAX_TOKENS, extra_body=stands)
                self._seen.count("num_by_name", is_restarted)
            except openai.ConflictError:
                self._seen.count("num_ahead")
                known = client.get(f"/sessions/{self.session_id}", cast_to=object)["messages"]
                if not is_restarted or known[: len(self.history) + 1] != [*self.history, self._said()]:
                    raise
        if answer is None:
            answer = sk.chat(client, [*self.history, self._said()], MAX_TOKENS)
        self.session_id, self.session_state = answer.session_id, answer.session_state
        self._take(sk.text_of(answer))
        self._seen.count("num_answers")
        return sk.cached(answer)

    def _said(self) -> dict[str, str]:
        return user(f"{self._number} says {len(self.history)} and tells of its long way home")

    def _take(self, text: str) -> None:
        self.history.append(self._said())
        self.asked.append(Asked(list(self.history), text))
        self.history.append(assistant(text))


def kill_in_the_middle(server: ServerProcess, seen: Seen, num_answers: int, delay_s: float) -> set[str]:
    """Kills the server behind so many answers, once something is on SSD; names of what was, by then."""
    on_ssd = set[str]()
    with server.client() as client:

        def is_time() -> bool:
            listed = client.get("/sessions", cast_to=object)["data"]
            stored = ((each["id"], each["stored"]) for each in listed if each["stored"])
            on_ssd.update(name for name, where in stored if where["ssd_tokens"] >= BLOCK_TOKENS)
            return bool(on_ssd) and seen.num_answers >= num_answers

        sk.wait_for(is_time)
    threading.Event().wait(delay_s)
    server.kill()
    return on_ssd


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("num_clients", "num_kills"), [(8, 1), pytest.param(16, 4, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_conversations_go_on_behind_kill_9(num_clients, num_kills, tmp_path, record_property):
    seen, draw = Seen(), random.Random(num_kills)
    clients = [Client(number, seen) for number in range(num_clients)]
    server, on_ssd = ServerProcess(tmp_path), set[str]()
    share = num_clients * NUM_TURNS // (num_kills + 2)
    try:
        for number in range(num_kills + 1):
            server.start()
            with concurrent.futures.ThreadPoolExecutor(num_clients) as pool:
                talking = [pool.submit(client.talk, server, on_ssd) for client in clients if not client.is_done]
                if number < num_kills:
                    on_ssd = kill_in_the_middle(server, seen, (number + 1) * share, draw.uniform(0, 0.05))
                for each in talking:
                    each.result()
    finally:
        server.kill()
    for field in ("num_answers", "num_broken_off", "num_ahead", "num_by_name", "num_resumed"):
        record_property(field, getattr(seen, field))
    assert not seen.failures
    assert all(client.is_done for client in clients)
    assert seen.num_broken_off > 0, "nothing was under way"
    assert seen.num_resumed > 0
    assert seen.num_by_name > 0
    report = soak.Report()
    with kit.small_engine(store=kit.STORE_OFF) as alone:
        for client in clients:
            assert len(client.asked) == NUM_TURNS
            for asked in client.asked:
                soak.check(alone, asked, report)
    assert not report.wrong
    assert report.num_ties <= 1
