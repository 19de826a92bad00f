"""The application of Ray Serve: an ingress, and engine replicas behind it.

Not here: flags, starting Ray (`launch.cluster`).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ca_jax.cluster.config import ClusterConfig
from ca_jax.cluster.direct import Choice, Chooser, DirectReplica
from ca_jax.cluster.ingress import Ingress
from ca_jax.cluster.keys import Keys
from ca_jax.cluster.replica import EngineReplica, ReplicaSpec, WholeRequest
from ca_jax.errors import check
from ca_jax.private import ray_direct
from ca_jax.server.config import ServerConfig
from ca_jax.server.tenants import Tenants

_CLOSING_S = 60.0  # How long a drained replica may take to save what is not saved.
_DRAIN_LOOK_S = 0.5  # How often it looks whether all of its answers have ended.
_STATS_PERIOD_S = 1.0  # How often a replica publishes what it holds.
_OTHER_REQUESTS = 1024  # Of a replica at a time, beside answers that run or wait; the server bounds each kind itself.
_MOST_PASSED = 100_000  # Requests of an ingress at a time: replicas refuse what is too much.
_ROUTER = "ca_jax.cluster.router:HolderRouter"


class _ServedReplica(EngineReplica):
    """A replica in a process of Ray Serve. It serves once it is made, and is closed when it is drained."""

    async def __init__(self, spec: ReplicaSpec) -> None:  # type: ignore[misc]
        super().__init__(spec, serve.get_replica_context().replica_id.unique_id)
        await self.start()

    async def __del__(self) -> None:
        await self.close()


class _ServedDirectReplica(DirectReplica, _ServedReplica):
    """The same, asked by HAProxy."""

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return _function(self.asgi)


class _ServedChooser(Chooser):
    """A chooser in a process of Ray Serve."""

    def __init__(self, engines: DeploymentHandle) -> None:
        self._engines = engines
        super().__init__(self._ask)

    async def _ask(self, keys: Keys) -> str:
        return await ray_direct.choose(self._engines.options(session_id=keys.key), Choice(keys))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return _function(self.asgi)


def _function(app: ASGIApp) -> ASGIApp:
    """An application as a plain function: uvicorn takes a method for one of an older ASGI."""

    async def asgi(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, send)

    return asgi


class _ServedIngress(Ingress):
    """An ingress in a process of Ray Serve."""

    def __init__(self, engines: DeploymentHandle, server: ServerConfig, tenants: Tenants) -> None:
        self._engines = engines.options(method_name="answer", stream=True)
        super().__init__(self._send, server, tenants)

    async def _send(self, request: WholeRequest, key: str) -> AsyncIterator[list[Message]]:
        answer = self._engines.options(session_id=key).remote(request)
        try:
            async for messages in answer:
                yield messages
        finally:
            with contextlib.suppress(Exception):  # It may have ended, or never begun.
                answer.cancel()


def make_application(spec: ReplicaSpec, cluster: ClusterConfig) -> serve.Application:
    """The application, to be run by `ray.serve.run` or by a config file of Ray Serve.

    Args:
      spec: what replicas serve.
      cluster: how many they are, and what each is given.

    Raises:
      ValueError: `cluster.direct` without what it needs.
    """
    num_slots, objects_url = spec.engine.max_batch_size, spec.engine.store.objects_url
    check(not cluster.direct or objects_url is not None, "objects_url", "given with direct", objects_url)
    scaling: dict[str, Any] = {"num_replicas": cluster.num_replicas}
    if cluster.max_replicas is not None:
        target = cluster.target_ongoing_requests or float(num_slots)
        numbers = {"min_replicas": cluster.min_replicas, "max_replicas": cluster.max_replicas}
        scaling = {"autoscaling_config": {**numbers, "target_ongoing_requests": target}}
    engines = serve.deployment(
        serve.ingress()(_ServedDirectReplica) if cluster.direct else _ServedReplica,
        name="engine",
        max_ongoing_requests=spec.server.max_queue + num_slots + _OTHER_REQUESTS,
        ray_actor_options={"num_cpus": cluster.cpus_per_replica, "num_gpus": cluster.gpus_per_replica},
        graceful_shutdown_timeout_s=spec.server.shutdown_grace_s + _CLOSING_S,
        graceful_shutdown_wait_loop_s=_DRAIN_LOOK_S,
        request_router_config=RequestRouterConfig(
            request_router_class=_ROUTER,
            request_router_kwargs={"num_slots": num_slots, "may_move": objects_url is not None},
            request_routing_stats_period_s=_STATS_PERIOD_S,
        ),
        **scaling,
    )
    served = engines.bind(spec)
    passes: dict[str, Any] = {
        "max_ongoing_requests": _MOST_PASSED,
        "ray_actor_options": {"num_cpus": 0},
        "graceful_shutdown_timeout_s": spec.server.shutdown_grace_s,
        "graceful_shutdown_wait_loop_s": _DRAIN_LOOK_S,
    }
    if cluster.direct:
        chooser = serve.deployment(serve.ingress()(_ServedChooser), name="chooser", **passes)
        return ray_direct.with_chooser(served, chooser.bind(served))
    ingress = serve.deployment(_ServedIngress, name="ingress", num_replicas=cluster.num_ingresses, **passes)
    return ingress.bind(served, spec.server, spec.tenants)
