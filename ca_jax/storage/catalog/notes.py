"""What the owners of open sessions want kept with them, in a file that outlives the process at once.

The SSD tier writes a session's note together with its KV, some time after the turn. A client that got an answer
before that would know more than a store whose process was killed. So the note alone is written here first, into the
system's memory and no further: as fast as a copy, and safe from the end of the process. It is not safe from the end of
the system: of what another boot has written nothing is believed, and the SSD tier's notes stand.

A note is written in parts: what comes behind it is a row of its own. The file has a cap, and gives back what is free
in it; what is removed is overwritten with zeros.

Belongs to the bookkeeping thread.

Not here: which of two notes is the newer one, and which may go where there is no room (their owner knows), notes on SSD
(catalog).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ca_jax.storage.catalog.file import CatalogVersionError, opened, transaction
from ca_jax.storage.records import Owner, split_domain

_LOG = logging.getLogger(__name__)
LOG_NAME = "notes.sqlite"
_FORMAT = 2
_LEAST_BYTES = 16 << 20  # Of the cap: what a few conversations of the longest context windows need.
_SHARE = 64  # Of the SSD tier's cap, one part is the log's.
_PAGE_BYTES = 4096
_ROW_BYTES = 512  # What a row takes beside its part, at most but for names that are longer than that.
_FREE_PAGES = 256  # More than so many pages are given back to the disk,
_GIVEN_BACK = 64  # so many at a time.
_PAUSE_S = 30.0  # After a failure, before the log begins anew.
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TABLES = """
CREATE TABLE boot (id TEXT NOT NULL);
CREATE TABLE parts (
  id INTEGER PRIMARY KEY,  -- in the order of writing; the rows of a key are its note, one behind the other
  key TEXT NOT NULL,
  session_id BLOB NOT NULL,
  tenant BLOB NOT NULL,
  note BLOB NOT NULL,
  ttl_s REAL,  -- of the last row of a key; NULL: while there is room for it
  written_s REAL NOT NULL
);
CREATE INDEX parts_by_key ON parts (key);
"""


@dataclasses.dataclass(frozen=True)
class Noted:
    """Whose note is in the log."""

    key: str
    tenant: str
    session_id: str
    variant: str = ""
    """As `Owner.variant`; in the table it is part of the tenant's name."""


class NoteLog:
    """Notes by the key of their session. One process at a time, the one that holds the directory's lock.

    Args:
      directory: the store's.
      max_bytes: cap of the file, but for sqlite's log beside it, a few MiB.
      clock: seconds since the epoch.
      boot: names what the system's memory lives as long as; empty where that is not known, and then nothing that was
        written before is believed.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int = _LEAST_BYTES,
        clock: Callable[[], float] = time.time,
        boot: str | None = None,
    ) -> None:
        self._path = directory / LOG_NAME
        self._max_bytes = max_bytes
        self._clock = clock
        self._boot = this_boot() if boot is None else boot
        self._noted: dict[str, Noted] = {}  # Those written last come last.
        self._by_name: dict[str, set[str]] = {}
        self._db: sqlite3.Connection | None = None
        self._next_try_s = 0.0
        with self._guarded():
            if self._is_sound():
                self._db = _connect(self._path)
                self._forget_old()
            else:
                self._begin_anew()

    @property
    def used_bytes(self) -> int:
        """What the notes take of the file."""
        return (self._pragma("page_count") - self._pragma("freelist_count")) * _PAGE_BYTES

    def lacks(self, num_bytes: int) -> int:
        """How many bytes too few are free for that many more of a note; not above 0: it has room."""
        return self.used_bytes + num_bytes + _ROW_BYTES - self._max_bytes

    def __contains__(self, key: str) -> bool:
        """Whether there is a note of a session."""
        return key in self._noted

    def list(self) -> tuple[Noted, ...]:
        """Whose notes there are, those written last at the end."""
        return tuple(self._noted.values())

    def of_name(self, session_id: str) -> tuple[Noted, ...]:
        """Those of sessions that their owners, of whatever tenant, know by a name."""
        return tuple(self._noted[key] for key in sorted(self._by_name.get(session_id, ())))

    def put(self, key: str, owner: Owner, note: bytes, *, behind: bool = False) -> bool:
        """Writes a session's note, in place of the one there is. It stands once this returns.

        Args:
          key: of the session.
          owner: whose it is.
          note: what to keep.
          behind: whether `note` comes behind the one there is, which stays.

        Returns:
          Whether it is written. If not, what there was is as it was, unless the file is damaged: then all is gone.
        """
        with self._guarded():
            if self._db is None and time.monotonic() >= self._next_try_s:
                self._begin_anew()
            if self._db is not None:
                row = (key, _as_blob(owner.session_id), _as_blob(owner.domain), note, owner.ttl_s, self._clock())
                try:
                    with transaction(self._db):
                        if not behind:
                            self._db.execute("DELETE FROM parts WHERE key = ?", (key,))
                        self._db.execute("INSERT INTO parts VALUES (NULL, ?, ?, ?, ?, ?, ?)", row)
                except sqlite3.OperationalError as error:  # A full disk, say: the others stay.
                    _LOG.warning("an open session is not noted now: %s", error)
                    return False
                self._unlist(key)
                self._list(Noted(key, owner.tenant, owner.session_id, owner.variant))
                self._give_back()
        return key in self._noted

    def get(self, key: str) -> bytes | None:
        """The note of a session; None where there is none, or its time is over."""
        if key not in self._noted:
            return None
        parts = self._all("SELECT note, written_s + ttl_s FROM parts WHERE key = ? ORDER BY id", key)
        if parts and (parts[-1][1] is None or parts[-1][1] >= self._clock()):
            return b"".join(part for part, _ in parts)
        self.remove(key)
        return None

    def set_ttl(self, key: str, ttl_s: float | None) -> None:
        """Says how long a session's note counts, seconds since it was written."""
        self._all("UPDATE parts SET ttl_s = ? WHERE key = ?", ttl_s, key)

    def remove(self, key: str) -> None:
        """Forgets a session's note, if there is one."""
        if self._unlist(key):
            self._all("DELETE FROM parts WHERE key = ?", key)
            self._give_back()

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
                        f"notes of open sessions must be of version {_FORMAT}, got version {version}: {self._path}; "
                        "end the release that wrote them, so that they get to SSD, or delete the file"
                    )
                return bool(db.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
        except sqlite3.Error as error:
            _LOG.warning("what was noted of open sessions cannot be read: %s: %s", self._path, error)
            return False

    def _begin_anew(self) -> None:
        self._delete()
        self._db = _connect(self._path)
        self._db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {_FORMAT}; COMMIT;")
        self._db.execute("INSERT INTO boot VALUES (?)", (self._boot,))

    def _forget_old(self) -> None:
        """Forgets the notes whose time is over, and takes in whose the others are."""
        last = "SELECT key, session_id, tenant, max(id), written_s + ttl_s FROM parts GROUP BY key ORDER BY max(id)"
        for key, session_id, domain, _, until_s in self._all(last):
            tenant, variant = split_domain(_as_text(domain))
            self._list(Noted(key, tenant, _as_text(session_id), variant))
            if until_s is not None and until_s < self._clock():
                self.remove(key)
        self._give_back(above_pages=0, num_pages=0)

    def _give_back(self, above_pages: int = _FREE_PAGES, num_pages: int = _GIVEN_BACK) -> None:
        """Gives so much of what is free in the file back to the disk, where that is more; 0: all of it."""
        with self._guarded():
            if self._db is not None and self._pragma("freelist_count") > above_pages:
                self._db.executescript(f"PRAGMA incremental_vacuum({num_pages})")  # `execute` would end after a page.

    def _all(self, sql: str, *values: Any) -> Sequence[Any]:
        """All rows of a statement; none where there is no log, or it breaks."""
        with self._guarded():
            if self._db is not None:
                return self._db.execute(sql, values).fetchall()
        return []

    def _pragma(self, name: str) -> int:
        rows = self._all(f"PRAGMA {name}")
        return int(rows[0][0]) if rows else 0

    def _list(self, noted: Noted) -> None:
        self._noted[noted.key] = noted
        self._by_name.setdefault(noted.session_id, set()).add(noted.key)

    def _unlist(self, key: str) -> bool:
        noted = self._noted.pop(key, None)
        if noted is None:
            return False
        self._by_name[noted.session_id].discard(key)
        if not self._by_name[noted.session_id]:
            del self._by_name[noted.session_id]
        return True

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


def log_bytes(ssd_bytes: int) -> int:
    """The log's cap beside an SSD tier's."""
    return max(_LEAST_BYTES, ssd_bytes // _SHARE)


def this_boot() -> str:
    """Names the run of the system that this process is of; empty where the system does not say."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _connect(path: Path) -> sqlite3.Connection:
    """Autocommit, write-ahead log, nothing synced: a commit is in the system's memory."""
    with opened(path, creates=True) as db:
        db.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # Before anything else: it is fixed with the first table.
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA secure_delete = ON")
        db.execute("PRAGMA synchronous = OFF")
    return db


def _as_blob(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")  # Names may be any text; sqlite's must be sound UTF-8.


def _as_text(name: bytes) -> str:
    return name.decode("utf-8", "surrogatepass")
