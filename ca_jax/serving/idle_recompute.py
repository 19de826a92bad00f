"""Computes what a full context takes while nothing else is to be done: what a cut left, and what the next will leave.

    nearly full ── ahead: KV of what the next cut would leave ──┐
                                                                ├── the turn behind a cut finds it, and repairs nothing
    tokens left ── anew: KV of all that stayed, in its place ───┘

Either is the KV of a fresh prefill, as if `tt` had been the method, and no turn has waited for it. What is computed
ahead is stored as a session that nobody knows; the one that is cut shares it, as it would the KV of any prompt that
begins alike. It all happens within one step of the engine: no turn meets half of it. Whoever asks for something
meanwhile waits for one short pass.

Not here: how the turn behind a cut repairs it (recompute), which conversations are cut (truncator), passes (batch).
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping

from ca_jax.errors import ContextWindowError, UnknownAdapterError
from ca_jax.serving.core import EngineCore
from ca_jax.serving.open_sessions import OpenSessions
from ca_jax.session import Session
from ca_jax.storage.records import Residency
from ca_jax.telemetry.wakeup import CountedLock

_LOG = logging.getLogger(__name__)


class IdleRecompute:
    """Belongs to the engine's thread.

    Args:
      sessions: others than those that are open are left alone.
      lock: of the engine; once somebody asks for it, what is computed here has to end.
    """

    def __init__(self, core: EngineCore, sessions: OpenSessions, lock: CountedLock) -> None:
        self._is_on, self._shares = core.recomputes_when_idle, core.shares_prefixes
        self._sessions, self._lock = sessions, lock
        self._truncator, self._turns, self._kv, self._adapters = core.truncator, core.turns, core.kv, core.adapters
        self._scheduler, self._batch = core.scheduler, core.batch
        self._num_asked = 0  # Of the lock, when it was looked at last.
        self._ahead: dict[str, tuple[Session, Session]] = {}  # Of each key the session, and what is stored for its cut.

    @property
    def waits(self) -> bool:
        """Whether there is one to be computed anew, once its KV is saved."""
        return self._is_on and len(self._truncator.inexact) > 0

    def step(self) -> bool:
        """Computes the next one, or begins to; whether there was one. Nothing may wait or run.

        Where somebody has asked for something since the last time, the next step may: that goes first.
        """
        if not self._is_on:
            return False
        self._forget_spent()
        is_wanted, self._num_asked = self._is_wanted, self._lock.num_asked
        if is_wanted and (self._truncator.inexact or self._truncator.nearly_full):
            return True
        found = self._truncator.inexact, self._truncator.nearly_full
        for sessions, compute in zip(found, (self._compute_anew, self._compute_ahead), strict=True):
            for key, session in tuple(sessions.items()):
                if self._kv.is_being_saved(key):
                    continue
                del sessions[key]
                if self._is_fit(session) and compute(session, sessions):
                    return True
        return False

    @property
    def _is_wanted(self) -> bool:
        return self._lock.is_awaited or self._lock.num_asked != self._num_asked

    def _forget_spent(self) -> None:
        """Forgets what was computed ahead for a cut that has been, or for a session that is open no more."""
        spent = self._truncator.spent
        spent |= {key for key, (session, _) in self._ahead.items() if not self._is_open(session)}
        for key in spent:
            self._ahead.pop(key, None)
            self._kv.drop_ahead(key)
        spent.clear()

    def _is_open(self, session: Session) -> bool:
        return self._sessions.get(session.session_id) is session

    def _is_fit(self, session: Session) -> bool:
        """Whether it is here to be computed."""
        held = session.conversation
        if not self._is_open(session) or session.is_busy or held.borrowed or held.num_slid:
            return False
        return self._kv.store.residency(session.key) is Residency.DRAM

    def _compute_anew(self, session: Session, later: MutableMapping[str, Session]) -> bool:
        return self._run(session, session, list(session.token_ids), "anew", later)

    def _compute_ahead(self, session: Session, later: MutableMapping[str, Session]) -> bool:
        """Where there is room in DRAM that nobody else has a use for now."""
        token_ids = self._truncator.left_by_next(session)
        is_asked_for = self._shares and session.ttl_s is None and len(token_ids) > 0
        if not is_asked_for or not self._kv.store.has_free(session.tenant, len(token_ids)):
            return False
        if session.key not in self._ahead:
            try:
                begun = self._adapters.begin(adapter=session.adapter)
            except UnknownAdapterError:
                return False
            stored_as = self._sessions.new(None, begun, session.tenant, keeps="kv")
            stored_as.key = self._kv.ahead_key(session.key)
            self._ahead[session.key] = session, stored_as
        _, stored_as = self._ahead[session.key]
        self._kv.ahead[session.key] = stored_as.key
        return self._run(session, stored_as, token_ids, "ahead", later)

    def _run(
        self, session: Session, stored_as: Session, token_ids: list[int], kind: str, later: MutableMapping[str, Session]
    ) -> bool:
        """Runs a job from its beginning to its end, or has it begin again `later`; whether there could be one."""
        try:
            job = self._turns.at_idle(stored_as, token_ids, kind)
        except (ContextWindowError, UnknownAdapterError):  # Its next turn says so.
            return False
        self._scheduler.submit(job)
        while not job.done and not self._is_wanted and self._batch.step():
            pass
        if not job.done:
            self._batch.cancel(job)
            if self._is_wanted:  # Else there is no room for it now.
                later[session.key] = session
        if job.error is not None:
            _LOG.warning("session %s could not be computed %s", session.session_id, kind, exc_info=job.error)
        return True
