"""The catalog's file: opening it, keeping others out, what can go wrong with it, moving it aside.

One engine at a time may write: it holds an advisory lock on `catalog.lock` for as long as it lives, which the system
takes back from a process that dies. Readers need no lock.

Not here: what the tables hold (records).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ca_jax.errors import CaJaxError

CATALOG_NAME = "catalog.sqlite3"
"""The file's name in the store's directory."""
LOCK_NAME = "catalog.lock"
"""The lock's name beside it."""
SCHEMA_VERSION = 4
"""Of the tables and of the blocks that they tell of. Catalogs of other versions are neither read nor changed."""
_ASIDE = ".corrupt-"  # In the name of a catalog that was moved aside.
_APPLICATION_ID = 0x63614A58  # "caJX"

SESSION_INDEX = "CREATE UNIQUE INDEX sessions_by_key ON sessions (namespace, key)"
"""How sessions are found; a statement of its own, so that a damaged index can be made anew."""

_SCHEMA = f"""
CREATE TABLE namespaces (
  id INTEGER PRIMARY KEY,
  fingerprint TEXT NOT NULL UNIQUE,
  description TEXT NOT NULL,
  created_s REAL NOT NULL
);
-- What start-up reads: small rows.
CREATE TABLE sessions (
  id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used again: what a damaged row left behind is never another's
  namespace INTEGER NOT NULL REFERENCES namespaces (id),
  key TEXT NOT NULL,
  tenant TEXT NOT NULL,
  session_id TEXT NOT NULL,
  num_dropped INTEGER NOT NULL,
  num_plain INTEGER,  -- leading tokens that have seen none of those; null for all
  generation INTEGER NOT NULL,
  block_ids BLOB NOT NULL,  -- int64
  runs BLOB NOT NULL,  -- where the tokens lie in the blocks: uint32 pairs (place, tokens)
  prefix_hashes BLOB NOT NULL,  -- what others find it by: of each full block
  num_tokens INTEGER NOT NULL,
  created_s REAL NOT NULL,
  last_used_s REAL NOT NULL,
  pinned INTEGER NOT NULL,
  ttl_s REAL,
  checksum INTEGER NOT NULL  -- of the columns from key to prefix_hashes
);
{SESSION_INDEX};
-- What a load reads: large rows, by session.
CREATE TABLE contents (
  session INTEGER PRIMARY KEY,
  token_ids BLOB NOT NULL,  -- int32
  sums BLOB NOT NULL,  -- uint32 [num_blocks, L]: crc32c of each layer of each block
  note BLOB NOT NULL,  -- its owner's
  checksum INTEGER NOT NULL
);
"""


class CatalogError(CaJaxError):
    """Base of what can go wrong with a catalog."""


class CatalogLockedError(CatalogError):
    """Another engine uses the directory; the message says which."""


class CatalogCorruptError(CatalogError):
    """The file is no catalog (any more). `quarantine` moves it aside, and the store starts empty."""


class CatalogVersionError(CatalogError):
    """The file is a catalog of another version. It was left as it was."""


class CatalogFullError(CatalogError):
    """No space left on the disk. Nothing was changed."""


class CatalogAccessError(CatalogError):
    """The directory or a file in it cannot be made, read or written. Nothing was changed."""


class CatalogLateError(CatalogError):
    """The catalog did not answer in time: what it says is not known now."""


def lock_directory(directory: Path) -> BinaryIO:
    """Takes the right to write in a store's directory, which one engine at a time holds, until the file is closed.

    The directory is made (mode 0700) if it is not there. The file stays: removing it would let two engines lock two
    files of one name.

    Raises:
      CatalogLockedError: an engine holds it, in this process or another.
      CatalogAccessError: the directory is a file, or cannot be made or written to.
    """
    try:
        make_directory(directory)
        file = os.fdopen(os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b", 0)
    except OSError as error:
        raise CatalogAccessError(f"the store must have a directory to write in, got {directory}: {error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T %z")}
        file.truncate(0)
        file.write(json.dumps(owner).encode())
    except OSError as error:
        holder = "another process"
        with contextlib.suppress(ValueError, KeyError, TypeError):  # Read while it was being written.
            owner = json.loads(os.pread(file.fileno(), 1024, 0))
            holder = f"process {owner['pid']} on {owner['host']} since {owner['since']}"
        file.close()
        if not isinstance(error, BlockingIOError):
            raise CatalogAccessError(f"{directory / LOCK_NAME} must be locked, got: {error}") from error
        raise CatalogLockedError(
            f"{directory} must be this engine's alone, got it in use by {holder}; "
            "stop that one, or give this one a directory of its own"
        ) from error
    return file


def open_for_writing(directory: Path) -> sqlite3.Connection:
    """Opens the catalog of a directory, making it where there is none. The caller holds the directory's lock.

    Commits are durable when they return: write-ahead log, synced at every commit.

    Raises:
      CatalogError: one of its kinds.
    """
    path = directory / CATALOG_NAME
    with translated(path), opened(path, creates=True) as db:
        is_new = _check_header(db, path)
        (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise CatalogAccessError(
                f"the catalog must have a write-ahead log, got journal mode {mode!r}: {path}; its file system "
                "cannot share memory between processes: name an ssd_dir on a local disk"
            )
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA journal_size_limit = 67108864")
        if is_new:
            versions = f"PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION};"
            db.executescript(f"BEGIN; {_SCHEMA} {versions} COMMIT;")
            sync_directory(directory)
    return db


def open_for_reading(directory: Path) -> sqlite3.Connection:
    """Opens the catalog of a directory to read, beside an engine that writes or after one that died.

    Raises:
      CatalogError: one of its kinds; `CatalogAccessError` where there is none.
    """
    path = directory / CATALOG_NAME
    if not path.is_file():
        raise CatalogAccessError(f"the directory must hold a catalog, got no file {path}")
    # Where nothing may be written, not even the index of a log, a file without a log is read as it stands.
    for mode in ("mode=ro", "mode=ro&immutable=1"):
        try:
            with translated(path), opened(path, mode) as db:
                if _check_header(db, path):
                    raise CatalogAccessError(f"the file must be a catalog, got {path}, which is empty")
            return db
        except CatalogAccessError as error:
            failure = error
            if path.with_name(f"{CATALOG_NAME}-wal").exists():
                break
    raise failure


def quarantine(directory: Path) -> Path | None:
    """Moves a catalog that cannot be read out of the way, so that the store can start empty.

    Returns:
      Where the file is now; None if there was none.

    Raises:
      CatalogLockedError: an engine uses the directory.
      CatalogAccessError: it cannot be renamed.
    """
    suffix = f"{_ASIDE}{time.strftime('%Y%m%dT%H%M%S')}-{time.time_ns() % 1_000_000_000:09d}"
    moved = None
    with lock_directory(directory), translated(directory / CATALOG_NAME):
        # The log goes first: a catalog without its log is only old, a log without its catalog is another one's.
        for ending in ("-wal", "-shm", ""):
            path = directory / f"{CATALOG_NAME}{ending}"
            if path.exists():
                moved = path.rename(path.with_name(f"{CATALOG_NAME}{suffix}{ending}"))
        sync_directory(directory)
    return moved


def set_aside(directory: Path) -> list[Path]:
    """Catalogs that `quarantine` has moved, oldest first; their logs among them."""
    return sorted(directory.glob(f"{CATALOG_NAME}{_ASIDE}*"))


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turns sqlite's errors, and the system's, into those of this module."""
    try:
        yield
    except UnicodeDecodeError as error:  # sqlite's message quotes a name that is damaged.
        raise CatalogCorruptError(f"the file must be a catalog, got {path}: {error}") from error
    except OSError as error:
        raise CatalogAccessError(f"the catalog must be readable and writable, got {path}: {error}") from error
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_MISUSE) & 0xFF  # None: Python's own, of a wrong call.
        found = f"{path}: {error} ({getattr(error, 'sqlite_errorname', 'no code')})"
        if code == sqlite3.SQLITE_FULL:
            raise CatalogFullError(f"the disk must have room for the catalog, got {found}") from error
        # A damaged header has no code of its own: what it says of the file is no version that there is. A damaged row
        # may say that it is longer than sqlite takes.
        is_damage = code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_TOOBIG)
        if is_damage or str(error) == "unsupported file format":
            raise CatalogCorruptError(f"the file must be a catalog, got {found}") from error
        if code in (sqlite3.SQLITE_MISUSE, sqlite3.SQLITE_ERROR):
            raise
        raise CatalogAccessError(f"the catalog must be readable and writable, got {found}") from error


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commits all changes of a `with` block at its end, or none of them where it raises."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    finally:
        if db.in_transaction:  # Not after a full disk: sqlite has rolled back by itself then.
            db.execute("ROLLBACK")


@contextlib.contextmanager
def opened(path: Path, mode: str = "mode=rw", *, creates: bool = False) -> Iterator[sqlite3.Connection]:
    """A file of sqlite in autocommit mode, which stays open unless the `with` block raises.

    Any thread may use it, one at a time.

    Args:
      path: of the file.
      mode: sqlite's parameters of a URI.
      creates: makes an empty file (mode 0600) where there is none.
    """
    if creates:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    uri = f"{path.absolute().as_uri()}?{mode}"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    # A damaged text is for its row's checksum to find; it must not keep other rows from being read.
    db.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
    try:
        yield db
    except BaseException:
        db.close()
        raise


def _check_header(db: sqlite3.Connection, path: Path) -> bool:
    """Whether the file is empty; raises if it is neither that nor a catalog of this version."""
    schema = _schema_of(db)
    (application_id,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if not schema and not application_id and not version:
        return True
    if application_id != _APPLICATION_ID:
        raise CatalogCorruptError(f"the file must be a catalog, got another application's database: {path}")
    if version != SCHEMA_VERSION:
        raise CatalogVersionError(
            f"the catalog must be of version {SCHEMA_VERSION}, got version {version}: {path}; go on with the release "
            "that wrote it, or name another ssd_dir, which begins empty"
        )
    with contextlib.closing(sqlite3.connect(":memory:")) as wanted:
        wanted.executescript(_SCHEMA)
        if schema != _schema_of(wanted):
            raise CatalogCorruptError(
                f"the catalog must have the tables of version {SCHEMA_VERSION}, got {sorted(schema)}: {path}"
            )
    return False


def _schema_of(db: sqlite3.Connection) -> dict[str, str]:
    """How each table and index was made, without comments and space; nothing for those that sqlite made itself."""
    rows = db.execute("SELECT name, sql FROM sqlite_master")
    return {name: re.sub(r"--.*|\s", "", sql or "") for name, sql in rows}


def make_directory(directory: Path) -> None:
    """Makes a directory (0700) and its parents, if they are not there; the names of new ones are durable.

    Raises:
      OSError: one of them cannot be made; FileExistsError or NotADirectoryError where one is a file.
    """
    if directory.is_dir():
        return
    if directory.parent != directory:
        make_directory(directory.parent)
    directory.mkdir(mode=0o700, exist_ok=True)
    sync_directory(directory.parent)


def write_file(path: Path, text: str) -> None:
    """Writes a small file durably: all of it is there under its name, or nothing."""
    temporary = path.with_name(f"{path.name}.new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Makes the names of what was made, moved or removed in a directory durable, which a file's own sync does not."""
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
