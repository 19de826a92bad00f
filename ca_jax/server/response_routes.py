"""OpenAI's Responses: answers that are kept, gone on from by their id, looked at and deleted.

Not here: which conversation goes on (`places`, `router`), bodies (`response_bodies`), chats (`openai_routes`).
Source: OpenAI's API reference (createResponse, getResponse, deleteResponse, listInputItems, ResponseStreamEvent).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, Literal

import fastapi
from fastapi.responses import JSONResponse, Response

from ca_jax.server import places
from ca_jax.server.engine_loop import Feed
from ca_jax.server.errors import OBJECT, STREAMED, ApiError, responses
from ca_jax.server.reply_blocks import Block, BlockReader, Step
from ca_jax.server.response_bodies import ResponseRequest
from ca_jax.server.response_ids import new_key, response_id
from ca_jax.server.response_items import (
    input_items,
    item_id,
    item_of,
    items_of,
    output_text,
    response_object,
    status_of,
    tools_of,
    usage_of,
)
from ca_jax.server.router import Found, client_name
from ca_jax.server.service import Service
from ca_jax.server.state import EventStream, OpenRoute, TheService, TheTenant, session_header, while_connected
from ca_jax.server.tenants import Tenant
from ca_jax.server.told import described, event, reported
from ca_jax.server.tool_calls import read_reply
from ca_jax.session import Job
from ca_jax.turns.requests import FinishReason
from ca_jax.turns.text import Texts

_EVENTS_OF = {"content": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
ROUTES = fastapi.APIRouter(prefix="/v1/responses", tags=["responses"], route_class=OpenRoute)
_Body = dict[str, Any]


@ROUTES.post(
    "",
    response_class=Response,
    responses=responses(400, 401, 403, 404, 408, 409, 413, 429, 503, content=STREAMED),
)
async def create_response(
    body: ResponseRequest, request: fastapi.Request, service: TheService, tenant: TheTenant
) -> Response:
    """Answers, and keeps the answer by its id; the KV of what it goes on from is reused."""
    return await _Responding(body, service, tenant, session_header(request)).response(request)


@ROUTES.get("/{response_id}", responses=responses(401, 404, 408, 429, 503, content=OBJECT))
async def get_response(response_id: str, service: TheService, tenant: TheTenant) -> JSONResponse:
    """A response that is kept."""
    place = await service.ask(tenant, lambda engine: places.look(service.router, tenant.domain, response_id))
    answer = items_of(place.key, place.messages[-1], place.told["status"])
    return JSONResponse(response_object(response_id, place.told, answer))


@ROUTES.delete("/{response_id}", responses=responses(401, 404, 408, 409, 429, 503, content=OBJECT))
async def delete_response(response_id: str, service: TheService, tenant: TheTenant) -> JSONResponse:
    """Forgets a response; its turn and its KV too, where nothing else stands on them."""
    await service.ask(tenant, lambda engine: places.delete(service.router, engine, tenant.domain, response_id))
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@ROUTES.get("/{response_id}/input_items", responses=responses(400, 401, 404, 408, 429, 503, content=OBJECT))
async def list_input_items(
    response_id: str,
    service: TheService,
    tenant: TheTenant,
    limit: Annotated[int, fastapi.Query(ge=1, le=100, description="Most of them.")] = 20,
    order: Annotated[Literal["asc", "desc"], fastapi.Query(description="desc: the newest first.")] = "desc",
    after: Annotated[str | None, fastapi.Query(max_length=64, description="The id behind which they begin.")] = None,
) -> JSONResponse:
    """The messages that a response was an answer to, its instructions apart: a page of them."""
    place = await service.ask(tenant, lambda engine: places.look(service.router, tenant.domain, response_id))
    said = enumerate(place.said[:-1])
    items = [item for number, message in said for item in input_items(place.key, number, message)]
    items = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise ApiError(404, f"after must be the id of an item, got {after!r}", param="after", code="item_not_found")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": "", "last_id": ""}
    return JSONResponse({"object": "list", "data": page, "has_more": start + limit < len(items), **ends})


class _Responding:
    """One request for a response, whole or as events.

    Args:
      name: of its conversation, where one is begun.

    Raises:
      ApiError: fields do not go together, or another model is asked for.
    """

    def __init__(self, body: ResponseRequest, service: Service, tenant: Tenant, name: str | None) -> None:
        body.check()
        self._adapter = service.adapter_of(body.model)
        self._body, self._service, self._tenant, self._name = body, service, tenant, name
        self._chat = body.chat()
        self._key = new_key()
        self._told = {"created_at": int(time.time()), **body.told(), "tools": tools_of(self._chat.history())}
        self._ended: _Body | None = None  # What is told of the response that has ended, beside its text.
        self._numbers = itertools.count()  # Of events.

    async def response(self, request: fastapi.Request) -> Response:
        """Begins the answer, so that what is wrong with the request is a status, and gives it whole or streamed."""
        body, service = self._body, self._service
        begun = service.chat(
            self._tenant,
            self._chat,
            name=self._name,
            find=None if body.previous_response_id is None and body.named is None else self._find,
            note=self._note,
        )
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(service.admitted(self._tenant, 1, body.priority))
            if not body.stream:
                return await while_connected(request, self._whole(begun))
            async with service.deadline(body.timeout_s) as deadline:
                feed = await stack.enter_async_context(begun)
            until_s = deadline.when()
            return EventStream(self._events(feed, until_s), stack.pop_all(), until_s)

    def _find(self, texts: Texts) -> Found:
        """The conversation that the request names; on the engine's thread."""
        body, router, domain = self._body, self._service.router, self._tenant.domain
        asked = places.Asked(body.system, body.new_messages(), self._adapter)
        if body.previous_response_id is not None:
            return places.find_behind(router, domain, body.previous_response_id, asked, texts)
        return places.find_named(router, domain, body.named or "", asked, texts)

    def _note(self, job: Job, reason: FinishReason) -> tuple[str, str]:
        """What is kept of the turn; on the engine's thread."""
        self._ended = self._end(job, reason)
        before = [] if job.session is None else job.session.messages
        return self._key, json.dumps(places.kept(self._ended, [*before, *job.messages]))

    def _end(self, job: Job, reason: FinishReason) -> _Body:
        return {**self._told, **status_of(reason), "completed_at": int(time.time()), "usage": usage_of(job)}

    async def _whole(self, begun: contextlib.AbstractAsyncContextManager[Feed]) -> JSONResponse:
        try:
            async with self._service.deadline(self._body.timeout_s), begun as feed:
                async for _ in feed.parts():
                    pass
        except Exception as error:
            raise reported(error) from error
        return JSONResponse(self._object(feed))

    def _id(self, feed: Feed) -> str:
        session = feed.jobs[0].session
        if session is None or not session.is_kept:
            return response_id(self._key, "")
        return response_id(self._key, client_name(self._tenant.domain, session.session_id))

    def _object(self, feed: Feed) -> _Body:
        """The response when it has ended."""
        job = feed.jobs[0]
        told = self._ended or self._end(job, job.finish_reason or FinishReason.CANCELLED)
        items = items_of(self._key, read_reply(job).message(), told["status"], self._logprobs(job, 0, None))
        return response_object(self._id(feed), told, items)

    async def _events(self, feed: Feed, until_s: float | None) -> AsyncIterator[str]:
        """The stream of events. An error in the middle is the last of them."""
        job, reader, sent = feed.jobs[0], BlockReader(feed.jobs[0]), 0
        begun = response_object(self._id(feed), {**self._told, "status": "in_progress"}, [])
        yield self._event("created", response=begun)
        yield self._event("in_progress", response=begun)
        try:
            async for part in feed.parts(until_s):
                for step, block, text in reader.feed(part.text, part.done):
                    logprobs = self._logprobs(job, 0 if step == "end" else sent, part.num_tokens)
                    for told in self._of_block(step, block, text, logprobs):
                        yield told
                    if step == "text" and block.kind == "content":
                        sent = part.num_tokens
            ended = self._object(feed)
            is_whole = ended["status"] == "completed"
            yield self._event("completed" if is_whole else "incomplete", response=ended)
        except Exception as error:
            broken = {"code": "server_error", "message": reported(error).detail}
            yield self._event("failed", response={**begun, "status": "failed", "error": broken})

    def _of_block(self, step: Step, block: Block, text: str, logprobs: list[_Body]) -> Iterator[str]:
        """The events of what happens to a block of the answer."""
        at: _Body = {"item_id": item_id(self._key, block), "output_index": block.number}
        is_call, has_ended = block.kind == "call", step == "end"
        if not is_call:
            at["content_index"] = 0
        kind = _EVENTS_OF[block.kind]
        likely = {"logprobs": logprobs} if block.kind == "content" else {}
        part = (
            output_text(block.text, logprobs if has_ended else None)
            if likely
            else {"type": "reasoning_text", "text": block.text}
        )
        if step == "text":
            yield self._event(f"{kind}.delta", **at, delta=text, **likely)
            return
        if has_ended:
            done = {"arguments": block.text, "name": block.name} if is_call else {"text": block.text}
            yield self._event(f"{kind}.done", **at, **done, **likely)
            if not is_call:
                yield self._event("content_part.done", **at, part=part)
        item = item_of(self._key, block, "completed" if has_ended else "in_progress")
        yield self._event(f"output_item.{'done' if has_ended else 'added'}", output_index=block.number, item=item)
        if not has_ended and not is_call:
            yield self._event("content_part.added", **at, part=part)

    def _event(self, kind: str, **fields: Any) -> str:
        name = f"response.{kind}"
        return event({"type": name, "sequence_number": next(self._numbers), **fields}, name)

    def _logprobs(self, job: Job, start: int, stop: int | None) -> list[_Body]:
        """How likely the tokens `[start, stop)` were, where that is asked for."""
        if not self._body.wants_logprobs:
            return []
        return [described(self._service.tokenizer, token) for token in job.token_logprobs[start:stop]]
