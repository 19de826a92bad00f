"""Replicas on Ray Serve that share objects: conversations go on at another one as soon as their owner is killed.

Wherever in a turn it is killed: what was published is there, what is not there is said so, and no answer is wrong.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import os
import secrets
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from ca_jax.storage.config import StoreConfig
from ca_jax.storage.objects.manifest import Manifest
from tests import engine_kit as kit
from tests import server_kit as sk
from tests.reliability.steps import TOLD

pytest.importorskip("ray.serve")

from ca_jax.cluster.keys import REPLICA_HEADER
from tests.cluster.kit import Cluster, running

CHAT = "/v1/chat/completions"
MAX_TOKENS = 8
TEXTS = ("What happened on day {}?", "And in its night?", "Who saw it?", "Who told of it?", "When?", "Is it so?")
NUM_DAYS = 8
START_S = 300.0
STEPS = TOLD[1:]  # Conversations come to another replica, and are restored there, as soon as theirs is killed.
STEP_S = 60.0
"""How long replicas may take to come to a step before one is killed wherever it stands."""


@pytest.fixture(scope="module")
def kills(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kills")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, kills):
    root, shared = tmp_path_factory.mktemp("kv"), tmp_path_factory.mktemp("shared")
    sizes = {"dram_gib": 0.05, "ssd_gib": 0.1, "ssd_free_floor_gib": 0.0, "block_tokens": kit.BLOCK_TOKENS}
    store = StoreConfig(ssd_dir=str(root), objects_url=f"file://{shared}", **sizes)
    model = tmp_path_factory.mktemp("model")
    with running(model, store, name="shared", num_replicas=3, kills=kills) as started:
        started.shared = shared
        yield started


@functools.cache
def serial(day: int) -> list[str]:
    """What an engine answers that serves the conversation alone."""
    with kit.small_engine() as engine:
        session = engine.session()
        return ["".join(session.send(text.format(day), max_tokens=MAX_TOKENS)) for text in TEXTS]


class Client:
    """One conversation after the other, each by name, on days of its own."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster, self.day = cluster, number % NUM_DAYS
        self.told: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self.name, self.day = f"{self.day} {secrets.token_hex(4)}", (self.day + 1) % NUM_DAYS
        self._expected = serial(self.day)
        self._states: list[str] = []  # Behind each turn.
        self._num_published = 0
        self._ask("POST", "/v1/sessions", {"session_id": self.name}, wanted={201, 400})  # 400: it was begun.

    def talk(self, until: threading.Event) -> None:
        """Turn by turn."""
        while not until.is_set():
            if len(self._states) == len(TEXTS):
                self._begin()
            self.say()

    def say(self) -> None:
        """The next turn, as often as it takes until there is an answer."""
        number = len(self._states)
        while len(self._states) <= number:
            text = sk.user(TEXTS[len(self._states)].format(self.day))
            state = self._states[-1] if self._states else ""  # Else a turn whose answer was lost is said once more.
            body = {"model": sk.MODEL, "messages": [text], "max_tokens": MAX_TOKENS, "temperature": 0}
            body |= {"session_id": self.name, "session_state": state}
            answer = self._ask("POST", CHAT, body, wanted={200, 404, 409})
            if answer.status_code != 200:
                self._look()
                continue
            told = answer.json()
            assert told["choices"][0]["message"]["content"] == self._expected[len(self._states)]
            self.replica = answer.headers[REPLICA_HEADER]
            with self._lock:
                self._states.append(told["session_state"])

    def _look(self) -> None:
        """Where the conversation stands: it may have an answer that never came, or lack what was not published."""
        answer = self._ask("GET", f"/v1/sessions/{self.name}", wanted={200, 404})
        found = answer.json() if answer.status_code == 200 else {"messages": []}
        if answer.status_code == 404:
            self._ask("POST", "/v1/sessions", {"session_id": self.name}, wanted={201, 400})  # 400: it was begun.
        said = [each["content"] for each in found["messages"]]
        num_turns = len(said) // 2
        assert said[1::2] == self._expected[:num_turns]
        with self._lock:
            assert self._num_published <= num_turns <= len(self._states) + 1, "what was published is there, and no more"
            self.told["again"] += max(0, len(self._states) - num_turns)
            self._states = [*self._states, ""][:num_turns]
            if num_turns:
                self._states[-1] = found["session_state"]

    def note(self, published: dict[str, str]) -> None:
        """How much of it was published by now.

        Args:
          published: the state of each conversation.
        """
        with self._lock:
            if (state := published.get(self.name)) in self._states:
                self._num_published = self._states.index(state) + 1

    def is_published_in(self, there: dict[str, str]) -> bool:
        """Whether all that was said is, by the states that conversations have."""
        return not self._states or there.get(self.name) == self._states[-1]

    def _ask(self, method: str, path: str, body: Any = None, *, wanted: set[int]) -> httpx2.Response:
        """An answer, asked for again while the replica that has the conversation is gone."""
        give_up_s = time.monotonic() + START_S
        while True:
            with self.cluster.http() as http:
                answer = http.request(method, path, json=body)
            self.told[str(answer.status_code)] += 1
            if answer.status_code in wanted:
                return answer
            assert answer.status_code == 503, answer.text
            assert time.monotonic() < give_up_s, answer.text
            time.sleep(0.1)


def published(cluster: Cluster) -> dict[str, str]:
    """The state of each conversation that the store of objects has now."""
    paths = [path for path in cluster.shared.glob("v1/*/sessions/*") if path.suffix != ".__lock"]
    found = [Manifest.from_bytes(path.read_bytes()) for path in paths]
    return {each.session_id: each.chain for each in found}


@pytest.mark.parametrize(
    ("num_clients", "num_kills"),
    [
        pytest.param(8, 2, marks=pytest.mark.timeout(900), id="short"),
        pytest.param(32, 50, marks=[pytest.mark.slow, pytest.mark.timeout(7200)], id="long"),
    ],
)
def test_conversations_go_on_wherever_in_a_turn_their_owner_is_killed(
    cluster, kills, num_clients, num_kills, record_property
) -> None:
    clients = [Client(cluster, number) for number in range(num_clients)]
    for each in clients:
        each.say()
    assert len({each.replica for each in clients}) > 1
    ended, killed = threading.Event(), collections.Counter()
    with concurrent.futures.ThreadPoolExecutor(num_clients) as threads:
        talking = [threads.submit(each.talk, ended) for each in clients]

        def wait_for(holds, deadline_s: float) -> bool:
            """Whether it came about; what went wrong meanwhile is raised."""
            give_up_s = time.monotonic() + deadline_s
            while not (came := holds()) and time.monotonic() < give_up_s:
                for each in concurrent.futures.wait(talking, timeout=0.02).done:
                    each.result()
            return came

        try:
            for number in range(num_kills):
                assert wait_for(lambda: cluster.num_running() >= 2 and num_alive(cluster) >= 2, START_S)
                there = published(cluster)
                for each in clients:
                    each.note(there)
                step = STEPS[number % len(STEPS)]
                file = kills / step
                file.touch()
                if not wait_for(lambda file=file: not file.exists(), STEP_S):
                    file.unlink(missing_ok=True)
                    os.kill(cluster.pid_of(clients[number % num_clients].replica), signal.SIGKILL)
                    step = "any"
                killed[step] += 1
        finally:
            ended.set()
        for each in talking:
            each.result()
    told = sum((each.told for each in clients), collections.Counter())
    record_property("killed", dict(killed))
    record_property("told", dict(told))
    assert killed["any"] <= num_kills // len(STEPS), "replicas come to all steps"
    sk.wait_for(lambda: all(each.is_published_in(published(cluster)) for each in clients), every_s=0.1)


def num_alive(cluster: Cluster) -> int:
    """Replicas that have a process."""
    num = 0
    for name in cluster.names():
        with contextlib.suppress(ValueError, FileNotFoundError):  # It starts, and has not written its number yet.
            num += Path(f"/proc/{cluster.pid_of(name)}").exists()
    return num
