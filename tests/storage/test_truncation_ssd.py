"""Sessions on SSD that tokens are forgotten from: durably, while they move too, and never as half of a change."""

from __future__ import annotations

import collections
import itertools
import shutil

import numpy as np
import pytest

from ca_jax.storage.catalog.catalog import CatalogReader
from ca_jax.storage.catalog.file import CatalogAccessError
from ca_jax.storage.inspector import StoreInspector, catalog_problems, read_session, verify
from ca_jax.storage.records import FlushFailure, Residency
from ca_jax.storage.store import AttentionStore

from . import store_helpers as kit


def used_ssd_blocks(store: AttentionStore) -> int:
    return store.stats().ssd.used_bytes // kit.SLOT_BYTES


@pytest.mark.parametrize(("first", "in_dram"), [(0, True), (1, False), (4, True)])
def test_every_cut_point_is_bit_exact_after_a_restart(tmp_path, first, in_dram):
    kv = kit.make_kv(kit.LAYOUT, 17)
    for number, num_dropped in enumerate((1, 3, 4, 10 - first)):
        options = {"ssd_dir": tmp_path / str(number)}
        store = kit.make_store(6, **options)
        kit.save(store, "a", kit.ids(11), kv[:, :, :11])
        store.settle()
        if not in_dram:
            store.close()
            store = kit.make_store(6, **options)
        kept = np.delete(np.arange(11), range(first, first + num_dropped))
        flushed = store.stats().ssd.flushed_bytes
        assert store.discard("a", kit.mask_of(11, range(first, first + num_dropped)), b"cut") == len(kept)
        held = {token // 4 for token in kept.tolist()}
        assert used_ssd_blocks(store) == len(held), "blocks are not free at once"
        assert kit.info(store, "a").num_dropped == num_dropped
        assert store.note("a") == b"cut"
        store.settle()
        assert store.stats().ssd.flushed_bytes == flushed, "what is there was written again"
        store.close()
        store = kit.make_store(6, **options)
        assert (kit.ssd_tokens(store, "a"), kit.info(store, "a").num_dropped) == (len(kept), num_dropped)
        assert store.note("a") == b"cut"
        kit.assert_loads(store, "a", 100 + kept, kv[:, :, kept], num_dropped)
        more = np.append(kept, np.arange(11, 17))
        assert kit.save(store, "a", kit.ids(17)[11:], kv[:, :, 11:], start_token=len(kept))
        store.settle()
        store.close()
        store = kit.make_store(6, **options)
        kit.assert_loads(store, "a", 100 + more, kv[:, :, more], num_dropped)
        store.close()


def test_a_cut_that_is_copied_together_in_dram_is_durable_before_it_is_written_anew(open_store, gates, directory):
    store = open_store(12)
    kv = kit.put(store, "a", 24)
    kept = np.arange(3, 24, 4)
    gates[0].writes.close()
    store.discard("a", ~np.isin(np.arange(24), kept), b"cut")
    kit.wait_until(store, lambda: kit.info(store, "a").num_blocks == 2)
    store.poll()  # Begins the flush.
    gates[0].writes.wait_held()
    with CatalogReader(directory, kit.NAMESPACE) as reader:
        record, contents = reader.load("a")
    assert contents.token_ids.tolist() == (100 + kept).tolist()
    assert (contents.note, record.num_blocks, record.lineage.num_dropped) == (b"cut", 6, 18)
    gates[0].writes.open()
    kit.assert_loads(open_store(12), "a", 100 + kept, kv[:, :, kept], 18)


# While it moves.


def test_a_flush_that_fails_leaves_its_older_state_cut(open_store, gates):
    store = open_store(8)
    kv = kit.make_kv(kit.LAYOUT, 11)
    kit.save(store, "a", kit.ids(7), kv[:, :, :7])
    store.settle()
    gates[0].writes.close()
    kit.save(store, "a", kit.ids(11)[7:], kv[:, :, 7:], start_token=7)
    kit.begin_flush(store, gates[0])
    assert store.discard("a", kit.mask_of(11, [1, 2, 8]), b"cut") == 8
    gates[0].let_time_pass(60.0)
    kit.wait_until(store, lambda: kit.ssd_tokens(store, "a") == 5)
    assert store.stats().ssd.failed_flushes[FlushFailure.DEADLINE] == 1
    gates[0].writes.open()
    store = open_store(8)
    assert store.note("a") == b"cut"
    kept = np.array([0, 3, 4, 5, 6])
    kit.assert_loads(store, "a", 100 + kept, kv[:, :, kept], 3)


# The catalog.


def test_a_session_that_cannot_be_cut_is_forgotten(open_store, monkeypatch):
    store = open_store()
    kit.put(store, "a", 10)
    store = open_store()

    def fail(*_):
        raise CatalogAccessError("there must be a disk, got none")

    monkeypatch.setattr(store._ssd._mover._catalog, "cut", fail)
    assert store.discard("a", kit.mask_of(10, [1])) == 9
    kit.wait_until(store, lambda: store.residency("a") is Residency.ABSENT)
    assert used_ssd_blocks(store) == 0
    assert open_store().list() == ()


def test_a_session_in_dram_that_cannot_be_cut_on_ssd_is_written_there_anew(open_store, monkeypatch):
    store = open_store()
    kv = kit.put(store, "a", 10)
    store.set_note("a", b"before")
    store.settle()

    def fail(*_):
        raise CatalogAccessError("there must be a disk, got none")

    with monkeypatch.context() as broken:
        broken.setattr(store._ssd._mover._catalog, "cut", fail)
        with kit.writer_stopped(store):
            assert store.discard("a", kit.mask_of(10, [1]), note=b"cut") == 9
            store.poll()  # Begins a flush that counts on what SSD has.
        store.settle()
    store.settle()
    store = open_store()
    assert (kit.ssd_tokens(store, "a"), store.note("a")) == (9, b"cut")
    kept = np.delete(np.arange(10), 1)
    kit.assert_loads(store, "a", np.array(kit.ids(10))[kept], kv[:, :, kept], num_dropped=1)


def test_tools_read_cut_sessions(open_store, directory, driver):
    store = open_store()
    kv = kit.put(store, "a", 15)
    store.discard("a", kit.mask_of(15, [0, 1, 4, 5, 6, 7, 10, 14]))
    store.settle()
    kit.put(store, "b", 5)
    store.close()
    kept = np.delete(np.arange(15), [0, 1, 4, 5, 6, 7, 10, 14])
    with StoreInspector(directory) as inspector:
        assert catalog_problems(inspector) == ()
        assert [verdict.ok for verdict in verify(inspector)] == [True, True]
        session = inspector.find("a")
        assert (session.record.num_tokens, session.record.lineage.num_dropped, session.record.num_blocks) == (7, 7, 3)
        read = read_session(inspector, session)
    assert read.token_ids.tolist() == (100 + kept).tolist()
    kit.assert_same(read.groups[0], kv[:, :, kept])


@pytest.mark.parametrize(
    ("change", "after", "num_dropped", "stride"),
    [
        ("cut", [0, *range(7, 12)], 6, 40),
        ("cut on SSD", [0, *range(7, 12)], 6, 40),
        ("truncate", range(7), 0, 40),
        ("publish", range(16), 0, 40),
        ("forget", [], 0, 5),
    ],
)
def test_at_any_moment_of_a_change_the_disk_has_one_state_or_the_other(tmp_path, change, after, num_dropped, stride):
    """What the disk holds between two steps of the catalog's statements is what a process leaves that dies there."""
    seen = collections.Counter()
    kv = kit.make_kv(kit.LAYOUT, 16)
    for number, num_steps in enumerate(range(0, 1200, stride)):
        directory, left = tmp_path / str(number), tmp_path / f"{number} left"
        store = kit.make_store(8, ssd_dir=directory)
        kit.save(store, "a", kit.ids(12), kv[:, :, :12])
        store.set_note("a", b"before")
        store.settle()
        if change == "cut on SSD":
            store.leave_dram("a")
        steps = itertools.count()
        store._ssd._mover._catalog._db.set_progress_handler(
            lambda steps=steps, stop=num_steps, there=(directory, left): (
                shutil.copytree(*there) and None if next(steps) == stop else None
            ),
            1,
        )
        if change.startswith("cut"):
            store.discard("a", kit.mask_of(12, range(1, 7)), b"after")
        elif change == "truncate":
            store.truncate("a", 7, b"after")
        elif change == "publish":
            kit.save(store, "a", kit.ids(16)[12:], kv[:, :, 12:], start_token=12)
            store.set_note("a", b"after")
        else:
            store.drop("a")
        store.settle()
        store.close()
        if not left.exists():  # It took fewer steps.
            break
        store = kit.make_store(8, ssd_dir=left)
        note = store.note("a")
        seen[note == b"before"] += 1
        state, dropped = (np.arange(12), 0) if note == b"before" else (np.array(after, int), num_dropped)
        assert note in (b"before", b"after" if len(after) else b"")
        assert kit.ssd_tokens(store, "a") == len(state)
        if len(state):
            kit.assert_loads(store, "a", 100 + state, kv[:, :, state], dropped)
        store.close()
    assert seen[True] > 3
    assert seen[False] > 0


@pytest.mark.parametrize("note", [None, b"cut"])
def test_a_state_that_was_given_up_comes_to_ssd_no_more_once_it_is_cut(tmp_path, driver, note):
    store = kit.make_store(6, ssd_dir=tmp_path, ssd_driver=driver)
    with kit.writer_stopped(store):
        kit.save(store, "a", kit.ids(11), kit.make_kv(kit.LAYOUT, 11))
        store.poll()
        store.leave_dram("a")
        assert store.truncate("a", 3, note) == 0
    store.settle()
    assert kit.info(store, "a") is None
    assert used_ssd_blocks(store) == 0
