"""What the routes of one server share: its state, whose a request is, streams, and clients that go away.

Not here: the routes, deadlines (`service`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import fastapi
import fastapi.routing
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ca_jax.engine import Engine
from ca_jax.server.bodies import OpenBody
from ca_jax.server.config import ServerConfig
from ca_jax.server.errors import ApiError
from ca_jax.server.observing import note_tenant
from ca_jax.server.service import Service
from ca_jax.server.tenants import Tenant, Tenants, authorization_of

if TYPE_CHECKING:
    from ca_jax.server.kv_events import KVEvents

_READING_S = 5.0  # How much longer than its deadline a client may read what was sent before.
IGNORED_HEADER = "x-ca-jax-ignored-fields"
"""Of an answer: names of the request's fields that are not known here, and were ignored."""
_MOST_TOLD = 16  # Of those.
_MOST_CHARS = 64  # Of a name.
_NAME_CHARS = 256  # Of a conversation's name.
SESSION_HEADERS = ("x-session-id", "session-id", "x-claude-code-session-id")
"""Headers in which clients name the conversation of a request, in order of preference."""
T = TypeVar("T")


@dataclasses.dataclass
class ServerState:
    """The state of one server."""

    config: ServerConfig
    tenants: Tenants
    engine: Engine | None = None
    """Once it is loaded and warm."""
    service: Service | None = None
    """Once all is known that was stored before."""
    kv_events: KVEvents | None = None
    """What tells routers what is stored; None: nobody is told."""
    sampling: asyncio.Task[None] | None = None
    """What keeps the last hour."""
    failure: Exception | None = None
    """Why the engine could not be made."""
    stopping: bool = False
    """Whether nothing more is taken in. Any thread may say so, a signal's handler too."""

    @property
    def status(self) -> str:
        """`ok` where requests are served; else why they are not."""
        if self.failure is not None or (self.service is not None and self.service.loop.failure is not None):
            return "failed"
        if self.stopping:
            return "shutting down"
        return "starting" if self.service is None else "ok"


def state_of(request: fastapi.Request) -> ServerState:
    """The state of the server that a request came to."""
    state: ServerState = request.app.state.server
    return state


# Coroutines: FastAPI sends all other functions to a pool of threads, which is two hops a request.


async def tenant_of(request: fastapi.Request) -> Tenant:
    """Whose a request is, by its key.

    Raises:
      ApiError: it has no key, or one that is not known.
    """
    authorization = authorization_of(request.headers)
    tenant = state_of(request).tenants.of_header(authorization)
    if tenant is None:
        found = "none" if authorization is None else "another"
        message = f"the key must be a known one, as 'Authorization: Bearer KEY'; got {found}"
        raise ApiError(401, message, code="invalid_api_key")
    note_tenant(tenant.name)
    return tenant


class KeyedRoute(fastapi.routing.APIRoute):
    """A route that looks at the key before the body: without a key nothing is parsed, whatever was sent."""

    def get_route_handler(self) -> Callable[[fastapi.Request], Coroutine[Any, Any, fastapi.Response]]:
        """As FastAPI says."""
        handle = super().get_route_handler()

        async def checked(request: fastapi.Request) -> fastapi.Response:
            await tenant_of(request)
            return await handle(request)

        return checked


class OpenRoute(KeyedRoute):
    """A route whose `body` may have fields that are not known: they are named in a header of the answer, or refused."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        is_told = inspect.unwrap(endpoint) is not endpoint  # Routes are made anew where they are included.
        takes_body = "body" in inspect.signature(endpoint).parameters
        super().__init__(path, _telling(endpoint) if takes_body and not is_told else endpoint, **options)


def _telling(endpoint: Callable[..., Awaitable[fastapi.Response]]) -> Callable[..., Awaitable[fastapi.Response]]:
    """A route's function that looks at its `body` first, as the config of its `service` says."""

    @functools.wraps(endpoint)
    async def answer(*, body: OpenBody, service: Service, **given: Any) -> fastapi.Response:
        ignored = list(body.ignored())
        if ignored and service.config.strict_fields:
            message = f"not a field that is served: {ignored[0]}"
            raise ApiError(400, message, code="unknown_parameter", param=ignored[0])
        response = await endpoint(body=body, service=service, **given)
        if ignored:
            told = (urllib.parse.quote(name[:_MOST_CHARS], safe="") for name in ignored[:_MOST_TOLD])
            response.headers[IGNORED_HEADER] = ", ".join(told)
        return response

    return answer


def session_header(request: fastapi.Request) -> str | None:
    """The name that a request's headers give its conversation; None where they give none that one may have."""
    found = (request.headers.get(name, "") for name in SESSION_HEADERS)
    return next((name for name in found if 0 < len(name) <= _NAME_CHARS and "/" not in name), None)


async def _the_service(request: fastapi.Request) -> Service:
    state = state_of(request)
    if state.service is None or state.status != "ok":
        raise ApiError(503, f"the server is not ready: {state.status}", code="not_ready", retry_after_s=1)
    return state.service


TheTenant = Annotated[Tenant, fastapi.Depends(tenant_of)]
"""Whose a request is."""
TheService = Annotated[Service, fastapi.Depends(_the_service)]
"""What serves it."""


class EventStream(StreamingResponse):
    """Server-sent events.

    Args:
      events: as they are sent.
      ends: is closed with the response, however that ends.
      until_s: when the events end, seconds of the event loop's clock; a client has a little longer to read them.
    """

    def __init__(
        self, events: AsyncIterator[str] | AsyncIterator[bytes], ends: contextlib.AsyncExitStack, until_s: float | None
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._ends = ends
        self._until_s = None if until_s is None else until_s + _READING_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request; as ASGI says."""
        async with self._ends:
            with contextlib.suppress(TimeoutError):  # The connection is closed then.
                async with asyncio.timeout_at(self._until_s):
                    await super().__call__(scope, receive, send)


async def while_connected(request: fastapi.Request, answering: Awaitable[T]) -> T:
    """Waits for an answer, and cancels it if its client goes away.

    Raises:
      ApiError: the client went away (499, which nobody reads).
      Exception: whatever the answer raises.
    """

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.ensure_future(answering), asyncio.create_task(left())
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client went away", code="client_disconnected")
        return task.result()
    finally:
        for each in (task, leaving):
            each.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)
