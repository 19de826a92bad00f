"""The engine: sessions and jobs in, tokens out. Composes scheduler, runner and stored KV; computes nothing itself.

One turn: `submit_turn` queues a job; each `step` takes in what was saved and has the batch do what the scheduler plans.
The thread that iterates an answer runs the engine, one at a time.

Not here: what a step does (batch), who runs (scheduler), device state (runner), loads and saves (kv), tokens (prompts).
"""

from __future__ import annotations

import collections
import contextlib
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ca_jax.config import EngineConfig
from ca_jax.device.processes import Processes, current
from ca_jax.errors import SessionBusyError, SessionClosedError
from ca_jax.kv.costs import Rates, Tier
from ca_jax.models.adapters import Adapter
from ca_jax.pretrained import LoadedModel, Progress, load_model
from ca_jax.serving.core import EngineCore, enable_compile_cache, keep_going, layout_of
from ca_jax.serving.idle_recompute import IdleRecompute
from ca_jax.serving.open_sessions import Elsewhere, OpenSessions
from ca_jax.serving.prompts import params_of_each, prompt_ids
from ca_jax.serving.stored_sessions import StoredSessions
from ca_jax.session import Job, Session
from ca_jax.storage.records import StoreStats
from ca_jax.storage.store import AttentionStore
from ca_jax.telemetry.timeline import NO_TIMELINE, Timeline
from ca_jax.telemetry.wakeup import CountedLock, Wakeup
from ca_jax.turns.conversations import Conversation
from ca_jax.turns.requests import Completion, SamplingParams, TurnRequest
from ca_jax.turns.text import Texts, TextWork

_STALL_S = 0.5  # Longest wait for KV on its way before looking again.
_STALL_TOGETHER_S = 0.01  # The same where another process may be what has moved.


class Engine:
    """Serves conversations of one model.

    Public methods may be called from any thread; one at a time runs the engine. Once it is closed, those that begin or
    run something raise `SessionClosedError`.

    Args:
      model: what to serve. One that is on one device, and is to be served by several, is copied to them.
      config: how.
      timeline: gets spans of what happens when; by default nothing is recorded.
      store_wrapper: given the store, returns what is used in its place, for tests and benchmarks.
      processes: those that serve as one; by default those of `jax.distributed`, where that is initialised.
      draft_model: guesses tokens, too; by default the one that `config.draft_model` names, if any.

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
        draft_model: LoadedModel | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self._processes, self._wakeup = processes or current(), Wakeup()
        together = self._processes, timeline, self._wakeup.tell, store_wrapper, draft_model
        self._core = core = EngineCore(model, self.config, *together)
        self.model, self.window, self.metrics, self._adapters = core.model, core.window, core.metrics, core.adapters
        self._scheduler, self._runner, self._kv = core.scheduler, core.runner, core.kv
        self._truncator, self._turns, self._batch = core.truncator, core.turns, core.batch
        self._lock, self._closed = CountedLock(), False
        self._sessions = OpenSessions(partial(Session, self), core.kv, core.batch, self._processes, core.adapters)
        self._abandoned: collections.deque[Job] = collections.deque()
        self._at_idle = IdleRecompute(core, self._sessions, self._lock)
        keep_going(weakref.ref(self), self._wakeup)

    @classmethod
    def from_pretrained(
        cls, model: str, config: EngineConfig | None = None, *, progress: Progress | None = None, warm: bool = True
    ) -> Engine:
        """Loads a model and makes an engine for it; see `load_model` for what `model` may be and what is raised.

        With `warm` a thread compiles what turns may need, so that few wait for it; see `warmup`.
        """
        config = config or EngineConfig()
        enable_compile_cache(config.compile_cache_dir)
        load = partial(load_model, dtype=config.dtype, weight_dtype=config.weight_dtype, layout=layout_of(config))
        engine = cls(load(model, progress=progress), config)
        if warm:
            engine._core.warm_in_background()
        return engine

    # Conversations.

    def session(
        self,
        *,
        system: str | None = None,
        session_id: str | None = None,
        tenant: str = "",
        ttl_s: float | None = None,
        adapter: str | None = None,
    ) -> Session:
        """Begins a conversation, returns the open one of that id, or goes on with the one that the store kept.

        Args:
          system: its system message; for a conversation that exists already it must not be given.
          session_id: its name; made up if not given.
          tenant: whose it is; ids are unique over all tenants.
          ttl_s: how long a new one's KV is kept after its last use, seconds; None: as the store's config says.
          adapter: the adapter that a new one is held with, for good; None: none, and one that exists has its own.

        Raises:
          TenantError: the conversation is another tenant's.
          UnknownAdapterError: the adapter is not loaded, or the one that the conversation is held with is not.
          InvalidRequestError: a system message, or another adapter, for a conversation that exists, or a time that is
            negative.
        """
        with self._open_now():
            return self._sessions.ask(session_id, system, tenant, ttl_s, adapter)

    def find_session(self, session_id: str, *, tenant: str = "") -> Session | None:
        """The conversation of that id that is open or that the store kept; None if there is none.

        Raises:
          TenantError: the conversation is another tenant's.
        """
        with self._open_now():
            return self._sessions.find(session_id, tenant)

    @property
    def elsewhere(self) -> Elsewhere | None:
        """Conversations that replicas share, to be gone on with here; None: this engine shares none."""
        return None if self._kv.shared is None else Elsewhere(self._sessions, self._kv, self._kv.shared, self._lock)

    def fork(
        self, session: Session, num_tokens: int | None = None, *, session_id: str | None = None, is_kept: bool = True
    ) -> Session:
        """Begins a conversation that goes on behind the first tokens of another, which stays as it is and may be busy.

        What of their KV is as computing them would give is shared, in the store.

        Args:
          session: what the new one begins with; its tenant and its time to live are the new one's.
          num_tokens: of how many tokens; None: all of those whose turns have ended.
          session_id: names the new one; made up if not given.
          is_kept: False: nothing of what is said in the new one is stored, in any tier, nor noted; it goes with the
            object. What others have stored is loaded for it.

        Raises:
          InvalidRequestError: `num_tokens` is not 0 to the session's tokens, or the name is taken.
        """
        with self._open_now():
            return self._sessions.fork(session, num_tokens, session_id, is_kept)

    @property
    def truncation_rule(self) -> str:
        """Names how tokens leave; see `Conversation.cut_by`."""
        return self._truncator.rule

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Conversations that are open, oldest first."""
        return tuple(self._sessions)

    def submit_turn(self, session: Session, request: TurnRequest, texts: Texts | None = None) -> Job:
        """Queues a turn; for `Session.submit`, which says what is raised.

        Much text is rendered and tokenised without the engine's lock; if the conversation is another one by then, anew.
        With `texts`, what is known of the request's texts, `TextWork` is raised in place of that.
        """
        submitted_s, known = time.perf_counter(), texts or Texts()  # What is tokenised and dropped it waits for.
        while True:
            try:
                with self._open_now():
                    session.check_ready()  # It may have been before its text was known.
                    job = self._turns.turn(session, request, known)
                    job.submitted_s = submitted_s
                    for chunk in self._turns.missing_chunks(job, session):
                        self._scheduler.submit(chunk)
                    self._kv.announce(job, session)
                    session.job = self._scheduler.submit(job)
                    return job
            except TextWork as work:
                if texts is not None:
                    raise
                work.do()

    def precompute(self, chunks: Sequence[str | Sequence[int]], *, tenant: str = "", tier: Tier | None = None) -> int:
        """Computes and stores the KV of text chunks, each by itself, for contexts to come; see `Session.send`.

        Runs the engine until all are on their way to the store.

        Args:
          chunks: texts, or token ids, as they will be given as context.
          tenant: whose: only sessions of the same tenant use them.
          tier: `ssd` keeps what is computed now on SSD alone until it is used, if the store has one. None: once half of
            DRAM is taken, the cheapest tier from which a layer's loading hides behind recomputing, by measured rates
            (`costs.choose_tier`).

        Returns:
          How many were computed. Others were stored already, or are too large for the store.

        Raises:
          InvalidRequestError: an id outside the vocabulary.
          EmptyMessageError: no chunks, or a chunk without text.
          ContextWindowError: a chunk that is longer than the context window.
        """
        jobs = self.submit_chunks(chunks, tenant=tenant, tier=tier)
        self._run(jobs)
        return len(jobs)

    def submit_chunks(
        self, chunks: Sequence[str | Sequence[int]], *, tenant: str = "", tier: Tier | None = None
    ) -> list[Job]:
        """Queues a job for each chunk that is not stored, without running the engine; otherwise as `precompute`."""
        with self._open_now():
            return [self._scheduler.submit(job) for job in self._turns.chunks(chunks, tenant, tier)]

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
    ) -> list[Completion]:
        """Answers prompts, each on its own, in one continuous batch.

        Their KV is stored, and each begins with what is stored of others, and of sessions without tenant, alike.

        Args:
          prompts: texts, or token ids.
          params: for all, or one for each; greedy if not given.
          adapter: that all are computed with; None: the model alone.

        Returns:
          A completion per prompt, in order.

        Raises:
          UnknownAdapterError: the adapter is not loaded.
          InvalidRequestError: a prompt that is no text and has a wrong id, a wrong id in a `logit_bias`, or not one
            `params` for each prompt.
          EmptyMessageError: a prompt without tokens.
          ContextWindowError: a prompt that leaves no room for an answer. Nothing has been run then.
        """
        each, ids = params_of_each(prompts, params), [prompt_ids(self.model, prompt) for prompt in prompts]
        with self._open_now():
            sessions = [self._sessions.new(None, self._adapters.begin(adapter=adapter), keeps="kv") for _ in prompts]
            jobs = list(map(self._turns.job, ids, each, sessions))
            for job, session in zip(jobs, sessions, strict=True):
                job.may_drop = False
                self._kv.announce(job, session)
                self._scheduler.submit(job)
        try:
            self._run(jobs)
        finally:
            for job in jobs:
                self.cancel(job)
        return [job.completion() for job in jobs]

    def _run(self, jobs: Sequence[Job]) -> None:
        """Runs the engine until all of these have ended."""
        for job in jobs:
            collections.deque(self.stream(job), maxlen=0)

    def stream(self, job: Job) -> Iterator[str]:
        """Runs the engine until `job` ends and yields its text as it comes.

        Raises:
          Exception: what broke the job, or a step or the slots that it shared with others; the engine goes on, and all
            jobs that had no part in it.
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
            self._sessions.release(session)

    def forget(self, session: Session) -> None:
        """Drops a conversation and its KV; for `Session.close`."""
        with self._lock:
            if self._closed:
                return
            if session.job is not None:
                self.cancel(session.job)
            self._sessions.forget(session)

    def discard(self, session: Session, discarded: np.ndarray) -> None:
        """Drops tokens of a conversation and their KV, bool `[T]`; for `Session.discard`."""
        with self._open_now():
            self._truncator.cut(session, discarded, by_hand=True)
            self._kv.note(session)

    @property
    def stored(self) -> StoredSessions:
        """What the store keeps: to list, pin, drop, and to say how long it lives."""
        return StoredSessions(self._kv, self._sessions, self._lock)

    # Adapters.

    def load_adapter(self, name: str, path: str | Path | Adapter) -> Adapter:
        """Loads a LoRA adapter from a directory as PEFT writes it, for sessions to come; see `LoadedAdapters.load`."""
        return self._adapters.load(name, path, self._open_now)

    def unload_adapter(self, name: str) -> None:
        """Gives the room of an adapter that nothing uses back; see `LoadedAdapters.unload`, also for what is raised."""
        with self._open_now():
            self._adapters.unload(name, (*self._scheduler.running, *self._scheduler.waiting), self._sessions)

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """Those that are loaded, oldest first."""
        return tuple(self._adapters)

    # Running.

    def step(self) -> bool:
        """Decodes one token for every running job and runs at most one pass; with no job, recomputes one history.

        Where nothing can run yet, because the KV that it takes is on its way or the write buffer is full, waits until
        something moves. Returns whether there was anything to do.
        """
        seen = self._wakeup.count
        with self._open_now():
            self.end_abandoned()
            self._collect()
            has_run, waits = self._batch.step(), not self._scheduler.idle
            if not (has_run or waits):
                has_run, waits = self._at_idle.step(), self._at_idle.waits
            stalled = waits and not has_run
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
          max_new_tokens: largest number of new tokens in one pass; None means `max_num_batched_tokens`.
          contexts: tokens of each chunk, of contexts of chunks that will begin conversations; others compile when they
            first come.
          progress: told how far it is.

        Returns the seconds it took.

        Raises:
          SessionBusyError: jobs are running or waiting.
        """
        with self._open_now():
            if not self._scheduler.idle:
                raise SessionBusyError("an engine must be idle to warm up, got jobs running or waiting")
            started_s = time.perf_counter()
            self._core.warm_up(max_history_tokens, max_new_tokens, contexts, progress)
            return time.perf_counter() - started_s

    @property
    def rates(self) -> Rates | None:
        """How fast this engine loads, saves, fetches and prefills, as measured; None before `warmup` and some turns."""
        with self._lock:
            return self._kv.meter.rates

    def wait_until_ready(self) -> None:
        """Returns when memory that is made resident in the background is; until then saves and loads are slower."""
        self._kv.wait_until_resident()

    def keep(self) -> bool:
        """Takes in what the store's threads have done, and has them go on; whether the engine is open still."""
        with self._lock.quietly:
            if not self._closed:
                self._collect()
            return not self._closed

    def wait_for_saves(self) -> None:
        """Returns when the KV of all turns that have ended is in the store, on SSD if it has one, or was given up."""
        with self._open_now():
            self._kv.settle()

    def store_stats(self) -> StoreStats:
        """What the store holds and has done."""
        with self._open_now():
            return self._kv.store.stats()

    def watch_store(self, watcher: Callable[[AttentionStore, Collection[str]], None]) -> None:
        """Has `watcher` told of all that changes in the store, on whichever thread runs the engine.

        It must not block. See `AttentionStore.watch`.
        """
        with self._open_now():
            self._kv.store.watch(partial(watcher, self._kv.store))

    def truncate_stored(self, session: Session, num_tokens: int, left: Conversation | None = None) -> None:
        """Forgets a conversation's KV behind its first `num_tokens` tokens, and takes it back to what is `left` of it.

        None: all is left, and its next turn prefills the rest. SSD has either state. Where one runs: SessionBusyError.
        """
        with self._open_now():
            self._sessions.truncate(session, num_tokens, left)

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
            self._core.close()
            self._closed = True
            self._wakeup.tell()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wake(self) -> None:
        """Has a `step` that waits, or computes for nobody, look again. Takes no lock."""
        self._lock.ask()
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

    def _collect(self) -> None:
        self._kv.collect()
        self._sessions.end_lost()

    @contextlib.contextmanager
    def _open_now(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise SessionClosedError("the engine is closed")
            yield
