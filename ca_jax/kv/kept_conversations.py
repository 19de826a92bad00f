"""What is known of conversations beside their KV: kept with it, and found again after a restart.

On SSD a conversation is a note of its KV, written with it, some time after the turn. Until then the note is in a log
(`NoteLog`) that outlives the process: a client told of a turn finds it again though the process was killed. Open
conversations stay there for as long as they are open; their KV may be evicted meanwhile.

    turn ends       what it adds to the note to the log, then the note to the store; then the turn is told
    let go of       it leaves the log once SSD has had its last note
    another start   whichever of the two knows the later state

What has no room in the log, or cannot be written there, is counted, and tried again until SSD has it.

KV that is older than its conversation is met by the store's own rules: its first tokens are served as far as they are
the same, and those behind are computed.

Not here: conversations as bytes (conversations), files (storage), which KV goes with them (session_kv).
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time

from ca_jax.device.processes import Processes
from ca_jax.errors import TenantError
from ca_jax.session import Session
from ca_jax.storage.catalog.notes import Noted, NoteLog
from ca_jax.storage.records import EntryInfo, Note, Owner, Residency
from ca_jax.storage.store import AttentionStore
from ca_jax.telemetry.metrics import EngineMetrics
from ca_jax.turns.conversations import Conversation

_LOG = logging.getLogger(__name__)
_LOOKED_AT = 8  # Conversations, each time that what has moved is taken in.
_PAUSE_S = 10.0  # After a note that could not be written to the log, before it is tried again.
_SPARE_BYTES = 1 << 20  # More than is lacking leaves a log that is full, so that not each note has to look for room.


@dataclasses.dataclass
class _Packed:
    """A conversation as bytes."""

    conversation: Conversation
    note: Note
    num_logged: int = 0
    """First bytes of it that are all that the log has."""


class KeptConversations:
    """Conversations by the key of their KV. Belongs to the engine's thread.

    Args:
      log: keeps them until then; None where there is no SSD: then nothing outlives the process.
      ttl_s: how long those are kept that do not say, seconds; None: while there is room.
    """

    def __init__(
        self,
        store: AttentionStore,
        log: NoteLog | None,
        processes: Processes,
        ttl_s: float | None,
        metrics: EngineMetrics,
    ) -> None:
        self._store = store
        self._log = log
        self._processes = processes
        self._ttl_s = ttl_s
        self._metrics = metrics
        self._clock = time.monotonic
        self._packed: dict[str, _Packed] = {}
        self._closed = {noted.key for noted in self.noted()}  # Keys of those in the log that are not open.
        self._on_ssd: set[str] = set()  # Keys of those in the log whose note SSD has, or had.
        self._unkept: dict[str, int] = {}  # Generations of those that it is not known of, by key.
        self._refused: dict[str, tuple[Owner, bytes]] = {}  # What the log has not taken.
        self._next_try_s = 0.0

    def remember(self, key: str, session: Session) -> None:
        """Has a conversation kept with its KV, as it is now."""
        if self._log is not None:
            self.note(key, session)
            self._store.set_note(key, self.pack(key, session.conversation))

    def note(self, key: str, session: Session) -> None:
        """Has a conversation outlive the process as it is now; its KV was changed with it."""
        if self._log is None or not session.is_kept:
            return
        note = self.pack(key, session.conversation)
        packed = self._packed[key]
        stored = (info.ttl_s for info in self._store.of_name(session.session_id) if info.key == key)
        ttl_s = next(stored, self._ttl_s if session.ttl_s is None else session.ttl_s)
        of = {"session_id": session.session_id, "variant": session.conversation.adapter_weights}
        owner = Owner(tenant=session.tenant, ttl_s=ttl_s, **of)
        num_logged = packed.num_logged if key in self._log else 0
        self._on_ssd.discard(key)
        self._unkept[key] = session.conversation.generation
        self._refused.pop(key, None)
        packed.num_logged = len(note)
        if not self._put(key, owner, note[num_logged:], behind=num_logged > 0):
            packed.num_logged = 0
            self._refused[key] = owner, note
            self._metrics.refused_notes += 1

    def pack(self, key: str, conversation: Conversation) -> Note:
        """A conversation as bytes, for the work of what is new in it since it was packed last."""
        before = self._packed.get(key)
        if before is None or before.conversation is not conversation:
            added = None if before is None else conversation.added_to(before.conversation)
            if before is None or added is None:
                data, num_logged = conversation.to_bytes(), 0
            else:
                data, num_logged = before.note + added, before.num_logged
            self._packed[key] = _Packed(conversation, Note(data, conversation.generation), num_logged)
        return self._packed[key].note

    def recall(self, key: str, session_id: str, tenant: str) -> Conversation | None:
        """The conversation of a key that was kept; None if there is none.

        Raises:
          TenantError: that name is another tenant's.
        """
        known = self.of_name(session_id)
        is_others = bool(known) and key not in known
        kept = self._kept(key, session_id) if key in known else None
        if self._processes.count > 1:
            kept, is_others = self._newest(kept, is_others)
        if is_others:
            raise TenantError(f"session {session_id!r} must be asked for by its own tenant, got {tenant!r}")
        return kept

    def of_name(self, session_id: str) -> dict[str, EntryInfo | Noted | Owner]:
        """Whose what is kept by a name is, by key: of whatever tenant, and perhaps of other weights."""
        found: dict[str, EntryInfo | Noted | Owner] = {info.key: info for info in self._store.of_name(session_id)}
        if self._log is not None:
            found |= {noted.key: noted for noted in self._log.of_name(session_id)}
        return found | {key: owner for key, (owner, _) in self._refused.items() if owner.session_id == session_id}

    def opened(self, key: str) -> None:
        """A conversation is open: it stays in the log."""
        self._closed.discard(key)

    def closed(self, key: str) -> None:
        """A conversation is open no more, and may be gone on with."""
        self._packed.pop(key, None)
        if self._log is not None and (key in self._unkept or (key in self._log and key not in self._on_ssd)):
            self._closed.add(key)
        else:
            self.forget(key)

    def forget(self, key: str) -> None:
        """A conversation is not to be gone on with by what is in the log."""
        self._packed.pop(key, None)
        self._unkept.pop(key, None)
        self._refused.pop(key, None)
        self._closed.discard(key)
        self._on_ssd.discard(key)
        if self._log is not None:
            self._log.remove(key)

    def ttl_of(self, key: str, session_id: str) -> float | None:
        """How long a stored conversation is kept after its last turn, seconds; None: as those that do not say."""
        stored = (info.ttl_s for info in self._store.of_name(session_id) if info.key == key)
        ttl_s = next(stored, None)
        return None if ttl_s == self._ttl_s else ttl_s

    def set_ttl(self, key: str, ttl_s: float | None) -> None:
        """Says how long a conversation is kept after its last turn, seconds."""
        if self._log is not None:
            self._log.set_ttl(key, ttl_s)

    def collect(self) -> None:
        """Has what is on SSD leave the log, of conversations that are not open. Tries again what the log refused."""
        self._look_at(tuple(itertools.islice(self._unkept, _LOOKED_AT)))
        if self._refused and self._clock() >= self._next_try_s:
            self._try_again()

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
            self._look_at(tuple(self._unkept))
            self._try_again()
            for key in tuple(self._on_ssd):
                if self._store.residency(key) is not Residency.ABSENT:
                    self._log.remove(key)
            self._log.close()

    def _look_at(self, keys: tuple[str, ...]) -> None:
        """Takes in which notes SSD has now."""
        for key in keys:
            generation = self._unkept.pop(key)
            if not self._store.has_note_on_ssd(key, generation):
                self._unkept[key] = generation  # Behind the others.
                continue
            self._refused.pop(key, None)
            self._on_ssd.add(key)
            if key in self._closed:
                self.forget(key)

    def _try_again(self) -> None:
        for key, (owner, note) in tuple(self._refused.items()):
            if not self._put(key, owner, note, behind=False):
                self._next_try_s = self._clock() + _PAUSE_S
                return
            del self._refused[key]

    def _put(self, key: str, owner: Owner, part: bytes, *, behind: bool) -> bool:
        """Writes to the log, where it has room or those make room that are on SSD, or else those that are not open."""
        if self._log is None:
            return False
        if self._log.lacks(len(part)) > 0:
            others = [noted.key for noted in self._log.list() if noted.key != key]
            spare = [other for other in others if other in self._on_ssd]
            for other in (*spare, *(other for other in others if other not in self._on_ssd and other in self._closed)):
                if self._log.lacks(len(part) + _SPARE_BYTES) <= 0:
                    break
                if other in self._on_ssd:
                    self._on_ssd.discard(other)
                    self._log.remove(other)
                else:
                    self._metrics.refused_notes += 1
                    self.forget(other)
            if self._log.lacks(len(part)) > 0:
                _LOG.warning("the log of open sessions is full: a turn goes with this process until it is on SSD")
                return False
        return self._log.put(key, owner, part, behind=behind)

    def _kept(self, key: str, session_id: str) -> Conversation | None:
        if key in self._refused:
            return _parsed(self._refused[key][1], session_id)
        note = None if self._log is None else self._log.get(key)
        noted = _parsed(note or b"", session_id)
        stored = _parsed(self._store.note(key), session_id)
        if noted is None or note is None:
            return stored
        if key not in self._unkept:
            if stored is not None and stored.generation >= noted.generation:
                self._on_ssd.add(key)
            else:  # An earlier process did not get it there.
                self._store.set_note(key, Note(note, noted.generation))
                self._unkept[key] = noted.generation
        return stored if stored is not None and stored.generation > noted.generation else noted

    def _newest(self, kept: Conversation | None, is_others: bool) -> tuple[Conversation | None, bool]:
        """What all processes go on with: what the one says that kept most of it. One that died early kept less."""
        length = -1 if kept is None else kept.num_dropped + len(kept.token_ids)
        found = self._processes.gather("what was kept of a session", [length, is_others])
        longest = max(range(len(found)), key=lambda index: found[index][0])
        if found[longest][0] >= 0:
            note = kept.to_bytes().hex() if kept is not None and longest == self._processes.index else None
            kept = Conversation.from_bytes(bytes.fromhex(self._processes.gather("a conversation", note)[longest]))
        return kept, any(others for _, others in found)


def _parsed(note: bytes, session_id: str) -> Conversation | None:
    try:
        return Conversation.from_bytes(note) if note else None
    except ValueError:
        _LOG.warning("what was kept of session %r cannot be read: it begins anew", session_id)
        return None
