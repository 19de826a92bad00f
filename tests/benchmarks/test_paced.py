"""Links of a set pace and the store over them: when transfers end and in what order, and that no byte moves before."""

import numpy as np
import pytest

from benchmarks.paced import ControlledStore, PacedLink, TimerThread, Transfer
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.store import AttentionStore
from tests.transfers_kit import ManualTimer

PATIENCE_S = 60
LAYOUT = KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32", block_tokens=4)
TOKEN_BYTES = LAYOUT.token_bytes // LAYOUT.num_layers
NUM_TOKENS = 11


def load_of(layer: int, num_bytes: int = 100) -> Transfer:
    return Transfer("load", "a", layer, 1, num_bytes)


@pytest.fixture
def timer():
    return ManualTimer()


@pytest.fixture
def recorder(timer):
    """Copies that note their name and when they ran."""
    ran = []
    return ran, lambda name: lambda: ran.append((name, timer.now_s()))


def test_the_timer_thread_runs_actions_in_order_of_time_and_all_of_them_before_it_closes():
    timer = TimerThread()
    ran, due_s = [], timer.now_s() + 0.01
    for i in (2, 0, 1, 3):
        timer.call_at(due_s + i * 1e-3, lambda i=i: ran.append((i, timer.now_s() - due_s)))
    timer.close()
    assert [i for i, _ in ran] == [0, 1, 2, 3]
    assert all(since_s >= i * 1e-3 for i, since_s in ran), "an action ran before its time"
    with pytest.raises(ValueError, match="the timer must be open"):
        timer.call_at(0.0, lambda: None)


def test_transfers_take_their_turns_on_the_link_and_bytes_arrive_at_the_end(timer, recorder):
    link, (ran, note) = PacedLink(100.0, timer=timer), recorder
    futures = [link.submit(load_of(i, num_bytes), note(i)) for i, num_bytes in enumerate((100, 200, 50))]
    timer.advance(0.99)
    assert not ran
    assert not any(future.done() for future in futures)
    timer.advance(0.01)
    assert ran == [(0, 1.0)]
    assert [future.done() for future in futures] == [True, False, False]
    timer.advance(9.0)
    assert ran[1:] == [(1, 3.0), (2, 3.5)]
    link.submit(load_of(3), note(3))  # The link has been idle: nothing is made up for.
    timer.advance()
    assert ran[3:] == [(3, 11.0)]
    assert link.busy_s == 4.5


@pytest.mark.parametrize("copies_early", [False, True])
def test_a_future_brings_what_its_copy_returned_or_raised(timer, copies_early):
    link = PacedLink(100.0, timer=timer, copies_early=copies_early)
    good, bad = link.submit(load_of(0), lambda: 7), link.submit(load_of(1), lambda: 1 // 0)
    after = link.submit(load_of(2), lambda: 8)
    assert not good.cancel(), "a copy under way cannot be called back"
    timer.advance(1.5)
    assert (good.result(0), bad.done()) == (7, False)
    timer.advance()
    with pytest.raises(ZeroDivisionError):
        bad.result(0)
    assert after.result(0) == 8


# A store over them.


@pytest.fixture
def store():
    store = AttentionStore(LAYOUT, StoreConfig(dram_gib=16 * LAYOUT.block_bytes / GIB, block_tokens=4))
    yield store
    store.close()


def test_a_load_brings_its_bytes_at_the_end_of_its_transfer_and_no_sooner(store, timer):
    heads = (LAYOUT.groups[0].num_kv_heads, LAYOUT.groups[0].head_dim)
    kv = np.random.default_rng(0).standard_normal((3, 2, NUM_TOKENS, *heads), np.float32)
    ticket = store.prepare_save("a", 0, range(NUM_TOKENS))
    ticket.write_all(kv)
    store.complete_save(ticket)
    link = PacedLink(bytes_per_s=NUM_TOKENS * TOKEN_BYTES, timer=timer)  # A layer takes a second.
    controlled = ControlledStore(store, loads=link)
    load = controlled.prepare_load("a", range(NUM_TOKENS))
    regions = np.full((3, 2, NUM_TOKENS + 2, *heads), np.nan, np.float32)
    futures = [load.read(layer, region) for layer, region in enumerate(regions)]
    for layer in range(3):
        timer.advance(0.99)
        assert not futures[layer].done()
        assert np.isnan(regions[layer]).all()
        timer.advance(0.01)
        assert futures[layer].done()
        np.testing.assert_array_equal(regions[layer][:, :NUM_TOKENS], kv[layer])
        assert np.isnan(regions[layer][:, NUM_TOKENS:]).all()
    controlled.complete_load(load)
    assert store.stats().num_hits == 1
