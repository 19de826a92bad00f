"""What engine and store are doing at one moment, as one tenant may see it: as one answer, and as server-sent events.

    LiveSnapshot
      tiers     DRAM and SSD: how full, sessions, evictions
      moves     load, save, fetch, flush: how much so far, how fast as measured
      running   jobs in slots              waiting   the job queue, and its two look-ahead windows
      session   of one conversation: where each of its blocks is, and the timeline of its last turn

Jobs of other tenants are counted and shown without a name. Everything is read by the engine's thread, between two
steps; it costs what is shown, not what is stored. Viewers of the same get the same: the engine is asked once for all of
them, and not more often than the shortest interval.

Not here: the page that shows it (`page`), the last hour (`history`), totals for Prometheus (`metrics`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Annotated, Any

import fastapi
import pydantic
from fastapi.responses import Response

from ca_jax.engine import Engine
from ca_jax.errors import CaJaxError
from ca_jax.kv.costs import Rates, TransferRate
from ca_jax.server.errors import ApiError, responses
from ca_jax.server.history import SAMPLE_S, LastHour, LiveDone, View
from ca_jax.server.metrics import tiers_of
from ca_jax.server.observing import phases
from ca_jax.server.router import client_name, engine_name
from ca_jax.server.service import Service
from ca_jax.server.state import EventStream, KeyedRoute, ServerState, TheService, TheTenant, state_of
from ca_jax.server.tenants import Tenant
from ca_jax.session import Job, Session
from ca_jax.storage.records import BlockTiers, StoreStats

ROUTES = fastapi.APIRouter(tags=["live"], route_class=KeyedRoute)
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.1, 60.0
_LOOK_S = 0.5  # How often a stream without news sees whether the server stops.
_ALIVE_S = 15.0  # How often it sends something nevertheless, so that a broken connection is noticed.
# To the microsecond: beyond that there is nothing to tell, and much to send.
_Seconds = Annotated[float, pydantic.PlainSerializer(lambda seconds: round(seconds, 6), return_type=float)]
_MAX_WAITING = 64  # Waiting jobs that are shown one by one: more cells than a row of them has room for.


class LiveTier(View):
    """One tier of the store: the bytes of its blocks, sessions in it, and what it has done so far."""

    name: str
    """`dram` or `ssd`."""
    used_bytes: int
    capacity_bytes: int
    num_sessions: int
    num_evictions: int
    num_hits: int
    """Loads that were completed, of KV that had been here."""


class LiveMove(View):
    """One way on which KV moves, and how much it has so far."""

    name: str
    """`load`, `save`, `fetch` or `flush`."""
    num_bytes: int
    num_moves: int
    bytes_per_s: float | None
    """How fast, by measured times; None while that is not known, or not measured."""


class _LiveJob(View):
    session_id: str | None
    """Whose turn; None for another tenant's, or a chunk."""
    is_own: bool
    """Whether it is the viewer's tenant's."""
    num_tokens: int
    """Of its context so far; 0 for another tenant's."""


class LiveRunning(_LiveJob):
    """A job in a slot."""

    slot: int
    phase: str
    """`prefill` or `decode`."""


class LiveWaiting(_LiveJob):
    """A job that waits for a slot."""

    residency: str
    """Where the KV is that it will load: `dram`, `ssd`, `pending` or `absent`."""
    in_prefetch_window: bool
    """Whether its KV is fetched from SSD before it runs."""
    in_eviction_window: bool
    """Whether its KV leaves DRAM behind all that no job waits for."""


class LiveQueue(View):
    """The job queue, and its two look-ahead windows, which may be longer than it."""

    num_waiting: int
    waiting: list[LiveWaiting]
    """The first of them, in the order in which they would run."""
    prefetch_window_jobs: int
    eviction_window_jobs: int


class LiveSpan(View):
    """A phase of a turn, in seconds since it was submitted."""

    name: str
    """`queued`, `load`, `prefill`, `decode` or `save`."""
    start_s: _Seconds
    end_s: _Seconds | None
    """None while it goes on. Of a save: when what was saved last could be read."""
    busy_s: _Seconds
    """Seconds of it that were spent on it, where others ran in between; else its length."""
    stall_s: _Seconds
    """Of a load, seconds in which compute waited for it."""


class LiveTurn(View):
    """The session's last turn: its tokens and times so far."""

    phase: str
    """`queued`, `prefill`, `decode`, `saving` or `done`; `failed` if it broke."""
    prompt_tokens: int
    cached_tokens: int
    """Of those, tokens whose KV was loaded."""
    cached_tier: str
    """Where that was when the turn was queued."""
    completion_tokens: int
    saved_tokens: int
    """Tokens whose KV this turn has brought to the store."""
    ttft_s: _Seconds | None
    """Seconds from submission to the first token; None before it."""
    age_s: _Seconds
    """Seconds since submission, until it ended; its save may take longer."""
    spans: list[LiveSpan]


class LiveSession(View):
    """The conversation that was asked for, and its KV in each tier."""

    session_id: str
    num_tokens: int
    """Of the conversation; 0 where it is not open."""
    residency: str
    """Where its KV is: `dram`, `ssd`, `pending` or `absent`."""
    is_running: bool
    """Whether a turn of it waits or runs."""
    dram_tokens: int
    """Tokens whose KV is in DRAM, readable."""
    dram_blocks: int
    """Blocks of DRAM held, those of unfinished saves included."""
    dram_bytes: int
    ssd_tokens: int
    ssd_bytes: int
    block_tokens: int
    """Tokens in a block."""
    blocks: list[BlockTiers]
    """Each block, in token order; first tokens are counted from the session's first."""
    turn: LiveTurn | None
    """Its last turn, since it was opened."""


class LiveSnapshot(View):
    """One moment."""

    at_s: float
    """When, on a clock of the server's own."""
    num_slots: int
    running: list[LiveRunning]
    """Jobs in slots, by slot."""
    queue: LiveQueue
    tiers: list[LiveTier]
    """DRAM, and SSD where there is one."""
    moves: list[LiveMove]
    done: LiveDone
    """Totals: a page's rates are of two moments."""
    misses: dict[str, int]
    """Loads that served nothing so far, by reason, but for reasons that there were none of."""
    session: LiveSession | None
    """The conversation asked for; None if none was, or it is not known."""


def read_live(engine: Engine, tenant: str, session_id: str | None = None) -> LiveSnapshot:
    """What a tenant may see now. For the engine's thread; does not wait.

    Args:
      engine: whose.
      tenant: the engine's name of who looks.
      session_id: the client's name of the conversation that is looked at more closely.
    """
    stats = engine.store_stats()
    running, waiting = engine.jobs
    return LiveSnapshot(
        at_s=time.perf_counter(),
        num_slots=engine.config.max_batch_size,
        running=[
            LiveRunning(**_job(job, tenant), slot=job.slot or 0, phase="decode" if job.output_ids else "prefill")
            for job in running
        ],
        queue=_queue(engine, waiting, tenant),
        tiers=list(_tiers(stats)),
        moves=list(_moves(stats, engine.rates)),
        done=LiveDone(**{name: getattr(engine.metrics, name) for name in LiveDone.model_fields}),
        misses={str(reason): count for reason, count in stats.misses.items() if count},
        session=None if session_id is None else _session(engine, tenant, session_id),
    )


def _tiers(stats: StoreStats) -> Iterator[LiveTier]:
    for name, tier, num_sessions, num_hits in tiers_of(stats):
        counted = {field: getattr(tier, field) for field in ("used_bytes", "capacity_bytes", "num_evictions")}
        yield LiveTier(name=name, num_sessions=num_sessions, num_hits=num_hits, **counted)


def _moves(stats: StoreStats, rates: Rates | None) -> Iterator[LiveMove]:
    """Speed is that of a move of average size; of loads and saves, which go layer by layer, of a layer of it."""
    ssd = stats.ssd
    moves = [("load", stats.loaded_bytes, stats.num_hits), ("save", stats.saved_bytes, stats.num_saves)]
    if ssd is not None:
        moves += [("fetch", ssd.fetched_bytes, ssd.num_fetches), ("flush", ssd.flushed_bytes, ssd.num_flushes)]
    for name, num_bytes, num_moves in moves:
        rate: TransferRate | None = getattr(rates, name, None)
        speed = None
        if rates is not None and rate is not None and num_bytes:
            each = num_bytes / num_moves / (1 if name == "fetch" else rates.num_layers)
            speed = each / seconds if (seconds := rate.seconds(each)) else None
        yield LiveMove(name=name, num_bytes=num_bytes, num_moves=num_moves, bytes_per_s=speed)


def _job(job: Job, tenant: str) -> dict[str, Any]:
    """The fields of `_LiveJob`."""
    is_own = (job.tenant if job.session is None else job.session.tenant) == tenant
    name = client_name(tenant, job.session.session_id) if is_own and job.session is not None else None
    return {"session_id": name, "is_own": is_own, "num_tokens": job.num_tokens if is_own else 0}


def _queue(engine: Engine, jobs: tuple[Job, ...], tenant: str) -> LiveQueue:
    windows, waiting = engine.stored.windows, []
    for job in jobs[:_MAX_WAITING]:
        kv = engine.stored.queued(job)
        position = math.inf if kv is None or kv.position is None else kv.position
        shown = LiveWaiting(
            **_job(job, tenant),
            residency="absent" if kv is None else kv.residency.value,
            in_prefetch_window=position < windows.prefetch_jobs,
            in_eviction_window=position < windows.eviction_jobs,
        )
        waiting.append(shown)
    return LiveQueue(
        num_waiting=len(jobs),
        waiting=waiting,
        prefetch_window_jobs=windows.prefetch_jobs,
        eviction_window_jobs=windows.eviction_jobs,
    )


def _session(engine: Engine, tenant: str, session_id: str) -> LiveSession | None:
    name = engine_name(tenant, session_id)
    opened = engine.opened(name, tenant=tenant)
    stored = engine.stored.find(name, tenant=tenant)
    if opened is None and stored is None:
        return None
    blocks = engine.stored.blocks(name, tenant=tenant)
    num_slid = 0 if opened is None else opened.conversation.num_slid
    return LiveSession(
        session_id=session_id,
        num_tokens=0 if opened is None else len(opened.token_ids),
        residency="absent" if stored is None else stored.residency.value,
        is_running=opened is not None and opened.is_busy,
        dram_tokens=sum(block.dram_tokens for block in blocks),
        dram_blocks=0 if stored is None else stored.num_blocks,
        dram_bytes=0 if stored is None else stored.num_bytes,
        ssd_tokens=0 if stored is None else stored.ssd_tokens,
        ssd_bytes=0 if stored is None else stored.ssd_bytes,
        block_tokens=engine.config.store.block_tokens,
        blocks=[dataclasses.replace(block, first_token=num_slid + block.first_token) for block in blocks],
        turn=None if opened is None else _turn(opened),
    )


def _turn(session: Session) -> LiveTurn | None:
    job = session.job
    if job is None:
        return None
    saves, usage = job.save_times, job.usage()
    phase = "done" if saves is None or saves.ended else "saving"
    if job.error is not None:
        phase = "failed"
    elif not job.done:
        phase = "decode" if job.output_ids else "prefill" if job.started_s else "queued"
    ended_s = job.finished_s if job.done else time.perf_counter()
    return LiveTurn(
        phase=phase,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.num_cached_tokens,
        cached_tier=job.cached_tier,
        completion_tokens=usage.completion_tokens,
        saved_tokens=0 if saves is None else saves.num_published,
        ttft_s=usage.ttft_s if job.first_token_s else None,
        age_s=max(ended_s - job.submitted_s, 0.0),
        spans=list(_spans(job)),
    )


def _spans(job: Job) -> Iterator[LiveSpan]:
    """What happened so far; a fetch is part of what is queued."""
    for phase in phases(job):
        if phase.name != "fetch":
            length_s = (time.perf_counter() if phase.end_s is None else phase.end_s) - phase.start_s
            yield LiveSpan(
                name="queued" if phase.name == "queue" else phase.name,
                start_s=phase.start_s - job.submitted_s,
                end_s=None if phase.end_s is None else phase.end_s - job.submitted_s,
                busy_s=length_s if phase.busy_s is None else phase.busy_s,
                stall_s=phase.stall_s,
            )


# The routes.


_SessionId = Annotated[
    str | None,
    fastapi.Query(min_length=1, max_length=256, description="The conversation whose blocks and last turn are shown."),
]


async def _read(service: Service, tenant: Tenant, session_id: str | None) -> bytes:
    """A snapshot as JSON, no older than the shortest interval; those who look at the same share it.

    Raises as `Service.ask` does.
    """

    async def ask() -> bytes:
        snapshot = await service.ask(tenant, lambda engine, _: read_live(engine, tenant.domain, session_id))
        return snapshot.model_dump_json().encode()

    reading = service.shared((tenant.domain, session_id), ask, _MIN_INTERVAL_S)
    return await asyncio.shield(reading)  # Others may wait for it when this one goes.


@ROUTES.get("/live/snapshot", response_model=LiveSnapshot, responses=responses(400, 401, 408, 429, 503))
async def live_snapshot(service: TheService, tenant: TheTenant, session_id: _SessionId = None) -> Response:
    """What engine and store are doing now: tiers, job queue, and one conversation of the caller's."""
    return Response(await _read(service, tenant, session_id), media_type="application/json")


@ROUTES.get("/live", include_in_schema=False)  # It never ends: what reads the schema and tries each route would wait.
async def live(
    request: fastapi.Request,
    service: TheService,
    tenant: TheTenant,
    session_id: _SessionId = None,
    interval_s: Annotated[float, fastapi.Query(ge=_MIN_INTERVAL_S, le=_MAX_INTERVAL_S)] = 0.25,
) -> Response:
    """The same as server-sent events, whenever something has changed."""
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(service.admission.looking(tenant, is_stream=True))
        read = functools.partial(_read, service, tenant, session_id)
        first = await read()  # So that what is wrong is a status.
        return EventStream(_events(state_of(request), read, interval_s, first), stack.pop_all(), None)


async def _events(
    state: ServerState, read: Callable[[], Awaitable[bytes]], interval_s: float, snapshot: bytes
) -> AsyncIterator[bytes]:
    sent, sent_s = b"", 0.0
    with contextlib.suppress(CaJaxError, ApiError, TimeoutError):  # Shutting down, or busy: the client comes again.
        while True:
            news = snapshot.partition(b",")[2]  # All behind the time, which is the first field.
            if news != sent:
                sent, sent_s = news, time.monotonic()
                yield b"data: " + snapshot + b"\n\n"
            elif time.monotonic() - sent_s >= _ALIVE_S:
                sent_s = time.monotonic()
                yield b": alive\n\n"
            left_s = interval_s
            while left_s > 0 and not state.stopping:
                await asyncio.sleep(min(left_s, _LOOK_S))
                left_s -= _LOOK_S
            if state.stopping:
                return
            snapshot = await read()


@ROUTES.get("/live/history", responses=responses(401, 503))
async def last_hour(service: TheService, tenant: TheTenant) -> LastHour:
    """The last hour: queue, tiers and totals every ten seconds, and the turns that waited longest for a token.

    These are the tenant's own; of all tenants for a key that may read metrics, other tenants' without their names.
    """
    return service.history.read(tenant.domain, is_operator=tenant.metrics)


async def keep_history(service: Service) -> None:
    """Samples the hour until the server stops."""
    with contextlib.suppress(CaJaxError, asyncio.CancelledError):
        while True:
            await service.loop.call(service.history.sample)
            await asyncio.sleep(SAMPLE_S)
