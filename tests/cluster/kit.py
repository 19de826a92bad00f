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


class Cluster:
    """Where it is reached, and the directories that its replicas have."""

    def __init__(self, url: str, root: Path) -> None:
        self.url, self.root = url, root

    def http(self) -> httpx2.Client:
        return sk.http(self.url)

    def pid_of(self, replica: str) -> int:
        """The process of a replica of a name."""
        directory = next(path.with_suffix("") for path in self.root.glob("*.name") if path.read_text() == replica)
        return json.loads((directory / "catalog.lock").read_text())["pid"]

    def names(self) -> set[str]:
        return {path.read_text() for path in self.root.glob("*.name")}


@contextlib.contextmanager
def running(model: Path, store: StoreConfig, *, name: str, num_replicas: int = 2, **server: Any) -> Iterator[Cluster]:
    """Replicas, once they serve.

    Args:
      model: directory for the model.
      store: of each; its SSD has a directory below that one.
      name: of the application.
    """
    kit.write_tiny_model(model)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = ServerConfig(served_model_name=sk.MODEL, **server)
    engine = dataclasses.replace(kit.SMALL, store=store)
    spec = ReplicaSpec(model=str(model), engine=engine, server=config, tenants=Tenants(), warmup=False)
    application = make_application(spec, ClusterConfig(num_replicas=num_replicas, cpus_per_replica=0.5))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(application, name=name)
        yield Cluster(f"http://127.0.0.1:{port}", Path(store.ssd_dir))
    finally:
        serve.shutdown()
        ray.shutdown()
