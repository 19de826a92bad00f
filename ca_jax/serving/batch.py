"""The running batch: jobs with a row in the pool, from the first pass of their prefill to their last token.

`Batch` takes a plan of the scheduler and does it: begins loads, computes prompts and decodes, and takes what was drawn.
It ends jobs, gives back what they held, and keeps what they said. Where there are prompts a step is one pass: tokens of
several prompts through all layers, and a token of each job that decodes along with them.

Not here: a job's prefill (prefilling), who runs (scheduler), sessions and locks (engine), what is loaded (kv.load),
arrays (device.runner), pages (device.pages), what is saved when (kv.save).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np

from ca_jax.device.draft_model import DraftModel
from ca_jax.device.passes import PassPart
from ca_jax.device.processes import all_agree, least
from ca_jax.device.runner import Runner
from ca_jax.device.runtime import Runtime
from ca_jax.device.sampler import Draw
from ca_jax.device.transfer import to_host_memory
from ca_jax.kv import costs
from ca_jax.kv.save import TurnSaver, owner_of
from ca_jax.kv.session_kv import SessionKV
from ca_jax.serving.drafts import Drafter, Guess
from ca_jax.serving.prefilling import Prefilling
from ca_jax.serving.scheduler import Scheduler
from ca_jax.serving.truncator import Truncator
from ca_jax.session import Job
from ca_jax.turns.conversations import padded
from ca_jax.turns.requests import FinishReason

_IDLE_TOKENS = 64  # Of a pass that nobody waits for, and for which others may have to wait.


class Batch:
    """Runs jobs. Belongs to the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        kv: SessionKV,
        truncator: Truncator,
        runtime: Runtime,
        draft_model: DraftModel | None = None,
    ) -> None:
        self._runtime = runtime
        self._processes = runtime.processes
        self._scheduler = scheduler
        self._runner = runner
        self._kv = kv
        self._max_tpot_ms = runtime.config.max_tpot_ms
        self._keeps_pages = runtime.config.keep_pages and runtime.config.kv_rest_dtype == "model"
        self._metrics, self._timeline = runtime.metrics, runtime.timeline
        self._truncator = truncator
        self._savers: dict[Job, TurnSaver] = {}
        self._prefilling: dict[Job, Prefilling] = {}
        self._decode_s = 0.0  # What the last decode step took.
        self._stepped_s: float | None = None  # When the last step ended, if it only decoded.
        parts = runner.pool.size.num_parts
        self.may_check: Callable[[], bool] = lambda: True
        """Whether drafts may be checked: not while what checks them is being compiled, for which answers would wait."""
        by_work = runtime.config.queue_order == "shortest" and self._processes.count == 1
        self._work = kv.work if by_work else None
        most_tokens, sizes = runtime.config.max_draft_tokens, runner.draft_buckets
        share = 1.0 if draft_model is None else draft_model.runner.param_bytes / runner.param_bytes
        self._drafter = Drafter(most_tokens, sizes, parts, runtime.processes, draft_model, share)

    def step(self) -> bool:
        """Plans a step and does it; whether there was anything to do."""
        plan = None
        while plan is None or plan.taken is not None:  # As many prompts as a step has room for.
            num_left = sum(each.prefill.num_left for each in self._prefilling.values())
            has_room = num_left < self._runner.chunk_tokens
            plan = self._scheduler.schedule(self._kv.ready, self._admits, has_room, self._work)
            if plan.taken is not None:
                self._begin_prefill(plan.taken)
        if plan.preload is not None and plan.preload.session is not None:
            with self._ending(plan.preload):  # Least of all may it end the job whose caller runs the engine now.
                self._kv.histories.preload(plan.preload, plan.preload.session, self._kv.is_at_hand)
        jobs = self._with_room(list(plan.decode))
        prefilling = [self._prefilling[job] for job in plan.prefill if not job.done]
        is_apart = not prefilling or prefilling[0].joins
        if is_apart or self._runner.is_ahead(jobs):
            self._decode(jobs)
            jobs = [] if is_apart else self._with_room(jobs)
        if prefilling:
            self._run_pass(prefilling, [job for job in jobs if not job.done])
        return bool(plan.prefill) or bool(plan.decode)

    def cancel(self, job: Job) -> None:
        """Ends a job that has not ended: what it has generated so far stands, its slot is free."""
        if not job.done:
            self._metrics.cancelled += not job.at_idle
            self._finish(job, FinishReason.CANCELLED)
            for orphan in self._kv.orphans(job):
                self.cancel(orphan)

    def _admits(self, job: Job) -> bool:
        slot = self._scheduler.next_slot
        if slot is not None and not self._runner.pool.admits(slot, job.most_tokens):
            return False
        if job.session is None and job.chunk is None:
            return True
        num_tokens = min(len(job.prompt_ids), self._runner.chunk_tokens)
        return all_agree(self._processes, "admits", self._kv.write_buffer.admits(num_tokens))

    def _begin_prefill(self, job: Job) -> None:
        """Begins to load a job's history: it was taken for this step."""
        job.started_s = time.perf_counter()
        with self._ending(job):
            begun = self._prefilling[job] = Prefilling(job, self._runner, self._kv, self._truncator, self._runtime)
            self._runner.pool.begin(begun.prefill.slot, job.most_tokens)
            self._runner.adapters.set_row(begun.prefill.slot, job.adapter.slot)
            self._runner.sampler.set_slot(begun.prefill.slot, job.params, job.prompt_ids, job.stop_ids, job.matcher)
            begun.begin()

    def _run_pass(self, prefilling: list[Prefilling], jobs: list[Job]) -> None:
        """Runs a pass of the first prompt, of others as far as there is room, and of jobs that decode."""
        self._stepped_s, packed = None, list[tuple[Prefilling, PassPart]]()
        num_left = self._pass_tokens(prefilling[0], len(jobs))
        started_s = time.perf_counter()
        for each in prefilling:
            if (each.joins and (packed or jobs)) or (packed and not (num_left and each.may_pack)):
                break
            with self._ending(each.job):
                part = each.part(min(num_left, each.prefill.num_left))
                packed.append((each, part))
                num_left = 0 if part.joined is not None else num_left - part.num_tokens
        if not packed:
            return
        self._kv.write_buffer.make_room(len(jobs))
        try:
            passed = self._runner.run_pass([part for _, part in packed], jobs)
            for output in packed[0][1].prefill.outputs if passed.draw is not None else ():
                if self._kv.histories.pump():  # The next job's load goes on meanwhile.
                    output.block_until_ready()
            drawn = None if passed.draw is None else passed.draw.wait()
            kv = tuple(map(to_host_memory, passed.kv)) if passed.kv is not None and self._savers else passed.kv
        except Exception as error:  # Of all alike.
            for job in (*(each.job for each, _ in packed), *jobs):
                self.fail(job, error)
            return
        seconds = time.perf_counter() - started_s
        of_jobs = min(self._decode_s, seconds / 2) if jobs else 0.0
        self._metrics.decode_steps += bool(jobs)
        self._metrics.decode_s += of_jobs
        if jobs:
            self._timeline.add("compute", "decode", started_s, started_s + seconds, rows=len(jobs))
        for job in jobs:
            if not job.done and job.slot is not None and drawn is not None and kv is not None:
                slot = job.slot
                with self._ending(job):
                    if slot in passed.received and job.attention is not None:
                        job.attention = padded(job.attention, job.num_tokens)
                        passed.received[slot].add_to(job.attention)
                    self._take_decoded(job, drawn, passed.rows[slot], kv, passed.kv_rows[slot])
        for each, part in packed:
            if not each.job.done:
                with self._ending(each.job):
                    each.passed(part, (seconds - of_jobs) / len(packed), len(packed) == 1 and not jobs)
                    if part.error is None and not each.prefill.num_left:
                        self._complete(each, drawn, passed.rows)

    def _complete(self, prefilling: Prefilling, drawn: Draw | None, rows: dict[int, int]) -> None:
        """All of a prompt is computed: takes the token that was drawn behind it."""
        job = prefilling.job
        if job.at_idle == "anew":
            prefilling.save_all()
        if job.at_idle:
            self._metrics.idle_recomputes += 1
        else:
            prefilling.finish()
            self._metrics.computed_chunks += job.chunk is not None
        if not job.answers:  # Its KV is on its way to the store, and that is all.
            self._finish(job, FinishReason.LENGTH)
            return
        if drawn is None:
            raise RuntimeError(f"no token was drawn behind the prompt of job {job.job_id}")
        del self._prefilling[job]
        if prefilling.saver is not None:
            self._savers[job] = prefilling.saver
            job.save_times = prefilling.saver.times
        self._metrics.prompt_tokens += job.num_prompt_tokens
        self._metrics.cached_tokens += len(job.slid_ids) + job.cached_tokens
        self._scheduler.prefilled(job)
        self._accept(job, drawn, rows[prefilling.prefill.slot])

    def _pass_tokens(self, first: Prefilling, num_jobs: int) -> int:
        """How many tokens of prompts the next pass takes: fewer where jobs that decode would wait too long for it."""
        most, rates = self._runner.chunk_tokens - num_jobs, self._kv.meter.rates
        if num_jobs and self._max_tpot_ms is not None:
            if rates is not None:
                budget_s = self._max_tpot_ms / 1e3 - self._decode_s
                sizes = [size - num_jobs for size in self._runner.token_buckets if size > num_jobs]
                most = costs.largest_pass(rates, first.prefill.start, sizes, budget_s)
            [most] = least(self._processes, "tokens of a pass", [most])
        return max(min(most, _IDLE_TOKENS) if first.job.at_idle else most, 1)

    def _with_room(self, jobs: list[Job]) -> list[Job]:
        """Jobs that decode, the contexts of which have room for another token now."""
        for job in jobs:
            if not job.done and job.num_tokens >= self._runner.window:
                with self._ending(job):  # A discarder may be anybody's.
                    self._truncator.cut_running(job, self._savers.get(job))
        return [job for job in jobs if not job.done]

    def _decode(self, jobs: list[Job]) -> None:
        """Decodes a token for each job, or several where a draft is right."""
        if not jobs:
            return
        runner, drafter = self._runner, self._drafter
        left = {job: min(job.params.max_tokens - len(job.output_ids), runner.window - job.num_tokens) for job in jobs}
        slots = {job: job.slot for job in jobs if job.slot is not None}
        may_check = self.may_check()
        guessed = {
            job: left[job] - 1 for job, slot in slots.items() if may_check and not runner.sampler.follows_marks(slot)
        }
        guesses, written = drafter.guesses(guessed), dict[Job, Guess]()
        choice = drafter.choose(guesses, {job: runner.pool.size.part_of(slot) for job, slot in slots.items()})
        size, drafts = 0 if runner.is_ahead(jobs) else choice.size, choice.drafts
        may_run_ahead = min(left.values()) > 1 and not self._scheduler.prefilling and not self._scheduler.may_take
        self._kv.write_buffer.make_room(sum(1 + len(drafts.get(job, ())) for job in jobs) if size else len(jobs))
        started_s = time.perf_counter()
        try:
            with self._timeline.annotate("engine", "decode", rows=len(jobs)):
                if size:
                    drafts, written = drafter.write(choice)
                    decoded = runner.check(jobs, {slots[job]: draft for job, draft in drafts.items()})
                else:  # What is guessed is not known to be right before the token in front of it is drawn.
                    decoded = runner.decode(jobs, may_run_ahead and not drafts)
            kv = tuple(map(to_host_memory, decoded.kv)) if self._savers else decoded.kv  # Once for all of its rows.
        except Exception as error:  # Of all rows alike.
            for job in jobs:
                self.fail(job, error)
            return
        ended_s = time.perf_counter()
        self._count_decoded(started_s, ended_s, len(jobs), size)
        for job, slot in slots.items():
            if job.done or job.slot is None:  # It was lost with the pages, when another broke.
                continue
            row, draft, num_before = decoded.rows[slot], drafts.get(job, []) if size else [], len(job.output_ids)
            with self._ending(job):
                if decoded.received is not None and job.attention is not None:
                    received = decoded.received[row, : job.num_tokens]
                    job.attention = padded(job.attention, job.num_tokens) + received
                self._take_decoded(job, decoded.draw, row, kv, row)
                for number, token in enumerate(draft, start=1):
                    if job.done or job.output_ids[-1] != token:
                        break
                    self._take_decoded(job, decoded.draw, row + number, kv, row + number)
                if draft and not job.done:
                    runner.pool.shorten(slot, job.num_tokens)
            num_right = max(len(job.output_ids) - num_before - 1, 0)
            self._metrics.draft_tokens += len(draft)
            self._metrics.accepted_tokens += num_right
            if job in written:
                self._metrics.model_draft_tokens += len(draft)
                self._metrics.model_accepted_tokens += num_right
            for of_source in (guesses, written):
                if job in of_source:
                    drafter.score(job, of_source[job], job.output_ids[num_before:])

    def _count_decoded(self, started_s: float, ended_s: float, num_rows: int, size: int) -> None:
        """A step that decoded ran, in which so many tokens were computed to check drafts; 0: none was checked."""
        self._timeline.add("compute", "decode", started_s, ended_s, rows=num_rows)
        self._metrics.decode_steps += 1
        self._metrics.draft_steps += size > 0
        self._metrics.decode_s += ended_s - started_s
        if not size:
            self._decode_s = ended_s - started_s
        if self._stepped_s is not None:  # What the host does between two steps is part of what they take.
            self._drafter.took(num_rows, size, ended_s - self._stepped_s)
        self._stepped_s = ended_s

    def _take_decoded(self, job: Job, drawn: Draw, row: int, kv: tuple[jax.Array, ...], kv_row: int) -> None:
        """Takes a token of a job that decodes, and the KV of the one before it, as `Decoded.kv` has it."""
        if job in self._savers:
            self._savers[job].add_decoded(job.output_ids[-1], kv, kv_row)
        self._accept(job, drawn, row)

    def _accept(self, job: Job, drawn: Draw, row: int) -> None:
        """Takes the token that was drawn for a row and ends the job if it is the last."""
        token = int(drawn.tokens[row])
        if job.slot is not None:
            self._runner.sampler.mark(job.slot, token)
        if (reason := job.take(token, drawn.logprob(row, job.params.logprobs), self._is_full)) is not None:
            self._finish(job, reason)

    def _is_full(self, job: Job) -> bool:
        return job.num_tokens >= self._runner.window and not self._truncator.may_go_on(job)

    def _finish(self, job: Job, reason: FinishReason) -> None:
        job.show_rest(job.output.finish())
        self._kv.snapshots.keep(job, self._runner.states)
        is_whole = bool(job.at_idle) and reason is FinishReason.LENGTH
        self._release(job, keeps_pages=is_whole or bool(job.output_ids))
        job.finished_s = time.perf_counter()
        self._metrics.completion_tokens += len(job.output_ids)
        self._metrics.turns += reason is not FinishReason.CANCELLED and job.answers
        try:
            if job.session is not None and job.output_ids:
                job.session.adopt(job, reason)
                self._truncator.ended(job.session)
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
            self.fail(job, error)

    def fail(self, job: Job, error: Exception) -> None:
        """Ends a job that broke. Where the pages broke with it, all jobs that run."""
        if is_lost := self._runner.remake_if_broken():
            self._kv.resident.clear()
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

    def _release(self, job: Job, *, keeps_pages: bool = False) -> None:
        """Gives back a job's slot, its pages and its staging, and submits what is left to save."""
        saver = self._savers.pop(job, None)
        if (prefilling := self._prefilling.pop(job, None)) is not None:
            saver = prefilling.saver
            prefilling.release()
        if job.slot is not None:
            self._runner.sampler.free_slot(job.slot)
            if keeps_pages and job.session is not None and job.session.is_kept and self._keeps_pages:
                num_computed = job.num_tokens - bool(job.output_ids)  # Not the last one that was drawn.
                session, tokens = job.session, np.fromiter(job.token_ids[:num_computed], np.int32)
                state = (session.conversation.lineage, session.conversation.num_slid)
                self._kv.resident.keep(session.key, job.slot, tokens, state, owner_of(session).domain)
            else:
                self._runner.pool.end(job.slot)
        self._scheduler.remove(job)
        self._kv.withdraw(job)
        self._kv.chunks.ended(job)
        if saver is not None:
            self._kv.write_buffer.end(saver)
