"""The running batch: jobs in decode slots, from the first pass of their prefill to their last token.

`Batch` takes a plan of the scheduler and does it: begins loads, decodes a token for every job, runs a pass of one
prefill, and takes what was drawn. It ends jobs, gives back what they held, and keeps what they said.

`Prefilling` is one job's prefill. A pass runs some of its new tokens through all layers. Each layer's history is taken
from the load just before it is dispatched, and its new KV handed to be saved right after. Between passes others decode.

Not here: who runs (scheduler), sessions and locks (engine), what is loaded (kv.load), arrays and slots (device.runner),
what is saved when (kv.save).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

import jax

from ca_jax.device.processes import all_agree, least
from ca_jax.device.runner import JOINED_TOKENS, Prefill, Runner
from ca_jax.device.runtime import Runtime
from ca_jax.device.sampler import Draw
from ca_jax.device.transfer import to_host_memory
from ca_jax.errors import ProcessesError
from ca_jax.kv import costs
from ca_jax.kv.layer_loader import LoadError
from ca_jax.kv.load import History
from ca_jax.kv.save import TurnSaver
from ca_jax.kv.session_kv import SessionKV
from ca_jax.recompute.plan import blend_plan
from ca_jax.recompute.recomputer import RecomputedHistory
from ca_jax.serving.scheduler import Scheduler
from ca_jax.serving.truncator import Truncator
from ca_jax.session import Job, Session
from ca_jax.turns.conversations import padded
from ca_jax.turns.requests import FinishReason

_LOG = logging.getLogger(__name__)
_NO_STALL = 0.02  # Of a prefill: it waited for less than that, so that what it took is compute.


class Prefilling:
    """The prefill of one job. Belongs to the engine's thread."""

    def __init__(self, job: Job, runner: Runner, kv: SessionKV, truncator: Truncator, runtime: Runtime) -> None:
        if job.slot is None:
            raise RuntimeError(f"job {job.job_id} was planned without a slot")
        self.job = job
        self.saver: TurnSaver | None = None  # What of the turn is to be saved; None for a job without a session.
        self.prefill = Prefill(job.slot, job.prompt_ids, 0)
        self._runner = runner
        self._kv = kv
        self._metrics = runtime.metrics
        self._watch = runtime.watch
        self._truncator = truncator
        self._blend_config = runtime.config.blend
        self._processes = runtime.processes
        self._history: History | None = None
        self._mended: RecomputedHistory | None = None  # What is read in place of what is loaded.
        self._was_alone = True
        self._computing_s = 0.0
        self._dispatched_s: float | None = None  # When a pass was that has not been waited for.
        self._layer_since_s = 0.0

    def begin(self) -> None:
        """Begins to load what of the job's history is stored. If that raises, `release` lets go of what was begun."""
        job = self.job
        if job.chunk is not None:
            self.saver = self._kv.chunks.begin_saving(job.chunk, job.tenant)
        elif job.session is not None:
            history = self._history = self._kv.histories.open(job, job.session)
            self._kv.withdraw(job)
            self._forget_lost(job.session, history.num_stored, history.num_slid)
            job.skip(history.num_slid)
            self._mended = self._recomputed(job.session, history)
            if self._mended is None:
                self.saver = self._kv.write_buffer.begin_turn(job.session, history.num_stored)
            self._start(history.num_places)

    def run_pass(self, num_tokens: int, is_alone: bool) -> None:
        """Dispatches some of the tokens that are left.

        A load that breaks is a miss and a recompute of everything, never a failed turn. Whatever else breaks is raised,
        and costs nothing that is stored. `is_alone` says whether no other job computes in between.
        """
        self._was_alone &= is_alone
        started_s = time.perf_counter()
        session, history = self.job.session, self._history
        if session is None or history is None or history.load is None or self.prefill.num_done:
            self._dispatch(num_tokens)
        else:
            try:
                history.load.begin()
                self._dispatch(num_tokens)
                self._kv.histories.complete(self.job, history)
                if self._mended is not None:
                    self._save_mended(session, self._mended)
            except ProcessesError:  # The history is sound, but not what was saved behind it.
                self._give_up_saving()
                self.release()
                self._kv.truncate(session, history.num_slid + history.num_stored)
                raise
            except LoadError:
                _LOG.warning("the load of job %d broke: it begins anew without", self.job.job_id, exc_info=True)
                self._begin_anew(session, history)
                self.run_pass(min(self.prefill.num_left, self._runner.chunk_tokens), is_alone)
                return
        self._metrics.prefill_passes += 1
        is_last = not self.prefill.num_left
        if is_last:
            self._wait()
        now_s = time.perf_counter()
        self._computing_s += now_s - started_s
        self._dispatched_s = None if is_last else now_s

    def await_pass(self) -> bool:
        """Waits for the last pass, unless that is done; whether it did: what is behind it computes from then on."""
        if self._dispatched_s is None:
            return False
        jax.block_until_ready(self.prefill.outputs)
        self._computing_s += time.perf_counter() - self._dispatched_s
        self._dispatched_s = None
        return True

    def finish(self) -> None:
        """Measures what it took. Its logits were waited for."""
        job, prefill, history = self.job, self.prefill, self._history
        self._metrics.prefill_steps += 1
        self._metrics.prefill_s += self._computing_s
        job.prefill_s = self._computing_s
        if prefill.received:
            known = job.attention if prefill.history_length else None  # What is computed anew receives anew.
            job.attention = padded(() if known is None else known, len(job.prompt_ids))
            for each in prefill.received:
                each.add_to(job.attention)
        num_new = len(prefill.tokens)
        was_mended = job.repaired_tokens or (history is not None and history.chunks)
        if not self._was_alone or num_new > self._runner.chunk_tokens or was_mended:
            return
        if history is None or history.load is None or history.load.stall_s < _NO_STALL * self._computing_s:
            self._kv.meter.add_prefill(*self._runner.padded(prefill.history_length, num_new), self._computing_s)
        if history is not None and history.predicted_s is not None:
            self._metrics.prediction_errors.append(history.predicted_s / self._computing_s - 1)

    def release(self) -> None:
        """Lets go of staging, however far it is; waits for what reads it unless it was inserted."""
        if self._history is not None:
            self._kv.histories.release(self._history)

    def _start(self, num_loaded: int) -> None:
        self.prefill = Prefill(self.prefill.slot, self.job.prompt_ids[num_loaded:], num_loaded)

    def _recomputed(self, session: Session, history: History) -> RecomputedHistory | None:
        """A history as its prefill should read it; None: as it is stored."""
        if history.source is None:
            return None
        num_places, blend = history.num_places, None
        num_own = history.num_stored if history.chunks else num_places
        repair = self._truncator.repair_of(session, num_own, num_places)
        if history.chunks:
            num_layers, ratio = self._runner.config.num_layers, self.job.recompute_ratio
            blend = blend_plan(self._blend_config, num_layers, num_places, num_own, history.chunks, ratio)
        if repair is None and blend is None:
            return None
        token_ids = self.job.prompt_ids[:num_places]
        return RecomputedHistory(history.source, token_ids, self._runner, repair=repair, blend=blend)

    def _dispatch(self, num_tokens: int) -> None:
        prefill = self.prefill
        history = None
        if self._history is not None and not prefill.num_done:
            history = self._mended or self._history.source
        tokens = prefill.tokens[prefill.num_done : prefill.num_done + num_tokens]
        if self.saver is not None:
            self._kv.write_buffer.make_room(len(tokens))
            self.saver.begin_pass(tokens, prefill.history_length + prefill.num_done)
        self._layer_since_s = time.perf_counter()
        is_short = len(tokens) == prefill.num_left <= JOINED_TOKENS
        join = history.join if is_short and isinstance(history, RecomputedHistory) and history.may_join else None
        self._runner.run_pass(prefill, num_tokens, history, self._take_layer, join)
        if self.saver is not None:
            self.saver.end_pass()

    def _take_layer(self, layer: int, kv: jax.Array) -> None:
        """A layer was dispatched, which gives new KV."""
        if self.saver is not None:
            self.saver.add_layer(layer, self._runner.at_rest(kv))
        self._watch.layer(kv, self._layer_since_s, layer=layer, job=self.job.job_id)
        self._layer_since_s = time.perf_counter()

    def _begin_anew(self, session: Session, history: History) -> None:
        """Forgets what was computed from the history: all of the prompt is prefilled.

        Where some of several parts broke, the others are loaded again, and what broke is computed in its places.
        """
        jax.block_until_ready(self.prefill.outputs)
        self._give_up_saving()
        has_others = bool(history.broken) and self._processes.count == 1
        broken = history.broken or {history.key}
        self._kv.histories.release(history)
        for key in broken:
            self._kv.drop(key)
        self._metrics.failed_loads += 1
        self._metrics.lost_chunks += len(broken - {history.key})
        self._history = self._mended = None
        self.job.skip_none()
        if has_others:  # Fewer each time: what broke is forgotten.
            self.begin()
            return
        self._forget_lost(session, 0, 0)
        self.saver = self._kv.write_buffer.begin_turn(session, 0)
        self.job.cached_tokens = 0
        self._start(0)

    def _give_up_saving(self) -> None:
        saver, self.saver = self.saver, None
        if saver is not None:
            saver.give_up()
            self._kv.write_buffer.end(saver)

    def _forget_lost(self, session: Session, num_stored: int, num_slid: int) -> None:
        """Tokens behind what is stored are computed anew: at their places, with nothing to repair."""
        left = session.conversation
        if left.num_slid != num_slid:
            session.resume(left.slid(num_slid))
        if left.num_to_repair > num_stored:
            session.resume(left.with_kv_of(num_stored))

    def _save_mended(self, session: Session, mended: RecomputedHistory) -> None:
        """Has the history stored as it was read, in place of what was, and what the first pass computed behind it."""
        prefill = self.prefill
        self._mended = prefill.source = None  # Its layers go when they are in the slot.
        if session.is_kept:
            self._kv.write_buffer.make_room(prefill.history_length + prefill.num_done)
            history_ids, new_ids = self.job.prompt_ids[: prefill.history_length], prefill.tokens[: prefill.num_done]
            # All of it is packed before what is stored gives way to it.
            packed = [[self._runner.at_rest(kv) for kv in layers] for layers in (mended.layers, prefill.kv)]
            self.saver = self._kv.write_buffer.begin_anew(session, mended.num_plain, mended.num_fused)
            self.saver.add_pass(history_ids, 0, packed[0])
            self.saver.add_pass(new_ids, len(history_ids), packed[1])
        self.job.repaired_tokens = round(mended.num_recomputed)
        self._metrics.repaired_tokens += self.job.repaired_tokens
        self._metrics.blended_turns += mended.is_blended

    def _wait(self) -> None:
        """Waits for the last pass, and has the next job's load go on meanwhile."""
        for output in self.prefill.outputs:
            if not self._kv.histories.pump():
                break
            output.block_until_ready()
        jax.block_until_ready(self.prefill.logits)


class Batch:
    """Runs jobs. Belongs to the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        kv: SessionKV,
        truncator: Truncator,
        runtime: Runtime,
    ) -> None:
        self._runtime = runtime
        self._processes = runtime.processes
        self._scheduler = scheduler
        self._runner = runner
        self._sampler = runner.sampler
        self._kv = kv
        self._max_tpot_ms = runtime.config.max_tpot_ms
        self._metrics = runtime.metrics
        self._timeline = runtime.timeline
        self._window = runner.window
        self._truncator = truncator
        self._savers: dict[Job, TurnSaver] = {}
        self._prefilling: Prefilling | None = None
        self._decode_s = 0.0  # What the last decode step took.

    def step(self) -> bool:
        """Plans a step and does it; whether there was anything to do."""
        self._fill_slot()
        plan = self._scheduler.schedule(self._kv.ready, self._admits)
        if plan.prefill is not None:
            self._begin_prefill(plan.prefill)
        if plan.preload is not None and plan.preload.session is not None:
            with self._ending(plan.preload):  # Least of all may it end the job whose caller runs the engine now.
                self._kv.histories.preload(plan.preload, plan.preload.session, self._kv.is_at_hand)
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

    def _admits(self, job: Job) -> bool:
        if job.session is None and job.chunk is None:
            return True
        num_tokens = min(len(job.prompt_ids), self._runner.chunk_tokens)
        return all_agree(self._processes, "admits", self._kv.write_buffer.admits(num_tokens))

    def _begin_prefill(self, job: Job) -> None:
        """Begins to load a job's history, if this is its first step."""
        if self._prefilling is not None and self._prefilling.job is job:
            return
        job.started_s = time.perf_counter()
        with self._ending(job):
            self._prefilling = Prefilling(job, self._runner, self._kv, self._truncator, self._runtime)
            self._sampler.set_slot(self._prefilling.prefill.slot, job.params, job.prompt_ids, job.stop_ids)
            self._prefilling.begin()

    def _run_pass(self, job: Job, is_alone: bool) -> None:
        """Runs a pass of the prefill; with the last one, draws the first token."""
        prefilling = self._prefilling
        if prefilling is None:
            raise RuntimeError(f"job {job.job_id} has no prefill to go on with")
        with self._ending(job):
            prefilling.run_pass(self._pass_tokens(prefilling.prefill, is_alone), is_alone)
            if prefilling.prefill.num_left:
                return
            if job.chunk is not None:  # It is on its way to the store, and that is all.
                prefilling.finish()
                self._metrics.computed_chunks += 1
                self._finish(job, FinishReason.LENGTH)
                return
            drawn = self._runner.draw(prefilling.prefill, len(job.prompt_ids) + job.num_gone)
            prefilling.finish()
            if prefilling.saver is not None:
                self._savers[job] = prefilling.saver
                job.save_times = prefilling.saver.times
            self._metrics.prompt_tokens += job.num_prompt_tokens
            self._metrics.cached_tokens += len(job.slid_ids) + job.cached_tokens
            self._scheduler.prefilled(job)
            self._accept(job, drawn, 0)

    def _pass_tokens(self, prefill: Prefill, is_alone: bool) -> int:
        """How many tokens the next pass takes: fewer than a chunk where others would wait too long for it."""
        most = self._runner.chunk_tokens
        rates = self._kv.meter.rates
        if not is_alone and self._max_tpot_ms is not None:
            if rates is not None:
                budget_s = self._max_tpot_ms / 1e3 - self._decode_s
                num_before = prefill.history_length + prefill.num_done
                most = costs.largest_pass(rates, num_before, self._runner.pass_sizes, budget_s)
            [most] = least(self._processes, "tokens of a pass", [most])
        return min(most, prefill.num_left)

    def _fill_slot(self) -> None:
        """Has the last prefill moved into its decode slot: what was put off so that its first token did not wait."""
        prefilling = self._prefilling
        if prefilling is not None and not prefilling.prefill.num_left:
            with self._ending(prefilling.job):  # With its slot half filled it must not decode.
                self._runner.insert(prefilling.prefill)
                self._prefilling = None
                prefilling.release()

    def _decode(self, jobs: list[Job]) -> None:
        for job in jobs:
            if not job.done and job.num_tokens >= self._window:
                with self._ending(job):  # A discarder may be anybody's.
                    self._truncator.cut_running(job, self._savers.get(job))
        jobs = [job for job in jobs if not job.done]
        if not jobs:
            return
        num_left = min(min(job.params.max_tokens - len(job.output_ids), self._window - job.num_tokens) for job in jobs)
        may_run_ahead = num_left > 1 and self._scheduler.prefilling is None and not self._scheduler.may_take
        self._kv.write_buffer.make_room(len(jobs))
        started_s = time.perf_counter()

        def await_pass() -> None:
            """The device computes these rows from when it is done with the pass before them."""
            nonlocal started_s
            if (prefilling := self._prefilling) is not None:
                with self._ending(prefilling.job):
                    if prefilling.await_pass():
                        started_s = time.perf_counter()

        try:
            with self._timeline.annotate("engine", "decode", rows=len(jobs)):
                drawn, kv, received = self._runner.decode(jobs, may_run_ahead, await_pass)
            if self._savers:
                kv = to_host_memory(kv)  # Once for all of its rows.
        except Exception as error:  # Of all rows alike.
            for job in jobs:
                self._fail(job, error)
            return
        self._decode_s = time.perf_counter() - started_s
        self._timeline.add("compute", "decode", started_s, started_s + self._decode_s, rows=len(jobs))
        self._metrics.decode_steps += 1
        self._metrics.decode_s += self._decode_s
        for job in jobs:
            if job.done or job.slot is None:  # It was lost with the slots, when another broke.
                continue
            with self._ending(job):
                if received is not None and job.attention is not None:
                    job.attention = padded(job.attention, job.num_tokens) + received[job.slot, : job.num_tokens]
                if job in self._savers:
                    self._savers[job].add_decoded(job.output_ids[-1], kv, job.slot)
                self._accept(job, drawn, job.slot)

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
        self._metrics.turns += reason is not FinishReason.CANCELLED and job.chunk is None
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
        is_lost = self._runner.remake_if_broken()
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
