"""A store's directory is told of as it is, beside an engine and after one, and what is damaged in it is found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ca_jax.storage.catalog.catalog import Catalog
from ca_jax.storage.catalog.file import CATALOG_NAME, CatalogAccessError, CatalogCorruptError
from ca_jax.storage.inspector import (
    DamagedSessionError,
    StoreDirectoryError,
    StoredNameError,
    StoreInspector,
    catalog_problems,
    read_session,
    verify,
    verify_session,
)
from ca_jax.storage.records import IoFailure
from ca_jax.storage.tiers.formats import Zarr3Tier

from . import store_helpers as kit


def damages(path: Path, **options) -> dict[str, list[tuple]]:
    """What `verify` finds: key to reasons and blocks."""
    with StoreInspector(path, **options) as inspector:
        return {
            verdict.key: [(damage.reason, damage.index, damage.block_id) for damage in verdict.damages]
            for verdict in verify(inspector)
            if not verdict.ok
        }


# What there is.


def test_a_session_is_found_by_id_key_or_beginning_of_its_key(tmp_path, filled):
    with StoreInspector(tmp_path) as inspector:
        for name, key in (
            ("notes", "second"),
            (kit.KEYS["third"], "third"),
            ("b", "third"),
            ("c4", "other"),
            ("x", "other"),
        ):
            assert inspector.find(name).record.key == kit.KEYS[key]
        assert inspector.find("chat", "bob").record.key == kit.KEYS["third"]
        with pytest.raises(StoredNameError, match=r"(?s)got 2 for 'chat'.*a10.*'alice'.*b30.*'bob'"):
            inspector.find("chat")
        with pytest.raises(StoredNameError, match="got 2 for 'a'"):
            inspector.find("a")
        for name, tenant in (("nobody's", None), ("", None), ("x", "alice")):
            with pytest.raises(StoredNameError, match="must be the id"):
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


# Whether it is sound.


def test_many_blocks_are_read_in_order(tmp_path, driver):
    block_ids = [15, 3, 9, 0, 1, 12, 4, 14, 7, 2, 11, 5]
    tier = kit.open_tier(tmp_path, driver)
    with Catalog(tmp_path, kit.NAMESPACE) as catalog:
        kept = kit.publish(catalog, tier, kit.KEYS["first"], block_ids, 4 * 11 + 1)
    with StoreInspector(tmp_path) as inspector:
        found = read_session(inspector, inspector.find("a"))
        kit.assert_same(found.groups[0], kept.kv)
    tier.delete_blocks([11, 12])
    assert damages(tmp_path) == {kit.KEYS["first"]: [(IoFailure.MISSING, 5, 12), (IoFailure.MISSING, 10, 11)]}
    tier.close()


@pytest.mark.parametrize("damage", ["flipped", "swapped", "written over"])
def test_damaged_blocks_are_found_and_placed(tmp_path, filled, driver, damage):
    tier, corrupt = kit.open_tier(tmp_path, driver), IoFailure.CORRUPT
    (file, start) = kit.Disk(driver, tmp_path / kit.NAMESPACE.directory_name).place(6)
    if damage == "flipped":
        data = bytearray(file.read_bytes())
        data[start + 100] ^= 0x40
        file.write_bytes(data)
        expected = {"third": [(corrupt, 2, 6)]}
    elif damage == "swapped":
        tier.write_blocks([7, 1], kit.read(tier, [1, 7]))
        expected = {"first": [(corrupt, 1, 1)], "third": [(corrupt, 0, 7)]}
    else:
        tier.write_blocks([3], np.zeros((1, *kit.LAYOUT.block_shape), kit.LAYOUT.numpy_dtype))
        expected = {"second": [(corrupt, 0, 3)]}
    tier.close()
    assert damages(tmp_path) == {kit.KEYS[name]: found for name, found in expected.items()}
    with StoreInspector(tmp_path) as inspector:
        for name, kept in filled.items():
            session = next(each for each in inspector.sessions().sound if each.record.key == kit.KEYS[name])
            if name in expected:
                with pytest.raises(DamagedSessionError, match=rf"'{kept.record.session_id}': .* \((corrupt|missing)\)"):
                    read_session(inspector, session)
                continue
            found = read_session(inspector, session)
            assert found.token_ids.tolist() == kept.token_ids.tolist()
            np.testing.assert_array_equal(kit.as_bits(found.groups[0]), kit.as_bits(kept.kv), strict=True)


def test_missing_directories_are_found_and_not_made(tmp_path, filled, driver):
    for namespace, name in ((kit.NAMESPACE, "blocks moved"), (kit.OTHER_NAMESPACE, "others moved")):
        (tmp_path / namespace.directory_name).rename(tmp_path / name)
    assert damages(tmp_path) == {key: [(IoFailure.MISSING, None, None)] for key in kit.KEYS.values()}
    assert not (tmp_path / kit.NAMESPACE.directory_name).exists()


@pytest.mark.parametrize(("tenant", "found"), [("alice", "must have the checksums"), ("bob", "of another")])
def test_a_block_that_two_sessions_hold_and_do_not_share_is_a_problem_of_the_catalog(tmp_path, tenant, found):
    tier = kit.open_tier(tmp_path, "zarr3")
    with Catalog(tmp_path, kit.NAMESPACE) as catalog:
        kit.publish(catalog, tier, kit.KEYS["first"], [0, 1], 8)
        kit.publish(catalog, tier, kit.KEYS["second"], [1], 4, seed=1, tenant=tenant)
    tier.close()
    with StoreInspector(tmp_path) as inspector:
        (problem,) = catalog_problems(inspector)
    assert f"session {kit.KEYS['first']!r}" in problem.found
    assert found in problem.found
    assert problem.key == kit.KEYS["second"]
    assert damages(tmp_path) == {kit.KEYS["first"]: [(IoFailure.CORRUPT, 1, 1)]}


# How blocks are kept.


def test_a_group_without_metadata_is_read_and_one_of_another_layout_is_not(tmp_path):
    kit.fill(tmp_path, "zarr3")
    metadata = kit.block_file(tmp_path, 0).with_name("zarr.json")
    metadata.unlink()
    assert damages(tmp_path) == {}
    assert not metadata.exists()
    Zarr3Tier(kit.make_layout(block_tokens=8), tmp_path / "eight", 4096 * 4).close()
    metadata.write_bytes((tmp_path / "eight" / "zarr3" / "000000" / "zarr.json").read_bytes())
    assert damages(tmp_path) == {
        kit.KEYS[name]: [(IoFailure.CORRUPT, None, None)] for name in ("first", "second", "third")
    }


def test_a_tier_of_what_exists_writes_nothing(tmp_path, filled, driver):
    before = kit.files_of(tmp_path)
    with StoreInspector(tmp_path) as inspector:
        tier = inspector.open_blocks(kit.NAMESPACE)
        assert set(tier.stored_block_ids()) == {0, 1, 2, 3, 5, 6, 7}
        with pytest.raises(ValueError, match="must have a tier that may write"):
            tier.write_blocks([0], np.zeros((1, *kit.LAYOUT.block_shape), kit.LAYOUT.numpy_dtype))
        assert kit.files_of(tmp_path) == before
        tier.delete_blocks([7, 3, 4, 1_000_000])  # Those that are not there, too.
        assert set(tier.stored_block_ids()) == {0, 1, 2, 5, 6}


def test_blocks_of_both_drivers_want_to_be_told_apart(tmp_path):
    kit.fill(tmp_path, "zarr3")
    kit.open_tier(tmp_path, "raw").close()
    with pytest.raises(StoreDirectoryError, match="blocks of both drivers"):
        damages(tmp_path)
    assert damages(tmp_path, driver="zarr3") == {}
    assert set(damages(tmp_path, driver="raw")) == set(kit.KEYS.values())


def test_blocks_are_read_from_a_url(tmp_path):
    kit.fill(tmp_path / "store", "zarr3")
    for namespace in (kit.NAMESPACE, kit.OTHER_NAMESPACE):
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        directory = tmp_path / "store" / namespace.directory_name
        directory.rename(tmp_path / "elsewhere" / namespace.directory_name)
    assert len(damages(tmp_path / "store")) == len(kit.KEYS)
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
    tier = kit.open_tier(tmp_path, driver)
    with Catalog(tmp_path, kit.NAMESPACE) as catalog, DisturbedInspector(tmp_path) as inspector:
        moved = {}

        def move() -> None:
            moved["kept"] = kit.publish(catalog, tier, kit.KEYS["first"], [8, 9, 10], 12, seed=7, session_id="chat")
            kit.publish(catalog, tier, 64 * "f", [0], 4, seed=8)

        inspector.disturb = move
        session = inspector.find("a1")
        found = read_session(inspector, session)
        kit.assert_same(found.groups[0], moved["kept"].kv)
        assert (found.session.record.generation, session.record.generation) == (2, 1)
        assert verify_session(inspector, session).ok


def test_a_session_that_is_forgotten_meanwhile_has_no_verdict(tmp_path, filled, driver):
    tier = kit.open_tier(tmp_path, driver)
    with Catalog(tmp_path, kit.NAMESPACE) as catalog, DisturbedInspector(tmp_path) as inspector:

        def forget() -> None:
            catalog.forget([kit.KEYS["first"]])
            tier.delete_blocks([0, 1, 2])

        inspector.disturb = forget
        assert [verdict.key for verdict in verify(inspector)] == [
            kit.KEYS["second"],
            kit.KEYS["third"],
            kit.KEYS["other"],
        ]
        tier.close()
