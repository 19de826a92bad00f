"""The project's own routes: conversations by name, and chunks of text that are computed in advance.

Not here: answering (`openai_routes`), what leaves when the store is full (`ca_jax.storage`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import fastapi
import pydantic
from fastapi.responses import JSONResponse
from pydantic import Field

from ca_jax.engine import Engine
from ca_jax.errors import SessionBusyError
from ca_jax.server.bodies import Discard, Fork, NewChunks, NewSession, SessionChange
from ca_jax.server.conversation_notes import Notes
from ca_jax.server.errors import OBJECT, ApiError, invalid, responses
from ca_jax.server.router import client_name, engine_name, unknown_session
from ca_jax.server.service import Service
from ca_jax.server.state import KeyedRoute, TheService, TheTenant, while_connected
from ca_jax.server.tenants import Tenant
from ca_jax.session import Session
from ca_jax.turns.conversations import Conversation
from ca_jax.turns.text import Texts

ROUTES = fastapi.APIRouter(prefix="/v1", tags=["sessions"], route_class=KeyedRoute)
_MOST_LISTED = 100
_SPARSE: dict[str, Any] = {"response_model_exclude_unset": True}  # Fields that nothing is known of are left out.
_CHANGED = responses(400, 401, 404, 408, 409, 413, 429, 503)
_TITLE_CHARS = 80  # Of an open conversation's first message of the user, which a list shows it by.


class StoredAnswer(pydantic.BaseModel):
    """What the store holds of a session."""

    model_config = pydantic.ConfigDict(from_attributes=True)

    tier: str = Field(validation_alias="residency", description="Where its KV is: dram, ssd, pending or absent.")
    num_tokens: int
    dram_bytes: int = Field(validation_alias="num_bytes")
    dram_blocks: int = Field(validation_alias="num_blocks")
    ssd_tokens: int
    ssd_bytes: int
    pinned: bool
    created_s: float
    last_used_s: float
    ttl_s: float | None
    expected_s: float | None = Field(description="Up to when it is said that its next turn comes, clock as above.")


class ForkedFrom(pydantic.BaseModel):
    """Where a session left another one."""

    id: str = Field(description="The other one's; it may be gone by now.")
    at: int = Field(description="How many messages they had in common.")


class ListedSession(pydantic.BaseModel):
    """A session as a list shows it."""

    id: str
    object: Literal["session"]
    num_tokens: int
    busy: bool = Field(description="Whether a turn of it runs.")
    stored: StoredAnswer | None
    num_dropped: int = Field(0, description="Tokens that a truncation has dropped; of open ones.")
    session_state: str = Field("", description="Where it stands, as its latest answer said; of open ones.")
    title: str = Field("", description="How its first message of the user begins; of open ones.")
    forked_from: ForkedFrom | None = Field(None, description="What it is a fork of; of open ones that are any.")


class ShownSession(ListedSession):
    """A session with what was said in it."""

    messages: list[dict[str, Any]] = Field(description="Each with its role, content and, if any, context.")


class SessionList(pydantic.BaseModel):
    """Sessions of a tenant, a page of them."""

    object: Literal["list"]
    data: list[ListedSession]
    first_id: str | None = Field(description="The first one's id; null where there is none.")
    last_id: str | None = Field(description="The last one's: what `after` is for the next page.")
    has_more: bool = Field(description="Whether others follow.")


@ROUTES.get("/sessions", **_SPARSE, responses=responses(400, 401, 404, 408, 429, 503))
async def list_sessions(
    service: TheService,
    tenant: TheTenant,
    limit: Annotated[int, fastapi.Query(ge=1, le=_MOST_LISTED, description="Most of them.")] = 20,
    after: Annotated[str | None, fastapi.Query(max_length=256, description="The id behind which they begin.")] = None,
) -> SessionList:
    """Conversations of the caller's tenant: open ones, then stored ones, those that are newer first."""

    def read(engine: Engine, _: Texts) -> tuple[list[ListedSession], bool]:
        opened = {each.session_id: each for each in reversed(engine.sessions) if each.tenant == tenant.domain}
        behind = None if after is None else engine_name(tenant.domain, after)
        names = engine.stored.page(opened, limit + 1, after=behind, tenant=tenant.domain)
        said = {name: opened[name].conversation if name in opened else None for name in names[:limit]}
        return [ListedSession(**_fields(engine, tenant, name, said[name])) for name in said], len(names) > limit

    data, has_more = await service.ask(tenant, read)
    ids: list[str | None] = [each.id for each in data] or [None]
    return SessionList(object="list", data=data, first_id=ids[0], last_id=ids[-1], has_more=has_more)


@ROUTES.post("/sessions", status_code=201, **_SPARSE, responses=responses(400, 401, 404, 408, 413, 429, 503))
async def new_session(body: NewSession, service: TheService, tenant: TheTenant) -> ListedSession:
    """Begins a conversation of a name, with a system message, held with an adapter where its model names one."""
    adapter = None if body.model is None else service.adapter_of(body.model)

    def begin(engine: Engine, texts: Texts) -> tuple[Session, ListedSession]:
        session = service.router.begin(
            tenant.domain, body.session_id, system=body.system, ttl_s=body.ttl_s, adapter=adapter, texts=texts
        )
        engine.drop_stored(session)  # Kept from now on, also without a turn.
        return session, ListedSession(**_fields(engine, tenant, session.session_id, session.conversation))

    return await service.begin_with(tenant, begin)


@ROUTES.get("/sessions/{session_id}", **_SPARSE, responses=responses(401, 404, 408, 429, 503))
async def show_session(session_id: str, service: TheService, tenant: TheTenant) -> ShownSession:
    """One conversation: its messages, and where its KV is."""
    return await service.ask(tenant, lambda engine, texts: _shown(service, engine, tenant, session_id, texts))


@ROUTES.post("/sessions/{session_id}", **_SPARSE, responses=responses(400, 401, 403, 404, 408, 413, 429, 503))
async def change_session(session_id: str, body: SessionChange, service: TheService, tenant: TheTenant) -> ShownSession:
    """Pins a conversation in the store, unpins it, or says how long it is kept or when its next turn will come."""
    name = engine_name(tenant.domain, session_id)

    def change(engine: Engine, texts: Texts) -> ShownSession:
        if engine.elsewhere is not None:
            service.router.owned(tenant.domain, session_id, texts)
        _shown(service, engine, tenant, session_id)
        if body.pinned and tenant.max_pinned is not None:
            pinned = engine.stored.pinned(tenant=tenant.domain)
            if name not in pinned and len(pinned) >= tenant.max_pinned:
                message = f"pinned must be false: {tenant.max_pinned} sessions of this key's tenant may be, and are"
                raise ApiError(403, message, param="pinned", code="pinning_not_allowed")
        if body.pinned is not None:
            (engine.stored.pin if body.pinned else engine.stored.unpin)(name, tenant=tenant.domain)
        if body.ttl_s is not None:
            engine.stored.set_ttl(name, body.ttl_s, tenant=tenant.domain)
        if body.expected_resume_s is not None:
            engine.stored.expect_back(name, body.expected_resume_s, tenant=tenant.domain)
        return _shown(service, engine, tenant, session_id)

    return await service.ask(tenant, change)


@ROUTES.post(
    "/sessions/{session_id}/fork",
    status_code=201,
    **_SPARSE,
    responses=responses(400, 401, 404, 408, 409, 413, 429, 503),
)
async def fork_session(session_id: str, body: Fork, service: TheService, tenant: TheTenant) -> ShownSession:
    """Begins another conversation with the first messages of one, which stays as it is; their KV is shared."""

    def fork(engine: Engine, texts: Texts) -> tuple[Session, ShownSession]:
        session = service.router.owned(tenant.domain, session_id, texts)
        if session.is_busy:
            raise SessionBusyError(f"session {session_id!r} still answers; it must have ended before it is forked")
        forked = _forked(service, session, body.at)
        notes = Notes(forked_from=session_id, forked_at=body.at)
        left = notes.kept_with(forked.conversation)
        engine.truncate_stored(forked, len(left.token_ids), left)  # Kept from now on, also without a turn of its own.
        return forked, _shown(service, engine, tenant, client_name(tenant.domain, forked.session_id))

    return await service.begin_with(tenant, fork)


@ROUTES.post("/sessions/{session_id}/discard", **_SPARSE, responses=_CHANGED)
async def discard_tokens(session_id: str, body: Discard, service: TheService, tenant: TheTenant) -> ShownSession:
    """Forgets tokens of a conversation, from `start` to before `stop`; the others stay as they are."""

    def discard(engine: Engine, texts: Texts) -> ShownSession:
        session = service.router.owned(tenant.domain, session_id, texts)
        session.discard(range(body.start, min(body.stop, body.start + len(session.token_ids) + 1)))
        return _shown(service, engine, tenant, session_id)

    return await service.ask(tenant, discard)


@ROUTES.delete("/sessions/{session_id}", responses=responses(401, 404, 408, 429, 503, content=OBJECT))
async def delete_session(session_id: str, service: TheService, tenant: TheTenant) -> JSONResponse:
    """Forgets a conversation and its KV, in every tier. A turn of it that runs is cancelled."""
    await service.ask(tenant, lambda _, texts: service.router.delete(tenant.domain, session_id, texts))
    return JSONResponse({"id": session_id, "object": "session.deleted", "deleted": True})


@ROUTES.post("/chunks", responses=responses(400, 401, 408, 413, 429, 503, content=OBJECT))
async def precompute_chunks(
    body: NewChunks, request: fastapi.Request, service: TheService, tenant: TheTenant
) -> JSONResponse:
    """Computes and stores the KV of text chunks, each by itself, for `context` of chats to come."""
    with service.admission.answering(tenant, 1):
        async with service.deadline(body.timeout_s):
            num_computed = await while_connected(request, service.precompute(tenant, body.chunks, body.tier))
    return JSONResponse({"object": "chunks", "num_chunks": len(body.chunks), "num_computed": num_computed})


def _forked(service: Service, session: Session, at: int) -> Session:
    """A conversation that begins with the first `at` messages of another; raises `ApiError` where no turn begins there.

    A system message in front of the first turn is a beginning too.
    """
    conversation = session.conversation
    ends = {num_messages: num_tokens for num_tokens, num_messages in reversed(conversation.turn_starts)}
    ends[len(conversation.messages)] = len(conversation.token_ids)
    if at in ends:
        forked = service.router.sibling(session, ends[at])
        service.router.use(forked)
        return forked
    roles = [message["role"] for message in conversation.messages[:at]]
    if roles == ["system"] and not conversation.num_dropped:
        system = conversation.messages[0]["content"]
        return service.router.begin(session.tenant, system=system, ttl_s=session.ttl_s, adapter=session.adapter)
    wanted = f"as many messages as before a turn, or as all of them: one of {sorted(ends)}"
    raise invalid("at", f"at must be {wanted}; got {at}")


def _shown(
    service: Service, engine: Engine, tenant: Tenant, session_id: str, texts: Texts | None = None
) -> ShownSession:
    conversation = service.router.look(tenant.domain, session_id, texts)
    if conversation is None:
        raise unknown_session(session_id)
    fields = _fields(engine, tenant, engine_name(tenant.domain, session_id), conversation)
    return ShownSession(**fields, messages=conversation.messages)


def _fields(engine: Engine, tenant: Tenant, name: str, conversation: Conversation | None) -> dict[str, Any]:
    """A session of the engine's `name`, with what its conversation says where that is given."""
    stored, session = engine.stored.find(name, tenant=tenant.domain), engine.opened(name, tenant=tenant.domain)
    fields: dict[str, Any] = {
        "id": client_name(tenant.domain, name),
        "object": "session",
        "num_tokens": 0 if stored is None else stored.num_tokens,
        "busy": session is not None and session.is_busy,
        "stored": None if stored is None else StoredAnswer.model_validate(stored),
    }
    if conversation is not None:
        said = next((message["content"] for message in conversation.messages if message["role"] == "user"), "")
        fields |= {"num_tokens": len(conversation.token_ids), "num_dropped": conversation.num_dropped}
        fields |= {"title": said[:_TITLE_CHARS], "session_state": conversation.chain}
        if (notes := Notes.of(conversation)).forked_from:
            fields["forked_from"] = ForkedFrom(id=notes.forked_from, at=notes.forked_at)
    return fields
