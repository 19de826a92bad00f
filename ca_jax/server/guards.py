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

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ca_jax.server.errors import ApiError


class Guard:
    """Middleware: refuses requests for other hosts, and a body over a limit, before any of it where its length is told.

    Args:
      app: what is behind it; it answers the `ApiError` of a body.
      max_body_bytes: most bytes of a body.
      allowed_hosts: names of hosts, beside addresses and localhost; None: any host is.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, allowed_hosts: Collection[str] | None) -> None:
        self._app = app
        self._max_bytes = max_body_bytes
        names = None if allowed_hosts is None else [name.strip().lower() for name in allowed_hosts]
        self._allowed = None if names is None else {"localhost", "", *names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request; as ASGI says."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        name, length = name_of(headers.get("host", "")), headers.get("content-length", "")
        if not (self._allowed is None or name in self._allowed or _is_address(name)):
            message = f"Host must be an address, localhost or one of --allowed_hosts, got {name!r}"
            await ApiError(403, message, code="host_not_allowed").response(scope["path"])(scope, receive, send)
            return
        told_bytes, num_bytes = int(length) if length.isdecimal() else 0, 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive() if told_bytes <= self._max_bytes else {}
            num_bytes += len(message.get("body", b""))
            if max(num_bytes, told_bytes) > self._max_bytes:
                raise ApiError(413, f"the body must be at most {self._max_bytes} bytes", code="request_too_large")
            return message

        await self._app(scope, counted, send)


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
