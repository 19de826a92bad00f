"""What an earlier version has left in a directory is refused by name, and left as it is: catalog, blocks, notes.

`store_of_version_2.tar.xz` was written when catalogs were of version 2 and notes of version 1: two sessions with a
conversation as note, of tokens 100… and KV of seeds 0 and 1, and a third conversation in the log of notes alone.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tarfile
from pathlib import Path

import pytest

from ca_jax.storage.catalog import file as catalog_file
from ca_jax.storage.catalog.catalog import Catalog
from ca_jax.storage.catalog.file import CATALOG_NAME, CatalogAccessError, CatalogVersionError, make_directory
from ca_jax.storage.catalog.notes import LOG_NAME, NoteLog
from ca_jax.storage.inspector import StoreInspector
from ca_jax.turns.conversations import Conversation

from .store_helpers import NAMESPACE, make_store


@pytest.fixture
def directory(tmp_path) -> Path:
    with tarfile.open(Path(__file__).with_name("store_of_version_2.tar.xz")) as tar:
        tar.extractall(tmp_path, filter="data")
    return tmp_path / "store"


def set_version(path: Path, version: int) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {version}")


@pytest.mark.parametrize("version", [1, 2, 3, 5])
def test_a_catalog_of_another_version_is_refused_with_what_to_do_and_left_as_it_is(directory, version):
    set_version(directory / CATALOG_NAME, version)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    for opens in (lambda: make_store(6, ssd_dir=directory), lambda: StoreInspector(directory)):
        with pytest.raises(CatalogVersionError, match=f"version 4, got version {version}: .* name another ssd_dir"):
            opens()
    del before[directory / CATALOG_NAME]  # Read by sqlite, which may fold its log into it.
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("version", [1, 7])
def test_notes_of_another_version_are_refused_and_stay(directory, version):
    path = directory / LOG_NAME
    set_version(path, version)
    before = path.read_bytes()
    with pytest.raises(CatalogVersionError, match=f"version 2, got version {version}: .*{LOG_NAME}"):
        NoteLog(directory, boot="a boot")
    assert path.read_bytes() == before
    log = NoteLog(directory, boot="another boot")  # Which believes nothing that was noted before.
    assert log.list() == ()
    log.close()


def test_a_conversation_of_another_format_is_refused_by_name(directory):
    with contextlib.closing(sqlite3.connect(directory / CATALOG_NAME)) as db:
        ((note,), *_) = db.execute("SELECT note FROM contents").fetchall()
    assert Conversation.from_bytes(note), "conversations are written as they were"
    for bad in (b"", note[:-5], b"?" + note):
        with pytest.raises(ValueError, match=r"must be (a conversation|there whole|of format)"):
            Conversation.from_bytes(bad)


def test_a_catalog_that_can_have_no_write_ahead_log_is_refused(tmp_path, monkeypatch):
    opened = catalog_file.opened
    # As on a file system of a network: sqlite's own way of files without shared memory.
    monkeypatch.setattr(catalog_file, "opened", lambda path, **options: opened(path, "vfs=unix-dotfile", **options))
    with pytest.raises(CatalogAccessError, match="must have a write-ahead log, got journal mode 'delete'"):
        Catalog(tmp_path, NAMESPACE)


def test_the_name_of_each_new_directory_is_durable(tmp_path, monkeypatch):
    synced: list[str] = []
    fsync = os.fsync

    def told(file: int) -> None:
        fsync(file)
        synced.append(os.readlink(f"/proc/self/fd/{file}"))

    monkeypatch.setattr(os, "fsync", told)
    make_directory(tmp_path / "a" / "b")
    assert synced == [str(tmp_path), str(tmp_path / "a")]
    synced.clear()
    make_directory(tmp_path / "a" / "b")
    assert synced == []
    store = make_store(6, ssd_dir=tmp_path / "new" / "store")
    store.close()
    (blocks,) = (tmp_path / "new" / "store").glob("blocks-*")
    wanted = {tmp_path, tmp_path / "new", tmp_path / "new" / "store", blocks, blocks / "zarr3"}
    assert wanted <= {Path(path) for path in synced}
