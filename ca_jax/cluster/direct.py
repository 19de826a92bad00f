"""Requests that go straight to a replica: HAProxy asks which one, and passes what that answers on.

    client ── HAProxy ── a request's body ── Chooser, by the router of Ray Serve       which replica
                 `────── the request ─────── DirectReplica, at a port of its own       all of the answer

No process of Python is between a replica and its client. HAProxy tells the chooser no more than a body and the session
of the header, and asks for POST alone: so keys are of no tenant here (they are of hashes, and only say where something
may be found sooner), and any replica may be asked anything. Hence replicas must share an objects tier.

Not here: HAProxy (Ray Serve), which replica (`choice`, `router`), Ray's settings (`deployment`, `launch.cluster`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from ca_jax.cluster.keys import REPLICA_HEADER, REQUEST_ID, Keys, keys_of, keys_of_body
from ca_jax.cluster.replica import ENDLESS, EngineReplica
from ca_jax.server.errors import ApiError

_LOG = logging.getLogger(__name__)
_ROUTE = "/internal/route"


@dataclasses.dataclass(frozen=True)
class Choice:
    """A request that a replica is chosen for, and that comes there by another way."""

    keys: Keys


class Chooser:
    """Tells HAProxy which replica a request goes to.

    Args:
      choose: by the keys of a request, the name by which HAProxy knows a replica.
    """

    def __init__(self, choose: Callable[[Keys], Awaitable[str]]) -> None:
        self._choose = choose

    async def asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI says."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        status, told = 404, {"error": f"there must be a POST of {_ROUTE}"}
        if scope["method"] == "POST" and scope["path"] == _ROUTE:
            parts, has_more = [], True
            while has_more:
                message = await receive()
                parts.append(message.get("body", b""))
                has_more = message.get("more_body", False)
            try:
                replica = await self._choose(keys_of_body(scope["headers"], b"".join(parts)))
                status, told = 200, {"replica_id": replica}
            except Exception as error:  # HAProxy answers 503 for whatever is no 200.
                _LOG.warning("no replica could be chosen: %s", error)
                status, told = 503, {"error": "no replica can be chosen"}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(told).encode()})


class DirectReplica(EngineReplica):
    """A replica that clients reach by HAProxy alone."""

    is_direct = True

    async def asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI says: what the server answers."""
        if scope["type"] == "lifespan":  # The server's own has begun with the replica.
            await _live(receive, send)
            return
        named = Headers(scope=scope).get(REPLICA_HEADER)
        if named not in (None, self.name):
            text = (
                f"{REPLICA_HEADER} must be left out where HAProxy chooses the replica, or be {self.name}; got {named!r}"
            )
            await ApiError(400, text, code="replica_not_chosen").response(scope["path"])(scope, receive, send)
            return
        parts: list[bytes] = []
        keys: Keys | None = None
        is_endless, has_ended = scope["path"] == ENDLESS, False
        ends_s = asyncio.get_running_loop().time() + self._spec.server.shutdown_grace_s

        async def read() -> Message:
            try:
                async with asyncio.timeout_at(ends_s if is_endless else None):
                    message = await receive()
            except TimeoutError:
                return {"type": "http.disconnect"}
            parts.append(message.get("body", b""))
            return message

        async def pass_on(message: Message) -> None:
            nonlocal keys, has_ended
            if keys is None:
                keys = keys_of("", scope["path"], scope["query_string"], scope["headers"], b"".join(parts))
            if message["type"] == "http.response.start":
                message = {**message, "headers": [each for each in message["headers"] if each[0] != REQUEST_ID]}
            self._look(scope["method"], scope["path"], keys, [message])
            has_ended = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        await self._app(scope, read, pass_on)
        if is_endless and not has_ended:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _live(receive: Receive, send: Send) -> None:
    """A life of an application, as ASGI has it, in which nothing has to begin or end."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
