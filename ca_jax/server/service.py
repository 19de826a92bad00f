"""Turns requests into jobs: the conversations they go on with, deadlines, and their answers.

Not here: who is let in (`admission`), HTTP (`app`, the routes), bodies (`bodies`), the engine's thread (`engine_loop`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterator, Sequence
from typing import Any, Literal, TypeVar

from ca_jax.engine import Engine
from ca_jax.errors import InvalidRequestError
from ca_jax.models.adapters import read_adapter
from ca_jax.server.admission import Admission
from ca_jax.server.background import Background
from ca_jax.server.bodies import Asked, ChatRequest, CompletionRequest
from ca_jax.server.config import ServerConfig
from ca_jax.server.engine_loop import EngineLoop, Feed
from ca_jax.server.errors import ApiError, invalid
from ca_jax.server.history import History
from ca_jax.server.metrics import RequestMetrics
from ca_jax.server.observing import OBSERVED
from ca_jax.server.router import Found, Router, client_name
from ca_jax.server.tenants import Tenant, Tenants
from ca_jax.server.tool_formats import ReplyForm
from ca_jax.serving.prompts import context_ids, prompt_ids, turn_ids
from ca_jax.session import Job, Session
from ca_jax.storage.objects.ownership import NotOwnerError
from ca_jax.turns.requests import FinishReason
from ca_jax.turns.text import Texts, TextWork, num_chars

_TEXT_THREADS = 2  # They render and tokenise; what of that holds the interpreter's lock takes from the engine's.
_READING_S = 0.25  # How long metrics wait for the engine's thread; then they are what it said before.
_COMPLETION_TOKENS = 16  # Of a plain completion, where a request does not say.
T = TypeVar("T")


class Service:
    """Serves requests with one engine. Belongs to the event loop.

    Args:
      engine: warm; nobody else runs it.
      config: how.
      tenants: whose they are.
    """

    def __init__(self, engine: Engine, config: ServerConfig, tenants: Tenants | None = None) -> None:
        self.config = config
        self.model_name = config.served_model_name or engine.model.name
        """The name that clients give."""
        self.metrics = RequestMetrics(self.model_name)
        """Where requests are counted."""
        self.history = History()
        """The last hour."""
        self.max_adapters = engine.config.max_adapters
        """Most adapters that may be loaded at a time."""
        self._engine = engine
        self.model = engine.model
        """What is served."""
        self.window = engine.window
        """Most tokens of a prompt and its answer."""
        self.tokenizer = engine.model.tokenizer
        """Of the model; None where it has none."""
        self.reply_form = ReplyForm(self.tokenizer, config.tool_call_parser, config.reasoning_parser)
        """How the model writes calls of tools, and what it thinks."""
        self._tenants = (tenants or Tenants()).all
        self.router = Router(engine, max(config.max_open_sessions // len(self._tenants), 1))
        """Which conversation a request goes on with; for the engine's thread alone."""
        self.loop = EngineLoop(engine, on_ended=self._ended)
        """The way to the engine."""
        self.admission = Admission(config, engine.config.max_batch_size, lambda: self.loop.num_jobs)
        """Who is let in."""
        self.background = Background()
        """Responses that are generated while nobody waits for them."""
        self._publishing_s = engine.config.store.objects_deadline_s
        self._most_tokens = max(engine.window // 2, 1)  # Of an answer, where a request does not say.
        self._shared: dict[Hashable, tuple[float, asyncio.Future[Any]]] = {}
        self._text_threads = concurrent.futures.ThreadPoolExecutor(_TEXT_THREADS, "ca_jax-texts")

    async def begin(self) -> None:
        """Learns where the conversations stand that were stored before; then requests may come."""
        await self.loop.call(self.metrics.read)
        names = await self.loop.call(lambda engine: engine.stored.names())
        for tenant in self._tenants:
            own = (name for whose, name in names if whose == tenant.domain)
            known = tuple(itertools.islice(own, self.router.max_known))
            for name in reversed(known):  # Those used last stay known for longest.
                await self.loop.call(functools.partial(self.router.learn, tenant.domain, name))

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that are loaded, oldest first."""
        return tuple(adapter.name for adapter in self._engine.adapters)

    def model_of(self, adapter: str | None) -> str:
        """The name that clients give for the model with an adapter, or with none."""
        return self.model_name if adapter is None else f"{self.model_name}:{adapter}"

    def adapter_of(self, model: str) -> str | None:
        """The adapter that a request's model names; None: the model alone. Raises ApiError where it is another one."""
        known = {self.model_of(adapter): adapter for adapter in (None, *self.adapters)}
        if model not in known:
            must = " or ".join(map(repr, known))
            message = f"the model {model!r} does not exist here; it must be {must}"
            raise ApiError(404, message, code="model_not_found", param="model")
        return known[model]

    async def load_adapter(self, tenant: Tenant, name: str, path: str) -> None:
        """Loads an adapter. Its files are read on a thread for texts, and the engine takes it between two steps.

        Raises:
          ApiError: as of `Admission.looking`.
          TimeoutError: it took too long.
          CaJaxError: as of `Engine.load_adapter`.
        """
        with self.admission.looking(tenant):
            async with self.deadline(None):
                read = functools.partial(read_adapter, path, name, self.model.config)
                adapter = await asyncio.get_running_loop().run_in_executor(self._text_threads, read)
                await self.loop.call(lambda engine: engine.load_adapter(name, adapter))

    async def unload_adapter(self, tenant: Tenant, name: str) -> None:
        """Unloads an adapter that nothing uses; raises what `ask` and `Engine.unload_adapter` do.

        Where no turn runs with it, conversations that are open with it are let go of: they are open for the server's
        sake, and go on from the store once it is loaded again.
        """

        def unload(engine: Engine, _: Texts) -> None:
            held = [session for session in engine.sessions if session.adapter == name]
            if not any(session.is_busy for session in held):
                self.router.let_go(held)
            engine.unload_adapter(name)

        await self.ask(tenant, unload)

    async def ask(self, tenant: Tenant, function: Callable[[Engine, Texts], T]) -> T:
        """What a function of the engine, and of the request's texts, gives, for a request that is no answer.

        It is called again where it raises `TextWork`, once that is done.

        Raises:
          ApiError: as of `Admission.looking`.
          TimeoutError: the engine's thread did not come to it in time.
          Exception: whatever the function raises.
        """
        texts = Texts()
        with self.admission.looking(tenant):
            async with self.deadline(None):
                while True:
                    try:
                        return await self.loop.call(lambda engine: function(engine, texts))
                    except TextWork as work:
                        await self._work(work)

    async def begin_with(self, tenant: Tenant, function: Callable[[Engine, Texts], tuple[Session, T]]) -> T:
        """As `ask`, of a function that also gives the conversation that it begins or forks.

        Where conversations are published after each turn, replicas know it by now: for as long as their objects may
        take it is waited for.

        Raises:
          InvalidRequestError: another replica has begun one of that name meanwhile.
        """

        def begin(engine: Engine, texts: Texts) -> tuple[T, concurrent.futures.Future[Any] | None]:
            session, told = function(engine, texts)
            return told, None if engine.elsewhere is None else engine.elsewhere.publish(session)

        told, published = await self.ask(tenant, begin)
        if published is not None:
            asked = asyncio.wrap_future(published)
            asked.add_done_callback(asyncio.Future.exception)  # It is published later, and that was said.
            await asyncio.wait([asked], timeout=self._publishing_s)
            if asked.done() and isinstance(asked.exception(), NotOwnerError):
                raise InvalidRequestError("session_id must be a name that is not taken; another replica has begun it")
        return told

    def shared(self, what: Hashable, ask: Callable[[], Coroutine[Any, Any, T]], fresh_s: float) -> asyncio.Future[T]:
        """What is asked once for all who want the same meanwhile, and for so many seconds after it was asked."""
        now_s = time.monotonic()
        for each, (until_s, asked) in tuple(self._shared.items()):
            if asked.done() and now_s >= until_s:
                del self._shared[each]
        if what not in self._shared:
            self._shared[what] = now_s + fresh_s, asyncio.ensure_future(ask())
        return self._shared[what][1]

    async def read_metrics(self) -> bytes:
        """What Prometheus reads. The engine's thread is asked once for all who ask meanwhile.

        If it does not answer at once they get its last answer, and how old that is.
        """
        reading = self.shared("metrics", lambda: self.loop.call(self.metrics.read), 0.0)
        await asyncio.wait((reading,), timeout=_READING_S)
        if reading.done():
            reading.result()  # It may have failed.
        return self.metrics.text()

    @contextlib.asynccontextmanager
    async def chat(
        self,
        tenant: Tenant,
        request: ChatRequest,
        *,
        name: str | None = None,
        find: Callable[[Texts], Found] | None = None,
        note: Callable[[Job, FinishReason], tuple[str, str]] | None = None,
    ) -> AsyncIterator[Feed]:
        """The answers that a chat request asked for, being generated; ended with the block, if they have not ended.

        Args:
          tenant: whose it is.
          request: what is asked.
          name: of the conversation, where one is begun.
          find: finds the conversation, on the engine's thread; None: it is found by the request.
          note: what is kept of the turn, as of `TurnRequest`.

        Raises:
          CaJaxError: the conversation cannot go on like that.
        """
        messages, texts, adapter = request.history(), Texts(), self.adapter_of(request.model)
        tools, request_id = request.asked_tools(), uuid.uuid4().hex
        if tools is not None:
            self.reply_form.check(tools)
        grammar = self.reply_form.grammar(tools, request.guided())
        num_chunks = self._checked_chunks([chunk for each in messages for chunk in each.get("context", ())], "context")

        def submit(engine: Engine) -> list[Job]:
            if find is not None:
                found = find(texts)
            elif request.session_id is not None:
                state = request.session_state
                found = self.router.by_id(tenant.domain, request.session_id, messages, texts, state, adapter)
            else:
                found = self.router.by_history(
                    tenant.domain,
                    messages,
                    texts,
                    adapter,
                    may_drop=request.truncation != "disabled",
                    name=name,
                    reuse_edited=bool(request.reuse_edited),
                    state=request.session_state,
                )
            begun = [] if found.reached else [found.session]
            if request.store is False:
                sessions = [engine.fork(found.session, is_kept=False) for _ in range(request.num_choices)]
                self.router.let_go(begun)
                siblings: list[Session] = []
            else:
                held = len(found.session.token_ids)
                siblings = [self.router.sibling(found.session, held) for _ in range(1, request.num_choices)]
                sessions = [found.session, *siblings]
            jobs: list[Job] = []
            with self._all_or_none(engine, jobs, [*begun, *siblings]):
                for choice, session in enumerate(sessions):
                    sampling = request.sampling(choice, self._most_tokens)
                    job = session.submit(
                        found.messages,
                        sampling=dataclasses.replace(sampling, grammar=grammar),
                        priority=request.priority or 0,
                        texts=texts,
                        truncation=request.truncation or "auto",
                        note=note,
                        reader=self.reply_form.reader(tools, f"{request_id} {choice}"),
                    )
                    jobs.append(job)
                for session in () if request.store is False else sessions:
                    self._keep_as_said(engine, session, request)
            if request.store is not False:
                self.router.goes_on(found)
            for each in siblings:
                self.router.use(each)
            return jobs

        async with self._running(submit, request.num_choices + num_chunks, request.num_choices) as feed:
            yield feed

    async def render(self, tenant: Tenant, request: ChatRequest | CompletionRequest) -> list[list[int]]:
        """The token ids of a request's prompts, as if nothing were stored: a chat has one. Nothing is answered.

        Raises:
          ApiError: as of `Admission.looking`; or the request names a session, whose tokens it does not tell.
          TimeoutError: it took too long.
          CaJaxError: the prompts cannot be served.
        """
        if isinstance(request, CompletionRequest):
            make = [functools.partial(prompt_ids, self.model, prompt) for prompt in request.prompts()]
        elif request.session_id is None:
            make = [functools.partial(turn_ids, self.model, [], [], request.history())]
        else:
            raise invalid("session_id", "session_id must be left out: what is rendered is the whole history")
        return await self.make_texts(tenant, make, request.timeout_s)

    async def make_texts(
        self, tenant: Tenant, make: Sequence[Callable[[], T]], timeout_s: float | None = None
    ) -> list[T]:
        """What functions give that work on text, on a thread for that; raises what they do, and as `render`."""
        with self.admission.looking(tenant):
            async with self.deadline(timeout_s):
                loop = asyncio.get_running_loop()
                return [await loop.run_in_executor(self._text_threads, each) for each in make]

    @contextlib.asynccontextmanager
    async def complete(self, tenant: Tenant, request: CompletionRequest) -> AsyncIterator[Feed]:
        """The answers to plain prompts, otherwise as `chat`. What is stored of each is found by others' prefixes."""
        prompts = [prompt for prompt in request.prompts() for _ in range(request.num_choices)]
        sessions: list[Session] = []
        texts, adapter = Texts(), self.adapter_of(request.model)

        def tokenise() -> list[list[int]]:
            return [prompt_ids(self.model, prompt) for prompt in prompts]

        def submit(engine: Engine) -> list[Job]:
            jobs: list[Job] = []
            sessions.clear()  # Of an attempt that asked for work elsewhere first: those were let go of.
            tokenised = texts.get(num_chars(prompts), tokenise)
            with self._all_or_none(engine, jobs, sessions):
                for index, ids in enumerate(tokenised):
                    sampling = request.sampling(index, _COMPLETION_TOKENS)
                    sessions.append(self.router.begin(tenant.domain, adapter=adapter))
                    jobs.append(
                        sessions[-1].submit(ids, sampling=sampling, priority=request.priority or 0, texts=texts)
                    )
                for session in sessions:
                    self._keep_as_said(engine, session, request)
            return jobs

        try:
            async with self._running(submit, len(prompts), request.num_choices) as feed:
                yield feed
        finally:
            self.loop.tell(lambda engine: self.router.let_go(sessions))

    async def precompute(
        self, tenant: Tenant, chunks: Sequence[str | Sequence[int]], tier: Literal["dram", "ssd"] | None
    ) -> int:
        """Computes and stores chunks; how many were not stored yet.

        Raises:
          ApiError: more chunks, or more tokens in them, than one request may give (400).
          CaJaxError: a chunk that is blank, too long, or has a wrong id.
        """
        texts = Texts()

        def submit(engine: Engine) -> list[Job]:
            each = texts.get(num_chars(chunks), context_ids, self.model, chunks)
            if (num_tokens := sum(map(len, each))) > self.config.max_chunk_tokens:
                most = self.config.max_chunk_tokens
                raise invalid("chunks", f"chunks must be at most {most} tokens together, got {num_tokens}")
            return engine.submit_chunks(each, tenant=tenant.domain, tier=tier)

        async with self._running(submit, self._checked_chunks(chunks, "chunks")) as feed:
            async for _ in feed.parts():
                pass
            return len(feed.jobs)

    def deadline(self, timeout_s: float | None) -> asyncio.Timeout:
        """A block that may last as long as a request asks for, and no longer than the server lets it."""
        return asyncio.timeout(min(timeout_s or math.inf, self.config.request_timeout_s))

    async def stop(self) -> None:
        """Ends what runs, and the engine's thread. The engine is not closed. Responses in the background may end."""
        await self.background.wait(self.config.shutdown_grace_s)
        await self.loop.stop()
        self._text_threads.shutdown(wait=False, cancel_futures=True)

    def _ended(self, job: Job) -> str | None:
        """Takes note of a job that has ended, even if nobody listens any more; where its conversation stands now.

        For the engine's thread.
        """
        if job.chunk is not None:
            return None
        self.admission.ended(job)
        self.metrics.add(job)
        self.history.add(job)
        return self.router.ended(job)

    @contextlib.asynccontextmanager
    async def _running(
        self, submit: Callable[[Engine], Sequence[Job]], num_jobs: int, num_choices: int = 1
    ) -> AsyncIterator[Feed]:
        """Jobs that a function queues, ended with the block.

        Args:
          submit: queues them.
          num_jobs: how many they may be, those of chunks that are not stored included.
          num_choices: how many have the same prompt.

        Raises:
          ApiError: too many wait (429, with a time to come again).
        """
        feed = None
        with self.admission.coming(num_jobs):
            while feed is None:
                try:
                    feed = await self.loop.submit(submit)
                except TextWork as work:
                    await self._work(work)
        self._note(feed, num_choices)
        try:
            yield feed
        finally:
            self.loop.cancel(feed)

    async def _work(self, work: TextWork) -> None:
        """Does on a thread for that what the engine needs first of texts, or of other machines."""
        await asyncio.get_running_loop().run_in_executor(self._text_threads, work.do)

    def _note(self, feed: Feed, num_choices: int) -> None:
        """Notes the jobs of the request that is served, where somebody observes."""
        if (observed := OBSERVED.get()) is not None and feed.jobs:
            observed.jobs, observed.num_choices, first = feed.jobs, num_choices, feed.jobs[0]
            observed.model = self.model_of(first.adapter.name or None)
            if first.session is not None and first.session.is_kept:
                observed.session = client_name(first.session.tenant, first.session.session_id)

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

    def _keep_as_said(self, engine: Engine, session: Session, request: Asked) -> None:
        """How long KV of a session, a turn of which is queued, is kept, and when its next turn will come."""
        if request.kv_retention_ttl_seconds is not None:
            self.router.keep_for(session, request.kv_retention_ttl_seconds)
        if request.expected_resume_seconds is not None:
            engine.stored.expect_back(session.session_id, request.expected_resume_seconds, tenant=session.tenant)

    def _checked_chunks(self, chunks: Sequence[object], param: str) -> int:
        """How many chunks a request gives; raises ApiError where it may not give so many."""
        if len(chunks) > self.config.max_chunks:
            raise invalid(param, f"{param} must be at most {self.config.max_chunks} chunks, got {len(chunks)}")
        return len(chunks)
