"""One replica: the whole server, with an engine, DRAM and a directory of the SSD tier of its own.

It is asked by `Ingress` with a request as a whole, and gives what its application sends as it comes: what has come by
the time that is asked for is one list. It publishes which keys it holds and how much it has to do.

Not here: which requests come to it (`choice`, `router`), Ray Serve's settings (`deployment`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.types import Message

from ca_jax.cluster.choice import Held, read_times, write_times
from ca_jax.cluster.directories import Claim, claim
from ca_jax.cluster.keys import REPLICA_HEADER, Keys, ends_conversation, replica_key, session_key, told_name
from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.errors import SessionClosedError, check
from ca_jax.server.app import make_app
from ca_jax.server.config import ServerConfig
from ca_jax.server.router import client_name
from ca_jax.server.state import ServerState
from ca_jax.server.tenants import Tenants

_LOG = logging.getLogger(__name__)
_MOST_HELD = 2048  # Keys that are published, each 16 characters and a time, every second.
_NOTED_S = 10.0  # How often they are written down where there is a directory.
_LOOK_S = 0.05  # How often a replica that starts looks whether its engine is ready.
_READING_S = 1.0  # How long what is published waits for the engine's thread.
ENDLESS = "/live"
"""The path whose streams are ended after the grace period, for a replica that waits for them would never end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaSpec:
    """What a replica serves, and how. All replicas have the same."""

    model: str
    """As `--model` names it."""
    engine: EngineConfig
    """Sizes are each replica's. Where its store has a directory, each replica has one below it."""
    server: ServerConfig
    """How requests are taken."""
    tenants: Tenants
    """Whose they are."""
    warmup: bool = True
    """Whether what turns need is compiled before the first one comes."""

    def __post_init__(self) -> None:
        numbered = self.server.kv_events_url is None or self.engine.store.ssd_dir is not None
        check(numbered, "ssd_dir", "given with a kv_events_url, whose ports go by its directories", None)
        check(not self.engine.max_adapters, "max_adapters", "0: replicas serve no adapters", self.engine.max_adapters)
        self.server.of_replica(0)


@dataclasses.dataclass(frozen=True)
class WholeRequest:
    """A request on its way to a replica."""

    scope: dict[str, Any]
    """As ASGI has it, but for what cannot be sent."""
    body: bytes
    keys: Keys


class EngineReplica:
    """A server in a process of Ray Serve, which makes it, asks it, and closes it when it is drained.

    Args:
      spec: what it serves.
      name: what it is called where it has no directory.
    """

    is_direct = False
    """Whether clients reach it without `Ingress`: its keys are of no tenant then."""

    def __init__(self, spec: ReplicaSpec, name: str) -> None:
        root = spec.engine.store.ssd_directory
        self._claim: Claim | None = None if root is None else claim(root)
        self.name = name if self._claim is None else self._claim.name
        self._spec = spec
        self._held = Held[None](_MOST_HELD)
        self._noted_s = time.monotonic()
        self._free_bytes = 0
        server = spec.server if self._claim is None else spec.server.of_replica(self._claim.number)
        self._app = make_app(self.make_engine, server, spec.tenants, replica=self.name)
        self._state: ServerState = self._app.state.server
        self._life = contextlib.AsyncExitStack()
        self._running: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Loads and warms up; returns when it serves.

        Raises:
          Exception: why the engine could not be made.
        """
        await self._life.enter_async_context(self._app.router.lifespan_context(self._app))
        while self._state.status == "starting":
            await asyncio.sleep(_LOOK_S)
        if self._state.failure is not None:
            await self.close()
            raise self._state.failure
        if self._state.service is not None:
            self._recall(await self._state.service.loop.call(lambda engine: engine.stored.names()))

    def _recall(self, names: Sequence[tuple[str, str]]) -> None:
        """Notes what the store has from before: sessions by tenant and name, the latest used first."""
        named = ((tenant, client_name(tenant, name)) for tenant, name in reversed(names[:_MOST_HELD]))
        known = {session_key("" if self.is_direct else tenant, name): 0.0 for tenant, name in named}
        if self._claim is not None:
            known |= read_times(self._claim.keys_file)
        for key, used_s in sorted(known.items(), key=lambda each: each[1]):
            self._held.use([key], None, used_s)

    def make_engine(self) -> Engine:
        """Makes this replica's engine, on a thread. A store that replicas share is attached here, and nowhere else.

        `close` waits for the engine's own `close`, which saves what is not saved and publishes what is shared.
        """
        config, store = self._spec.engine, self._spec.engine.store
        if self._claim is not None:
            config = dataclasses.replace(config, store=self._claim.config(store))
        engine = Engine.from_pretrained(self._spec.model, config)
        if self._spec.warmup:
            engine.warmup()
        return engine

    async def answer(self, request: WholeRequest) -> AsyncIterator[list[Message]]:
        """What the server answers to a request, as messages of ASGI, as they come.

        It ends without a last message where the server breaks an answer off. Closing this before its end tells the
        server that the client has gone away.
        """
        came: asyncio.Queue[Message | None] = asyncio.Queue()  # None behind the last.
        unread, left = [request.body], asyncio.Event()

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            came.put_nowait(message)

        async def run() -> None:
            try:
                await self._app(dict(request.scope), receive, send)
            except Exception:  # If nothing was sent yet, status 500 has been.
                _LOG.exception("%s broke", request.scope["path"])
            finally:
                came.put_nowait(None)

        task = asyncio.create_task(run())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        is_endless = request.scope["path"] == ENDLESS
        if is_endless:
            asyncio.get_running_loop().call_later(self._spec.server.shutdown_grace_s, left.set)
        has_ended = False
        try:
            while not has_ended:
                messages = [await came.get()]
                while not came.empty():
                    messages.append(came.get_nowait())
                has_ended = messages[-1] is None
                told = [each for each in messages if each is not None]
                if has_ended and is_endless and left.is_set():
                    told.append({"type": "http.response.body", "body": b"", "more_body": False})
                self._look(request.scope["method"], request.scope["path"], request.keys, told)
                yield told
        finally:
            left.set()

    def _look(self, method: str, path: str, keys: Keys, messages: list[Message]) -> None:
        """Says in an answer to a request whose it is, and notes which conversation it is of."""
        for message in messages:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (REPLICA_HEADER.encode(), self.name.encode())]
                if message["status"] < 400 and ends_conversation(method, path):
                    self._held.forget(keys.names)
                elif message["status"] < 400:
                    self._held.use(keys.names or (keys.key,), None)
            elif name := told_name(path, message.get("body", b"")) if method == "POST" else None:
                self._held.use([session_key(keys.tenant, name)], None)

    async def record_routing_stats(self) -> dict[str, Any]:
        """What the router knows of this replica: keys that it holds, and what it has to do. Asked every second."""
        service, engine = self._state.service, self._state.engine
        if service is None or engine is None or self._state.status != "ok":
            return {}
        with contextlib.suppress(TimeoutError, SessionClosedError):
            async with asyncio.timeout(_READING_S):
                self._free_bytes = await service.loop.call(lambda engine: engine.store_stats().free_bytes)
        times = self._held.times()
        if self._claim is not None and time.monotonic() - self._noted_s > _NOTED_S:
            self._noted_s = time.monotonic()
            write_times(self._claim.keys_file, times)
        share = service.loop.num_jobs / engine.config.max_batch_size
        held = {**times, replica_key(self.name): int(time.time())}
        return {"held": held, "share": share, "free_bytes": self._free_bytes}

    async def check_health(self) -> None:
        """Has a replica that will serve nothing any more replaced.

        Raises:
          RuntimeError: its engine is broken, or stuck at a step.
        """
        service = self._state.service
        if self._state.status == "failed":
            raise RuntimeError("the engine is broken")
        if service is not None and service.loop.step_s > self._spec.server.max_step_s:
            raise RuntimeError(f"the engine has been at one step for {service.loop.step_s:.0f} seconds")

    async def close(self) -> None:
        """Ends what runs and closes the engine, which saves what is not saved; lets go of the directory.

        Returns when all of that is done. May be called again.
        """
        self._state.stopping = True
        await self._life.aclose()
        if self._claim is not None:
            write_times(self._claim.keys_file, self._held.times())
            self._claim.release()
