"""Anthropic's Messages: answers and token counts, in its shapes.

Not here: which conversation goes on (`router`), its shape of errors (`errors`), chats (`openai_routes`).
Source: Anthropic's API reference (Messages: create, count tokens, streaming).
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import fastapi
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from ca_jax.server.bodies import IGNORED, UNSERVED, ChatRequest, OpenBody
from ca_jax.server.engine_loop import Feed
from ca_jax.server.errors import OBJECT, STREAMED, invalid, messages_error, responses
from ca_jax.server.service import Service
from ca_jax.server.state import EventStream, OpenRoute, TheService, TheTenant, session_header, while_connected
from ca_jax.server.tenants import Tenant
from ca_jax.server.told import event, reported
from ca_jax.session import Job
from ca_jax.turns.requests import FinishReason

ROUTES = fastapi.APIRouter(prefix="/v1/messages", tags=["messages"], route_class=OpenRoute)
_Body = dict[str, Any]
_Texts = Annotated[list["TextBlock"], Field(min_length=1)]


class TextBlock(OpenBody):
    """A block of text. All that is said before is reused anyway, so that nothing has to be marked for that."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = IGNORED
    citations: list[Any] | None = IGNORED


class MessageParam(OpenBody):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: str | _Texts


class Counted(OpenBody):
    """Body of `POST /v1/messages/count_tokens`."""

    model: str
    messages: Annotated[list[MessageParam], Field(min_length=1)]
    system: str | _Texts | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = UNSERVED
    tool_choice: Annotated[dict[str, Any], Field(max_length=0)] | None = UNSERVED

    def check(self) -> None:
        """Raises ApiError where the last message is not one to be answered."""
        if self.messages[-1].role == "assistant":
            raise invalid(
                "messages", "messages must end with the user's, got the assistant's: answers are not begun here"
            )

    def chat(self, **options: Any) -> ChatRequest:
        """The same as a chat, with what else is asked."""
        system = None if self.system is None else _text(self.system)
        told = [{"role": "system", "content": system}] if system else []
        told += [{"role": message.role, "content": _text(message.content)} for message in self.messages]
        return ChatRequest.model_validate({"model": self.model, "messages": told, **options})


class MessagesRequest(Counted):
    """Body of `POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[str], Field(max_length=16)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    metadata: dict[str, Any] | None = IGNORED
    service_tier: str | None = IGNORED

    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    ignore_eos: bool | None = None
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    kv_retention_ttl_seconds: Annotated[float, Field(ge=0)] | None = None

    def answered(self) -> ChatRequest:
        """The same as a chat that is answered."""
        same = ("max_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos", "timeout_s")
        options = {name: getattr(self, name) for name in (*same, "kv_retention_ttl_seconds")}
        return self.chat(**options, stop=self.stop_sequences, truncation="disabled")


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


@ROUTES.post(
    "",
    response_class=Response,
    responses=responses(400, 401, 403, 404, 408, 409, 413, 429, 503, content=STREAMED),
)
async def create_message(
    body: MessagesRequest, request: fastapi.Request, service: TheService, tenant: TheTenant
) -> Response:
    """Answers a conversation, in Anthropic's shape; the KV of what was said before is reused."""
    return await _Message(body, service, tenant, session_header(request)).response(request)


@ROUTES.post("/count_tokens", responses=responses(400, 401, 404, 408, 413, 429, 503, content=OBJECT))
async def count_tokens(body: Counted, service: TheService, tenant: TheTenant) -> JSONResponse:
    """How many tokens a conversation is, ready to be answered."""
    body.check()
    service.adapter_of(body.model)
    [token_ids] = await service.render(tenant, body.chat())
    return JSONResponse({"input_tokens": len(token_ids)})


class _Message:
    """One request for an answer, whole or as events.

    Args:
      name: of its conversation, where one is begun.

    Raises:
      ApiError: fields do not go together, or another model is asked for.
    """

    def __init__(self, body: MessagesRequest, service: Service, tenant: Tenant, name: str | None) -> None:
        body.check()
        service.adapter_of(body.model)
        self._body, self._service, self._tenant, self._name = body, service, tenant, name
        self._id = f"msg_{uuid.uuid4().hex}"

    async def response(self, request: fastapi.Request) -> Response:
        """Begins the answer, so that what is wrong with the request is a status, and gives it whole or streamed."""
        body, service = self._body, self._service
        begun = service.chat(self._tenant, body.answered(), name=self._name)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(service.admitted(self._tenant, 1))
            if not body.stream:
                return await while_connected(request, self._whole(begun))
            async with service.deadline(body.timeout_s) as deadline:
                feed = await stack.enter_async_context(begun)
            until_s = deadline.when()
            return EventStream(self._events(feed, until_s), stack.pop_all(), until_s)

    async def _whole(self, begun: contextlib.AbstractAsyncContextManager[Feed]) -> JSONResponse:
        text = ""
        try:
            async with self._service.deadline(self._body.timeout_s), begun as feed:
                async for part in feed.parts():
                    text += part.text
        except Exception as error:
            raise reported(error) from error
        [job] = feed.jobs
        return JSONResponse(self._object([{"type": "text", "text": text, "citations": None}], _usage(job), _stop(job)))

    def _object(self, content: list[_Body], usage: _Body, stop: _Body) -> _Body:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._body.model}
        return {**head, "content": content, **stop, "usage": usage}

    async def _events(self, feed: Feed, until_s: float | None) -> AsyncIterator[str]:
        """The stream of events. An error in the middle is the last of them."""
        [job] = feed.jobs
        none = {"stop_reason": None, "stop_sequence": None}
        counted = {"input_tokens": feed.num_prompt_tokens[0], "output_tokens": 0}
        try:
            yield _event("message_start", message=self._object([], {**_NO_CACHE, **counted}, none))
            yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
            async for part in feed.parts(until_s):
                if part.text:
                    yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": part.text})
            yield _event("content_block_stop", index=0)
            yield _event("message_delta", delta=_stop(job), usage=_usage(job))
            yield _event("message_stop")
        except Exception as error:
            yield event(messages_error(reported(error)), "error")


_NO_CACHE: _Body = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _event(kind: str, **fields: Any) -> str:
    return event({"type": kind, **fields}, kind)


def _usage(job: Job) -> _Body:
    """Tokens of an answer: those that were cached count apart from those of the input."""
    usage = job.usage()
    cached = {"cache_read_input_tokens": usage.num_cached_tokens}
    return {"input_tokens": usage.new_tokens, "output_tokens": usage.completion_tokens, **_NO_CACHE, **cached}


def _stop(job: Job) -> _Body:
    """Why an answer ended."""
    stop = job.output.stopped_by
    is_turn = job.finish_reason is FinishReason.STOP
    reason = "max_tokens" if not is_turn else "end_turn" if stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stop}
