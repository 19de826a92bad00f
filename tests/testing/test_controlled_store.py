"""A store whose copies run when a test says so: the same bytes as without, and not a moment too early."""

import threading

import numpy as np
import pytest

from ca_jax.device.transfer import to_device
from ca_jax.kv.async_saver import AsyncSaver, LayerPart
from ca_jax.kv.layer_loader import LayerLoader, LoadError
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.store import AttentionStore
from ca_jax.storage.tickets import TicketState
from ca_jax.testing.controlled_store import ControlledStore
from ca_jax.testing.paced import DelayedTransfers, GatedTransfers, PacedLink, Transfer
from ca_jax.testing.timers import ManualTimer
from tests import engine_kit as kit

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32", block_tokens=4)
TOKEN_BYTES = LAYOUT.token_bytes // LAYOUT.num_layers
NUM_TOKENS = 11
PATIENCE_S = 60


@pytest.fixture
def store():
    store = AttentionStore(LAYOUT, StoreConfig(dram_gib=16 * LAYOUT.block_bytes / GIB, block_tokens=4))
    yield store
    store.close()


@pytest.fixture
def kv() -> np.ndarray:
    shape = (LAYOUT.num_layers, 2, NUM_TOKENS, LAYOUT.num_kv_heads, LAYOUT.head_dim)
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def fill(store: AttentionStore, kv: np.ndarray) -> None:
    ticket = store.prepare_save("a", 0, range(NUM_TOKENS))
    ticket.write_all(kv)
    store.complete_save(ticket)


def staging(num_tokens: int = NUM_TOKENS + 2) -> np.ndarray:
    return np.full((2, num_tokens, LAYOUT.num_kv_heads, LAYOUT.head_dim), np.nan, np.float32)


def test_tickets_say_what_the_stores_say(store, kv):
    controlled = ControlledStore(store, loads=GatedTransfers(), saves=GatedTransfers())
    save = controlled.prepare_save("a", 0, range(NUM_TOKENS))
    assert (save.key, save.start_token, save.stop_token, save.num_tokens) == ("a", 0, NUM_TOKENS, NUM_TOKENS)
    assert (save.state, save.num_missing) == (TicketState.OPEN, 3 * NUM_TOKENS)
    np.testing.assert_array_equal(save.token_ids, range(NUM_TOKENS))
    save.ticket.write_all(kv)
    assert controlled.complete_save(save)
    assert (save.state, save.num_missing) == (TicketState.DONE, 0)
    load = controlled.prepare_load("a", range(20))
    assert (load.key, load.num_tokens, load.from_ssd, load.state) == ("a", NUM_TOKENS, False, TicketState.OPEN)
    controlled.abort_load(load)
    assert load.state is TicketState.ABORTED
    assert controlled.prepare_load("b", range(20)) is None
    assert controlled.prepare_save("c", 0, range(10_000)) is None
    assert controlled.stats() == store.stats()


def test_tickets_of_a_direction_that_nobody_decides_about_are_the_stores(store, kv):
    controlled = ControlledStore(store)
    fill(controlled, kv)
    load = controlled.prepare_load("a", range(20))
    dst = staging()
    load.read(1, dst).result()
    controlled.complete_load(load)
    np.testing.assert_array_equal(dst[:, :NUM_TOKENS], kv[1])


def test_a_load_brings_its_bytes_at_the_end_of_its_transfer_and_no_sooner(store, kv):
    fill(store, kv)
    timer = ManualTimer()
    link = PacedLink(bytes_per_s=NUM_TOKENS * TOKEN_BYTES, timer=timer)  # A layer takes a second.
    controlled = ControlledStore(store, loads=link)
    load = controlled.prepare_load("a", range(NUM_TOKENS))
    regions = [staging() for _ in range(3)]
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


@pytest.mark.parametrize("end", ["complete_load", "abort_load"])
def test_a_load_is_not_ended_while_a_read_is_under_way(store, kv, end):
    fill(store, kv)
    gate = GatedTransfers()
    controlled = ControlledStore(store, loads=gate)
    load = controlled.prepare_load("a", range(NUM_TOKENS))
    dst = staging()
    load.read(0, dst)
    ending = threading.Thread(target=lambda: getattr(controlled, end)(load))
    ending.start()
    assert load.state is TicketState.OPEN
    gate.let_through()
    ending.join(PATIENCE_S)
    assert load.state is not TicketState.OPEN
    np.testing.assert_array_equal(dst[:, :NUM_TOKENS], kv[0])
    gate.open()
    with pytest.raises(ValueError, match="there must be an open load"):
        load.read(1, dst).result()


def test_what_is_wrong_with_a_read_comes_by_its_future(store, kv):
    fill(store, kv)
    timer = ManualTimer()
    controlled = ControlledStore(store, loads=PacedLink(layer_s=1.0, timer=timer))
    load = controlled.prepare_load("a", range(NUM_TOKENS))
    futures = [load.read(3, staging()), load.read(0, staging(NUM_TOKENS - 1)), load.read(0, np.zeros((2, 0)))]
    timer.advance()
    for future, wrong in zip(futures, ("a layer below 3", "room for 11 tokens", "dst must be float32"), strict=True):
        with pytest.raises(ValueError, match=wrong):
            future.result()
    controlled.abort_load(load)


def test_a_save_reads_its_source_at_the_end_of_its_transfer(store, kv):
    gate = GatedTransfers()
    controlled = ControlledStore(store, saves=gate)
    save = controlled.prepare_save("a", 0, range(NUM_TOKENS))
    source, written = np.zeros_like(kv), []
    thread = threading.Thread(target=lambda: written.append(save.write_all(source)))
    thread.start()
    assert gate.wait_held() == (Transfer("save", "a", None, 3, kv.nbytes),)
    assert save.num_missing == 3 * NUM_TOKENS
    source[...] = kv  # Whoever gives a buffer away before its save has ended stores what comes after.
    gate.let_through()
    thread.join(PATIENCE_S)
    assert written == [True]
    assert controlled.complete_save(save)
    load = store.prepare_load("a", range(NUM_TOKENS))
    dst = staging()
    load.read(2, dst).result()
    store.complete_load(load)
    np.testing.assert_array_equal(dst[:, :NUM_TOKENS], kv[2])


def test_a_save_that_is_given_up_writes_nothing_more(store, kv):
    gate = GatedTransfers()
    controlled = ControlledStore(store, saves=gate)
    save = controlled.prepare_save("a", 0, range(NUM_TOKENS))
    written = []
    thread = threading.Thread(target=lambda: written.append(save.write(0, kv[0])))
    thread.start()
    assert gate.wait_held() == (Transfer("save", "a", 0, 1, NUM_TOKENS * TOKEN_BYTES),)
    controlled.abort_save(save)
    gate.open()
    thread.join(PATIENCE_S)
    assert written == [False]
    assert save.state is TicketState.ABORTED
    assert store.stats().used_bytes == 0


def test_loader_and_saver_work_over_one_link_of_both(store, kv):
    with PacedLink(layer_s=1e-3) as link:
        controlled = ControlledStore(store, loads=link, saves=link)
        saver, loader = AsyncSaver(), LayerLoader(LAYOUT, 3 * 16 * TOKEN_BYTES)
        save = controlled.prepare_save("a", 0, range(NUM_TOKENS))
        saver.submit(save, [LayerPart(layer, to_device(kv[layer]), NUM_TOKENS, 0) for layer in range(3)])
        (result,) = saver.poll(wait=True)
        assert (result.ticket, result.error) == (save, None)
        assert controlled.complete_save(save)
        load = controlled.prepare_load("a", range(NUM_TOKENS))
        layers = loader.open(load, 16, depth=3)
        layers.begin(lambda layer: None)
        for layer in range(3):
            np.testing.assert_array_equal(layers.layer(layer)[:, :NUM_TOKENS], kv[layer])
        layers.release()
        controlled.complete_load(load)
        saver.close()
    assert link.busy_s == pytest.approx(6e-3)


def test_a_layer_that_breaks_on_its_way_breaks_its_load(store, kv):
    fill(store, kv)
    gate = GatedTransfers()
    controlled, loader = ControlledStore(store, loads=gate), LayerLoader(LAYOUT, 3 * 16 * TOKEN_BYTES)
    load = controlled.prepare_load("a", range(NUM_TOKENS))
    layers = loader.open(load, 16, depth=3)
    held = gate.wait_held(3)
    gate.let_through(held[1], error=OSError("broken"))
    gate.open()
    layers.begin(lambda layer: None)
    np.testing.assert_array_equal(layers.layer(0)[:, :NUM_TOKENS], kv[0])
    with pytest.raises(LoadError, match="broken"):
        layers.layer(1)
    layers.release()
    controlled.abort_load(load)


def test_an_engine_answers_the_same_over_transfers_that_overtake_one_another():
    messages = [kit.prompt(40, seed) for seed in range(3)]
    with (
        DelayedTransfers(2e-3, seed=0) as delayed,
        kit.small_engine(store_wrapper=lambda store: ControlledStore(store, loads=delayed, saves=delayed)) as engine,
    ):
        session = engine.session()
        answers = kit.converse(session, messages)
        engine.wait_for_saves()
        assert engine.metrics.cached_tokens > 0
        assert engine.metrics.failed_loads == engine.metrics.failed_saves == 0
    token_ids: list[int] = []
    for message, answer in zip(messages, answers, strict=True):
        token_ids += message
        assert answer == kit.greedy_answer(token_ids, len(answer))
        token_ids += answer
