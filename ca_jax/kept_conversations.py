"""What is known of conversations beside their KV: kept with it, and found again after a restart.

On SSD a conversation is a note of its KV, written with it, some time after the turn. Until then the note is in a log
(`NoteLog`) that outlives the process: whoever was told of a turn finds it again though the process was killed. Open
conversations stay there for as long as they are open; their KV may be evicted meanwhile.

    turn ends       note to the log, then to the store; then the turn is told
    let go of       it leaves the log once SSD has its note, or the store has given it up
    another start   whichever of the two knows more

KV that is older than its conversation is met by the store's own rules: its first tokens are served as far as they are
the same, and those behind are computed.

Not here: conversations as bytes (conversations), files (storage), which KV goes with them (session_kv).
"""

from __future__ import annotations

import itertools
import logging

from ca_jax.conversations import Conversation
from ca_jax.errors import TenantError
from ca_jax.processes import Processes
from ca_jax.session import Session
from ca_jax.storage.attention_store import AttentionStore
from ca_jax.storage.note_log import Noted, NoteLog
from ca_jax.storage.records import Owner, Residency

_LOG = logging.getLogger(__name__)
_LOOKED_AT = 8  # Conversations, each time that what has moved is taken in.


class KeptConversations:
    """Conversations by the key of their KV. Belongs to the engine's thread.

    Args:
      store: keeps them with their KV.
      log: keeps them until then; None where there is no SSD: then nothing outlives the process.
      processes: all go on with the same.
      ttl_s: how long those are kept that do not say, seconds; None: while there is room.
    """

    def __init__(self, store: AttentionStore, log: NoteLog | None, processes: Processes, ttl_s: float | None) -> None:
        self._store = store
        self._log = log
        self._processes = processes
        self._ttl_s = ttl_s
        self._closed: dict[str, None] = {}  # Keys of conversations that are open no more, and in the log still.

    def remember(self, key: str, session: Session) -> None:
        """Has a conversation kept with its KV, as it is now."""
        note = session.conversation.to_bytes()
        self._put(key, session, note)
        self._store.set_note(key, note)

    def note(self, key: str, session: Session) -> None:
        """Has a conversation outlive the process as it is now; its KV was changed with it."""
        self._put(key, session, session.conversation.to_bytes())

    def recall(self, key: str, session_id: str, tenant: str) -> Conversation | None:
        """The conversation of a key that was kept; None if there is none.

        Raises:
          TenantError: that name is another tenant's.
        """
        known = {info.key: info.tenant for info in self._store.of_name(session_id)}
        if self._log is not None:
            known |= {noted.key: noted.tenant for noted in self._log.of_name(session_id)}
        is_others = bool(known) and key not in known
        kept = self._kept(key, session_id) if key in known else None
        if self._processes.count > 1:
            kept, is_others = self._newest(kept, is_others)
        if is_others:
            raise TenantError(f"session {session_id!r} wanted its own tenant, found {tenant!r}")
        return kept

    def opened(self, key: str) -> None:
        """A conversation is open: it stays in the log."""
        self._closed.pop(key, None)

    def closed(self, key: str) -> None:
        """A conversation is open no more, and may be gone on with."""
        if self._log is not None:
            self._closed[key] = None

    def forget(self, key: str) -> None:
        """A conversation is not to be gone on with by another process."""
        if self._log is not None:
            self._log.remove(key)

    def set_ttl(self, key: str, ttl_s: float | None) -> None:
        """Says how long a conversation is kept after its last turn, seconds."""
        if self._log is not None:
            self._log.set_ttl(key, ttl_s)

    def collect(self) -> None:
        """Has what is on SSD leave the log, of conversations that are not open."""
        for key in tuple(itertools.islice(self._closed, _LOOKED_AT)):
            del self._closed[key]
            if self._store.has_note_on_ssd(key) or self._is_gone(key):
                self.forget(key)
            else:
                self._closed[key] = None  # Behind the others.

    @property
    def outlive(self) -> bool:
        """Whether conversations outlive the process."""
        return self._log is not None

    def noted(self) -> tuple[Noted, ...]:
        """Those in the log: of conversations that are open, or were when an earlier process ended."""
        return () if self._log is None else self._log.list()

    def close(self) -> None:
        """Ends it; the store has settled. What SSD has is no matter of the log's any more."""
        if self._log is not None:
            for noted in self._log.list():
                is_closed = noted.key in self._closed
                if self._store.has_note_on_ssd(noted.key) or (is_closed and self._is_gone(noted.key)):
                    self._log.remove(noted.key)
            self._log.close()

    def _put(self, key: str, session: Session, note: bytes) -> None:
        if self._log is not None:
            stored = (info.ttl_s for info in self._store.of_name(session.session_id) if info.key == key)
            ttl_s = next(stored, self._ttl_s if session.ttl_s is None else session.ttl_s)
            self._log.put(key, Owner(tenant=session.tenant, session_id=session.session_id, ttl_s=ttl_s), note)

    def _is_gone(self, key: str) -> bool:
        return self._store.residency(key) is Residency.ABSENT

    def _kept(self, key: str, session_id: str) -> Conversation | None:
        noted = None if self._log is None else self._log.get(key)
        stored = _parsed(self._store.note(key), session_id)
        return _newer(_parsed(noted or b"", session_id), stored)

    def _newest(self, kept: Conversation | None, is_others: bool) -> tuple[Conversation | None, bool]:
        """What all processes go on with: what the one says that kept most of it. One that died early kept less."""
        length = -1 if kept is None else kept.num_dropped + len(kept.token_ids)
        found = self._processes.gather("what was kept of a session", [length, is_others])
        longest = max(range(len(found)), key=lambda index: found[index][0])
        if found[longest][0] >= 0:
            note = kept.to_bytes().hex() if kept is not None and longest == self._processes.index else None
            kept = Conversation.from_bytes(bytes.fromhex(self._processes.gather("a conversation", note)[longest]))
        return kept, any(others for _, others in found)


def _newer(noted: Conversation | None, stored: Conversation | None) -> Conversation | None:
    """The log is written first, whenever something was said; what only leaves its KV goes to SSD alone."""
    if noted is None or stored is None:
        return noted or stored
    return noted if noted.chain != stored.chain or noted.num_dropped > stored.num_dropped else stored


def _parsed(note: bytes, session_id: str) -> Conversation | None:
    try:
        return Conversation.from_bytes(note) if note else None
    except ValueError:
        _LOG.warning("what was kept of session %r cannot be read: it begins anew", session_id)
        return None
