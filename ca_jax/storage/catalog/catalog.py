"""The catalog: which sessions are on SSD, in which blocks, with which tokens. The truth about SSD after a restart.

What it says is durable when the call returns, and a process killed at any moment leaves all of a change or none of it.
Publish only what is durable itself, and reuse blocks only once `forget` or `cut` has returned.

    with Catalog(directory, Namespace(weights=fingerprint, layout=layout)) as catalog:
        catalog.publish(record, token_ids, seals)
        with catalog.batch():  # One sync to disk for all of them.
            catalog.forget(keys)
            catalog.publish(other, other_token_ids, other_seals)

All calls block. They belong to one thread at a time, which may be another than the one that opened the catalog.

Not here: blocks' bytes, free lists, decisions; queries (reader), the file and its failures (file).
"""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ca_jax.storage.catalog import file as catalog_file
from ca_jax.storage.catalog.reader import CatalogReader
from ca_jax.storage.catalog.records import (
    SESSION_COLUMNS,
    Contents,
    DamagedRecordError,
    Namespace,
    SessionRecord,
    session_from_row,
    session_to_row,
)
from ca_jax.storage.records import check_ttl
from ca_jax.storage.tokens import Lineage

_SESSION_MARKS = ", ".join("?" for _ in SESSION_COLUMNS.split(","))


class Catalog(CatalogReader):
    """Reads and changes the sessions of one namespace. One engine at a time has it, whatever its namespace.

    Args:
      directory: the store's; made (mode 0700) if it is not there.
      namespace: whose sessions. Those of other namespaces are left as they are.

    Raises:
      CatalogLockedError: another engine uses the directory.
      CatalogCorruptError: the file is no catalog; `catalog_file.quarantine` moves it aside.
      CatalogVersionError: the file is a catalog of another version.
      CatalogFullError: no space on the disk. Of any change too: nothing is changed then.
      CatalogAccessError: the directory is a file, or is not to be written to. Of any change too.
    """

    def __init__(self, directory: str | Path, namespace: Namespace):
        self._depth = 0  # Of open transactions: a change within a batch is a part of it.
        self._failed = False  # Whether a change within the open batch failed.
        self._lock: catalog_file.DirectoryLock | None = catalog_file.DirectoryLock(Path(directory))
        try:
            super().__init__(directory, namespace)
            self._namespace_id = self._register()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Catalog:
        return self

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Makes the changes of a `with` block one: durable together at its end, or, if any failed, none of them.

        Raises:
          CatalogError: a change within it failed, even if that was caught.
        """
        with self._transaction():
            yield

    def publish(
        self, record: SessionRecord, token_ids: npt.ArrayLike, seals: np.ndarray, note: bytes = b""
    ) -> SessionRecord:
        """Says that a session is stored, or is stored differently. Durable.

        Args:
          record: the session; `generation` is counted here, and `created_s` stays what it was first.
          token_ids: `[num_tokens]`, the tokens whose KV is stored.
          seals: uint64 `[num_blocks, L]`.
          note: what the session's owner wants kept with it.

        Returns:
          The record as it is stored now.

        Raises:
          ValueError: the parts do not fit each other.
        """
        layout = self._namespace.layout
        record.check(layout)
        tokens = np.asarray(token_ids, np.int32)
        if tokens.shape != (record.num_tokens,):
            raise ValueError(f"token_ids must be [{record.num_tokens}], got {list(tokens.shape)}")
        if seals.shape != (record.num_blocks, layout.num_layers) or seals.dtype != np.uint64:
            raise ValueError(
                f"seals must be uint64[{record.num_blocks}, {layout.num_layers}], got {seals.dtype}{list(seals.shape)}"
            )
        with self._transaction():
            return self._write(record, Contents(token_ids=tokens, seals=seals, note=note))

    def cut(
        self, key: str, kept: np.ndarray, lineage: Lineage | None = None, note: bytes | None = None
    ) -> SessionRecord | None:
        """Says that only some of a session's tokens are left, and of its blocks those that have any. Durable.

        Args:
          key: the session.
          kept: bool `[num_tokens]`, which of the stored tokens stay.
          lineage: what has been dropped from the session then; None for what was.
          note: what is kept with the session from now on; None keeps what is.

        Returns:
          The record as it is stored now; None if the session is not stored (any more): it was not, or no token stays,
          or what the catalog says about it is damaged.

        Raises:
          ValueError: `kept` is of another number of tokens than are stored.
        """
        with self._transaction():
            found = self._load_sound(key)
            if found is None or not kept.any():
                self.forget([key])
                return None
            record, contents = found
            copy, blocks = record.copy.keep(
                kept, record.lineage if lineage is None else lineage, self._namespace.layout.block_tokens
            )
            record = dataclasses.replace(
                record, num_tokens=copy.num_tokens, block_ids=copy.block_ids, cuts=copy.cuts, prefixes=copy.prefixes
            )
            record.check(self._namespace.layout)
            contents = dataclasses.replace(
                contents,
                token_ids=contents.token_ids[kept],
                seals=contents.seals[blocks],
                note=contents.note if note is None else note,
            )
            return self._write(record, contents)

    def set_note(self, key: str, note: bytes) -> bool:
        """Says what is kept with a session. Durable. Returns whether it is stored; not if what is said is damaged."""
        with self._transaction():
            found = self._load_sound(key)
            if found is None:
                self.forget([key])
                return False
            self._write(found[0], dataclasses.replace(found[1], note=note))
            return True

    def add_prefixes(self, record: SessionRecord) -> SessionRecord:
        """Writes down what a session is found by that lacks it, as version 2 left it; not if its tokens cannot be read.

        Returns:
          The record as it is stored now.
        """
        try:
            contents = self.contents(record.key)
        except (DamagedRecordError, catalog_file.CatalogCorruptError):
            contents = None
        if contents is None:
            return record
        record = dataclasses.replace(record, prefixes=record.prefixes_of(contents.token_ids, self._namespace.layout))
        with self._transaction():
            self._all(
                f"UPDATE sessions SET ({SESSION_COLUMNS}) = ({_SESSION_MARKS}) WHERE namespace = ? AND key = ?",
                *session_to_row(record),
                self._namespace_id,
                record.key,
            )
        return record

    def forget(self, keys: Iterable[str]) -> int:
        """Says that sessions are not stored any more. Durable: their blocks may be reused when it returns.

        Returns:
          How many of them were stored.
        """
        num_forgotten = 0
        with self._transaction():
            for key in keys:
                row = self._one(
                    "DELETE FROM sessions WHERE namespace = ? AND key = ? RETURNING id", self._namespace_id, key
                )
                if row:
                    self._replace_contents(row[0], None)
                    num_forgotten += 1
        return num_forgotten

    def forget_damaged(self) -> int:
        """Says that sessions whose rows are damaged are not stored any more, and makes the index of the rows anew.

        A session that could not be found, since the index was damaged, can be afterwards. If it was published once more
        meanwhile, the last row counts. Durable. Takes as long as `load_all`, and as long again if something is damaged.

        Returns:
          How many rows were dropped.
        """
        dropped: list[int] = []
        rows: dict[str, int] = {}
        with self._transaction():
            for session, *row in self._all(
                f"SELECT id, {SESSION_COLUMNS} FROM sessions NOT INDEXED WHERE namespace = ? ORDER BY id",
                self._namespace_id,
            ):
                try:
                    key = session_from_row(tuple(row)).key
                except DamagedRecordError:
                    dropped.append(session)
                    continue
                if key in rows:
                    dropped.append(rows[key])
                rows[key] = session
            self._all("DROP INDEX sessions_by_key")  # With it no row could be dropped that it has under another key.
            for session in dropped:
                self._all("DELETE FROM sessions WHERE id = ?", session)
                self._replace_contents(session, None)
            self._all(catalog_file.SESSION_INDEX)
        return len(dropped)

    def touch_used(self, times_s: Mapping[str, float]) -> None:
        """Writes down when sessions were last used, seconds since the epoch. Not durable: a power cut may undo it."""
        if not self._depth:
            self._all("PRAGMA synchronous = NORMAL")
        try:
            with self._transaction():
                self._many(
                    "UPDATE sessions SET last_used_s = ? WHERE namespace = ? AND key = ?",
                    [(used_s, self._namespace_id, key) for key, used_s in times_s.items()],
                )
        finally:
            if not self._depth:
                self._all("PRAGMA synchronous = FULL")

    def set_pinned(self, key: str, pinned: bool) -> bool:
        """Says whether a session is never evicted. Durable. Returns whether it is stored."""
        return self._set(key, "pinned", int(pinned))

    def set_ttl(self, key: str, ttl_s: float | None) -> bool:
        """Says how long a session lives after its last use; None for ever. Durable. Returns whether it is stored.

        Raises:
          ValueError: ttl_s is negative or not finite.
        """
        check_ttl(ttl_s)
        return self._set(key, "ttl_s", ttl_s)

    def drop_namespace(self, namespace: Namespace) -> int:
        """Forgets another namespace and all its sessions. Its blocks are the caller's to delete, afterwards. Durable.

        Returns:
          How many sessions it had.

        Raises:
          ValueError: it is this catalog's own.
        """
        if namespace == self._namespace:
            raise ValueError("there must be a namespace other than the one in use, got that one")
        row = self._one("SELECT id FROM namespaces WHERE fingerprint = ?", namespace.fingerprint)
        if row is None:
            return 0
        with self._transaction():
            sessions = self._all("DELETE FROM sessions WHERE namespace = ? RETURNING id", row[0])
            for (session,) in sessions:
                self._replace_contents(session, None)
            self._all("DELETE FROM namespaces WHERE id = ?", row[0])
        return len(sessions)

    def compact(self) -> None:
        """Gives the space of what was forgotten back to the disk. Needs as much again while it runs; seconds a GB."""
        with self._transaction():
            self._all("DELETE FROM contents WHERE session NOT IN (SELECT id FROM sessions)")
        self._all("VACUUM")
        self._all("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Closes the file and lets another engine have the directory. May be called again."""
        if self._lock is not None:
            if hasattr(self, "_db"):
                self._db.close()
            self._lock.release()
            self._lock = None

    # How.

    def _open(self) -> sqlite3.Connection:
        return catalog_file.open_for_writing(self._directory)

    def _register(self) -> int:
        """The namespace's row, made if it is new."""
        if self._namespace_id < 0:
            with self._transaction():
                self._namespace_id = self._one(
                    "INSERT INTO namespaces (fingerprint, description, created_s) VALUES (?, ?, ?) RETURNING id",
                    self._namespace.fingerprint,
                    self._namespace.to_json(),
                    time.time(),
                )[0]
        return self._namespace_id

    def _load_sound(self, key: str) -> tuple[SessionRecord, Contents] | None:
        try:
            return self.load(key)
        except DamagedRecordError:
            return None

    def _write(self, record: SessionRecord, contents: Contents) -> SessionRecord:
        known = self._one(
            "SELECT id, generation, created_s FROM sessions WHERE namespace = ? AND key = ?",
            self._namespace_id,
            record.key,
        )
        if known:
            session, generation, created_s = known
            record = dataclasses.replace(record, generation=generation + 1, created_s=created_s)
            self._all(
                f"UPDATE sessions SET ({SESSION_COLUMNS}) = ({_SESSION_MARKS}) WHERE id = ?",
                *session_to_row(record),
                session,
            )
        else:
            record = dataclasses.replace(record, generation=1)
            (session,) = self._one(
                f"INSERT INTO sessions (namespace, {SESSION_COLUMNS}) VALUES (?, {_SESSION_MARKS}) RETURNING id",
                self._namespace_id,
                *session_to_row(record),
            )
        self._replace_contents(session, contents, record.key)
        return record

    def _replace_contents(self, session: int, contents: Contents | None, key: str = "") -> None:
        """Writes a session's contents, or forgets them."""
        if contents:
            self._all("INSERT OR REPLACE INTO contents VALUES (?, ?, ?, ?, ?, ?)", session, *contents.to_row(key))
        else:
            self._all("DELETE FROM contents WHERE session = ?", session)

    def _set(self, key: str, column: str, value: Any) -> bool:
        with self._transaction():
            return bool(
                self._all(
                    f"UPDATE sessions SET {column} = ? WHERE namespace = ? AND key = ? RETURNING id",
                    value,
                    self._namespace_id,
                    key,
                )
            )

    def _many(self, sql: str, rows: list[tuple[Any, ...]]) -> None:
        with catalog_file.translated(self._path):
            self._db.executemany(sql, rows)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        if self._depth:
            if self._failed:
                raise catalog_file.CatalogError(
                    "there must be a batch whose changes all succeed, got one that failed before"
                )
            try:
                yield
            except BaseException:
                self._failed = True
                raise
            return
        self._all("BEGIN IMMEDIATE")
        self._depth, self._failed = 1, False
        try:
            yield
            if self._failed:
                raise catalog_file.CatalogError("there must be a batch whose changes all succeed, got one that failed")
            self._all("COMMIT")
        finally:
            self._depth = 0
            if self._db.in_transaction:  # Not after a full disk: sqlite has rolled back by itself then.
                self._all("ROLLBACK")
