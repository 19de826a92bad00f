"""For whom a request is meant, by its `Host`: a page of somebody else's that a browser shows must not reach the server.

Such a page can have its own name resolve to this machine (DNS rebinding), and then ask whatever needs no key. Its
requests carry that name. An address, and localhost, are nobody's to resolve.

Not here: keys (`tenants`).
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Collection

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ca_jax.server.errors import ApiError


class HostCheck:
    """Middleware: refuses requests for hosts that are neither addresses, localhost nor allowed.

    Args:
      app: what is behind it.
      allowed: names of hosts.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app = app
        self._allowed = {name.strip().lower() for name in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request; as ASGI says."""
        if scope["type"] == "http":
            host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
            name = name_of(host)
            if name and not (name in self._allowed or name == "localhost" or _is_address(name)):
                message = f"Host must be an address, localhost or one of --allowed_hosts, got {name!r}"
                error = ApiError(403, message, code="host_not_allowed")
                await JSONResponse(error.body(), error.status)(scope, receive, send)
                return
        await self._app(scope, receive, send)


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
