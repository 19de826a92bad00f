"""Replicas on Ray Serve that come and go by its config file while clients talk: no request fails.

Ray runs here as `ray start` and `serve deploy` run it.
"""

from __future__ import annotations

import collections
import concurrent.futures
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import engine_kit as kit
from tests import server_kit as sk

pytest.importorskip("ray.serve")

import ray
from ray import serve

from ca_jax.cluster.keys import REPLICA_HEADER
from tests.cluster.kit import Cluster, free_port

pytestmark = pytest.mark.timeout(1800)
CHAT = "/v1/chat/completions"
START_S = 300.0


class Deployed(Cluster):
    """Replicas by a config file."""

    def __init__(self, directory: Path, dashboard: str) -> None:
        self._file, self._dashboard, port = directory / "serve.yaml", dashboard, free_port()
        super().__init__("scaled", f"http://127.0.0.1:{port}", directory / "kv")
        kit.write_tiny_model(directory / "model")
        store = {"dram_gib": 0.05, "ssd_dir": str(self.root), "ssd_gib": 0.1, "ssd_free_floor_gib": 0.0}
        store["objects_url"] = f"file://{directory / 'shared'}"
        engine = {"dtype": "float32", "context_window": kit.WINDOW, "warmup": False, "cpus_per_replica": 0.5}
        args = {"model": str(directory / "model"), "served_model_name": sk.MODEL, **engine, **store}
        application = {"name": self.name, "import_path": "ca_jax.launch.cluster:build", "args": args}
        self._config: dict[str, Any] = {
            "http_options": {"host": "127.0.0.1", "port": port},
            "applications": [application],
        }

    def deploy(self, num_replicas: int) -> None:
        """As a user does who has changed the number in the file; returns once so many serve."""
        self._config["applications"][0]["deployments"] = [{"name": "engine", "num_replicas": num_replicas}]
        self._file.write_text(yaml.safe_dump(self._config))
        command = [str(Path(sys.executable).with_name("serve")), "deploy", str(self._file)]
        subprocess.run([*command, f"--address={self._dashboard}"], check=True, capture_output=True)
        sk.wait_for(lambda: self._states() == {"RUNNING": num_replicas}, START_S, every_s=0.2)

    def _states(self) -> dict[str, int]:
        """How many replicas there are of each state."""
        found = serve.status().applications.get(self.name)
        if found is None or "engine" not in found.deployments:
            return {}
        return {str(state): number for state, number in found.deployments["engine"].replica_states.items() if number}

    def pids(self) -> dict[str, int]:
        return {name: self.pid_of(name) for name in self.names()}


@pytest.fixture
def cluster(tmp_path):
    sizes = {"num_cpus": 2, "object_store_memory": 200 << 20}
    context = ray.init(**sizes, include_dashboard=True, dashboard_port=free_port(), log_to_driver=False)
    try:
        yield Deployed(tmp_path, f"http://{context.dashboard_url}")
    finally:
        serve.shutdown()
        ray.shutdown()


def talk(cluster: Cluster, number: int, until: threading.Event, told: list[int], used: set[str]) -> None:
    """Conversations of a client, by name, one turn after the other: with the whole history where one has moved."""
    with cluster.http() as http:
        for conversation in range(1_000_000):
            history, named = [sk.user(f"I am {number}, and this is my conversation {conversation}.")], {}
            for _ in range(4):
                if until.is_set():
                    return
                body = {"model": sk.MODEL, "max_tokens": 8, "temperature": 0}
                answer = http.post(CHAT, json={**body, "messages": history[-1:] if named else history, **named})
                if answer.status_code == 409:
                    told.append(409)
                    answer = http.post(CHAT, json={**body, "messages": history})
                assert answer.status_code == 200, answer.text
                told.append(200)
                used.add(answer.headers[REPLICA_HEADER])
                said = answer.json()
                named = {name: said[name] for name in ("session_id", "session_state")}
                history += [sk.assistant(said["choices"][0]["message"]["content"]), sk.user("Go on.")]


def test_no_request_fails_as_replicas_come_and_go(cluster, record_property) -> None:
    cluster.deploy(2)
    before, told, ended = cluster.pids(), [], threading.Event()
    used: list[set[str]] = [set() for _ in range(8)]
    with concurrent.futures.ThreadPoolExecutor(len(used)) as threads:
        talking = [threads.submit(talk, cluster, number, ended, told, mine) for number, mine in enumerate(used)]
        try:
            for num_replicas in (3, 2):
                cluster.deploy(num_replicas)
                if num_replicas == 3:
                    assert cluster.pids().items() >= before.items(), "those that were there go on"
                    sk.wait_for(lambda: len(set.union(*used)) == 3, START_S, every_s=0.2)
                served = len(told)
                sk.wait_for(lambda served=served: len(told) > served + 50, START_S, every_s=0.2)
        finally:
            ended.set()
        for each in talking:
            each.result()
    record_property("told", dict(collections.Counter(told)))


@pytest.mark.parametrize("num_sessions", [200, pytest.param(3000, marks=pytest.mark.slow)], ids=["few", "many"])
def test_sessions_are_spread_evenly_and_stay_where_they_are(cluster, num_sessions, record_property) -> None:
    cluster.deploy(3)
    local = threading.local()

    def replica_of(number: int) -> str:
        """Which replica answers the next turn of a session."""
        if not hasattr(local, "http"):
            local.http = sk.http(cluster.url)
        body = {"model": sk.MODEL, "max_tokens": 1, "temperature": 0, "messages": [sk.user("Go on.")]}
        answer = local.http.post(CHAT, json=body, headers={"x-session-id": f"session {number}"})
        assert answer.status_code == 200, answer.text
        return answer.headers[REPLICA_HEADER]

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        first = list(threads.map(replica_of, range(num_sessions)))
        held = collections.Counter(first)
        then = threads.map(replica_of, range(num_sessions))
        same = sum(before == after for before, after in zip(first, then, strict=True))
    record_property("held", sorted(held.values()))
    record_property("same", same)
    assert same >= 0.99 * num_sessions
    assert max(held.values()) <= 1.5 * num_sessions / 3
