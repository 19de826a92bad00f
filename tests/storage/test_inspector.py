"""A store's directory is told of as it is, beside an engine and after one, and what is damaged in it is found."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from ca_jax.storage.catalog.catalog import Catalog
from ca_jax.storage.catalog.file import CATALOG_NAME, CatalogAccessError, CatalogCorruptError
from ca_jax.storage.inspector import (
    AmbiguousSessionError,
    DamagedSessionError,
    DamageReason,
    StoreDirectoryError,
    StoreInspector,
    UnknownSessionError,
    catalog_problems,
    measure,
    read_session,
    verify,
    verify_session,
)
from ca_jax.storage.tiers.formats import Zarr3Tier

from .filled_store import KEYS, LAYOUT, NAMESPACE, OTHER_NAMESPACE, block_file, files_of, fill, open_tier, save
from .ssd_helpers import read
from .store_helpers import as_bits, make_layout


def damages(path: Path, **options) -> dict[str, list[tuple]]:
    """What `verify` finds: key to reasons and blocks."""
    with StoreInspector(path, **options) as inspector:
        return {
            verdict.key: [(damage.reason, damage.index, damage.block_id) for damage in verdict.damages]
            for verdict in verify(inspector)
            if not verdict.ok
        }


def change_bytes(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(data)


def change_row(path: Path, sql: str, *values) -> None:
    db = sqlite3.connect(path / CATALOG_NAME)
    assert db.execute(sql, values).rowcount == 1
    db.commit()
    db.close()


# What there is.


def test_sessions_of_all_namespaces_are_told_last_used_last(tmp_path, filled):
    with StoreInspector(tmp_path) as inspector:
        listing = inspector.sessions()
        assert [each.record.key for each in listing.sound] == list(KEYS.values())
        assert listing.damaged == ()
        assert [each.namespace for each in listing.sound] == [NAMESPACE] * 3 + [OTHER_NAMESPACE]
        assert [each.num_bytes for each in listing.sound] == [
            3 * LAYOUT.block_bytes,
            LAYOUT.block_bytes,
            3 * LAYOUT.block_bytes,
            LAYOUT.block_bytes,  # Two of half the size.
        ]
        assert [each.expired(1e9 + 61) for each in listing.sound] == [False, True, False, False]
        assert not listing.sound[1].expired(1e9 + 60)
        assert [each.record.key for each in inspector.sessions("alice").sound] == [KEYS["first"], KEYS["second"]]
        assert inspector.sessions("nobody").sound == ()


def test_a_session_is_found_by_id_key_or_beginning_of_its_key(tmp_path, filled):
    with StoreInspector(tmp_path) as inspector:
        for name, key in (
            ("notes", "second"),
            (KEYS["third"], "third"),
            ("b", "third"),
            ("c4", "other"),
            ("x", "other"),
        ):
            assert inspector.find(name).record.key == KEYS[key]
        assert inspector.find("chat", "bob").record.key == KEYS["third"]
        with pytest.raises(AmbiguousSessionError, match=r"(?s)got 2 for 'chat'.*a10.*'alice'.*b30.*'bob'"):
            inspector.find("chat")
        with pytest.raises(AmbiguousSessionError, match="got 2 for 'a'"):
            inspector.find("a")
        for name, tenant in (("nobody's", None), ("", None), ("x", "alice")):
            with pytest.raises(UnknownSessionError, match="must be the id"):
                inspector.find(name, tenant)


def test_a_directory_without_a_store_is_refused(tmp_path):
    with pytest.raises(StoreDirectoryError, match="must be a store's directory, got nothing"):
        StoreInspector(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(StoreDirectoryError, match="got a file"):
        StoreInspector(tmp_path / "file")
    with pytest.raises(CatalogAccessError, match="must hold a catalog, got no file"):
        StoreInspector(tmp_path)
    (tmp_path / CATALOG_NAME).write_bytes(b"something else" * 1000)
    with pytest.raises(CatalogCorruptError, match="must be a catalog"):
        StoreInspector(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [CATALOG_NAME, "file"]
    with pytest.raises(ValueError, match="driver must be one of zarr3, raw"):
        StoreInspector(tmp_path, driver="tape")
    with pytest.raises(ValueError, match="URL must be driver zarr3"):
        StoreInspector(tmp_path, driver="raw", url="s3://bucket")


def test_what_it_takes_on_disk_is_told(tmp_path, filled, driver):
    unknown = tmp_path / "blocks-0123456789abcdef" / "zarr3"
    unknown.mkdir(parents=True)
    (unknown / "c.0").write_bytes(bytes(10_000))
    (tmp_path / f"{CATALOG_NAME}.corrupt-1").write_bytes(b"x")
    (tmp_path / "unrelated").write_bytes(b"x")
    with StoreInspector(tmp_path) as inspector:
        use = inspector.disk_use()
    assert {name: each.num_files for name, each in use.unknown.items()} == {
        "blocks-0123456789abcdef": 1,
        f"{CATALOG_NAME}.corrupt-1": 1,
    }
    assert use.unknown["blocks-0123456789abcdef"].num_bytes >= 10_000
    num_files = {"zarr3": (7 + 1, 2 + 1), "raw": (2, 2)}[driver]
    assert tuple(each.num_files for each in use.blocks.values()) == num_files
    num_blocks = {namespace: 7 if namespace == NAMESPACE else 2 for namespace in use.blocks}
    for namespace, each in use.blocks.items():
        assert each.num_bytes >= num_blocks[namespace] * namespace.layout.block_bytes
    assert use.catalog.num_bytes >= (tmp_path / CATALOG_NAME).stat().st_size
    assert 0 < use.free_bytes < use.total_bytes
    assert measure(tmp_path / "none").num_files == 0


# Whether it is sound.


def test_a_sound_store_is_left_as_it_is(tmp_path, filled):
    before = files_of(tmp_path)
    with StoreInspector(tmp_path) as inspector:
        verdicts = list(verify(inspector))
        assert [verdict.key for verdict in verdicts] == list(KEYS.values())
        assert all(verdict.ok for verdict in verdicts)
        assert [verdict.key for verdict in verify(inspector, "bob")] == [KEYS["third"]]
        assert catalog_problems(inspector) == ()
    assert files_of(tmp_path) == before


def test_many_blocks_are_read_in_order(tmp_path, driver):
    block_ids = [15, 3, 9, 0, 1, 12, 4, 14, 7, 2, 11, 5]
    tier = open_tier(tmp_path, driver)
    with Catalog(tmp_path, NAMESPACE) as catalog:
        kept = save(catalog, tier, KEYS["first"], block_ids, 4 * 11 + 1)
    with StoreInspector(tmp_path) as inspector:
        found = read_session(inspector, inspector.find("a"))
        np.testing.assert_array_equal(as_bits(found.kv), as_bits(kept.kv))
    tier.delete_blocks([11, 12]).result()
    assert damages(tmp_path) == {KEYS["first"]: [(DamageReason.MISSING, 5, 12), (DamageReason.MISSING, 10, 11)]}
    tier.close()


@pytest.mark.parametrize("damage", ["flipped", "cut short", "swapped", "written over"])
def test_damaged_blocks_are_found_and_placed(tmp_path, filled, driver, damage):
    tier = open_tier(tmp_path, driver)
    raw, corrupt = tmp_path / NAMESPACE.directory_name / "raw" / "blocks", DamageReason.CORRUPT
    if damage == "flipped":
        file, offset = (block_file(tmp_path, 5), 100) if driver == "zarr3" else (raw, 5 * 4096 + 100)
        change_bytes(file, offset)
        expected = {"third": [(corrupt, 1, 5)]}
    elif damage == "cut short":
        file, num_bytes = (block_file(tmp_path, 6), 700) if driver == "zarr3" else (raw, 6 * 4096 + 700)
        os.truncate(file, num_bytes)
        expected = {
            "third": [(corrupt, 2, 6)] if driver == "zarr3" else [(DamageReason.MISSING, 0, 7), (corrupt, 2, 6)]
        }
    elif damage == "swapped":
        tier.write_blocks([7, 1], read(tier, [1, 7])).result()
        expected = {"first": [(corrupt, 1, 1)], "third": [(corrupt, 0, 7)]}
    else:
        tier.write_blocks([3], np.zeros((1, *LAYOUT.block_shape), LAYOUT.numpy_dtype)).result()
        expected = {"second": [(corrupt, 0, 3)]}
    tier.close()
    assert damages(tmp_path) == {KEYS[name]: found for name, found in expected.items()}
    with StoreInspector(tmp_path) as inspector:
        for name, kept in filled.items():
            session = next(each for each in inspector.sessions().sound if each.record.key == KEYS[name])
            if name in expected:
                with pytest.raises(DamagedSessionError, match=rf"'{kept.record.session_id}': .* \((corrupt|missing)\)"):
                    read_session(inspector, session)
                continue
            found = read_session(inspector, session)
            assert found.token_ids.tolist() == kept.token_ids.tolist()
            np.testing.assert_array_equal(as_bits(found.kv), as_bits(kept.kv), strict=True)


def test_missing_directories_are_found_and_not_made(tmp_path, filled, driver):
    for namespace, name in ((NAMESPACE, "blocks moved"), (OTHER_NAMESPACE, "others moved")):
        (tmp_path / namespace.directory_name).rename(tmp_path / name)
    assert damages(tmp_path) == {key: [(DamageReason.MISSING, None, None)] for key in KEYS.values()}
    assert not (tmp_path / NAMESPACE.directory_name).exists()


def test_a_damaged_catalog_is_found(tmp_path, filled):
    change_row(tmp_path, "UPDATE sessions SET generation = 7 WHERE key = ?", KEYS["other"])
    change_row(tmp_path, "UPDATE sessions SET num_tokens = 3 WHERE key = ?", KEYS["first"])
    change_row(
        tmp_path,
        "UPDATE contents SET token_ids = zeroblob(16) WHERE session = (SELECT id FROM sessions WHERE key = ?)",
        KEYS["second"],
    )
    assert damages(tmp_path) == {
        KEYS["first"]: [(DamageReason.CATALOG, None, None)],
        KEYS["second"]: [(DamageReason.CATALOG, None, None)],
        KEYS["other"]: [(DamageReason.CATALOG, None, None)],
    }
    with StoreInspector(tmp_path) as inspector:
        assert {row.key for row in inspector.sessions().damaged} == {KEYS["first"], KEYS["other"]}
        assert inspector.sessions("alice").damaged == ()
        assert {problem.key for problem in catalog_problems(inspector)} == {
            KEYS["first"],
            KEYS["second"],
            KEYS["other"],
        }


@pytest.mark.parametrize(("tenant", "found"), [("alice", "must have the checksums"), ("bob", "of another")])
def test_a_block_that_two_sessions_hold_and_do_not_share_is_a_problem_of_the_catalog(tmp_path, tenant, found):
    tier = open_tier(tmp_path, "zarr3")
    with Catalog(tmp_path, NAMESPACE) as catalog:
        save(catalog, tier, KEYS["first"], [0, 1], 8)
        save(catalog, tier, KEYS["second"], [1], 4, seed=1, tenant=tenant)
    tier.close()
    with StoreInspector(tmp_path) as inspector:
        (problem,) = catalog_problems(inspector)
    assert f"session {KEYS['first']!r}" in problem.found
    assert found in problem.found
    assert problem.key == KEYS["second"]
    assert damages(tmp_path) == {KEYS["first"]: [(DamageReason.CORRUPT, 1, 1)]}


# How blocks are kept.


def test_a_group_without_metadata_is_read_and_one_of_another_layout_is_not(tmp_path):
    fill(tmp_path, "zarr3")
    metadata = block_file(tmp_path, 0).with_name("zarr.json")
    metadata.unlink()
    assert damages(tmp_path) == {}
    assert not metadata.exists()
    Zarr3Tier(make_layout(block_tokens=8), tmp_path / "eight", 4096 * 4).close()
    metadata.write_bytes((tmp_path / "eight" / "zarr3" / "000000" / "zarr.json").read_bytes())
    assert damages(tmp_path) == {
        KEYS[name]: [(DamageReason.CORRUPT, None, None)] for name in ("first", "second", "third")
    }


def test_a_tier_of_what_exists_writes_nothing(tmp_path, filled, driver):
    before = files_of(tmp_path)
    with StoreInspector(tmp_path) as inspector:
        tier = inspector.open_blocks(NAMESPACE)
        assert set(tier.stored_block_ids()) == {0, 1, 2, 3, 5, 6, 7}
        with pytest.raises(ValueError, match="must have a tier that may write"):
            tier.write_blocks([0], np.zeros((1, *LAYOUT.block_shape), LAYOUT.numpy_dtype))
        assert files_of(tmp_path) == before
        tier.delete_blocks([7, 3]).result()
        assert set(tier.stored_block_ids()) == {0, 1, 2, 5, 6}


def test_blocks_of_both_drivers_want_to_be_told_apart(tmp_path):
    fill(tmp_path, "zarr3")
    open_tier(tmp_path, "raw").close()
    with pytest.raises(StoreDirectoryError, match="blocks of both drivers"):
        damages(tmp_path)
    assert damages(tmp_path, driver="zarr3") == {}
    assert set(damages(tmp_path, driver="raw")) == set(KEYS.values())


def test_blocks_are_read_from_a_url(tmp_path):
    fill(tmp_path / "store", "zarr3")
    for namespace in (NAMESPACE, OTHER_NAMESPACE):
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        directory = tmp_path / "store" / namespace.directory_name
        directory.rename(tmp_path / "elsewhere" / namespace.directory_name)
    assert len(damages(tmp_path / "store")) == len(KEYS)
    for url in (f"file://{tmp_path}/elsewhere", f"file://{tmp_path}/elsewhere/"):
        assert damages(tmp_path / "store", url=url) == {}


# Beside an engine.


class DisturbedInspector(StoreInspector):
    """Does something once, between the reading of a session's record and of its blocks."""

    disturb = None

    def open_blocks(self, namespace, num_blocks=1):
        disturb, self.disturb = self.disturb, None
        if disturb is not None:
            disturb()
        return super().open_blocks(namespace, num_blocks)


def test_a_session_that_changes_meanwhile_is_read_again(tmp_path, filled, driver):
    tier = open_tier(tmp_path, driver)
    with Catalog(tmp_path, NAMESPACE) as catalog, DisturbedInspector(tmp_path) as inspector:
        moved = {}

        def move() -> None:
            moved["kept"] = save(catalog, tier, KEYS["first"], [8, 9, 10], 12, seed=7, session_id="chat")
            save(catalog, tier, 64 * "f", [0], 4, seed=8)

        inspector.disturb = move
        session = inspector.find("a1")
        found = read_session(inspector, session)
        np.testing.assert_array_equal(as_bits(found.kv), as_bits(moved["kept"].kv))
        assert (found.session.record.generation, session.record.generation) == (2, 1)
        assert verify_session(inspector, session).ok


def test_a_session_that_is_forgotten_meanwhile_has_no_verdict(tmp_path, filled, driver):
    tier = open_tier(tmp_path, driver)
    with Catalog(tmp_path, NAMESPACE) as catalog, DisturbedInspector(tmp_path) as inspector:

        def forget() -> None:
            catalog.forget([KEYS["first"]])
            tier.delete_blocks([0, 1, 2]).result()

        inspector.disturb = forget
        assert [verdict.key for verdict in verify(inspector)] == [KEYS["second"], KEYS["third"], KEYS["other"]]
        tier.close()
