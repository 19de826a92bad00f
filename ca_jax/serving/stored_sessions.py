"""What the store keeps of which session, to be listed, pinned and dropped: `engine.stored`.

Not here: conversations that are open (engine), the tool for a directory that no engine uses (launch.store).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator

from ca_jax.errors import SessionBusyError, TenantError, UnknownSessionError
from ca_jax.kv.session_kv import QueuedKV, SessionKV
from ca_jax.session import Job, Session
from ca_jax.storage.catalog.notes import Noted
from ca_jax.storage.records import BlockTiers, EntryInfo, LookAheadWindows, Owner
from ca_jax.telemetry.wakeup import CountedLock
from ca_jax.turns.conversations import Conversation


class StoredSessions:
    """Shows, pins and drops stored sessions. Any thread may call."""

    def __init__(self, kv: SessionKV, opened: Iterable[Session], lock: CountedLock) -> None:
        self._kv, self._opened, self._lock = kv, opened, lock

    def list(self, *, tenant: str | None = None) -> tuple[EntryInfo, ...]:
        """Sessions that are stored, in DRAM or on SSD, of one tenant or of all."""
        with self._lock:
            return tuple(info for info in self._kv.store.list() if tenant is None or info.tenant == tenant)

    def names(self) -> tuple[tuple[str, str], ...]:
        """Tenant and session id of what this engine goes on with: what is stored, or was open when one was killed.

        The latest used first.
        """
        with self._lock:
            stored = sorted(self._kv.store.list(), key=lambda info: info.last_used_s, reverse=True)
            known: tuple[EntryInfo | Noted, ...] = (*self._kv.conversations.noted(), *stored)
            return tuple(dict.fromkeys((each.tenant, each.session_id) for each in known if self.is_own(each)))

    def page(
        self, opened: Collection[str], limit: int, *, after: str | None = None, tenant: str = ""
    ) -> tuple[str, ...]:
        """Names of a tenant's sessions that this engine goes on with: those that are open, then others, latest first.

        Takes as long as the page is, and as finding its beginning takes; nothing is described.

        Args:
          opened: names of those that are open.
          after: the name behind which they begin; None: all do.

        Raises:
          UnknownSessionError: none has the name `after`.
        """
        with self._lock:
            owned = ((key, owner) for key, owner in self._owned() if owner.tenant == tenant)
            others = ((key, owner.session_id, owner.variant) for key, owner in owned if owner.session_id not in opened)
            names = itertools.chain(((None, name, "") for name in opened), others)
            if after is not None and not any(name == after for _, name, _ in names):
                raise UnknownSessionError(f"after must be the name of a session, got {after!r}")
            own = (name for key, name, of in names if key is None or self._kv.key(name, tenant, of) == key)  # No chunk.
            return tuple(itertools.islice(own, limit))

    def pinned(self, *, tenant: str = "") -> set[str]:
        """Names of a tenant's sessions that are pinned."""
        with self._lock:
            return self._kv.store.names_pinned(tenant)

    def is_own(self, info: EntryInfo | Noted) -> bool:
        """Whether an entry is a session that this engine goes on with: no chunk, and stored with the same weights."""
        return self._kv.key(info.session_id, info.tenant, info.variant) == info.key

    def find(self, session_id: str, *, tenant: str = "") -> EntryInfo | None:
        """What is stored of one session; None if nothing is, or it is another tenant's or of other weights."""
        with self._lock:
            own = (info for info in self._kv.store.of_name(session_id) if info.tenant == tenant and self.is_own(info))
            return next(own, None)

    def blocks(self, session_id: str, *, tenant: str = "") -> tuple[BlockTiers, ...]:
        """Where each block of a session is, in token order; none where nothing is stored."""
        with self._lock:
            info = self.find(session_id, tenant=tenant)
            return () if info is None else self._kv.store.blocks(info.key)

    @property
    def windows(self) -> LookAheadWindows:
        """How far over the queue of turns the store looks: what it fetches early, and evicts late."""
        with self._lock:
            return self._kv.store.windows

    @property
    def busy_pages_share(self) -> float:
        """Share of the devices' pages that running jobs hold, and that no stored session's KV may take up therefore."""
        with self._lock:
            return self._kv.resident.busy_share

    def queued(self, job: Job) -> QueuedKV | None:
        """Of a turn that waits, where the KV is that it will load; None of a job that waits for none."""
        with self._lock:
            return self._kv.queued(job)

    def conversation(self, session_id: str, *, tenant: str = "") -> Conversation | None:
        """What is kept of a session beside its KV; None if there is nothing. Does not open it.

        Raises:
          TenantError: it is another tenant's.
        """
        with self._lock:
            return self._kv.conversations.recall(self._kv.known_key(session_id, tenant), session_id, tenant)

    def pin(self, session_id: str, *, tenant: str = "") -> None:
        """Keeps a session in the store, over restarts too: no eviction and no expiry, until `unpin` or `drop`.

        Raises:
          UnknownSessionError: nothing is stored under that name.
          TenantError: it is another tenant's.
        """
        self._set_pinned(session_id, tenant, True)

    def unpin(self, session_id: str, *, tenant: str = "") -> None:
        """Lets a session go like others again; otherwise as `pin`."""
        self._set_pinned(session_id, tenant, False)

    def set_ttl(self, session_id: str, ttl_s: float | None, *, tenant: str = "") -> None:
        """Says how long a session is kept after its last use, seconds; None: while there is room.

        Raises:
          ValueError: `ttl_s` is negative or not finite.
          UnknownSessionError: as for `pin`; so is TenantError.
        """
        with self._lock:
            key = self._key(session_id, tenant)
            self._kv.store.set_ttl(key, ttl_s)
            self._kv.conversations.set_ttl(key, ttl_s)
            if ttl_s is not None:
                self._kv.drop_ahead(key)  # It would live longer.
            for session in self._opened:
                if session.key == key:
                    session.ttl_s = ttl_s
            self._describe(key)

    def expect_back(self, session_id: str, seconds: float | None, *, tenant: str = "") -> None:
        """Says when a session will be back, and so how long its KV is worth keeping near.

        Args:
          session_id: of a session that is stored, or open.
          seconds: from the end of the turn that waits or runs, or else from now, until the next comes; None: unknown.
          tenant: whose it is.

        Raises:
          ValueError: `seconds` is negative or not finite.
          UnknownSessionError: there is no such session; TenantError: it is another tenant's.
        """
        with self._lock:
            opened = (each.key for each in self._opened if (each.session_id, each.tenant) == (session_id, tenant))
            key = next(opened, None)
            self._kv.store.expect_back(self._key(session_id, tenant) if key is None else key, seconds)

    def drop(self, session_id: str, *, tenant: str = "") -> None:
        """Forgets what is stored of a session. A conversation that is open goes on, and prefills everything.

        Raises:
          SessionBusyError: a turn of it runs.
          UnknownSessionError: as for `pin`; so is TenantError.
        """
        with self._lock:
            key = self._key(session_id, tenant)
            if self._kv.write_buffer.is_running(key):
                raise SessionBusyError(
                    f"session {session_id!r} still answers; it must be idle for its KV to be dropped"
                )
            self._kv.forget(key)

    def _set_pinned(self, session_id: str, tenant: str, pinned: bool) -> None:
        with self._lock:
            key = self._key(session_id, tenant)
            self._kv.store.set_pinned(key, pinned)
            self._describe(key)

    def _describe(self, key: str) -> None:
        """Has replicas know how long a conversation is kept, if it is open."""
        for session in self._opened:
            if session.key == key:
                self._kv.describe(session)

    def _owned(self) -> Iterator[tuple[str, Owner | Noted]]:
        """Key and owner of what outlives the process, the latest first; chunks among them."""
        noted = {each.key: each for each in reversed(self._kv.conversations.noted())}
        yield from noted.items()
        if self._kv.conversations.outlive:
            yield from ((key, owner) for key, owner in self._kv.store.owners() if key not in noted)

    def _key(self, session_id: str, tenant: str) -> str:
        infos = self._kv.store.of_name(session_id)
        for info in infos:
            if info.tenant == tenant:
                return info.key
        if infos:
            raise TenantError(f"session {session_id!r} must be asked for by its own tenant, got {tenant!r}")
        raise UnknownSessionError(f"the session must be stored, and {session_id!r} is not")
