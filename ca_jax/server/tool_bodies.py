"""Bodies of tools, of calls to them, and of what an answer must be like, as OpenAI's requests have them.

Fields of these that are not known here are left out: they say nothing to the model.

Not here: whole requests (`bodies`), how a model writes calls (`tool_formats`), what a grammar is (`turns.grammars`).
Source: OpenAI's API reference (ChatCompletionTool, ChatCompletionNamedToolChoice, ResponseFormatJsonSchema).
"""

from __future__ import annotations

import contextlib
import json
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field
from pydantic_core import PydanticCustomError

from ca_jax.turns.grammars import Grammar

_Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
_MOST_DEEP = 100  # Levels of an object: what recurses over it has room for each.
_NOT_PLAIN = f"must be JSON that can be told again: finite numbers, whole characters, at most {_MOST_DEEP} levels deep"


def _shallow(value: Any) -> Any:
    level, num_levels = [value], 0
    while level := [each for one in level for each in (one.values() if isinstance(one, dict) else one)]:
        level, num_levels = [each for each in level if isinstance(each, dict | list)], num_levels + 1
        if num_levels > _MOST_DEEP:
            raise PydanticCustomError("json_value", _NOT_PLAIN)
    return value


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    _shallow(value)
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise PydanticCustomError("json_value", _NOT_PLAIN) from error
    return value


def _read_alike(arguments: str) -> str:
    found = None
    with contextlib.suppress(ValueError, RecursionError):  # What is no JSON is a text.
        found = json.loads(arguments)
    if isinstance(found, dict):
        _shallow(found)
    return arguments


JsonObject = Annotated[dict[str, Any], pydantic.AfterValidator(_plain)]
"""An object that a conversation keeps and answers tell."""


class _Body(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(
        extra="ignore", allow_inf_nan=False, str_min_length=0, use_attribute_docstrings=True
    )


class Function(_Body):
    """A function that may be called."""

    name: _Name
    description: str | None = None
    parameters: JsonObject | None = None
    """The JSON schema of its arguments, an object; none: it takes any."""
    strict: bool | None = None
    """Whether arguments are as the schema says. Where one tool is strict all are, and where a call must come."""


class Tool(_Body):
    """A tool."""

    type: Literal["function"]
    function: Function

    def described(self) -> dict[str, Any]:
        """As chat templates take it."""
        return self.model_dump(exclude_none=True)


class _Named(_Body):
    name: str


class NamedTool(_Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: _Named


class _Allowed(_Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=512)]


class AllowedTools(_Body):
    """The tools that may be called, of those that the model is told of: the prompt stays the same, and its KV."""

    type: Literal["allowed_tools"]
    allowed_tools: _Allowed

    @property
    def names(self) -> set[str]:
        """Of the functions."""
        return {tool.function.name for tool in self.allowed_tools.tools}


class _Called(_Body):
    name: Annotated[str, Field(max_length=256)]
    arguments: Annotated[str, pydantic.AfterValidator(_read_alike)] = "{}"


class CalledTool(_Body):
    """A call of a message."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: _Called


class _Schema(_Body):
    model_config = pydantic.ConfigDict(populate_by_name=True)

    name: Annotated[str, Field(max_length=64)] | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    """What the answer must be: a JSON schema."""
    strict: bool | None = Field(None, description="Not looked at: the schema always holds.")


class TextFormat(_Body):
    """Any text."""

    type: Literal["text"]

    def grammar(self) -> Grammar | None:
        """What the answer must match; None: anything."""
        return None


class JsonFormat(_Body):
    """An object in JSON."""

    type: Literal["json_object"]

    def grammar(self) -> Grammar | None:
        """What the answer must match."""
        return Grammar.json_object()


class SchemaFormat(_Body):
    """A value that a JSON schema describes."""

    type: Literal["json_schema"]
    json_schema: _Schema

    def grammar(self) -> Grammar | None:
        """What the answer must match; without a schema any object."""
        schema = self.json_schema.schema_
        return Grammar.json_object() if schema is None else Grammar.json_schema(schema)


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]
"""What a chat's answer must be like."""
