"""What is going on, as server-sent events and as one answer.

Viewers of the same are told the same: the engine is asked once for all of them, and not more often than the shortest
interval.

Not here: what is told (`live`), the page that shows it (`page_routes`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Annotated

import fastapi
import pydantic
from fastapi.responses import Response

from ca_jax.errors import CaJaxError
from ca_jax.server.description import answers
from ca_jax.server.errors import ApiError
from ca_jax.server.live import LiveSnapshot, read_live
from ca_jax.server.service import Service
from ca_jax.server.state import KeyedRoute, ServerState, TheService, TheTenant, state_of
from ca_jax.server.tenants import Tenant
from ca_jax.server.waiting import EventStream

ROUTES = fastapi.APIRouter(tags=["live"], route_class=KeyedRoute)
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.1, 60.0
_LOOK_S = 0.5  # How often a stream that has nothing to tell sees whether the server stops.
_ALIVE_S = 15.0  # How often it says something nevertheless, so that a connection that is gone is found to be.
_JSON = pydantic.TypeAdapter(LiveSnapshot)

SessionId = Annotated[
    str | None,
    fastapi.Query(min_length=1, max_length=256, description="The conversation whose blocks and last turn are told."),
]


@ROUTES.get("/live/snapshot", responses=answers(400, 401, 408, 429, 503) | {200: {"model": LiveSnapshot}})
async def live_snapshot(
    request: fastapi.Request, service: TheService, tenant: TheTenant, session_id: SessionId = None
) -> Response:
    """What engine and store are doing now: tiers, job queue, and one conversation of the caller's."""
    readings = _readings_of(request)
    return Response(await readings.read(service, tenant, session_id), media_type="application/json")


@ROUTES.get("/live", include_in_schema=False)  # It never ends: what reads the schema and tries each route would wait.
async def live(
    request: fastapi.Request,
    service: TheService,
    tenant: TheTenant,
    session_id: SessionId = None,
    interval_s: Annotated[float, fastapi.Query(ge=_MIN_INTERVAL_S, le=_MAX_INTERVAL_S)] = 0.25,
    once: bool = False,
) -> Response:
    """The same as server-sent events, whenever something has changed; with `once` as one answer."""
    if once:
        return await live_snapshot(request, service, tenant, session_id)
    readings, state = _readings_of(request), state_of(request)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(service.looking(tenant, is_stream=True))
        first = await readings.read(service, tenant, session_id)  # So that what is wrong is a status.
        events = _events(state, service, readings, tenant, session_id, interval_s, first)
        return EventStream(events, stack.pop_all(), None)


@dataclasses.dataclass
class _Reading:
    at_s: float
    told: asyncio.Future[bytes]


class _Readings:
    """The latest snapshot of each viewer's view, for all who have the same. Belongs to the event loop."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, str | None], _Reading] = {}

    async def read(self, service: Service, tenant: Tenant, session_id: str | None) -> bytes:
        """A snapshot as JSON, no older than the shortest interval.

        Raises:
          ApiError: as of `Service.ask`.
          SessionClosedError: the server is shutting down.
        """
        now_s = time.monotonic()
        for view in [view for view, reading in self._latest.items() if now_s - reading.at_s >= _MIN_INTERVAL_S]:
            if self._latest[view].told.done():
                del self._latest[view]
        reading = self._latest.get((tenant.domain, session_id))
        if reading is None:
            told = asyncio.ensure_future(_read(service, tenant, session_id))
            reading = self._latest[tenant.domain, session_id] = _Reading(now_s, told)
        return await asyncio.shield(reading.told)  # Others may wait for it when this one goes.


async def _read(service: Service, tenant: Tenant, session_id: str | None) -> bytes:
    return _JSON.dump_json(await service.ask(tenant, lambda engine: read_live(engine, tenant.domain, session_id)))


async def _events(
    state: ServerState,
    service: Service,
    readings: _Readings,
    tenant: Tenant,
    session_id: str | None,
    interval_s: float,
    first: bytes,
) -> AsyncIterator[bytes]:
    yield _event(first)
    told, told_s = _told(first), time.monotonic()
    with contextlib.suppress(CaJaxError, ApiError):  # The server is shutting down, or busy: whoever looks comes again.
        while True:
            left_s = interval_s
            while left_s > 0 and not state.stopping:
                await asyncio.sleep(min(left_s, _LOOK_S))
                left_s -= _LOOK_S
            if state.stopping:
                return
            snapshot = await readings.read(service, tenant, session_id)
            now_s = time.monotonic()
            if _told(snapshot) != told:
                told, told_s = _told(snapshot), now_s
                yield _event(snapshot)
            elif now_s - told_s >= _ALIVE_S:
                told_s = now_s
                yield b": alive\n\n"


def _event(snapshot: bytes) -> bytes:
    return b"data: " + snapshot + b"\n\n"


def _told(snapshot: bytes) -> bytes:
    """What of a snapshot is worth telling anew: all behind its time, which is its first field."""
    return snapshot.partition(b",")[2]


def _readings_of(request: fastapi.Request) -> _Readings:
    """Of the server that a request came to."""
    state = request.app.state
    if not hasattr(state, "live_readings"):
        state.live_readings = _Readings()
    readings: _Readings = state.live_readings
    return readings
