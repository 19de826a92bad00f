"""OpenAI's Responses: answers that are kept, gone on from by their id, looked at and deleted.

Not here: which conversation goes on (`places`, `router`), bodies (`response_bodies`), chats (`openai_routes`).
Source: OpenAI's API reference (createResponse, getResponse, deleteResponse, listInputItems, ResponseStreamEvent).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

import fastapi
from fastapi.responses import JSONResponse, Response

from ca_jax.server import places
from ca_jax.server.answering import Answering, BlockReader, described, event, reported
from ca_jax.server.background import Run
from ca_jax.server.engine_loop import Feed
from ca_jax.server.errors import OBJECT, STREAMED, ApiError, invalid, responses
from ca_jax.server.response_bodies import ResponseRequest
from ca_jax.server.response_items import (
    After,
    Limit,
    Order,
    ResponseEvents,
    input_items,
    items_of,
    new_key,
    page_of,
    replayed,
    response_id,
    response_object,
    status_of,
    tools_of,
    usage_of,
)
from ca_jax.server.router import Found, client_name
from ca_jax.server.service import Service
from ca_jax.server.state import EventStream, OpenRoute, TheService, TheTenant, session_header
from ca_jax.server.tenants import Tenant
from ca_jax.server.tool_calls import read_reply
from ca_jax.session import Job
from ca_jax.turns.requests import FinishReason
from ca_jax.turns.text import Texts

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


@ROUTES.get(
    "/{response_id}", response_class=Response, responses=responses(400, 401, 404, 408, 429, 503, content=STREAMED)
)
async def get_response(
    response_id: str,
    service: TheService,
    tenant: TheTenant,
    stream: Annotated[bool, fastapi.Query(description="As events: those to come too.")] = False,
    starting_after: Annotated[int | None, fastapi.Query(ge=0, description="The number of the event before.")] = None,
) -> Response:
    """A response that is kept, or generated in the background: as it is, or its events.

    Where the events that it came in are not there any more, it is told anew, in fewer of them.
    """
    if starting_after is not None and not stream:
        raise invalid("starting_after", "starting_after must come with stream=true")
    start = 0 if starting_after is None else starting_after + 1
    run = service.background.find(tenant.domain, response_id)
    if run is not None and not run.is_kept:
        response, events = run.response, run.follow(start)
    else:
        place = await _look(service, tenant, response_id)
        answer = place.messages[-1]
        response = response_object(response_id, place.told, items_of(place.key, answer, place.told["status"]))
        events = _again(list(replayed(place.key, response, answer))[start:]) if run is None else run.follow(start)
    if not stream:
        return JSONResponse(response)
    async with contextlib.AsyncExitStack() as reading:
        reading.enter_context(service.admission.looking(tenant, is_stream=True))
        return _read_along(service, events, reading.pop_all())


@ROUTES.post("/{response_id}/cancel", responses=responses(400, 401, 404, 408, 429, 503, content=OBJECT))
async def cancel_response(response_id: str, service: TheService, tenant: TheTenant) -> JSONResponse:
    """Ends a response that is generated in the background; what it has said so far is kept."""
    run = service.background.find(tenant.domain, response_id)
    if run is not None and not run.has_ended:
        service.loop.cancel(run.feed)
        async with service.deadline(None):
            await run.ended()
    if run is not None and not run.is_kept:
        return JSONResponse(run.response)
    place = await _look(service, tenant, response_id)
    if not place.told.get("background"):
        message = "response_id must be of a response with background=true: others end when their clients leave"
        raise invalid("response_id", message)
    answer = items_of(place.key, place.messages[-1], place.told["status"])
    return JSONResponse(response_object(response_id, place.told, answer))


@ROUTES.delete("/{response_id}", responses=responses(401, 404, 408, 409, 429, 503, content=OBJECT))
async def delete_response(response_id: str, service: TheService, tenant: TheTenant) -> JSONResponse:
    """Forgets a response; its turn and its KV too, where nothing else stands on them."""
    run = _ended_run(service, tenant, response_id)
    if run is None or run.is_kept:
        router, domain = service.router, tenant.domain
        await service.ask(tenant, lambda engine, texts: places.delete(router, engine, domain, response_id, texts))
    service.background.forget(tenant.domain, response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@ROUTES.get("/{response_id}/input_items", responses=responses(400, 401, 404, 408, 409, 429, 503, content=OBJECT))
async def list_input_items(
    response_id: str,
    service: TheService,
    tenant: TheTenant,
    limit: Limit = 20,
    order: Order = "desc",
    after: After = None,
) -> JSONResponse:
    """The messages that a response was an answer to, its instructions apart: a page of them."""
    _ended_run(service, tenant, response_id)
    place = await _look(service, tenant, response_id)
    said = enumerate(place.said[:-1])
    items = [item for number, message in said for item in input_items(place.key, number, message)]
    return JSONResponse(page_of(items, limit, order, after))


def _ended_run(service: Service, tenant: Tenant, response_id: str, param: str | None = None) -> Run | None:
    """A response of the background that has ended; None where none is known. Raises ApiError while it is generated."""
    run = service.background.find(tenant.domain, response_id)
    if run is not None and not run.has_ended:
        message = f"response {response_id!r} is still generated: it must have ended, or be cancelled first"
        raise ApiError(409, message, param=param, code="response_not_ended")
    return run


async def _look(service: Service, tenant: Tenant, response_id: str) -> places.Place:
    return await service.ask(tenant, lambda _, texts: places.look(service.router, tenant.domain, response_id, texts))


def _read_along(service: Service, events: AsyncIterator[_Body], reading: contextlib.AsyncExitStack) -> Response:
    """Events for a client that reads along, and has been let in for that."""
    return EventStream(_written(events), reading, service.deadline(None).when())


async def _again(events: Sequence[_Body]) -> AsyncIterator[_Body]:
    for each in events:
        yield each


async def _written(events: AsyncIterator[_Body]) -> AsyncIterator[str]:
    async for each in events:
        yield event(each, each["type"])


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
        self._failed: _Body = {}  # The same of one that broke, or was late.

    async def response(self, request: fastapi.Request) -> Response:
        """The answer: whole, streamed, or in the background."""
        body, service, tenant = self._body, self._service, self._tenant
        if body.previous_response_id is not None:
            _ended_run(service, tenant, body.previous_response_id, "previous_response_id")
        begun = service.chat(
            tenant,
            self._chat,
            name=self._name,
            find=None if body.previous_response_id is None and body.named is None else self._find,
            note=self._note,
        )
        answering = Answering(service, tenant, begun, body.timeout_s, 1, body.priority)
        if body.background:
            return await self._in_background(answering)
        if body.stream:
            return await answering.streamed(lambda feed, until_s: _written(self._events(feed, until_s)))
        return await answering.whole(request, lambda feed, parts: self._object(feed))

    async def _in_background(self, answering: Answering) -> Response:
        service, tenant = self._service, self._tenant
        async with contextlib.AsyncExitStack() as reading, contextlib.AsyncExitStack() as stack:
            if self._body.stream:
                reading.enter_context(service.admission.looking(tenant, is_stream=True))
            feed, until_s = await answering.begin(stack)
            run = Run(feed, self._begun(feed), lambda: self._ended is not None)
            service.background.begin(tenant.domain, self._id(feed), run, self._events(feed, until_s), stack.pop_all())
            if self._body.stream:
                return _read_along(service, run.follow(), reading.pop_all())
        return JSONResponse(run.response)

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
        ended = {"completed_at": int(time.time()), "usage": usage_of(job)}
        return {**self._told, **status_of(reason), **ended, **self._failed}

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

    def _begun(self, feed: Feed) -> _Body:
        """The response before anything of it came: in the background, others may be before it."""
        return response_object(
            self._id(feed), {**self._told, "status": "queued" if self._body.background else "in_progress"}, []
        )

    async def _events(self, feed: Feed, until_s: float | None) -> AsyncIterator[_Body]:
        """All of it as events. An error in the middle is the last of them."""
        job, reader, sent = feed.jobs[0], BlockReader(feed.jobs[0]), 0
        events, begun = ResponseEvents(self._key), self._begun(feed)
        yield events.event("created", response=begun)
        if self._body.background:
            yield events.event("queued", response=begun)
        else:
            yield events.event("in_progress", response=begun)
        try:
            async for part in feed.parts(until_s):
                if begun["status"] == "queued":
                    begun = {**begun, "status": "in_progress"}
                    yield events.event("in_progress", response=begun)
                for step, block, text in reader.feed(part.text, part.done):
                    logprobs = self._logprobs(job, 0 if step == "end" else sent, part.num_tokens)
                    for told in events.of_block(step, block, text, logprobs):
                        yield told
                    if step == "text" and block.kind == "content":
                        sent = part.num_tokens
            yield events.ended(self._object(feed))
        except Exception as error:
            broken = {"code": "server_error", "message": reported(error).detail}
            self._failed = {"status": "failed", "error": broken, "completed_at": None}  # Before its job is cancelled.
            yield events.event("failed", response={**begun, **self._failed})

    def _logprobs(self, job: Job, start: int, stop: int | None) -> list[_Body]:
        """How likely the tokens `[start, stop)` were, where that is asked for."""
        if not self._body.wants_logprobs:
            return []
        return [described(self._service.tokenizer, token) for token in job.token_logprobs[start:stop]]
