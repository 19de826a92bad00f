"""Repairs conversations that tokens have left while nothing else is to be done, so that their next turn does not wait.

    tokens leave in an answer, or by hand ── what stays is saved ── nothing waits or runs ── one pass ── saved anew

A repair runs from its beginning to its end within one step of the engine: no turn ever meets half of one. What a turn
finds unrepaired, since there was no time, it repairs itself.

Not here: what is computed anew (recompute), which conversations (truncator), what a job does (batch).
"""

from __future__ import annotations

import logging

from ca_jax.errors import ContextWindowError, UnknownAdapterError
from ca_jax.serving.core import EngineCore
from ca_jax.serving.open_sessions import OpenSessions
from ca_jax.session import Session
from ca_jax.storage.records import Residency

_LOG = logging.getLogger(__name__)


class IdleRepairs:
    """Belongs to the engine's thread.

    Args:
      sessions: others than those that are open are left alone.
    """

    def __init__(self, core: EngineCore, sessions: OpenSessions) -> None:
        self._unrepaired, self._sessions = core.truncator.unrepaired, sessions
        self._truncator, self._turns, self._kv = core.truncator, core.turns, core.kv
        self._scheduler, self._batch = core.scheduler, core.batch

    @property
    def waits(self) -> bool:
        """Whether there is one to be repaired once its KV is saved."""
        return len(self._unrepaired) > 0

    def step(self) -> bool:
        """Repairs the next one; whether there was one. Nothing may wait or run."""
        for key, session in tuple(self._unrepaired.items()):
            if self._kv.is_being_saved(key):
                continue
            del self._unrepaired[key]
            if self._may_repair(session) and self._repair(session):
                return True
        return False

    def _may_repair(self, session: Session) -> bool:
        """Whether there is something to repair, and all that it needs is in DRAM."""
        held, store = session.conversation, self._kv.store
        if self._sessions.get(session.session_id) is not session or session.is_busy or held.borrowed:
            return False
        num_stored = store.num_readable(session.key)
        if store.residency(session.key) is not Residency.DRAM or num_stored < len(held.token_ids) - held.num_slid - 1:
            return False
        return self._truncator.repair_of(session, num_stored) is not None

    def _repair(self, session: Session) -> bool:
        try:
            job = self._turns.repair(session)
        except (ContextWindowError, UnknownAdapterError):  # Its next turn says so.
            return False
        self._kv.announce(job, session)
        self._scheduler.submit(job)
        while not job.done and self._batch.step():
            pass
        if not job.done:
            self._batch.cancel(job)
        if job.error is not None:
            _LOG.warning("session %s is repaired by its next turn", session.session_id, exc_info=job.error)
        return True
