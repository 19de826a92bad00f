"""What is to go from a store's directory goes, nothing else does, and not while an engine is there."""

from __future__ import annotations

import contextlib
import sqlite3

import pytest

from ca_jax.storage import collect as housekeeping
from ca_jax.storage.catalog.catalog import Catalog
from ca_jax.storage.catalog.file import CATALOG_NAME, CatalogFullError
from ca_jax.storage.catalog.notes import NoteLog
from ca_jax.storage.collect import ForgetReason, collect_garbage, find_namespaces
from ca_jax.storage.inspector import StoredNameError, StoreInspector, catalog_problems, verify
from ca_jax.storage.records import Owner

from .store_helpers import KEYS, NAMESPACE, OTHER_NAMESPACE, block_file, fill, make_blocks, open_tier

NOW_S = 1e9 + 100  # When the second session has expired, and the third would have.


def collect(path, **options):
    with StoreInspector(path) as inspector:
        return collect_garbage(inspector, now_s=NOW_S, **options)


def stored(path) -> dict[str, list[int]]:
    """The blocks on disk and the keys of sound sessions: all of them verified."""
    with StoreInspector(path) as inspector:
        assert catalog_problems(inspector) == ()
        assert all(verdict.ok for verdict in verify(inspector))
        found = {}
        for namespace in inspector.namespaces():
            tier = inspector.open_blocks(namespace)
            found[namespace.weights[:4]] = [] if tier is None else tier.stored_block_ids()
        found["keys"] = [session.record.key for session in inspector.sessions().sound]
    return found


def reasons(garbage) -> dict[str, ForgetReason]:
    return {each.key: each.reason for namespace in garbage.namespaces for each in namespace.forgotten}


def test_expired_sessions_and_unheld_blocks_go(tmp_path, filled, driver):
    tier = open_tier(tmp_path, driver)
    tier.write_blocks([9, 12], make_blocks(NAMESPACE.layout, 2))
    tier.close()
    garbage = collect(tmp_path)
    assert reasons(garbage) == {KEYS["second"]: ForgetReason.EXPIRED}
    first, other = garbage.namespaces
    assert (first.namespace, first.num_blocks, first.num_leftovers) == (NAMESPACE, 3, 0)
    assert first.num_bytes == 3 * 4096
    assert (other.forgotten, other.num_blocks) == ((), 0)
    assert stored(tmp_path) == {
        "aaaa": [0, 1, 2, 5, 6, 7],
        "bbbb": [0, 1],
        "keys": [KEYS["first"], KEYS["third"], KEYS["other"]],
    }
    again = collect(tmp_path)
    assert reasons(again) == {}
    assert [each.num_blocks for each in again.namespaces] == [0, 0]


def test_what_is_forgotten_is_not_noted_either_unless_its_kv_alone_was_damaged(tmp_path, filled):
    with contextlib.closing(sqlite3.connect(tmp_path / CATALOG_NAME)) as db, db:
        db.execute("UPDATE sessions SET num_tokens = 3 WHERE key = ?", [KEYS["first"]])
    with contextlib.closing(NoteLog(tmp_path)) as log:
        for name in KEYS:
            log.put(KEYS[name], Owner(session_id=name), b"note")
    found = reasons(collect(tmp_path))
    assert found == {KEYS["first"]: ForgetReason.DAMAGED, KEYS["second"]: ForgetReason.EXPIRED}
    with contextlib.closing(NoteLog(tmp_path)) as log:
        assert {each.session_id for each in log.list()} == set(KEYS) - {"second"}


def test_only_one_tenants_sessions_are_forgotten(tmp_path, filled):
    assert reasons(collect(tmp_path, tenant="bob")) == {}
    assert reasons(collect(tmp_path, tenant="alice")) == {KEYS["second"]: ForgetReason.EXPIRED}
    with pytest.raises(ValueError, match="must be empty with a tenant, got 1 namespaces and 'bob'"):
        collect(tmp_path, tenant="bob", drop=(NAMESPACE,))


def test_a_dropped_namespace_is_gone(tmp_path, filled):
    garbage = collect(tmp_path, drop=(NAMESPACE,))
    assert [each.dropped for each in garbage.namespaces] == [True, False]
    assert reasons(garbage) == {KEYS[name]: ForgetReason.NAMESPACE for name in ("first", "second", "third")}
    assert garbage.namespaces[0].num_blocks == 7
    assert not (tmp_path / NAMESPACE.directory_name).exists()
    assert stored(tmp_path) == {"bbbb": [0, 1], "keys": [KEYS["other"]]}


def test_leftovers_and_files_of_no_namespace_go_and_others_stay(tmp_path):
    fill(tmp_path, "zarr3")
    leftover = block_file(tmp_path, 4).with_name("c.4.0.0.0.0.0.__lock")
    leftover.touch()
    orphan = tmp_path / "blocks-0123456789abcdef" / "zarr3"
    orphan.mkdir(parents=True)
    (orphan / "zarr.json").write_text("{}")
    aside = tmp_path / f"{CATALOG_NAME}.corrupt-20240101T000000-1"
    aside.write_bytes(b"x")
    stays = [tmp_path / "blocks-of-mine", tmp_path / "notes.txt"]
    for path in stays:
        path.write_text("x")
    garbage = collect(tmp_path)
    assert garbage.files == ("blocks-0123456789abcdef", aside.name)
    assert garbage.num_file_bytes > 0
    assert [each.num_leftovers for each in garbage.namespaces] == [1, 0]
    assert not any(path.exists() for path in (leftover, orphan.parent, aside))
    assert all(path.exists() for path in stays)


def test_the_catalog_is_compacted_where_there_is_room(tmp_path, filled, monkeypatch):
    def full(catalog):
        raise CatalogFullError("the disk must have room")

    with Catalog(tmp_path, NAMESPACE) as catalog, catalog.batch():
        catalog._db.execute("CREATE TABLE filling AS SELECT zeroblob(2000000) AS bytes")
        catalog._db.execute("DROP TABLE filling")
    with monkeypatch.context() as patch:
        patch.setattr(housekeeping.Catalog, "compact", full)
        garbage = collect(tmp_path)
    assert (garbage.compacted_bytes, garbage.not_compacted) == (None, "the disk must have room")
    assert reasons(garbage) == {KEYS["second"]: ForgetReason.EXPIRED}
    garbage = collect(tmp_path)
    assert garbage.not_compacted is None
    assert garbage.compacted_bytes < 1_000_000 < garbage.catalog_bytes


def test_a_catalog_of_nothing_is_cleaned_too(tmp_path):
    with Catalog(tmp_path, NAMESPACE) as catalog:
        catalog._db.execute("DELETE FROM namespaces")
    orphan = tmp_path / NAMESPACE.directory_name
    orphan.mkdir()
    assert collect(tmp_path).files == (orphan.name,)
    assert not orphan.exists()


def test_namespaces_are_found_by_name_or_fingerprint(tmp_path):
    fill(tmp_path, "zarr3")
    with StoreInspector(tmp_path) as inspector:
        for names, found in (
            (("aaaa",), (NAMESPACE,)),
            ((OTHER_NAMESPACE.directory_name, "aaaa1111weights"), (OTHER_NAMESPACE, NAMESPACE)),
            ((NAMESPACE.fingerprint[:20], "aaaa"), (NAMESPACE,)),
            ((), ()),
        ):
            assert find_namespaces(inspector, names) == found
        for name in ("none", ""):
            with pytest.raises(StoredNameError, match=r"(?s)got 0 among.*weights aaaa.*weights bbbb"):
                find_namespaces(inspector, [name])
