"""Bodies of requests: those of OpenAI's fields that are served, and a few of our own.

A field that asks for what is not served is named in the error. Fields that say nothing about the answer (who asks, how
it is billed) are taken and not looked at. Fields that nobody knows are ignored and named (`OpenBody`), but in bodies
of the project's own routes, where they are an error.

Not here: bodies of answers (`openai_routes`, `session_routes`), what a request does (`service`).
Source: OpenAI's API reference (createChatCompletion, createCompletion).
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from ca_jax.server.errors import invalid
from ca_jax.server.tool_bodies import AllowedTools, CalledTool, JsonObject, NamedTool, ResponseFormat, Tool
from ca_jax.server.tool_formats import AskedTools
from ca_jax.turns.conversations import Message
from ca_jax.turns.grammars import Grammar
from ca_jax.turns.requests import SamplingParams

_INT64 = 2**63
# A least length, even of 0, has pydantic look whether a text is one: JSON may hold half of a surrogate pair.
_Strict = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False, str_min_length=0, use_attribute_docstrings=True)
_Tokens = Annotated[int, Field(ge=1)]
_OfTokens = Field(max_length=1024, json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,9}$"}})
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Chunks = Annotated[list[str | list[int]], Field(min_length=1)]
# Fields that the engine takes as they are, with a default of its own.
_SAMPLED = (
    *("min_tokens", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "ignore_eos"),
    "skip_special_tokens",
)
IGNORED: Any = Field(None, description="Not looked at.")
UNSERVED: Any = Field(None, description="Not served.")
_Timeout = Annotated[float | None, Field(gt=0, description="Most seconds that it may take.")]


class StrictBody(pydantic.BaseModel):
    """A body of a request: a field that is not known is an error, but of `OpenBody`."""

    model_config = _Strict


class OpenBody(StrictBody):
    """What clients of others' servers send: it may have fields that are not known here."""

    model_config = pydantic.ConfigDict(extra="allow")

    def ignored(self, path: str = "") -> Iterator[str]:
        """Names of those fields, as paths behind a path."""
        yield from (f"{path}{name}" for name in self.model_extra or ())
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, OpenBody):
                yield from value.ignored(f"{path}{name}.")
            elif isinstance(value, list) and value and isinstance(value[0], OpenBody):
                for index, each in enumerate(value):
                    yield from each.ignored(f"{path}{name}.{index}.") if isinstance(each, OpenBody) else ()


class TextPart(OpenBody):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(OpenBody):
    """One message. What only some models use may be there where it says nothing."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = None
    name: str | None = Field(None, description="Of a tool; else not looked at.")
    refusal: None = None
    audio: None = None
    tool_calls: Annotated[list[CalledTool], Field(max_length=128)] | None = None
    """Of an assistant's reply: the calls in it."""
    tool_call_id: str | None = None
    """Of a tool's message: the call that it answers."""
    reasoning_content: str | None = None
    """Of an assistant's reply: what was thought before it. A conversation is found again by this too."""
    function_call: None = None
    annotations: list[Any] | None = IGNORED
    context: _Chunks | None = None
    """What the request had as its context when this was its last message; of a reply: none."""

    def message(self) -> Message:
        """As the chat template takes it, with its context; a developer's message is the system's."""
        parts = self.content if isinstance(self.content, list) else [self.content or ""]
        text = "".join(part if isinstance(part, str) else part.text for part in parts)
        message: Message = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.role == "assistant" and self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.role == "assistant" and self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.role == "tool":
            told = {"tool_call_id": self.tool_call_id, "name": self.name}
            message |= {name: value for name, value in told.items() if value is not None}
        return message if self.context is None else {**message, "context": self.context}


class StreamOptions(OpenBody):
    """Of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Not looked at: chunks are not padded.")
    continuous_usage_stats: bool | None = None
    """Each chunk, not the last one alone, says how many tokens it took so far; vLLM's."""


class Asked(OpenBody):
    """What bodies of every API may say of an answer."""

    model: str
    stream: bool | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """Draw from the k likeliest tokens; 0 and -1: from all."""
    ignore_eos: bool | None = Field(None, description="Go on past the model's own stop tokens.")
    timeout_s: _Timeout = None
    kv_retention_ttl_seconds: Annotated[float, Field(ge=0)] | None = None
    """How long the conversation's KV is kept after its last use, as `ttl_s` of `POST /v1/sessions`."""
    expected_resume_seconds: Annotated[float, Field(ge=0)] | None = None
    """How long after the answer the conversation's next turn is expected: who is evicted goes by it."""


class AskedOfOpenAI(Asked):
    """Likewise, those of OpenAI's APIs."""

    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    user: str | None = IGNORED
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Drop tokens less likely than this share of the likeliest."""
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    """Above 1 makes tokens seen so far less likely."""
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Fewest tokens of an answer: it does not stop before."""
    guided_json: dict[str, Any] | bool | str | None = None
    """A JSON schema that the answer must follow, or its text; like the others below vLLM's."""
    guided_regex: str | None = None
    """A regular expression that the whole answer must match."""
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    """The answer must be one of these."""
    guided_grammar: str | None = None
    """A grammar in Lark's notation that the whole answer must match, what is thought and called included."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    """Requests of lower values go first."""


class Sampling(AskedOfOpenAI):
    """What chats and completions share."""

    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], _OfTokens] | None = None
    max_tokens: _Tokens | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=64)] | None = None
    skip_special_tokens: bool | None = Field(None, description="False: special tokens that are drawn are text.")
    no_stop_trim: Literal[False] | None = UNSERVED  # Routers write defaults of vLLM and SGLang into bodies.
    return_hidden_states: Literal[False] | None = UNSERVED

    @property
    def num_choices(self) -> int:
        """Answers to one prompt."""
        return self.n or 1

    def check(self) -> None:
        """Raises ApiError where fields do not go together."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "stream_options must come with stream=true")
        if len(guided := self.guided()) > 1:
            raise invalid([*guided][1], f"an answer must match one thing, got {', '.join(guided)}")

    def guided(self) -> dict[str, Grammar]:
        """By field, what the answer must match."""
        made: dict[str, Callable[[Any], Grammar]] = {
            "guided_json": Grammar.json_schema,
            "guided_regex": Grammar.regex,
            "guided_choice": Grammar.choice,
            "guided_grammar": Grammar.lark,
        }
        asked = {name: getattr(self, name) for name in made}
        return {name: made[name](value) for name, value in asked.items() if value is not None}

    @property
    def num_answers(self) -> int:
        """Answers that are asked for, to all prompts."""
        return self.num_choices

    @property
    def token_limit(self) -> int | None:
        """Most tokens of an answer, if it says."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens whose probabilities are wanted beside that of the token drawn; None: none at all."""
        raise NotImplementedError

    def sampling(self, choice: int, max_tokens: int) -> SamplingParams:
        """How the answer of a number is drawn; each of several with a seed of its own.

        Args:
          choice: which.
          max_tokens: most tokens of it, where the request does not say.
        """
        as_they_are = {name: value for name in _SAMPLED if (value := getattr(self, name)) is not None}
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            **as_they_are,
            max_tokens=self.token_limit or max_tokens,
            top_k=max(self.top_k or 0, 0),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=max(1.0 if self.top_p is None else self.top_p, 1e-6),  # OpenAI's 0 is the likeliest token alone.
            logit_bias=tuple((_token_id(token), value) for token, value in (self.logit_bias or {}).items()),
            seed=secrets.randbits(32) if self.seed is None else (self.seed + choice) % 2**32,
            stop=tuple(text for text in stop if text),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=self.num_logprobs,
            grammar=next(iter(self.guided().values()), None),
        )


class ChatRequest(Sampling):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: _Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None

    tools: Annotated[list[Tool], Field(max_length=512)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    """False: an answer that must call a tool calls one."""
    functions: Annotated[list[Any], Field(max_length=0)] | None = UNSERVED
    function_call: Literal["none", "auto"] | None = None
    store: Literal[False] | None = None
    """False: nothing of the request is kept when it has ended, neither what was said nor its KV."""
    metadata: dict[str, str] | None = IGNORED
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = IGNORED
    prompt_cache_key: str | None = Field(None, description="Not looked at: equal prefixes are always found.")
    prompt_cache_retention: Literal["in_memory", "24h"] | None = IGNORED
    prompt_cache_options: dict[str, Any] | None = IGNORED

    session_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """The conversation to go on with; messages are then what is new, or all of it and that."""
    session_state: Annotated[str, Field(max_length=64)] | None = None
    """What its latest answer said: if the session does not stand there any more, 409 and no answer."""
    context: _Chunks | None = None
    """Chunks in front of the last message, whose KV is reused wherever they stand (CacheBlend). They are a part of it:
    a client that sends the whole history sends them again, as that message's own context."""
    reuse_edited: bool | None = None
    """True: where messages in the middle of a known history were changed, dropped or added, use what is stored of those
    behind them too, some of it computed anew; that is not exact. By default all behind an edit is computed. The known
    history is that of `session_state`, or has the same first turn and the same last exchange."""
    chat_template_kwargs: Annotated[JsonObject, Field(max_length=64)] | None = None
    """Further variables of the chat template, `enable_thinking` say; vLLM's. With others a history is another one."""
    reasoning_effort: Annotated[str, Field(max_length=16)] | None = None
    """Likewise the variable of that name."""
    continue_final_message: Literal[False] | None = UNSERVED
    include_reasoning: bool | None = IGNORED
    separate_reasoning: bool | None = IGNORED
    stream_reasoning: bool | None = IGNORED
    truncation: Literal["auto", "disabled"] | None = None
    """auto, the default: where the history is longer than the window its oldest tokens leave, and
    usage.ca_jax.num_dropped says how many; disabled: that is an error, context_length_exceeded."""

    def check(self) -> None:
        """Raises ApiError where fields do not go together."""
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs must come with logprobs=true")
        if self.session_state is not None and self.session_id is None and not self.reuse_edited:
            raise invalid("session_state", "session_state must come with a session_id")
        if self.context is not None and self.messages[-1].context is not None:
            raise invalid("context", "context must be given once, got it with the last message and beside it")
        if self.reuse_edited and self.session_id is not None:
            raise invalid("reuse_edited", "reuse_edited must come without a session_id, with the whole history")
        if self.session_id is not None and self.num_choices > 1:
            raise invalid("n", f"n must be 1 with a session_id, got {self.n}")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise invalid("tools", "tools must have names of their own, got one twice")
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "tool_choice must come with tools")
        if isinstance(self.tool_choice, AllowedTools):
            if not self.tool_choice.names <= {*names}:
                raise invalid("tool_choice", "tool_choice must allow tools that there are, got others")
            if self.tool_choice.allowed_tools.mode == "auto" and self.tool_choice.names < {*names}:
                message = "tool_choice must allow all tools with mode=auto; some of them may be allowed with required"
                raise invalid("tool_choice", message)
        if named is not None and named not in names:
            raise invalid("tool_choice", f"tool_choice must name one of the tools, got {named!r}")

    def guided(self) -> dict[str, Grammar]:
        """As of each request, with `response_format`."""
        grammar = None if self.response_format is None else self.response_format.grammar()
        return {**({} if grammar is None else {"response_format": grammar}), **super().guided()}

    def asked_tools(self) -> AskedTools | None:
        """What it says of tools; None: nothing."""
        if not self.tools:
            return None
        choice, allowed = self.tool_choice, {tool.function.name for tool in self.tools}
        if isinstance(choice, AllowedTools):
            allowed, choice = choice.names, choice.allowed_tools.mode
        named = choice.function.name if isinstance(choice, NamedTool) else None
        functions = (tool.function for tool in self.tools if tool.function.name in allowed)
        return AskedTools(
            functions=tuple(function.model_dump(exclude_none=True) for function in functions),
            choice="auto" if choice is None or isinstance(choice, NamedTool) else choice,
            named=named,
            is_parallel=self.parallel_tool_calls is not False,
        )

    def history(self) -> list[Message]:
        """What was said, the request's context with its last message, its tools with the first that is no system's."""
        messages = [message.message() for message in self.messages]
        if self.context is not None:
            messages[-1]["context"] = self.context
        first = next((each for each in messages if each["role"] != "system"), messages[0])
        if self.tools:
            first["tools"] = [tool.described() for tool in self.tools]
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        if asked := {**effort, **(self.chat_template_kwargs or {})}:
            first["template"] = asked
        return messages

    @property
    def token_limit(self) -> int | None:
        """By the newer field, if that is there."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """As of each request."""
        return (self.top_logprobs or 0) if self.logprobs else None


def as_chat(fields: dict[str, Any], names: Mapping[str, str]) -> ChatRequest:
    """The chat that a body of another API is.

    Args:
      fields: of the chat.
      names: those of the body, where they are others there.

    Raises:
      ApiError: a field is wrong, or some do not go together.
    """
    try:
        chat = ChatRequest.model_validate(fields)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0]) if first["loc"] else ""
        param = names.get(field, field) or None
        raise invalid(param, f"{param or 'the body'}: {first['msg']}") from error
    chat.check()
    return chat


class CompletionRequest(Sampling):
    """Body of `POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[Annotated[list[int], Field(min_length=1)]], Field(min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    """Tell the prompt in front of its answer, and its log-probabilities with those of the answer."""
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(None, description="0: tell of the prompt alone.")
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Say how likely each token of the prompt was, and so many of the likeliest; vLLM's. Of an echo: `logprobs`."""
    prompt_logprobs_from: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Say that from the token at this place of the prompt on: stored KV then serves those before it. By default of all
    but the first, so that all of the prompt is computed."""
    suffix: Literal[""] | None = UNSERVED
    best_of: Literal[1] | None = UNSERVED

    def check(self) -> None:
        """Raises ApiError where fields do not go together."""
        super().check()
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs", "prompt_logprobs must come without stream; echo may be streamed")

    def sampling(self, choice: int, max_tokens: int) -> SamplingParams:
        """As of each request, with what is asked of the prompt."""
        asked = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return dataclasses.replace(
            super().sampling(choice, max_tokens),
            prompt_logprobs=max((each for each in asked if each is not None), default=None),
            prompt_logprobs_from=self.prompt_logprobs_from or 1,
        )

    @property
    def token_limit(self) -> int | None:
        """At least 1: a token that nobody asked for is drawn all the same, and not told."""
        return None if self.max_tokens is None else max(self.max_tokens, 1)

    @property
    def num_answers(self) -> int:
        """Those to all prompts."""
        return len(self.prompts()) * self.num_choices

    @property
    def num_logprobs(self) -> int | None:
        """As of each request."""
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[int(token) for token in self.prompt]]
        return list(self.prompt)


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise invalid("logit_bias", f"logit_bias must be token ids, got {text!r}")
    return int(text)


class NewSession(StrictBody):
    """Body of `POST /v1/sessions`."""

    model: str | None = None
    """The model, or `MODEL:ADAPTER`: it is held with that adapter for good. By default the model alone."""
    session_id: Annotated[str, Field(min_length=1, max_length=256, pattern="^[^/]+$")] | None = None
    """Its name, to be asked for in a path; made up if not given."""
    system: str | None = Field(None, description="Its system message.")
    ttl_s: Annotated[float, Field(ge=0)] | None = None
    """How long its KV is kept after its last use, seconds."""


class SessionChange(StrictBody):
    """Body of `POST /v1/sessions/{session_id}`."""

    pinned: bool | None = Field(None, description="Whether it stays in the store, over restarts too.")
    ttl_s: Annotated[float, Field(ge=0)] | None = None
    """How long its KV is kept after its last use, seconds; null leaves it as it is."""
    expected_resume_s: Annotated[float, Field(ge=0)] | None = None
    """In how many seconds its next turn is expected, for example when a tool will be done. KV that is wanted soon stays
    in DRAM for longer."""


class Fork(StrictBody):
    """Body of `POST /v1/sessions/{session_id}/fork`."""

    at: Annotated[int, Field(ge=0, lt=2**31)]
    """How many of its messages the fork begins with: as many as there were before one of its turns, or all of them."""


class Discard(StrictBody):
    """Body of `POST /v1/sessions/{session_id}/discard`."""

    start: Annotated[int, Field(ge=0, lt=2**31)]
    stop: Annotated[int, Field(ge=0, lt=2**31)]


class NewChunks(StrictBody):
    """Body of `POST /v1/chunks`."""

    chunks: _Chunks
    tier: Literal["dram", "ssd"] | None = None
    timeout_s: _Timeout = None
