"""What of an answer's text is content, reasoning, or calls of tools: read piece by piece, as models write them.

    parser = parser_of(job)
    delta = parser.feed(piece) ...; delta = parser.finish(is_whole)

A text is cut at its family's markers first (`Markers`), which never splits one, and each family has a small machine
that is told of markers and of the text between them. Whatever pieces a text comes in, what is read is the same. What is
no call after all is content.

Not here: which family a template is of, how tools are asked for (`tool_formats`), HTTP.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ca_jax.session import Job
from ca_jax.turns.conversations import Message
from ca_jax.turns.requests import FinishReason
from ca_jax.turns.text import overlap


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallDelta:
    """What became certain of a call."""

    index: int
    """Which of the answer's."""
    call_id: str
    """Names it; the same with each of its deltas."""
    name: str
    """Of the function; the same likewise."""
    arguments: str = ""
    """What is new of its arguments, JSON mostly."""
    is_first: bool = False
    """Whether this announces it."""
    is_whole: bool = False
    """Whether this is the last of it. A call that was cut has no such delta."""


@dataclasses.dataclass(kw_only=True)
class ReplyDelta:
    """What a piece of text gave."""

    content: str = ""
    """What is said."""
    reasoning: str = ""
    """What was thought before that."""
    calls: list[CallDelta] = dataclasses.field(default_factory=list)
    """Of calls, in order."""

    def __add__(self, other: ReplyDelta) -> ReplyDelta:
        """What two pieces gave, one behind the other."""
        return ReplyDelta(
            content=self.content + other.content,
            reasoning=self.reasoning + other.reasoning,
            calls=self.calls + other.calls,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A whole call."""

    call_id: str
    """Names it; what the tool gives is told with this."""
    name: str
    """Of the function."""
    arguments: str
    """As the model wrote them."""

    def as_openai(self) -> dict[str, Any]:
        """As OpenAI's messages have it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """A whole answer."""

    content: str
    """What is said."""
    reasoning: str
    """What was thought before that."""
    calls: tuple[ToolCall, ...]
    """Whole calls."""

    def message(self) -> Message:
        """As conversations keep it, and as clients send it back."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.as_openai() for call in self.calls]
        return message


class Markers:
    """Cuts a text that comes in pieces at some markers, and never within one."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = sorted(markers, key=len, reverse=True)
        self._held = ""

    def feed(self, text: str) -> list[tuple[bool, str]]:
        """What is certain with a piece: markers (True) and text between them, in order."""
        if not self._markers:
            return [(False, text)] * bool(text)
        found, pending = list[tuple[bool, str]](), self._held + text
        while at := min(
            ((pending.find(each), -len(each), each) for each in self._markers if each in pending), default=None
        ):
            start, _, marker = at
            found += [(False, pending[:start])] * bool(start) + [(True, marker)]
            pending = pending[start + len(marker) :]
        keep = max((overlap(pending, each) for each in self._markers), default=0)
        self._held = pending[len(pending) - keep :]
        return found + [(False, pending[: len(pending) - keep])] * (len(pending) > keep)

    def rest(self) -> str:
        """What was held back, at the end."""
        rest, self._held = self._held, ""
        return rest


class ToolParser:
    """Reads one answer. Each family reads calls in its own way (`Family`).

    Args:
      family: how calls are written; None: none are.
      reasoning: what stands before and behind what is thought, in front of everything else; None: nothing is.
      is_thinking: whether the answer begins in the middle of that.
      call_id: names the call of a number.
      tools: by name of a function, the schema of its arguments.
    """

    def __init__(
        self,
        family: Callable[[ToolParser], Family] | None = None,
        *,
        reasoning: tuple[str, str] | None = None,
        is_thinking: bool = False,
        call_id: Callable[[int], str] = "call_{}".format,
        tools: Mapping[str, Any] | None = None,
    ) -> None:
        self.tools = tools or {}
        """By name of a function, the schema of its arguments."""
        self._family = None if family is None else family(self)
        self._reasoning = reasoning
        self._is_thinking = is_thinking
        self._has_begun = self._has_thought = False  # Whether something was said or called, or thought.
        self._call_id = call_id
        self._markers = Markers([*(reasoning or ()), *(() if self._family is None else self._family.markers)])
        self._delta = ReplyDelta()
        self._blank = {"content": "", "reasoning": ""}  # What may turn out to stand at the end of either.
        self._call_ids: list[str] = []

    def feed(self, text: str) -> ReplyDelta:
        """Takes a piece of text and gives what became certain."""
        for is_marker, part in self._markers.feed(text):
            self._take(is_marker, part)
        return self._taken()

    def finish(self, is_whole: bool) -> ReplyDelta:
        """The rest, at the end of the answer. `is_whole`: it ended by itself; else it was cut short."""
        if rest := self._markers.rest():
            self._take(False, rest)
        if self._family is not None and not self._is_thinking:
            self._family.end(is_whole)
        if not self._call_ids:
            self._delta.content += self._blank["content"]
        return self._taken()

    def _taken(self) -> ReplyDelta:
        taken, self._delta = self._delta, ReplyDelta()
        return taken

    def _take(self, is_marker: bool, part: str) -> None:
        if self._reasoning is not None and is_marker and part in self._reasoning:
            if part == self._reasoning[0] and not self._has_begun:
                self._is_thinking = True
                return
            if part == self._reasoning[1] and self._is_thinking:
                self._is_thinking, self._has_begun = False, False
                self._blank["reasoning"] = ""
                return
        if self._is_thinking:
            self.think(part)
        elif self._family is None:
            self.say(part)
        elif is_marker and part in self._family.markers:
            self._family.mark(part)
        else:
            self._family.text(part)

    # For families.

    def say(self, text: str) -> None:
        """Text is content. Blank lines behind reasoning are not, nor is white space that calls follow."""
        if self._reasoning is not None and not self._has_begun:
            text = text.lstrip("\r\n")
        if text:
            self._has_begun = True
            self._delta.content += self._behind("content", text, self._family is not None)

    def think(self, text: str) -> None:
        """Text is reasoning, without the line breaks around it."""
        if not self._has_thought:
            text = text.lstrip("\r\n")
        if text:
            self._has_thought = True
            self._delta.reasoning += self._behind("reasoning", text, True)

    def begin_call(self, call_id: str = "") -> int:
        """A call begins, which the model may have named; its number. What is blank before it is not said."""
        self._blank["content"], self._has_begun = "", True
        self._call_ids.append(call_id or self._call_id(len(self._call_ids)))
        return len(self._call_ids) - 1

    def call(self, index: int, name: str, arguments: str, *, is_first: bool = False, is_whole: bool = False) -> None:
        """Something of a call became certain."""
        delta = CallDelta(
            index=index,
            call_id=self._call_ids[index],
            name=name,
            arguments=arguments,
            is_first=is_first,
            is_whole=is_whole,
        )
        self._delta.calls.append(delta)

    def _behind(self, kind: str, text: str, holds: bool) -> str:
        """A text behind what was held back of its kind, without the white space at its end, which is."""
        text = self._blank[kind] + text
        shown = text.rstrip() if holds else text
        self._blank[kind] = text[len(shown) :]
        return shown


class Family(abc.ABC):
    """How one family of models writes calls: told of its markers and of the text between them, it tells the parser."""

    markers: tuple[str, ...] = ()
    """Where texts are cut."""

    def __init__(self, parser: ToolParser) -> None:
        self.parser = parser

    @abc.abstractmethod
    def mark(self, marker: str) -> None:
        """A marker comes."""

    @abc.abstractmethod
    def text(self, text: str) -> None:
        """Text comes."""

    @abc.abstractmethod
    def end(self, is_whole: bool) -> None:
        """The answer has ended, by itself or not."""


class ReplyReader:
    """Reads answers to one request, as often as it is asked to: the same text gives the same calls, with their ids.

    Args:
      make: gives a parser, told how calls are named.
      spelled: special tokens whose names are part of the text.
      seed: makes ids of calls; each answer has another.
      id_prefix, id_chars: what these begin with, and characters behind that.
    """

    def __init__(
        self,
        make: Callable[[Callable[[int], str]], ToolParser],
        spelled: frozenset[str],
        seed: str,
        id_prefix: str = "call_",
        id_chars: int = 24,
    ) -> None:
        self.spelled = spelled
        self._make, self._seed = make, seed
        self._id_prefix, self._id_chars = id_prefix, id_chars

    def parser(self) -> ToolParser:
        """A parser of the answer from its beginning on."""
        return self._make(self._call_id)

    def message(self, text: str, *, is_whole: bool) -> Message:
        """As of `turns.text.ReplyReader`."""
        return read(self.parser(), text, is_whole).message()

    def _call_id(self, index: int) -> str:
        return self._id_prefix + hashlib.sha256(f"{self._seed} {index}".encode()).hexdigest()[: self._id_chars]


def read(parser: ToolParser, text: str, is_whole: bool) -> Reply:
    """A whole text, read at once. A call that was cut is left out."""
    delta = parser.feed(text) + parser.finish(is_whole)
    arguments: dict[int, str] = {}
    calls: list[ToolCall] = []
    for call in delta.calls:
        arguments[call.index] = arguments.get(call.index, "") + call.arguments
        if call.is_whole:
            calls.append(ToolCall(call_id=call.call_id, name=call.name, arguments=arguments[call.index]))
    return Reply(content=delta.content, reasoning=delta.reasoning, calls=tuple(calls))


def parser_of(job: Job) -> ToolParser:
    """A parser of a job's answer; one that takes all of it as content where its request asked for nothing else."""
    reader = job.output.reader
    return reader.parser() if isinstance(reader, ReplyReader) else ToolParser()


def read_reply(job: Job) -> Reply:
    """The answer of a job that has ended."""
    return read(parser_of(job), job.output.text, job.finish_reason is FinishReason.STOP)


_ARGUMENTS = ("arguments", "parameters")


class JsonCall:
    """Reads one call that is an object in JSON, character by character: its name, and its arguments as they come.

    Args:
      parser: is told.
      needs_arguments: whether an object without arguments is no call.
      has_id: whether it may have an id, which the model will look for: then it is told of when it has ended.
    """

    def __init__(self, parser: ToolParser, *, needs_arguments: bool = False, has_id: bool = False) -> None:
        self._parser, self._needs_arguments, self._has_id = parser, needs_arguments, has_id
        self._call_id = ""
        self._depth = 0
        self.in_text = False
        """Whether what comes next is within a string."""
        self._escaped = False
        self._key = ""  # Of the value that comes.
        self._token = ""  # What was read of a key or value at depth 1.
        self._name: str | None = None
        self._arguments = ""
        self._num_told = 0
        self._index: int | None = None
        self.raw = ""
        """All that was read."""
        self.is_done = False
        """Whether the object has ended."""

    @property
    def is_told(self) -> bool:
        """Whether the call was announced."""
        return self._index is not None

    def feed(self, text: str) -> str:
        """Takes text and gives back what stands behind the object's end."""
        for at, character in enumerate(text):
            self.raw += character
            self._step(character)
            if self.is_done:
                self._end()
                return text[at + 1 :]
        self._tell()
        return ""

    def _step(self, character: str) -> None:
        if self.in_text:
            self._token += character
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self.in_text = False
        elif character in "{[":
            self._depth += 1
            self._token += character if self._depth > 1 else ""
        elif character in "}]":
            self._depth -= 1
            if self._depth <= 0:
                self._value_ends()
                self.is_done = True
            else:
                self._token += character
        elif self._depth == 1 and character == ":" and not self._key:
            self._key, self._token = _text_of(self._token), ""
        elif self._depth == 1 and character == ",":
            self._value_ends()
        elif self._depth and (self._token or not character.isspace()):
            self.in_text = character == '"'
            self._token += character

    def _value_ends(self) -> None:
        if self._key == "name":
            self._name = _text_of(self._token) or None
        elif self._key in _ARGUMENTS:
            self._arguments = self._token.strip()
        elif self._key == "id" and self._has_id:
            self._call_id = _text_of(self._token)
        self._key = self._token = ""

    def _tell(self) -> None:
        """Tells what is certain of the arguments; those that are a text are told once it has ended."""
        arguments = self._arguments
        if not arguments and self._key in _ARGUMENTS and (self._depth > 1 or self.in_text):
            arguments = self._token  # Not at its end: no white space there is around it.
        if self._name is None or not arguments.startswith("{") or self._has_id:
            return
        self._announce()
        if self._index is not None and len(arguments) > self._num_told:
            self._parser.call(self._index, self._name, arguments[self._num_told :])
            self._num_told = len(arguments)

    def _announce(self) -> None:
        if self._index is None and self._name is not None:
            self._index = self._parser.begin_call(self._call_id)
            self._parser.call(self._index, self._name, "", is_first=True)

    def _end(self) -> None:
        if self._name is None or (self._needs_arguments and not self._arguments):
            return
        self._announce()
        arguments = self._arguments or "{}"
        if arguments.startswith('"'):
            arguments = _text_of(arguments)
        if self._index is not None:
            self._parser.call(self._index, self._name, arguments[self._num_told :], is_whole=True)


def _text_of(token: str) -> str:
    """The text that a string in JSON is; empty where it is none."""
    try:
        found = json.loads(token)
    except (ValueError, RecursionError):
        return ""
    return found if isinstance(found, str) else ""
