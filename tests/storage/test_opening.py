"""Opening a store's directory: what is served, what is free and what is on disk agree, whatever was left there."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
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
from ca_jax.storage.catalog.records import Namespace
from ca_jax.storage.collect import collect_garbage
from ca_jax.storage.inspector import StoreInspector
from ca_jax.storage.opening import OpenedSsd, open_ssd
from ca_jax.storage.tokens import TokenPlaces

from .store_helpers import LAYOUT, NAMESPACE, PATIENCE_S, make_blocks, publish, read, ssd_config

NUM_BLOCKS = 16

Open = Callable[..., contextlib.AbstractContextManager[OpenedSsd]]


@pytest.fixture
def opened(ssd_driver, directory) -> Open:
    """Opens the directory, and closes it again."""

    @contextlib.contextmanager
    def open_it(namespace: Namespace = NAMESPACE, num_blocks: int = NUM_BLOCKS, **fields: Any) -> Iterator[OpenedSsd]:
        config = ssd_config(directory, num_blocks, ssd_driver=ssd_driver, **fields)
        ssd = open_ssd(config, namespace)
        try:
            yield ssd
        finally:
            ssd.tier.close()
            ssd.catalog.close()

    return open_it


def keys(ssd: OpenedSsd) -> list[str]:
    return [record.key for record in ssd.records]


def held(ssd: OpenedSsd) -> list[int]:
    return sorted({block for record in ssd.records for block in record.block_ids.tolist()})


def assert_books_agree(ssd: OpenedSsd) -> None:
    """Records, catalog and, once reclaimed, the disk say the same."""
    in_catalog = {record.key for record in ssd.catalog.load_all(lambda key, reason: pytest.fail(reason))}
    assert set(keys(ssd)) == in_catalog
    assert ssd.catalog.integrity_check() == ()
    ssd.reclaim()
    assert ssd.tier.stored_block_ids() == held(ssd)


def change_catalog(directory: Path, sql: str, *values: Any) -> None:
    with contextlib.closing(sqlite3.connect(directory / CATALOG_NAME)) as db:
        db.execute(sql, values)
        db.commit()


def warnings(caplog) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)


def test_blocks_of_nobody_are_reclaimed(opened, driver, directory):
    with opened() as ssd:
        publish(ssd.catalog, ssd.tier, "a", [3, 4])
        publish(ssd.catalog, ssd.tier, "gone", [5, 6])
        ssd.tier.write_blocks([0, 15], make_blocks(LAYOUT, 2))
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
        ssd.tier.write_blocks([5], make_blocks(LAYOUT, 1))
        assert np.array_equal(read(ssd.tier, [5]).view(np.uint32), make_blocks(LAYOUT, 1).view(np.uint32))


def test_sessions_that_cannot_be_served_are_forgotten_and_their_blocks_free(opened, directory, caplog):
    with opened() as ssd:
        for number, key in enumerate(("sound", "row", "name", "sizes", "ttl", "also sound")):
            publish(ssd.catalog, ssd.tier, key, [2 * number, 2 * number + 1], last_used_s=float(number))
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
        publish(ssd.catalog, ssd.tier, "a", [0, 1], last_used_s=9.0)
        publish(ssd.catalog, ssd.tier, "b", [2, 1], last_used_s=8.0, tenant="other")  # Overlaps a.
        publish(ssd.catalog, ssd.tier, "c", [2, 3], last_used_s=7.0)  # Overlaps b, which is not there any more.
        publish(ssd.catalog, ssd.tier, "d", [4], last_used_s=6.0)
        publish(ssd.catalog, ssd.tier, "e", [5, 6], last_used_s=5.0)
        twice = ssd.catalog.load("e")[0]
        ssd.catalog._write(dataclasses.replace(twice, block_ids=np.array([5, 5])), ssd.catalog.contents("e"))
    with opened() as ssd:
        assert (keys(ssd), ssd.num_lost) == (["d", "c", "a"], 2)
        assert_books_agree(ssd)
    assert "1 since their blocks belong to others" in warnings(caplog)
    assert "1 since what the catalog says of them cannot be" in warnings(caplog)


def test_under_a_smaller_cap_what_lies_beyond_it_goes(opened, driver, caplog):
    with opened() as ssd:
        publish(ssd.catalog, ssd.tier, "within", [0, 3])
        publish(ssd.catalog, ssd.tier, "across", [1, 4])
        publish(ssd.catalog, ssd.tier, "beyond", [14, 15])
        ssd.tier.write_blocks([12], make_blocks(LAYOUT, 1))
    with opened(num_blocks=4) as ssd:
        assert (keys(ssd), ssd.num_lost) == (["within"], 2)
        assert ssd.reclaim() == 5
        assert_books_agree(ssd)
    assert "2 since their blocks lie beyond the cap" in warnings(caplog)


def test_a_session_that_a_damaged_index_has_twice_is_served_as_it_was_published_last(opened, directory):
    key = f"{1:064x}"
    with opened() as ssd:
        publish(ssd.catalog, ssd.tier, key, [0, 1])
    path = directory / CATALOG_NAME
    content = bytearray(path.read_bytes())
    content[content.rindex(key.encode())] ^= 1  # In the index, which lies behind the table.
    path.write_bytes(content)
    with opened() as ssd:
        assert keys(ssd) == [key]
        publish(ssd.catalog, ssd.tier, key, [5, 6])
    with opened() as ssd:
        assert [record.block_ids.tolist() for record in ssd.records] == [[5, 6]]
        assert ssd.catalog.contents(key) is not None
        assert_books_agree(ssd)


@pytest.mark.parametrize(
    "damage", ["garbage", "half", "short", "table", "other database", "other tables", 0, 16, 44, 68]
)
def test_a_catalog_that_cannot_be_read_is_moved_aside(opened, directory, caplog, damage):
    with opened() as ssd:
        publish(ssd.catalog, ssd.tier, "a", [3, 4])
    path = directory / CATALOG_NAME
    content = bytearray(path.read_bytes())
    if damage == "garbage":
        content[:] = b"?" * len(content)
    elif damage == "half":
        del content[len(content) // 2 :]
    elif damage == "short":
        del content[1000:]
    elif isinstance(damage, int):  # Of the header: its magic, page size, schema format, application.
        content[damage : damage + 4] = b"\xee" * 4
    elif damage == "table":  # Of one table only: the file opens, and fails when the sessions are read.
        with contextlib.closing(sqlite3.connect(path)) as db:
            (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'sessions'").fetchone()
        content[4096 * (page - 1) : 4096 * page] = b"?" * 4096
    else:
        if damage == "other database":
            path.unlink()
        change_catalog(directory, "CREATE TABLE others (a)")
        content = bytearray(path.read_bytes())
    path.write_bytes(content)
    with pytest.raises(CatalogCorruptError), StoreInspector(directory) as inspector:
        inspector.sessions()
    with opened() as ssd:
        assert ssd.records == ()
        (moved,) = set_aside(directory)
        assert moved.read_bytes() == content
        assert str(moved) in warnings(caplog)
        assert ssd.reclaim() == 0
        assert "2 blocks stay on disk, since a catalog was set aside" in warnings(caplog)
        publish(ssd.catalog, ssd.tier, "b", [0])
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
        publish(ssd.catalog, ssd.tier, "a", [3, 4])
    (directory / CATALOG_NAME).unlink()
    with opened() as ssd:
        assert ssd.records == ()
        assert ssd.reclaim() == 0
        assert "2 blocks stay on disk, since the catalog knows no session" in warnings(caplog)
        assert ssd.tier.stored_block_ids() == [3, 4]


def test_where_the_blocks_cannot_be_used_the_directory_is_let_go(opened):
    with opened() as ssd:
        publish(ssd.catalog, ssd.tier, "a", [3])
    for _ in range(2):
        with pytest.raises(ValueError, match="at least one block"), opened(num_blocks=0.5):
            pass
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


@pytest.mark.parametrize("url", ["memory://", "memory://store", "memory://store/"])
def test_blocks_may_be_at_a_url(opened, directory, url):
    with opened(ssd_url=url) as ssd:
        publish(ssd.catalog, ssd.tier, "a", [3, 4])
        assert ssd.tier.stored_block_ids() == [3, 4]
        assert ssd.tier._groups[0].kvstore.url == f"{url.rstrip('/')}{'//' if url == 'memory://' else '/'}" + (
            f"{NAMESPACE.directory_name}/zarr3/000000/"
        )
        assert not list(directory.glob("blocks-*"))


def test_blocks_that_cannot_be_listed_are_no_error(opened, directory, caplog):
    with opened() as ssd:
        publish(ssd.catalog, ssd.tier, "a", [3])
        (directory / NAMESPACE.directory_name).rename(directory / "moved")
        assert ssd.reclaim() == 0
    assert "cannot be listed" in warnings(caplog)


def test_reclaiming_ends_at_the_first_failure_with_nothing_under_way(opened, monkeypatch, caplog):
    with opened() as ssd:
        publish(ssd.catalog, ssd.tier, "a", [9])
        ssd.tier.write_blocks([*range(6)], make_blocks(LAYOUT, 6))
    with opened() as ssd:
        delete, is_begun = ssd.tier._delete, threading.Event()

        def fail_or_be_slow(block: int) -> None:
            if block == 2:
                assert is_begun.wait(PATIENCE_S)
                raise OSError("broken")
            if block == 3:
                is_begun.set()
                time.sleep(0.02)
            delete(block)

        monkeypatch.setattr(ssd.tier, "_delete", fail_or_be_slow)
        assert ssd.reclaim() == 0
        stored = ssd.tier.stored_block_ids()
        assert {2, 9} <= set(stored)
        assert 3 not in stored
    assert "up to 6 blocks that no session refers to stay on disk" in warnings(caplog)
