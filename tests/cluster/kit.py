"""Replicas of the tiny model on Ray Serve, which runs here for as long as they do."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import ray
from ray import serve

from ca_jax.cluster.config import ClusterConfig
from ca_jax.cluster.deployment import make_application
from ca_jax.cluster.replica import ReplicaSpec
from ca_jax.server.config import ServerConfig
from ca_jax.server.tenants import Tenants
from ca_jax.storage.config import StoreConfig
from tests import engine_kit as kit
from tests import server_kit as sk
from tests.cluster import mortal
from tests.conftest import REPOSITORY


class Cluster:
    """Where it is reached, and the directories that its replicas have."""

    def __init__(self, name: str, url: str, root: Path) -> None:
        self.name, self.url, self.root = name, url, root

    def http(self) -> httpx2.Client:
        return sk.http(self.url)

    def pid_of(self, replica: str) -> int:
        """The process of a replica of a name."""
        directory = next(path.with_suffix("") for path in self.root.glob("*.name") if path.read_text() == replica)
        return json.loads((directory / "catalog.lock").read_text())["pid"]

    def num_running(self) -> int:
        """Replicas that Ray Serve sends requests to."""
        engines = serve.status().applications[self.name].deployments["engine"]
        return sum(number for state, number in engines.replica_states.items() if state == "RUNNING")

    def names(self) -> set[str]:
        return {path.read_text() for path in self.root.glob("*.name")}


def free_port() -> int:
    """One of loopback that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def running(
    model: Path, store: StoreConfig, *, name: str, num_replicas: int = 2, kills: Path | None = None, **server: Any
) -> Iterator[Cluster]:
    """Replicas, once they serve.

    Args:
      model: directory for the model.
      store: of each; its SSD has a directory below that one.
      name: of the application.
      kills: where files name steps at which a replica is to be killed (`mortal`).
    """
    kit.write_tiny_model(model)
    port = free_port()
    config = ServerConfig(served_model_name=sk.MODEL, **server)
    engine = dataclasses.replace(kit.SMALL, store=store)
    spec = ReplicaSpec(model=str(model), engine=engine, server=config, tenants=Tenants(), warmup=False)
    application = make_application(spec, ClusterConfig(num_replicas=num_replicas, cpus_per_replica=0.5))
    hook = f"{mortal.__name__}.{mortal.set_up.__name__}"
    environment = {"PYTHONPATH": str(REPOSITORY), mortal.DIRECTORY: str(kills)}
    with_kills = {"worker_process_setup_hook": hook, "env_vars": environment}
    sizes = {"num_cpus": 2, "object_store_memory": 200 << 20}
    ray.init(**sizes, include_dashboard=False, log_to_driver=False, runtime_env=with_kills if kills else None)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(application, name=name)
        yield Cluster(name, f"http://127.0.0.1:{port}", Path(store.ssd_dir))
    finally:
        serve.shutdown()
        ray.shutdown()
