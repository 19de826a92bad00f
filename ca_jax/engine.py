"""The engine: sessions and jobs in, tokens out. Composes scheduler, runner and stored KV; computes nothing itself.

One turn: `submit_turn` queues a job; each `step` takes the scheduler's plan, begins to load what comes next, decodes a
token for every running job and runs a pass of one prefill; `_finish` hands the last KV to be saved. Whoever iterates
an answer runs the engine, one thread at a time.

Not here: jitted code (steps), device state (runner), one job's prefill (prefilling), loading and saving (session_kv),
text to tokens (prompts).
"""

from __future__ import annotations

import atexit
import collections
import math
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from ca_jax import costs
from ca_jax.compute_watch import ComputeWatch
from ca_jax.config import EngineConfig
from ca_jax.conversations import Conversation
from ca_jax.decoder import Decoder, DecodeRow
from ca_jax.device_memory import check_buffers
from ca_jax.errors import (
    ContextWindowError,
    InvalidRequestError,
    SessionBusyError,
    SessionClosedError,
    TenantError,
)
from ca_jax.metrics import EngineMetrics
from ca_jax.prefilling import Prefilling
from ca_jax.pretrained import LoadedModel, Progress, load_model
from ca_jax.prompts import prompt_ids, text_of, turn_ids
from ca_jax.rates import Rates
from ca_jax.runner import Runner
from ca_jax.sampler import Sampler
from ca_jax.scheduler import Scheduler
from ca_jax.session import Completion, FinishReason, Job, SamplingParams, Session
from ca_jax.session_kv import SessionKV
from ca_jax.storage.attention_store import AttentionStore
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.records import StoreStats
from ca_jax.stored_sessions import StoredSessions
from ca_jax.text_output import TextOutput
from ca_jax.timeline import NO_TIMELINE, Timeline
from ca_jax.transfer import to_host_memory
from ca_jax.turn_saver import TurnSaver
from ca_jax.wakeup import Wakeup

DEFAULT_WINDOW_TOKENS = 4096
"""Largest context window taken unless a larger one is asked for."""
_STALL_S = 0.5  # Longest wait for KV on its way before looking again.
_KEEP_S = 10.0  # How often times to live are looked at while nothing else happens.


class Engine:
    """Serves conversations of one model.

    Public methods may be called from any thread; one at a time runs the engine.

    Args:
      model: what to serve.
      config: how.
      timeline: gets spans of what happens when; by default nothing is recorded.
      store_wrapper: given the store, returns what is used in its place; for `ca_jax.testing`.

    Raises:
      ValueError: the context window is above what the model was trained for, or a size does not fit the machine.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig | None = None,
        *,
        timeline: Timeline = NO_TIMELINE,
        store_wrapper: Callable[[AttentionStore], AttentionStore] | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.model = model
        self.metrics = EngineMetrics(model_load_s=model.load_s)
        limit = model.config.max_positions
        self.window = self.config.context_window or min(limit, DEFAULT_WINDOW_TOKENS)
        if self.window > limit:
            raise ValueError(f"context_window wanted at most the model's {limit} tokens, found {self.window}")
        self._lock = threading.RLock()
        self._wakeup = Wakeup()
        self._closed = False
        self._sessions: dict[str, Session] = {}
        self._savers: dict[Job, TurnSaver] = {}
        self._timeline = timeline
        self._watch = ComputeWatch(timeline)
        self._prefilling: Prefilling | None = None
        self._decode_s: float | None = None  # What a decode step takes, as the last ones did.
        self._abandoned: collections.deque[Job] = collections.deque()
        self._scheduler = Scheduler(self.config.max_batch_size)
        self._sampler = Sampler(self.config.max_batch_size, model.config.vocab_size)
        self._runner = Runner(
            model.config,
            model.params,
            window=self.window,
            max_batch_size=self.config.max_batch_size,
            chunk_tokens=self.config.prefill_chunk_tokens,
            shorter_passes=self.config.max_tpot_ms is not None,
            timeline=timeline,
        )
        self._decoder = Decoder(self._runner, self._sampler)
        layout = KVLayout(
            num_layers=model.config.num_layers,
            num_kv_heads=model.config.num_kv_heads,
            head_dim=model.config.head_dim,
            dtype=model.dtype,
            block_tokens=self.config.store.block_tokens,
        )
        check_buffers(self.config, layout, self._runner)
        self._kv = SessionKV(
            layout,
            self.config,
            self._runner,
            fingerprint=model.fingerprint,
            metrics=self.metrics,
            on_progress=self._wakeup.tell,
            timeline=timeline,
            store_wrapper=store_wrapper,
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
        return cls(load_model(model, dtype=config.dtype, progress=progress), config)

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
            session = None if session_id is None else self._sessions.get(session_id)
            if session is not None and session.tenant != tenant:
                raise TenantError(f"session {session_id!r} wanted its own tenant, found {tenant!r}")
            kept = None if session is not None or session_id is None else self._kv.recall(session_id, tenant)
            if system is not None and (session or kept):
                raise InvalidRequestError(f"session {session_id!r} has begun: wanted no system message")
            if session is None:
                messages = [] if system is None else [{"role": "system", "content": system}]
                new = Conversation(token_ids=[], messages=messages, turn_starts=[])
                session = Session(self, session_id or uuid.uuid4().hex, kept or new, tenant=tenant, ttl_s=ttl_s)
                self._sessions[session.session_id] = session
            return session

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Conversations that are open, oldest first."""
        return tuple(self._sessions.values())

    def submit_turn(
        self, session: Session, message: str | Sequence[int], params: SamplingParams, priority: int = 0
    ) -> Job:
        """Queues a turn; for `Session.send` and `send_ids`, which say what is raised."""
        with self._lock:
            self._check_open()
            if isinstance(message, str):
                ids = turn_ids(self.model, session.token_ids, session.messages, message)
            else:
                new_ids = prompt_ids(self.model, message)
                ids, message = session.token_ids + new_ids, text_of(self.model, new_ids)
            job = self._make_job(ids, params, session, message, priority)
            self._scheduler.submit(job)
            self._kv.announce(job, session)
            return job

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
          InvalidRequestError: a prompt that is no text and has a wrong id, or not one `params` for each prompt.
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
            if not job.done:
                self.metrics.cancelled += 1
                self._finish(job, FinishReason.CANCELLED)

    def abandon(self, job: Job) -> None:
        """Notes that nobody listens to a job any more. Takes no lock: for destructors."""
        self._abandoned.append(job)

    def end_abandoned(self) -> None:
        """Cancels the jobs that nobody listens to."""
        with self._lock:
            while self._abandoned:
                self.cancel(self._abandoned.popleft())

    def forget(self, session: Session) -> None:
        """Drops a conversation and its KV; for `Session.close`."""
        with self._lock:
            if self._closed:
                return
            self._sessions.pop(session.session_id, None)
            self._kv.truncate(session, 0)

    def rewind(self, session: Session, left: Conversation) -> None:
        """Takes a conversation back to what is left of it, its KV too; for `Session.rewind`."""
        with self._lock:  # At once: what is written to SSD is either state.
            self._check_open()
            self._kv.truncate(session, len(left.token_ids))
            session.resume(left)
            self._kv.remember(session)

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
            self._insert_prefilled()
            plan = self._scheduler.schedule(self._kv.ready, self._admits)
            if plan.prefill is not None:
                self._begin_prefill(plan.prefill)
            if plan.preload is not None and plan.preload.session is not None:
                self._kv.preload(plan.preload, plan.preload.session)
            if plan.decode:
                self._decode(list(plan.decode))
            if plan.prefill is not None and not plan.prefill.done:  # Last, so that a first token goes out at once.
                self._run_pass(plan.prefill, is_alone=not plan.decode)
            has_run = plan.prefill is not None or bool(plan.decode)
            stalled = not (has_run or self._scheduler.idle)
        if stalled:
            self._wakeup.wait(seen, _STALL_S)
        return stalled or has_run

    def warmup(
        self,
        *,
        max_history_tokens: int | None = None,
        max_new_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> float:
        """Compiles what turns up to these sizes need, so that none of them waits for it, and measures `rates`.

        The engine must be idle.

        Args:
          max_history_tokens: largest history; None means the context window.
          max_new_tokens: largest number of new tokens in one pass; None means `prefill_chunk_tokens`.
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
            self._insert_prefilled()
            started_s = time.perf_counter()
            history = self.window if max_history_tokens is None else min(max_history_tokens, self.window)
            new = self.config.prefill_chunk_tokens if max_new_tokens is None else max_new_tokens
            self._runner.warmup(history, new, progress)
            self._sampler.warmup(self._runner.batch_buckets)
            self._measure(history, new)
            return time.perf_counter() - started_s

    @property
    def rates(self) -> Rates | None:
        """How fast this engine loads, saves and prefills, as measured; None before `warmup` and a few turns."""
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
            self._watch.close()
            self._closed = True
            self._wakeup.tell()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # A turn, in order.

    def _make_job(
        self,
        ids: list[int],
        params: SamplingParams,
        session: Session | None = None,
        message: str = "",
        priority: int = 0,
    ) -> Job:
        if len(ids) >= self.window:
            raise ContextWindowError(
                f"wanted a prompt under the context window of {self.window} tokens, found {len(ids)}"
            )
        tokenizer = self.model.tokenizer
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.model.stop_token_ids))
        return Job(
            prompt_ids=ids,
            params=params,
            output=TextOutput(None if tokenizer is None else tokenizer.stream(), params.stop),
            stop_ids=frozenset(stops),
            session=session,
            message=message,
            priority=priority,
        )

    def _admits(self, job: Job) -> bool:
        return job.session is None or self._kv.write_buffer.admits(min(len(job.prompt_ids), self._runner.chunk_tokens))

    def _begin_prefill(self, job: Job) -> None:
        """Begins to load a job's history, if this is its first step."""
        if self._prefilling is not None and self._prefilling.job is job:
            return
        job.started_s = time.perf_counter()
        try:
            if job.slot is None:
                raise RuntimeError(f"job {job.job_id} was planned without a slot")
            self._sampler.set_slot(job.slot, job.params, job.prompt_ids)
            self._prefilling = Prefilling(job, self._runner, self._kv, self.metrics, self._watch)
        except Exception as error:  # One broken job must not end the others; its caller gets the error.
            self._fail(job, error)

    def _run_pass(self, job: Job, is_alone: bool) -> None:
        """Runs a pass of the prefill; with the last one, draws the first token."""
        prefilling = self._prefilling
        if prefilling is None or job.slot is None:
            raise RuntimeError(f"job {job.job_id} has no prefill to go on with")
        try:
            logits = prefilling.run_pass(self._pass_tokens(prefilling, is_alone), is_alone)
            if logits is None:
                return
            token = int(self._sampler.draw(logits, np.array([len(job.prompt_ids)]), job.slot)[0])
        except Exception as error:  # As above.
            self._fail(job, error)
            return
        prefilling.finish()
        if prefilling.saver is not None:
            self._savers[job] = prefilling.saver
        self.metrics.prompt_tokens += len(job.prompt_ids)
        self.metrics.cached_tokens += job.cached_tokens
        self._scheduler.prefilled(job)
        self._accept(job, token)

    def _pass_tokens(self, prefilling: Prefilling, is_alone: bool) -> int:
        """How many tokens the next pass takes: fewer than a chunk where others would wait too long for it."""
        most = self._runner.chunk_tokens
        rates = self._kv.meter.rates
        if not is_alone and self.config.max_tpot_ms is not None and rates is not None:
            budget_s = self.config.max_tpot_ms / 1e3 - (self._decode_s or 0.0)
            most = costs.largest_pass(rates, prefilling.num_before, self._runner.pass_sizes, budget_s)
        return min(most, prefilling.num_left)

    def _insert_prefilled(self) -> None:
        """Moves the last prefill into its decode slot; put off until now so that its first token did not wait."""
        prefilling = self._prefilling
        if prefilling is not None and prefilling.is_complete:
            self._prefilling = None
            prefilling.insert()
            prefilling.release()

    def _measure(self, num_history: int, num_new: int) -> None:
        """Measures rates of what was warmed up."""
        self._kv.meter.forget()
        for sample in self._runner.measure_prefill(num_history, num_new):
            self._kv.meter.add_prefill(*sample)
        self._kv.measure()

    def _decode(self, jobs: list[Job]) -> None:
        rows = [
            DecodeRow(job.job_id, job.slot, job.output_ids[-1], job.num_tokens - 1)
            for job in jobs
            if job.slot is not None
        ]
        more = all(len(job.output_ids) + 1 < job.params.max_tokens and job.num_tokens + 1 < self.window for job in jobs)
        is_alone = not self._scheduler.num_waiting and self._scheduler.prefilling is None
        self._kv.write_buffer.make_room(len(rows))
        started_s = time.perf_counter()
        with self._timeline.annotate("engine", "decode", rows=len(rows)):
            drawn, kv = self._decoder.step(rows, run_ahead=more and is_alone)
        self._decode_s = time.perf_counter() - started_s
        self._timeline.add("compute", "decode", started_s, started_s + self._decode_s, rows=len(rows))
        self.metrics.decode_steps += 1
        if self._savers:
            kv = to_host_memory(kv)  # Once for all of its rows.
        for row, job in zip(rows, jobs, strict=True):
            if job in self._savers:
                self._savers[job].add_decoded(row.token, kv, row.slot)
            self._accept(job, int(drawn[row.slot]))

    def _accept(self, job: Job, token: int) -> None:
        """Takes a drawn token and ends the job if it is the last."""
        if not job.output_ids:
            job.first_token_s = time.perf_counter()
        job.output_ids.append(token)
        job.token_times_s.append(time.perf_counter())
        if job.slot is not None:
            self._sampler.mark(job.slot, token)
        if token in job.stop_ids:
            self._finish(job, FinishReason.STOP)
            return
        if piece := job.output.push(token):
            job.pieces.append(piece)
        if job.output.stopped:
            self._finish(job, FinishReason.STOP)
        elif len(job.output_ids) >= job.params.max_tokens or job.num_tokens >= self.window:
            self._finish(job, FinishReason.LENGTH)

    def _finish(self, job: Job, reason: FinishReason) -> None:
        if piece := job.output.finish():
            job.pieces.append(piece)
        self._release(job)
        job.finished_s = time.perf_counter()
        job.finish_reason = reason
        self.metrics.completion_tokens += len(job.output_ids)
        if reason is not FinishReason.CANCELLED:
            self.metrics.turns += 1
        if job.session is not None and job.output_ids:
            job.session.adopt(job)
            self._kv.remember(job.session)

    def _fail(self, job: Job, error: Exception) -> None:
        self._release(job)
        job.error = error

    def _release(self, job: Job) -> None:
        """Gives back a job's slot and its staging, and submits what is left to save."""
        saver = self._savers.pop(job, None)
        if self._prefilling is not None and self._prefilling.job is job:
            saver = self._prefilling.saver
            self._prefilling.release()
            self._prefilling = None
        if job.slot is not None:
            self._sampler.free_slot(job.slot)
        self._scheduler.remove(job)
        self._kv.withdraw(job)
        if saver is not None:
            self._kv.write_buffer.end(saver)

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosedError("the engine is closed")


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
