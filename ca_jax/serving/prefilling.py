"""One job's prefill, from its stored history to its first token's logits: passes, what they load, what they save.

A pass runs some of the new tokens through all layers. Each layer's history is taken from the load just before it is
dispatched, and its new KV handed to be saved right after. Between passes other jobs decode.

Not here: which job and how many tokens (engine), staging (layer_loader), jitted code (steps).
"""

from __future__ import annotations

import logging
import time

import jax

from ca_jax.device.processes import least
from ca_jax.device.runner import JOINED_TOKENS, Prefill, Runner
from ca_jax.device.runtime import Runtime
from ca_jax.errors import ProcessesError
from ca_jax.kv.layer_loader import LayerLoad, LoadError
from ca_jax.kv.load import History
from ca_jax.kv.save import TurnSaver
from ca_jax.kv.session_kv import SessionKV
from ca_jax.recompute.plan import blend_plan
from ca_jax.recompute.recomputer import RecomputedHistory
from ca_jax.serving.truncator import Truncator
from ca_jax.turns.conversations import padded
from ca_jax.turns.jobs import Job, TurnSession

_LOG = logging.getLogger(__name__)
_NO_STALL = 0.02  # Of a prefill: it waited for less than that, so that what it took is compute.


class SharedLoad:
    """This process's share of a history that several load at once, each its own heads: what breaks on one stops none.

    All have to dispatch the same layers. Where a layer cannot be read the pass goes on over zeros, and its end tells
    the others: then nobody uses what it gave. To a prefill it is a `runner.LayerSource` like any other.
    """

    def __init__(self, load: LayerLoad, runner: Runner) -> None:
        self.error: Exception | None = None
        """What broke it."""
        self._load = load
        self._runner = runner

    def layer(self, layer: int) -> jax.Array:
        """See `runner.LayerSource`; zeros from the layer on that broke."""
        if self.error is None:
            try:
                return self._load.layer(layer)
            except Exception as error:  # For `_check_load`: raised now, the others would wait for this process forever.
                _LOG.warning("layer %d of a history could not be loaded", layer, exc_info=True)
                self.error = error
        empty = self._runner.empty_kv(self._runner.padded_history(self._load.ticket.num_tokens))
        return self._runner.at_rest(empty)

    def computed(self, layer: int, result: jax.Array) -> None:
        """See `runner.LayerSource`."""
        if self.error is None:
            self._load.computed(layer, result)

    def used(self, layer: int, result: jax.Array) -> None:
        """See `runner.LayerSource`."""
        if self.error is None:
            self._load.used(layer, result)


class Prefilling:
    """The prefill of one job. Belongs to the engine's thread."""

    def __init__(self, job: Job, runner: Runner, kv: SessionKV, truncator: Truncator, runtime: Runtime) -> None:
        if job.slot is None:
            raise RuntimeError(f"job {job.job_id} was planned without a slot")
        self.job = job
        """Whose."""
        self.saver: TurnSaver | None = None
        """What of the turn is to be saved; None for a job without a session."""
        self._slot = job.slot
        self._runner = runner
        self._kv = kv
        self._metrics = runtime.metrics
        self._watch = runtime.watch
        self._truncator = truncator
        self._blend_config = runtime.config.blend
        self._processes = runtime.processes
        self._history: History | None = None
        self._load: LayerLoad | SharedLoad | None = None
        self._mended: RecomputedHistory | None = None  # What is read in place of what is loaded.
        self._was_alone = True
        self._computing_s = 0.0
        self._dispatched_s: float | None = None  # When a pass was that has not been waited for.
        self._layer_since_s = 0.0
        self._prefill = self._start(0)

    def begin(self) -> None:
        """Begins to load what of the job's history is stored. If that raises, `release` lets go of what was begun."""
        job = self.job
        if job.chunk is not None:
            self.saver = self._kv.chunks.begin_saving(job.chunk, job.tenant)
        elif job.session is not None:
            history = self._history = self._kv.open_history(job, job.session)
            self._forget_lost(job.session, history.num_stored, history.num_slid)
            job.skip(history.num_slid)
            if history.load is not None:
                self._load = SharedLoad(history.load, self._runner) if self._processes.count > 1 else history.load
                self._mended = self._recomputed(job.session, history, self._load)
            if self._mended is None:
                self.saver = self._kv.begin_saving(job.session, history.num_stored)
            self._prefill = self._start(history.num_places)

    def _recomputed(
        self, session: TurnSession, history: History, load: LayerLoad | SharedLoad
    ) -> RecomputedHistory | None:
        """A history as its prefill should read it; None: as it is stored."""
        num_own = history.num_stored if history.chunks else history.num_places
        repair, blend = self._truncator.repair_of(session, num_own, history.num_places), None
        if history.chunks:
            blend = blend_plan(
                self._blend_config,
                self._runner.config.num_layers,
                history.num_places,
                num_own,
                history.chunks,
                self.job.recompute_ratio,
            )
        if repair is None and blend is None:
            return None
        token_ids = self.job.prompt_ids[: history.num_places]
        return RecomputedHistory(load, token_ids, self._runner, repair=repair, blend=blend)

    @property
    def num_left(self) -> int:
        """Tokens that are to be dispatched."""
        return self._prefill.num_left

    @property
    def is_complete(self) -> bool:
        """Whether all tokens were dispatched, so that the logits are there."""
        return self._prefill.logits is not None

    @property
    def num_before(self) -> int:
        """Tokens before those."""
        return self._prefill.history_length + self._prefill.num_done

    def run_pass(self, num_tokens: int, is_alone: bool) -> jax.Array | None:
        """Dispatches some of the tokens that are left.

        A load that breaks is a miss and a recompute of everything, never a failed turn. Whatever else breaks is raised,
        and costs nothing that is stored.

        Args:
          is_alone: whether no other job computes in between.

        Returns:
          The last token's logits f32 `[1, V]`, once all tokens are dispatched; None before.
        """
        self._was_alone &= is_alone
        started_s = time.perf_counter()
        history = self._history
        if history is None or history.load is None or self._prefill.num_done:
            self._dispatch(num_tokens)
        else:
            try:
                history.load.begin(lambda layer: self._runner.insert_past(self._prefill, layer))
                self._dispatch(num_tokens)
                self._check_load()
                self._kv.histories.complete(self.job, history)
                if self._mended is not None:
                    self._save_mended(self._mended)
            except LoadError:
                _LOG.warning("the load of job %d broke: it begins anew without", self.job.job_id, exc_info=True)
                self._begin_anew()
                return self.run_pass(min(self.num_left, self._runner.chunk_tokens), is_alone)
        self._metrics.prefill_passes += 1
        if self._prefill.logits is not None:
            self._wait()
        now_s = time.perf_counter()
        self._computing_s += now_s - started_s
        self._dispatched_s = None if self.is_complete else now_s
        return self._prefill.logits

    def await_pass(self) -> bool:
        """Waits for the last pass, if nobody has; whether it did. What is dispatched behind it computes from then on.

        For a caller that waits for that anyway: so what each took is known.
        """
        if self._dispatched_s is None:
            return False
        jax.block_until_ready(self._prefill.outputs)
        self._computing_s += time.perf_counter() - self._dispatched_s
        self._dispatched_s = None
        return True

    def finish(self) -> None:
        """Measures what it took. Its logits were waited for."""
        self._metrics.prefill_steps += 1
        self._metrics.prefill_s += self._computing_s
        self.job.prefill_s = self._computing_s
        if self._prefill.received:
            known = self.job.attention if self._prefill.history_length else None  # What is computed anew receives anew.
            received = padded(() if known is None else known, len(self.job.prompt_ids))
            for each in self._prefill.received:
                each.add_to(received)
            self.job.attention = received
        new_tokens = len(self._prefill.tokens)
        was_mended = self.job.repaired_tokens or (self._history is not None and bool(self._history.chunks))
        if not self._was_alone or new_tokens > self._runner.chunk_tokens or was_mended:
            return
        load = None if self._history is None else self._history.load
        padded_history, padded_new = self._runner.padded(self._prefill.history_length, new_tokens)
        if load is None or load.stall_s < _NO_STALL * self._computing_s:
            self._kv.meter.add_prefill(padded_history, padded_new, self._computing_s)
        predicted_s = None if self._history is None else self._history.predicted_s
        if predicted_s is not None:
            self._metrics.prediction_errors.append(predicted_s / self._computing_s - 1)

    def insert(self) -> None:
        """Moves the KV into its decode slot. Does not wait."""
        self._runner.insert(self._prefill)

    def release(self) -> None:
        """Lets go of staging, however far it is; waits for what reads it unless it was inserted."""
        if self._history is not None:
            self._kv.histories.release(self._history)

    def _start(self, num_loaded: int) -> Prefill:
        return Prefill(self._slot, self.job.prompt_ids[num_loaded:], num_loaded)

    def _dispatch(self, num_tokens: int) -> None:
        prefill = self._prefill
        start = self.num_before
        is_first = not prefill.num_done
        history = (self._mended or self._load) if is_first else None
        tokens = prefill.tokens[prefill.num_done : prefill.num_done + num_tokens]
        if self.saver is not None:
            self._kv.write_buffer.make_room(len(tokens))
            self.saver.begin_pass(tokens, start)
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

    def _check_load(self) -> None:
        """Raises where the load broke, or staging it, on any process: what was computed from it is nothing then."""
        if not isinstance(self._load, SharedLoad):
            return
        error = self._load.error
        is_loaded, is_sound = least(
            self._processes, "loaded", (error is None, error is None or isinstance(error, LoadError))
        )
        if not is_sound:
            self._forget_pass()
            raise ProcessesError("a shard of the history could not be brought to its devices") from error
        if not is_loaded:
            raise LoadError("a shard of the history could not be read") from error

    def _begin_anew(self) -> None:
        """Forgets what was computed from the history: all of the prompt is prefilled.

        Where some of several parts broke, the others are loaded again, and what broke is computed in its places.
        """
        job, history = self.job, self._history
        if history is None or job.session is None:
            raise RuntimeError(f"job {job.job_id} has no history that could break")
        jax.block_until_ready(self._prefill.outputs)
        self._give_up_saving()
        has_others = bool(history.broken) and self._processes.count == 1
        self._kv.fail_history(history)
        self._history = self._load = self._mended = None
        if has_others:  # Fewer each time: what broke is forgotten.
            job.skip_none()
            self.begin()
            return
        self._forget_lost(job.session, 0, 0)
        job.skip_none()
        self.saver = self._kv.begin_saving(job.session, 0)
        job.cached_tokens = 0
        self._prefill = self._start(0)

    def _forget_pass(self) -> None:
        """Forgets what the first pass has saved behind the history, which itself is sound, and lets go of that."""
        session, history = self.job.session, self._history
        if session is not None and history is not None and self.saver is not None:
            self._give_up_saving()
            self.release()
            self._kv.truncate(session, history.num_slid + history.num_stored)

    def _give_up_saving(self) -> None:
        saver, self.saver = self.saver, None
        if saver is not None:
            saver.give_up()
            self._kv.write_buffer.end(saver)

    def _forget_lost(self, session: TurnSession, num_stored: int, num_slid: int) -> None:
        """Tokens behind what is stored are computed anew: at their places, with nothing to repair."""
        left = session.conversation
        if left.num_slid != num_slid:
            session.resume(left.slid(num_slid))
        if left.num_to_repair > num_stored:
            session.resume(left.with_kv_of(num_stored))

    def _save_mended(self, mended: RecomputedHistory) -> None:
        """Has the history stored as it was read, in place of what was, and what the first pass computed behind it."""
        session, prefill = self.job.session, self._prefill
        if session is None:
            raise RuntimeError(f"job {self.job.job_id} has a history and no session")
        self._mended = prefill.source = None  # Its layers go when they are in the slot.
        if session.is_kept:
            self._kv.write_buffer.make_room(prefill.history_length + prefill.num_done)
            parts = [  # All of it before what is stored gives way to it.
                (token_ids, start, [self._runner.at_rest(kv) for kv in layers])
                for token_ids, start, layers in (
                    (self.job.prompt_ids[: prefill.history_length], 0, mended.layers),
                    (prefill.tokens[: prefill.num_done], prefill.history_length, prefill.kv),
                )
            ]
            self.saver = self._kv.begin_saving_anew(session, mended.num_plain, mended.num_fused)
            for token_ids, start, layers in parts:
                self.saver.begin_pass(token_ids, start)
                for layer, kv in enumerate(layers):
                    self.saver.add_layer(layer, kv)
                self.saver.end_pass()
        self.job.repaired_tokens = round(mended.num_recomputed)
        self._metrics.repaired_tokens += self.job.repaired_tokens
        self._metrics.blended_turns += mended.is_blended

    def _wait(self) -> None:
        """Waits for the last pass, and has the next job's load go on meanwhile."""
        for output in self._prefill.outputs:
            if not self._kv.histories.pump():
                break
            output.block_until_ready()
        jax.block_until_ready(self._prefill.logits)
