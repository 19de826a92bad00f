"""The engine: sessions and jobs in, tokens out. Composes scheduler, runner and stored KV; computes nothing itself.

One turn: `submit_turn` queues a job; each `step` takes in what was saved and has the batch do what the scheduler plans.
Whoever iterates an answer runs the engine, one thread at a time.

Not here: what a step does (batch), who runs (scheduler), device state (runner), loading and saving (session_kv), text
to tokens (prompts).
"""

from __future__ import annotations

import atexit
import collections
import dataclasses
import itertools
import math
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

import jax
import numpy as np

from ca_jax import blend_costs
from ca_jax.batch import Batch
from ca_jax.chunks import ChunkSpan
from ca_jax.config import EngineConfig
from ca_jax.conversations import Conversation, Message, as_messages, padded
from ca_jax.device_memory import check_buffers
from ca_jax.drift import Drift
from ca_jax.errors import (
    ContextWindowError,
    InvalidRequestError,
    SessionBusyError,
    SessionClosedError,
    TenantError,
)
from ca_jax.jobs import Completion, Job, SamplingParams
from ca_jax.kv_layout import kept_window, kv_layout
from ca_jax.metrics import EngineMetrics
from ca_jax.models.sharding import model_sharding
from ca_jax.pretrained import Layout, LoadedModel, Progress, load_model
from ca_jax.processes import Processes, check_alike, current, from_first
from ca_jax.prompts import context_ids, messages_or_ids, prompt_ids, text_of, turn_ids, turn_parts
from ca_jax.rates import Rates
from ca_jax.runner import Runner
from ca_jax.sampler import Sampler
from ca_jax.scheduler import Scheduler
from ca_jax.session import Session
from ca_jax.session_kv import SessionKV
from ca_jax.storage.attention_store import AttentionStore
from ca_jax.storage.records import StoreStats
from ca_jax.stored_sessions import StoredSessions
from ca_jax.text_output import TextOutput
from ca_jax.timeline import NO_TIMELINE, Timeline
from ca_jax.truncator import Truncator
from ca_jax.wakeup import Wakeup

DEFAULT_WINDOW_TOKENS = 4096
"""Largest context window taken unless a larger one is asked for."""
_STALL_S = 0.5  # Longest wait for KV on its way before looking again.
_STALL_TOGETHER_S = 0.01  # The same where another process may be what has moved.
_KEEP_S = 10.0  # How often times to live are looked at while nothing else happens.


class Engine:
    """Serves conversations of one model.

    Public methods may be called from any thread; one at a time runs the engine.

    Args:
      model: what to serve. One that is on one device, and is to be served by several, is copied to them.
      config: how.
      timeline: gets spans of what happens when; by default nothing is recorded.
      store_wrapper: given the store, returns what is used in its place; for `ca_jax.testing`.
      processes: those that serve as one; by default those of `jax.distributed`, where that is initialised.

    Raises:
      ValueError: the context window is above what the model was trained for, or a size does not fit the machine, the
        devices or the model's heads.
      ProcessesError: other processes serve other weights, or otherwise.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig | None = None,
        *,
        timeline: Timeline = NO_TIMELINE,
        store_wrapper: Callable[[AttentionStore], AttentionStore] | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self._processes = processes or current()
        self.model = model = model.laid_out(_layout(self.config))
        num_parts = self.config.data_parallel_size
        self.metrics = EngineMetrics(model_load_s=model.load_s)
        self._check_alike()
        limit = model.config.max_positions
        self.window = self.config.context_window or min(model.config.steady_positions, DEFAULT_WINDOW_TOKENS)
        if self.window > limit:
            raise ValueError(f"context_window wanted at most the model's {limit} tokens, found {self.window}")
        if self.config.blend.check_layers > model.config.num_layers:
            raise ValueError(
                f"blend check_layers wanted at most the model's {model.config.num_layers} layers, "
                f"found {self.config.blend.check_layers}"
            )
        drift = None
        if self.config.overflow is not None:
            self.config.overflow.check_window(self.window)
            if self.config.overflow.drift is not None:
                drift = Drift.load(self.config.overflow.drift)
                drift.check_model(model.config, model.fingerprint)
        self._lock = threading.RLock()
        self._wakeup = Wakeup()
        self._closed = False
        self._sessions: dict[str, Session] = {}
        self._abandoned: collections.deque[Job] = collections.deque()
        self._scheduler = Scheduler(self.config.max_batch_size, num_parts)
        self._sampler = Sampler(self.config.max_batch_size, model.config.vocab_size, model.sharding)
        self._runner = Runner(
            model.config,
            model.params,
            window=self.window,
            max_batch_size=self.config.max_batch_size,
            chunk_tokens=self.config.prefill_chunk_tokens,
            shorter_passes=self.config.max_tpot_ms is not None,
            with_attention=self.config.overflow is not None and self.config.overflow.token_discarder.needs_attention,
            packs_kv=self.config.kv_rest_dtype == "int8",
            timeline=timeline,
            sharding=model.sharding,
        )
        kept, overflow = kept_window(model.config, self.config, self.window), self.config.overflow
        if kept is not None and overflow is not None:  # What leaves is what no layer looks back to: none to repair.
            overflow = dataclasses.replace(overflow, repair="none")
        layout = kv_layout(model, self.config)
        check_buffers(self.config, layout, self._runner)
        self._kv = SessionKV(
            layout,
            self.config,
            self._runner,
            fingerprint=self._kv_fingerprint(),
            metrics=self.metrics,
            on_progress=self._wakeup.tell,
            processes=self._processes,
            window=kept,
            timeline=timeline,
            store_wrapper=store_wrapper,
        )
        self._truncator = Truncator(overflow, drift, self._kv, self._runner, self.metrics, window=self.window)
        self._batch = Batch(
            self._scheduler,
            self._runner,
            self._sampler,
            self._kv,
            self._truncator,
            self.config,
            self.metrics,
            timeline,
            self.window,
            self._processes,
        )
        atexit.register(_close_at_exit, weakref.ref(self))
        threading.Thread(
            target=_keep, args=(weakref.ref(self), self._wakeup), name="ca_jax-keeper", daemon=True
        ).start()

    @classmethod
    def from_pretrained(
        cls, model: str, config: EngineConfig | None = None, *, progress: Progress | None = None
    ) -> Engine:
        """Loads a model and makes an engine for it; see `load_model` for what `model` may be and what is raised."""
        config = config or EngineConfig()
        enable_compile_cache(config.compile_cache_dir)
        return cls(load_model(model, dtype=config.dtype, progress=progress, layout=_layout(config)), config)

    # Conversations.

    def session(
        self,
        *,
        system: str | None = None,
        session_id: str | None = None,
        tenant: str = "",
        ttl_s: float | None = None,
    ) -> Session:
        """Begins a conversation, returns the open one of that id, or goes on with the one that the store kept.

        Args:
          system: its system message; for a conversation that exists already it must not be given.
          session_id: its name; made up if not given.
          tenant: whose it is; ids are unique over all tenants.
          ttl_s: how long a new one's KV is kept after its last use, seconds; None: as the store's config says.

        Raises:
          SessionClosedError: the engine is closed.
          TenantError: the conversation is another tenant's.
          InvalidRequestError: a system message for a conversation that exists, or a time that is negative.
        """
        with self._lock:
            self._check_open()
            if ttl_s is not None and not (math.isfinite(ttl_s) and ttl_s >= 0):
                raise InvalidRequestError(f"ttl_s wanted a number of seconds >= 0, found {ttl_s}")
            session = None if session_id is None else self._find(session_id, tenant, ttl_s)
            if system is not None and session is not None:
                raise InvalidRequestError(f"session {session_id!r} has begun: wanted no system message")
            if session is None:
                messages = [] if system is None else [{"role": "system", "content": system}]
                session = self._open(session_id, Conversation.begin(messages), tenant, ttl_s)
            return session

    def find_session(self, session_id: str, *, tenant: str = "") -> Session | None:
        """The conversation of that id that is open or that the store kept; None if there is none.

        Raises:
          SessionClosedError: the engine is closed.
          TenantError: the conversation is another tenant's.
        """
        with self._lock:
            self._check_open()
            return self._find(session_id, tenant)

    def fork(self, session: Session, num_tokens: int | None = None, *, session_id: str | None = None) -> Session:
        """Begins a conversation that goes on behind the first tokens of another, which stays as it is and may be busy.

        What of their KV is as computing them would give is shared, in the store.

        Args:
          session: what the new one begins with; its tenant and its time to live are the new one's.
          num_tokens: of how many tokens; None: all of those whose turns have ended.
          session_id: names the new one; made up if not given.

        Raises:
          SessionClosedError: the engine is closed.
          InvalidRequestError: `num_tokens` is negative or above what there is, or the name is taken.
        """
        with self._lock:
            self._check_open()
            most = len(session.token_ids)
            if not 0 <= (most if num_tokens is None else num_tokens) <= most:
                raise InvalidRequestError(f"wanted to fork behind 0..{most} tokens, found {num_tokens}")
            if session_id is not None and self._find(session_id, session.tenant) is not None:
                raise InvalidRequestError(f"session_id wanted a name that is not taken, found {session_id!r}")
            begun = session.conversation.forked(most if num_tokens is None else num_tokens)
            return self._open(session_id, begun, session.tenant, session.ttl_s)

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Conversations that are open, oldest first."""
        return tuple(self._sessions.values())

    def submit_turn(
        self,
        session: Session,
        new: str | Sequence[Message] | Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        context: Sequence[str | Sequence[int]] | None = None,
    ) -> Job:
        """Queues a turn; for `Session.send` and `send_ids`, which say what is raised."""
        submitted_s = time.perf_counter()  # What is dropped before it, and tokenised, it waits for.
        with self._lock:
            self._check_open()
            self._check_bias(params)
            said, given_ids = messages_or_ids(self.model, new)
            chunks = [] if context is None else context_ids(self.model, context)
            if chunks and session.conversation.positions:
                raise InvalidRequestError(
                    "context wanted a conversation whose keys are used at their places, found one that was truncated "
                    "naively (overflow method nkvt)"
                )
            before, behind = self._turn_parts(session.conversation, said, bool(chunks)) if said else ([], given_ids)
            num_new = len(before) + sum(map(len, chunks)) + len(behind)
            if chunks:
                self._check_context(len(before) + len(behind), chunks)
            discarded = self._truncator.for_prompt(session, num_new)
            num_leaving = 0 if discarded is None else int(discarded.sum())
            if said and discarded is not None and discarded.all():  # It begins anew, with this message.
                before, behind = self._turn_parts(session.conversation.take(0), said, bool(chunks))
                num_new = len(before) + sum(map(len, chunks)) + len(behind)
            self._check_length(len(session.token_ids) - num_leaving + num_new)
            if discarded is not None:
                self._truncator.cut(session, discarded)
            ids = [*session.token_ids, *before, *itertools.chain.from_iterable(chunks), *behind]
            job = self._make_job(ids, params, session, priority)
            job.submitted_s = submitted_s
            job.messages = said or as_messages(text_of(self.model, given_ids))
            job.context = "".join(text_of(self.model, ids) for ids in chunks)
            job.dropped_tokens, job.positions = num_leaving, session.conversation.positions
            job.num_gone = session.conversation.num_dropped
            if self._runner.with_attention:
                job.attention = padded(session.conversation.attention, len(session.token_ids))
            job.context_tokens = sum(map(len, chunks))
            job.spans = self._spans(chunks, len(session.token_ids) + len(before), session.tenant)
            self._submit_chunks(job, session.tenant)
            self._kv.announce(job, session)
            self._scheduler.submit(job)
            return job

    def precompute(
        self, chunks: Sequence[str | Sequence[int]], *, tenant: str = "", tier: Literal["dram", "ssd"] | None = None
    ) -> int:
        """Computes and stores the KV of text chunks, each alone, for contexts to come; see `Session.send`.

        Runs the engine until all are on their way to the store.

        Args:
          chunks: texts, or token ids, as they will be given as context.
          tenant: whose: only sessions of the same tenant use them.
          tier: `ssd` keeps what is computed now on SSD alone until it is used, if the store has one. None: once half of
            DRAM is taken, the cheapest tier from which a layer's loading hides behind recomputing, by measured rates
            (`blend_costs.choose_tier`).

        Returns:
          How many were computed. Others were stored already, or are too large for the store.

        Raises:
          InvalidRequestError: an id outside the vocabulary.
          EmptyMessageError: no chunks, or a chunk without text.
          ContextWindowError: a chunk that is longer than the context window.
          SessionClosedError: the engine is closed.
        """
        jobs = self.submit_chunks(chunks, tenant=tenant, tier=tier)
        for job in jobs:
            for _ in self.stream(job):
                pass
        return len(jobs)

    def submit_chunks(
        self, chunks: Sequence[str | Sequence[int]], *, tenant: str = "", tier: Literal["dram", "ssd"] | None = None
    ) -> list[Job]:
        """Queues a job for each chunk that is not stored, for whoever runs the engine; otherwise as `precompute`."""
        with self._lock:
            self._check_open()
            each = context_ids(self.model, chunks)
            self._check_context(0, each, at_once=False)
            jobs = [job for ids in each if (job := self._submit_chunk(ids, tenant)) is not None]
            for job in jobs:
                if job.chunk is not None and (tier or self._tier_of(job.chunk.num_tokens)) == "ssd":
                    self._kv.chunks.keep_on_ssd(job.chunk.key)
            return jobs

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Answers prompts, each on its own, in one continuous batch. Nothing of them is stored.

        Args:
          prompts: texts, or token ids.
          params: for all, or one for each; greedy if not given.

        Returns:
          A completion per prompt, in order.

        Raises:
          InvalidRequestError: a prompt that is no text and has a wrong id, a wrong id in a `logit_bias`, or not one
            `params` for each prompt.
          EmptyMessageError: a prompt without tokens.
          ContextWindowError: a prompt that leaves no room for an answer. Nothing has been run then.
          SessionClosedError: the engine is closed.
        """
        each = (
            [params or SamplingParams()] * len(prompts)
            if params is None or isinstance(params, SamplingParams)
            else list(params)
        )
        if len(each) != len(prompts):
            raise InvalidRequestError(f"wanted one params for each of {len(prompts)} prompts, found {len(each)}")
        with self._lock:
            self._check_open()
            for one in each:
                self._check_bias(one)
            jobs = [self._make_job(prompt_ids(self.model, p), q) for p, q in zip(prompts, each, strict=True)]
            for job in jobs:
                self._scheduler.submit(job)
        try:
            for job in jobs:
                for _ in self.stream(job):
                    pass
        finally:
            for job in jobs:
                self.cancel(job)
        return [job.completion() for job in jobs]

    def stream(self, job: Job) -> Iterator[str]:
        """Runs the engine until `job` ends and yields its text as it comes.

        Raises:
          Exception: whatever broke the job; the engine and all other jobs go on.
        """
        while True:
            ended = job.done  # Asked before its text is taken: another thread may end it in between.
            while job.pieces:
                yield job.pieces.popleft()
            if ended:
                if job.error is not None:
                    raise job.error
                return
            if not job.done:
                self.step()

    def cancel(self, job: Job) -> None:
        """Ends a job that has not ended: what it has generated so far stands, its slot is free."""
        with self._lock:
            self._batch.cancel(job)

    def abandon(self, job: Job) -> None:
        """Notes that nobody listens to a job any more. Takes no lock: for destructors."""
        self._abandoned.append(job)

    def end_abandoned(self) -> None:
        """Cancels the jobs that nobody listens to."""
        with self._lock:
            while self._abandoned:
                self.cancel(self._abandoned.popleft())

    def release(self, session: Session) -> None:
        """Closes a conversation and leaves what is stored of it: `session` goes on with it where the store is on SSD.

        Raises:
          SessionBusyError: a turn of it runs.
        """
        with self._lock:
            if session.is_busy:
                raise SessionBusyError(f"session {session.session_id!r} still answers; wanted it idle to let go of it")
            session.end()
            self._sessions.pop(session.session_id, None)
            self._kv.let_go(session)

    def forget(self, session: Session) -> None:
        """Drops a conversation and its KV; for `Session.close`."""
        with self._lock:
            if self._closed:
                return
            for job in (*self._scheduler.waiting, *self._scheduler.running):
                if job.session is session:
                    self.cancel(job)
            self._sessions.pop(session.session_id, None)
            self._kv.forget(session)

    def rewind(self, session: Session, left: Conversation) -> None:
        """Takes a conversation back to what is left of it, its KV too; for `Session.rewind`."""
        with self._lock:  # At once: what is written to SSD is either state.
            self._check_open()
            self._kv.truncate(session, len(left.token_ids), left)
            session.resume(left)
            self._kv.note(session)

    def discard(self, session: Session, discarded: np.ndarray) -> None:
        """Drops tokens of a conversation and their KV, bool `[T]`; for `Session.discard`."""
        with self._lock:
            self._check_open()
            self._truncator.cut(session, discarded, by_hand=True)
            self._kv.note(session)

    @property
    def stored(self) -> StoredSessions:
        """What the store keeps: to list, pin, drop, and to say how long it lives."""
        return StoredSessions(self._kv, self._lock)

    # Running.

    def step(self) -> bool:
        """Decodes one token for every running job and runs at most one pass of one prefill.

        Where nothing can run, because the KV of all waiting jobs is on its way from SSD or the write buffer is full,
        waits until something moves.

        Returns:
          Whether there was anything to do.
        """
        seen = self._wakeup.count
        with self._lock:
            self._check_open()
            self.end_abandoned()
            self._kv.collect()
            has_run = self._batch.step()
            stalled = not (has_run or self._scheduler.idle)
        if stalled:
            self._wakeup.wait(seen, _STALL_S if self._processes.count == 1 else _STALL_TOGETHER_S)
        return stalled or has_run

    def warmup(
        self,
        *,
        max_history_tokens: int | None = None,
        max_new_tokens: int | None = None,
        contexts: Sequence[Sequence[int]] = (),
        progress: Progress | None = None,
    ) -> float:
        """Compiles what turns up to these sizes need, so that none of them waits for it, and measures `rates`.

        The engine must be idle.

        Args:
          max_history_tokens: largest history; None means the context window.
          max_new_tokens: largest number of new tokens in one pass; None means `prefill_chunk_tokens`.
          contexts: tokens of each chunk, of contexts of chunks that will begin conversations; others compile when they
            first come.
          progress: told how far it is.

        Returns:
          Seconds it took.

        Raises:
          SessionBusyError: jobs are running or waiting.
        """
        with self._lock:
            self._check_open()
            if not self._scheduler.idle:
                raise SessionBusyError("wanted an idle engine to warm up, found jobs running or waiting")
            self._batch.settle()
            started_s = time.perf_counter()
            history = self.window if max_history_tokens is None else min(max_history_tokens, self.window)
            new = self.config.prefill_chunk_tokens if max_new_tokens is None else max_new_tokens
            self._runner.warmup(history, new, progress)
            self._truncator.warmup()
            self._sampler.warmup((1, *(size for size in self._runner.batch_buckets if size > 1)))
            self._measure(history, new)
            for chunk_tokens in contexts:
                self._batch.warm_up_context(chunk_tokens)
            return time.perf_counter() - started_s

    @property
    def rates(self) -> Rates | None:
        """How fast this engine loads, saves and prefills, as measured; None before `warmup` and a few turns.

        How fast it fetches from SSD is among them once it has.
        """
        with self._lock:
            return self._kv.meter.rates

    def wait_until_ready(self) -> None:
        """Returns when memory that is made resident in the background is; until then saves and loads are slower."""
        self._kv.wait_until_resident()

    def keep(self) -> bool:
        """Takes in what the store's threads have done, and has them go on; for the engine's own thread.

        Returns:
          Whether the engine is open still.
        """
        with self._lock:
            if not self._closed:
                self._kv.collect()
            return not self._closed

    def wait_for_saves(self) -> None:
        """Returns when the KV of all turns that have ended is in the store, on SSD if it has one, or was given up."""
        with self._lock:
            self._check_open()
            self._kv.settle()

    def store_stats(self) -> StoreStats:
        """What the store holds and has done."""
        with self._lock:
            self._check_open()
            return self._kv.stats()

    def truncate_stored(self, session: Session, num_tokens: int) -> None:
        """Forgets a conversation's KV behind its first `num_tokens` tokens, but not the conversation."""
        with self._lock:
            self._check_open()
            self._kv.truncate(session, num_tokens)

    def drop_stored(self, session: Session) -> None:
        """Forgets a conversation's KV but not the conversation: its next turn prefills everything."""
        self.truncate_stored(session, 0)

    def close(self) -> None:
        """Ends all jobs, finishes saves and lets go of memory. May be called again."""
        with self._lock:
            if self._closed:
                return
            for job in (*self._scheduler.waiting, *self._scheduler.running):
                self.cancel(job)
            self._kv.close()
            self._batch.close()
            self._closed = True
            self._wakeup.tell()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wake(self) -> None:
        """Has a `step` that waits for something to move look again. Takes no lock."""
        self._wakeup.tell()

    @property
    def num_jobs(self) -> tuple[int, int]:
        """How many jobs are in slots, and how many wait for one."""
        return len(self._scheduler.running), self._scheduler.num_waiting

    @property
    def jobs(self) -> tuple[tuple[Job, ...], tuple[Job, ...]]:
        """Those in slots, by slot, and those that wait for one, in the order in which they would get it."""
        with self._lock:
            return self._scheduler.running, self._scheduler.waiting

    def opened(self, session_id: str, *, tenant: str = "") -> Session | None:
        """The conversation of that id where it is open; None otherwise, or where it is another tenant's."""
        session = self._sessions.get(session_id)
        return session if session is not None and session.tenant == tenant else None

    # What its parts need.

    def _find(self, session_id: str, tenant: str, ttl_s: float | None = None) -> Session | None:
        session = self._sessions.get(session_id)
        if session is not None:
            if session.tenant != tenant:
                raise TenantError(f"session {session_id!r} wanted its own tenant, found {tenant!r}")
            return session
        kept = self._kv.recall(session_id, tenant)
        return None if kept is None else self._open(session_id, kept, tenant, ttl_s)

    def _open(self, session_id: str | None, begun: Conversation, tenant: str, ttl_s: float | None) -> Session:
        name = session_id or from_first(self._processes, "a session's name", uuid.uuid4().hex)
        session = self._sessions[name] = Session(self, name, begun, tenant=tenant, ttl_s=ttl_s)
        self._kv.opened(session)
        return session

    def _make_job(
        self,
        ids: list[int],
        params: SamplingParams,
        session: Session | None = None,
        priority: int = 0,
    ) -> Job:
        self._check_length(len(ids))
        tokenizer = self.model.tokenizer
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.model.stop_token_ids))
        return Job(
            prompt_ids=ids,
            params=params,
            output=TextOutput(None if tokenizer is None else tokenizer.stream(), params.stop, params.min_tokens),
            stop_ids=frozenset(stops),
            session=session,
            priority=priority,
        )

    def _check_bias(self, params: SamplingParams) -> None:
        num_tokens = self.model.config.vocab_size
        wrong = next((token for token, _ in params.logit_bias if not 0 <= token < num_tokens), None)
        if wrong is not None:
            raise InvalidRequestError(f"logit_bias wanted token ids in [0, {num_tokens}), found {wrong}")

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens >= self.window:
            raise ContextWindowError(
                f"wanted a prompt under the context window of {self.window} tokens, found {num_tokens}"
            )

    # Chunks.

    def _turn_parts(
        self, conversation: Conversation, new: list[Message], has_context: bool
    ) -> tuple[list[int], list[int]]:
        """New ids of a turn: those before its context, and those behind it."""
        token_ids, messages = conversation.token_ids, conversation.messages
        if has_context:
            return turn_parts(self.model, token_ids, messages, new)
        return [], turn_ids(self.model, token_ids, messages, new)[len(token_ids) :]

    def _check_context(self, num_others: int, chunks: list[list[int]], *, at_once: bool = True) -> None:
        """Raises where chunks do not fit the context window, each alone or all `at_once` with so many other tokens."""
        for number, ids in enumerate(chunks, 1):
            if len(ids) >= self.window:
                raise ContextWindowError(
                    f"wanted chunks under the context window of {self.window} tokens, "
                    f"found {len(ids)} in chunk {number} of {len(chunks)}"
                )
        num_tokens = num_others + sum(map(len, chunks))
        if at_once and num_tokens >= self.window:
            raise ContextWindowError(
                f"wanted a prompt under the context window of {self.window} tokens, found {num_tokens}: "
                f"{len(chunks)} chunks of {num_tokens - num_others} and {num_others} others; "
                f"leave out {num_tokens - self.window + 1} tokens of the chunks or more"
            )

    def _spans(self, chunks: list[list[int]], start: int, tenant: str) -> tuple[ChunkSpan, ...]:
        """Where chunks are in a prompt, the first at `start`; none where their KV is not to be reused."""
        if not self.config.blend.reuses_chunks:
            return ()
        starts = itertools.accumulate(map(len, chunks), initial=start)
        return tuple(
            ChunkSpan(self._kv.chunks.key(ids, tenant), start, len(ids))
            for ids, start in zip(chunks, starts, strict=False)
        )

    def _submit_chunks(self, job: Job, tenant: str) -> None:
        """Queues jobs for a job's chunks of which nothing is stored, in front of it."""
        for span in job.spans:
            self._submit_chunk(job.prompt_ids[span.start : span.stop], tenant, job.priority)

    def _submit_chunk(self, ids: list[int], tenant: str, priority: int = 0) -> Job | None:
        """Queues a job that computes a chunk; None where that is not needed, or would not be kept."""
        kv = self._kv.chunks
        span = ChunkSpan(kv.key(ids, tenant), 0, len(ids))
        if not from_first(self._processes, "a chunk", not kv.is_kept(span) and kv.has_room(len(ids))):
            return None
        job = self._make_job(ids, SamplingParams(), priority=priority)
        job.chunk, job.tenant = span, tenant
        kv.coming(job)
        self._scheduler.submit(job)
        return job

    def _tier_of(self, num_tokens: int) -> Literal["dram", "ssd"]:
        """Where a chunk is kept that is computed in advance."""
        rates, least, stats = self._kv.meter.rates, self.config.blend.min_recompute_ratio, self._kv.stats()
        if rates is None or self.config.store.ssd_dir is None or 2 * stats.used_bytes < stats.capacity_bytes:
            return "dram"
        return blend_costs.choose_tier(rates, num_tokens, 1, least)

    def _check_alike(self) -> None:
        """Checks that all processes serve the same, and that none needs what is another's."""
        if self._processes.count == 1:
            return
        store = dataclasses.replace(self.config.store, ssd_dir=None, ssd_url=None)
        config = dataclasses.replace(self.config, compile_cache_dir=None, store=store)
        described = {"model config": repr(self.model.config), "engine config": repr(config)}
        check_alike(self._processes, {"weights": self.model.fingerprint, **described})
        overflow = self.config.overflow
        if overflow is not None and overflow.token_discarder.needs_kv:
            raise ValueError(
                f"discarder {overflow.token_discarder.name} wanted all of a session's KV in one process, "
                f"found {self._processes.count}"
            )

    def _kv_fingerprint(self) -> str:
        """Tells apart KV of other weights, and of other rotary frequencies where those are the window's."""
        config, fingerprint = self.model.config, self.model.fingerprint
        return fingerprint if self.window <= config.steady_positions else f"{fingerprint} window {self.window}"

    def _measure(self, num_history: int, num_new: int) -> None:
        """Measures rates of what was warmed up."""
        self._kv.meter.forget()
        for sample in self._runner.measure_prefill(num_history, num_new):
            self._kv.meter.add_prefill(*sample)
        self._kv.measure()

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosedError("the engine is closed")


def _layout(config: EngineConfig) -> Layout:
    return partial(
        model_sharding,
        data_parallel_size=config.data_parallel_size,
        tensor_parallel_size=config.tensor_parallel_size,
    )


def _close_at_exit(engine: weakref.ref[Engine]) -> None:
    """Ends the engine's threads while the interpreter still stands."""
    if (alive := engine()) is not None:
        alive.close()


def _keep(engine: weakref.ref[Engine], wakeup: Wakeup) -> None:
    """Keeps saves and tiers going while nobody runs the engine, for as long as it lives and is open."""
    seen, going = 0, True
    while going:
        seen = wakeup.wait(seen, _KEEP_S)
        alive = engine()
        going = alive is not None and alive.keep()
        del alive


def enable_compile_cache(directory: str | None) -> None:
    """Keeps compiled functions in `directory` between runs, unless jax has been given one already."""
    if directory is None or jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
