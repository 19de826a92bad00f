"""The conversations that are open, by name: how they are found, opened, let go of, and lost to another replica.

Those of other replicas are asked for by `Elsewhere`.

Not here: their turns (batch), what is stored of others (stored_sessions).
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from ca_jax.device.processes import Processes, from_first
from ca_jax.errors import InvalidRequestError, SessionBusyError, SessionMovedError, TenantError
from ca_jax.kv.object_transfers import Published
from ca_jax.kv.session_kv import SessionKV
from ca_jax.kv.shared_sessions import SharedSessions
from ca_jax.serving.adapters import LoadedAdapters
from ca_jax.serving.batch import Batch
from ca_jax.session import Session
from ca_jax.storage.objects.manifest import Manifest
from ca_jax.telemetry.wakeup import CountedLock
from ca_jax.turns.conversations import Conversation


class OpenSessions:
    """Open conversations of one engine, oldest first. Belongs to the engine's thread.

    Args:
      make: gives a session of the engine, by its name and conversation and what else `Session` takes.
    """

    def __init__(
        self,
        make: Callable[..., Session],
        kv: SessionKV,
        batch: Batch,
        processes: Processes,
        adapters: LoadedAdapters,
    ) -> None:
        self._make, self._kv, self._batch, self._processes = make, kv, batch, processes
        self._adapters = adapters
        self._sessions: dict[str, Session] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, session_id: str) -> Session | None:
        """The one of that name, of whatever tenant."""
        return self._sessions.get(session_id)

    def ask(
        self, session_id: str | None, system: str | None, tenant: str, ttl_s: float | None, adapter: str | None
    ) -> Session:
        """Begins one, or finds it; see `Engine.session`."""
        if ttl_s is not None and not (math.isfinite(ttl_s) and ttl_s >= 0):
            raise InvalidRequestError(f"ttl_s must be a number of seconds >= 0, got {ttl_s}")
        session = None if session_id is None else self.find(session_id, tenant, ttl_s)
        if session is None:
            messages = [] if system is None else [{"role": "system", "content": system}]
            return self.open(session_id, self._adapters.begin(messages, adapter), tenant, ttl_s)
        if system is not None:
            raise InvalidRequestError(f"session {session_id!r} has begun: a system message must come first")
        if adapter not in (None, session.adapter):
            held = "no adapter" if session.adapter is None else f"adapter {session.adapter!r}"
            raise InvalidRequestError(f"session {session_id!r} must go on with {held}, got adapter {adapter!r}")
        return session

    def fork(self, session: Session, num_tokens: int | None, session_id: str | None, is_kept: bool) -> Session:
        """Begins one that goes on behind the first tokens of another; see `Engine.fork`."""
        most = len(session.token_ids)
        num_tokens = most if num_tokens is None else num_tokens
        if not 0 <= num_tokens <= most:
            raise InvalidRequestError(f"a fork must be behind 0..{most} tokens, got {num_tokens}")
        if session_id is not None and self.find(session_id, session.tenant) is not None:
            raise InvalidRequestError(f"session_id must be a name that is not taken, got {session_id!r}")
        begun = session.conversation.forked(num_tokens)
        return self.open(session_id, begun, session.tenant, session.ttl_s, is_kept)

    def find(self, session_id: str, tenant: str, ttl_s: float | None = None) -> Session | None:
        """The one of that name, opened if it was kept; None if there is none.

        One that was open, and that another replica has gone on with since, goes on with what that one left.

        Raises:
          TenantError: it is another tenant's.
          UnknownAdapterError: its adapter is not loaded.
        """
        session = self._sessions.get(session_id)
        if session is not None and session.tenant != tenant:
            raise TenantError(f"session {session_id!r} must be asked for by its own tenant, got {tenant!r}")
        if session is not None and session.is_busy:  # Its turn's publish is refused, if it is another replica's by now.
            return session
        kept = self._kv.recall(session_id, tenant, session)
        if session is None:
            if kept is None:
                return None
            session = self.open(session_id, kept, tenant, ttl_s)
            if ttl_s is None:
                session.ttl_s = self._kv.conversations.ttl_of(session.key, session_id)
            return session
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
        """One that is not found by its name, which is made up if not given. Raises what `LoadedAdapters.of` does."""
        self._adapters.of(begun)
        name = session_id or from_first(self._processes, "a session's name", uuid.uuid4().hex)
        session = self._make(name, begun, tenant=tenant, **options)
        session.key = self._kv.key(name, tenant, begun.adapter_weights)
        return session

    def remove(self, session: Session) -> None:
        """Takes one out that is open no more."""
        self._sessions.pop(session.session_id, None)

    def end_lost(self) -> None:
        """Ends those that other replicas own by now, and drops what is here of them."""
        for key in self._kv.take_lost():
            self.lose(key)

    def release(self, session: Session) -> None:
        """Closes one and leaves what is stored of it; see `Engine.release`."""
        if session.is_busy:
            raise SessionBusyError(f"session {session.session_id!r} still answers; it must be idle to be let go of")
        session.end()
        self.remove(session)
        self._kv.closed(session.key)

    def forget(self, session: Session) -> None:
        """Drops one, of which no turn runs, and its KV."""
        self.remove(session)
        self._kv.forget(session.key, is_noted=session.is_noted)

    def truncate(self, session: Session, num_tokens: int, left: Conversation | None) -> None:
        """Forgets one's KV behind its first tokens; see `Engine.truncate_stored`."""
        if session.job is not None and session.is_busy and (left is not None or session.job.started_s):
            raise SessionBusyError(f"session {session.session_id!r} still answers; it must be idle for its KV to go")
        self._kv.truncate(session, num_tokens, left)
        if left is not None:
            session.resume(left)
        self._kv.note(session)  # SSD may have forgotten it with its KV.

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

    def __init__(self, sessions: OpenSessions, kv: SessionKV, shared: SharedSessions, lock: CountedLock) -> None:
        self._sessions, self._kv, self._shared, self._lock = sessions, kv, shared, lock

    @property
    def replica(self) -> str:
        """This engine's name as an owner."""
        return self._shared.kv.replica

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

    def publish(self, session: Session) -> Future[Published] | None:
        """Begins to publish a conversation that has changed; None: it will be, but not now, or not after each turn."""
        with self._lock:
            return self._shared.publish_now(session.key) if self._shared.policy == "turn" else None

    def theirs(self, session_id: str, tenant: str = "") -> Manifest | None:
        """What is published of a conversation that another replica owns, or this one before it was started again.

        None: this one holds it, or nothing is published. Waits as `claim` does, and claims nothing.

        Raises:
          ObjectsError: that cannot be found out.
        """
        return self._shared.theirs(self._kv.key(session_id, tenant))

    def look_up(self, tenant: str, chain: str) -> Manifest | None:
        """A tenant's conversation that stood, at the end of a turn, where a chain says; None: none is known.

        Waits as `claim` does, and claims nothing: it goes on where it is, and `fork` begins another one with it.

        Raises:
          ObjectsError: that cannot be found out.
        """
        return self._shared.kv.look_up(tenant, chain)

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
