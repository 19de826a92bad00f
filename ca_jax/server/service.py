"""Requests to jobs: who may come in, which conversations go on, how long it may take, and what comes of it.

Not here: HTTP (`app`), bodies (`bodies`, `answers`), the engine's thread (`engine_loop`).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from ca_jax.engine import Engine
from ca_jax.errors import CaJaxError, UnknownSessionError
from ca_jax.jobs import Job, Usage
from ca_jax.server.bodies import ChatRequest, CompletionRequest
from ca_jax.server.config import ServerConfig
from ca_jax.prompts import prompt_ids
from ca_jax.server.engine_loop import EngineLoop, Feed, LiveJob, Part
from ca_jax.server.errors import ApiError
from ca_jax.server.metrics import RequestMetrics
from ca_jax.server.router import Router
from ca_jax.server.tenants import Tenant
from ca_jax.session import Session

_KEPT_TIMES = 64  # Of the latest requests: how long others will have to wait is told by them.


@dataclasses.dataclass(frozen=True)
class Turns:
    """The answers of one request, being generated."""

    lives: list[LiveJob]
    """A job each."""
    sessions: list[Session]
    """Whose turns they are."""
    feed: Feed
    """Where what they give comes."""

    def parts(self) -> AsyncIterator[tuple[LiveJob, Part]]:
        """What each step gave, until all have ended; see `Feed.parts`."""
        return self.feed.parts(len(self.lives))

    def usages(self) -> list[Usage]:
        """What each took, once all have ended."""
        return [live.job.usage() for live in self.lives]


class Service:
    """Serves requests with one engine. Belongs to the event loop.

    Args:
      engine: warm; nobody else runs it.
      config: how.
      metrics: where requests are counted.
    """

    def __init__(self, engine: Engine, config: ServerConfig, metrics: RequestMetrics) -> None:
        self.config = config
        self.metrics = metrics
        self.model_name = config.served_model_name or engine.model.name
        """The name that clients give."""
        self.window = engine.window
        """Most tokens of a prompt and its answer."""
        self.tokenizer = engine.model.tokenizer
        """Of the model; None where it has none."""
        self.router = Router(engine, config.max_open_sessions)
        """Which conversation a request goes on with; for the engine's thread alone."""
        self.loop = EngineLoop(engine, on_ended=self.router.ended)
        """The way to the engine."""
        self.closing = False
        """Whether nothing more is taken in."""
        self._slots = engine.config.max_batch_size
        self._of_tenant: collections.Counter[str] = collections.Counter()
        self._num_requests = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._seconds: collections.deque[float] = collections.deque(maxlen=_KEPT_TIMES)

    @property
    def num_requests(self) -> int:
        """Requests that are being served."""
        return self._num_requests

    def check_model(self, model: str) -> None:
        """Raises ApiError where a request is for another model."""
        if model != self.model_name:
            message = f"the model {model!r} does not exist here; wanted {self.model_name!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    @contextlib.contextmanager
    def admitted(self, tenant: Tenant, num_jobs: int) -> Iterator[None]:
        """Counts a request in for as long as it is served.

        Raises:
          ApiError: too many wait (429, with a time to come again), or the server is shutting down (503).
        """
        if self.closing or self.loop.failure is not None:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=1)
        if num_jobs > self.config.max_choices:
            message = f"wanted at most {self.config.max_choices} answers of one request, found {num_jobs}"
            raise ApiError(400, message, param="n", code="invalid_value")
        num_waiting = self.loop.num_live - self._slots
        if self.loop.num_live and num_waiting + num_jobs > self.config.max_queue:
            raise self._busy(f"{max(num_waiting, 0)} turns wait already, and {self.config.max_queue} may")
        if tenant.max_requests is not None and self._of_tenant[tenant.name] >= tenant.max_requests:
            raise self._busy(f"{tenant.max_requests} requests of this key's tenant are being served, and no more may")
        self._of_tenant[tenant.name] += 1
        self._num_requests += 1
        self._idle.clear()
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._seconds.append(time.perf_counter() - started_s)
            self._of_tenant[tenant.name] -= 1
            self._num_requests -= 1
            if not self._num_requests:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def chat(self, tenant: Tenant, request: ChatRequest) -> AsyncIterator[Turns]:
        """The answers that a chat request asked for, being generated; ended with the block, if they have not ended.

        Raises:
          CaJaxError: the conversation cannot go on like that.
        """
        messages = [message.message() for message in request.messages]
        begun: list[Session] = []

        def sessions_of() -> tuple[Session, list[dict[str, str]]]:
            """On the engine's thread, right before the first turn is queued."""
            if request.session_id is not None:
                return self.router.by_id(tenant.domain, request.session_id, messages)
            return self.router.by_history(tenant.domain, messages)

        def submit(choice: int) -> Callable[[Engine], Job]:
            def run(engine: Engine) -> Job:
                nonlocal messages
                if not begun:
                    session, messages = sessions_of()
                    begun.append(session)
                    held = len(session.token_ids)
                    begun.extend(self.router.sibling(session, held) for _ in range(1, request.num_choices))
                params = request.sampling(choice, request.token_limit or self._most_tokens(), request.num_logprobs)
                priority = request.priority or 0
                return begun[choice].submit(messages, context=request.context, sampling=params, priority=priority)

            return run

        submits = [submit(choice) for choice in range(request.num_choices)]
        async with self._running(submits) as (lives, feed):
            yield Turns(lives, begun, feed)

    @contextlib.asynccontextmanager
    async def complete(self, tenant: Tenant, request: CompletionRequest) -> AsyncIterator[Turns]:
        """The answers to plain prompts, otherwise as `chat`. What is stored of each is found by others' prefixes."""
        prompts = [prompt for prompt in request.prompts() for _ in range(request.num_choices)]
        begun: list[Session] = []

        def submit(index: int) -> Callable[[Engine], Job]:
            def run(engine: Engine) -> Job:
                params = request.sampling(index, request.max_tokens or 16, request.logprobs)
                session = self.router.begin(tenant.domain)
                begun.append(session)
                ids = prompt_ids(engine.model, prompts[index])
                return session.submit(ids, sampling=params, priority=request.priority or 0)

            return run

        try:
            async with self._running([submit(index) for index in range(len(prompts))]) as (lives, feed):
                yield Turns(lives, begun, feed)
        finally:
            if begun and not self.closing:
                with contextlib.suppress(CaJaxError):
                    await asyncio.shield(self.loop.call(lambda engine: self.router.let_go(begun)))

    def deadline(self, timeout_s: float | None) -> asyncio.Timeout:
        """A block that may last as long as a request asks for, and no longer than the server lets it."""
        return asyncio.timeout(min(timeout_s or math.inf, self.config.request_timeout_s))

    async def drain(self, grace_s: float) -> None:
        """Takes nothing more in, and returns when what is being served has ended, or after that time."""
        self.closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()

    async def stop(self) -> None:
        """Ends what runs, and the engine's thread. The engine is not closed."""
        self.closing = True
        await self.loop.stop()

    async def find_session(self, tenant: Tenant, session_id: str) -> Session:
        """A conversation of a tenant.

        Raises:
          UnknownSessionError: there is none of that name.
        """
        session = await self.loop.call(lambda engine: self.router.find(tenant.domain, session_id))
        if session is None:
            raise UnknownSessionError(f"wanted a session that there is, found {session_id!r}")
        return session

    def _most_tokens(self) -> int:
        return max(self.window // 2, 1)

    @contextlib.asynccontextmanager
    async def _running(self, submits: Sequence[Callable[[Engine], Job]]) -> AsyncIterator[tuple[list[LiveJob], Feed]]:
        feed, lives = Feed(), []
        try:
            for index, submit in enumerate(submits):
                lives.append(await self.loop.submit(submit, feed, index))
            yield lives, feed
        finally:
            for live in lives:
                self.loop.cancel(live)

    def _busy(self, why: str) -> ApiError:
        """How long to wait: as long as the latest requests took, for each batch of those that wait."""
        typical_s = sorted(self._seconds)[len(self._seconds) // 2] if self._seconds else 1.0
        batches = max(self.loop.num_live / self._slots, 1.0)
        seconds = max(1, min(math.ceil(typical_s * batches), 60))
        return ApiError(429, f"the server is busy: {why}", code="rate_limit_exceeded", retry_after_s=seconds)
