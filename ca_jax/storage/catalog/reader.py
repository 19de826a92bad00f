"""Reading the catalog: who is stored, with which tokens, and whether all of it is sound.

Not here: changing it (catalog), the file and its failures (file).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ca_jax.storage.catalog import file as catalog_file
from ca_jax.storage.catalog.records import (
    BLOCK_ID_BYTES,
    SESSION_COLUMNS,
    Contents,
    DamagedRecordError,
    Namespace,
    NamespaceInfo,
    Problem,
    SessionRecord,
    contents_from_row,
    session_from_row,
)

_QUALIFIED_COLUMNS = ", ".join(f"sessions.{column}" for column in SESSION_COLUMNS.split(", "))


class CatalogReader:
    """Reads the sessions of one namespace, beside an engine that writes or after one that died.

    Args:
      directory: the store's.
      namespace: whose sessions; `namespaces` says which there are.

    Raises:
      CatalogError: the catalog cannot be opened; the kind says why. Every call may raise those that its kind names.
    """

    def __init__(self, directory: str | Path, namespace: Namespace):
        self._directory = Path(directory)
        self._namespace = namespace
        self._path = self._directory / catalog_file.CATALOG_NAME
        self._db = self._open()
        self._file_id = _file_id(self._path)
        row = self._one("SELECT id FROM namespaces WHERE fingerprint = ?", namespace.fingerprint)
        self._namespace_id: int = row[0] if row else -1  # -1: nothing was ever stored in it.

    def __enter__(self) -> CatalogReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def namespace(self) -> Namespace:
        """Whose sessions these are."""
        return self._namespace

    @property
    def block_directory(self) -> Path:
        """Where the namespace's blocks belong."""
        return self._directory / self._namespace.directory_name

    def load_all(self, on_damaged: Callable[[str, str], None]) -> Iterator[SessionRecord]:
        """Every session of the namespace, in the order of first publication. Reads none of their contents.

        Args:
          on_damaged: called with key and reason for each row that is skipped since it is damaged. The key may be what
            is damaged; `Catalog.forget` takes it as it is.
        """
        for row in self._all(
            f"SELECT {SESSION_COLUMNS} FROM sessions NOT INDEXED WHERE namespace = ? ORDER BY id", self._namespace_id
        ):
            try:
                record = session_from_row(row)
            except DamagedRecordError as error:
                on_damaged(row[0], str(error))
            else:
                yield record

    def get(self, key: str) -> SessionRecord | None:
        """One session; None if it is not stored.

        Raises:
          DamagedRecordError: its row is damaged.
        """
        row = self._one(
            f"SELECT {SESSION_COLUMNS} FROM sessions WHERE namespace = ? AND key = ?", self._namespace_id, key
        )
        return session_from_row(row) if row else None

    def contents(self, key: str) -> Contents | None:
        """What a load of one session needs, and its owner's note; None if it is not stored.

        Raises:
          DamagedRecordError: they are damaged.
        """
        row = self._one(
            "SELECT num_tokens, length(block_ids), token_ids, seals, prefixes, note, contents.checksum "
            "FROM sessions LEFT JOIN contents ON session = id WHERE namespace = ? AND key = ?",
            self._namespace_id,
            key,
        )
        if row is None:
            return None
        return contents_from_row(
            key,
            row[2:],
            num_tokens=row[0],
            num_blocks=row[1] // BLOCK_ID_BYTES,
            num_layers=self._namespace.layout.num_layers,
        )

    def load(self, key: str) -> tuple[SessionRecord, Contents] | None:
        """One session and what a load of it needs, of the same state; None if it is not stored.

        Raises:
          DamagedRecordError: one of them is damaged.
        """
        row = self._one(
            f"SELECT {_QUALIFIED_COLUMNS}, token_ids, seals, prefixes, note, contents.checksum "
            "FROM sessions LEFT JOIN contents ON session = id WHERE namespace = ? AND key = ?",
            self._namespace_id,
            key,
        )
        if row is None:
            return None
        record = session_from_row(row[:-5])
        num_layers = self._namespace.layout.num_layers
        sizes = {"num_tokens": record.num_tokens, "num_blocks": record.num_blocks, "num_layers": num_layers}
        return record, contents_from_row(key, row[-5:], **sizes)

    def has_sessions(self) -> bool:
        """Whether the namespace has any session, sound or damaged."""
        return self._one("SELECT 1 FROM sessions WHERE namespace = ? LIMIT 1", self._namespace_id) is not None

    def other_formats(self) -> tuple[Namespace, ...]:
        """Namespaces with sessions that are this one but for the format of their blocks."""
        rows = self._all(
            "SELECT description FROM namespaces n WHERE EXISTS (SELECT 1 FROM sessions WHERE namespace = n.id)"
        )
        own, found = self._namespace, []
        for (text,) in rows:
            with contextlib.suppress(ValueError):  # Of a release that knows more than this one: not this one's.
                found.append(Namespace.from_json(text))
        return tuple(
            each
            for each in found
            if each != own and dataclasses.replace(each, format_version=own.format_version) == own
        )

    def integrity_check(self) -> tuple[Problem, ...]:
        """Reads the whole file and all that is said in this namespace: seconds where much is stored.

        Raises:
          CatalogCorruptError: too damaged to be read to the end.
        """
        found = [Problem(key=None, found=text) for (text,) in self._all("PRAGMA integrity_check") if text != "ok"]

        def report(key: str | None, reason: str) -> None:
            found.append(Problem(key=key, found=reason))

        (num_orphans,) = self._one("SELECT count(*) FROM contents WHERE session NOT IN (SELECT id FROM sessions)")
        if num_orphans:
            report(
                None, f"there must be contents of stored sessions, got {num_orphans} of others; `compact` removes them"
            )
        holders: dict[int, SessionRecord] = {}
        seals: dict[str, dict[int, list[int]]] = {}  # By session and block, of those that share any.
        for record in self.load_all(report):
            for reason in self._reasons(record):
                report(record.key, reason)
            for block in record.block_ids.tolist():
                holder = holders.setdefault(block, record)
                if holder is record:
                    continue
                if holder.tenant != record.tenant:
                    report(
                        record.key,
                        f"there must be block {block} for its own tenant, got it held by session "
                        f"{holder.key!r} of another",
                    )
                    continue
                for each in (holder, record):
                    if each.key not in seals:
                        seals[each.key] = self._seals(each)
                if seals[holder.key].get(block) != seals[record.key].get(block):
                    report(
                        record.key,
                        f"there must be block {block} sealed as for session {holder.key!r}, got another seal",
                    )
        return tuple(found)

    def is_in_place(self) -> bool:
        """Whether the directory still names the file that was opened: not if it was deleted or replaced since.

        What is published to a file without a name is lost with the process. Costs one look at the directory, and never
        raises: a directory that cannot be read names no file.
        """
        return self._file_id is not None and self._file_id == _file_id(self._path)

    def close(self) -> None:
        """Closes the file. May be called again."""
        self._db.close()

    def _reasons(self, record: SessionRecord) -> Iterator[str]:
        """What is wrong with one session."""
        try:
            record.check(self._namespace.layout)
            contents = self.contents(record.key)
        except (DamagedRecordError, ValueError) as error:
            yield str(error)
            return
        if contents is None:
            return  # Gone since its row was read: an engine is at work.
        if record.prefixes and record.prefixes != record.prefixes_of(contents.token_ids, self._namespace.layout):
            yield "the prefix hashes must be those of its tokens, got others"

    def _seals(self, record: SessionRecord) -> dict[int, list[int]]:
        """By block, what seals a session; nothing where that is damaged, or gone."""
        try:
            contents = self.contents(record.key)
        except DamagedRecordError:
            contents = None
        if contents is None or len(contents.seals) != record.num_blocks:
            return {}
        return dict(zip(record.block_ids.tolist(), contents.seals.tolist(), strict=True))

    def _open(self) -> sqlite3.Connection:
        return catalog_file.open_for_reading(self._directory)

    def _one(self, sql: str, *values: Any) -> Any:
        with catalog_file.translated(self._path):
            rows = self._db.execute(sql, values).fetchall()
        return rows[0] if rows else None

    def _all(self, sql: str, *values: Any) -> list[Any]:
        with catalog_file.translated(self._path):
            return self._db.execute(sql, values).fetchall()


def namespaces(directory: str | Path) -> tuple[NamespaceInfo, ...]:
    """All namespaces of a store's directory, oldest first. May be called while an engine works there.

    Raises:
      CatalogError: there is no catalog, or it cannot be read; the kind says why.
    """
    path = Path(directory) / catalog_file.CATALOG_NAME
    db = catalog_file.open_for_reading(Path(directory))
    try:
        with catalog_file.translated(path):
            return tuple(_infos(db, path))
    finally:
        db.close()


def _file_id(path: Path) -> tuple[int, int] | None:
    """What tells a file from every other that there is; None where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _infos(db: sqlite3.Connection, path: Path) -> Iterator[NamespaceInfo]:
    rows = db.execute(
        "SELECT description, n.created_s, count(s.id), total(num_tokens), total(length(block_ids)) "
        "FROM namespaces n LEFT JOIN sessions s ON s.namespace = n.id GROUP BY n.id ORDER BY n.id"
    )
    for description, created_s, num_sessions, num_tokens, table_bytes in rows.fetchall():
        try:
            namespace = Namespace.from_json(description)
        except ValueError as error:
            raise catalog_file.CatalogCorruptError(f"{path}: {error}") from error
        num_blocks = int(table_bytes) // BLOCK_ID_BYTES
        yield NamespaceInfo(
            namespace=namespace,
            created_s=created_s,
            num_sessions=num_sessions,
            num_tokens=int(num_tokens),
            num_blocks=num_blocks,
            num_bytes=num_blocks * namespace.layout.block_bytes,
        )
