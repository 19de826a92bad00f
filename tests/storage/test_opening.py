"""Opening a store's directory: what is served, what is free and what is on disk agree, whatever was left there."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ca_jax.storage.catalog.catalog import Catalog
from ca_jax.storage.catalog.file import (
    CATALOG_NAME,
    CatalogCorruptError,
    set_aside,
)
from ca_jax.storage.catalog.records import Namespace, SessionRecord
from ca_jax.storage.collect import collect_garbage
from ca_jax.storage.inspector import StoreInspector
from ca_jax.storage.opening import OpenedSsd, open_ssd
from ca_jax.storage.records import BlockIoError, IoFailure
from ca_jax.storage.tiers.io import IoHandle, IoQueue
from ca_jax.storage.tokens import TokenPlaces

from .ssd_helpers import make_blocks, read
from .store_helpers import make_layout, ssd_config

LAYOUT = make_layout()
NAMESPACE = Namespace(weights="weights", layout=LAYOUT)
NUM_BLOCKS = 16

Open = Callable[..., contextlib.AbstractContextManager[OpenedSsd]]


@pytest.fixture
def opened(driver, directory) -> Open:
    """Opens the directory with the driver, and closes it again."""

    @contextlib.contextmanager
    def open_it(namespace: Namespace = NAMESPACE, num_blocks: int = NUM_BLOCKS, **fields: Any) -> Iterator[OpenedSsd]:
        config = ssd_config(directory, num_blocks, ssd_driver=driver, **fields)
        ssd = open_ssd(config, namespace, durable=False)
        try:
            yield ssd
        finally:
            ssd.tier.close()
            ssd.catalog.close()

    return open_it


def publish(ssd: OpenedSsd, key: str, block_ids: Sequence[int], used_s: float = 0.0, **changes: Any) -> SessionRecord:
    """Writes a session's blocks and publishes it, as full blocks, whosever the blocks are."""
    blocks = make_blocks(LAYOUT, len(block_ids), seed=sum(block_ids))
    ssd.tier.write_blocks(block_ids, blocks).result()
    num_tokens = len(block_ids) * LAYOUT.block_tokens
    record = SessionRecord(
        key=key,
        tenant="tenant",
        session_id=f"session {key}",
        block_ids=np.array(block_ids),
        places=TokenPlaces.dense(num_tokens),
        created_s=0.0,
        last_used_s=used_s,
    )
    record = dataclasses.replace(record, **changes)
    sums = np.zeros((len(block_ids), LAYOUT.num_layers), np.uint32)
    return ssd.catalog.publish(record, np.arange(num_tokens), sums)


def keys(ssd: OpenedSsd) -> list[str]:
    return [record.key for record in ssd.records]


def held(ssd: OpenedSsd) -> list[int]:
    return sorted({block for record in ssd.records for block in record.block_ids.tolist()})


def in_catalog(ssd: OpenedSsd) -> set[str]:
    return {record.key for record in ssd.catalog.load_all(lambda key, reason: pytest.fail(reason))}


def assert_books_agree(ssd: OpenedSsd) -> None:
    """Records, catalog and, once reclaimed, the disk say the same."""
    assert set(keys(ssd)) == in_catalog(ssd)
    assert ssd.catalog.integrity_check() == ()
    ssd.reclaim()
    assert ssd.tier.stored_block_ids() == held(ssd)


def change_catalog(directory: Path, sql: str, *values: Any) -> None:
    with contextlib.closing(sqlite3.connect(directory / CATALOG_NAME)) as db:
        db.execute(sql, values)
        db.commit()


def warnings(caplog) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)


def test_what_was_published_is_there_and_all_else_is_free(opened, caplog):
    with opened() as ssd:
        assert (ssd.records, ssd.num_lost) == ((), 0)
        publish(ssd, "a", [3, 4], used_s=2.0)
        publish(ssd, "b", [9], used_s=3.0)
        publish(ssd, "c", [7, 1], used_s=1.0)
        blocks = read(ssd.tier, [3, 4])
    with opened() as ssd:
        assert keys(ssd) == ["c", "a", "b"], "the least recently used first"
        assert ssd.records[1].block_ids.tolist() == [3, 4]
        assert np.array_equal(read(ssd.tier, [3, 4]).view(np.uint32), blocks.view(np.uint32))
        assert ssd.num_lost == 0
        assert ssd.reclaim() == 0
        assert_books_agree(ssd)
    assert not warnings(caplog)


def test_blocks_of_nobody_are_reclaimed(opened, directory):
    with opened() as ssd:
        publish(ssd, "a", [3, 4])
        publish(ssd, "gone", [5, 6])
        ssd.tier.write_blocks([0, 15], make_blocks(LAYOUT, 2)).result()
        ssd.catalog.forget(["gone"])
        assert ssd.tier.stored_block_ids() == [0, 3, 4, 5, 6, 15]
    with opened() as ssd:
        group = directory / NAMESPACE.directory_name / "zarr3" / "000000"
        if group.exists():
            (group / "c.9.0.0.0.0.0.__lock").write_text("a write that was cut short")
        assert ssd.reclaim() == 4
        assert ssd.tier.stored_block_ids() == [3, 4]
        assert ssd.reclaim() == 0
        assert not list(directory.rglob("*.__lock"))
        ssd.tier.write_blocks([5], make_blocks(LAYOUT, 1)).result()
        assert np.array_equal(read(ssd.tier, [5]).view(np.uint32), make_blocks(LAYOUT, 1).view(np.uint32))


def test_sessions_that_cannot_be_served_are_forgotten_and_their_blocks_free(opened, directory, caplog):
    with opened() as ssd:
        for number, key in enumerate(("sound", "row", "name", "sizes", "ttl", "also sound")):
            publish(ssd, key, [2 * number, 2 * number + 1], used_s=float(number))
    change_catalog(directory, "UPDATE sessions SET block_ids = zeroblob(16) WHERE key = 'row'")
    change_catalog(directory, "UPDATE sessions SET key = 'nom' WHERE key = 'name'")
    change_catalog(directory, "UPDATE sessions SET ttl_s = -1 WHERE key = 'ttl'")
    with opened() as ssd, ssd.catalog.batch():  # Its checksum is right, and yet it cannot be.
        record = dataclasses.replace(ssd.catalog.load("sizes")[0], places=TokenPlaces.dense(100))
        ssd.catalog._write(record, ssd.catalog.contents("sizes"))
    assert "3 stored sessions" in warnings(caplog)
    assert "2 since their rows in the catalog are damaged" in warnings(caplog)
    assert "1 since what the catalog says of them cannot be" in warnings(caplog)
    caplog.clear()
    with opened() as ssd:
        assert (keys(ssd), ssd.num_lost) == (["sound", "also sound"], 1)
        assert held(ssd) == [0, 1, 10, 11]
        assert_books_agree(ssd)
    assert "1 stored sessions" in warnings(caplog)
    caplog.clear()
    with opened() as ssd:
        assert (keys(ssd), ssd.num_lost) == (["sound", "also sound"], 0), "lost once, not at every start"
    assert not warnings(caplog)


def test_of_two_tenants_sessions_with_the_same_block_the_first_published_has_it(opened, caplog):
    with opened() as ssd:
        publish(ssd, "a", [0, 1], used_s=9.0)
        publish(ssd, "b", [2, 1], used_s=8.0, tenant="other")  # Overlaps a.
        publish(ssd, "c", [2, 3], used_s=7.0)  # Overlaps b, which is not there any more.
        publish(ssd, "d", [4], used_s=6.0)
        publish(ssd, "e", [5, 6], used_s=5.0)
        twice = ssd.catalog.load("e")[0]
        ssd.catalog._write(dataclasses.replace(twice, block_ids=np.array([5, 5])), ssd.catalog.contents("e"))
    with opened() as ssd:
        assert (keys(ssd), ssd.num_lost) == (["d", "c", "a"], 2)
        assert_books_agree(ssd)
    assert "1 since their blocks belong to others" in warnings(caplog)
    assert "1 since what the catalog says of them cannot be" in warnings(caplog)


def test_under_a_smaller_cap_what_lies_beyond_it_goes(opened, caplog):
    with opened() as ssd:
        publish(ssd, "within", [0, 3])
        publish(ssd, "across", [1, 4])
        publish(ssd, "beyond", [14, 15])
        ssd.tier.write_blocks([12], make_blocks(LAYOUT, 1)).result()
    with opened(num_blocks=4) as ssd:
        assert (keys(ssd), ssd.num_lost) == (["within"], 2)
        assert ssd.reclaim() == 5
        assert_books_agree(ssd)
    assert "2 since their blocks lie beyond the cap" in warnings(caplog)


def test_a_session_that_a_damaged_index_has_twice_is_served_as_it_was_published_last(opened, directory):
    key = f"{1:064x}"
    with opened() as ssd:
        publish(ssd, key, [0, 1])
    path = directory / CATALOG_NAME
    content = bytearray(path.read_bytes())
    content[content.rindex(key.encode())] ^= 1  # In the index, which lies behind the table.
    path.write_bytes(content)
    with opened() as ssd:
        assert keys(ssd) == [key]
        publish(ssd, key, [5, 6])
    with opened() as ssd:
        assert [record.block_ids.tolist() for record in ssd.records] == [[5, 6]]
        assert ssd.catalog.contents(key) is not None
        assert_books_agree(ssd)


@pytest.mark.parametrize("damage", ["garbage", "half", "table", 0, 16, 44, 68])
def test_a_catalog_that_cannot_be_read_is_moved_aside(opened, directory, caplog, damage):
    with opened() as ssd:
        publish(ssd, "a", [3, 4])
    path = directory / CATALOG_NAME
    content = bytearray(path.read_bytes())
    if damage == "garbage":
        content[:] = b"?" * len(content)
    elif damage == "half":
        del content[len(content) // 2 :]
    elif isinstance(damage, int):  # Of the header: its magic, page size, schema format, application.
        content[damage : damage + 4] = b"\xee" * 4
    else:  # Of one table only: the file opens, and fails when the sessions are read.
        with contextlib.closing(sqlite3.connect(path)) as db:
            (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'sessions'").fetchone()
        content[4096 * (page - 1) : 4096 * page] = b"?" * 4096
    path.write_bytes(content)
    with opened() as ssd:
        assert ssd.records == ()
        (moved,) = set_aside(directory)
        assert moved.read_bytes() == content
        assert str(moved) in warnings(caplog)
        assert ssd.reclaim() == 0
        assert "2 blocks stay on disk, since a catalog was set aside" in warnings(caplog)
        publish(ssd, "b", [0])
    caplog.clear()
    with opened() as ssd:
        assert keys(ssd) == ["b"]
        assert ssd.reclaim() == 0
        assert ssd.tier.stored_block_ids() == [0, 3, 4], "what that catalog tells of is there for as long as it is"
    with StoreInspector(directory) as inspector:
        collect_garbage(inspector, now_s=0.0)
    caplog.clear()
    with opened() as ssd:
        assert_books_agree(ssd)
    assert not warnings(caplog)


def test_a_catalog_deleted_while_closed_is_an_empty_store_that_leaves_blocks_alone(opened, directory, caplog):
    with opened() as ssd:
        publish(ssd, "a", [3, 4])
    (directory / CATALOG_NAME).unlink()
    with opened() as ssd:
        assert ssd.records == ()
        assert ssd.reclaim() == 0
        assert "2 blocks stay on disk, since the catalog knows no session" in warnings(caplog)
        assert ssd.tier.stored_block_ids() == [3, 4]


def test_other_namespaces_are_left_alone(opened, directory):
    other = dataclasses.replace(NAMESPACE, weights="others")
    with opened() as ssd:
        publish(ssd, "a", [3, 4])
        publish(ssd, "damaged", [3])
        ssd.tier.write_blocks([7], make_blocks(LAYOUT, 1)).result()
    change_catalog(directory, "UPDATE sessions SET num_tokens = 100 WHERE key = 'damaged'")
    with opened(other) as ssd:
        assert (ssd.records, ssd.num_lost) == ((), 0)
        publish(ssd, "a", [3])
        ssd.tier.write_blocks([8], make_blocks(LAYOUT, 1)).result()
    with opened(other) as ssd:
        assert ssd.reclaim() == 1
        assert_books_agree(ssd)
    with opened() as ssd:
        assert ssd.tier.stored_block_ids() == [3, 4, 7]
        assert (keys(ssd), ssd.num_lost) == (["a"], 1)


@pytest.mark.parametrize("obstacle", ["cap", "layout", "file"])
def test_where_the_blocks_cannot_be_used_the_directory_is_let_go(opened, driver, directory, obstacle):
    with opened() as ssd:
        publish(ssd, "a", [3])
    blocks = directory / NAMESPACE.directory_name
    moved = blocks.rename(directory / "moved")
    if obstacle == "file":
        blocks.write_text("")
    elif obstacle == "layout":
        with opened(dataclasses.replace(NAMESPACE, layout=make_layout("float16"))):
            pass
        (others,) = (path for path in directory.glob("blocks-*") if path != blocks)
        others.rename(blocks)
    errors, message = {
        "cap": (ValueError, "at least one block"),
        "layout": (ValueError, "another layout"),
        "file": (NotADirectoryError, "got a file"),
    }[obstacle]
    for _ in range(2):
        with pytest.raises(errors, match=message), opened(num_blocks=0.5 if obstacle == "cap" else NUM_BLOCKS):
            pass
    if blocks.is_dir():
        blocks.rename(directory / "others")
    else:
        blocks.unlink(missing_ok=True)
    moved.rename(blocks)
    with opened() as ssd:
        assert keys(ssd) == ["a"]


def test_corruption_that_moving_aside_does_not_end_is_told(opened, monkeypatch):
    def fails(self: Catalog, on_damaged: object) -> None:
        raise CatalogCorruptError("again")

    with monkeypatch.context() as broken:
        broken.setattr(Catalog, "load_all", fails)
        with pytest.raises(CatalogCorruptError, match="again"), opened():
            pass
    with opened():
        pass


@pytest.mark.parametrize("driver", ["zarr3"])
@pytest.mark.parametrize("url", ["memory://", "memory://store", "memory://store/"])
def test_blocks_may_be_at_a_url(opened, directory, url):
    with opened(ssd_url=url) as ssd:
        publish(ssd, "a", [3, 4])
        assert ssd.tier.stored_block_ids() == [3, 4]
        assert ssd.tier._groups[0].kvstore.url == f"{url.rstrip('/')}{'//' if url == 'memory://' else '/'}" + (
            f"{NAMESPACE.directory_name}/zarr3/000000/"
        )
        assert not list(directory.glob("blocks-*"))


@pytest.mark.parametrize("driver", ["zarr3"])
def test_blocks_at_a_url_that_names_a_directory_are_there_again(opened, tmp_path):
    url = (tmp_path / "elsewhere").as_uri()
    for expected in ([], ["a"]):
        with opened(ssd_url=url) as ssd:
            assert keys(ssd) == expected
            assert ssd.reclaim() == len(expected)
            if not expected:
                publish(ssd, "a", [3, 4])
                ssd.tier.write_blocks([5], make_blocks(LAYOUT, 1)).result()
            assert (tmp_path / "elsewhere" / NAMESPACE.directory_name / "zarr3").is_dir()


@pytest.mark.parametrize("driver", ["zarr3"])
def test_blocks_that_cannot_be_listed_are_no_error(opened, directory, caplog):
    with opened() as ssd:
        publish(ssd, "a", [3])
        (directory / NAMESPACE.directory_name).rename(directory / "moved")
        assert ssd.reclaim() == 0
    assert "cannot be listed" in warnings(caplog)


class LateHandle:
    """A move that missed its deadline, and is still under way until somebody waits for its end."""

    error = BlockIoError(IoFailure.DEADLINE, "there must be progress")
    settled = False

    def wait(self) -> bool:
        return True

    def wait_settled(self) -> bool:
        self.settled = True
        return True


class FailingTier:
    """A tier full of blocks of nobody, whose deletions fail after the first one."""

    def __init__(self) -> None:
        self.queue = IoQueue(max_in_flight=1, deadline_s=60.0)
        self.moves: list[IoHandle | LateHandle] = []
        self.num_deleted = 0

    def sweep(self) -> int:
        return 0

    def stored_block_ids(self) -> list[int]:
        return list(range(3000))

    def delete_blocks(self, block_ids: Sequence[int]) -> IoHandle | LateHandle:
        if self.moves:
            handle: IoHandle | LateHandle = LateHandle()
        else:
            self.num_deleted = len(block_ids)
            handle = self.queue.submit([])
        self.moves.append(handle)
        return handle


def test_reclaiming_ends_at_the_first_failure_with_nothing_under_way(caplog):
    tier = FailingTier()
    ssd = OpenedSsd(catalog=None, tier=tier, records=(), num_lost=0)
    assert ssd.reclaim() == tier.num_deleted > 0
    assert len(tier.moves) == 2
    assert all(move.settled for move in tier.moves)
    assert f"up to {3000 - tier.num_deleted} blocks" in warnings(caplog)
