"""The conversations that are open, by name: how they are found, opened, let go of, and lost to another replica.

Those of other replicas are asked for by `Elsewhere`.

Not here: their turns (batch), what is stored of others (stored_sessions).
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from ca_jax.device.processes import Processes, from_first
from ca_jax.errors import SessionMovedError, TenantError
from ca_jax.kv.session_kv import SessionKV
from ca_jax.kv.shared_sessions import SharedSessions
from ca_jax.serving.batch import Batch
from ca_jax.session import Session
from ca_jax.storage.objects.manifest import Manifest
from ca_jax.turns.conversations import Conversation


class OpenSessions:
    """Open conversations of one engine, oldest first. Belongs to the engine's thread.

    Args:
      make: gives a session of the engine, by its name and conversation and what else `Session` takes.
    """

    def __init__(self, make: Callable[..., Session], kv: SessionKV, batch: Batch, processes: Processes) -> None:
        self._make, self._kv, self._batch, self._processes = make, kv, batch, processes
        self._sessions: dict[str, Session] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, session_id: str) -> Session | None:
        """The one of that name, of whatever tenant."""
        return self._sessions.get(session_id)

    def find(self, session_id: str, tenant: str, ttl_s: float | None = None) -> Session | None:
        """The one of that name, opened if it was kept; None if there is none.

        One that was open, and that another replica has gone on with since, goes on with what that one left.

        Raises:
          TenantError: it is another tenant's.
        """
        session = self._sessions.get(session_id)
        if session is not None and session.tenant != tenant:
            raise TenantError(f"session {session_id!r} must be asked for by its own tenant, got {tenant!r}")
        if session is not None and session.is_busy:  # Its turn's publish is refused, if it is another replica's by now.
            return session
        kept = self._kv.recall(session_id, tenant, session)
        if session is None:
            return None if kept is None else self.open(session_id, kept, tenant, ttl_s)
        if kept is not None:
            session.resume(kept)
            self._kv.conversations.note(session.key, session)
        return session

    def open(
        self, session_id: str | None, begun: Conversation, tenant: str, ttl_s: float | None, is_kept: bool = True
    ) -> Session:
        """Opens one, which is found by its name from now on if it is to be kept."""
        session = self.new(session_id, begun, tenant, ttl_s=ttl_s, keeps="all" if is_kept else "nothing")
        if is_kept:
            self._sessions[session.session_id] = session
            self._kv.conversations.opened(session.key)
        return session

    def new(self, session_id: str | None, begun: Conversation, tenant: str = "", **options: Any) -> Session:
        """One that is not found by its name, which is made up if not given."""
        name = session_id or from_first(self._processes, "a session's name", uuid.uuid4().hex)
        session = self._make(name, begun, tenant=tenant, **options)
        session.key = self._kv.key(name, tenant)
        return session

    def remove(self, session: Session) -> None:
        """Takes one out that is open no more."""
        self._sessions.pop(session.session_id, None)

    def end_lost(self) -> None:
        """Ends those that other replicas own by now, and drops what is here of them."""
        for key in self._kv.take_lost():
            self.lose(key)

    def lose(self, key: str) -> None:
        """Ends a conversation here, and drops what is here of it: it is another replica's, or may be."""
        for session in [each for each in self._sessions.values() if each.key == key]:
            self._end_turn(session)
            session.end()
            self.remove(session)
        self._kv.lose(key)

    def _end_turn(self, session: Session) -> None:
        """Ends the turn that runs of one that another replica has gone on with."""
        if session.job is not None and not session.job.done:
            self._batch.fail(
                session.job,
                SessionMovedError(f"session {session.session_id!r} was gone on with elsewhere: send the whole history"),
            )


class Elsewhere:
    """Conversations that replicas share: `engine.elsewhere`. Any thread may call."""

    def __init__(self, sessions: OpenSessions, kv: SessionKV, shared: SharedSessions, lock: threading.RLock) -> None:
        self._sessions, self._kv, self._shared, self._lock = sessions, kv, shared, lock

    @property
    def replica(self) -> str:
        """This engine's name as an owner."""
        return self._shared.replica

    def claim(self, session_id: str, tenant: str = "") -> None:
        """Has this engine own a conversation, whichever had it; `Engine.session` then goes on with it.

        Waits for the store of objects, not for the engine. Does nothing where none has published it.

        Raises:
          ObjectsError: it is not known whether one has.
        """
        self._shared.claim(self._kv.key(session_id, tenant))

    def let_go(self, session: Session) -> None:
        """Ends a conversation here and drops what is here of it; what is published of it stays, for any replica."""
        with self._lock:
            self._sessions.lose(session.key)

    def look_up(self, tenant: str, chain: str) -> Manifest | None:
        """A tenant's conversation that stood, at the end of a turn, where a chain says; None: none is known.

        Waits as `claim` does, and claims nothing: it goes on where it is, and `fork` begins another one with it.

        Raises:
          ObjectsError: that cannot be found out.
        """
        return self._shared.look_up(tenant, chain)

    def fork(self, manifest: Manifest, num_tokens: int, session_id: str) -> Session:
        """Begins a conversation of that name, which goes on behind the first tokens of one that `look_up` found.

        Raises:
          ValueError: what was found is no conversation of this version.
        """
        with self._lock:
            begun = Conversation.from_bytes(manifest.conversation or b"").forked(num_tokens)
            session = self._sessions.open(session_id, begun, manifest.tenant, manifest.ttl_s)
            self._shared.begin_with(session.key, manifest)
            return session
