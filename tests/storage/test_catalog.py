"""The catalog: what it says is so, whatever happens to the process, the file or the disk."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
import stat
from pathlib import Path

import numpy as np
import pytest

from ca_jax.storage.catalog import file as catalog_file
from ca_jax.storage.catalog.catalog import Catalog, CatalogReader, namespaces
from ca_jax.storage.catalog.file import (
    CatalogAccessError,
    CatalogCorruptError,
    CatalogFullError,
    CatalogLockedError,
    quarantine,
)
from ca_jax.storage.catalog.records import DamagedRecordError, Namespace, SessionRecord
from ca_jax.storage.tokens import HASH_BYTES, Lineage, TokenPlaces, prefix_hashes

from .store_helpers import LAYOUT, NAMESPACE, unwritable

BLOCK_TOKENS = LAYOUT.block_tokens


def unexpected(key: str, reason: str) -> None:
    raise AssertionError(f"damaged: {key}: {reason}")


def key_of(key: int) -> str:
    return f"{key:064x}"


def fields(record: SessionRecord) -> dict:
    """The fields but the one that the catalog counts, arrays as lists."""
    named = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {**named, "block_ids": record.block_ids.tolist(), "generation": None}


def stored(catalog: CatalogReader) -> dict[str, tuple]:
    """All that the catalog says, to be compared."""
    found = {}
    for record in catalog.load_all(unexpected):
        contents = catalog.contents(record.key)
        found[record.key] = (fields(record), contents.token_ids.tolist(), contents.sums.tolist(), contents.note)
    return found


def expected(record: SessionRecord, token_ids, sums, note: bytes = b"") -> tuple:
    return fields(record), np.asarray(token_ids).tolist(), sums.tolist(), note


def session(key: int, token_ids, *, tenant: str = "tenant", first_block: int = 0, **changes):
    """The arguments of `publish` for a session of these tokens."""
    num_blocks = LAYOUT.num_blocks(len(token_ids))
    record = SessionRecord(
        key=key_of(key),
        tenant=tenant,
        session_id=f"session {key}",
        block_ids=np.arange(first_block, first_block + num_blocks),
        places=TokenPlaces.dense(len(token_ids)),
        created_s=float(key),
        last_used_s=float(key),
    )
    return dataclasses.replace(record, **changes), token_ids, np.full((num_blocks, LAYOUT.num_layers), key, np.uint32)


@pytest.fixture
def catalog(tmp_path):
    with Catalog(tmp_path / "store", NAMESPACE) as opened:
        yield opened


# What is stored.


def test_a_value_longer_than_sqlite_takes_is_damage(tmp_path):
    """A page that was written over may say so of a row: seen in a long run of faults."""
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 100)
        with pytest.raises(CatalogCorruptError, match="SQLITE_TOOBIG"), catalog_file.translated(tmp_path):
            db.execute("SELECT zeroblob(1000)").fetchall()


def test_what_was_published_and_changed_is_there_after_a_restart(tmp_path):
    sessions = [session(key, range(key, 9), first_block=10 * key) for key in range(3)]
    changed = session(1, range(20), first_block=50, created_s=77.0)
    with Catalog(tmp_path, NAMESPACE) as catalog:
        for each in sessions:
            assert catalog.publish(*each).generation == 1
        assert catalog.publish(*changed, b"note").generation == 2
        with contextlib.suppress(KeyError), catalog.batch():
            assert catalog.forget([key_of(0), "none"]) == 1
            raise KeyError  # A batch that fails changes nothing.
        with catalog.batch():
            assert catalog.set_kept(key_of(0), True, 60.0)
            assert not catalog.set_kept(key_of(9), True, 60.0)
            catalog.touch_used({key_of(0): 90.0})
    with Catalog(tmp_path, NAMESPACE) as catalog:
        record, *contents = changed
        assert stored(catalog) == {
            key_of(0): expected(*session(0, range(9), last_used_s=90.0, pinned=True, ttl_s=60.0)),
            key_of(1): expected(dataclasses.replace(record, created_s=1.0), *contents, b"note"),
            key_of(2): expected(*sessions[2]),
        }
        assert [catalog.load(key_of(key))[0].expires_s for key in (0, 2)] == [150.0, None]
        assert catalog.load("none") is catalog.contents("none") is None
        assert catalog.integrity_check() == ()


def test_a_variant_is_part_of_the_tenant_in_the_table_and_a_row_without_one_is_as_before(catalog):
    plain, adapted = session(1, range(9)), session(2, range(9), first_block=5, variant="0f" * 32)
    for each in (plain, adapted):
        catalog.publish(*each)
    assert [catalog.load(key_of(key))[0].variant for key in (1, 2)] == ["", "0f" * 32]
    assert [catalog.load(key_of(key))[0].tenant for key in (1, 2)] == ["tenant", "tenant"]
    with contextlib.closing(sqlite3.connect(catalog.directory / catalog_file.CATALOG_NAME)) as db:
        tenants = [tenant for (tenant,) in db.execute("SELECT tenant FROM sessions ORDER BY key")]
    assert tenants == ["tenant", f"tenant+{'0f' * 32}"]


def test_a_cut_session_is_found_by_what_has_seen_no_dropped_token(catalog):
    record, token_ids, _ = session(1, range(18))
    sums = np.arange(5 * 3, dtype=np.uint32).reshape(5, 3)
    prefixes = prefix_hashes(np.arange(18), BLOCK_TOKENS)
    catalog.publish(dataclasses.replace(record, prefixes=prefixes), token_ids, sums, b"note")
    kept = np.isin(np.arange(18), [0, 1, 2, 3, 4, 6, 13, 14])  # Of the block of 8 to 11, and of the last one, nothing.
    cut = catalog.cut(key_of(1), kept, Lineage(8, 5))
    assert (cut.num_tokens, cut.block_ids.tolist(), cut.generation) == (8, [0, 1, 3], 2)
    assert cut.prefixes == prefixes[:HASH_BYTES], "what follows has seen tokens that were dropped"
    assert fields(catalog.load(key_of(1))[0]) == fields(cut)
    contents = catalog.contents(key_of(1))
    assert (contents.token_ids.tolist(), contents.note) == (np.flatnonzero(kept).tolist(), b"note")
    assert contents.sums.tolist() == sums[[0, 1, 3]].tolist()
    again = catalog.cut(key_of(1), np.arange(8) < 6, note=b"after")
    assert (again.lineage, again.num_blocks, catalog.contents(key_of(1)).note) == (Lineage(8, 5), 2, b"after")
    assert catalog.cut(key_of(1), np.zeros(6, bool)) is catalog.load(key_of(1)) is None
    catalog.publish(*session(1, range(8)))
    assert catalog.integrity_check() == ()
    with pytest.raises(ValueError, match=r"kept must be bool\[8\], got bool\[18\]"):
        catalog.cut(key_of(1), kept)


@pytest.mark.parametrize(("sums", "note"), [("sums", "'note'"), ("sums", "''"), ("sums || note", "''")])
def test_a_note_that_was_changed_on_disk_is_noticed(tmp_path, sums, note):
    with Catalog(tmp_path, NAMESPACE) as catalog:
        catalog.publish(*session(1, range(8)), b"Note")
    with contextlib.closing(sqlite3.connect(tmp_path / catalog_file.CATALOG_NAME)) as db:
        db.execute(f"UPDATE contents SET sums = CAST({sums} AS BLOB), note = CAST({note} AS BLOB)")
        db.commit()
    with Catalog(tmp_path, NAMESPACE) as catalog, pytest.raises(DamagedRecordError, match="pass their checksum"):
        catalog.contents(key_of(1))


def test_what_start_up_reads_is_small(catalog):
    catalog.publish(*session(1, range(8)), b"note")
    read: set[tuple[str, str]] = set()

    def remember(action: int, table: str | None, column: str | None, *_: object) -> int:
        if action == sqlite3.SQLITE_READ:
            read.add((table, column))
        return sqlite3.SQLITE_OK

    catalog._db.set_authorizer(remember)
    assert len(list(catalog.load_all(unexpected))) == 1
    assert {table for table, _ in read} == {"sessions"}
    catalog.contents(key_of(1))
    assert ("contents", "note") in read


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"places": TokenPlaces()}, "must have at least 1 token, got none"),
        ({"places": TokenPlaces(((0, 1), (5, 4)))}, "5 tokens must have at least 3 blocks, got 2"),
        ({"block_ids": np.array([0])}, "at least 2 blocks, got 1"),
        ({"block_ids": np.array([0, 0])}, r"different ids >= 0, got \[0, 0\]"),
        ({"block_ids": np.array([0, -1])}, "different ids >= 0"),
        ({"block_ids": np.array([0, 1], np.int32)}, r"int64\[num_blocks\], got int32\[2\]"),
        ({"ttl_s": -1.0}, "ttl_s must be"),
        ({"places": TokenPlaces.dense(6)}, r"token_ids must be \[6\], got \[5\]"),
        ({"block_ids": np.array([0, 1, 2])}, r"sums must be uint32\[3, 3\], got uint32\[2, 3\]"),
    ],
)
def test_what_does_not_fit_is_refused(catalog, changes, message):
    record, token_ids, sums = session(1, range(5))
    with pytest.raises(ValueError, match=message):
        catalog.publish(dataclasses.replace(record, **changes), token_ids, sums)
    assert stored(catalog) == {}


# Prefixes.


# Namespaces.


def test_other_weights_layouts_and_versions_meet_nowhere_and_are_left_alone(tmp_path):
    others = [
        dataclasses.replace(NAMESPACE, weights="others"),
        dataclasses.replace(NAMESPACE, mesh_shard="1/2"),
        dataclasses.replace(NAMESPACE, position_encoding="rotated"),
        dataclasses.replace(NAMESPACE, layout=dataclasses.replace(LAYOUT, dtype="bfloat16")),
    ]
    assert len({namespace.directory_name for namespace in (NAMESPACE, *others)}) == 5
    with Catalog(tmp_path, NAMESPACE) as catalog:
        catalog.publish(*session(1, range(8)))
    for number, namespace in enumerate(others):
        with Catalog(tmp_path, namespace) as catalog:
            assert stored(catalog) == {}
            assert catalog.forget([key_of(1)]) == 0
            catalog.publish(*session(1, range(100, 104 + number)))
    with Catalog(tmp_path, NAMESPACE) as catalog:
        assert stored(catalog) == {key_of(1): expected(*session(1, range(8)))}
        assert list(namespaces(tmp_path)) == [NAMESPACE, *others]
        assert catalog.drop_namespace(others[1]) == 1
        assert catalog.drop_namespace(others[1]) == 0
        assert catalog.integrity_check() == ()
    assert len(namespaces(tmp_path)) == 4


def test_a_namespace_is_read_back_from_its_json():
    assert Namespace.from_json(NAMESPACE.to_json()) == NAMESPACE
    for text in ("", "[]", "{}", '{"weights": 1}', NAMESPACE.to_json().replace("dtype", "type")):
        with pytest.raises(ValueError, match="a namespace must be as to_json writes it"):
            Namespace.from_json(text)


# Who may open it.


def test_readers_come_and_go_beside_an_engine(tmp_path):
    with pytest.raises(CatalogAccessError, match="got no file"):
        CatalogReader(tmp_path, NAMESPACE)
    with Catalog(tmp_path, NAMESPACE) as catalog:
        catalog.publish(*session(1, range(8)))
        with CatalogReader(tmp_path, NAMESPACE) as reader:
            assert stored(reader) == stored(catalog)
            catalog.publish(*session(2, range(8), first_block=9))
            assert stored(reader) == stored(catalog)
            assert reader.integrity_check() == ()
            assert reader.block_directory == catalog.block_directory == tmp_path / NAMESPACE.directory_name
        with CatalogReader(tmp_path, dataclasses.replace(NAMESPACE, weights="others")) as reader:
            assert stored(reader) == {}
            assert not reader.has_sessions()
    assert len(namespaces(tmp_path)) == 1


def test_what_is_made_is_for_its_owner_alone(tmp_path):
    with Catalog(tmp_path / "a" / "store", NAMESPACE) as catalog:
        catalog.publish(*session(1, range(8)))
        assert stat.S_IMODE((tmp_path / "a" / "store").stat().st_mode) == 0o700
        for path in (tmp_path / "a" / "store").iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_a_directory_not_to_be_written_to_is_refused_and_can_be_read(tmp_path):
    (tmp_path / "file").write_text("of somebody")
    store = tmp_path / "store"
    with unwritable(store, lambda path: filled(path, num_sessions=3)):
        for directory in (tmp_path / "file", tmp_path / "file" / "below", store, store / "new"):
            with pytest.raises(CatalogAccessError, match=rf"must have a directory to write in, got .*{directory.name}"):
                Catalog(directory, NAMESPACE)
        with CatalogReader(store, NAMESPACE) as reader:
            assert set(stored(reader)) == {*map(key_of, range(3))}
    assert (tmp_path / "file").read_text() == "of somebody"


# What can happen to the file.


def filled(directory: Path, num_sessions: int = 50) -> Path:
    with Catalog(directory, NAMESPACE) as catalog, catalog.batch():
        for key in range(num_sessions):
            tokens = range(key, key + 1 + key % 37)
            catalog.publish(*session(key, tokens, first_block=1000 * key), b"note %d" % key)
    return directory / catalog_file.CATALOG_NAME


def test_a_log_left_behind_by_a_deleted_catalog_is_not_taken_for_its_successors(tmp_path):
    with Catalog(tmp_path / "old", NAMESPACE) as catalog:
        catalog.publish(*session(1, range(8)))
        log = (tmp_path / "old" / f"{catalog_file.CATALOG_NAME}-wal").read_bytes()
    assert log
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / f"{catalog_file.CATALOG_NAME}-wal").write_bytes(log)
    with Catalog(tmp_path / "new", NAMESPACE) as catalog:
        assert stored(catalog) == {}
        assert catalog.integrity_check() == ()


def test_it_knows_whether_its_file_is_still_in_place(tmp_path):
    path = tmp_path / "store" / catalog_file.CATALOG_NAME
    with Catalog(path.parent, NAMESPACE) as catalog, CatalogReader(path.parent, NAMESPACE) as reader:
        for opened in (catalog, reader):
            assert opened.is_in_place()
        catalog.publish(*session(1, range(8)))
        assert catalog.is_in_place()
        moved = path.rename(tmp_path / "moved")
        assert not catalog.is_in_place(), "deleted"
        path.write_bytes(moved.read_bytes())
        for opened in (catalog, reader):
            assert not opened.is_in_place(), "another file of the same content"
        moved.rename(path)
        assert catalog.is_in_place()
        path.parent.rename(tmp_path / "elsewhere")
        assert not catalog.is_in_place()
        (tmp_path / "store").write_text("")
        assert not catalog.is_in_place(), "the directory is a file"


def test_an_empty_file_is_an_empty_catalog(tmp_path):
    (tmp_path / catalog_file.CATALOG_NAME).write_bytes(b"")
    with pytest.raises(CatalogAccessError, match="which is empty"):
        CatalogReader(tmp_path, NAMESPACE)
    with Catalog(tmp_path, NAMESPACE) as catalog:
        assert stored(catalog) == {}


def test_moving_aside_takes_the_log_along(tmp_path):
    for ending in ("", "-wal", "-shm"):
        (tmp_path / f"{catalog_file.CATALOG_NAME}{ending}").write_text(f"broken{ending}")
    moved = quarantine(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.name != catalog_file.LOCK_NAME} == {
        f"{moved.name}{ending}": f"broken{ending}" for ending in ("", "-wal", "-shm")
    }
    assert quarantine(tmp_path / "nothing here") is None
    with Catalog(tmp_path, NAMESPACE), pytest.raises(CatalogLockedError):
        quarantine(tmp_path)


def flip(path: Path, text: str, *, in_index: bool) -> None:
    """Changes the last byte of the one place where a table has `text`, or where the index behind it has."""
    content = bytearray(path.read_bytes())
    places = [at for at in range(len(content)) if content.startswith(text.encode(), at)]
    assert len(places) == 1 + text.startswith("0"), "only keys are in an index too"
    content[places[in_index] + len(text) - 1] ^= 1
    path.write_bytes(content)


def test_sessions_whose_rows_are_damaged_can_be_forgotten(tmp_path):
    path = filled(tmp_path, num_sessions=6)
    flip(path, "session 1", in_index=False)
    flip(path, key_of(3), in_index=False)
    flip(path, key_of(4), in_index=True)
    skipped: list[str] = []
    with Catalog(tmp_path, NAMESPACE) as catalog:
        assert len(list(catalog.load_all(lambda key, reason: skipped.append(key)))) == 4
        assert skipped == [key_of(1), key_of(2)], "the key that a damaged row has may be another's"
        assert catalog.load(key_of(4)) is None, "there, and not to be found"
        assert catalog.forget_damaged() == 2
        assert set(stored(catalog)) == {*map(key_of, (0, 2, 4, 5))}
        assert catalog.load(key_of(4)) is not None
        assert catalog.forget_damaged() == 0
        catalog.publish(*session(3, range(8), first_block=7000))
        catalog.compact()
        assert catalog.integrity_check() == ()
    with Catalog(tmp_path, NAMESPACE) as catalog:
        assert set(stored(catalog)) == {*map(key_of, (0, 2, 3, 4, 5))}


def test_a_check_tells_what_is_wrong(tmp_path):
    path = filled(tmp_path, num_sessions=8)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE sessions SET num_tokens = num_tokens + 1 WHERE key = ?", (key_of(1),))
        db.execute("UPDATE contents SET token_ids = zeroblob(length(token_ids)) WHERE session = 3")
        db.execute("DELETE FROM contents WHERE session = 4")
        db.execute("UPDATE sessions SET prefix_hashes = x'00' WHERE id = 7")
        db.execute("INSERT INTO contents VALUES (999, x'', x'', x'', 0)")
        db.commit()
    with Catalog(tmp_path, NAMESPACE) as catalog:
        catalog.publish(*session(100, range(4), tenant="other", first_block=7000))
        problems = catalog.integrity_check()
        assert {problem.key for problem in problems} == {None, *map(key_of, (1, 2, 3, 6, 100))}
        assert any("got 1 of others" in problem.found for problem in problems)
        assert any("block 7000 must be" in problem.found for problem in problems)
        catalog.forget(map(key_of, (1, 2, 3, 6, 100)))
        catalog.compact()
        assert catalog.integrity_check() == ()


# A full disk.


def test_on_a_full_disk_a_change_fails_and_changes_nothing(catalog):
    catalog.publish(*session(1, range(40)))
    before = stored(catalog)
    (num_pages,) = catalog._db.execute("PRAGMA page_count").fetchone()
    catalog._db.execute(f"PRAGMA max_page_count = {num_pages + 2}")  # Room for a page or two.
    for _ in range(3):
        with pytest.raises(CatalogFullError, match="the disk must have room"):
            catalog.publish(*session(2, range(40_000), first_block=100))
    assert stored(catalog) == before
    assert catalog.integrity_check() == ()
    catalog.forget([key_of(1)])
    catalog.publish(*session(3, range(4)))
    assert set(stored(catalog)) == {key_of(3)}
