"""Anthropic's Messages: answers and token counts, in its shapes.

Not here: which conversation goes on (`router`), its shape of errors (`errors`), chats (`openai_routes`).
Source: Anthropic's API reference (Messages: create, count tokens, streaming).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Literal

import fastapi
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from ca_jax.server.answering import Answering, Block, BlockReader, Step, blocks_of, event, reported
from ca_jax.server.bodies import IGNORED, Asked, ChatRequest, OpenBody, as_chat
from ca_jax.server.engine_loop import Feed, Part
from ca_jax.server.errors import OBJECT, STREAMED, MessagesErrorAnswer, invalid, messages_error, responses
from ca_jax.server.service import Service
from ca_jax.server.state import OpenRoute, TheService, TheTenant, session_header
from ca_jax.server.tenants import Tenant
from ca_jax.server.tool_bodies import JsonObject
from ca_jax.server.tool_calls import read_reply
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


class ThinkingBlock(OpenBody):
    """What was thought before a reply."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = IGNORED
    cache_control: dict[str, Any] | None = IGNORED


class ToolUseBlock(OpenBody):
    """A call of a tool, in a reply."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(max_length=256)]
    name: Annotated[str, Field(max_length=256)]
    input: JsonObject
    cache_control: dict[str, Any] | None = IGNORED


class ToolResultBlock(OpenBody):
    """What a call has given, in a message of the user."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(max_length=256)]
    content: str | list[TextBlock] | None = None
    is_error: bool | None = IGNORED
    cache_control: dict[str, Any] | None = IGNORED


_Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class MessageParam(OpenBody):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[_Block], Field(min_length=1)]

    def messages(self) -> list[_Body]:
        """As a chat has it: results of tools are messages of their own."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        message: _Body = {"role": self.role, "content": "".join(_texts(self.content))}
        results: list[_Body] = []
        for block in self.content:
            if isinstance(block, ThinkingBlock):
                message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
            elif isinstance(block, ToolUseBlock):
                call = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                message.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": call})
            elif isinstance(block, ToolResultBlock):
                content = _text(block.content or "")
                results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        return [*results, *([message] if message["content"] or not results else [])]


class MessagesTool(OpenBody):
    """A tool. Those of Anthropic's own types are left out, and told as fields that are ignored."""

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = IGNORED

    @property
    def is_function(self) -> bool:
        """Whether it is one of the client's."""
        return self.type in (None, "custom")

    def ignored(self, path: str = "") -> Iterator[str]:
        """As of each body; all of one that is not the client's."""
        return super().ignored(path) if self.is_function else iter([path.removesuffix(".")])

    def described(self) -> _Body:
        """As chats have it."""
        told = {"description": self.description, "parameters": self.input_schema, "strict": self.strict}
        known = {name: value for name, value in told.items() if value is not None}
        return {"type": "function", "function": {"name": self.name, **known}}


class ToolChoice(OpenBody):
    """Whether tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def as_chat(self) -> _Body:
        """As chats have it."""
        choice: Any = {"auto": "auto", "any": "required", "none": "none"}.get(self.type)
        if choice is None:
            choice = {"type": "function", "function": {"name": self.name or ""}}
        return {"tool_choice": choice, "parallel_tool_calls": not self.disable_parallel_tool_use}


class Counted(OpenBody):
    """Body of `POST /v1/messages/count_tokens`."""

    model: str
    messages: Annotated[list[MessageParam], Field(min_length=1)]
    system: str | _Texts | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=512)] | None = None
    tool_choice: ToolChoice | None = None

    def check(self) -> None:
        """Raises ApiError where the last message is not one to be answered."""
        if self.messages[-1].role == "assistant":
            raise invalid(
                "messages", "messages must end with the user's, got the assistant's: answers are not begun here"
            )

    def chat(self, **options: Any) -> ChatRequest:
        """The same as a chat, with what else is asked."""
        system = None if self.system is None else _text(self.system)
        told: list[_Body] = [{"role": "system", "content": system}] if system else []
        told += [each for message in self.messages for each in message.messages()]
        if functions := [tool.described() for tool in self.tools or () if tool.is_function]:
            options["tools"] = functions
        options |= {} if self.tool_choice is None else self.tool_choice.as_chat()
        return as_chat({"model": self.model, "messages": told, **options}, {})


class MessagesRequest(Counted, Asked):
    """Body of `POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[str], Field(max_length=16)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    metadata: dict[str, Any] | None = IGNORED
    service_tier: str | None = IGNORED
    reuse_edited: bool | None = None

    def answered(self) -> ChatRequest:
        """The same as a chat that is answered."""
        same = {*Asked.model_fields, "max_tokens", "reuse_edited"} - {"model", "stream"}
        options = {name: getattr(self, name) for name in same}
        return self.chat(**options, stop=self.stop_sequences, truncation="disabled")


def _text(content: str | Sequence[OpenBody]) -> str:
    return content if isinstance(content, str) else "".join(_texts(content))


def _texts(blocks: Sequence[OpenBody]) -> list[str]:
    return [block.text for block in blocks if isinstance(block, TextBlock)]


@ROUTES.post(
    "",
    response_class=Response,
    responses=responses(400, 401, 403, 404, 408, 409, 413, 429, 503, content=STREAMED, error=MessagesErrorAnswer),
)
async def create_message(
    body: MessagesRequest, request: fastapi.Request, service: TheService, tenant: TheTenant
) -> Response:
    """Answers a conversation, in Anthropic's shape; the KV of what was said before is reused."""
    return await _Message(body, service, tenant, session_header(request)).response(request)


@ROUTES.post(
    "/count_tokens", responses=responses(400, 401, 404, 408, 413, 429, 503, content=OBJECT, error=MessagesErrorAnswer)
)
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
        """The answer, whole or streamed."""
        body, service = self._body, self._service
        begun = service.chat(self._tenant, body.answered(), name=self._name)
        answering = Answering(service, self._tenant, begun, body.timeout_s)
        return await (answering.streamed(self._events) if body.stream else answering.whole(request, self._whole))

    def _whole(self, feed: Feed, parts: Sequence[Part]) -> _Body:
        [job] = feed.jobs
        reply = read_reply(job)
        blocks = blocks_of(reply.message())
        content = [_told(each) | ({"citations": None} if each.kind == "content" else {}) for each in blocks]
        return self._object(content, _usage(job), _stop(job, bool(reply.calls)))

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
            reader = BlockReader(job)
            async for part in feed.parts(until_s):
                for step, block, text in reader.feed(part.text, part.done):
                    yield _of_block(step, block, text)
            yield _event("message_delta", delta=_stop(job, reader.has_calls), usage=_usage(job))
            yield _event("message_stop")
        except Exception as error:
            yield event(messages_error(reported(error)), "error")


_DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
_NO_CACHE: _Body = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _of_block(step: Step, block: Block, text: str) -> str:
    """The event of what happens to a block of the answer."""
    if step == "end":
        return _event("content_block_stop", index=block.number)
    if step == "text":
        kind, field = _DELTAS[block.kind]
        return _event("content_block_delta", index=block.number, delta={"type": kind, field: text})
    begun = _told(dataclasses.replace(block, text="{}" if block.kind == "call" else ""))
    return _event("content_block_start", index=block.number, content_block=begun)


def _told(block: Block) -> _Body:
    """A block as Anthropic has it."""
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": as_input(block.text)}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def as_input(arguments: str) -> Any:
    """The arguments of a call as an object, which they are where they had to be; else under a name of their own."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(arguments)
        if isinstance(found, dict) and json.dumps(found, allow_nan=False):
            return found
    return {"arguments": arguments}


def _event(kind: str, **fields: Any) -> str:
    return event({"type": kind, **fields}, kind)


def _usage(job: Job) -> _Body:
    """Tokens of an answer: those that were cached count apart from those of the input."""
    usage = job.usage()
    cached = {"cache_read_input_tokens": usage.num_cached_tokens}
    return {"input_tokens": usage.new_tokens, "output_tokens": usage.completion_tokens, **_NO_CACHE, **cached}


def _stop(job: Job, has_calls: bool) -> _Body:
    """Why an answer ended."""
    stop = job.output.stopped_by
    is_turn = job.finish_reason is FinishReason.STOP
    reason = "max_tokens" if not is_turn else "end_turn" if stop is None else "stop_sequence"
    if has_calls and reason == "end_turn":
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": stop}
