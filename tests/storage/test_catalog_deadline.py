"""A catalog that does not answer is waited for no longer than blocks are: by fetches, flushes, the books."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from ca_jax.storage.catalog.file import CatalogLateError
from ca_jax.storage.records import FlushFailure, MissReason, Residency
from ca_jax.storage.store import AttentionStore

from .store_helpers import (
    LAYOUT,
    PATIENCE_S,
    assert_loads,
    fetch,
    ids,
    load,
    make_kv,
    put,
    save,
    ssd_tokens,
    wait_until,
)

DEADLINE_S = 0.3


class Stall:
    """Calls that begin and do not end before `end`."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.begun, self._go_on = threading.Event(), threading.Event()

    def end(self) -> None:
        self._go_on.set()

    def __call__(self) -> None:
        self.num_begun += 1
        self.begun.set()
        assert self._go_on.wait(PATIENCE_S)


@contextlib.contextmanager
def stalled(monkeypatch, owner: object, name: str) -> Iterator[Stall]:
    """Has an object's method stall."""
    stall, method = Stall(), getattr(owner, name)

    def late(*args, **options):
        stall()
        return method(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, late)
        try:
            yield stall
        finally:
            stall.end()


@pytest.fixture
def store(open_store) -> tuple[AttentionStore, dict[str, np.ndarray]]:
    """One whose sessions a and b are on SSD alone."""
    store = open_store(ssd_deadline_s=DEADLINE_S)
    kv = {"a": put(store, "a", 9, seed=1, first=100), "b": put(store, "b", 9, seed=2, first=200)}
    store.close()
    return open_store(ssd_deadline_s=DEADLINE_S), kv


def wait_until_on_time(store: AttentionStore, monkeypatch) -> None:
    """Returns when all has settled, and lets the store try its SSD again at once."""
    wait_until(store, lambda: not store._ssd.busy and not store._ssd._mover.is_late)
    monkeypatch.setattr(store._ssd, "_late_until_s", 0.0)


def test_a_fetch_that_waits_for_the_catalog_is_a_miss_and_so_is_one_behind_it(store, monkeypatch):
    store, kv = store
    with stalled(monkeypatch, store._ssd._mover._reader, "load"):
        assert store.request("a")
        assert store.request("b")
        for key, first in (("a", 100), ("b", 200)):
            wait_until(store, lambda key=key: not store.request(key))
            assert load(store, key, ids(9, first)) is None
        assert store.stats().misses[MissReason.DEADLINE] == 2
        assert not store.request("a"), "nothing waits for an SSD that is late"
        assert load(store, "a", ids(9)) is None
    wait_until_on_time(store, monkeypatch)
    assert store.stats().used_bytes == 0, "memory of fetches that were late is free once they have settled"
    for key, first in (("a", 100), ("b", 200)):
        assert_loads(store, key, ids(9, first), kv[key])


def test_a_commit_that_does_not_end_keeps_nobody_waiting_and_is_taken_in_when_it_does(store, monkeypatch, open_store):
    store, _ = store
    catalog = store._ssd._mover._catalog
    kv = make_kv(LAYOUT, 9, seed=3)
    with stalled(monkeypatch, catalog, "publish") as stall:
        assert save(store, "c", ids(9, 300), kv)
        store.poll()
        assert stall.begun.wait(PATIENCE_S)
        assert not store.settle(PATIENCE_S), "given up once it is late"
        assert store._ssd.is_late
        for key, first in (("d", 400), ("e", 500)):
            assert save(store, key, ids(9, first), kv), "what does not get to SSD makes room"
        assert not store.request("a")
    wait_until_on_time(store, monkeypatch)
    wait_until(store, lambda: ssd_tokens(store, "c") == 9)
    store.close()
    assert_loads(open_store(), "c", ids(9, 300), kv)


def test_a_change_that_does_not_end_is_late_too(store, monkeypatch):
    store, _ = store
    with stalled(monkeypatch, store._ssd._mover._catalog, "set_kept"):
        store.set_pinned("a", True)
        wait_until(store, lambda: store._ssd.is_late)
        assert not store.request("b")
        assert load(store, "b", ids(9, 200)) is None
    wait_until_on_time(store, monkeypatch)
    fetch(store, "b")
    assert store.residency("b") is Residency.DRAM


def test_who_keeps_the_books_waits_once_and_no_longer(store, monkeypatch):
    store, _ = store
    with stalled(monkeypatch, store._ssd._mover._asked_reader, "contents") as stall:
        for _ in range(2):
            with pytest.raises(CatalogLateError):
                store.note("a")
        assert stall.num_begun == 1, "no other question is asked before the first is answered"
        assert not store.request("a"), "nothing waits for an SSD that is late"
    store._ssd._mover._asked.result(PATIENCE_S)
    assert store.note("a") == b""


def test_a_session_whose_note_cannot_be_read_in_time_does_not_leave_ssd(open_store, monkeypatch):
    store = open_store(ssd_blocks=3, ssd_deadline_s=DEADLINE_S)
    put(store, "a", 9, seed=1)
    store.set_note("a", b"note of a")
    assert store.settle(PATIENCE_S)
    with stalled(monkeypatch, store._ssd._mover._asked_reader, "contents"):
        assert save(store, "b", ids(9, 200), make_kv(LAYOUT, 9, seed=2))
        store.poll()
        assert (ssd_tokens(store, "a"), ssd_tokens(store, "b")) == (9, 0)
        assert store.stats().ssd.failed_flushes[FlushFailure.DEADLINE] == 1
    store._ssd._mover._asked.result(PATIENCE_S)
    assert store.note("a") == b"note of a"
