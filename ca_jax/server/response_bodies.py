"""Bodies of `/v1/responses`: requests, their items and tools.

Not here: which conversation a response goes on with (`places`), the object that it is (`response_items`), chats.
Source: OpenAI's API reference (createResponse, Response, ResponseItemList).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ca_jax.server.bodies import IGNORED, UNSERVED, AskedOfOpenAI, ChatMessage, ChatRequest, OpenBody, Sampling, as_chat
from ca_jax.server.errors import ApiError, invalid
from ca_jax.turns.conversations import Message

_LOGPROBS = "message.output_text.logprobs"  # In `include`.
_TOLD = (
    "background",
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
Metadata = Annotated[dict[_Name, Annotated[str, Field(max_length=512)]], Field(max_length=16)]


class ContentPart(OpenBody):
    """A part of a message: text alone."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = IGNORED
    logprobs: list[Any] | None = IGNORED


class _ReasoningText(OpenBody):
    type: Literal["reasoning_text"]
    text: str


class MessageItem(OpenBody):
    """A message, new or as an earlier response gave it."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[ContentPart], Field(min_length=1)]
    id: str | None = IGNORED
    status: str | None = IGNORED
    phase: str | None = IGNORED


class ReasoningItem(OpenBody):
    """What was thought before a reply. Only what is told as text is read."""

    type: Literal["reasoning"]
    content: list[_ReasoningText] | None = None
    summary: list[Any] | None = IGNORED
    encrypted_content: str | None = IGNORED
    id: str | None = IGNORED
    status: str | None = IGNORED


class CallItem(OpenBody):
    """A call of a tool."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(max_length=256)]
    name: Annotated[str, Field(max_length=256)]
    arguments: str
    id: str | None = IGNORED
    status: str | None = IGNORED


class CallOutputItem(OpenBody):
    """What a call has given."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(max_length=256)]
    output: str | Annotated[list[ContentPart], Field(min_length=1)]
    id: str | None = IGNORED
    status: str | None = IGNORED


class ResponseTool(OpenBody):
    """A tool. Those that are no functions are left out, and told as fields that are ignored."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def ignored(self, path: str = "") -> Iterator[str]:
        """As of each body; all of one that is no function."""
        if self.type == "function":
            return super().ignored(path)
        return iter([path.removesuffix(".")])

    def described(self) -> _Body:
        """As chats have it."""
        names = ("name", "description", "parameters", "strict")
        function = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {"type": "function", "function": function}


class NamedFunction(OpenBody):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class AllowedFunctions(OpenBody):
    """The functions that may be called, of those that the model is told of."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=512)]

    def as_chat(self) -> _Body:
        """As chats have it."""
        named = [{"type": "function", "function": {"name": tool.name}} for tool in self.tools]
        return {"type": self.type, "allowed_tools": {"mode": self.mode, "tools": named}}


class TextFormat(OpenBody):
    """What the text must be like."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = IGNORED
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = IGNORED

    def as_chat(self) -> _Body:
        """As chats have it."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.schema_}}


class TextConfig(OpenBody):
    """Of the text."""

    format: TextFormat | None = None


Item = MessageItem | ReasoningItem | CallItem | CallOutputItem


class Reasoning(OpenBody):
    """How much is thought, by a model whose template asks."""

    effort: Annotated[str, Field(max_length=16)] | None = None
    summary: str | None = IGNORED


class ConversationRef(OpenBody):
    """A conversation by its name."""

    id: Annotated[str, Field(min_length=1, max_length=256)]


class ResponseRequest(AskedOfOpenAI):
    """Body of `POST /v1/responses`."""

    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    """The response to go on from: the conversation goes on there, or is forked where it has gone on already."""
    conversation: Annotated[str, Field(min_length=1, max_length=256)] | ConversationRef | None = None
    """The session to go on with, by the name that `POST /v1/sessions` gave it."""
    store: bool | None = None
    """False: nothing of the request is kept when it has ended, and its id names nothing."""
    truncation: Literal["auto", "disabled"] | None = None
    """disabled, the default: what does not fit the window is an error, context_length_exceeded; auto: the oldest tokens
    leave."""
    max_output_tokens: _Tokens | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[str] | None = None
    metadata: Metadata | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None

    tools: Annotated[list[ResponseTool], Field(max_length=512)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None = None
    background: bool | None = None
    """True: it is answered at once with a response that is `queued`, and generated while nobody waits for it."""
    prompt: None = UNSERVED
    service_tier: Literal["auto", "default"] | None = None
    parallel_tool_calls: bool | None = None
    stream_options: dict[str, Any] | None = Field(None, description="Not looked at: events are not padded.")
    safety_identifier: str | None = IGNORED
    prompt_cache_key: str | None = IGNORED
    prompt_cache_retention: str | None = IGNORED
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Raises ApiError where fields do not go together."""
        if self.previous_response_id is not None and self.conversation is not None:
            message = "previous_response_id must come without a conversation, got both"
            raise invalid("previous_response_id", message)
        if self.background and self.store is False:
            raise invalid("background", "background must come with a response that is kept, got store=false")
        for number, tool in enumerate(self.tools or ()):
            if tool.type == "custom":  # Whoever sends it waits for calls that are no JSON.
                message = f"not served: a tool of type custom ({tool.name!r}); functions are"
                raise ApiError(400, message, param=f"tools.{number}.type", code="unsupported_parameter")
        if not isinstance(self.input, str) and all(isinstance(item, ReasoningItem) for item in self.input):
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
        """Those of its input, with the tools that it has."""
        return self._as_chat(instructed=False).history()

    def chat(self) -> ChatRequest:
        """The same as a chat, as if all of the history were its own."""
        return self._as_chat(instructed=True)

    def _as_chat(self, *, instructed: bool) -> ChatRequest:
        shared = ({*Sampling.model_fields, "chat_template_kwargs"} & type(self).model_fields.keys()) - {
            "stream_options",
            "stream",
        }
        fields: _Body = {name: getattr(self, name) for name in shared}
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.as_chat()
        if functions := [tool.described() for tool in self.tools or () if tool.type == "function"]:
            fields |= {"tools": functions, "parallel_tool_calls": self.parallel_tool_calls}
        fields["tool_choice"] = choice = self.tool_choice
        if isinstance(choice, NamedFunction):
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        elif isinstance(choice, AllowedFunctions):
            fields["tool_choice"] = choice.as_chat()
        system = [{"role": "system", "content": self.system}] if instructed and self.system is not None else []
        items = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        fields |= {
            "messages": [*system, *_messages(items)],
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": self.wants_logprobs or None,
            "top_logprobs": self.top_logprobs,
            "store": False if self.store is False else None,
            "truncation": self.truncation or "disabled",
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
        }
        return as_chat(fields, {"messages": "input", "response_format": "text"})

    def told(self) -> _Body:
        """What a response tells of its request, and what is kept of that: fields that say nothing are left out."""
        fields = {name: getattr(self, name) for name in _TOLD} | {"model": self.model, "truncation": self.truncation}
        if self.named is not None:
            fields["conversation"] = {"id": self.named}
        return {name: value for name, value in fields.items() if value not in (None, "")}


def said_in(items: Sequence[Item]) -> list[Message]:
    """Items as messages of a conversation."""
    return [ChatMessage.model_validate(each).message() for each in _messages(items)]


def _messages(items: Sequence[Item]) -> list[_Body]:
    """Items as messages of a chat: a reply is what was thought, said and called since the last one of others."""
    found: list[_Body] = []
    for item in items:
        last = found[-1] if found and found[-1]["role"] == "assistant" else None
        if isinstance(item, CallOutputItem):
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            found.append({"role": item.role, "content": _text(item.content)})
        elif isinstance(item, CallItem):
            call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
            if last is None:
                last = {"role": "assistant", "content": ""}
                found.append(last)
            last.setdefault("tool_calls", []).append({"type": "function", **call})
        elif isinstance(item, MessageItem):
            if last is None or last["content"] or "tool_calls" in last:
                last = {"role": "assistant", "content": ""}
                found.append(last)
            last["content"] = _text(item.content)
        elif thought := "".join(part.text for part in item.content or ()):
            found.append({"role": "assistant", "content": "", "reasoning_content": thought})
    return found


def _text(content: str | list[ContentPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
