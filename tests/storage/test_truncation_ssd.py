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

from .store_helpers import (
    LAYOUT,
    NAMESPACE,
    SLOT_BYTES,
    as_bits,
    assert_loads,
    begin_flush,
    fetch,
    ids,
    info,
    load,
    make_kv,
    make_store,
    mask_of,
    put,
    save,
    ssd_tokens,
    used_blocks,
    wait_until,
    writer_stopped,
)


def used_ssd_blocks(store: AttentionStore) -> int:
    return store.stats().ssd.used_bytes // SLOT_BYTES


def evict(store: AttentionStore, key: str, num_blocks: int = 6) -> None:
    """Has another session take all of DRAM for a moment."""
    store.enqueue("job", key)
    store.dequeue("job")  # Nobody waits for it any more.
    ticket = store.prepare_save("another", 0, range(num_blocks * LAYOUT.block_tokens))
    assert ticket is not None
    store.abort_save(ticket)
    assert store.residency(key) is Residency.SSD


@pytest.mark.parametrize(("first", "in_dram"), [(0, True), (1, False), (4, True)])
def test_every_cut_point_is_bit_exact_after_a_restart(tmp_path, first, in_dram):
    kv = make_kv(LAYOUT, 17)
    for number, num_dropped in enumerate((1, 3, 4, 10 - first)):
        options = {"ssd_dir": tmp_path / str(number)}
        store = make_store(6, **options)
        save(store, "a", ids(11), kv[:, :, :11])
        store.settle()
        if not in_dram:
            store.close()
            store = make_store(6, **options)
        kept = np.delete(np.arange(11), range(first, first + num_dropped))
        flushed = store.stats().ssd.flushed_bytes
        assert store.discard("a", mask_of(11, range(first, first + num_dropped)), b"cut") == len(kept)
        held = {token // 4 for token in kept.tolist()}
        assert used_ssd_blocks(store) == len(held), "blocks are not free at once"
        assert info(store, "a").num_dropped == num_dropped
        assert store.note("a") == b"cut"
        store.settle()
        assert store.stats().ssd.flushed_bytes == flushed, "what is there was written again"
        store.close()
        store = make_store(6, **options)
        assert (ssd_tokens(store, "a"), info(store, "a").num_dropped) == (len(kept), num_dropped)
        assert store.note("a") == b"cut"
        assert_loads(store, "a", 100 + kept, kv[:, :, kept], num_dropped)
        more = np.append(kept, np.arange(11, 17))
        assert save(store, "a", ids(17)[11:], kv[:, :, 11:], start_token=len(kept))
        store.settle()
        store.close()
        store = make_store(6, **options)
        assert_loads(store, "a", 100 + more, kv[:, :, more], num_dropped)
        store.close()


def test_a_cut_that_is_copied_together_in_dram_is_durable_before_it_is_written_anew(open_store, gates, directory):
    store = open_store(12)
    kv = put(store, "a", 24)
    kept = np.arange(3, 24, 4)
    gates[0].writes.close()
    store.discard("a", ~np.isin(np.arange(24), kept), b"cut")
    wait_until(store, lambda: info(store, "a").num_blocks == 2)
    store.poll()  # Begins the flush.
    gates[0].writes.wait_held()
    with CatalogReader(directory, NAMESPACE) as reader:
        record, contents = reader.load("a")
    assert contents.token_ids.tolist() == (100 + kept).tolist()
    assert (contents.note, record.num_blocks, record.lineage.num_dropped) == (b"cut", 6, 18)
    gates[0].writes.open()
    store.close()
    assert_loads(open_store(12), "a", 100 + kept, kv[:, :, kept], 18)


# While it moves.


def test_a_session_is_fetched_before_the_catalog_knows_that_it_was_cut(open_store, driver):
    """What is left of it is found in the older row, cut after cut; the catalog has it in the end."""
    store = open_store()
    kv = put(store, "a", 18)
    store.close()
    store = open_store()
    with writer_stopped(store):
        assert store.discard("a", mask_of(18, [0, 4, 5, 6, 7, 9, 17])) == 11
        assert store.discard("a", mask_of(11, [3, 7])) == 9
        fetch(store, "a")
        kept = np.delete(np.delete(np.arange(18), [0, 4, 5, 6, 7, 9, 17]), [3, 7])
        found = load(store, "a", 100 + kept, 8)
        assert found is not None, store.stats().misses
        np.testing.assert_array_equal(as_bits(found), as_bits(kv[:, :, kept]))
        assert used_ssd_blocks(store) == 4
    store.settle()
    store.close()
    store = open_store()
    assert_loads(store, "a", 100 + kept, kv[:, :, kept], 8)


def test_a_flush_that_fails_leaves_its_older_state_cut(open_store, gates):
    store = open_store(8)
    kv = make_kv(LAYOUT, 11)
    save(store, "a", ids(7), kv[:, :, :7])
    store.settle()
    gates[0].writes.close()
    save(store, "a", ids(11)[7:], kv[:, :, 7:], start_token=7)
    begin_flush(store, gates[0])
    assert store.discard("a", mask_of(11, [1, 2, 8]), b"cut") == 8
    gates[0].let_time_pass(60.0)
    wait_until(store, lambda: ssd_tokens(store, "a") == 5)
    assert store.stats().ssd.failed_flushes[FlushFailure.DEADLINE] == 1
    gates[0].writes.open()
    store.close()
    store = open_store(8)
    assert store.note("a") == b"cut"
    kept = np.array([0, 3, 4, 5, 6])
    assert_loads(store, "a", 100 + kept, kv[:, :, kept], 3)


# The catalog.


def test_a_session_that_cannot_be_cut_is_forgotten(open_store, monkeypatch):
    store = open_store()
    put(store, "a", 10)
    store.close()
    store = open_store()

    def fail(*_):
        raise CatalogAccessError("there must be a disk, got none")

    monkeypatch.setattr(store._ssd._mover._catalog, "cut", fail)
    assert store.discard("a", mask_of(10, [1])) == 9
    wait_until(store, lambda: store.residency("a") is Residency.ABSENT)
    assert used_ssd_blocks(store) == 0
    store.close()
    assert open_store().list() == ()


def test_a_session_in_dram_that_cannot_be_cut_on_ssd_is_written_there_anew(open_store, monkeypatch):
    store = open_store()
    kv = put(store, "a", 10)
    store.set_note("a", b"before")
    store.settle()

    def fail(*_):
        raise CatalogAccessError("there must be a disk, got none")

    with monkeypatch.context() as broken:
        broken.setattr(store._ssd._mover._catalog, "cut", fail)
        with writer_stopped(store):
            assert store.discard("a", mask_of(10, [1]), note=b"cut") == 9
            store.poll()  # Begins a flush that counts on what SSD has.
        store.settle()
    store.settle()
    store.close()
    store = open_store()
    assert (ssd_tokens(store, "a"), store.note("a")) == (9, b"cut")
    kept = np.delete(np.arange(10), 1)
    assert_loads(store, "a", np.array(ids(10))[kept], kv[:, :, kept], num_dropped=1)


def test_tools_read_cut_sessions(open_store, directory, driver):
    store = open_store()
    kv = put(store, "a", 15)
    store.discard("a", mask_of(15, [0, 1, 4, 5, 6, 7, 10, 14]))
    store.settle()
    put(store, "b", 5)
    store.close()
    kept = np.delete(np.arange(15), [0, 1, 4, 5, 6, 7, 10, 14])
    with StoreInspector(directory) as inspector:
        assert catalog_problems(inspector) == ()
        assert [verdict.ok for verdict in verify(inspector)] == [True, True]
        session = inspector.find("a")
        assert (session.record.num_tokens, session.record.lineage.num_dropped, session.record.num_blocks) == (7, 7, 3)
        read = read_session(inspector, session)
    assert read.token_ids.tolist() == (100 + kept).tolist()
    np.testing.assert_array_equal(as_bits(read.kv), as_bits(kv[:, :, kept]))


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
    kv = make_kv(LAYOUT, 16)
    for number, num_steps in enumerate(range(0, 1200, stride)):
        directory, left = tmp_path / str(number), tmp_path / f"{number} left"
        store = make_store(8, ssd_dir=directory)
        save(store, "a", ids(12), kv[:, :, :12])
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
            store.discard("a", mask_of(12, range(1, 7)), b"after")
        elif change == "truncate":
            store.truncate("a", 7, b"after")
        elif change == "publish":
            save(store, "a", ids(16)[12:], kv[:, :, 12:], start_token=12)
            store.set_note("a", b"after")
        else:
            store.drop("a")
        store.settle()
        store.close()
        if not left.exists():  # It took fewer steps.
            break
        store = make_store(8, ssd_dir=left)
        note = store.note("a")
        seen[note == b"before"] += 1
        state, dropped = (np.arange(12), 0) if note == b"before" else (np.array(after, int), num_dropped)
        assert note in (b"before", b"after" if len(after) else b"")
        assert ssd_tokens(store, "a") == len(state)
        if len(state):
            assert_loads(store, "a", 100 + state, kv[:, :, state], dropped)
        store.close()
    assert seen[True] > 3
    assert seen[False] > 0


def test_a_fetch_that_is_under_way_is_begun_anew(open_store, gates):
    store = open_store()
    kv = put(store, "a", 14)
    store.close()
    store = open_store()
    gates[1].reads.close()
    assert store.request("a")
    gates[1].reads.wait_held()
    assert store.discard("a", mask_of(14, range(1, 9))) == 6
    assert store.residency("a") is Residency.SSD
    assert used_blocks(store) == 4, "memory that is still being written was given away"
    gates[1].reads.open()
    kept = np.delete(np.arange(14), range(1, 9))
    assert_loads(store, "a", 100 + kept, kv[:, :, kept], 8)
    wait_until(store, lambda: used_blocks(store) == 3)
    assert store.stats().ssd.num_fetches == 1


@pytest.mark.parametrize("is_known", [False, True], ids=["first flush", "later flush"])
def test_a_flush_that_is_under_way_goes_on_and_is_cut_when_it_has_ended(open_store, gates, driver, is_known):
    """In between the session is cut once more, and saved on."""
    store = open_store(8, ssd_driver=driver)
    kv = make_kv(LAYOUT, 16)
    save(store, "a", ids(5), kv[:, :, :5])
    if is_known:
        store.settle()
    gates[0].writes.close()
    save(store, "a", ids(13)[5:], kv[:, :, 5:13], start_token=5)
    begin_flush(store, gates[0])
    assert store.discard("a", mask_of(13, [1, *range(4, 9)]), b"cut") == 7
    assert info(store, "a").num_blocks == 3, "of the second block nothing is left"
    assert save(store, "a", ids(16)[13:], kv[:, :, 13:], start_token=7)
    assert store.discard("a", mask_of(10, [0])) == 9
    assert ssd_tokens(store, "a") == (5 if is_known else 0)
    gates[0].writes.open()
    wait_until(store, lambda: ssd_tokens(store, "a") == 6)
    assert info(store, "a").ssd_bytes == 3 * SLOT_BYTES, "of those that were just written one is free already"
    store.settle()
    assert ssd_tokens(store, "a") == 9
    assert set(store.stats().ssd.failed_flushes.values()) == {0}
    assert store.note("a") == b"cut"
    store.close()
    store = open_store(8, ssd_driver=driver)
    assert store.note("a") == b"cut"
    kept = np.array([2, 3, 9, 10, 11, 12, 13, 14, 15])
    assert_loads(store, "a", 100 + kept, kv[:, :, kept], 7)


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_session_that_is_saved_anew_while_its_older_state_is_flushed(open_store, gates, driver, is_cut):
    """That state gets to SSD, and stays there until the new one does."""
    store = open_store(10, ssd_driver=driver)
    kv, anew = make_kv(LAYOUT, 10), make_kv(LAYOUT, 12, seed=1)
    gates[0].writes.close()
    save(store, "a", ids(10), kv)
    begin_flush(store, gates[0])
    kept = np.arange(10)
    if is_cut:
        store.discard("a", mask_of(10, [1, 2]))
        kept = np.delete(kept, [1, 2])
    store.leave_dram("a")
    assert used_blocks(store) == 3, "memory that is still being read was given away"
    ticket = store.prepare_save("a", 0, ids(12), num_dropped=7, num_plain=4)
    ticket.write_all(anew)
    gates[0].writes.open()
    wait_until(store, lambda: ssd_tokens(store, "a") == len(kept))
    store.complete_save(ticket)
    np.testing.assert_array_equal(as_bits(load(store, "a", ids(12), 7)), as_bits(anew))
    np.testing.assert_array_equal(as_bits(load(store, "a", ids(12))), as_bits(anew[:, :, :4]))
    store.settle()
    store.close()
    store = open_store(10, ssd_driver=driver)
    assert_loads(store, "a", ids(12), anew, 7)
    np.testing.assert_array_equal(as_bits(load(store, "a", ids(12))), as_bits(anew[:, :, :4]))


def test_blocks_that_a_cut_freed_go_to_other_sessions(open_store, driver):
    """In the order in which the catalog is told: what is written there is never taken for what was."""
    store = open_store(12, ssd_blocks=6, ssd_driver=driver)
    kv = put(store, "a", 24)
    with writer_stopped(store):
        assert store.discard("a", mask_of(24, range(4, 16))) == 12
        other = make_kv(LAYOUT, 12, seed=1)
        save(store, "b", ids(12, 500), other)
        store.poll()
    store.settle()
    assert used_ssd_blocks(store) == 6
    store.close()
    store = open_store(12, ssd_blocks=6, ssd_driver=driver)
    kept = np.delete(np.arange(24), range(4, 16))
    assert_loads(store, "a", 100 + kept, kv[:, :, kept], 12)
    assert_loads(store, "b", ids(12, 500), other)


@pytest.mark.parametrize("note", [None, b"cut"])
def test_a_state_that_was_given_up_comes_to_ssd_no_more_once_it_is_cut(tmp_path, driver, note):
    store = make_store(6, ssd_dir=tmp_path, ssd_driver=driver)
    with writer_stopped(store):
        save(store, "a", ids(11), make_kv(LAYOUT, 11))
        store.poll()
        store.leave_dram("a")
        assert store.truncate("a", 3, note) == 0
    store.settle()
    assert info(store, "a") is None
    assert used_ssd_blocks(store) == 0
