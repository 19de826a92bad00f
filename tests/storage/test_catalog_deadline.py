"""A catalog that does not answer is waited for no longer than blocks are: by fetches, flushes, the books."""

from __future__ import annotations

import numpy as np
import pytest

from ca_jax.storage.catalog.file import CatalogLateError
from ca_jax.storage.records import FlushFailure, Residency
from ca_jax.storage.store import AttentionStore

from .store_helpers import (
    LAYOUT,
    PATIENCE_S,
    fetch,
    ids,
    load,
    make_kv,
    put,
    save,
    ssd_tokens,
    stalled,
    wait_until,
)

DEADLINE_S = 0.3


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


def test_a_change_that_does_not_end_is_late_too(store, monkeypatch):
    store, _ = store
    with stalled((store._ssd._mover._catalog, "set_kept")):
        store.set_pinned("a", True)
        wait_until(store, lambda: store._ssd.is_late)
        assert not store.request("b")
        assert load(store, "b", ids(9, 200)) is None
    wait_until_on_time(store, monkeypatch)
    fetch(store, "b")
    assert store.residency("b") is Residency.DRAM


def test_who_keeps_the_books_waits_once_and_no_longer(store, monkeypatch):
    store, _ = store
    with stalled((store._ssd._mover._asked_reader, "contents")) as stall:
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
    with stalled((store._ssd._mover._asked_reader, "contents")):
        assert save(store, "b", ids(9, 200), make_kv(LAYOUT, 9, seed=2))
        store.poll()
        assert (ssd_tokens(store, "a"), ssd_tokens(store, "b")) == (9, 0)
        assert store.stats().ssd.failed_flushes[FlushFailure.DEADLINE] == 1
    store._ssd._mover._asked.result(PATIENCE_S)
    assert store.note("a") == b"note of a"
