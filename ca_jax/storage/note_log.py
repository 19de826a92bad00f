"""What the owners of open sessions want kept with them, in a file that outlives the process at once.

The SSD tier writes a session's note together with its KV, some time after the turn. Whoever is told of a turn before
that would know more than a store whose process was killed. So the note alone is written here first, into the system's
memory and no further: as fast as a copy, and safe from the end of the process. It is not safe from the end of the
system: of what another boot has written nothing is believed, and the SSD tier's notes stand.

A note that cannot be written makes the older one beside it wrong: a failure empties the log, which begins anew later.

Belongs to the thread that keeps the books.

Not here: which of two notes is the newer one (their owner knows), notes on SSD (catalog).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ca_jax.storage.catalog_file import CatalogVersionError
from ca_jax.storage.records import Owner

_LOG = logging.getLogger(__name__)
LOG_NAME = "notes.sqlite"
_FORMAT = 1
_MOST = 65_536  # Notes that earlier processes have left, those written last: nobody may ask for them again.
_PAUSE_S = 30.0  # After a failure, before the log begins anew.
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TABLES = """
CREATE TABLE boot (id TEXT NOT NULL);
CREATE TABLE notes (
  key TEXT PRIMARY KEY,
  session_id BLOB NOT NULL,
  tenant BLOB NOT NULL,
  note BLOB NOT NULL,
  ttl_s REAL,           -- NULL: while there is room for it
  written_s REAL NOT NULL
) WITHOUT ROWID;
"""


@dataclasses.dataclass(frozen=True)
class Noted:
    """Whose note is in the log."""

    key: str
    tenant: str
    session_id: str


class NoteLog:
    """Notes by the key of their session. One process at a time: whoever holds the directory's lock.

    Args:
      directory: the store's.
      clock: seconds since the epoch.
      boot: names what the system's memory lives as long as; empty where that is not known, and then nothing that was
        written before is believed.
    """

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.time, boot: str | None = None) -> None:
        self._path = directory / LOG_NAME
        self._clock = clock
        self._boot = this_boot() if boot is None else boot
        self._noted: dict[str, Noted] = {}
        self._by_name: dict[str, set[str]] = {}
        self._db: sqlite3.Connection | None = None
        self._next_try_s = 0.0
        with self._guarded():
            if self._is_sound():
                self._db = _connect(self._path)
                self._forget_old(self._db)
            else:
                self._begin_anew()

    def list(self) -> tuple[Noted, ...]:
        """Whose notes there are."""
        return tuple(self._noted.values())

    def of_name(self, session_id: str) -> tuple[Noted, ...]:
        """Those of sessions that their owners, of whatever tenant, know by a name."""
        return tuple(self._noted[key] for key in sorted(self._by_name.get(session_id, ())))

    def put(self, key: str, owner: Owner, note: bytes) -> None:
        """Writes a session's note, in place of the one there is. It stands once this returns."""
        with self._guarded():
            if self._db is None and time.monotonic() >= self._next_try_s:
                self._begin_anew()
            if self._db is not None:
                row = (key, _as_blob(owner.session_id), _as_blob(owner.tenant), note, owner.ttl_s, self._clock())
                self._db.execute("INSERT OR REPLACE INTO notes VALUES (?, ?, ?, ?, ?, ?)", row)
                self._list(Noted(key, owner.tenant, owner.session_id))

    def get(self, key: str) -> bytes | None:
        """The note of a session; None where there is none, or its time is over."""
        with self._guarded():
            if self._db is not None and key in self._noted:
                row = "SELECT note, written_s + ttl_s FROM notes WHERE key = ?"
                note, until_s = self._db.execute(row, (key,)).fetchone()
                if until_s is None or until_s >= self._clock():
                    return bytes(note)
                self.remove(key)
        return None

    def set_ttl(self, key: str, ttl_s: float | None) -> None:
        """Says how long a session's note counts, seconds since it was written."""
        with self._guarded():
            if self._db is not None and key in self._noted:
                self._db.execute("UPDATE notes SET ttl_s = ? WHERE key = ?", (ttl_s, key))

    def remove(self, key: str) -> None:
        """Forgets a session's note, if there is one."""
        noted = self._noted.pop(key, None)
        if noted is not None:
            names = self._by_name[noted.session_id]
            names.discard(key)
            if not names:
                del self._by_name[noted.session_id]
            with self._guarded():
                if self._db is not None:
                    self._db.execute("DELETE FROM notes WHERE key = ?", (key,))

    def close(self) -> None:
        """Closes the file; what is in it stays. May be called again."""
        db, self._db = self._db, None
        self._next_try_s = math.inf
        self._noted.clear()
        self._by_name.clear()
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.close()

    def _is_sound(self) -> bool:
        """Whether there is a log that can be believed."""
        if not self._path.exists() or not self._boot:
            return False
        try:
            with contextlib.closing(_connect(self._path)) as db:
                (version,) = db.execute("PRAGMA user_version").fetchone()
                if not version or db.execute("SELECT id FROM boot").fetchall() != [(self._boot,)]:
                    return False
                if version != _FORMAT:
                    raise CatalogVersionError(
                        f"notes of open sessions must be of version {_FORMAT}, found version {version}: {self._path}; "
                        "end the release that wrote them, so that they get to SSD, or delete the file"
                    )
                return bool(db.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
        except sqlite3.Error as error:
            _LOG.warning("what was noted of open sessions cannot be read: %s: %s", self._path, error)
            return False

    def _begin_anew(self) -> None:
        self._delete()
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._db = _connect(self._path)
        self._db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {_FORMAT}; COMMIT;")
        self._db.execute("INSERT INTO boot VALUES (?)", (self._boot,))

    def _forget_old(self, db: sqlite3.Connection) -> None:
        """Forgets the notes whose time is over, and takes in whose the others are."""
        db.execute("DELETE FROM notes WHERE written_s + ttl_s < ?", (self._clock(),))
        latest = "SELECT key FROM notes ORDER BY written_s DESC LIMIT ?"
        db.execute(f"DELETE FROM notes WHERE key NOT IN ({latest})", (_MOST,))
        for key, session_id, tenant in db.execute("SELECT key, session_id, tenant FROM notes"):
            self._list(Noted(key, _as_text(tenant), _as_text(session_id)))

    def _list(self, noted: Noted) -> None:
        self._noted[noted.key] = noted
        self._by_name.setdefault(noted.session_id, set()).add(noted.key)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Where what is done in the block fails there is no log for a while."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            _LOG.warning("open sessions are not noted now, and after a crash go on from SSD alone: %s", error)
            self.close()
            self._next_try_s = time.monotonic() + _PAUSE_S
            with contextlib.suppress(OSError):
                self._delete()

    def _delete(self) -> None:
        for ending in ("-wal", "-shm", ""):
            self._path.with_name(f"{LOG_NAME}{ending}").unlink(missing_ok=True)


def this_boot() -> str:
    """Names the run of the system that this process is of; empty where the system does not say."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _connect(path: Path) -> sqlite3.Connection:
    """Autocommit, write-ahead log, nothing synced: a commit is in the system's memory. One thread at a time, any."""
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1.0)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = OFF")
    except BaseException:
        db.close()
        raise
    return db


def _as_blob(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")  # Names may be any text; sqlite's must be sound UTF-8.


def _as_text(name: bytes) -> str:
    return name.decode("utf-8", "surrogatepass")
