"""Clients of every kind at once, through their own libraries: chats, schemas, agents with tools, Responses, Messages.

Some leave in the middle of an answer, some go back to an earlier response. Every answer that came whole is asked again,
with its whole history, of a server that has no store and serves nobody else.

Not here: clients that send nonsense or read slowly, and servers that are killed (soak); what must hold (test_soak).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import random
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import anthropic
import openai

from tests import server_kit as sk
from tests.server.test_tools import ADD, LOOK, expect_call
from tests.server_kit import assistant, user

TOOLS = [LOOK, ADD]
_WORDS = ("sea", "stone", "lamp", "river", "glass", "north", "seven", "paper", "cloud", "wheel")
_LONGEST = 200  # Characters of a history, of a window of 512 bytes; then another conversation begins.
_MAX_TOKENS = 12
_MAX_SHAPED = 120  # Tokens in which an answer of a shape, or a call, ends.
_TIE = 1e-3  # Of log-probabilities that rounding may put in either order.


@dataclasses.dataclass
class Asked:
    """An answer that came whole, and the chat completion that it must equal."""

    messages: list[dict[str, Any]]
    options: dict[str, Any]
    text: str
    calls: list[tuple[str, str]]
    """Names and arguments."""


@dataclasses.dataclass
class Report:
    """What came of a run."""

    asked: list[Asked] = dataclasses.field(default_factory=list)
    num_by_kind: dict[str, int] = dataclasses.field(default_factory=dict)
    num_left: int = 0
    """Answers that their clients left in the middle."""
    cached_tokens: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)
    num_ties: int = 0


def talk(url: str, num_clients: int, num_turns: int, seed: int = 0) -> Report:
    """Has clients talk, each of its kind, until each has had so many answers."""
    report, lock = Report(), threading.Lock()
    clients = [
        _KINDS[number % len(_KINDS)](url, num_turns, seed + number, report, lock) for number in range(num_clients)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return report


class _Client(threading.Thread):
    """One client: its choices follow from its seed. `turn` asks for one answer."""

    turn: Callable[[], None]

    def __init__(self, url: str, num_turns: int, seed: int, report: Report, lock: threading.Lock) -> None:
        super().__init__(daemon=True)
        self._url, self._num_turns, self._report, self._lock, self._seed = url, num_turns, report, lock, seed
        self.draw = random.Random(seed)
        self.history: list[dict[str, Any]] = []
        self._num_done = 0

    def run(self) -> None:
        options: dict[str, Any] = {"api_key": "none", "timeout": sk.DEADLINE_S, "max_retries": 100}
        try:
            with (
                openai.OpenAI(base_url=f"{self._url}/v1", **options) as self.client,
                anthropic.Anthropic(base_url=self._url, **options) as self.claude,
            ):
                while self._num_done < self._num_turns:
                    if sum(len(str(message.get("content"))) + 16 for message in self.history) > _LONGEST:
                        self.begin()
                    self.turn()
        except Exception as error:
            with self._lock:
                self._report.failures.append(f"{type(self).__name__} {self._seed}: {type(error).__name__}: {error}")

    def begin(self) -> None:
        """Another conversation."""
        self.history = []

    def words(self) -> dict[str, str]:
        """A message."""
        return user(f"{self._seed} {' '.join(self.draw.choices(_WORDS, k=self.draw.randint(2, 8)))}")

    def take(
        self, said: Sequence[dict[str, Any]], answer: dict[str, Any], cached: int, max_tokens: int, **options: Any
    ) -> None:
        """Notes an answer, which is a chat's message, to what was said behind the history, and adds both to that."""
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in answer.get("tool_calls") or ()]
        messages = [*self.history, *said]
        asked = Asked(messages, {"max_tokens": max_tokens, **options}, answer.get("content") or "", calls)
        self.history = [*messages, answer]
        self._num_done += 1
        with self._lock:
            self._report.asked.append(asked)
            kind = type(self).__name__
            self._report.num_by_kind[kind] = self._report.num_by_kind.get(kind, 0) + 1
            self._report.cached_tokens += cached

    def left(self) -> None:
        """Notes that it went away."""
        with self._lock:
            self._report.num_left += 1

    def chat(self, said: Sequence[dict[str, Any]], max_tokens: int, **options: Any) -> Any:
        """The choice that a chat completion of the whole history gives; some are left in the middle before."""
        messages = [*self.history, *said]
        if self.draw.random() < 0.15:
            with sk.chat(self.client, messages, max_tokens, stream=True, **options) as stream:
                for _ in zip(stream, range(self.draw.randint(1, 4)), strict=False):
                    pass
            self.left()
        answer = sk.chat(self.client, messages, max_tokens, **options)
        choice = answer.choices[0]
        kept = {name: value for name, value in choice.message.to_dict().items() if value is not None}
        self.take(said, kept, sk.cached(answer), max_tokens, **options)
        return choice


class Chats(_Client):
    """Sends the whole history."""

    def turn(self) -> None:
        self.chat([self.words()], _MAX_TOKENS)


class Shapes(_Client):
    """Asks for JSON of a schema, one of some texts, or a match of a regular expression; each that ends is one."""

    def turn(self) -> None:
        ways: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
            ({"extra_body": {"guided_choice": ["north", "south west"]}}, lambda text: text in ("north", "south west")),
            (
                {"extra_body": {"guided_regex": "[a-c]{2,6}[0-9]"}},
                lambda text: bool(re.fullmatch("[a-c]{2,6}[0-9]", text)),
            ),
            ({"response_format": {"type": "json_schema", "json_schema": _PLACE}}, _is_place),
        ]
        options, holds = self.draw.choice(ways)
        choice = self.chat([self.words()], _MAX_SHAPED, **options)
        if choice.finish_reason == "stop":
            assert holds(choice.message.content), f"{options}: {choice.message.content}"


_CODE = "[a-c]{2,6}[0-9]"
_SCHEMA = {
    "type": "object",
    "properties": {"at": {"enum": ["sea", "sky"]}, "depth": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["at", "depth"],
    "additionalProperties": False,
}
_PLACE = {"name": "place", "schema": _SCHEMA, "strict": True}


def _is_place(text: str) -> bool:
    found = json.loads(text)
    return found.keys() == {"at", "depth"} and found["at"] in ("sea", "sky") and 0 <= found["depth"] <= 99


class Agents(_Client):
    """Calls a tool, says what that gave, and so on."""

    def turn(self) -> None:
        calls = self.history[-1].get("tool_calls", ()) if self.history else ()
        said = [{"role": "tool", "tool_call_id": call["id"], "content": self.draw.choice(_WORDS)} for call in calls]
        choice = self.chat(said or [self.words()], _MAX_SHAPED, tools=TOOLS, extra_body={"guided_grammar": _CALL})
        assert choice.finish_reason == "tool_calls", f"a call must end, got {choice.finish_reason}"
        [call] = choice.message.tool_calls
        expect_call(call.function.name, json.loads(call.function.arguments))


_CALL = r"""
start: "<tool_call>\n{\"name\": \"" (look | add) "}}\n</tool_call>"
look: "look\", \"arguments\": {\"at\": \"" ("sea" | "sky") "\""
add: "add\", \"arguments\": {\"a\": " /[0-9]/ ", \"b\": " /[0-9]/
"""
"""Space for space as the template writes calls: the server goes on from what was said, where one that is told of the
call alone writes it anew."""


class Responses(_Client):
    """Goes on from its last response by id, at times from an earlier one, which forks, or leaves in the middle."""

    def begin(self) -> None:
        super().begin()
        self._places: list[tuple[str, list[dict[str, Any]]]] = []

    def turn(self) -> None:
        if not self.history:
            self.begin()
        asked: dict[str, Any] = {"model": sk.MODEL, "temperature": 0, "max_output_tokens": _MAX_TOKENS}
        if self._places:
            place = self.draw.choice(self._places) if self.draw.random() < 0.3 else self._places[-1]
            asked["previous_response_id"], self.history = place
        said = self.words()
        if self.draw.random() < 0.2:
            with self.client.responses.create(input=said["content"], stream=True, **asked) as events:
                for _ in zip(events, range(self.draw.randint(3, 8)), strict=False):
                    pass
            self.left()
        response = self.client.responses.create(input=said["content"], **asked)
        cached = response.usage.input_tokens_details.cached_tokens
        self.take([said], assistant(response.output_text), cached, _MAX_TOKENS)
        self._places.append((response.id, self.history))
        if self.draw.random() < 0.1:
            kept = self.client.responses.retrieve(response.id)
            assert kept.output_text == response.output_text


class Messages(_Client):
    """Anthropic's client, streamed or not."""

    def turn(self) -> None:
        said = self.words()
        asked: dict[str, Any] = {"model": sk.MODEL, "max_tokens": _MAX_TOKENS, "extra_body": {"temperature": 0}}
        asked["messages"] = [*self.history, said]
        if self.draw.random() < 0.5:
            with self.claude.messages.stream(**asked) as stream:
                message = stream.get_final_message()
        else:
            message = self.claude.messages.create(**asked)
        text = "".join(block.text for block in message.content)
        self.take([said], assistant(text), message.usage.cache_read_input_tokens or 0, _MAX_TOKENS)


_KINDS: Sequence[type[_Client]] = (Agents, Responses, Shapes, Messages, Chats)


def check_all(report: Report, url: str) -> None:
    """Holds each answer against that of a server that keeps nothing and serves nobody else."""
    with contextlib.closing(openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=sk.DEADLINE_S)) as alone:
        for asked in report.asked:
            options = dict(asked.options)
            answer = sk.chat(alone, asked.messages, options.pop("max_tokens"), logprobs=True, top_logprobs=2, **options)
            assert sk.cached(answer) == 0
            [choice] = answer.choices
            calls = [(each.function.name, each.function.arguments) for each in choice.message.tool_calls or ()]
            if (choice.message.content or "", calls) == (asked.text, asked.calls):
                continue
            if _is_tie(choice, asked):
                report.num_ties += 1
            else:
                expected = choice.message.content or calls
                report.wrong.append(f"{asked.messages[-1]}: must be {expected!r}, got {asked.text or asked.calls!r}")


def _is_tie(choice: Any, asked: Asked) -> bool:
    """Whether the first token that differs, or of a call any, was as likely as another one but for rounding."""
    texts = itertools.accumulate(token.token for token in choice.logprobs.content)
    for text, token in zip(texts, choice.logprobs.content, strict=True):
        first, second = (each.logprob for each in token.top_logprobs)
        if first - second < _TIE and (asked.calls or not asked.text.startswith(text)):
            return True
        if not asked.calls and not asked.text.startswith(text):
            return False
    return False
