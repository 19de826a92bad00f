"""What happens when a conversation outgrows the context window: to its tokens, its stored KV and its pages.

Before a turn, and in the middle of an answer. Whichever way, tokens leave the session, the store and the pages alike,
and nothing is computed again but what `OverflowConfig` asks for.

Not here: how many tokens leave and which (overflow), blocks (storage), jitted code (steps).
Source: CachedAttention (Gao et al., USENIX ATC 2024), section 3.4.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from functools import partial

import jax
import numpy as np
import numpy.typing as npt

from ca_jax.config import BlendConfig
from ca_jax.device import page_steps, steps
from ca_jax.device.passes import PassPart, Prefill
from ca_jax.device.runner import Runner
from ca_jax.device.warmup import Compile, Shapes
from ca_jax.errors import ContextWindowError, InvalidRequestError
from ca_jax.kv.history import History
from ca_jax.kv.save import TurnSaver
from ca_jax.kv.session_kv import SessionKV
from ca_jax.overflow.config import (
    DiscardContext,
    OldestFirst,
    OverflowConfig,
    check_discarded,
    leaving_at_once,
    num_leaving,
    oldest_first,
)
from ca_jax.recompute.drift import Drift, add_drift
from ca_jax.recompute.plan import Plan, blend_plan, repair_plan, repaired_rows
from ca_jax.recompute.recomputer import JOINED_TOKENS, Question, RecomputedHistory, Repair, functions_of
from ca_jax.session import Job, Session
from ca_jax.storage.records import Residency
from ca_jax.storage.tokens import num_common
from ca_jax.telemetry.metrics import EngineMetrics
from ca_jax.turns.conversations import OTHERWISE, Conversation, padded

_NEAR = 4  # A context may soon be full once less than a fourth of the window is left.
_WARM_STEP = 64  # Lengths of histories for whose repair functions are compiled are so far apart.


class Truncator:
    """Drops tokens of conversations. Belongs to the engine's thread.

    Args:
      overflow: how; None: by hand alone.
      drift: of the model; None adds nothing to what stays.
    """

    def __init__(
        self,
        overflow: OverflowConfig | None,
        drift: Drift | None,
        kv: SessionKV,
        runner: Runner,
        metrics: EngineMetrics,
    ) -> None:
        self._may_drop = overflow is not None
        self._overflow = overflow or OverflowConfig(repair="none")
        self._drift = drift
        self._drift_values = None if drift is None else drift.values
        self._kv = kv
        self._runner = runner
        self._metrics = metrics
        self._window = runner.window
        self._share = leaving_at_once(self._overflow, runner.window)
        # Whether what stays would have to be used as it is, and states stand in the way.
        self._is_bound = runner.config.num_states > 0 and self._overflow.method == "ca"
        recomputes = self._overflow.recomputes or drift is not None
        self.repairs = self._overflow.method == "ca" and recomputes and not self._is_bound
        """Whether what stays is repaired: at once in its pages, as far as that is quick, and by the next prefill."""
        self.inexact: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()
        """Sessions that were cut, and whose KV is not what computing their tokens would give; by key, in that order."""
        self.nearly_full: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()
        """Sessions whose next turn may not fit, by key."""
        self.spent: set[str] = set()
        """Keys of sessions for whose next cut KV was computed that is of no more use."""

    @property
    def rule(self) -> str:
        """Names how tokens leave: by this rule and what was said anybody could tell which; `OTHERWISE` if not."""
        overflow = self._overflow
        if not self._may_drop or overflow.whole_turns or overflow.token_discarder != OldestFirst():
            return OTHERWISE
        return f"{self._share} of {self._window} behind {overflow.keep_first_tokens}"

    def _rule_of(self, discarded: np.ndarray) -> str:
        """By which rule these tokens of a context leave, bool `[T]`."""
        count = int(discarded.sum())
        if count % self._share or discarded.all():
            return OTHERWISE
        oldest = oldest_first(len(discarded), count, self._overflow.keep_first_tokens)
        return self.rule if np.array_equal(discarded, oldest) else OTHERWISE

    def repair_of(self, session: Session, num_tokens: int) -> Repair | None:
        """What is to be done to a session's history before its prefill reads it; None: it is used as it is stored."""
        if not self.repairs:
            return None
        found = session.conversation.with_kv_of(num_tokens)
        plan = self._plan(found.num_to_repair)
        to_drift = tuple(found.to_drift) if self._drift is not None else ()
        if plan is None and not to_drift:
            return None
        return Repair(plan=plan, drift=self._drift, to_drift=to_drift, num_plain=self._overflow.keep_first_tokens)

    def recomputed(
        self, job: Job, session: Session, history: History, slot: int, config: BlendConfig
    ) -> RecomputedHistory | None:
        """A job's history, read in a slot, as its prefill should read it; None: as it is stored."""
        if history.source is None:
            return None
        num_places, blend, question = history.num_places, None, None
        num_own = history.num_stored if history.chunks else num_places
        repair = self.repair_of(session, num_own)
        if history.chunks:
            num_layers, ratio = len(self._runner.config.kv_layers), job.recompute_ratio
            blend = blend_plan(config, num_layers, num_places, num_own, history.chunks, ratio)
            if config.selection == "query" and blend.moves is not None:
                asked = job.prompt_ids[num_places:][-self._runner.chunk_tokens :]
                by = partial(blend_plan, config, num_layers, num_places, num_own, history.chunks)
                question = Question(asked, by(0.0), partial(by, ratio))
        if repair is None and blend is None:
            return None
        token_ids = job.prompt_ids[:num_places]
        return RecomputedHistory(
            history.source, slot, token_ids, self._runner, repair=repair, blend=blend, question=question
        )

    def _plan(self, num_tokens: int) -> Plan | None:
        return repair_plan(self._overflow, len(self._runner.config.kv_layers), num_tokens)

    def functions(self, shapes: Shapes) -> list[Compile]:
        """What truncation needs to be compiled."""
        if not self._may_drop or self._is_bound or self._overflow.method != "ca":
            return []
        runner, scalar = self._runner, shapes.small()
        values = self._drift_values
        drift = None if values is None else [shapes.small(*each.shape, dtype=each.dtype) for each in values]

        def cut() -> None:
            places = shapes.small(shapes.most_pages * runner.pool.size.page_tokens)
            given = shapes.pages, shapes.small(2, shapes.most_pages), scalar, places, scalar
            shapes.compiled(page_steps.cut_pages, *given, drift, None if drift is None else scalar, runner.sharding)

        def add(layer: int, drift: jax.ShapeDtypeStruct, size: int) -> None:
            kept = runner.loaded_shape(layer, size)
            if runner.packs_kv:
                kept = shapes.compiled(steps.unpack_kv, kept, runner.dtype, runner.sharding)
                given = kept, shapes.small(shapes.most_pages), scalar, scalar, scalar, runner.sharding
                shapes.compiled(page_steps.fill_pages, shapes.pages[layer], *given)
            shapes.compiled(add_drift, kept, drift, scalar, scalar)

        found: list[Compile] = [cut]
        if self.repairs and drift is not None:
            padded = runner.history_buckets[1:]
            found += [partial(add, layer, drift[layer], size) for size in padded for layer in runner.shapes]
        plans = dict[tuple[int, ...], Plan]()
        for num_tokens in (*range(_WARM_STEP, self._window, _WARM_STEP), self._window) if self.repairs else ():
            plan = self._plan(num_tokens)  # What is left may be of any length: of a discard by hand, too.
            if plan is not None:
                plans.setdefault(plan.rows, plan)
        sizes = sorted({repaired_rows(count) for count in range(1, JOINED_TOKENS + 1)})  # With new tokens.
        for plan in [plan for plan in plans.values() if plan.moves is not None][:1]:
            joined = (dataclasses.replace(plan, rows=(size,) * plan.num_layers) for size in sizes)
            plans = {each.rows: each for each in joined} | plans
        for plan in plans.values():
            found += functions_of(shapes, plan)
        return found

    # Between turns.

    def ended(self, session: Session) -> None:
        """A turn of a session has ended: notes whether the next one may not fit."""
        is_near = self._window - len(session.token_ids) <= self._window // _NEAR
        if is_near and self.repairs and self.rule != OTHERWISE:
            self.nearly_full[session.key] = session

    def left_by_next(self, session: Session) -> list[int]:
        """The tokens that a session's next cut leaves, if a message overflows the window by less than what leaves."""
        discarded = self.for_prompt(session, self._window - len(session.token_ids))
        left = np.zeros(0, int) if discarded is None else np.flatnonzero(~discarded)
        return [session.token_ids[place] for place in left]

    def _is_computed(self, session: Session, left: Conversation) -> bool:
        """Whether KV of what is left was computed ahead, to be shared, but for as few tokens as a repair computes."""
        if (ahead := self._kv.ahead.get(session.key)) is None:
            return False
        self.spent.add(session.key)
        store, left_ids = self._kv.store, np.fromiter(left.token_ids, np.int32)
        found = store.plain_prefix(ahead)
        num_found = 0 if found is None else num_common(found.token_ids, left_ids)
        is_enough = len(left_ids) - num_found <= self._overflow.repair_ratio * len(left_ids)
        return is_enough and num_found >= store.layout.block_tokens

    def for_prompt(self, session: Session, num_new: int, history: Conversation | None = None) -> np.ndarray | None:
        """Which tokens of a history leave so that new tokens and one of their answer fit. Only where any may leave.

        Where the first tokens that stay are in the way, all of it leaves; the new tokens alone may still not fit.

        Args:
          num_new: how many tokens come.
          history: what was told of it at once, of which nothing is computed: the oldest leave, whatever the discarder
            would look at; None: the session's own.

        Returns:
          bool `[T]`; None where all may stay.
        """
        conversation = session.conversation if history is None else history
        overflow, num_history = self._overflow, len(conversation.token_ids)
        if num_history + num_new < self._window:
            return None
        slid = np.arange(num_history) < conversation.num_slid
        if slid.any() and num_history - slid.sum() + num_new < self._window:
            return slid
        num_wanted = num_new + 1
        count = num_leaving(overflow, window=self._window, num_tokens=num_history, num_wanted=num_wanted)
        if num_history - count + num_wanted > self._window:
            return np.ones(num_history, bool)
        starts = [*(start for start, _ in conversation.turn_starts), num_history]
        num_needed = num_history + num_wanted - self._window
        if history is not None:
            starts = starts if overflow.whole_turns else []
            return oldest_first(num_history, count, overflow.keep_first_tokens, starts, num_needed)
        return slid | self._choose(session, session.token_ids, count, starts, num_needed, conversation.attention)

    def without(self, history: Conversation, discarded: np.ndarray | None) -> Conversation:
        """What is left of a history of which nothing is computed, without some tokens, bool `[T]`."""
        if discarded is None:
            return history
        left = history.cut(discarded, by=self._rule_of(discarded))
        self._count(discarded)
        return left.forked(len(left.token_ids))

    def cut(self, session: Session, discarded: np.ndarray, *, by_hand: bool = False) -> None:
        """Drops tokens of a session, bool `[T]`, from its conversation and from the store. No turn of it may run.

        What leaves by hand is not what drift was measured with: then it is not added.

        Raises:
          ContextWindowError: layers keep states, and nothing says that what stays may be computed anew; `by_hand` it is
            an InvalidRequestError.
        """
        if self._is_bound:
            error: type[Exception] = InvalidRequestError if by_hand else ContextWindowError
            raise error(
                f"no token can leave a conversation with {self._runner.config.architecture}, layers of which keep a "
                "state of all that was said: overflow method must be 'tt' or 'of', by which what stays is computed "
                f"anew, got {self._overflow.method!r}"
            )
        method = self._overflow.method
        by = OTHERWISE if by_hand else self._rule_of(discarded)
        left = session.conversation.cut(discarded, by=by)
        recomputes = method != "ca" or self._is_computed(session, left)
        if not recomputes:
            if self.repairs:
                left = left.with_repair(len(left.token_ids), drifts=not by_hand)
                self.inexact[session.key] = session
            self._kv.discard(session, discarded, left)
        else:
            if method == "of":
                stored = self._kv.store.residency(session.key)
                self._metrics.invalidated_histories += stored is not Residency.ABSENT
            is_pinned = self._is_pinned(session)
            self._kv.truncate(session, 0, keeps_ahead=True)  # It is still to be shared.
            if is_pinned:
                self._kv.write_buffer.pin_saved(session.key)
        session.resume(left)
        if recomputes:
            self._kv.remember(session)
        self._count(discarded)

    # In the middle of an answer.

    def may_go_on(self, job: Job) -> bool:
        """Whether a job whose context is full can be made room for: one of a session, of which tokens may leave."""
        may_drop = self._may_drop and job.may_drop and not self._is_bound
        return may_drop and job.session is not None and self._num_leaving_from(job) > 0

    def cut_running(self, job: Job, saver: TurnSaver | None) -> None:
        """Drops tokens of a job that decodes: from its context, its pages, its session and the store.

        The last token of its context is not in its pages yet, and stays.
        """
        session, overflow, slot = job.session, self._overflow, job.slot
        if session is None or slot is None or not self._may_drop:
            raise RuntimeError(f"job {job.job_id} has a full context and no session, slot or leave to drop any of it")
        if job.slid_ids:
            slid = np.arange(len(session.token_ids)) < len(job.slid_ids)
            session.resume(session.conversation.cut(slid))
            job.dropped_tokens += len(job.slid_ids)
            job.slid_ids = []
        num_history = len(session.token_ids)
        starts = [*(start for start, _ in session.conversation.turn_starts), num_history]
        attention = () if job.attention is None else job.attention
        if saver is not None:
            self._kv.write_buffer.finish_so_far(saver)
        self.spent |= self._kv.ahead.keys() & {session.key}
        discarded = self._choose(session, job.token_ids[:-1], self._num_leaving_from(job), starts, 1, attention)
        kept = np.flatnonzero(~discarded)
        own, others = discarded[:num_history], discarded[num_history:]
        left = session.conversation.cut(own, others=others, by=self._rule_of(discarded))
        if self.repairs:
            left = left.with_repair(len(kept), drifts=True)
            self.inexact[session.key] = session
        recomputes = overflow.method != "ca"
        self._metrics.invalidated_histories += overflow.method == "of"
        if saver is not None:
            forgotten = np.ones_like(discarded) if recomputes else discarded
            if recomputes and self._is_pinned(session):
                self._kv.write_buffer.pin_saved(saver.key)
            self._kv.store.discard(saver.key, forgotten, note=self._kv.conversations.pack(saver.key, left))
            saver.cut(forgotten, left.kv_lineage)
        session.resume(left)
        if job.attention is not None:
            job.attention = padded(job.attention, len(discarded))[kept]
        job.token_ids = [*(job.token_ids[place] for place in kept), job.token_ids[-1]]
        if recomputes and len(kept):
            self._recompute(job, slot, saver)
        elif not recomputes:
            self._runner.pool.cut(slot, kept, drift=self._drift_values, drifts_from=overflow.keep_first_tokens)
            if overflow.recomputes and overflow.anchor_tokens and len(kept):
                _compute(self._runner, slot, job.token_ids[:-1][: overflow.anchor_tokens])
        job.dropped_tokens += int(discarded.sum())
        job.num_gone += int(discarded.sum())
        self._count(discarded)

    # How.

    def _is_pinned(self, session: Session) -> bool:
        """Whether it stays pinned, although nothing of it is stored until what it leaves is computed."""
        return session.is_noted and session.session_id in self._kv.store.names_pinned(session.tenant)

    def _num_leaving_from(self, job: Job) -> int:
        # The last token is in the context and not in its pages: it cannot leave.
        count = num_leaving(self._overflow, window=self._window, num_tokens=job.num_tokens, num_wanted=1)
        return min(count, max(job.num_tokens - 1 - self._overflow.keep_first_tokens, 0))

    def _choose(
        self,
        session: Session,
        token_ids: list[int],
        count: int,
        turn_starts: list[int],
        num_needed: int,
        attention: npt.ArrayLike,
    ) -> np.ndarray:
        """Which of a context's tokens leave, bool `[T]`; its first ones are the session's."""
        overflow, num_tokens = self._overflow, len(token_ids)
        if overflow.whole_turns:
            return oldest_first(num_tokens, count, overflow.keep_first_tokens, turn_starts, num_needed)
        if count == num_tokens:
            return np.ones(num_tokens, bool)
        discarder = overflow.token_discarder
        context = DiscardContext(
            num_tokens=num_tokens,
            num_leaving=count,
            keep_first=overflow.keep_first_tokens,
            attention=padded(attention, num_tokens) if discarder.needs_attention else None,
            kv=self._kv.histories.read(session, token_ids) if discarder.needs_kv else None,
        )
        discarded = check_discarded(discarder.choose(context), num_tokens)
        if discarded.sum() < num_needed:
            raise InvalidRequestError(
                f"discarder {discarder.name} must name at least {num_needed} tokens, got {discarded.sum()}"
            )
        return discarded

    def _recompute(self, job: Job, slot: int, saver: TurnSaver | None) -> None:
        """Computes a job's context again, into its pages and the store."""
        token_ids = job.token_ids[:-1]
        self._runner.pool.shorten(slot, 0)
        if saver is None:
            _compute(self._runner, slot, token_ids)
            return

        def begin(start: int, num_tokens: int) -> Callable[[int, jax.Array, int], None]:
            self._kv.write_buffer.make_room(num_tokens)
            saver.begin_pass(token_ids[start : start + num_tokens], start)
            return saver.add_layer

        _compute(self._runner, slot, token_ids, begin, saver.end_pass)

    def _count(self, discarded: np.ndarray) -> None:
        self._metrics.truncations += 1
        self._metrics.dropped_tokens += int(discarded.sum())


def _compute(
    runner: Runner,
    slot: int,
    tokens: list[int],
    on_pass: Callable[[int, int], Callable[[int, jax.Array, int], None]] | None = None,
    end_pass: Callable[[], None] = lambda: None,
) -> None:
    """Computes the first tokens of a row anew, with nothing before them. Does not wait.

    Args:
      slot: which.
      tokens: those to compute.
      on_pass: told of each pass before it is dispatched, its first token and how many; gives its `on_layer`.
      end_pass: called behind each.
    """
    prefill = Prefill(slot, tokens, 0)
    while prefill.num_left:
        part = PassPart(prefill, min(runner.chunk_tokens, prefill.num_left))
        if on_pass is not None:
            part.on_layer = on_pass(prefill.num_done, part.num_tokens)
        runner.run_pass([part])
        if part.error is not None:
            raise part.error
        end_pass()
