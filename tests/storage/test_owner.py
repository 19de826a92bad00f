"""Blocks at a URL are one directory's: no other writes or deletes there, unless it is told to take them over."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ca_jax.storage.collect import collect_garbage, drop_session, take_over_blocks
from ca_jax.storage.inspector import StoreInspector
from ca_jax.storage.tiers.formats import Zarr3Tier
from ca_jax.storage.tiers.owner import ID_NAME, OWNER_NAME, BlocksOwnedError, claim_blocks

from .store_helpers import LAYOUT, assert_loads, ids, put, ssd_tokens


@pytest.fixture
def url(tmp_path) -> str:
    return (tmp_path / "blocks").as_uri()


def owner_mark(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "blocks").glob(f"blocks-*/zarr3/{OWNER_NAME}")
    return found


@pytest.fixture
def open_at(open_store, url):
    """Opens stores of several directories with blocks at one URL."""
    return lambda directory: open_store(ssd_dir=directory, ssd_url=url)


def test_another_directory_is_refused_by_name_and_destroys_nothing(open_at, tmp_path, url):
    first = open_at(tmp_path / "first")
    kv = put(first, "a", 9)
    for _ in range(2):  # The second time its catalog knows the namespace, and still no session.
        with pytest.raises(BlocksOwnedError, match=f"got {tmp_path / 'first'} on .* claim"):
            open_at(tmp_path / "second")
    first.close()
    first = open_at(tmp_path / "first")
    assert_loads(first, "a", ids(9), kv)
    first.close()
    with StoreInspector(tmp_path / "second", url=url) as second, pytest.raises(BlocksOwnedError):
        collect_garbage(second, now_s=0.0)
    assert_loads(open_at(tmp_path / "first"), "a", ids(9), kv)


def test_a_directory_that_was_copied_is_refused_and_one_that_was_moved_is_not(open_at, tmp_path, url):
    first = open_at(tmp_path / "first")
    kv = put(first, "a", 9)
    first.close()
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    with pytest.raises(BlocksOwnedError):
        open_at(tmp_path / "copy")
    with StoreInspector(tmp_path / "copy", url=url) as copy, pytest.raises(BlocksOwnedError):
        drop_session(copy, copy.find("a"))
    (tmp_path / "first").rename(tmp_path / "moved")
    assert_loads(open_at(tmp_path / "moved"), "a", ids(9), kv)


def test_blocks_of_a_directory_that_is_gone_are_taken_over_on_demand(open_at, tmp_path, url):
    first = open_at(tmp_path / "first")
    put(first, "a", 9)
    first.close()
    shutil.rmtree(tmp_path / "first")
    with pytest.raises(BlocksOwnedError):
        open_at(tmp_path / "second")
    with StoreInspector(tmp_path / "second", url=url) as inspector:
        (taken,) = take_over_blocks(inspector)
        assert (taken.num_blocks, str(tmp_path / "first") in str(taken.owner)) == (3, True)
        assert take_over_blocks(inspector)[0].owner != taken.owner
    second = open_at(tmp_path / "second")
    kv = put(second, "b", 5)
    assert ssd_tokens(second, "a") == 0
    second.close()
    assert_loads(open_at(tmp_path / "second"), "b", ids(5), kv)


def test_blocks_without_a_mark_are_adopted_by_who_knows_them_alone(open_at, tmp_path):
    first = open_at(tmp_path / "first")
    kv = put(first, "a", 9)
    first.close()
    owner_mark(tmp_path).unlink()  # As an older version left them.
    (tmp_path / "first" / ID_NAME).unlink()
    with pytest.raises(BlocksOwnedError, match="3 blocks that this directory knows nothing of"):
        open_at(tmp_path / "second")
    assert_loads(open_at(tmp_path / "first"), "a", ids(9), kv)
    assert owner_mark(tmp_path).exists()


def test_of_two_that_come_at_once_one_is_refused(tmp_path, url):
    tier = Zarr3Tier(LAYOUT, url, 4096)

    class Overtaken:
        """Between its look at the mark and its own there comes another."""

        url = tier.kvstore.url
        write = tier.kvstore.write

        def read(self, key: str):
            found = tier.kvstore.read(key)
            found.result()
            if not (tmp_path / "other" / ID_NAME).exists():
                claim_blocks(tier.kvstore, tmp_path / "other", list, knows_any=bool)
            return found

    for name in ("other", "slow"):
        (tmp_path / name).mkdir()
    with pytest.raises(BlocksOwnedError, match=str(tmp_path / "other")):
        claim_blocks(Overtaken(), tmp_path / "slow", list, knows_any=bool)
    claim_blocks(tier.kvstore, tmp_path / "other", list, knows_any=bool)
    tier.close()


def test_a_mark_that_cannot_be_read_is_another_owners(open_at, tmp_path):
    open_at(tmp_path / "first").close()
    for text in (b"", b"[1]", b'{"format": 2, "owner": "?"}'):
        owner_mark(tmp_path).write_bytes(text)
        with pytest.raises(BlocksOwnedError, match="a mark of no known format"):
            open_at(tmp_path / "first")
