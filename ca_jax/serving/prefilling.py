"""The prefill of one job: its history is opened, its prompt computed in passes, and its new KV handed to be saved.

Each layer's history is taken from the load just before it is dispatched, and its new KV handed to be saved right after.

Not here: which prompts a pass has (batch), what is loaded (kv.load), arrays (device.runner), what is saved when
(kv.save).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

import jax

from ca_jax.device.passes import LayerSource, PassPart, Prefill
from ca_jax.device.processes import all_agree
from ca_jax.device.prompt_logprobs import PromptLogprobs
from ca_jax.device.runner import Runner
from ca_jax.device.runtime import Runtime
from ca_jax.errors import ProcessesError
from ca_jax.kv.history import History
from ca_jax.kv.layer_loader import LoadError
from ca_jax.kv.save import TurnSaver
from ca_jax.kv.session_kv import SessionKV
from ca_jax.recompute.recomputer import RecomputedHistory
from ca_jax.serving.truncator import Truncator
from ca_jax.session import Job, Session
from ca_jax.turns.conversations import padded

_LOG = logging.getLogger(__name__)


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
        self._logprobs: PromptLogprobs | None = None  # Of its prompt, where they are asked for.
        self._was_alone = True
        self._computing_s = 0.0
        self._layer_since_s = 0.0
        self._first = 0  # Of the last pass's tokens, this job's.

    def begin(self) -> None:
        """Begins to load what of the job's history is stored. If that raises, `release` lets go of what was begun."""
        job = self.job
        if job.chunk is not None:
            self.saver = self._kv.chunks.begin_saving(job.chunk, job.tenant, job.adapter.fingerprint)
        elif job.session is not None and job.at_idle != "anew":
            history = self._history = self._kv.histories.open(job, job.session)
            if history.resident is not None:
                self._runner.pool.take(self.prefill.slot, history.resident)
                history.resident = None
            self._kv.withdraw(job)
            job.session.forget_lost(history.num_stored, history.num_slid)
            job.skip(history.num_slid)
            self._mended = self._truncator.recomputed(job, job.session, history, self.prefill.slot, self._blend_config)
            if self._mended is None:
                self.saver = self._kv.write_buffer.begin_turn(job.session, history.num_stored)
            self._start(history.num_places, history.first_seen)

    @property
    def may_pack(self) -> bool:
        """Whether a pass may have it behind other prompts: its load needs no room that theirs may need."""
        load = None if self._history is None else self._history.load
        is_there = load is None or self.prefill.num_done > 0 or load.num_issued == load.num_layers
        return all_agree(self._processes, "packs", is_there)

    @property
    def joins(self) -> bool:
        """Whether its next pass is its alone: it computes tokens of its history anew, and its own, in one."""
        return self._mended is not None and not self.prefill.num_done and self._mended.may_join(self.prefill.num_left)

    def part(self, num_tokens: int) -> PassPart:
        """Some of the tokens that are left, for a pass. Raises what breaks before that begins."""
        prefill, job = self.prefill, self.job
        opened = None if prefill.num_done else self._history
        history: LayerSource | None = None
        error = None if opened is None else opened.restore(self._runner.states, prefill.slot)
        if opened is not None and opened.load is not None:
            opened.load.begin()
            history = self._mended or opened.source
        tokens = prefill.tokens[prefill.num_done : prefill.num_done + num_tokens]
        if self.saver is not None and error is None:
            self._kv.write_buffer.make_room(len(tokens))
            num_head = 0 if job.chunk is None else len(job.prompt_ids) - job.chunk.num_tokens  # It is not stored.
            self.saver.begin_pass(tokens, prefill.start - num_head)
        self._layer_since_s = time.perf_counter()
        is_last = len(tokens) == prefill.num_left and job.answers
        behind = len(job.prompt_ids) + job.num_gone if is_last else None
        part, mended = PassPart(prefill, len(tokens), history, self._take_layer, behind, error=error), self._mended
        if job.params.prompt_logprobs is not None:
            places = range(prefill.start, prefill.start + len(tokens))
            part.on_hidden = partial(self._logprobs_of(job.params.prompt_logprobs).add, places)
        if history is not None and mended is not None:
            part.mend, part.joined = mended.mend, mended.join(tokens) if self.joins else None
        return part

    def passed(self, part: PassPart, seconds: float, is_alone: bool) -> None:
        """Its part of a pass was dispatched.

        A load that breaks is a miss and a recompute of everything, never a failed turn. Whatever else breaks is raised,
        and costs nothing that is stored.

        Args:
          seconds: that the pass took, so far as it was waited for.
          is_alone: whether no other job was computed in it.
        """
        self._was_alone &= is_alone
        self._computing_s += seconds
        session, history = self.job.session, self._history
        try:
            if part.error is not None:
                raise part.error
            if self.saver is not None:
                self.saver.end_pass()
            if part.history is not None and session is not None and history is not None:
                self._kv.histories.complete(self.job, history)
                if self._mended is not None:
                    self._save_mended(session, self._mended)
                self.release()
        except ProcessesError:  # The history is sound, but not what was saved behind it.
            self._give_up_saving()
            self.release()
            if session is not None and history is not None:
                self._kv.truncate(session, history.num_slid + history.num_stored)
            raise
        except LoadError:
            if session is None or history is None:
                raise
            _LOG.warning("the load of job %d broke: it begins anew without", self.job.job_id, exc_info=True)
            self._begin_anew(session, history)
            return
        self._metrics.prefill_passes += not self.job.at_idle

    def finish(self) -> None:
        """Measures what it took. Its logits were waited for."""
        job, prefill, history = self.job, self.prefill, self._history
        self._metrics.prefill_steps += 1
        self._metrics.prefill_s += self._computing_s
        job.prefill_s = self._computing_s
        if self._logprobs is not None:
            job.prompt_logprobs = self._logprobs.take()
        if prefill.received:
            known = job.attention if prefill.history_length else None  # What is computed anew receives anew.
            job.attention = padded(() if known is None else known, len(job.prompt_ids))
            for each in prefill.received:
                each.add_to(job.attention)
        num_new = len(prefill.tokens)
        was_mended = job.repaired_tokens or (history is not None and history.chunks)
        if self._was_alone and num_new <= self._runner.chunk_tokens and not was_mended:
            self._kv.histories.learn(history, prefill.history_length, num_new, self._computing_s)

    def save_all(self) -> None:
        """Has all of the prompt, which is computed, stored in place of what is stored of its session."""
        if (session := self.job.session) is not None:
            self._save_read(session, len(self.job.prompt_ids), None)

    def release(self) -> None:
        """Lets go of staging, however far it is."""
        if self._history is not None:
            self._kv.histories.release(self._history)

    def _logprobs_of(self, num_top: int) -> PromptLogprobs:
        """What is found of the prompt, from what is left of it behind a sliding window."""
        if self._logprobs is None:
            start = max(self.job.params.prompt_logprobs_from - len(self.job.slid_ids), 1)
            self._logprobs = PromptLogprobs(self._runner, self.job.prompt_ids, start, num_top)
        return self._logprobs

    def _start(self, num_loaded: int, first_seen: Sequence[int] = ()) -> None:
        self._runner.pool.begin_at(self.prefill.slot, first_seen)
        self.prefill = Prefill(self.prefill.slot, self.job.prompt_ids[num_loaded:], num_loaded)

    def _take_layer(self, layer: int, kv: jax.Array, first: int) -> None:
        """A layer was dispatched, which gives new KV, this job's from `first` on."""
        self._first = first
        if self.saver is not None:
            self.saver.add_layer(layer, kv, first)
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
        parts = {span.key for span in self.job.spans if span.first is not None}  # Of sessions that go on themselves.
        for key in broken - parts:
            self._kv.drop(key)
        self.job.spans = tuple(span for span in self.job.spans if span.key not in broken & parts)
        self._metrics.failed_loads += 1
        self._metrics.lost_chunks += len(broken - {history.key})
        self._history = self._mended = self._logprobs = None
        self.job.skip_none()
        if has_others:  # Fewer each time: what broke is forgotten.
            self.begin()
            return
        session.forget_lost(0, 0)
        self.saver = self._kv.write_buffer.begin_turn(session, 0)
        self.job.cached_tokens = 0
        self._start(0)

    def _give_up_saving(self) -> None:
        saver, self.saver = self.saver, None
        if saver is not None:
            saver.give_up()
            self._kv.write_buffer.end(saver)

    def _save_mended(self, session: Session, mended: RecomputedHistory) -> None:
        """Has the history stored as it was read, in place of what was, and what the first pass computed behind it."""
        prefill, self._mended = self.prefill, None
        if session.is_kept:
            length = prefill.history_length
            saver = self._save_read(session, length, mended.num_plain, mended.num_fused, prefill.start)
            saver.add_pass(prefill.tokens[: prefill.num_done], length, prefill.outputs, self._first)
        self.job.repaired_tokens = round(mended.num_recomputed)
        self._metrics.repaired_tokens += self.job.repaired_tokens
        self._metrics.blended_turns += mended.is_blended

    def _save_read(
        self, session: Session, num_tokens: int, num_plain: int | None, num_fused: int = 0, num_coming: int = 0
    ) -> TurnSaver:
        """Has first tokens stored as they are in the pages, in place of what is stored; with others, so many come."""
        self._kv.write_buffer.make_room(max(num_tokens, num_coming))
        # All of it is read before what is stored gives way to it.
        found = list(self._runner.read(self.prefill.slot, num_tokens))
        self.saver = saver = self._kv.write_buffer.begin_anew(session, num_plain, num_fused)
        for places, row, layers in found:
            saver.add_pass(self.job.prompt_ids[places], places.start, layers, row)
        return saver
