"""Our own routes: conversations by name, and chunks of text that are computed in advance.

Not here: answering (`openai_routes`), what goes when the store is full (`ca_jax.storage`).
"""

from __future__ import annotations

from typing import Any

import fastapi
from fastapi.responses import JSONResponse

from ca_jax.engine import Engine
from ca_jax.errors import UnknownSessionError
from ca_jax.server.bodies import Discard, NewChunks, NewSession, SessionChange
from ca_jax.server.description import ListedSession, SessionList, ShownSession, answers
from ca_jax.server.router import client_name, engine_name
from ca_jax.server.service import Service
from ca_jax.server.state import KeyedRoute, TheService, TheTenant
from ca_jax.server.tenants import Tenant
from ca_jax.server.waiting import too_late, while_connected
from ca_jax.session import Session
from ca_jax.storage.records import EntryInfo

ROUTES = fastapi.APIRouter(prefix="/v1", tags=["sessions"], route_class=KeyedRoute)
_TITLE_CHARS = 80  # Of an open conversation's first message of the user, which a list shows it by.


@ROUTES.get("/sessions", responses=answers(400, 401, 503, model=SessionList))
async def list_sessions(service: TheService, tenant: TheTenant, limit: int = 1000) -> JSONResponse:
    """Conversations of the caller's tenant, open ones and stored ones."""

    def read(engine: Engine) -> list[dict[str, Any]]:
        infos = engine.stored.list(tenant=tenant.domain)
        stored = {info.session_id: info for info in infos if engine.stored.is_own(info)}
        opened = {session.session_id: session for session in engine.sessions if session.tenant == tenant.domain}
        # Without SSD nothing is kept of what was let go of but KV that others may begin with.
        keeps = engine.config.store.ssd_dir is not None
        known = (name for whose, name in engine.stored.names() if keeps and whose == tenant.domain)
        names = dict.fromkeys((*opened, *known))
        return [_described(tenant, name, opened.get(name), stored.get(name)) for name in [*names][: max(limit, 0)]]

    return JSONResponse({"object": "list", "data": await service.loop.call(read)})


@ROUTES.post("/sessions", status_code=201, responses=answers(400, 401, 413, 503, status=201, model=ListedSession))
async def new_session(body: NewSession, service: TheService, tenant: TheTenant) -> JSONResponse:
    """Begins a conversation of a name, with a system message."""
    session = await service.loop.call(
        lambda engine: service.router.begin(tenant.domain, body.session_id, system=body.system, ttl_s=body.ttl_s)
    )
    return JSONResponse(_described(tenant, session.session_id, session, None), 201)


@ROUTES.get("/sessions/{session_id}", responses=answers(401, 404, 503, model=ShownSession))
async def show_session(session_id: str, service: TheService, tenant: TheTenant) -> JSONResponse:
    """One conversation: its messages, and where its KV is."""
    return JSONResponse(await _shown(service, tenant, session_id))


@ROUTES.post("/sessions/{session_id}", responses=answers(400, 401, 404, 413, 503, model=ShownSession))
async def change_session(session_id: str, body: SessionChange, service: TheService, tenant: TheTenant) -> JSONResponse:
    """Pins a conversation in the store, lets it go like others again, or says how long it is kept."""
    name = engine_name(tenant.domain, session_id)

    def change(engine: Engine) -> None:
        if service.router.find(tenant.domain, session_id) is None:
            raise UnknownSessionError(f"wanted a session that there is, found {session_id!r}")
        if body.pinned is not None:
            (engine.stored.pin if body.pinned else engine.stored.unpin)(name, tenant=tenant.domain)
        if body.ttl_s is not None:
            engine.stored.set_ttl(name, body.ttl_s, tenant=tenant.domain)

    await service.loop.call(change)
    return JSONResponse(await _shown(service, tenant, session_id))


@ROUTES.post("/sessions/{session_id}/discard", responses=answers(400, 401, 404, 409, 413, 503, model=ShownSession))
async def discard_tokens(session_id: str, body: Discard, service: TheService, tenant: TheTenant) -> JSONResponse:
    """Forgets tokens of a conversation, from `start` to before `stop`; the others stay as they are."""

    def discard(engine: Engine) -> None:
        session = service.router.find(tenant.domain, session_id)
        if session is None:
            raise UnknownSessionError(f"wanted a session that there is, found {session_id!r}")
        session.discard(range(body.start, min(body.stop, body.start + len(session.token_ids) + 1)))

    await service.loop.call(discard)
    return JSONResponse(await _shown(service, tenant, session_id))


@ROUTES.delete("/sessions/{session_id}", responses=answers(401, 404, 503))
async def delete_session(session_id: str, service: TheService, tenant: TheTenant) -> JSONResponse:
    """Forgets a conversation and its KV, in every tier. A turn of it that runs is cancelled."""

    def delete(engine: Engine) -> None:
        session = service.router.find(tenant.domain, session_id)
        if session is None:
            raise UnknownSessionError(f"wanted a session that there is, found {session_id!r}")
        session.close()
        service.router.forget(tenant.domain, session.session_id)

    await service.loop.call(delete)
    return JSONResponse({"id": session_id, "object": "session.deleted", "deleted": True})


@ROUTES.post("/chunks", responses=answers(400, 401, 408, 413, 429, 503))
async def precompute_chunks(
    body: NewChunks, request: fastapi.Request, service: TheService, tenant: TheTenant
) -> JSONResponse:
    """Computes and stores the KV of text chunks, each alone, for `context` of chats to come."""
    with service.admitted(tenant, 1):
        try:
            async with service.deadline(body.timeout_s):
                num_computed = await while_connected(request, service.precompute(tenant, body.chunks, body.tier))
        except TimeoutError as error:
            raise too_late() from error
    return JSONResponse({"object": "chunks", "num_chunks": len(body.chunks), "num_computed": num_computed})


async def _shown(service: Service, tenant: Tenant, session_id: str) -> dict[str, Any]:
    def read(engine: Engine) -> dict[str, Any]:
        session = service.router.find(tenant.domain, session_id)
        if session is None:
            raise UnknownSessionError(f"wanted a session that there is, found {session_id!r}")
        stored = engine.stored.find(session.session_id, tenant=tenant.domain)
        shown = _described(tenant, session.session_id, session, stored)
        return {**shown, "messages": session.messages}

    return await service.loop.call(read)


def _described(tenant: Tenant, name: str, session: Session | None, stored: EntryInfo | None) -> dict[str, Any]:
    described: dict[str, Any] = {
        "id": client_name(tenant.domain, name),
        "object": "session",
        "num_tokens": stored.num_tokens if session is None and stored is not None else 0,
        "busy": False,
        "stored": None,
    }
    if session is not None:
        dropped = session.num_dropped
        said = next((message["content"] for message in session.messages if message["role"] == "user"), "")
        described |= {"num_tokens": len(session.token_ids), "num_dropped": dropped, "busy": session.is_busy}
        described |= {"title": said[:_TITLE_CHARS], "session_state": session.conversation.chain}
    if stored is not None:
        described["stored"] = {
            "tier": stored.residency.value,
            "num_tokens": stored.num_tokens,
            "dram_bytes": stored.num_bytes,
            "dram_blocks": stored.num_blocks,
            "ssd_tokens": stored.ssd_tokens,
            "ssd_bytes": stored.ssd_bytes,
            "pinned": stored.pinned,
            "created_s": stored.created_s,
            "last_used_s": stored.last_used_s,
            "ttl_s": stored.ttl_s,
        }
    return described
