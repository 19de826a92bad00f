"""KV that is read as it is written: which layers may be read when, by whom, and what becomes of what never comes."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ca_jax.kv.object_transfers import Arrival
from ca_jax.storage.objects import parts
from ca_jax.storage.objects.store import ObjectStore
from ca_jax.storage.store import AttentionStore
from ca_jax.storage.tickets import BrokenOffError, LoadTicket, SaveTicket, TicketState
from tests.storage import store_helpers as helpers
from tests.storage.objects import shared_kit
from tests.storage.objects.shared_kit import LAYOUT, RUN_TOKENS, Replica, kv_of

IDS = list(range(100, 114))
NUM_HERE, NUM_FIRST = 3, 9
"""Tokens that are there, and those up to the end of the first of two saves that come."""


@pytest.fixture
def store() -> AttentionStore:
    return helpers.make_store(64)


def begin(store: AttentionStore, *, may_be_read: bool = True) -> list[SaveTicket]:
    """A session whose first tokens are there, and the others on their way."""
    if NUM_HERE:
        save = store.prepare_save("s", 0, IDS[:NUM_HERE])
        save.write_all(kv_of(IDS[:NUM_HERE]))
        store.complete_save(save)
    spans = ((NUM_HERE, NUM_FIRST), (NUM_FIRST, len(IDS)))
    return [store.prepare_save("s", first, IDS[first:stop], may_be_read=may_be_read) for first, stop in spans]


def write(save: SaveTicket, layer: int) -> None:
    assert save.write(layer, kv_of(save.token_ids)[layer])


def layer_of(load: LoadTicket, layer: int) -> np.ndarray:
    kv = np.zeros(LAYOUT.layer_shape(layer, load.num_tokens), LAYOUT.numpy_dtype)
    load.read(layer, kv).result()
    return kv


def test_a_layer_is_read_once_it_has_come_of_all_tokens(store) -> None:
    first, second = begin(store)
    load = store.prepare_load("s", [*IDS, 7], truncate=True, with_coming=True)
    assert (load.num_tokens, load.coming) == (len(IDS), (first, second))
    for layer in range(LAYOUT.num_layers):
        write(first, layer)
        assert not load.has(layer)
        with pytest.raises(ValueError, match=f"layer {layer} of 's' must have come"):
            layer_of(load, layer)
        write(second, layer)
        assert load.has(layer)
        np.testing.assert_array_equal(layer_of(load, layer), kv_of(IDS)[layer])
    store.complete_load(load)
    assert store.num_readable("s") == len(IDS)
    assert (first.state, second.state) == (TicketState.DONE, TicketState.DONE)
    again = store.prepare_load("s", IDS)
    assert not again.coming
    np.testing.assert_array_equal(layer_of(again, 1), kv_of(IDS)[1])


def test_a_load_ends_well_only_once_all_has_come(store) -> None:
    saves = begin(store)
    load = store.prepare_load("s", IDS, with_coming=True)
    write(saves[0], 0)
    with pytest.raises(ValueError, match="not written"):
        store.complete_load(load)
    store.abort_load(load)
    assert [save.state for save in saves] == [TicketState.OPEN] * 2, "a later load may still read them"


def test_nobody_else_reads_what_has_not_come(store) -> None:
    """Loads that do not ask for it, and saves of what is computed, which are never complete but at their end."""
    begin(store)
    assert store.prepare_load("s", IDS).num_tokens == NUM_HERE
    assert not store.serves_coming("s", IDS[:-1])
    assert not store.serves_coming("s", [*IDS[:-1], 7])
    assert not store.serves_coming("s", IDS, num_dropped=3)
    assert store.serves_coming("s", [*IDS, 7])
    assert not store.serves_coming("nobody", IDS)
    other = store.prepare_load("s", [*IDS[:NUM_FIRST], 7, 8, 9, 10, 11], with_coming=True)
    assert other.num_tokens == NUM_FIRST, "all of a save, or none"
    store.prepare_save("s", len(IDS), [7])
    assert not store.serves_coming("s", [*IDS, 7]), "a turn that runs has saves of its own"

    computed = helpers.make_store(64)
    begin(computed, may_be_read=False)
    load = computed.prepare_load("s", IDS, with_coming=True)
    assert (load.num_tokens, load.coming) == (NUM_HERE, ())
    assert not computed.serves_coming("s", IDS)


def test_a_session_of_which_nothing_is_there_yet_is_read_too(store) -> None:
    save = store.prepare_save("s", 0, IDS, may_be_read=True)
    assert store.prepare_load("s", IDS) is None
    load = store.prepare_load("s", IDS, with_coming=True)
    for layer in range(LAYOUT.num_layers):
        write(save, layer)
        np.testing.assert_array_equal(layer_of(load, layer), kv_of(IDS)[layer])
    store.complete_load(load)
    assert store.num_readable("s") == len(IDS)


def test_a_layer_is_waited_for(store) -> None:
    saves = begin(store)
    load = store.prepare_load("s", IDS, with_coming=True)
    assert not load.wait_for(0, timeout_s=0.0)
    threads = [threading.Thread(target=write, args=(save, 0)) for save in saves]
    for thread in threads:
        thread.start()
    while not load.wait_for(0, helpers.PATIENCE_S):
        pass
    for thread in threads:
        thread.join()
    assert load.has(0)
    assert not load.has(1)


@pytest.mark.parametrize("how", ["broken off", "aborted"])
def test_whoever_waits_for_what_never_comes_is_told(store, how) -> None:
    saves = begin(store)
    load = store.prepare_load("s", IDS, with_coming=True)
    for save in saves:
        write(save, 0)
    waits, told = threading.Event(), []

    def wait() -> None:
        waits.set()
        try:
            load.wait_for(1, helpers.PATIENCE_S)
        except BrokenOffError as error:
            told.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    waits.wait(helpers.PATIENCE_S)
    if how == "aborted":
        store.abort_saves("s")
    else:
        saves[0].break_off(OSError("the disk is gone"))
    thread.join(helpers.PATIENCE_S)
    assert len(told) == 1
    assert load.is_broken
    assert load.wait_for(0, 0.0), "what came before may be read"
    if how == "broken off":
        assert str(told[0].__cause__) == "the disk is gone"
        assert store.prepare_load("s", IDS, with_coming=True).num_tokens == NUM_HERE
    store.abort_load(load)


def test_what_comes_is_not_shortened(store) -> None:
    begin(store)
    load = store.prepare_load("s", IDS, with_coming=True)
    with pytest.raises(ValueError, match="that are there"):
        load.shorten(NUM_HERE)


# What is brought from objects.


def moves_of(replica: Replica, key: str) -> list[tuple[SaveTicket, parts.PartRef]]:
    manifest = shared_kit.stored(replica.kv.objects, key)
    return [
        (replica.store.prepare_save(key, part.first, IDS[part.first : part.stop], may_be_read=True), part)
        for part in manifest.parts
    ]


@pytest.fixture
def published(tmp_path, monkeypatch) -> Replica:
    """A replica that has nothing here of session `s`, which is published as two objects; a layer a request."""
    monkeypatch.setattr(parts, "RUN_BYTES", 2 * LAYOUT.block_bytes)
    monkeypatch.setattr("ca_jax.kv.object_transfers._READ_BYTES", 1)
    replica = Replica(ObjectStore(f"file://{tmp_path}/shared", 5.0))
    replica.publish("s", IDS)
    replica.store.drop("s")
    return replica


def test_the_first_layers_of_all_objects_come_first(published, monkeypatch) -> None:
    asked = []
    begin_read = published.kv.objects.begin_read

    def noted(name: str, *span: int, **how: bool) -> object:
        asked.append(name)
        return begin_read(name, *span, **how)

    moves = moves_of(published, "s")
    monkeypatch.setattr(published.kv.objects, "begin_read", noted)
    arrival = published.kv.arrival([part for _, part in moves])
    woken: list[bool] = []
    assert published.kv.restore(moves, arrival, lambda: woken.append(arrival.is_in_time(1e9))) == len(moves) == 2
    assert woken == [False, *[True] * (2 * LAYOUT.num_layers - 1)], "after each request, so that a turn may begin"
    assert asked == [part.name for _ in range(LAYOUT.num_layers) for _, part in moves]
    assert arrival.error is None
    assert arrival.is_in_time(0.0), "all is there"
    for ticket, _ in moves:
        published.store.complete_save(ticket)
    load = published.store.prepare_load("s", IDS)
    for layer in range(LAYOUT.num_layers):
        np.testing.assert_array_equal(layer_of(load, layer), kv_of(IDS)[layer])


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("at", [0.1, 0.99], ids=["first layer", "last layer"])
def test_objects_before_one_that_is_broken_come_whole(published, tmp_path, which, at) -> None:
    moves = moves_of(published, "s")
    broken = moves[which][1].name
    path = tmp_path / "shared" / broken
    data = bytearray(path.read_bytes())
    header = len(data) - moves[which][1].num_tokens * shared_kit.TOKEN_BYTES
    data[header + int(at * (len(data) - header))] ^= 1
    path.write_bytes(data)
    arrival = published.kv.arrival([part for _, part in moves])
    assert published.kv.restore(moves, arrival) == which
    assert arrival.error.name == broken
    assert isinstance(arrival.error.error, parts.PartError)
    assert not arrival.is_in_time(1e9)
    assert [ticket.is_broken for ticket, _ in moves] == [number >= which for number in range(2)]
    assert [ticket.num_missing == 0 for ticket, _ in moves] == [number < which for number in range(2)]


def test_what_is_given_up_is_read_no_further(published) -> None:
    moves = moves_of(published, "s")
    published.store.abort_saves("s")
    arrival = published.kv.arrival([part for _, part in moves])
    assert published.kv.restore(moves, arrival) == 0
    assert arrival.error is None


def test_a_run_is_of_two_blocks(published) -> None:
    assert [part.num_tokens for _, part in moves_of(published, "s")] == [RUN_TOKENS, len(IDS) - RUN_TOKENS]


@pytest.mark.parametrize(
    ("num_bytes", "after_s", "layer_compute_s", "is_in_time"),
    [
        (0, 1.0, 1e9, False),  # The first layer is not there.
        (99, 1.0, 1e9, False),
        (100, 1.0, 1.3, True),  # 80 bytes a second: layer 1 is there after 1.25 s, 2 after 2.5 s, 3 after 3.75 s.
        (100, 1.0, 1.2, False),
        (100, 2.0, 1.3, False),  # Nothing has come for a second.
        (
            200,
            2.0,
            0.9,
            True,
        ),  # Layer 2 after 1.25 s, when two are computed; layer 3 after 2.5 s, when three are.
        (200, 2.0, 0.8, False),
        (399, 1.0, 0.01, True),
        (400, 9.0, 0.0, True),
    ],
)
def test_kv_is_in_time_that_no_layer_would_wait_for(num_bytes, after_s, layer_compute_s, is_in_time) -> None:
    clock = helpers.StoppedClock()
    arrival = Arrival([100] * 4, clock)
    clock.now_s = after_s
    arrival.came(num_bytes)
    assert arrival.is_in_time(layer_compute_s) is is_in_time
    coded = Arrival([100] * 4, helpers.StoppedClock(), is_coded=True)
    coded._clock.now_s = after_s
    coded.came(num_bytes)
    assert coded.is_in_time(2 * layer_compute_s) is is_in_time, "half of the rate, once the turn takes cores as well"
