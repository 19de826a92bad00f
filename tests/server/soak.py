"""Many clients at once against one server: what they get is what each would get alone, whatever the others do.

Clients hold conversations as their kind does (whole history, or by name), streamed or not; between turns they send what
is no request, bodies that are too large, read slowly, or go away in the middle of an answer. Every answer that came
whole is asked again of an engine that has no store and serves nobody else. Clients are another process than the server,
so that memory is the server's alone.

Not here: what must hold (test_soak), the server (server_kit).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import multiprocessing
import random
import threading
import time
from typing import Any

import httpx2
import numpy as np
import psutil

from ca_jax.engine import Engine
from ca_jax.storage.config import StoreConfig
from tests import engine_kit as kit
from tests import server_kit as sk
from tests.server_kit import assistant, user

MAX_TOKENS = 12
_LONGEST = 360  # Tokens of a history, of a window of 512; then another conversation begins.
_WORDS = ("sea", "stone", "lamp", "river", "glass", "north", "seven", "paper", "cloud", "wheel")


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
    cached_tokens: int = 0
    prompt_tokens: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    """Answers that are not those of the same history served alone."""
    num_ties: int = 0
    """Of all answers, those that differ where two tokens are equally likely but for rounding."""
    failures: list[str] = dataclasses.field(default_factory=list)
    """What should not have been told or not have happened."""
    ttft_s: list[float] = dataclasses.field(default_factory=list)
    rss: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    """Resident bytes of the server's process by seconds since the start."""
    seconds: float = 0.0


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
    seed: int

    def talk(self) -> tuple[Report, list[Asked]]:
        """Does all of it; nothing of the memory is told."""
        report, lock = Report(), threading.Lock()
        seeds = range(self.seed, self.seed + self.num_clients)
        clients = [_Client(self, seed, self.num_turns, report, lock) for seed in seeds]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        return report, [asked for client in clients for asked in client.asked]


class _Client(threading.Thread):
    """One client. Its choices follow from its seed; what comes when does not."""

    def __init__(self, crowd: Crowd, seed: int, num_turns: int, report: Report, lock: threading.Lock) -> None:
        super().__init__(daemon=True)
        self._crowd = crowd
        self._random = random.Random(seed)
        self._num_turns = num_turns
        self._report = report
        self._lock = lock
        self._seed = seed
        self._by_name = bool(seed % 2)
        self._history: list[dict[str, str]] = []
        self._session_id: str | None = None
        self._num_refused = 0  # In a row.
        self._http: httpx2.Client | None = None
        self.asked: list[Asked] = []

    def run(self) -> None:
        try:
            with httpx2.Client(base_url=self._crowd.url, timeout=sk.DEADLINE_S) as self._http:
                done = 0
                while done < self._num_turns:
                    self._disturb()
                    done += self._turn()
        except Exception as error:
            with self._lock:
                self._report.failures.append(f"client {self._seed}: {type(error).__name__}: {error}")

    def _turn(self) -> bool:
        """Asks for one answer; whether it came whole."""
        if sum(len(message["content"]) + 16 for message in self._history) > _LONGEST:
            self._history, self._session_id = [], None
        draw = self._random
        words = " ".join(draw.choices(_WORDS, k=draw.randint(2, 8)))
        said = user(f"{self._seed} {words}")
        named = self._by_name and self._session_id is not None
        body: dict[str, Any] = {"model": sk.MODEL, "temperature": 0, "max_tokens": MAX_TOKENS}
        body["messages"] = [said] if named else [*self._history, said]
        if named:
            body["session_id"] = self._session_id
        kind = draw.random()
        if kind < 0.4:
            return self._whole(body, said)
        return self._streamed(body, said, slowly=kind > 0.9, leaves=0.75 < kind <= 0.9)

    def _whole(self, body: dict[str, Any], said: dict[str, str]) -> bool:
        response = self._http.post("/v1/chat/completions", json=body)
        if not self._is_served(response):
            return False
        answer = response.json()
        self._take(said, answer["choices"][0]["message"]["content"], answer["session_id"], answer["usage"])
        return True

    def _streamed(self, body: dict[str, Any], said: dict[str, str], slowly: bool, leaves: bool) -> bool:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        text, usage, session_id, num_events = "", None, None, 0
        with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                return self._is_served(response)
            self._note_served()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(f"a stream told {event}")
                session_id = event.get("session_id", session_id)
                usage = event["usage"] or usage
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                num_events += 1
                if leaves and num_events > 3:
                    break
                if slowly:
                    time.sleep(0.01)
        if leaves and usage is None:
            self._resume(session_id, said, text)
            return False
        self._take(said, text, session_id, usage)
        return True

    def _take(self, said: dict[str, str], text: str, session_id: str, usage: dict[str, Any]) -> None:
        self._history.append(said)
        self.asked.append(Asked(list(self._history), text))
        self._history.append(assistant(text))
        with self._lock:
            report = self._report
            if self._session_id is not None and session_id != self._session_id and self._by_name:
                report.failures.append(f"client {self._seed}: another session answered")
            report.num_turns += 1
            report.ttft_s.append(usage["ca_jax"]["ttft_s"])
            report.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
            report.prompt_tokens += usage["prompt_tokens"]
        self._session_id = session_id

    def _resume(self, session_id: str | None, said: dict[str, str], text: str) -> None:
        """After it went away: by name it asks what is there by now; else it goes on with what it has read, or not."""
        with self._lock:
            self._report.num_left += 1
        if self._by_name and session_id is not None:
            self._session_id = session_id
            path, shown = f"/v1/sessions/{session_id}", {}
            sk.wait_for(lambda: not (shown.update(self._http.get(path).json()) or shown.get("busy")))
            self._history = shown["messages"]
        elif text and self._random.random() < 0.5:
            self._history += [said, assistant(text)]

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
        headers = {"Content-Type": "application/json"}
        response = self._http.post("/v1/chat/completions", content=content, headers=headers)
        with self._lock:
            self._report.num_refused += 1
            if response.status_code != wanted or "Traceback" in response.text:
                self._report.failures.append(
                    f"there must be {wanted}, got {response.status_code}: {response.text[:200]}"
                )

    def _is_served(self, response: Any) -> bool:
        if response.status_code == 429:
            self._num_refused += 1
            time.sleep(int(response.headers["Retry-After"]))  # As openai's client does.
            return False
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {response.text[:200]}")
        self._note_served()
        return True

    def _note_served(self) -> None:
        with self._lock:
            self._report.refusals.append(self._num_refused)
        self._num_refused = 0


def limits(directory: str, max_queue: int = 40) -> dict[str, Any]:
    """Of a server whose tiers and tables overflow: what `server_kit.running` takes, SSD in `directory`."""
    tokens = kit.BLOCK_TOKENS
    store = StoreConfig(dram_gib=0.03, ssd_dir=directory, ssd_gib=0.1, ssd_free_floor_gib=0.0, block_tokens=tokens)
    return {"store": store, "server": {"max_queue": max_queue, "max_body_bytes": 1 << 16, "max_open_sessions": 48}}


def soak(server: sk.Running, num_clients: int, num_turns: int, seed: int = 0) -> Report:
    """Runs clients until they have so many answers together, or a few more, and checks each."""
    body_bytes, each = server.state.config.max_body_bytes, -(-num_turns // num_clients)
    crowd = Crowd(server.url, body_bytes, num_clients, each, seed)
    rss: list[tuple[float, int]] = []
    process = psutil.Process()
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(_is_there).result()
        started_s = time.perf_counter()
        talking = pool.submit(crowd.talk)
        while not talking.done():
            rss.append((time.perf_counter() - started_s, process.memory_info().rss))
            concurrent.futures.wait((talking,), timeout=0.25)
        report, all_asked = talking.result()
    report.seconds = time.perf_counter() - started_s
    report.rss = [*rss, (report.seconds, process.memory_info().rss)]
    server.wait_until(lambda: server.service.num_requests == 0 and server.engine.num_jobs == (0, 0))
    with kit.small_engine(store=kit.STORE_OFF) as alone:
        for asked in all_asked:
            check(alone, asked, report)
    return report


def _is_there() -> bool:
    """Answers from the other process once that has begun and imported this."""
    return True


def check(alone: Engine, asked: Asked, report: Report) -> None:
    """Holds an answer against that of an engine that serves nobody else; near ties are told apart by the logits."""
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
