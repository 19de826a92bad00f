"""Many clients at once against one server: what they get is what each would get alone, whatever the others do.

Clients hold conversations as their kind does (whole history, or by name), streamed or not; between turns they send what
is no request, bodies that are too large, read slowly, or go away in the middle of an answer. Where the server may be
killed they go on once it is there again. Every answer that came whole is asked again of an engine that has no store and
serves nobody else.

Not here: what must hold (test_soak), the server (server_kit).
"""

from __future__ import annotations

import dataclasses
import json
import random
import threading
import time
from collections.abc import Iterable
from typing import Any

import httpx2
import numpy as np

from ca_jax.engine import Engine
from tests import engine_kit as kit
from tests import server_kit as sk
from tests.server_kit import assistant, user

MAX_TOKENS = 12
START_S = 180.0  # That a process may take to begin.
_LONGEST = 360  # Tokens of a history, of a window of 512; then another conversation begins.
_WORDS = ("sea", "stone", "lamp", "river", "glass", "north", "seven", "paper", "cloud", "wheel")
_CHAT = "/v1/chat/completions"


@dataclasses.dataclass(frozen=True)
class Resumed:
    """A conversation that was gone on with behind a kill."""

    name: str
    num_kills: int
    """Kills before, the last of which the client had met."""
    by_name: bool
    """Whether by name alone."""
    cached_tokens: int
    """Of the answer."""


@dataclasses.dataclass
class Report:
    """What came of a run."""

    num_turns: int = 0
    """Answers that came whole."""
    num_left: int = 0
    """Answers that their clients left in the middle."""
    num_refused: int = 0
    """What is no request, refused as it should be."""
    refusals: list[int] = dataclasses.field(default_factory=list)
    """Of each answer that was asked for, how often its client was told to come again, and did when it was told."""
    num_broken_off: int = 0
    """Requests that a kill took."""
    num_ahead: int = 0
    """Conversations that the server knew an answer of which had not got through: 409, and all of it was sent."""
    num_kills: int = 0
    """Of the server, counted before it begins again."""
    resumed: list[Resumed] = dataclasses.field(default_factory=list)
    cached_tokens: int = 0
    prompt_tokens: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    """Answers that are not those of the same history served alone."""
    num_ties: int = 0
    """Of all answers, those that differ where two tokens are equally likely but for rounding."""
    failures: list[str] = dataclasses.field(default_factory=list)
    """What should not have been told or not have happened."""
    ttft_s: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Asked:
    """An answer that came whole, and what it answers."""

    messages: list[dict[str, str]]
    text: str


@dataclasses.dataclass(frozen=True)
class Crowd:
    """Clients to be."""

    url: str
    """Of the server."""
    max_body_bytes: int
    """More than that the server refuses."""
    num_clients: int
    num_turns: int
    """Of each."""
    seed: int = 0
    is_killed: bool = False
    """Whether the server may be killed and begin again."""

    def talk(self, report: Report) -> tuple[Report, list[Asked]]:
        """Does all of it."""
        lock = threading.Lock()
        clients = [_Client(self, self.seed + number, report, lock) for number in range(self.num_clients)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        return report, [asked for client in clients for asked in client.asked]


class _Client(threading.Thread):
    """One client. Its choices follow from its seed; what comes when does not."""

    def __init__(self, crowd: Crowd, seed: int, report: Report, lock: threading.Lock) -> None:
        super().__init__(daemon=True)
        self._crowd = crowd
        self._random = random.Random(seed)
        self._report = report
        self._lock = lock
        self._seed = seed
        self._by_name = bool(seed % 2)
        self._begin()
        self._num_refused = 0  # In a row.
        self._http: httpx2.Client
        self.asked: list[Asked] = []

    def _begin(self) -> None:
        self._history: list[dict[str, str]] = []
        self._said: dict[str, str] | None = None  # What is not answered yet.
        self._stands: dict[str, str] = {}  # The name of the conversation, and its state.
        self._is_restarted = False  # Nothing came yet from the process that is there now.
        self._num_kills = 0  # Before that process.

    def run(self) -> None:
        try:
            with httpx2.Client(base_url=self._crowd.url, timeout=sk.DEADLINE_S) as self._http:
                done = 0
                while done < self._crowd.num_turns:
                    try:
                        self._disturb()
                        done += self._turn()
                    except httpx2.TransportError:
                        if not self._crowd.is_killed:
                            raise
                        self._count(num_broken_off=1)
                        sk.wait_for(lambda: sk.is_ready(self._crowd.url), START_S, 0.2)
                        self._is_restarted, self._num_kills = bool(self._stands), self._report.num_kills
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _turn(self) -> bool:
        """Asks for one answer; whether it came whole."""
        draw = self._random
        if self._said is None and sum(len(message["content"]) + 16 for message in self._history) > _LONGEST:
            self._begin()
        if self._said is None:
            self._said = user(f"{self._seed} {' '.join(draw.choices(_WORDS, k=draw.randint(2, 8)))}")
        body: dict[str, Any] = {"model": sk.MODEL, "temperature": 0, "max_tokens": MAX_TOKENS}
        body["messages"] = [*self._history, self._said]
        named = body | {"messages": [self._said], **self._stands} if self._by_name and self._stands else None
        kind = draw.random()
        leaves = 0.75 < kind <= 0.9 and not self._crowd.is_killed
        ask = self._whole if kind < 0.4 else lambda body: self._streamed(body, kind > 0.9, leaves)
        came = ask(named or body)
        if came is None:  # An answer did not get through: the server stands behind it.
            known = self._http.get(f"/v1/sessions/{self._stands['session_id']}").json()["messages"]
            if not self._is_restarted or known[: len(self._history) + 1] != body["messages"]:
                self._fail("its conversation stands elsewhere")
            self._count(num_ahead=1)
            came = ask(body)
        return bool(came)

    def _whole(self, body: dict[str, Any]) -> bool | None:
        response = self._http.post(_CHAT, json=body)
        if response.status_code != 200:
            return self._refused(response)
        self._note_served()
        answer = response.json()
        self._take(body, answer["choices"][0]["message"]["content"], answer, answer["usage"])
        return True

    def _streamed(self, body: dict[str, Any], slowly: bool, leaves: bool) -> bool | None:
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        text, usage, stands, num_events = "", None, {}, 0
        with self._http.stream("POST", _CHAT, json=body) as response:
            if response.status_code != 200:
                response.read()
                return self._refused(response)
            self._note_served()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(f"a stream told {event}")
                stands |= event
                usage = event["usage"] or usage
                text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                num_events += 1
                if leaves and num_events > 3:
                    break
                if slowly:
                    time.sleep(0.01)
        if leaves and usage is None:
            self._resume(stands["session_id"], text)
            return False
        self._take(body, text, stands, usage)
        return True

    def _take(self, body: dict[str, Any], text: str, stands: dict[str, Any], usage: dict[str, Any]) -> None:
        """Takes an answer that came whole."""
        cached, before = usage["prompt_tokens_details"]["cached_tokens"], self._stands.get("session_id")
        self._history.append(self._said)
        self.asked.append(Asked(list(self._history), text))
        self._history.append(assistant(text))
        self._stands, self._said = {name: stands[name] for name in ("session_id", "session_state")}, None
        if "session_id" in body and self._stands["session_id"] != before:
            self._fail("another session answered")
        with self._lock:
            self._report.ttft_s.append(usage["ca_jax"]["ttft_s"])
            if self._is_restarted:
                self._report.resumed.append(Resumed(before, self._num_kills, "session_id" in body, cached))
        self._is_restarted = False
        self._count(num_turns=1, cached_tokens=cached, prompt_tokens=usage["prompt_tokens"])

    def _resume(self, session_id: str, text: str) -> None:
        """After it went away: by name it asks what is there by now; else it goes on with what it has read, or not."""
        self._count(num_left=1)
        if self._by_name:
            shown: dict[str, Any] = {}
            path = f"/v1/sessions/{session_id}"
            sk.wait_for(lambda: not (shown.update(self._http.get(path).json()) or shown.get("busy")))
            self._history = shown["messages"]
            self._stands = {"session_id": session_id, "session_state": shown["session_state"]}
        elif text and self._random.random() < 0.5:
            self._history += [self._said, assistant(text)]
        self._said = None

    def _disturb(self) -> None:
        """Now and then something that is no request."""
        kind = self._random.random()
        if kind > 0.1:
            return
        wanted, content = [
            (400, b'{"model": "tiny", "messages": [{'),
            (400, b'{"model": "tiny", "messages": []}'),
            (404, b'{"model": "gpt-4", "messages": [{"role": "user", "content": "x"}]}'),
            (413, b" " * (self._crowd.max_body_bytes + 1)),
        ][int(kind * 40)]
        response = self._http.post(_CHAT, content=content, headers={"Content-Type": "application/json"})
        self._count(num_refused=1)
        if response.status_code != wanted or "Traceback" in response.text:
            self._fail(f"there must be {wanted}, got {response.status_code}: {response.text[:200]}")

    def _refused(self, response: Any) -> bool | None:
        """False: it is to come again, and now may; None: its conversation stands elsewhere."""
        if response.status_code == 429:
            self._num_refused += 1
            time.sleep(int(response.headers["Retry-After"]))  # As openai's client does.
            return False
        if response.status_code == 409:
            return None
        raise RuntimeError(f"{response.status_code}: {response.text[:200]}")

    def _note_served(self) -> None:
        with self._lock:
            self._report.refusals.append(self._num_refused)
        self._num_refused = 0

    def _count(self, **numbers: int) -> None:
        with self._lock:
            for name, number in numbers.items():
                setattr(self._report, name, getattr(self._report, name) + number)

    def _fail(self, why: str) -> None:
        with self._lock:
            self._report.failures.append(f"client {self._seed}: {why}")


def limits(directory: object, max_queue: int = 40) -> dict[str, Any]:
    """Of a server whose tiers and tables overflow: what `server_kit.running` takes, SSD in `directory`."""
    server = {"max_queue": max_queue, "max_body_bytes": 1 << 16, "max_open_sessions": 48}
    return {"store": sk.ssd_store(directory, dram_gib=0.03, ssd_gib=0.1), "server": server}


def check_all(all_asked: Iterable[Asked], report: Report) -> None:
    """Holds each answer against that of an engine that serves nobody else."""
    with kit.small_engine(store=kit.STORE_OFF) as alone:
        for asked in all_asked:
            _check(alone, asked, report)


def _check(alone: Engine, asked: Asked, report: Report) -> None:
    """Near ties are told apart by the logits."""
    session = alone.session()
    expected = "".join(session.send(asked.messages, max_tokens=MAX_TOKENS))
    num_prompt = session.usage.prompt_tokens if session.usage is not None else 0
    ids = session.token_ids
    session.close()
    if asked.text == expected:
        return
    same = next(i for i, (a, b) in enumerate(zip(f"{asked.text}\0", f"{expected}\0", strict=False)) if a != b)
    logits, _ = kit.full_pass(ids[: num_prompt + same])
    likeliest = np.sort(logits[-1])[-2:]
    if same < min(len(asked.text), len(expected)) and likeliest[1] - likeliest[0] < 1e-3:
        report.num_ties += 1
        return
    report.wrong.append(f"{asked.messages[-1]['content']!r}: there must be {expected!r}, got {asked.text!r}")
