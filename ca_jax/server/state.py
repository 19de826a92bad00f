"""What the routes of one server share.

Not here: the routes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import fastapi
import fastapi.routing

from ca_jax.engine import Engine
from ca_jax.server.config import ServerConfig
from ca_jax.server.errors import ApiError
from ca_jax.server.service import Service
from ca_jax.server.tenants import Tenant, Tenants


@dataclasses.dataclass
class ServerState:
    """Of one server."""

    config: ServerConfig
    tenants: Tenants
    engine: Engine | None = None
    """Once it is loaded and warm."""
    service: Service | None = None
    """Likewise."""
    failure: Exception | None = None
    """Why the engine could not be made."""
    stopping: bool = False
    """Whether nothing more is taken in."""

    def begin_shutdown(self) -> None:
        """Takes in nothing more. Any thread may call it, a signal's handler too."""
        self.stopping = True
        if self.service is not None:
            self.service.closing = True

    @property
    def status(self) -> str:
        """`ok` where requests are served; else why they are not."""
        if self.failure is not None or (self.service is not None and self.service.loop.failure is not None):
            return "failed"
        if self.stopping:
            return "shutting down"
        return "ok" if self.service is not None and self.service.is_ready else "starting"


def state_of(request: fastapi.Request) -> ServerState:
    """Of the server that a request came to."""
    state: ServerState = request.app.state.server
    return state


def service_of(request: fastapi.Request) -> Service:
    """Who serves.

    Raises:
      ApiError: nobody does, yet or any more.
    """
    state = state_of(request)
    if state.service is None or state.status != "ok":
        raise ApiError(503, f"the server is not ready: {state.status}", code="not_ready", retry_after_s=1)
    return state.service


def tenant_of(request: fastapi.Request) -> Tenant:
    """Whose a request is, by its key.

    Raises:
      ApiError: it has no key, or one that is not known.
    """
    authorization = request.headers.get("authorization")
    tenant = state_of(request).tenants.of_header(authorization)
    if tenant is None:
        found = "none" if authorization is None else "another"
        raise ApiError(
            401, f"the key must be a known one, as 'Authorization: Bearer KEY'; got {found}", code="invalid_api_key"
        )
    return tenant


class KeyedRoute(fastapi.routing.APIRoute):
    """A route that looks at the key before the body: without one nothing is parsed, whatever was sent."""

    def get_route_handler(self) -> Callable[[fastapi.Request], Coroutine[Any, Any, fastapi.Response]]:
        """As FastAPI says."""
        handle = super().get_route_handler()

        async def checked(request: fastapi.Request) -> fastapi.Response:
            tenant_of(request)
            return await handle(request)

        return checked


async def _the_service(request: fastapi.Request) -> Service:
    return service_of(request)  # FastAPI sends what is no coroutine to a pool of threads: two hops of each request.


async def _the_tenant(request: fastapi.Request) -> Tenant:
    return tenant_of(request)


TheTenant = Annotated[Tenant, fastapi.Depends(_the_tenant)]
"""Whose a request is."""
TheService = Annotated[Service, fastapi.Depends(_the_service)]
"""Who serves it."""
