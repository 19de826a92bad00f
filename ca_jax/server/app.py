"""The server as an ASGI application: its life, health, metrics, the page at `/`, and OpenAPI's description of it.

Serving begins when the engine is loaded and warm: until then, and from when the server is told to stop, `/health` and
everything that needs the engine answer with status 503.

The page needs no key and no engine: it asks for a key, and says that the server is starting. The browser is told to let
it ask nobody but this server.

Not here: what a request does (`service`), the other routes (`openai_routes`, `session_routes`, `live`), flags and
sockets (`launch.serve`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import importlib.resources
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import fastapi
from asgi_correlation_id import CorrelationIdMiddleware
from fastapi.responses import JSONResponse, Response

from ca_jax.engine import Engine
from ca_jax.server import (
    conversation_routes,
    live,
    message_routes,
    openai_routes,
    response_routes,
    session_routes,
    token_routes,
)
from ca_jax.server.config import ServerConfig
from ca_jax.server.errors import OBJECT, ApiError, add_error_handlers, responses
from ca_jax.server.guards import Guard
from ca_jax.server.metrics import CONTENT_TYPE
from ca_jax.server.observing import AccessLog, Observer, Recorder
from ca_jax.server.service import Service
from ca_jax.server.state import ServerState, TheService, TheTenant, state_of
from ca_jax.server.tenants import Tenants
from ca_jax.telemetry.spans import SpanSender

if TYPE_CHECKING:
    from ca_jax.server.kv_events import KVEvents

_LOG = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)  # A client's own name of a request, which it gets back.
_ROUTES = fastapi.APIRouter(tags=["server"])
_PAGE_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def make_app(
    make_engine: Callable[[], Engine],
    config: ServerConfig | None = None,
    tenants: Tenants | None = None,
    *,
    on_failure: Callable[[Exception], None] = lambda error: None,
    replica: str = "",
) -> fastapi.FastAPI:
    """The application. It makes the engine when it starts and closes it when it ends.

    Args:
      make_engine: loads, warms up and returns the engine; called on a thread of its own.
      config: how requests are taken.
      tenants: whose they are; without, everybody's, and keys are not asked for.
      on_failure: called with the error when the engine cannot be made: nothing will ever be served.
      replica: names this server among its replicas, in access log and traces; empty: it is alone.

    Raises:
      ImportError: the config asks for what needs packages that are not installed.
      OSError: the access log cannot be written.
    """
    config, tenants = config or ServerConfig(), tenants or Tenants()
    state = ServerState(config=config, tenants=tenants)
    recorder = _recorder(config, replica)

    @contextlib.asynccontextmanager
    async def lifespan(app: fastapi.FastAPI) -> AsyncIterator[None]:
        making = asyncio.create_task(_start(state, make_engine, on_failure))
        try:
            yield
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await making
            if state.sampling is not None:
                state.sampling.cancel()
            if state.service is not None:
                await state.service.stop()
            if state.engine is not None:  # Saves what is not saved.
                await asyncio.to_thread(state.engine.close)
            if state.kv_events is not None:
                await asyncio.to_thread(state.kv_events.close)
            if recorder is not None:
                await asyncio.to_thread(recorder.close)

    app = fastapi.FastAPI(
        title="ca_jax",
        version=importlib.metadata.version("ca-jax"),
        description="OpenAI's API over an engine that keeps the KV of conversations between turns.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.server = state
    apis = (openai_routes, response_routes, conversation_routes, message_routes, token_routes)
    for module in (*apis, session_routes, live):
        app.include_router(module.ROUTES)
    for routes in (openai_routes.ADAPTER_ROUTES, _ROUTES):
        app.include_router(routes)
    add_error_handlers(app, lambda status: state.service.metrics.refuse(status) if state.service else None)
    _describe(app, tenants.asks_for_keys)
    hosts = None if tenants.asks_for_keys and not config.allowed_hosts else config.allowed_hosts
    app.add_middleware(Guard, max_body_bytes=config.max_body_bytes, allowed_hosts=hosts)
    if recorder is not None:
        app.add_middleware(Observer, recorder=recorder)
    app.add_middleware(
        CorrelationIdMiddleware,
        header_name="X-Request-ID",
        validator=lambda name: _REQUEST_ID.fullmatch(name) is not None,
    )
    return app


def _recorder(config: ServerConfig, replica: str) -> Recorder | None:
    """Who writes down requests; None where nobody asked for that."""
    log = None if config.access_log is None else AccessLog(config.access_log, replica)
    endpoint, instance = config.otlp_traces_endpoint, replica or f"{socket.gethostname()}-{os.getpid()}"
    spans = None if endpoint is None else SpanSender(endpoint, instance)
    return None if log is None and spans is None else Recorder(log, spans, replica)


async def _start(
    state: ServerState, make_engine: Callable[[], Engine], on_failure: Callable[[Exception], None]
) -> None:
    try:
        if state.config.kv_events_url is not None:
            state.kv_events = _kv_events(state.config.kv_events_url, state.config)
        state.engine = await asyncio.to_thread(make_engine)
        if state.kv_events is not None:
            state.engine.watch_store(state.kv_events.tell)
        service = Service(state.engine, state.config, state.tenants)
        try:
            await service.begin()
        finally:
            state.service = service
        state.sampling = asyncio.create_task(live.keep_history(service))
    except Exception as error:
        state.failure = error
        _LOG.exception("the engine could not be made")
        on_failure(error)


def _kv_events(url: str, config: ServerConfig) -> KVEvents:
    try:
        from ca_jax.server.kv_events import KVEvents
    except ImportError as error:
        raise ImportError(f"kv_events_url needs more packages: pip install 'ca-jax[events]' ({error})") from error
    return KVEvents(url, config.kv_events_replay_url, config.kv_events_topic)


def _describe(app: fastapi.FastAPI, asks_for_keys: bool) -> None:
    """Has an application describe itself as it is: wrong fields are a 400 here, and keys are asked for or not."""
    describe_routes = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        described = describe_routes()
        for operation in (each for operations in described["paths"].values() for each in operations.values()):
            operation["responses"].pop("422", None)
            if not asks_for_keys:
                operation["responses"].pop("401", None)
            elif "401" in operation["responses"]:
                operation["security"] = [{"key": []}]
        components = described["components"]
        for name in ("HTTPValidationError", "ValidationError"):
            components["schemas"].pop(name, None)
        if asks_for_keys:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        return described

    app.openapi = openapi  # type: ignore[method-assign]


_UNREADY = responses(content=OBJECT) | {503: {"description": "Not ready, or not any more.", "content": OBJECT}}
_TEXT = {"text/plain": {"schema": {"type": "string"}}}


@_ROUTES.head("/health", include_in_schema=False)
@_ROUTES.get("/health", responses=_UNREADY)
async def health(request: fastapi.Request) -> JSONResponse:
    """Whether requests are served: 200 once the engine is loaded and warm, and while it is not stuck."""
    state = state_of(request)
    body = {"status": state.status}
    step_s = 0.0 if state.service is None else state.service.loop.step_s
    if body["status"] == "ok" and step_s > state.config.max_step_s:
        body = {"status": "stuck", "reason": f"the engine has been at one step for {step_s:.0f} seconds"}
    return JSONResponse(body, 200 if body["status"] == "ok" else 503)


@_ROUTES.head("/metrics", include_in_schema=False)
@_ROUTES.get("/metrics", response_class=Response, responses=responses(401, 403, 503, content=_TEXT))
async def metrics(tenant: TheTenant, service: TheService) -> Response:
    """Metrics of all tenants, for Prometheus. Where keys are asked for, the key's tenant must have the right to."""
    if not tenant.metrics:
        raise ApiError(403, "metrics must be read with a key whose tenant may (metrics = true)", code="not_allowed")
    return Response(await service.read_metrics(), media_type=CONTENT_TYPE)


@_ROUTES.get("/", include_in_schema=False)
@_ROUTES.get("/page/{name}", include_in_schema=False)
async def page_file(name: str = "index.html") -> Response:
    """A file that the page is made of: chat, and the store at work."""
    files = _page_files()
    if name not in files:
        raise ApiError(404, f"the page has no file {name!r}")
    return Response(files[name], media_type=_PAGE_TYPES[name.rpartition(".")[2]], headers=_PAGE_HEADERS)


@functools.cache
def _page_files() -> dict[str, bytes]:
    """Every file of the page by its name."""
    files = importlib.resources.files("ca_jax.server") / "page"
    return {file.name: file.read_bytes() for file in files.iterdir() if file.name.rpartition(".")[2] in _PAGE_TYPES}
