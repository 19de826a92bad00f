"""OpenAI's routes: chat completions, completions, models.

Not here: which conversation goes on, who may come in (`service`, `router`), bodies (`bodies`, `answers`), clients that
go away or do not read (`waiting`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import fastapi
from asgi_correlation_id import correlation_id
from fastapi.responses import JSONResponse, Response

from ca_jax.server.answers import DONE, Session, Writer, error_event, finish_reason, usage_body, usage_so_far
from ca_jax.server.bodies import ChatRequest, CompletionRequest
from ca_jax.server.description import STREAMED, answers
from ca_jax.server.engine_loop import LiveJob
from ca_jax.server.errors import ApiError, as_api_error
from ca_jax.server.logprobs import chat_logprobs, completion_logprobs
from ca_jax.server.router import client_name
from ca_jax.server.service import Service, Turns
from ca_jax.server.state import KeyedRoute, TheService, TheTenant
from ca_jax.server.tenants import Tenant
from ca_jax.server.waiting import EventStream, too_late, while_connected

ROUTES = fastapi.APIRouter(prefix="/v1", tags=["openai"], route_class=KeyedRoute)
_LOG = logging.getLogger(__name__)
_CREATED = int(time.time())
_Begun = contextlib.AbstractAsyncContextManager[Turns]


@ROUTES.get("/models", responses=answers(401, 503))
async def models(service: TheService, tenant: TheTenant) -> JSONResponse:
    """The one model that is served."""
    return JSONResponse({"object": "list", "data": [_model(service)]})


@ROUTES.get("/models/{model:path}", responses=answers(401, 404, 503))
async def model(model: str, service: TheService, tenant: TheTenant) -> JSONResponse:
    """The same, by its name."""
    service.check_model(model)
    return JSONResponse(_model(service))


@ROUTES.post(
    "/chat/completions",
    response_class=Response,
    responses=answers(400, 401, 403, 404, 408, 409, 413, 429, 503, content=STREAMED),
)
async def chat_completions(
    body: ChatRequest, request: fastapi.Request, service: TheService, tenant: TheTenant
) -> Response:
    """Answers a conversation; the KV of what was said before is reused."""
    body.check()
    service.check_model(body.model)
    writer = Writer("chat.completion", body.model)
    return await _answer(request, service, tenant, body, writer, service.chat(tenant, body), body.num_choices)


@ROUTES.post(
    "/completions", response_class=Response, responses=answers(400, 401, 403, 404, 408, 413, 429, 503, content=STREAMED)
)
async def completions(
    body: CompletionRequest, request: fastapi.Request, service: TheService, tenant: TheTenant
) -> Response:
    """Continues plain prompts; the KV of what others began with is reused."""
    body.check()
    service.check_model(body.model)
    num_answers = len(body.prompts()) * body.num_choices
    writer = Writer("text_completion", body.model)
    return await _answer(request, service, tenant, body, writer, service.complete(tenant, body), num_answers)


async def _answer(
    request: fastapi.Request,
    service: Service,
    tenant: Tenant,
    body: ChatRequest | CompletionRequest,
    writer: Writer,
    begun: _Begun,
    num_answers: int,
) -> Response:
    """Begins a request's answers, so that what is wrong with it is a status, and gives them whole or piece by piece."""
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(service.admitted(tenant, num_answers, body.priority))
        if not body.stream:
            return await while_connected(request, _whole(service, tenant, body, writer, begun))
        try:
            async with service.deadline(body.timeout_s) as deadline:
                turns = await stack.enter_async_context(begun)
        except TimeoutError as error:
            raise too_late() from error
        until_s = deadline.when()
        pieces = _pieces(service, tenant, body, writer, turns, until_s)
        return EventStream(pieces, stack.pop_all(), until_s)


async def _whole(
    service: Service, tenant: Tenant, body: ChatRequest | CompletionRequest, writer: Writer, begun: _Begun
) -> JSONResponse:
    try:
        async with service.deadline(body.timeout_s), begun as turns:
            texts = [""] * len(turns.lives)
            async for live, part in turns.parts():
                texts[live.index] += part.text
    except TimeoutError as error:
        raise too_late() from error
    except Exception as error:
        raise _told(error) from error
    choices = []
    for live, text in zip(turns.lives, texts, strict=True):
        logprobs = _logprobs(service, body, live.job, 0)
        choices.append(writer.choice(live.index, text, finish_reason(live.job.finish_reason), logprobs))
    usage = usage_body(turns.usages(), body.num_choices)
    session = _session(tenant, body, turns)
    if session:
        session |= _state_of(turns.lives[0])
    return JSONResponse(writer.whole(choices, usage, session))


async def _pieces(
    service: Service,
    tenant: Tenant,
    body: ChatRequest | CompletionRequest,
    writer: Writer,
    turns: Turns,
    until_s: float | None,
) -> AsyncIterator[str]:
    """The stream of events. What goes wrong in the middle is the last of them."""
    try:
        session = _session(tenant, body, turns)
        if isinstance(body, ChatRequest):
            for live in turns.lives:
                yield writer.first(live.index, _usage(body, live, 0), session)
        told = [0] * len(turns.lives)
        async for live, part in turns.parts(until_s):
            reason = finish_reason(live.job.finish_reason) if part.done else None
            if not (part.text or part.done):
                continue
            logprobs = None
            if part.num_tokens > told[live.index]:
                logprobs = _logprobs(service, body, live.job, told[live.index], part.num_tokens)
                told[live.index] = part.num_tokens
            state = _state_of(live) if part.done and session else {}
            yield writer.piece(live.index, part.text, reason, logprobs, _usage(body, live, part.num_tokens), state)
        if body.includes_usage:
            yield writer.last(usage_body(turns.usages(), body.num_choices))
        yield DONE
    except TimeoutError:
        yield error_event(too_late().body())
    except Exception as error:
        yield error_event(_told(error).body())


def _told(error: Exception) -> ApiError:
    """What a client is told of what broke its answer; more is in the log."""
    api_error = as_api_error(error)
    if api_error.status >= 500:
        _LOG.error("an answer broke (%s)", correlation_id.get(), exc_info=error)
    return api_error


def _usage(body: ChatRequest | CompletionRequest, live: LiveJob, num_tokens: int) -> str | None:
    """What a chunk says under `usage`, as JSON; None: nothing, the field is not there."""
    if not body.includes_usage:
        return None
    return usage_so_far(live.num_prompt_tokens, num_tokens) if body.counts_on else "null"


def _logprobs(
    service: Service, body: ChatRequest | CompletionRequest, job: Any, start: int, stop: int | None = None
) -> dict[str, Any] | None:
    if isinstance(body, ChatRequest):
        return None if body.num_logprobs is None else chat_logprobs(service.tokenizer, job, start, stop)
    return None if body.logprobs is None else completion_logprobs(service.tokenizer, job, start, stop)


def _session(tenant: Tenant, body: ChatRequest | CompletionRequest, turns: Turns) -> Session:
    """Of a chat: what its next turn may say instead of its history."""
    if not isinstance(body, ChatRequest) or len(turns.sessions) > 1 or not turns.sessions[0].is_kept:
        return {}
    return {"session_id": client_name(tenant.domain, turns.sessions[0].session_id)}


def _state_of(live: LiveJob) -> Session:
    """Where a conversation stands behind its answer: what its next turn may hold the server to."""
    return {} if live.state is None else {"session_state": live.state}


def _model(service: Service) -> dict[str, Any]:
    return {"id": service.model_name, "object": "model", "created": _CREATED, "owned_by": "ca_jax"}
