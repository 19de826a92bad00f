"""Which layer is loaded when, into which memory, and that all of it is free again whatever happens on the way.

The pipeline is run in a time that only moves when somebody waits, so that what it took is exact.
"""

from __future__ import annotations

import collections
import contextlib
import types
from collections.abc import Callable, Iterator

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from benchmarks.paced import ControlledStore, Future, PacedLink, Transfer, Transfers
from ca_jax.device import transfer
from ca_jax.kv import costs, layer_loader
from ca_jax.kv.layer_loader import LayerLoad, LayerLoader, LoadError, ReadBuffer, StagingInUseError
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.store import AttentionStore
from ca_jax.telemetry.timeline import Timeline
from tests.storage.store_helpers import as_bits, make_kv, save
from tests.transfers_kit import GatedTransfers, ManualTimer

LAYOUT = KVLayout.uniform(num_layers=5, num_kv_heads=2, head_dim=16, dtype="float32", block_tokens=4)
LAYERS = LAYOUT.num_layers
NUM_TOKENS, PADDED = 11, 16
REGION_BYTES = PADDED * LAYOUT.token_bytes // LAYERS
KV = {"a": make_kv(LAYOUT, NUM_TOKENS, seed=1), "b": make_kv(LAYOUT, NUM_TOKENS, seed=2)}
PATIENCE_S = 60

device_ahead = pytest.mark.parametrize("device_ahead", [0, 1])
"""As on CPU, and as on an accelerator."""


class Computation:
    """Something the device does: over when `finish` says so, when it is told to be, or once somebody waits for it."""

    def __init__(self, action: Callable[[], None] = lambda: None, is_over: Callable[[], bool] = lambda: False) -> None:
        self._action = action
        self._is_over = is_over
        self.has_ended = False

    def finish(self) -> None:
        if not self.has_ended:
            self._action()
        self.has_ended = True

    def is_ready(self) -> bool:
        return self.has_ended or self._is_over()

    def block_until_ready(self) -> Computation:
        self.finish()
        return self


def filled_store(layout: KVLayout, kvs: dict[str, np.ndarray]) -> AttentionStore:
    """A store that holds these, `[L, 2, T, K, H]` each, under their names and for tokens 0, 1, 2, …."""
    config = StoreConfig(dram_gib=16 * layout.block_bytes / GIB, block_tokens=layout.block_tokens)
    store = AttentionStore(layout, config)
    for key, kv in kvs.items():
        assert save(store, key, range(kv.shape[2]), kv)
    return store


@pytest.fixture
def store() -> Iterator[AttentionStore]:
    with contextlib.closing(filled_store(LAYOUT, KV)) as store:
        yield store


class Rig:
    """A loader over a store whose loads go through `transfers`, with staging full of NaN."""

    def __init__(
        self, store: AttentionStore, transfers: Transfers | None, num_regions: int = 2 * LAYERS, device_ahead: int = 0
    ) -> None:
        self.store, self.timeline = ControlledStore(store, loads=transfers), Timeline()
        self.loader = LayerLoader(LAYOUT, num_regions * REGION_BYTES, timeline=self.timeline)
        self.loader.device_ahead = device_ahead
        self.loader.buffer.memory.view(np.float32)[...] = np.nan

    def open(self, key: str, depth: int, **options: object) -> LayerLoad:
        ticket = self.store.prepare_load(key, range(NUM_TOKENS))
        return self.loader.open(ticket, PADDED, depth, **options)

    def end(self, load: LayerLoad) -> None:
        load.release()
        self.store.complete_load(load.ticket)

    @property
    def is_free(self) -> bool:
        """Whether every byte of staging can be had."""
        size = self.loader.buffer.memory.nbytes
        region = self.loader.room(size)
        if region is not None:
            self.loader.buffer.give_back()
        return region is not None


def expect(key: str, layer: int, array: jax.Array) -> None:
    assert array.shape == (2, PADDED, 2, 16)
    np.testing.assert_array_equal(as_bits(np.asarray(array)[:, :NUM_TOKENS]), as_bits(KV[key][layer]))


def held_layers(gate: GatedTransfers) -> list[int]:
    return [transfer.layer for transfer in gate.held]


def let_all_through(gate: GatedTransfers) -> list[int]:
    """Lets through who stands before the gate now; their layers."""
    return [gate.let_through().layer for _ in gate.held]


def take_layers(load: LayerLoad, key: str = "a", num_layers: int = LAYERS) -> None:
    """Takes and computes first layers of a session."""
    for layer in range(num_layers):
        expect(key, layer, load.layer(layer))
        load.computed(layer, Computation(is_over=lambda: True))


# What is issued when.


@pytest.mark.parametrize("depth", [0, 1, 2, LAYERS - 1, LAYERS, LAYERS + 3])
@device_ahead
def test_layers_behind_the_read_buffer_wait_for_the_layer_whose_place_they_take(store, depth, device_ahead):
    """Before its job begins a load fills the read buffer and no more, all layers of it at once.

    Then layer i may begin once layer i - depth - 2 is computed, not when it is dispatched: `costs.pipeline_s`.
    """
    gate = GatedTransfers()
    rig = Rig(store, gate, device_ahead=device_ahead)
    load = rig.open("a", depth)
    assert held_layers(gate) == list(range(min(depth, LAYERS)))
    issued = let_all_through(gate)
    rig.loader.pump()
    assert (gate.held, load.num_issued) == ((), min(depth, LAYERS))
    load.begin()
    issued += let_all_through(gate)
    assert issued == list(range(min(depth + 2, LAYERS)))
    for layer in range(LAYERS):
        expect("a", layer, load.layer(layer))
        computing = Computation()
        load.computed(layer, computing)
        rig.loader.pump()
        assert gate.held == (), "a layer was loaded before the one that it waits for was computed"
        computing.finish()
        rig.loader.pump()
        assert held_layers(gate) == [next_one for next_one in [layer + depth + 2] if next_one < LAYERS]
        issued += let_all_through(gate)
    assert issued == list(range(LAYERS))
    rig.end(load)
    assert rig.is_free


def test_a_layer_is_not_loaded_for_want_of_the_one_before_it(store):
    """Without a read buffer, and nothing dispatched, layer 2 has no place to go: an error, and no wait for ever."""
    rig = Rig(store, None)
    load = rig.open("a", 0)
    load.begin()
    load.layer(0)
    load.layer(1)
    with pytest.raises(StagingInUseError, match="layer 0 must be dispatched before layer 2"):
        load.layer(2)
    rig.end(load)
    assert rig.is_free


# The pipeline, in a time of its own.


class Machine:
    """A link and a device that are given seconds; whoever waits for them moves the time on."""

    def __init__(self, load_s: float, compute_s: float) -> None:
        self.timer = ManualTimer()
        self._link = PacedLink(layer_s=load_s, timer=self.timer)
        self._compute_s = compute_s
        self._free_at_s = 0.0

    def submit(self, transfer: Transfer, copy: Callable[[], object]) -> Future:
        """A transfer over the link, whose future moves the time when it is waited for."""
        return _MovingFuture(self.timer, self._link.submit(transfer, copy))

    def wait_until(self, end_s: float) -> None:
        if end_s > self.timer.now_s():
            self.timer.advance(end_s - self.timer.now_s())

    def compute(self, num_layers: int = 1) -> Computation:
        """Dispatches layers, which run behind what was dispatched before."""
        end_s = self._free_at_s = max(self._free_at_s, self.timer.now_s()) + num_layers * self._compute_s
        return Computation(lambda: self.wait_until(end_s), lambda: self.timer.now_s() >= end_s)


class _MovingFuture(Future):
    def __init__(self, timer: ManualTimer, future: Future) -> None:
        super().__init__()
        self._timer = timer
        future.add_done_callback(lambda done: self.set_result(done.result()))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        while not self.done():
            self._timer.advance(1)
            if timeout is not None and not self.done():
                raise TimeoutError
        return super().exception()


@pytest.fixture
def run_pipeline(store, monkeypatch):
    """Runs a load and its job as a prefill does; seconds from when the device is free to the end of its last layer."""

    def run(
        load_s: float, compute_s: float, depth: int, head_start_s: float, num_regions: int = LAYERS, **options: object
    ) -> float:
        machine = Machine(load_s, compute_s)
        monkeypatch.setattr(layer_loader, "_LOOK_S", 1)
        monkeypatch.setattr(layer_loader, "time", types.SimpleNamespace(perf_counter=machine.timer.now_s))
        rig = Rig(store, machine, num_regions)
        machine.wait_until(-head_start_s)
        load = rig.open("a", depth, **options)
        machine.wait_until(head_start_s)
        load.begin()
        for layer in range(LAYERS):
            expect("a", layer, load.layer(layer))
            computing = machine.compute()
            load.computed(layer, computing)
        computing.block_until_ready()
        took_s = machine.timer.now_s() - max(head_start_s, 0)
        assert load.stall_s == took_s - LAYERS * compute_s - max(-head_start_s, 0), "it computes, or waits for copies"
        rig.end(load)
        assert rig.is_free
        return took_s

    return run


@pytest.mark.parametrize("head_start_s", [-2, 0, 3, 7, 1000])
@pytest.mark.parametrize(("load_s", "compute_s"), [(1, 4), (2, 3), (3, 3), (3, 2), (4, 1)])
def test_a_job_takes_what_the_pipeline_is_said_to_take(run_pipeline, load_s, compute_s, head_start_s):
    for depth in range(LAYERS + 2):
        took_s = run_pipeline(load_s, compute_s, depth, head_start_s)
        assert took_s == costs.pipeline_s(load_s, compute_s, LAYERS, depth, head_start_s), f"depth {depth}"
    if not head_start_s:
        took_s = run_pipeline(load_s, compute_s, LAYERS, head_start_s, all_at_once=True)
        assert took_s == costs.blocking_s(load_s, compute_s, LAYERS), "without pre-loading"


@pytest.mark.parametrize("num_regions", [2, 3, 4])
@pytest.mark.parametrize(("load_s", "compute_s"), [(1, 4), (3, 3), (4, 1)])
def test_a_capped_buffer_is_as_good_as_the_depth_that_it_has_room_for(run_pipeline, load_s, compute_s, num_regions):
    """Its places are used again without the link waiting for more than the layer that lay there."""
    for depth in range(LAYERS + 1):
        took_s = run_pipeline(load_s, compute_s, depth, 1000, num_regions)
        assert took_s <= costs.pipeline_s(load_s, compute_s, LAYERS, min(depth, num_regions - 2)), f"depth {depth}"


# Two loads.


@device_ahead
def test_the_next_load_begins_when_all_of_this_one_has_begun(store, device_ahead):
    """Nothing of it takes a place that this one will want."""
    gate = GatedTransfers()
    rig = Rig(store, gate, device_ahead=device_ahead)
    first, second = rig.open("a", 2), rig.open("b", LAYERS)
    let_all_through(gate)
    rig.loader.pump()
    assert (gate.held, second.num_issued) == ((), 0), "layers of the next load took the place of this one's"
    first.begin()
    let_all_through(gate)
    assert (first.num_issued, second.num_issued) == (4, 0)
    first.layer(0)
    computing = Computation()
    first.computed(0, computing)
    computing.finish()
    rig.loader.pump()
    assert [(held.key, held.layer) for held in gate.held] == [("a", 4), *[("b", layer) for layer in range(LAYERS)]]
    gate.open()
    rig.end(first)
    second.begin()
    take_layers(second, "b")
    rig.end(second)
    assert rig.is_free


# Room that has to be made.


def test_a_layer_is_had_though_the_ring_has_no_room_for_the_one_in_front_of_it():
    """As on an accelerator, which wants that too before the layer is dispatched.

    Two layers of 16 tokens fit, but not if the first begins amid the ring, behind what is left of another load:

        mmmmmmMMMMMMssss    m, M: layers 0 and 1 of 12 tokens    s: layer 0 of 8
        SSSS..MMMMMMssss    S: its layer 1, where m was
        SSSSLLLLLLLL....    L: layer 0 of 16; without S there is no room for layer 1 either
    """
    layout = KVLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32", block_tokens=8)
    kvs = {str(num_tokens): make_kv(layout, num_tokens) for num_tokens in (8, 12, 16)}
    with contextlib.closing(filled_store(layout, kvs)) as store:
        loader = LayerLoader(layout, 2 * 16 * layout.token_bytes // 2)
        loader.device_ahead = 1
        done, readers = Computation(), []
        done.finish()
        for num_tokens in (12, 8):
            load = loader.open(store.prepare_load(str(num_tokens), range(64)), num_tokens, 2)
            load.begin()
            load.layer(1)
            readers.append(Computation())
            load.computed(0, done)
            load.computed(1, readers[-1])
            load.release()
            store.complete_load(load.ticket)
        readers[0].finish()
        long = loader.open(store.prepare_load("16", range(64)), 16, 2)
        assert long.num_issued == 1
        long.begin()
        readers[1].finish()
        for layer in range(2):
            long.layer(layer)
            assert long.num_issued == layer + 1
            long.computed(layer, done)
        long.release()
        store.complete_load(long.ticket)


# What goes wrong.


@device_ahead
@pytest.mark.parametrize("num_good", [0, 3])
def test_a_read_that_cannot_begin_is_told_when_its_layer_is_taken(store, num_good, device_ahead):
    rig = Rig(store, None, device_ahead=device_ahead)
    load = rig.open("a", num_good)
    rig.store.abort_load(load.ticket)
    load.begin()
    with pytest.raises(LoadError, match=f"layer {num_good} .*'a'.* aborted"):
        take_layers(load, "a", num_good + 1)
    load.release()
    assert rig.is_free


@device_ahead
def test_closing_ends_what_is_open_and_memory_is_pinned_only_for_a_device_to_copy_to(store, monkeypatch, device_ahead):
    pinned = []
    monkeypatch.setattr(transfer, "pin_host_memory", lambda memory: pinned.append(memory) or True)
    monkeypatch.setattr(transfer, "unpin_host_memory", lambda memory: pinned.remove(memory))
    rig = Rig(store, None, device_ahead=device_ahead)
    assert rig.loader.touch() >= 0
    assert [memory is rig.loader.buffer.memory for memory in pinned] == [True] * device_ahead
    loads = [rig.open("a", 2), rig.open("b", 2)]
    rig.loader.close()
    assert rig.is_free
    assert pinned == []
    rig.loader.close()
    for load in loads:
        store.abort_load(load.ticket)


@device_ahead
@pytest.mark.parametrize("num_regions", [3, 2 * LAYERS])
@pytest.mark.parametrize("num_taken", range(-1, LAYERS + 1))
def test_a_load_can_be_let_go_of_at_any_moment(store, num_taken, num_regions, device_ahead):
    """Before its job begins (-1), after some layers are read and one more was taken, after all."""
    rig = Rig(store, None, num_regions=num_regions, device_ahead=device_ahead)
    load = rig.open("a", 1)
    computations: list[Computation] = []
    if num_taken >= 0:
        load.begin()
    for layer in range(num_taken):
        array = load.layer(layer)
        computations.append(Computation(lambda layer=layer, array=array: expect("a", layer, array)))
        load.computed(layer, computations[-1])
    if 0 <= num_taken < LAYERS:
        load.layer(num_taken)
    load.release()
    assert rig.is_free == all(each.has_ended for each in computations)
    for each in computations:
        each.finish()
    assert rig.is_free
    load.release()
    assert rig.is_free, "once more does no harm"
    store.abort_load(load.ticket)
    again = rig.open("b", 1)
    again.begin()
    take_layers(again, "b")
    rig.end(again)


# What it tells.


def test_layer_times_leave_out_what_a_layer_waited_for_the_one_before(store, monkeypatch):
    timer = ManualTimer()
    monkeypatch.setattr(layer_loader, "time", types.SimpleNamespace(perf_counter=timer.now_s))
    rig = Rig(store, PacedLink(layer_s=2, timer=timer))
    load = rig.open("a", 2, job=7)
    timer.advance(1)
    assert load.layer_times_s == []
    timer.advance(9)
    assert load.layer_times_s == [2, 2]
    load.begin()  # Layers 2 and 3 from 10 on.
    timer.advance(3)
    load.layer(0)
    computing = Computation()
    load.computed(0, computing)
    computing.finish()
    timer.advance(0)
    rig.loader.pump()  # Layer 4 from 13 on, behind 3.
    timer.advance(7)
    assert load.layer_times_s == [2] * LAYERS
    rig.end(load)
    spans = [(span.track, span.start_s, span.end_s, span.args) for span in rig.timeline.spans()]
    starts = [0, 2, 10, 12, 14]
    assert spans == [("load", at, at + 2, {"layer": layer, "job": 7}) for layer, at in enumerate(starts)]


# The ring that layers are staged in, against a map of its bytes.


UNIT = 128  # What sizes are rounded up to.
RING_BYTES = 8 * UNIT
RING_STEPS = st.lists(st.one_of(st.none(), st.integers(1, RING_BYTES + 1)), max_size=40)
"""None gives the oldest piece back, a number takes one of that size."""


def place_for(is_taken: np.ndarray, behind: int, size: int) -> int | None:
    """Where a piece must go: right behind the newest, or at the beginning; None where bytes of both are taken."""
    for start in (behind, 0):
        if start + size <= RING_BYTES and not is_taken[start : start + size].any():
            return start
    return None


@hypothesis.given(RING_STEPS)
@hypothesis.settings(max_examples=300, deadline=None)
def test_pieces_are_where_a_map_of_the_bytes_says(steps):
    buffer, is_taken = ReadBuffer(RING_BYTES), np.zeros(RING_BYTES, bool)
    held = collections.deque()
    assert buffer.memory.ctypes.data % UNIT == 0, "copies of memory that is not aligned are slow"
    for num_bytes in steps:
        if num_bytes is None:
            if held:
                oldest = held.popleft()
                assert buffer.give_back() == oldest
                is_taken[oldest] = False
            continue
        size = -(-num_bytes // UNIT) * UNIT
        if size > RING_BYTES:
            with pytest.raises(ValueError, match=f"at most the {RING_BYTES} bytes of the read buffer, got {size}"):
                buffer.take(num_bytes)
            continue
        start = place_for(is_taken, held[-1].stop if held else 0, size)
        piece = buffer.take(num_bytes)
        if start is None:
            assert piece is None
            continue
        assert (piece.start, piece.stop) == (start, start + size)
        is_taken[start : start + size] = True
        held.append(piece)
    for _ in held:
        buffer.give_back()
    assert buffer.take(RING_BYTES) is not None, "all was given back, and all is not free"
