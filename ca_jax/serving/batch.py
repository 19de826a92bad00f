"""The running batch: jobs in decode slots, from the first pass of their prefill to their last token.

Takes a plan of the scheduler and does it: begins loads, decodes a token for every job, runs a pass of one prefill, and
takes what was drawn. Ends jobs, gives back what they held, and keeps what they said.

A decode step is dispatched before the last one's tokens are read: the device computes while Python hands out text and
plans. Where an answer has penalties, which the host counts, a step's tokens are drawn once the last ones are read; its
logits are computed ahead all the same. A step that was dispatched and is not wanted, since the batch changed, is thrown
away: it wrote keys and values only behind its jobs' lengths, where they are never attended to and are written again.

Not here: who runs (scheduler), sessions and locks (engine), one prefill (prefilling), arrays (runner).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from ca_jax.device.buckets import pad_to
from ca_jax.device.processes import all_agree, least
from ca_jax.device.runner import Runner
from ca_jax.device.runtime import Runtime
from ca_jax.device.sampler import Draw, Sampler
from ca_jax.device.transfer import to_host, to_host_memory
from ca_jax.kv import costs
from ca_jax.kv.save import TurnSaver
from ca_jax.kv.session_kv import SessionKV
from ca_jax.recompute.plan import blend_plan
from ca_jax.recompute.recomputer import warm_up
from ca_jax.serving.prefilling import Prefilling
from ca_jax.serving.scheduler import Scheduler, StepPlan
from ca_jax.serving.truncator import Truncator
from ca_jax.turns.chunks import ChunkSpan
from ca_jax.turns.conversations import padded
from ca_jax.turns.jobs import Job
from ca_jax.turns.requests import FinishReason


@dataclasses.dataclass(frozen=True)
class DecodeRow:
    """One job's next token."""

    job_id: int
    """Whose."""
    slot: int
    """Where its KV is."""
    token: int
    """The last token, whose KV this step computes."""
    length: int
    """Tokens already in the slot."""
    num_dropped: int = 0
    """Tokens that have left it: a draw is by how many tokens there were, and must not be the same again."""


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A step that has been dispatched."""

    batch: tuple[tuple[int, int, int], ...]  # job, slot, length
    lengths: np.ndarray
    dropped: np.ndarray
    logits: jax.Array
    draw: Draw | None  # None: it depends on the last step's tokens.
    kv: jax.Array
    received: jax.Array | None


class Decoder:
    """Steps the decode slots by a token, one step ahead where it may. Belongs to the engine's thread."""

    def __init__(self, runner: Runner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler
        self._ahead: _Flight | None = None

    def step(
        self, rows: list[DecodeRow], run_ahead: bool, on_dispatched: Callable[[], None] = lambda: None
    ) -> tuple[Draw, jax.Array, np.ndarray | None]:
        """Decodes one token for each row, and waits for them.

        Args:
          rows: at least one, each of another slot.
          run_ahead: whether all rows are likely to want another token, and nobody else may begin before that.
          on_dispatched: called once all is dispatched, before it is waited for.

        Returns:
          Drawn tokens by slot, the unrotated KV of the rows' last tokens `[L, 2, n, K, H]`, and the
          attention that tokens of each slot received, f32 `[n, C]`; None where the runner does not measure it.
        """
        batch = tuple((row.job_id, row.slot, row.length) for row in rows)
        flight, self._ahead = self._ahead, None
        if flight is None or flight.batch != batch:
            num_rows = pad_to(self._runner.batch_buckets, 1 + max(row.slot for row in rows))
            tokens, lengths, dropped = (np.zeros(num_rows, np.int32) for _ in range(3))
            for row in rows:
                tokens[row.slot], lengths[row.slot], dropped[row.slot] = row.token, row.length, row.num_dropped
            flight = self._dispatch(batch, tokens, lengths, dropped)
        draw = flight.draw or self._draw(flight.logits, flight.lengths, flight.dropped)
        if run_ahead:
            lengths = flight.lengths.copy()
            for row in rows:
                lengths[row.slot] += 1
            self._ahead = self._dispatch(
                tuple((job, slot, length + 1) for job, slot, length in batch),
                draw.tokens,
                lengths,
                flight.dropped,
                draws=not self._sampler.has_penalties,
            )
        on_dispatched()
        received = None if flight.received is None else to_host(flight.received)
        return draw.wait(), flight.kv, received

    def _dispatch(
        self,
        batch: tuple[tuple[int, int, int], ...],
        tokens: np.ndarray | jax.Array,
        lengths: np.ndarray,
        dropped: np.ndarray,
        *,
        draws: bool = True,
    ) -> _Flight:
        logits, kv, received = self._runner.slots.decode(tokens, lengths)
        draw = self._draw(logits, lengths, dropped) if draws else None
        return _Flight(batch, lengths, dropped, logits, draw, kv, received)

    def _draw(self, logits: jax.Array, lengths: np.ndarray, dropped: np.ndarray) -> Draw:
        return self._sampler.start(logits, lengths + dropped + 1)


_QUESTION_TOKENS = 64  # Behind a context that is warmed up for: rates say by them what ratio it will have.


class Batch:
    """Runs jobs. Belongs to the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampler: Sampler,
        kv: SessionKV,
        truncator: Truncator,
        runtime: Runtime,
    ) -> None:
        self._runtime = runtime
        self._scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self._kv = kv
        self._config = runtime.config
        self._metrics = runtime.metrics
        self._timeline = runtime.timeline
        self._window = runner.window
        self._truncator = truncator
        self._decoder = Decoder(runner, sampler)
        self._savers: dict[Job, TurnSaver] = {}
        self._prefilling: Prefilling | None = None
        self._decode_s = 0.0  # What the last decode step took.

    def warm_up_context(self, chunk_tokens: Sequence[int]) -> None:
        """Compiles what blending chunks of such lengths needs, where chunks are blended. Nothing may run."""
        if self._config.blend.reuses_chunks:
            num_tokens = sum(chunk_tokens)
            ratio = self._kv.histories.recompute_ratio(num_tokens, 0, _QUESTION_TOKENS)
            starts = itertools.accumulate(chunk_tokens, initial=0)
            spans = [ChunkSpan("", start, size) for start, size in zip(starts, chunk_tokens, strict=False)]
            plan = blend_plan(self._config.blend, self._runner.config.num_layers, num_tokens, 0, spans, ratio)
            warm_up(self._runner, num_tokens, plan)

    def step(self) -> bool:
        """Plans a step and does it; whether there was anything to do."""
        self.settle()
        plan = self._scheduler.schedule(self._kv.ready, self._admits)
        self._begin_loads(plan)
        if plan.decode:
            self._decode(list(plan.decode))
        if plan.prefill is not None and not plan.prefill.done:  # Last, so that a first token goes out at once.
            self._run_pass(plan.prefill, is_alone=not plan.decode)
        return plan.prefill is not None or bool(plan.decode)

    def cancel(self, job: Job) -> None:
        """Ends a job that has not ended: what it has generated so far stands, its slot is free."""
        if not job.done:
            self._metrics.cancelled += 1
            self._finish(job, FinishReason.CANCELLED)
            for orphan in self._kv.orphans(job):
                self.cancel(orphan)

    def _begin_loads(self, plan: StepPlan) -> None:
        """Begins to load what is prefilled in this step, and what is likely to be next."""
        if plan.prefill is not None:
            self._begin_prefill(plan.prefill)
        if plan.preload is not None and plan.preload.session is not None:
            with self._ending(plan.preload):  # Least of all may it end the job whose caller runs the engine now.
                self._kv.preload(plan.preload, plan.preload.session)

    def _admits(self, job: Job) -> bool:
        if job.session is None and job.chunk is None:
            return True
        num_tokens = min(len(job.prompt_ids), self._runner.chunk_tokens)
        return all_agree(self._runtime.processes, "admits", self._kv.write_buffer.admits(num_tokens))

    def _begin_prefill(self, job: Job) -> None:
        """Begins to load a job's history, if this is its first step."""
        if self._prefilling is not None and self._prefilling.job is job:
            return
        job.started_s = time.perf_counter()
        with self._ending(job):
            if job.slot is None:
                raise RuntimeError(f"job {job.job_id} was planned without a slot")
            self._sampler.set_slot(job.slot, job.params, job.prompt_ids, job.stop_ids)
            self._prefilling = Prefilling(job, self._runner, self._kv, self._truncator, self._runtime)
            self._prefilling.begin()

    def _run_pass(self, job: Job, is_alone: bool) -> None:
        """Runs a pass of the prefill; with the last one, draws the first token."""
        prefilling = self._prefilling
        if prefilling is None or job.slot is None:
            raise RuntimeError(f"job {job.job_id} has no prefill to go on with")
        with self._ending(job):
            logits = prefilling.run_pass(self._pass_tokens(prefilling, is_alone), is_alone)
            if logits is None:
                return
            if job.chunk is not None:  # It is on its way to the store, and that is all.
                prefilling.finish()
                self._metrics.computed_chunks += 1
                self._release(job)
                job.finished_s, job.finish_reason = time.perf_counter(), FinishReason.LENGTH
                return
            drawn = self._sampler.draw(logits, np.array([len(job.prompt_ids) + job.num_gone]), job.slot)
            prefilling.finish()
            if prefilling.saver is not None:
                self._savers[job] = prefilling.saver
                job.save_times = prefilling.saver.times
            self._metrics.prompt_tokens += job.num_prompt_tokens
            self._metrics.cached_tokens += len(job.slid_ids) + job.cached_tokens
            self._scheduler.prefilled(job)
            self._accept(job, drawn, 0)

    def _pass_tokens(self, prefilling: Prefilling, is_alone: bool) -> int:
        """How many tokens the next pass takes: fewer than a chunk where others would wait too long for it."""
        most = self._runner.chunk_tokens
        rates = self._kv.meter.rates
        if not is_alone and self._config.max_tpot_ms is not None:
            if rates is not None:
                budget_s = self._config.max_tpot_ms / 1e3 - self._decode_s
                most = costs.largest_pass(rates, prefilling.num_before, self._runner.pass_sizes, budget_s)
            [most] = least(self._runtime.processes, "tokens of a pass", [most])
        return min(most, prefilling.num_left)

    def settle(self) -> None:
        """Moves the last prefill into its decode slot: what was put off so that its first token did not wait."""
        prefilling = self._prefilling
        if prefilling is not None and prefilling.is_complete:
            with self._ending(prefilling.job):  # With its slot half filled it must not decode.
                prefilling.insert()
                self._prefilling = None
                prefilling.release()

    def _decode(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._make_room(job)
        jobs = [job for job in jobs if not job.done]
        if not jobs:
            return
        rows = [
            DecodeRow(job.job_id, job.slot, job.output_ids[-1], job.num_tokens - 1, job.num_gone)
            for job in jobs
            if job.slot is not None
        ]
        more = all(
            len(job.output_ids) + 1 < job.params.max_tokens and job.num_tokens + 1 < self._window for job in jobs
        )
        is_alone = self._scheduler.prefilling is None and not self._scheduler.may_take
        self._kv.write_buffer.make_room(len(rows))
        started_s = time.perf_counter()

        def await_pass() -> None:
            """The device computes these rows from when it is done with the pass before them."""
            nonlocal started_s
            if (prefilling := self._prefilling) is not None:
                with self._ending(prefilling.job):
                    if prefilling.await_pass():
                        started_s = time.perf_counter()

        try:
            with self._timeline.annotate("engine", "decode", rows=len(rows)):
                drawn, kv, received = self._decoder.step(rows, run_ahead=more and is_alone, on_dispatched=await_pass)
            if self._savers:
                kv = to_host_memory(kv)  # Once for all of its rows.
        except Exception as error:  # Of all rows alike.
            for job in jobs:
                self._fail(job, error)
            return
        self._decode_s = time.perf_counter() - started_s
        self._timeline.add("compute", "decode", started_s, started_s + self._decode_s, rows=len(rows))
        self._metrics.decode_steps += 1
        self._metrics.decode_s += self._decode_s
        for row, job in zip(rows, jobs, strict=True):
            if job.done:  # It was lost with the slots, when another broke.
                continue
            with self._ending(job):
                if received is not None and job.attention is not None:
                    job.attention = padded(job.attention, row.length + 1) + received[row.slot, : row.length + 1]
                if job in self._savers:
                    self._savers[job].add_decoded(row.token, kv, row.slot)
                self._accept(job, drawn, row.slot)

    def _make_room(self, job: Job) -> None:
        """Drops tokens of a job whose context is full."""
        if not job.done and job.num_tokens >= self._window:
            with self._ending(job):  # A discarder may be anybody's.
                self._truncator.cut_running(job, self._savers.get(job))

    def _accept(self, job: Job, drawn: Draw, row: int) -> None:
        """Takes the token that was drawn for a row and ends the job if it is the last."""
        token = int(drawn.tokens[row])
        if not job.output_ids:
            job.first_token_s = time.perf_counter()
        job.add(token)
        job.token_times_s.append(time.perf_counter())
        if (logprob := drawn.logprob(row, job.params)) is not None:
            job.token_logprobs.append(logprob)
        if job.slot is not None:
            self._sampler.mark(job.slot, token)
        text = "" if token in job.stop_ids else job.output.push(token)
        reason = None
        if token in job.stop_ids or job.output.stopped:
            reason = FinishReason.STOP
        elif len(job.output_ids) >= job.params.max_tokens or (
            job.num_tokens >= self._window and not self._truncator.may_go_on(job)
        ):
            reason = FinishReason.LENGTH
        job.show(text if reason is None else text + job.output.finish())
        if reason is not None:
            self._finish(job, reason)

    def _finish(self, job: Job, reason: FinishReason) -> None:
        job.show_rest(job.output.finish())
        self._release(job)
        job.finished_s = time.perf_counter()
        self._metrics.completion_tokens += len(job.output_ids)
        if reason is not FinishReason.CANCELLED:
            self._metrics.turns += 1
        try:
            if job.session is not None and job.output_ids:
                job.session.adopt(job, reason)
            self._remember(job)
        except Exception as error:
            job.error = error
            raise
        job.finish_reason = reason  # Last: once it is seen to be done, its turn is adopted and in the log.

    @contextlib.contextmanager
    def _ending(self, job: Job) -> Iterator[None]:
        """Ends a job that breaks within: it must not end the others, and its caller gets the error."""
        try:
            yield
        except Exception as error:
            self._fail(job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        """Ends a job that broke. Where the decode slots broke with it, all jobs that are in one."""
        is_lost = self._runner.slots.remake_if_broken() | self._sampler.forget_if_broken()
        for each in (job, *self._scheduler.running) if is_lost else (job,):
            if not each.done:
                try:
                    self._release(each)
                    self._remember(each)
                finally:
                    each.error = error

    def _remember(self, job: Job) -> None:
        """Has a job's conversation kept, with an answer or without: KV of it may have been saved in place of other.

        Of one that is not to be, what was pre-loaded is forgotten, also where the job never began.
        """
        if job.session is not None and (job.started_s or not job.session.is_kept):
            self._kv.remember(job.session)

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
        self._kv.chunks.ended(job)
        if saver is not None:
            self._kv.write_buffer.end(saver)
