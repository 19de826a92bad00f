"""Requests to jobs: who may come in, which conversations go on, how long it may take, and what comes of it.

Not here: HTTP (`app`), bodies (`bodies`, `answers`), the engine's thread (`engine_loop`).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Literal

from ca_jax.engine import Engine
from ca_jax.jobs import Job, Usage
from ca_jax.prompts import prompt_ids
from ca_jax.server.bodies import ChatRequest, CompletionRequest
from ca_jax.server.config import ServerConfig
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

    def parts(self, until_s: float | None = None) -> AsyncIterator[tuple[LiveJob, Part]]:
        """What each step gave, until all have ended; see `Feed.parts`."""
        return self.feed.parts(len(self.lives), until_s)

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
        self.tokenizer = engine.model.tokenizer
        """Of the model; None where it has none."""
        self.router = Router(engine, config.max_open_sessions)
        """Which conversation a request goes on with; for the engine's thread alone."""
        self.loop = EngineLoop(engine, on_ended=self._ended)
        """The way to the engine."""
        self.closing = False
        """Whether nothing more is taken in."""
        self.is_ready = False
        """Whether all is known that was stored before."""
        self._slots = engine.config.max_batch_size
        self._most_tokens = max(engine.window // 2, 1)  # Of an answer, where a request does not say.
        self._of_tenant: collections.Counter[str] = collections.Counter()
        self._num_requests = 0
        self._num_coming = 0  # Jobs that were let in and that the engine's thread has not queued yet.
        self._seconds: collections.deque[float] = collections.deque(maxlen=_KEPT_TIMES)

    async def begin(self) -> None:
        """Learns where the conversations stand that were stored before; then requests may come."""

        names = await self.loop.call(lambda engine: engine.stored.names())
        for tenant, name in reversed(names[: self.router.max_known]):  # Those used last stay known for longest.
            await self.loop.call(functools.partial(self.router.learn, tenant, name))
        self.is_ready = True

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
          ApiError: its tenant has too many (429, with a time to come again), or the server is shutting down (503).
        """
        if self.closing or self.loop.failure is not None:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=1)
        if num_jobs > self.config.max_choices:
            message = f"wanted at most {self.config.max_choices} answers of one request, found {num_jobs}"
            raise ApiError(400, message, param="n", code="invalid_value")
        if tenant.max_requests is not None and self._of_tenant[tenant.name] >= tenant.max_requests:
            raise self._busy(f"{tenant.max_requests} requests of this key's tenant are being served, and no more may")
        self._of_tenant[tenant.name] += 1
        self._num_requests += 1
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._seconds.append(time.perf_counter() - started_s)
            self._of_tenant[tenant.name] -= 1
            self._num_requests -= 1

    @contextlib.asynccontextmanager
    async def chat(self, tenant: Tenant, request: ChatRequest) -> AsyncIterator[Turns]:
        """The answers that a chat request asked for, being generated; ended with the block, if they have not ended.

        Raises:
          CaJaxError: the conversation cannot go on like that.
        """
        messages = request.history()
        sessions: list[Session] = []

        def submit(engine: Engine) -> list[Job]:
            if request.session_id is not None:
                found = self.router.by_id(tenant.domain, request.session_id, messages, request.session_state)
            else:
                may_drop = request.truncation != "disabled"
                found = self.router.by_history(tenant.domain, messages, may_drop=may_drop)
            held = len(found.session.token_ids)
            siblings = [self.router.sibling(found.session, held) for _ in range(1, request.num_choices)]
            sessions.extend([found.session, *siblings])
            jobs: list[Job] = []
            with self._all_or_none(engine, jobs, sessions if found.is_new else siblings):
                for choice, each in enumerate(sessions):
                    params = request.sampling(choice, request.token_limit or self._most_tokens, request.num_logprobs)
                    truncation, priority = request.truncation or "auto", request.priority or 0
                    jobs.append(each.submit(found.messages, sampling=params, priority=priority, truncation=truncation))
            return jobs

        async with self._running(submit, request.num_choices) as (lives, feed):
            yield Turns(lives, sessions, feed)

    @contextlib.asynccontextmanager
    async def complete(self, tenant: Tenant, request: CompletionRequest) -> AsyncIterator[Turns]:
        """The answers to plain prompts, otherwise as `chat`. What is stored of each is found by others' prefixes."""
        prompts = [prompt for prompt in request.prompts() for _ in range(request.num_choices)]
        sessions: list[Session] = []

        def submit(engine: Engine) -> list[Job]:
            jobs: list[Job] = []
            with self._all_or_none(engine, jobs, sessions):
                for index, prompt in enumerate(prompts):
                    params = request.sampling(index, request.max_tokens or 16, request.logprobs)
                    sessions.append(self.router.begin(tenant.domain))
                    ids = prompt_ids(engine.model, prompt)
                    jobs.append(sessions[-1].submit(ids, sampling=params, priority=request.priority or 0))
            return jobs

        try:
            async with self._running(submit, len(prompts)) as (lives, feed):
                yield Turns(lives, sessions, feed)
        finally:
            self.loop.tell(lambda engine: self.router.let_go(sessions))

    async def precompute(
        self, tenant: Tenant, chunks: Sequence[str | Sequence[int]], tier: Literal["dram", "ssd"] | None
    ) -> int:
        """Computes and stores chunks; how many were not stored yet.

        Raises:
          CaJaxError: a chunk that is blank, too long, or has a wrong id.
        """

        def submit(engine: Engine) -> list[Job]:
            return engine.submit_chunks(chunks, tenant=tenant.domain, tier=tier)

        async with self._running(submit, len(chunks)) as (lives, feed):
            async for _ in feed.parts(len(lives)):
                pass
            return len(lives)

    def deadline(self, timeout_s: float | None) -> asyncio.Timeout:
        """A block that may last as long as a request asks for, and no longer than the server lets it."""
        return asyncio.timeout(min(timeout_s or math.inf, self.config.request_timeout_s))

    async def stop(self) -> None:
        """Ends what runs, and the engine's thread. The engine is not closed."""
        self.closing = True
        await self.loop.stop()

    def _ended(self, job: Job) -> str | None:
        """Notes a job that has ended, whether anybody still listens or not, and says where its conversation stands.

        For the engine's thread.
        """
        if job.chunk is not None:
            return None
        self.metrics.add(job)
        return self.router.ended(job)

    @contextlib.asynccontextmanager
    async def _running(
        self, submit: Callable[[Engine], Sequence[Job]], num_jobs: int
    ) -> AsyncIterator[tuple[list[LiveJob], Feed]]:
        """Jobs that a function queues, ended with the block.

        Raises:
          ApiError: too many wait (429, with a time to come again).
        """
        num_there = self.loop.num_live + self._num_coming
        num_waiting = max(num_there - self._slots, 0)
        if num_there and num_there - self._slots + num_jobs > self.config.max_queue:
            raise self._busy(f"{num_waiting} turns wait already, and {self.config.max_queue} may")
        feed = Feed()
        self._num_coming += num_jobs
        try:
            lives = await self.loop.submit(submit, feed)
        finally:
            self._num_coming -= num_jobs
        try:
            yield lives, feed
        finally:
            for live in lives:
                self.loop.cancel(live)

    @contextlib.contextmanager
    def _all_or_none(self, engine: Engine, jobs: list[Job], begun: list[Session]) -> Iterator[None]:
        """Cancels jobs that were queued, and lets go of what was begun for them, where one of them could not be."""
        try:
            yield
        except BaseException:
            for job in jobs:
                engine.cancel(job)
            self.router.let_go(begun)
            raise

    def _busy(self, why: str) -> ApiError:
        """How long to wait: as long as the latest requests took, for each batch of those that wait."""
        typical_s = sorted(self._seconds)[len(self._seconds) // 2] if self._seconds else 1.0
        batches = max(self.loop.num_live / self._slots, 1.0)
        seconds = max(1, min(math.ceil(typical_s * batches), 60))
        return ApiError(429, f"the server is busy: {why}", code="rate_limit_exceeded", retry_after_s=seconds)
