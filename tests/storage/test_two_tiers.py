"""The AttentionStore with an SSD, told at a few blocks of four tokens: what is written, what comes back, what outlives
the store, and what faults and races leave behind.
"""

from __future__ import annotations

import numpy as np
import pytest

from ca_jax.storage.catalog.catalog import CatalogReader
from ca_jax.storage.catalog.file import CatalogFullError, CatalogLateError
from ca_jax.storage.records import FlushFailure, Note, Residency
from ca_jax.telemetry.timeline import Timeline

from . import store_helpers as kit

# Flushing.


def test_a_flush_writes_only_what_is_new(open_store, driver):
    store = open_store()
    kv = kit.make_kv(kit.LAYOUT, 10)
    kit.save(store, "a", kit.ids(6), kv[:, :, :6])
    assert kit.ssd_tokens(store, "a") == 0
    store.settle()
    assert kit.ssd_tokens(store, "a") == 6
    assert store.stats().ssd.flushed_bytes == 2 * kit.LAYOUT.block_bytes
    kit.save(store, "a", kit.ids(10)[6:], kv[:, :, 6:], start_token=6)
    store.settle()
    stats = store.stats().ssd
    assert (stats.num_flushes, stats.flushed_bytes) == (2, 4 * kit.LAYOUT.block_bytes), (
        "the full block was written again"
    )
    assert stats.used_bytes == 3 * kit.SLOT_BYTES
    store.settle()
    assert store.stats().ssd.num_flushes == 2
    store = open_store()
    kit.assert_loads(store, "a", kit.ids(10), kv)
    kit.save(store, "a", kit.ids(13)[10:], kit.make_kv(kit.LAYOUT, 3, seed=1), start_token=10)
    store.settle()
    assert store.stats().ssd.flushed_bytes == 2 * kit.LAYOUT.block_bytes, "full blocks stay over a restart too"


def test_what_was_put_off_is_tried_once_more_at_the_end(open_store, monkeypatch):
    store = open_store(clock=kit.StoppedClock(1000.0))
    with monkeypatch.context() as patch:
        patch.setattr(store._ssd._mover._catalog, "publish", lambda *_: (_ for _ in ()).throw(CatalogFullError("full")))
        kv = kit.put(store, "a", 8)
        store.settle()
        assert kit.ssd_tokens(store, "a") == 0
    store.settle()
    assert kit.ssd_tokens(store, "a") == 0, "it is not its time"
    kit.assert_loads(open_store(), "a", kit.ids(8), kv)


def test_a_flush_waits_for_room_that_other_flushes_hold(open_store, gates):
    store = open_store(8, ssd_blocks=4)
    kit.put(store, "a", 8)
    gates[0].writes.close()
    kit.save(store, "a", kit.ids(9)[8:], kit.make_kv(kit.LAYOUT, 1), start_token=8)
    store.poll()
    gates[0].writes.wait_held()  # a holds three blocks, and cannot be evicted now.
    kit.save(store, "b", kit.ids(8), kit.make_kv(kit.LAYOUT, 8))
    store.poll()
    gates[0].writes.open()
    store.settle()
    assert kit.ssd_tokens(store, "b") == 8, "it could have been written once the other flush had ended"


def test_a_flush_that_fails_is_tried_again_ever_later(open_store, driver, monkeypatch):
    clock = kit.StoppedClock(1000.0)
    store = open_store(clock=clock)
    with monkeypatch.context() as patch:
        patch.setattr(store._ssd._mover._tier, "_free_bytes", lambda: 0)
        kit.save(store, "a", kit.ids(5), kit.make_kv(kit.LAYOUT, 5))
        failed_s: list[float] = []
        while len(failed_s) < 9:
            store.settle()
            num_failed = store.stats().ssd.failed_flushes[FlushFailure.NO_SPACE]
            failed_s += [clock.now_s] * (num_failed - len(failed_s))
            clock.now_s += 1.0
    assert np.diff(failed_s).tolist() == [2, 4, 8, 16, 32, 64, 120, 120]
    kit.save(store, "b", kit.ids(5), kit.make_kv(kit.LAYOUT, 5))
    store.settle()
    assert (kit.ssd_tokens(store, "a"), kit.ssd_tokens(store, "b")) == (0, 5), "what is new does not wait"
    clock.now_s += 120.0
    store.settle()
    assert kit.ssd_tokens(store, "a") == 5


@pytest.mark.parametrize("is_in_dram", [True, False])
@pytest.mark.parametrize("change", ["set_pinned", "set_ttl", "set_note"])
def test_what_cannot_be_written_down_is_later(open_store, directory, monkeypatch, change, is_in_dram):
    clock = kit.StoppedClock(1000.0)
    store = open_store(4, clock=clock)
    kit.put(store, "a", 5)
    if not is_in_dram:
        kit.put(store, "b", 16)
        assert store.residency("a") is Residency.SSD
    value = {"set_pinned": True, "set_ttl": 1e9, "set_note": Note(b"note", 3)}[change]
    catalog = store._ssd._mover._catalog
    with monkeypatch.context() as patch:
        for name in ("publish", "set_kept", "set_note"):
            patch.setattr(catalog, name, lambda *_: (_ for _ in ()).throw(CatalogFullError("full")))
        getattr(store, change)("a", value)
        store.settle()
    assert not store.has_note_on_ssd("a", 3)
    clock.now_s += 2.0
    store.settle()
    assert store.has_note_on_ssd("a", 3) == (change == "set_note")
    assert not store.has_note_on_ssd("a", 4)
    with CatalogReader(directory, store._ssd._mover._reader.namespace) as reader:
        record, contents = reader.load("a")
    found = {"set_pinned": record.pinned, "set_ttl": record.ttl_s, "set_note": contents.note}
    assert found[change] == value


def test_a_branch_is_not_written_before_it_has_something_of_its_own(open_store):
    """A process may die before the branch's turn has ended: then there is no conversation that such KV is of."""
    store = open_store(8)
    kit.put(store, "a", 8)
    store.copy_prefix("a", "b", kit.ids(8), num_dropped=3)
    assert store.settle(kit.PATIENCE_S)
    assert (kit.ssd_tokens(store, "b"), kit.info(store, "b").num_dropped) == (0, 3)
    loading = store.prepare_load("b", kit.ids(8), truncate=True, num_dropped=3)
    assert store.settle(kit.PATIENCE_S)
    assert kit.ssd_tokens(store, "b") == 0
    store.complete_load(loading)
    kit.save(store, "b", [7], kit.make_kv(kit.LAYOUT, 1), start_token=8)
    store.settle()
    assert kit.ssd_tokens(store, "b") == 9


# Restarts.


@pytest.mark.parametrize("elsewhere", [{"ssd_url": "memory://kv"}, {"ssd_driver": "raw"}])
def test_blocks_may_be_kept_elsewhere_and_those_that_were_there_are_not_harmed(open_store, elsewhere):
    store = open_store(ssd_blocks=3)
    kv = kit.put(store, "a", 12)
    store = open_store(ssd_blocks=3, **elsewhere)
    assert store.list() == ()
    other_kv = kit.put(store, "a", 12, seed=1)
    store.leave_dram("a")
    kit.assert_loads(store, "a", kit.ids(12), other_kv)
    kit.assert_loads(open_store(ssd_blocks=3), "a", kit.ids(12), kv)


# Faults.


def test_each_flush_and_each_fetch_is_told_of(open_store, monkeypatch):
    """In a timeline, and of fetches how many bytes came in what time; what failed says nothing of that."""
    timeline, told = Timeline(), []

    def taken() -> list[tuple[str, dict[str, object]]]:
        """What the timeline shows and did not show before."""
        spans = timeline.spans()
        timeline.clear()
        assert {span.thread_id for span in spans} == {None}, "others are under way on the same threads"
        return [(span.track, dict(span.args)) for span in spans]

    store = open_store(timeline=timeline, on_fetch=lambda *moved: told.append(moved))
    kv = kit.put(store, "a session's key", 10)
    kit.put(store, "b", 1)
    shown = {"key": "a session's ", "num_bytes": 3 * kit.LAYOUT.block_bytes}
    assert taken() == [("flush", shown), ("flush", {"key": "b", "num_bytes": kit.LAYOUT.block_bytes})]
    store.leave_dram("a session's key")
    kit.assert_loads(store, "a session's key", kit.ids(10), kv)
    assert taken() == [("fetch", shown)]
    ((num_bytes, seconds),) = told
    assert num_bytes == store.stats().ssd.fetched_bytes == 3 * kit.LAYOUT.block_bytes
    assert seconds > 0
    store.leave_dram("a session's key")
    monkeypatch.setattr(store._ssd._mover._tier, "_read", lambda *_: 1 / 0)
    kit.fetch(store, "a session's key")
    assert taken() == [("fetch", {**shown, "error": "device"})]
    assert len(told) == 1


# A catalog that does not answer is waited for no longer than blocks are: by fetches, flushes, the books.

DEADLINE_S = 0.3


def test_who_keeps_the_books_waits_once_and_no_longer(open_store):
    store = open_store(ssd_deadline_s=DEADLINE_S)
    kit.put(store, "a", 9)
    store = open_store(ssd_deadline_s=DEADLINE_S)
    with kit.stalled((store._ssd._mover._asked_reader, "contents")) as stall:
        for _ in range(2):
            with pytest.raises(CatalogLateError):
                store.note("a")
        assert stall.num_come == 1, "no other question is asked before the first is answered"
        assert not store.request("a"), "nothing waits for an SSD that is late"
    store._ssd._mover._asked.result(kit.PATIENCE_S)
    assert store.note("a") == b""


def test_a_session_whose_note_cannot_be_read_in_time_does_not_leave_ssd(open_store):
    store = open_store(ssd_blocks=3, ssd_deadline_s=DEADLINE_S)
    kit.put(store, "a", 9, seed=1)
    store.set_note("a", b"note of a")
    assert store.settle(kit.PATIENCE_S)
    with kit.stalled((store._ssd._mover._asked_reader, "contents")):
        assert kit.save(store, "b", kit.ids(9, 200), kit.make_kv(kit.LAYOUT, 9, seed=2))
        store.poll()
        assert (kit.ssd_tokens(store, "a"), kit.ssd_tokens(store, "b")) == (9, 0)
        assert store.stats().ssd.failed_flushes[FlushFailure.DEADLINE] == 1
    store._ssd._mover._asked.result(kit.PATIENCE_S)
    assert store.note("a") == b"note of a"


# Other sessions' KV.


def test_looking_for_a_prefix_reads_no_file(open_store, monkeypatch):
    store = open_store(8)
    kit.put(store, "a", 10)
    store = open_store(8)
    store.settle()
    for method in ("_one", "_all"):
        monkeypatch.setattr(CatalogReader, method, lambda *_: pytest.fail("the engine's thread reads the catalog"))
    assert store.find_prefix("", [*kit.ids(9), 7]) == "a"
    assert store.find_prefix("", kit.ids(10, 500)) is None
    monkeypatch.undo()


def test_what_is_fetched_for_a_job_that_did_not_wait_does_not_come_between_its_load_and_its_save(open_store, gates):
    store = open_store(6)
    kit.put(store, "a", 7)
    store.settle()
    store.leave_dram("a")
    gates[0].reads.close()
    store.enqueue("job", "a")
    assert not store.ready("a", True)
    gates[0].reads.wait_held()
    assert store.prepare_load("a", kit.ids(7), truncate=True) is None
    store.dequeue("job")
    gates[0].reads.open()
    store.settle()
    kv = kit.make_kv(kit.LAYOUT, 9, seed=3)
    assert kit.save(store, "a", kit.ids(9), kv)
    kit.assert_loads(store, "a", kit.ids(9), kv)


def test_blocks_of_a_dropped_flush_are_free_once_it_has_settled(open_store, gates):
    store = open_store(4)
    gates[0].writes.close()
    kit.save(store, "a", kit.ids(16), kit.make_kv(kit.LAYOUT, 16))
    kit.begin_flush(store, gates[0])
    assert store.drop("a")
    assert kit.info(store, "a") is None
    assert kit.used_blocks(store) == 4
    assert store.prepare_save("b", 0, kit.ids(1)) is None, "memory that is still being read was given away"
    assert store.stats().ssd.used_bytes == 4 * kit.SLOT_BYTES
    gates[0].writes.open()
    kit.wait_until(store, lambda: kit.used_blocks(store) == 0)
    assert store.stats().ssd.used_bytes == 0
    kit.put(store, "b", 16)
    assert kit.ssd_tokens(store, "b") == 16


@pytest.mark.parametrize("change", ["set_note", "discard", "truncate"])
def test_a_note_that_waits_is_the_last_that_was_given(open_store, gates, change):
    """For a pinned session that was dropped while it was flushed: the next one of its key has no older note."""
    store = open_store()
    store.pin("a")
    kit.save(store, "a", kit.ids(5), kit.make_kv(kit.LAYOUT, 5))
    store.set_note("a", b"dropped")
    store.unpin("a")
    gates[0].writes.close()
    kit.begin_flush(store, gates[0])
    store.pin("a")
    store.drop("a")
    assert store.note("a") == b""
    store.set_note("a", b"older")
    if change == "set_note":
        store.set_note("a", b"last")
    elif change == "discard":
        assert store.discard("a", [True] * 3, b"last") == 0
    else:
        assert store.truncate("a", 3, b"last") == 0
    gates[0].writes.open()
    kit.save(store, "a", kit.ids(6), kit.make_kv(kit.LAYOUT, 6))
    assert store.note("a") == b"last"
    store.unpin("a")
    store = open_store()
    assert (kit.ssd_tokens(store, "a"), store.note("a")) == (6, b"last")
