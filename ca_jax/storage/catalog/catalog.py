"""The catalog: which sessions are on SSD, in which blocks, with which tokens. The truth about SSD after a restart.

What it says is durable when the call returns, and a process killed at any moment leaves all of a change or none of it.
Publish only what is durable itself, and reuse blocks only once `forget` or `cut` has returned.

    with Catalog(directory, Namespace(weights=fingerprint, layout=layout)) as catalog:
        catalog.publish(record, token_ids, sums)
        with catalog.batch():  # One sync to disk for all of them.
            catalog.forget(keys)
            catalog.publish(other, other_token_ids, other_sums)

All calls block. They belong to one thread at a time, which may be another than the one that opened the catalog.

Not here: blocks' bytes, free lists, decisions; how records lie in the tables (records), the file and its failures
(file).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ca_jax.storage.catalog import file as catalog_file
from ca_jax.storage.catalog.records import (
    CONTENTS_COLUMNS,
    SESSION_COLUMNS,
    Contents,
    DamagedRecordError,
    Namespace,
    Problem,
    SessionRecord,
    session_from_row,
    session_to_row,
)
from ca_jax.storage.tokens import Lineage, prefix_hashes

_SESSION_MARKS = ", ".join("?" for _ in SESSION_COLUMNS.split(","))
_ID_OF = "SELECT id FROM sessions WHERE namespace = ? AND key = ?"
_QUALIFIED_COLUMNS = ", ".join(f"sessions.{column}" for column in SESSION_COLUMNS.split(", "))
_LOAD = (
    f"SELECT {_QUALIFIED_COLUMNS}, {CONTENTS_COLUMNS} FROM sessions LEFT JOIN contents ON session = id "
    "WHERE namespace = ? AND key = ?"
)
_ALL_SESSIONS = f"SELECT id, {SESSION_COLUMNS} FROM sessions NOT INDEXED WHERE namespace = ? ORDER BY id"


class CatalogReader:
    """Reads the sessions of one namespace, beside an engine that writes or after one that died.

    Raises:
      CatalogError: the catalog cannot be opened; the kind says why. Every call may raise those that its kind names.
    """

    _connect = staticmethod(catalog_file.open_for_reading)

    def __init__(self, directory: str | Path, namespace: Namespace):
        self.directory = Path(directory)
        self.namespace = namespace
        self.block_directory = self.directory / namespace.directory_name
        """Where the namespace's blocks belong."""
        self._path = self.directory / catalog_file.CATALOG_NAME
        self._db = self._connect(self.directory)
        with catalog_file.translated(self._path):
            self._opened = os.stat(self._path)
        row = self._one("SELECT id FROM namespaces WHERE fingerprint = ?", namespace.fingerprint)
        self._namespace_id: int = row[0] if row else -1  # -1: nothing was ever stored in it.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def load_all(self, on_damaged: Callable[[str, str], None]) -> Iterator[SessionRecord]:
        """Every session of the namespace, in the order of first publication. Reads none of their contents.

        Args:
          on_damaged: called with key and reason for each row that is skipped since it is damaged. The key may be what
            is damaged; `Catalog.forget` takes it as it is.
        """
        for _, *row in self._all(_ALL_SESSIONS, self._namespace_id):
            try:
                record = session_from_row(row)
            except DamagedRecordError as error:
                on_damaged(row[0], str(error))
            else:
                yield record

    def load(self, key: str) -> tuple[SessionRecord, Contents] | None:
        """One session and what a load of it needs, of the same state; None if it is not stored.

        Raises:
          DamagedRecordError: one of them is damaged.
        """
        row = self._one(_LOAD, self._namespace_id, key)
        if row is None:
            return None
        record = session_from_row(row[:-4])
        return record, Contents.from_row(record, row[-4:], self.namespace.layout.num_layers)

    def contents(self, key: str) -> Contents | None:
        """What a load of one session needs, and its owner's note. Otherwise as `load`."""
        found = self.load(key)
        return None if found is None else found[1]

    def has_sessions(self) -> bool:
        """Whether the namespace has any session, sound or damaged."""
        return self._one("SELECT 1 FROM sessions WHERE namespace = ? LIMIT 1", self._namespace_id) is not None

    def integrity_check(self) -> tuple[Problem, ...]:
        """Reads the whole file and all that is said in this namespace: seconds where much is stored.

        Raises:
          CatalogCorruptError: too damaged to be read to the end.
        """
        found = [Problem(None, text) for (text,) in self._all("PRAGMA integrity_check") if text != "ok"]
        (num_orphans,) = self._one("SELECT count(*) FROM contents WHERE session NOT IN (SELECT id FROM sessions)")
        if num_orphans:
            text = f"contents must be of stored sessions, got {num_orphans} of others; `compact` removes them"
            found.append(Problem(None, text))
        holders: dict[int, tuple[SessionRecord, bytes]] = {}  # By block: its first holder, and what that says of it.
        for record in self.load_all(lambda key, reason: found.append(Problem(key, reason))):
            try:
                record.check(self.namespace.layout)
                contents = self.contents(record.key)
            except (DamagedRecordError, ValueError) as error:
                found.append(Problem(record.key, str(error)))
                continue
            if contents is None:
                continue  # Gone since its row was read: an engine is at work.
            plain_ids = contents.token_ids[: record.lineage.plain_tokens(record.num_tokens)]
            if record.prefixes not in (b"", prefix_hashes(plain_ids, self.namespace.layout.block_tokens)):
                found.append(Problem(record.key, "the prefix hashes must be those of its tokens, got others"))
            for block, row in zip(record.block_ids.tolist(), contents.sums, strict=False):
                holder, sums = holders.setdefault(block, (record, row.tobytes()))
                text = f"block {block} must have the checksums that session {holder.key!r} says"
                if holder.tenant != record.tenant:
                    text = f"block {block} must be its tenant's, got session {holder.key!r} of another"
                if holder.tenant != record.tenant or sums != row.tobytes():
                    found.append(Problem(record.key, text))
        return tuple(found)

    def is_in_place(self) -> bool:
        """Whether the directory still names the file that was opened: not if it was deleted or replaced since.

        What is published to a file without a name is lost with the process. Costs one look at the directory, and never
        raises: a directory that cannot be read names no file.
        """
        try:
            return os.path.samestat(self._opened, os.stat(self._path))
        except OSError:
            return False

    def close(self) -> None:
        """Closes the file. May be called again."""
        self._db.close()

    def _one(self, sql: str, *values: Any) -> Any:
        rows = self._all(sql, *values)
        return rows[0] if rows else None

    def _all(self, sql: str, *values: Any) -> list[Any]:
        with catalog_file.translated(self._path):
            return self._db.execute(sql, values).fetchall()


class Catalog(CatalogReader):
    """Reads and changes the sessions of one namespace, and leaves those of others. One engine at a time has it.

    The directory is made (mode 0700) if it is not there.

    Raises:
      CatalogLockedError: another engine uses the directory.
      CatalogCorruptError: the file is no catalog; `catalog_file.quarantine` moves it aside.
      CatalogVersionError: the file is a catalog of another version.
      CatalogFullError: no space on the disk. Of any change too: nothing is changed then.
      CatalogAccessError: the directory is a file, or is not to be written to. Of any change too.
    """

    _connect = staticmethod(catalog_file.open_for_writing)

    def __init__(self, directory: str | Path, namespace: Namespace):
        self._lock = catalog_file.lock_directory(Path(directory))
        try:
            super().__init__(directory, namespace)
            if self._namespace_id < 0:
                (self._namespace_id,) = self._one(
                    "INSERT INTO namespaces (fingerprint, description, created_s) VALUES (?, ?, ?) RETURNING id",
                    namespace.fingerprint,
                    namespace.to_json(),
                    time.time(),
                )
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Makes the changes of a `with` block one: durable together at its end, or none of them where it raises.

        An error of a change within it must not be caught there. Batches may be nested: the outermost counts.
        """
        if self._db.in_transaction:
            yield
            return
        with catalog_file.translated(self._path), catalog_file.transaction(self._db):
            yield

    def publish(
        self, record: SessionRecord, token_ids: npt.ArrayLike, sums: np.ndarray, note: bytes = b""
    ) -> SessionRecord:
        """Says that a session is stored, or is stored differently. Durable.

        Args:
          record: the session; `generation` is counted here, and `created_s` stays what it was first.
          token_ids: `[num_tokens]`, the tokens whose KV is stored.
          sums: uint32 `[num_blocks, L]`, the checksums of its blocks.
          note: what the session's owner wants kept with it.

        Returns:
          The record as it is stored now.

        Raises:
          ValueError: the parts do not fit each other.
        """
        record.check(self.namespace.layout)
        tokens = np.asarray(token_ids, np.int32)
        if tokens.shape != (record.num_tokens,):
            raise ValueError(f"token_ids must be [{record.num_tokens}], got {list(tokens.shape)}")
        shape = (record.num_blocks, self.namespace.layout.num_layers)
        if sums.shape != shape or sums.dtype != np.uint32:
            raise ValueError(f"sums must be uint32{list(shape)}, got {sums.dtype}{list(sums.shape)}")
        with self.batch():
            return self._write(record, Contents(token_ids=tokens, sums=sums, note=note))

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

        def change(record: SessionRecord, contents: Contents) -> tuple[SessionRecord, Contents]:
            after = record.lineage if lineage is None else lineage
            record, blocks = record.keep(kept, after, self.namespace.layout.block_tokens)
            kept_note = contents.note if note is None else note
            return record, Contents(token_ids=contents.token_ids[kept], sums=contents.sums[blocks], note=kept_note)

        return self._change(key, change if kept.any() else None)

    def set_note(self, key: str, note: bytes) -> bool:
        """Says what is kept with a session. Durable. Returns whether it is stored; not if what is said is damaged."""
        changed = self._change(key, lambda record, contents: (record, dataclasses.replace(contents, note=note)))
        return changed is not None

    def forget(self, keys: Iterable[str]) -> int:
        """Says that sessions are not stored any more, and returns how many were.

        Durable: their blocks may be reused when it returns.
        """
        with self.batch():
            found: set[tuple[int]] = {row for key in keys for row in self._all(_ID_OF, self._namespace_id, key)}
            self._delete(found)
        return len(found)

    def forget_damaged(self) -> int:
        """Says that sessions whose rows are damaged are not stored any more, and makes the index of the rows anew.

        A session that could not be found, since the index was damaged, can be afterwards. If it was published once more
        meanwhile, the last row counts. Durable. Takes as long as `load_all`, and as long again if something is damaged.
        Returns how many rows were dropped.
        """
        dropped: list[tuple[int]] = []
        rows: dict[str, int] = {}
        with self.batch():
            for session, *row in self._all(_ALL_SESSIONS, self._namespace_id):
                try:
                    key = session_from_row(row).key
                except DamagedRecordError:
                    dropped.append((session,))
                    continue
                if key in rows:
                    dropped.append((rows[key],))
                rows[key] = session
            self._all("DROP INDEX sessions_by_key")  # With it no row could be dropped that it has under another key.
            self._delete(dropped)
            self._all(catalog_file.SESSION_INDEX)
        return len(dropped)

    def touch_used(self, times_s: Mapping[str, float]) -> None:
        """Writes down when sessions were last used, seconds since the epoch."""
        rows = [(used_s, self._namespace_id, key) for key, used_s in times_s.items()]
        with self.batch(), catalog_file.translated(self._path):
            self._db.executemany("UPDATE sessions SET last_used_s = ? WHERE namespace = ? AND key = ?", rows)

    def set_kept(self, key: str, pinned: bool, ttl_s: float | None) -> bool:
        """Says whether a session is pinned, and its time to live, in seconds. Durable. Returns whether it is stored."""
        sql = "UPDATE sessions SET pinned = ?, ttl_s = ? WHERE namespace = ? AND key = ? RETURNING id"
        return bool(self._all(sql, int(pinned), ttl_s, self._namespace_id, key))

    def drop_namespace(self, namespace: Namespace) -> int:
        """Forgets another namespace and all its sessions. Its blocks are the caller's to delete, afterwards. Durable.

        Returns how many sessions it had.
        """
        with self.batch():
            dropped = self._all("DELETE FROM namespaces WHERE fingerprint = ? RETURNING id", namespace.fingerprint)
            sessions = self._all("SELECT id FROM sessions WHERE namespace = ?", *dropped[0]) if dropped else []
            self._delete(sessions)
        return len(sessions)

    def compact(self) -> None:
        """Gives the space of what was forgotten back to the disk. Needs as much again while it runs; seconds a GB."""
        self._all("DELETE FROM contents WHERE session NOT IN (SELECT id FROM sessions)")
        self._all("VACUUM")
        self._all("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Closes the file and lets another engine have the directory. May be called again."""
        if hasattr(self, "_db"):
            self._db.close()
        self._lock.close()

    # How.

    def _change(
        self, key: str, change: Callable[[SessionRecord, Contents], tuple[SessionRecord, Contents]] | None
    ) -> SessionRecord | None:
        """Writes what `change` gives of a session; forgets one that is damaged, or that None is made of."""
        with self.batch():
            try:
                found = self.load(key)
            except DamagedRecordError:
                found = None
            if found is None or change is None:
                self.forget([key])
                return None
            return self._write(*change(*found))

    def _write(self, record: SessionRecord, contents: Contents) -> SessionRecord:
        """Writes a session's two rows, within a batch."""
        found = "SELECT id, generation, created_s FROM sessions WHERE namespace = ? AND key = ?"
        known = self._one(found, self._namespace_id, record.key)
        session, generation, created_s = known or (None, 0, record.created_s)
        record = dataclasses.replace(record, generation=generation + 1, created_s=created_s)
        row = session_to_row(record)
        if session is None:
            sql = f"INSERT INTO sessions (namespace, {SESSION_COLUMNS}) VALUES (?, {_SESSION_MARKS}) RETURNING id"
            (session,) = self._one(sql, self._namespace_id, *row)
        else:
            self._all(f"UPDATE sessions SET ({SESSION_COLUMNS}) = ({_SESSION_MARKS}) WHERE id = ?", *row, session)
        self._all("INSERT OR REPLACE INTO contents VALUES (?, ?, ?, ?, ?)", session, *contents.to_row(record.key))
        return record

    def _delete(self, sessions: Iterable[tuple[int]]) -> None:
        """Deletes the two rows of sessions by their ids, within a batch."""
        for (session,) in sessions:
            self._all("DELETE FROM sessions WHERE id = ?", session)
            self._all("DELETE FROM contents WHERE session = ?", session)


def namespaces(directory: str | Path) -> dict[Namespace, float]:
    """All namespaces of a store's directory, oldest first, and when each was first opened, seconds since the epoch.

    May be called while an engine works there.

    Raises:
      CatalogError: there is no catalog, or it cannot be read; the kind says why.
    """
    path = Path(directory) / catalog_file.CATALOG_NAME
    with contextlib.closing(catalog_file.open_for_reading(Path(directory))) as db, catalog_file.translated(path):
        rows = db.execute("SELECT description, created_s FROM namespaces ORDER BY id").fetchall()
    try:
        return {Namespace.from_json(description): created_s for description, created_s in rows}
    except ValueError as error:
        raise catalog_file.CatalogCorruptError(f"{path}: {error}") from error
