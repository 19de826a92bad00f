"""Bodies of `/v1/responses`: requests, and the object that a response is.

Not here: which conversation a response goes on with (`places`), events of a stream (`response_routes`), chats.
Source: OpenAI's API reference (createResponse, Response, ResponseItemList).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from ca_jax.server.bodies import IGNORED, UNSERVED, ChatMessage, ChatRequest, OpenBody, Sampling
from ca_jax.server.errors import invalid
from ca_jax.session import Job
from ca_jax.turns.conversations import Message
from ca_jax.turns.requests import FinishReason

_LOGPROBS = "message.output_text.logprobs"  # In `include`.
_TOLD = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "previous_response_id",
    "temperature",
    "top_logprobs",
    "top_p",
)
_Tokens = Annotated[int, Field(ge=1)]
_Name = Annotated[str, Field(max_length=64)]
_Body = dict[str, Any]


class ContentPart(OpenBody):
    """A part of a message: text alone."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = IGNORED
    logprobs: list[Any] | None = IGNORED


class MessageItem(OpenBody):
    """A message, new or as an earlier response gave it."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[ContentPart], Field(min_length=1)]
    id: str | None = IGNORED
    status: str | None = IGNORED
    phase: str | None = IGNORED

    def message(self) -> Message:
        """As a chat has it."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return {"role": "system" if self.role == "developer" else self.role, "content": "".join(parts)}


class ReasoningItem(OpenBody):
    """What an earlier response has thought, which is left out."""

    model_config = pydantic.ConfigDict(extra="ignore")

    type: Literal["reasoning"]


class TextFormat(OpenBody):
    """Text alone."""

    type: Literal["text"]


class TextConfig(OpenBody):
    """Of the text."""

    format: TextFormat | None = None


class ConversationRef(OpenBody):
    """A conversation by its name."""

    id: Annotated[str, Field(min_length=1, max_length=256)]


class ResponseRequest(OpenBody):
    """Body of `POST /v1/responses`."""

    model: str
    input: str | Annotated[list[MessageItem | ReasoningItem], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    """The response to go on from: the conversation goes on there, or is forked where it has gone on already."""
    conversation: Annotated[str, Field(min_length=1, max_length=256)] | ConversationRef | None = None
    """The session to go on with, by the name that `POST /v1/sessions` gave it."""
    store: bool | None = None
    """False: nothing of the request is kept when it has ended, and its id names nothing."""
    stream: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """disabled, the default: what does not fit the window is an error, context_length_exceeded; auto: the oldest tokens
    leave."""
    max_output_tokens: _Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[str] | None = None
    metadata: Annotated[dict[_Name, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    text: TextConfig | None = None

    tools: Annotated[list[Any], Field(max_length=0)] | None = UNSERVED
    tool_choice: Literal["none", "auto"] | None = None
    background: Literal[False] | None = UNSERVED
    prompt: None = UNSERVED
    service_tier: Literal["auto", "default"] | None = None
    parallel_tool_calls: bool | None = IGNORED
    stream_options: dict[str, Any] | None = Field(None, description="Not looked at: events are not padded.")
    user: str | None = IGNORED
    safety_identifier: str | None = IGNORED
    prompt_cache_key: str | None = IGNORED
    prompt_cache_retention: str | None = IGNORED

    # As of chats.
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    kv_retention_ttl_seconds: Annotated[float, Field(ge=0)] | None = None

    def check(self) -> None:
        """Raises ApiError where fields do not go together."""
        if self.previous_response_id is not None and self.conversation is not None:
            message = "previous_response_id must come without a conversation, got both"
            raise invalid("previous_response_id", message)
        if not self.new_messages():
            raise invalid("input", "input must have a message in it, got none")

    @property
    def named(self) -> str | None:
        """The conversation that it names."""
        return self.conversation.id if isinstance(self.conversation, ConversationRef) else self.conversation

    @property
    def system(self) -> str | None:
        """Its instructions, if it has any."""
        return self.instructions or None

    @property
    def wants_logprobs(self) -> bool:
        """Whether how likely tokens were is to be told."""
        return self.top_logprobs is not None or _LOGPROBS in (self.include or ())

    def new_messages(self) -> list[Message]:
        """Those of its input."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return [item.message() for item in self.input if isinstance(item, MessageItem)]

    def chat(self) -> ChatRequest:
        """The same as a chat, as if all of the history were its own."""
        shared = (Sampling.model_fields.keys() & type(self).model_fields.keys()) - {"stream_options", "stream"}
        instructed = [] if self.system is None else [{"role": "system", "content": self.system}]
        return ChatRequest(
            **{name: getattr(self, name) for name in shared},
            messages=[ChatMessage(**message) for message in [*instructed, *self.new_messages()]],
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs or None,
            top_logprobs=self.top_logprobs,
            store=False if self.store is False else None,
            truncation=self.truncation or "disabled",
        )

    def told(self) -> _Body:
        """What a response tells of its request, and what is kept of that: fields that say nothing are left out."""
        fields = {name: getattr(self, name) for name in _TOLD} | {"model": self.model, "truncation": self.truncation}
        if self.named is not None:
            fields["conversation"] = {"id": self.named}
        return {name: value for name, value in fields.items() if value not in (None, "")}


def status_of(reason: FinishReason) -> _Body:
    """How a response ended, as it is kept and told."""
    if reason is FinishReason.LENGTH:
        return {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return {"status": "completed" if reason is FinishReason.STOP else "cancelled"}


def usage_of(job: Job) -> _Body:
    """Tokens that a response took."""
    usage = job.usage()
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def output_text(text: str, logprobs: list[_Body] | None = None) -> _Body:
    """Text of an answer."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def output_message(key: str, status: str, content: list[_Body]) -> _Body:
    """The answer of a response."""
    is_whole = status in ("completed", "in_progress")
    return {
        "type": "message",
        "id": f"msg_{key}",
        "status": status if is_whole else "incomplete",
        "role": "assistant",
        "content": content,
    }


def response_object(response_id: str, kept: _Body, output: list[_Body]) -> _Body:
    """A response as OpenAI describes it.

    Args:
      response_id: its id.
      kept: what is kept of it: fields that say something, `told`, `status_of` and `usage` among them.
      output: its answer, if there is one.
    """
    return {
        "id": response_id,
        "object": "response",
        "background": False,
        "completed_at": None,
        "conversation": None,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "service_tier": "default",
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        **kept,
        "output": output,
    }


def input_item(key: str, number: int, message: Message) -> _Body:
    """A message that a response was given, as a list of them has it: its id is of its response and its number."""
    head = {"type": "message", "id": f"msg_{key}_{number}", "status": "completed", "role": message["role"]}
    if message["role"] == "assistant":
        return {**head, "content": [output_text(message["content"])]}
    return {**head, "content": [{"type": "input_text", "text": message["content"]}]}
