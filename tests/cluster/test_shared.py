"""Replicas on Ray Serve that share objects: conversations go on at another one as soon as their owner is killed."""

from __future__ import annotations

import concurrent.futures
import os
import signal
from typing import Any

import pytest

from ca_jax.storage.config import StoreConfig
from ca_jax.storage.objects.manifest import Manifest
from tests import engine_kit as kit
from tests import server_kit as sk

pytest.importorskip("ray.serve")

from ca_jax.cluster.keys import REPLICA_HEADER
from tests.cluster.kit import Cluster, running

pytestmark = pytest.mark.timeout(900)
CHAT = "/v1/chat/completions"
MAX_TOKENS = 8
TEXTS = ("What happened on day {}?", "And in its night?", "Who saw it?", "Who told of it?", "When?", "Is it so?")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    root, shared = tmp_path_factory.mktemp("kv"), tmp_path_factory.mktemp("shared")
    sizes = {"dram_gib": 0.05, "ssd_gib": 0.1, "ssd_free_floor_gib": 0.0, "block_tokens": kit.BLOCK_TOKENS}
    store = StoreConfig(ssd_dir=str(root), objects_url=f"file://{shared}", **sizes)
    with running(tmp_path_factory.mktemp("model"), store, name="shared", num_replicas=2) as started:
        started.shared = shared
        yield started


class Client:
    """One conversation, by name."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster, self.number = cluster, number
        self.name = f"day {number}"
        self.answers: list[str] = []
        self.state: str | None = None
        self.replica = ""
        self.cached: dict[str, int] = {}
        with cluster.http() as http:
            assert http.post("/v1/sessions", json={"session_id": self.name}).status_code == 201

    def say(self) -> None:
        """The next turn, sent again where its replica went away before it began to answer."""
        text = TEXTS[len(self.answers)].format(self.number)
        body: dict[str, Any] = {"model": sk.MODEL, "messages": [sk.user(text)], "max_tokens": MAX_TOKENS}
        body |= {"temperature": 0, "session_id": self.name} | ({"session_state": self.state} if self.state else {})
        with self.cluster.http() as http:
            for _ in range(100):
                answer = http.post(CHAT, json=body)
                if answer.status_code != 503:
                    break
        assert answer.status_code == 200, answer.text
        told = answer.json()
        self.answers.append(told["choices"][0]["message"]["content"])
        self.state, self.replica = told["session_state"], answer.headers[REPLICA_HEADER]
        self.cached = told["usage"]["ca_jax"]["cached_tokens"]

    def is_published(self) -> bool:
        """Whether its last state is."""
        paths = [path for path in self.cluster.shared.glob("v1/*/sessions/*") if path.suffix != ".__lock"]
        found = [Manifest.from_bytes(path.read_bytes()) for path in paths]
        return any(each.session_id == self.name and each.chain == self.state for each in found)


def serial(number: int) -> list[str]:
    with kit.small_engine() as engine:
        session = engine.session()
        return ["".join(session.send(text.format(number), max_tokens=MAX_TOKENS)) for text in TEXTS]


def say_all(clients: list[Client]) -> None:
    """A turn of each, all at once; it returns when all are published."""
    with concurrent.futures.ThreadPoolExecutor(len(clients)) as threads:
        list(threads.map(Client.say, clients))
    sk.wait_for(lambda: all(each.is_published() for each in clients), every_s=0.05)


@pytest.mark.parametrize(
    ("num_clients", "num_kills"), [(8, 1), pytest.param(32, 4, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_conversations_go_on_when_their_owner_is_killed(cluster, num_clients, num_kills) -> None:
    clients = [Client(cluster, 100 * num_kills + number) for number in range(num_clients)]
    say_all(clients)
    for kill in range(num_kills):
        sk.wait_for(lambda: len({each.replica for each in clients}) > 0)
        killed = clients[kill % num_clients].replica
        theirs = [each for each in clients if each.replica == killed]
        os.kill(cluster.pid_of(killed), signal.SIGKILL)
        say_all(clients)
        for each in theirs:
            assert each.replica != killed or kill, "another replica went on at once"
    for each in clients:
        assert each.answers == serial(each.number)[: len(each.answers)]
