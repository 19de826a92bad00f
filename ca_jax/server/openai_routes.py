"""OpenAI's routes: chat completions, completions, models.

Not here: which conversation goes on, what is admitted (`service`, `router`), bodies (`bodies`, `answers`), clients that
go away or do not read (`state`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import fastapi
from asgi_correlation_id import correlation_id
from fastapi.responses import JSONResponse, Response

from ca_jax.server import answers
from ca_jax.server.bodies import ChatRequest, CompletionRequest
from ca_jax.server.engine_loop import Feed, LiveJob
from ca_jax.server.errors import OBJECT, ApiError, as_api_error, responses, too_late
from ca_jax.server.router import client_name
from ca_jax.server.service import Service
from ca_jax.server.state import EventStream, KeyedRoute, TheService, TheTenant, while_connected
from ca_jax.server.tenants import Tenant

ROUTES = fastapi.APIRouter(prefix="/v1", tags=["openai"], route_class=KeyedRoute)
_LOG = logging.getLogger(__name__)
_CREATED = int(time.time())
_EVENT: dict[str, Any] = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_STREAMED: dict[str, Any] = {**OBJECT, "text/event-stream": {"itemSchema": _EVENT}}  # As OpenAPI 3.2 says of events.


@ROUTES.get("/models", responses=responses(401, 503))
async def models(service: TheService, tenant: TheTenant) -> JSONResponse:
    """The one model that is served."""
    return JSONResponse({"object": "list", "data": [_model(service)]})


@ROUTES.get("/models/{model:path}", responses=responses(401, 404, 503))
async def model(model: str, service: TheService, tenant: TheTenant) -> JSONResponse:
    """The same, by its name."""
    service.check_model(model)
    return JSONResponse(_model(service))


def _model(service: Service) -> dict[str, Any]:
    return {"id": service.model_name, "object": "model", "created": _CREATED, "owned_by": "ca_jax"}


@ROUTES.post(
    "/chat/completions",
    response_class=Response,
    responses=responses(400, 401, 403, 404, 408, 409, 413, 429, 503, content=_STREAMED),
)
async def chat_completions(
    body: ChatRequest, request: fastapi.Request, service: TheService, tenant: TheTenant
) -> Response:
    """Answers a conversation; the KV of what was said before is reused."""
    return await _Answering(body, service, tenant).response(request)


@ROUTES.post(
    "/completions",
    response_class=Response,
    responses=responses(400, 401, 403, 404, 408, 413, 429, 503, content=_STREAMED),
)
async def completions(
    body: CompletionRequest, request: fastapi.Request, service: TheService, tenant: TheTenant
) -> Response:
    """Continues plain prompts; the KV of what other prompts began with is reused."""
    return await _Answering(body, service, tenant).response(request)


class _Answering:
    """One request for answers, whole or as chunks of a stream.

    Chunks are written as text at once: they are most of what the server does for a token.

    Raises:
      ApiError: fields do not go together, or another model is asked for.
    """

    def __init__(self, body: ChatRequest | CompletionRequest, service: Service, tenant: Tenant) -> None:
        body.check()
        service.check_model(body.model)
        self._body, self._service, self._tenant = body, service, tenant
        self._is_chat = isinstance(body, ChatRequest)
        kind = "chat.completion" if self._is_chat else "text_completion"
        response_id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": response_id, "object": kind, "created": int(time.time()), "model": body.model}
        self._chunk_head = json.dumps({**self._head, "object": f"{kind}.chunk" if self._is_chat else kind})[:-1]

    async def response(self, request: fastapi.Request) -> Response:
        """Begins the answers, so that what is wrong with the request is a status, and gives them whole or streamed."""
        body, service = self._body, self._service
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(service.admitted(self._tenant, body.num_answers, body.priority))
            if isinstance(body, ChatRequest):
                begun = service.chat(self._tenant, body)
            else:
                begun = service.complete(self._tenant, body)
            if not body.stream:
                return await while_connected(request, self._whole(begun))
            try:
                async with service.deadline(body.timeout_s) as deadline:
                    feed = await stack.enter_async_context(begun)
            except TimeoutError as error:
                raise too_late() from error
            until_s = deadline.when()
            return EventStream(self._pieces(feed, until_s), stack.pop_all(), until_s)

    async def _whole(self, begun: contextlib.AbstractAsyncContextManager[Feed]) -> JSONResponse:
        try:
            async with self._service.deadline(self._body.timeout_s), begun as feed:
                texts = [""] * len(feed.lives)
                async for live, part in feed.parts():
                    texts[live.index] += part.text
        except Exception as error:
            raise _reported(error) from error
        choices = []
        for live, text in zip(feed.lives, texts, strict=True):
            said: dict[str, Any] = {"text": text}
            if self._is_chat:
                said = {"message": {"role": "assistant", "content": text, "refusal": None}}
            logprobs, reason = self._logprobs(live, 0), answers.finish_reason(live.job.finish_reason)
            choices.append({"index": live.index, **said, "logprobs": logprobs, "finish_reason": reason})
        session = self._session(feed)
        if session:
            session |= _state_of(feed.lives[0])
        usage = answers.usage_body(feed.usages(), self._body.num_choices)
        return JSONResponse({**self._head, "choices": choices, "usage": usage, **session})

    async def _pieces(self, feed: Feed, until_s: float | None) -> AsyncIterator[str]:
        """The stream of events. An error in the middle is the last of them."""
        try:
            session = self._session(feed)
            if self._is_chat:
                for live in feed.lives:
                    said = '{"role": "assistant", "content": "", "refusal": null}'
                    yield self._chunk(live.index, said, None, None, self._usage(live, 0), session)
            sent = [0] * len(feed.lives)
            async for live, part in feed.parts(until_s):
                if not (part.text or part.done):
                    continue
                reason = answers.finish_reason(live.job.finish_reason) if part.done else None
                logprobs = None
                if part.num_tokens > sent[live.index]:
                    logprobs = self._logprobs(live, sent[live.index], part.num_tokens)
                    sent[live.index] = part.num_tokens
                said = json.dumps(part.text)
                if self._is_chat:
                    said = f'{{"content": {said}}}' if part.text or reason is None else "{}"
                state = _state_of(live) if part.done and session else {}
                yield self._chunk(live.index, said, reason, logprobs, self._usage(live, part.num_tokens), state)
            if self._body.includes_usage:
                usage = json.dumps(answers.usage_body(feed.usages(), self._body.num_choices))
                yield f'data: {self._chunk_head}, "choices": [], "usage": {usage}}}\n\n'
            yield answers.DONE
        except Exception as error:
            yield answers.error_event(_reported(error).body())

    def _chunk(
        self, index: int, said: str, reason: str | None, logprobs: Any, usage: str | None, session: answers.Session
    ) -> str:
        """A chunk of an answer's new text; `said` and `usage` are JSON, and without usage the field is not there."""
        name = "delta" if self._is_chat else "text"
        why, of_usage = json.dumps(reason), "" if usage is None else f', "usage": {usage}'
        choice = f'"index": {index}, "{name}": {said}, "logprobs": {json.dumps(logprobs)}, "finish_reason": {why}'
        of_session = f", {json.dumps(session)[1:-1]}" if session else ""
        return f'data: {self._chunk_head}, "choices": [{{{choice}}}]{of_usage}{of_session}}}\n\n'

    def _usage(self, live: LiveJob, num_tokens: int) -> str | None:
        """What a chunk says under `usage`, as JSON; None: the field is not there."""
        if not self._body.includes_usage:
            return None
        counts = answers.usage_counts(live.num_prompt_tokens, num_tokens)
        return json.dumps(counts) if self._body.counts_on else "null"

    def _logprobs(self, live: LiveJob, start: int, stop: int | None = None) -> dict[str, Any] | None:
        if self._body.num_logprobs is None:
            return None
        describe = answers.chat_logprobs if self._is_chat else answers.completion_logprobs
        return describe(self._service.tokenizer, live.job, start, stop)

    def _session(self, feed: Feed) -> answers.Session:
        """Of a chat: what its next turn may name instead of its history."""
        session = feed.lives[0].job.session
        if not self._is_chat or len(feed.lives) > 1 or session is None or not session.is_kept:
            return {}
        return {"session_id": client_name(self._tenant.domain, session.session_id)}


def _reported(error: Exception) -> ApiError:
    """The error that a client gets for what broke its answer; more of it is in the log."""
    api_error = too_late() if isinstance(error, TimeoutError) else as_api_error(error)
    if api_error.status >= 500:
        _LOG.error("an answer broke (%s)", correlation_id.get(), exc_info=error)
    return api_error


def _state_of(live: LiveJob) -> answers.Session:
    """Where a conversation stands behind its answer: the server holds its next turn to it, if that says so."""
    return {} if live.state is None else {"session_state": live.state}
