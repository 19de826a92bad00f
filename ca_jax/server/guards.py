"""What is checked of a request before anything of it is read: for which host it is meant, and how large its body is.

A page of another site that a browser shows can have its own name resolve to this machine (DNS rebinding), and then ask
for all that needs no key. Its requests carry that name as `Host`. Nobody can make an address, or localhost, resolve
elsewhere.

Not here: keys (`tenants`).
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Collection

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ca_jax.server.errors import ApiError


class HostCheck:
    """Middleware: refuses requests for hosts that are neither addresses, localhost nor allowed.

    Args:
      app: what is behind it.
      allowed: names of hosts.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app = app
        self._allowed = {"localhost", "", *(name.strip().lower() for name in allowed)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request; as ASGI says."""
        if scope["type"] == "http":
            name = name_of(Headers(scope=scope).get("host", ""))
            if not (name in self._allowed or _is_address(name)):
                message = f"Host must be an address, localhost or one of --allowed_hosts, got {name!r}"
                error = ApiError(403, message, code="host_not_allowed")
                await JSONResponse(error.body(), error.status)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Middleware: refuses a body over a limit before it is read; one of unknown length, as soon as it is over.

    Args:
      app: what is behind it.
      max_bytes: most bytes of a body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request; as ASGI says."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = ApiError(413, f"the body must be at most {self._max_bytes} bytes", code="request_too_large")
        refuse = JSONResponse(error.body(), error.status, {"Connection": "close"})
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and int(length) > self._max_bytes:
            await refuse(scope, receive, send)
            return
        num_bytes, refused, started = 0, False, False

        async def counted() -> Message:
            nonlocal num_bytes, refused
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_bytes and not (refused or started):
                    refused = True
                    await refuse(scope, receive, send)
                if refused:  # The application gives up reading.
                    return {"type": "http.disconnect"}
            return message

        async def sent(message: Message) -> None:
            nonlocal started
            started = True
            if not refused:
                await send(message)

        await self._app(scope, counted, sent)


def name_of(host: str) -> str:
    """The name or address in a `Host` header, without port and brackets; empty where there is none."""
    host = host.strip().lower()
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].removesuffix(".")


def is_loopback(host: str) -> bool:
    """Whether an address or a name to listen on is reached from this machine alone."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False
