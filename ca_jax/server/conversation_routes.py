"""OpenAI's Conversations: sessions by their names, with metadata and items.

An item that a turn has taken stays: what the model has seen after it has seen it. One that waits for a turn may leave.

Not here: responses in a conversation (`response_routes`), the project's own view of a session (`session_routes`).
Source: OpenAI's API reference (createConversation, createConversationItems, ConversationItemList).
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import time
import uuid
from collections.abc import Callable
from typing import Annotated, Any

import fastapi
from fastapi.responses import JSONResponse
from pydantic import Field

from ca_jax.engine import Engine
from ca_jax.errors import SessionBusyError
from ca_jax.server.bodies import OpenBody
from ca_jax.server.conversation_notes import Notes, bare
from ca_jax.server.errors import OBJECT, ApiError, invalid, responses
from ca_jax.server.response_bodies import Item, Metadata, said_in
from ca_jax.server.response_items import After, Limit, Order, items_of_message, page_of
from ca_jax.server.service import Service
from ca_jax.server.state import OpenRoute, TheService, TheTenant
from ca_jax.server.tenants import Tenant
from ca_jax.session import Session
from ca_jax.turns.conversations import Conversation, Message
from ca_jax.turns.text import Texts

ROUTES = fastapi.APIRouter(prefix="/v1/conversations", tags=["conversations"], route_class=OpenRoute)
_MOST_WAITING = 256  # Items of a conversation that no turn has taken.
_Body = dict[str, Any]
_CHANGED = responses(400, 401, 404, 408, 409, 413, 429, 503, content=OBJECT)


class NewConversation(OpenBody):
    """Body of `POST /v1/conversations`."""

    metadata: Metadata | None = None
    items: Annotated[list[Item], Field(max_length=20)] | None = None
    """Those that it begins with."""


class ConversationChange(OpenBody):
    """Body of `POST /v1/conversations/{conversation_id}`."""

    metadata: Metadata | None


class NewItems(OpenBody):
    """Body of `POST /v1/conversations/{conversation_id}/items`."""

    items: Annotated[list[Item], Field(min_length=1, max_length=20)]


@ROUTES.post("", responses=responses(400, 401, 408, 413, 429, 503, content=OBJECT))
async def create_conversation(body: NewConversation, service: TheService, tenant: TheTenant) -> JSONResponse:
    """Begins a conversation, which responses then go on with by its id."""
    name = f"conv_{uuid.uuid4().hex}"
    notes = Notes(created_at=int(time.time()), metadata=body.metadata or {}, waiting=said_in(body.items or []))

    def begin(engine: Engine, _: Texts) -> tuple[Session, None]:
        session = service.router.begin(tenant.domain, name)
        engine.truncate_stored(session, 0, notes.kept_with(session.conversation))
        return session, None

    await service.begin_with(tenant, begin)
    return JSONResponse(_object(name, notes))


@ROUTES.get("/{conversation_id}", responses=responses(401, 404, 408, 429, 503, content=OBJECT))
async def get_conversation(conversation_id: str, service: TheService, tenant: TheTenant) -> JSONResponse:
    """A conversation's metadata."""
    return JSONResponse(_object(conversation_id, Notes.of(await _look(service, tenant, conversation_id))))


@ROUTES.post("/{conversation_id}", responses=_CHANGED)
async def update_conversation(
    conversation_id: str, body: ConversationChange, service: TheService, tenant: TheTenant
) -> JSONResponse:
    """Gives a conversation other metadata."""
    change = lambda notes, _: dataclasses.replace(notes, metadata=body.metadata or {})  # noqa: E731
    return JSONResponse(_object(conversation_id, Notes.of(await _change(service, tenant, conversation_id, change))))


@ROUTES.delete("/{conversation_id}", responses=responses(401, 404, 408, 429, 503, content=OBJECT))
async def delete_conversation(conversation_id: str, service: TheService, tenant: TheTenant) -> JSONResponse:
    """Forgets a conversation, its responses and its KV, in every tier. A turn of it that runs is cancelled."""
    await service.ask(tenant, lambda _, texts: service.router.delete(tenant.domain, conversation_id, texts))
    return JSONResponse({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@ROUTES.post("/{conversation_id}/items", responses=_CHANGED)
async def create_items(conversation_id: str, body: NewItems, service: TheService, tenant: TheTenant) -> JSONResponse:
    """Puts items behind a conversation: they are said with its next turn, in front of what that says."""
    new = said_in(body.items)

    def add(notes: Notes, conversation: Conversation) -> Notes:
        waiting = [*notes.waiting, *new]
        if len(waiting) > _MOST_WAITING:
            raise invalid("items", f"items that wait for a turn must be at most {_MOST_WAITING}, got {len(waiting)}")
        return dataclasses.replace(notes, waiting=waiting)

    conversation = await _change(service, tenant, conversation_id, add)
    items = [item for _, items in _listed(conversation_id, conversation)[-len(new) :] for item in items]
    return JSONResponse(page_of(items, len(items), "asc", None))


@ROUTES.get("/{conversation_id}/items", responses=responses(400, 401, 404, 408, 429, 503, content=OBJECT))
async def list_items(
    conversation_id: str,
    service: TheService,
    tenant: TheTenant,
    limit: Limit = 20,
    order: Order = "desc",
    after: After = None,
) -> JSONResponse:
    """What was said in a conversation, what waits for its next turn included: a page of it."""
    listed = _listed(conversation_id, await _look(service, tenant, conversation_id))
    return JSONResponse(page_of([item for _, items in listed for item in items], limit, order, after))


@ROUTES.get("/{conversation_id}/items/{item_id}", responses=responses(401, 404, 408, 429, 503, content=OBJECT))
async def get_item(conversation_id: str, item_id: str, service: TheService, tenant: TheTenant) -> JSONResponse:
    """One item of a conversation."""
    listed = _listed(conversation_id, await _look(service, tenant, conversation_id))
    found = next((item for _, items in listed for item in items if item["id"] == item_id), None)
    if found is None:
        raise _unknown_item(item_id)
    return JSONResponse(found)


@ROUTES.delete("/{conversation_id}/items/{item_id}", responses=_CHANGED)
async def delete_item(conversation_id: str, item_id: str, service: TheService, tenant: TheTenant) -> JSONResponse:
    """Takes an item back that no turn has taken yet."""

    def take_back(notes: Notes, conversation: Conversation) -> Notes:
        listed = _listed(conversation_id, conversation)
        found = next((n for n, (_, items) in enumerate(listed) if any(each["id"] == item_id for each in items)), None)
        if found is None:
            raise _unknown_item(item_id)
        number = found - len(conversation.messages)
        if number < 0 or len(listed[found][1]) > 1:
            message = "item_id must be of an item alone that waits for the next turn: what the model has seen stays"
            raise ApiError(400, message, param="item_id", code="item_not_deletable")
        return dataclasses.replace(notes, waiting=notes.waiting[:number] + notes.waiting[number + 1 :])

    conversation = await _change(service, tenant, conversation_id, take_back)
    return JSONResponse(_object(conversation_id, Notes.of(conversation)))


async def _look(service: Service, tenant: Tenant, name: str) -> Conversation:
    return await service.ask(tenant, lambda _, texts: _found(service, tenant, name, texts))


def _found(service: Service, tenant: Tenant, name: str, texts: Texts) -> Conversation:
    conversation = service.router.look(tenant.domain, name, texts)
    if conversation is None:
        message = f"there must be a conversation of that id, got {name!r}"
        raise ApiError(404, message, param="conversation_id", code="conversation_not_found")
    return conversation


async def _change(
    service: Service, tenant: Tenant, name: str, change: Callable[[Notes, Conversation], Notes]
) -> Conversation:
    """Changes what is kept with a conversation, which it gives as it is then; SessionBusyError while it answers."""

    def do(engine: Engine, texts: Texts) -> Conversation:
        _found(service, tenant, name, texts)
        session = service.router.owned(tenant.domain, name, texts)
        if session.is_busy:
            raise SessionBusyError(f"conversation {name!r} still answers; it must have ended")
        conversation = session.conversation
        changed = change(Notes.of(conversation), conversation).kept_with(conversation)
        engine.truncate_stored(session, len(conversation.token_ids), changed)
        return changed

    return await service.ask(tenant, do)


def _listed(name: str, conversation: Conversation) -> list[tuple[Message, list[_Body]]]:
    """Each message with its items, whose ids say the conversation, the message, and which of several equal ones."""
    seen: collections.Counter[str] = collections.Counter()
    listed: list[tuple[Message, list[_Body]]] = []
    for message in [*conversation.messages, *Notes.of(conversation).waiting]:
        said = json.dumps([name, *bare([message])])
        own = hashlib.sha256(f"{seen[said]} {said}".encode()).hexdigest()[:24]
        seen[said] += 1
        listed.append((message, items_of_message(own, message)))
    return listed


def _object(name: str, notes: Notes) -> _Body:
    return {"id": name, "object": "conversation", "created_at": notes.created_at, "metadata": notes.metadata}


def _unknown_item(item_id: str) -> ApiError:
    message = f"there must be an item of that id in the conversation, got {item_id!r}"
    return ApiError(404, message, param="item_id", code="item_not_found")
