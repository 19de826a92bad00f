"""The server's routes.

Serving begins when the engine is loaded and warm: until then, and from when the server is told to stop, `/health` and
everything that needs the engine answer with status 503.

Not here: what a request does (`service`, `openai_routes`, `session_routes`), flags and sockets (`launch.serve`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import fastapi
import fastapi.exceptions
import starlette.exceptions
import starlette.routing
from asgi_correlation_id import CorrelationIdMiddleware, correlation_id
from fastapi.responses import JSONResponse, Response

from ca_jax.engine import Engine
from ca_jax.errors import CaJaxError
from ca_jax.server import live_routes, openai_routes, page_routes, session_routes
from ca_jax.server.bodies import UNSERVED
from ca_jax.server.body_limit import BodyLimit
from ca_jax.server.config import ServerConfig
from ca_jax.server.description import OBJECT, answers, describe
from ca_jax.server.errors import ApiError, as_api_error
from ca_jax.server.hosts import HostCheck
from ca_jax.server.metrics import CONTENT_TYPE, RequestMetrics
from ca_jax.server.service import Service
from ca_jax.server.state import ServerState, TheService, TheTenant, state_of
from ca_jax.server.tenants import Tenants

_LOG = logging.getLogger(__name__)
_WITH_HEAD = ("/health", "/metrics")  # What else takes HEAD, which the description leaves out.
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)  # A client's own name of a request, which it is told again.


def make_app(
    make_engine: Callable[[], Engine],
    config: ServerConfig | None = None,
    tenants: Tenants | None = None,
    *,
    on_failure: Callable[[], None] = lambda: None,
) -> fastapi.FastAPI:
    """The server as an ASGI application. It makes the engine when it starts and closes it when it ends.

    Args:
      make_engine: loads, warms up and returns the engine; called on a thread of its own.
      config: how requests are taken.
      tenants: whose they are; without, everybody's, and keys are not asked for.
      on_failure: called when the engine cannot be made: nothing will ever be served.
    """
    config, tenants = config or ServerConfig(), tenants or Tenants()
    state = ServerState(config=config, tenants=tenants)

    @contextlib.asynccontextmanager
    async def lifespan(app: fastapi.FastAPI) -> AsyncIterator[None]:
        making = asyncio.create_task(_start(state, make_engine, on_failure))
        try:
            yield
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await making
            await _stop(state)

    app = fastapi.FastAPI(
        title="ca_jax",
        version=importlib.metadata.version("ca-jax"),
        description="OpenAI's API over an engine that keeps the KV of conversations between turns.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.server = state
    app.include_router(openai_routes.ROUTES)
    app.include_router(session_routes.ROUTES)
    app.include_router(live_routes.ROUTES)
    app.include_router(page_routes.ROUTES)
    _add_plain_routes(app)
    _add_error_handlers(app)
    describe(app, tenants.asks_for_keys)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    if config.allowed_hosts or not tenants.asks_for_keys:
        app.add_middleware(HostCheck, allowed=config.allowed_hosts)
    app.add_middleware(CorrelationIdMiddleware, header_name="X-Request-ID", validator=_is_request_id)
    return app


def _is_request_id(text: str) -> bool:
    return _REQUEST_ID.fullmatch(text) is not None


async def _start(state: ServerState, make_engine: Callable[[], Engine], on_failure: Callable[[], None]) -> None:
    try:
        engine = await asyncio.to_thread(make_engine)
        state.engine = engine
        metrics = RequestMetrics(state.config.served_model_name or engine.model.name)
        state.service = Service(engine, state.config, metrics, state.tenants)
        await state.service.begin()
    except Exception as error:
        state.failure = error
        _LOG.exception("the engine could not be made")
        on_failure()


async def _stop(state: ServerState) -> None:
    """Ends what runs and saves what is not saved."""
    if state.service is not None:
        await state.service.stop()
    if state.engine is not None:
        await asyncio.to_thread(state.engine.close)


def _add_plain_routes(app: fastapi.FastAPI) -> None:
    unready = answers() | {503: {"description": "Not ready, or not any more.", "content": OBJECT}}

    @app.head("/health", include_in_schema=False)
    @app.get("/health", tags=["server"], responses=unready)
    async def health(request: fastapi.Request) -> JSONResponse:
        """Whether requests are served: 200 once the engine is loaded and warm, and while it is not stuck."""
        state = state_of(request)
        told = {"status": state.status}
        step_s = 0.0 if state.service is None else state.service.loop.step_s
        if told["status"] == "ok" and step_s > state.config.max_step_s:
            told = {"status": "stuck", "reason": f"the engine has been at one step for {step_s:.0f} seconds"}
        return JSONResponse(told, 200 if told["status"] == "ok" else 503)

    text = {"text/plain": {"schema": {"type": "string"}}}

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics", tags=["server"], response_class=Response, responses=answers(401, 403, 503, content=text))
    async def metrics(tenant: TheTenant, service: TheService) -> Response:
        """What Prometheus reads: of all tenants. Where keys are asked for, one whose tenant may is."""
        if not tenant.metrics:
            raise ApiError(403, "metrics must be read with a key whose tenant may (metrics = true)", code="not_allowed")
        return Response(await service.read_metrics(), media_type=CONTENT_TYPE)


def _add_error_handlers(app: fastapi.FastAPI) -> None:
    def told(request: fastapi.Request, error: ApiError) -> JSONResponse:
        state = state_of(request)
        if state.service is not None:
            state.service.metrics.refuse(error.status)
        return JSONResponse(error.body(), error.status, error.headers())

    Handler = Callable[[fastapi.Request, Any], Awaitable[JSONResponse]]

    async def known(request: fastapi.Request, error: ApiError | CaJaxError) -> JSONResponse:
        return told(request, as_api_error(error))

    async def invalid(request: fastapi.Request, error: fastapi.exceptions.RequestValidationError) -> JSONResponse:
        return told(request, invalid_body(error))

    async def of_http(request: fastapi.Request, error: starlette.exceptions.HTTPException) -> JSONResponse:
        if error.status_code == 400 and "parsing the body" in str(error.detail):
            return told(request, ApiError(400, "the body must be JSON", code="invalid_json"))
        response = told(request, ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))
        response.headers.update(error.headers or {})
        if error.status_code == 405:  # Each of a path's routes knows of its own method alone.
            known = response.headers.get("Allow", "").split(", ")
            response.headers["Allow"] = ", ".join(sorted({*known, *_methods_of(request)} - {""}))
        return response

    async def unknown(request: fastapi.Request, error: Exception) -> JSONResponse:
        _LOG.error("%s %s broke (%s)", request.method, request.url.path, correlation_id.get(), exc_info=error)
        return told(request, as_api_error(error))

    handlers: dict[Any, Handler] = {
        ApiError: known,
        CaJaxError: known,
        fastapi.exceptions.RequestValidationError: invalid,
        starlette.exceptions.HTTPException: of_http,
        Exception: unknown,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _methods_of(request: fastapi.Request) -> set[str]:
    """The methods that a request's path takes, as the server's description says."""
    described: dict[str, Any] = request.app.openapi()["paths"]
    matches = (path for path in described if starlette.routing.compile_path(path)[0].match(request.url.path))
    found = {method.upper() for path in matches for method in described[path]}
    return found | {"HEAD"} if request.url.path in _WITH_HEAD else found


def invalid_body(error: fastapi.exceptions.RequestValidationError) -> ApiError:
    """What is wrong with a request's fields: the first that is, named as a path."""
    first = min(error.errors(), key=lambda each: (each["type"] != "extra_forbidden", len(each["loc"])))
    path = [str(part) for part in first["loc"][1:] if not (isinstance(part, str) and ("[" in part or "-" in part))]
    param = ".".join(path) or None
    if first["type"] == "json_invalid":
        return ApiError(400, "the body must be JSON, got something else", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"not a field that is served: {param}", code="unknown_parameter", param=param)
    if first["type"] == "missing":
        return ApiError(400, f"missing field: {param or 'the body'}", code="missing_required_parameter", param=param)
    if path and path[0] in UNSERVED:
        return ApiError(400, f"not served: {param}", code="unsupported_parameter", param=param)
    return ApiError(400, f"{param or 'the body'}: {first['msg']}", code="invalid_value", param=param)
