"""Computes what stayed of a cut conversation anew, all of it, while nothing else is to be done.

    tokens leave ── what stays is used as it is, and repaired ── nothing waits or runs ── passes ── saved in its place

From then on its KV is that of a fresh prefill, as if `tt` had been the method, and no turn has waited for that. It all
happens within one step of the engine: no turn ever meets half of it. Whoever asks for something meanwhile waits for one
short pass; what was computed is dropped then, and begun again later.

Not here: how the turn behind a cut repairs it (recompute), which conversations were cut (truncator), passes (batch).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ca_jax.errors import ContextWindowError, UnknownAdapterError
from ca_jax.serving.core import EngineCore
from ca_jax.serving.open_sessions import OpenSessions
from ca_jax.session import Session
from ca_jax.storage.records import Residency

_LOG = logging.getLogger(__name__)


class IdleRecompute:
    """Belongs to the engine's thread.

    Args:
      sessions: others than those that are open are left alone.
      num_asked: how often something was asked of the engine; once it was, what is computed here has to end.
    """

    def __init__(self, core: EngineCore, sessions: OpenSessions, num_asked: Callable[[], int]) -> None:
        self._inexact = core.truncator.inexact if core.recomputes_when_idle else {}
        self._sessions, self._num_asked = sessions, num_asked
        self._turns, self._kv, self._scheduler, self._batch = core.turns, core.kv, core.scheduler, core.batch

    @property
    def waits(self) -> bool:
        """Whether there is one to be computed, once its KV is saved."""
        return len(self._inexact) > 0

    def step(self) -> bool:
        """Computes the next one, or begins to; whether there was one. Nothing may wait or run."""
        for key, session in tuple(self._inexact.items()):
            if self._kv.is_being_saved(key):
                continue
            del self._inexact[key]
            if self._is_fit(session) and self._compute(session):
                return True
        return False

    def _is_fit(self, session: Session) -> bool:
        """Whether it is here to be computed."""
        held, is_open = session.conversation, self._sessions.get(session.session_id) is session
        if not is_open or session.is_busy or held.borrowed or held.num_slid:
            return False
        return self._kv.store.residency(session.key) is Residency.DRAM

    def _compute(self, session: Session) -> bool:
        try:
            job = self._turns.recompute(session)
        except (ContextWindowError, UnknownAdapterError):  # Its next turn says so.
            return False
        num_asked = self._num_asked()
        self._scheduler.submit(job)
        while not job.done and self._num_asked() == num_asked and self._batch.step():
            pass
        if not job.done:
            self._batch.cancel(job)
            self._inexact[session.key] = session
        if job.error is not None:
            _LOG.warning("session %s could not be computed anew", session.session_id, exc_info=job.error)
        return True
