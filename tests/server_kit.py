"""What the server's tests share: the real server over the tiny model, on a port of this machine, and clients of it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx2
import openai
import uvicorn
from starlette.types import ASGIApp

from ca_jax.engine import Engine
from ca_jax.server.app import make_app
from ca_jax.server.config import ServerConfig
from ca_jax.server.engine_loop import EngineLoop
from ca_jax.server.service import Service
from ca_jax.server.state import ServerState
from ca_jax.server.tenants import Tenants
from ca_jax.storage.config import StoreConfig
from ca_jax.storage.store import AttentionStore
from tests import engine_kit as kit

MODEL = "tiny"
DEADLINE_S = 60.0


@dataclasses.dataclass
class Running:
    """A server that runs."""

    url: str
    state: ServerState
    server: uvicorn.Server

    @property
    def engine(self) -> Engine:
        assert self.state.engine is not None
        return self.state.engine

    @property
    def service(self) -> Service:
        assert self.state.service is not None
        return self.state.service

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, timeout=DEADLINE_S, **options)

    def http(self, key: str | None = None) -> httpx2.Client:
        return http(self.url, key)


def wait_for(holds: Callable[[], bool], deadline_s: float = DEADLINE_S, every_s: float = 0.005) -> None:
    """Waits for what other threads, or processes, bring about."""
    give_up_s = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < give_up_s, "what was waited for did not come"
        time.sleep(every_s)


@contextlib.contextmanager
def running(
    tenants: Tenants | None = None,
    server: dict[str, Any] | None = None,
    wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    make_engine: Callable[..., Engine] = kit.small_engine,
    start_s: float = DEADLINE_S,
    **changes: Any,
) -> Iterator[Running]:
    """A server over an engine of the tiny model, or of another.

    Args:
      tenants: whose requests are.
      server: what of its config is not as in most tests.
      wrap: is put around its application.
      make_engine: gives the engine.
      start_s: how long that may take.
      changes: of the engine's config.
    """
    with starting(lambda: make_engine(**changes), tenants, server, wrap) as started:
        state = started.state
        wait_for(lambda: state.status == "ok" or state.failure is not None, start_s)
        assert state.failure is None
        yield started


@contextlib.contextmanager
def starting(
    make_engine: Callable[[], Engine],
    tenants: Tenants | None = None,
    server: dict[str, Any] | None = None,
    wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app,
) -> Iterator[Running]:
    """A server that listens, whether its engine is ready or not."""
    config = ServerConfig(**{"served_model_name": MODEL, "shutdown_grace_s": 5.0, **(server or {})})
    app = make_app(make_engine, config, tenants)
    uvicorn_config = uvicorn.Config(
        wrap(app), host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=5
    )
    served = uvicorn.Server(uvicorn_config)
    thread = threading.Thread(target=served.run, daemon=True)
    thread.start()
    state: ServerState = app.state.server
    try:
        wait_for(lambda: served.started or not thread.is_alive())
        assert served.started
        port = served.servers[0].sockets[0].getsockname()[1]
        yield Running(f"http://127.0.0.1:{port}", state, served)
    finally:
        state.stopping = True
        served.should_exit = True
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def ssd_store(directory: Any, **changes: Any) -> StoreConfig:
    """A store with an SSD tier in a directory."""
    sizes = {"dram_gib": 0.05, "ssd_gib": 0.2, "ssd_free_floor_gib": 0.0, "block_tokens": kit.BLOCK_TOKENS}
    return StoreConfig(ssd_dir=str(directory), **{**sizes, **changes})


class CountedStore:
    """A store, and how often each of its methods was called, and found nothing or something."""

    def __init__(self, store: AttentionStore) -> None:
        self.store = store
        self.calls: collections.Counter[tuple[str, bool]] = collections.Counter()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)
        if not callable(method):
            return method

        def call(*args: Any, **options: Any) -> Any:
            found = method(*args, **options)
            self.calls[name, found is not None and found != 0] += 1
            return found

        return call


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A coroutine as a test: run in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **options), DEADLINE_S))

    return run


@contextlib.contextmanager
def held(loop: EngineLoop) -> Iterator[threading.Event]:
    """The engine's thread does nothing for as long as the block lasts, or until the event is set."""
    begun, let_go = threading.Event(), threading.Event()
    loop.tell(lambda engine: (begun.set(), let_go.wait(DEADLINE_S)))
    assert begun.wait(DEADLINE_S)
    try:
        yield let_go
    finally:
        let_go.set()


def wait_until_idle(server: Running) -> None:
    """Waits until nothing runs, also of what the engine's thread had not been told yet."""
    obeyed = threading.Event()
    server.service.loop.tell(lambda engine: obeyed.set())
    assert obeyed.wait(DEADLINE_S)
    service = server.service
    wait_for(lambda: service.admission.answers.total() == service.loop.num_jobs == 0)


async def wait_until(holds: Callable[[], bool]) -> None:
    """Waits in an event loop for what other threads bring about."""
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.002)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def chat(client: openai.OpenAI, messages: list[dict[str, str]], max_tokens: int = 8, **options: Any) -> Any:
    """A greedy answer, unless `options` say otherwise."""
    asked = {"model": MODEL, "temperature": 0, "max_tokens": max_tokens, **options}
    return client.chat.completions.create(messages=messages, **asked)


def text_of(answer: Any) -> str:
    return answer.choices[0].message.content


def cached(answer: Any) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


def http(url: str, key: str | None = None) -> httpx2.Client:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx2.Client(base_url=url, headers=headers, timeout=DEADLINE_S)


def is_ready(url: str) -> bool:
    """Whether a server is there and says so."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health") as response:
        return json.load(response) == {"status": "ok"}
    return False
