"""What clients of a cluster reach: reads a request, and passes on what the replica of its conversation answers.

Not here: keys (`keys`), which replica has one (`choice`), whatever a request does (`ca_jax.server`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ca_jax.cluster.choice import Held
from ca_jax.cluster.keys import REQUEST_ID, keys_of, session_key, told_name
from ca_jax.cluster.replica import WholeRequest
from ca_jax.server.config import ServerConfig
from ca_jax.server.errors import ApiError
from ca_jax.server.guards import Guard
from ca_jax.server.tenants import Tenants, authorization_of

_LOG = logging.getLogger(__name__)
_SENT = (  # Of what ASGI says of a request.
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path"),
    *("headers", "client", "server"),
)
_MOST_TOLD = 65_536  # Names that answers told, of which it is remembered by which key their request went.


class Ingress:
    """The way to all replicas.

    Args:
      engines: sends a request by a key, and gives lists of ASGI's messages as they come.
      server: how replicas take requests.
      tenants: whose they are.
    """

    def __init__(self, engines: Callable[[WholeRequest, str], Any], server: ServerConfig, tenants: Tenants) -> None:
        self._ask = engines
        self._tenants = tenants
        self._told = Held[str](_MOST_TOLD)
        hosts = None if tenants.asks_for_keys and not server.allowed_hosts else server.allowed_hosts
        self._guarded = Guard(self._pass_on, server.max_body_bytes, hosts)

    async def __call__(self, request: Request) -> Response:
        """As Ray Serve calls it: the answer to a request, which is not read yet."""
        return _Passed(self._guarded)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            asked = await self._read(scope, receive)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        if asked is None:
            return
        known = self._told.get(asked.keys.key)
        key = asked.keys.key if known is None else known[1]
        has_begun, has_ended = False, False
        try:
            async with aclosing(self._ask(asked, key)) as answer:
                async for messages in answer:
                    for message in messages:
                        has_begun = True
                        if message["type"] == "http.response.start":
                            message["headers"] = [each for each in message["headers"] if each[0] != REQUEST_ID]
                        elif scope["method"] == "POST" and (name := told_name(scope["path"], message["body"])):
                            self._told.use([session_key(asked.keys.tenant, name)], key)
                        has_ended = message["type"] == "http.response.body" and not message.get("more_body")
                        await send(message)
        except Exception as error:
            _LOG.exception("%s was not answered", scope["path"])
            if has_begun:
                raise
            text = "the replica that was asked is gone; another one answers the whole history"
            lost = ApiError(503, text, code="replica_lost", retry_after_s=1)
            lost.__cause__ = error
            await lost.response(scope["path"])(scope, receive, send)
            return
        if not has_ended:  # So that the connection breaks, and the client sees that something is missing.
            raise RuntimeError("the replica broke its answer off")

    async def _read(self, scope: Scope, receive: Receive) -> WholeRequest | None:
        """A request with its body, and its keys; None if its client goes away. Without a known key no body is read.

        Raises:
          ApiError: the body is too large.
        """
        tenant = self._tenants.of_header(authorization_of(Headers(scope=scope)))
        parts, has_more = [b""], tenant is not None
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            has_more = message.get("more_body", False)
        domain, body = "" if tenant is None else tenant.domain, b"".join(parts)
        keys = keys_of(domain, scope["path"], scope["query_string"], scope["headers"], body)
        return WholeRequest({name: scope[name] for name in _SENT if name in scope}, body, keys)


class _Passed(Response):
    """An answer that another application gives."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI says."""
        await self._app(scope, receive, send)
