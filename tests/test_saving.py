"""New KV on its way into the store: the thread that copies it, one turn's saver, and those of all turns together."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from benchmarks.paced import ControlledStore
from ca_jax.config import EngineConfig
from ca_jax.device.transfer import to_device
from ca_jax.kv.async_saver import AsyncSaver, Part
from ca_jax.kv.save import TurnKV, TurnSaver, WriteBuffer
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.records import Owner
from ca_jax.storage.store import AttentionStore
from ca_jax.storage.tickets import SaveTicket
from ca_jax.telemetry.metrics import EngineMetrics
from ca_jax.telemetry.timeline import Timeline
from tests.overlap_kit import in_thread, open_gate
from tests.storage.store_helpers import as_bits, load, make_kv

LAYOUT = KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32", block_tokens=4)
LAYERS = range(LAYOUT.num_layers)
NUM_TOKENS, NUM_BLOCKS, GROUP_TOKENS = 40, 12, 4
KV = make_kv(LAYOUT, NUM_TOKENS)
TOKENS = list(range(100, 100 + NUM_TOKENS))
PADDING = make_kv(LAYOUT, 8, seed=5)
OWNER = Owner(tenant="t", session_id="s")
MAX_TOKENS = 10  # Of the write buffer.


class Rig:
    """The savers before a store whose saves stand at a gate, and whose room a test may say is on its way."""

    def __init__(self, layout: KVLayout = LAYOUT) -> None:
        config = StoreConfig(dram_gib=NUM_BLOCKS * layout.block_bytes / GIB, block_tokens=layout.block_tokens)
        self.gate = open_gate()
        self.inner = AttentionStore(layout, config)
        self.store = ControlledStore(self.inner, saves=self.gate)
        self.is_room_coming = False
        self.store.room_is_coming = lambda *_: self.is_room_coming
        self.timeline, self.metrics = Timeline(), EngineMetrics()
        self.done: list[threading.Thread] = []
        self.samples: list[tuple[int, float]] = []
        self.saver = AsyncSaver(
            lambda: self.done.append(threading.current_thread()),
            on_sample=lambda *sample: self.samples.append(sample),
            timeline=self.timeline,
        )
        buffer_gib = MAX_TOKENS * layout.token_bytes / GIB
        config = EngineConfig(write_buffer_gib=buffer_gib, save_group_tokens=GROUP_TOKENS)
        self.buffer = WriteBuffer(self.store, self.saver, config, self.metrics)

    def close(self) -> None:
        self.gate.open()
        self.saver.close()
        self.inner.close()

    def prepare(self, key: str, num_tokens: int = 6):
        return self.store.prepare_save(key, 0, TOKENS[:num_tokens])

    def write_out(self, num_transfers: int, error: OSError | None = None) -> list[tuple[str, int]]:
        """Lets so many copies through, one after the other, the last with this error; whose layers they are."""
        passed = []
        for left in reversed(range(num_transfers)):
            self.gate.wait_held()
            transfer = self.gate.let_through(error=None if left else error)
            passed.append((transfer.key, transfer.layer))
        return passed

    def begin(self, start_token: int = 0, **options: object) -> TurnSaver:
        """Saving of a turn of session "s"."""
        turn = TurnKV(key="s", owner=OWNER, start_token=start_token)
        return TurnSaver(self.store, self.saver, turn, GROUP_TOKENS, **options)

    def publish(self) -> list[Exception]:
        """Waits for what was handed in, and does with it as the engine does; what was given up, why."""
        errors = []
        for result in self.saver.poll(wait=True):
            if result.error is None:
                self.store.complete_save(result.ticket)
            else:
                self.store.abort_save(result.ticket)
                errors.append(result.error)
        return errors

    def begin_turn(self, key: str, num_tokens: int, start: int = 0) -> TurnSaver:
        """A turn, through the write buffer, that prefills so many tokens and has not ended."""
        turn = self.buffer.begin(TurnKV(key=key, owner=Owner(), start_token=start))
        turn.begin_pass(TOKENS[start : start + num_tokens], start)
        for layer in LAYERS:
            turn.add_layer(layer, to_device(KV[layer, :, start : start + num_tokens]))
        turn.end_pass()
        return turn

    @property
    def num_waiting(self) -> float:
        """Tokens that the write buffer counts."""
        return self.buffer.num_bytes / LAYOUT.token_bytes

    def expect_stored(self, num_tokens: int, key: str = "s") -> None:
        """Just the first tokens are stored, with their KV."""
        found = load(self.inner, key, TOKENS)
        assert (0 if found is None else found.shape[2]) == num_tokens
        if num_tokens:
            np.testing.assert_array_equal(as_bits(found), as_bits(KV[:, :, :num_tokens]))


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


@pytest.fixture
def gated(rig) -> Rig:
    """The same with the gate shut."""
    rig.gate.shut()
    return rig


# The thread that copies.


def submit(saver: AsyncSaver, ticket: SaveTicket, parts: Iterable[Part]) -> None:
    """Has all of a save written."""
    for part in parts:
        saver.add(ticket, part)
    saver.end(ticket)


def parts(num_tokens: int = 6) -> list[Part]:
    return [Part.of_layer(layer, to_device(KV[layer, :, :8]), num_tokens) for layer in LAYERS]


def test_a_write_that_breaks_ends_its_save_and_no_other(gated):
    a, b = gated.prepare("a"), gated.prepare("b")
    submit(gated.saver, a, parts())
    submit(gated.saver, b, parts())
    assert gated.saver.pending_bytes == 2 * 6 * LAYOUT.token_bytes, "each tells of its own tokens"
    assert (gated.saver.poll(), gated.saver.poll(wait=True, key="c")) == ([], []), "there is no such save to wait for"
    assert gated.write_out(2, OSError("worn out")) == [("a", 0), ("a", 1)]
    assert gated.write_out(3) == [("b", 0), ("b", 1), ("b", 2)], "more of a broken save was written"
    assert [str(error) for error in gated.publish()] == ["worn out"]
    assert len(gated.done) == 2, "the one that waits is told of each"
    assert threading.current_thread() not in gated.done
    assert gated.saver.pending_bytes == 0
    gated.expect_stored(6, "b")
    assert gated.store.stats().used_bytes == 2 * LAYOUT.block_bytes
    gated.gate.open()
    submit(gated.saver, gated.prepare("a"), parts())
    assert gated.publish() == [], "an old error fell on a new save"
    too_many = Part.of_layer(0, to_device(KV[0, :, :8]), 7)
    submit(gated.saver, gated.prepare("c"), [too_many])
    assert isinstance(gated.publish()[0], ValueError)


def test_copies_large_enough_to_say_something_are_measured_and_all_are_on_the_timeline():
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=2, head_dim=64, dtype="float32", block_tokens=64)
    rig, kv = Rig(layout), make_kv(layout, 64)
    for key, num_tokens in (("small", 63), ("large", 64)):
        ticket = rig.store.prepare_save(key, 0, range(num_tokens))
        submit(rig.saver, ticket, [Part.of_layer(0, to_device(kv[0, :, :num_tokens]), num_tokens)])
    decoded = Part.decoded([(to_device(kv[:, :, :1]),)] * 64, [0] * 64)
    submit(rig.saver, rig.store.prepare_save("decoded", 0, range(64)), [decoded])
    rig.saver.close()  # What was added is written first.
    assert len(rig.saver.poll()) == 3
    rig.close()
    assert [num_bytes for num_bytes, _ in rig.samples] == [64 * layout.token_bytes]
    assert all(seconds > 0 for _, seconds in rig.samples)
    spans = [(span.track, span.name, span.args["key"]) for span in rig.timeline.spans()]
    assert spans == [("save", "save 0", "small"), ("save", "save 0", "large"), ("save", "save 64 decoded", "decoded")]


# One turn.


def run_layers(turn: TurnSaver, start: int, stop: int, layers: range = LAYERS) -> None:
    """Layers of a pass over tokens [start, stop), with others before and behind that are like nothing else."""
    for layer in layers:
        others, first = PADDING[layer], (start + layer) % 3
        around = np.concatenate([others[:, :first], KV[layer, :, start:stop], others[:, first:]], axis=1)
        turn.add_layer(layer, to_device(around), first)


def run_pass(turn: TurnSaver, start: int, stop: int) -> None:
    turn.begin_pass(TOKENS[start:stop], start)
    run_layers(turn, start, stop)
    turn.end_pass()


def decode(turn: TurnSaver, start: int, stop: int) -> None:
    """Decodes tokens in changing company."""
    for token in range(start, stop):
        rows = np.stack([KV[:, :, (token + other) % NUM_TOKENS] for other in range(3)], axis=2)
        turn.add_decoded(TOKENS[token], (to_device(np.roll(rows, token % 3, axis=2)),), token % 3)


@pytest.mark.parametrize("num_layers", [0, 1, 3])
@pytest.mark.parametrize("ends", ["saved", "given up"])
def test_what_waits_for_room_is_held_in_order_and_goes_when_there_is_some(rig, ends, num_layers):
    """That may be in the middle of a pass."""
    turn = rig.begin()
    turn.begin_pass(TOKENS[:10], 0)
    run_layers(turn, 0, 10, range(2))
    rig.saver.wait_until_pending(0)
    assert len(rig.timeline.spans()) == 2, "layers must be written before their pass has ended"
    run_layers(turn, 0, 10, range(2, 3))
    turn.end_pass()
    rig.is_room_coming = True
    run_pass(turn, 10, 14)
    turn.begin_pass(TOKENS[14:20], 14)
    run_layers(turn, 14, 20, range(num_layers))
    assert turn.held_bytes == (3 * 4 + num_layers * 6) * LAYOUT.token_bytes // 3
    assert rig.publish() == []
    rig.expect_stored(10)
    turn.submit_held()
    assert turn.is_held, "there is no room yet"
    if ends == "given up":
        turn.give_up()
    rig.is_room_coming = False
    turn.submit_held()
    assert (turn.is_held, turn.held_bytes) == (False, 0)
    run_layers(turn, 14, 20, range(num_layers, 3))
    turn.end_pass()
    decode(turn, 20, 22)
    turn.end()
    assert (rig.publish(), rig.saver.pending_bytes) == ([], 0)
    rig.expect_stored(22 if ends == "saved" else 10)


# All turns together.


def test_what_waits_counts_until_it_is_written_and_making_room_waits_no_longer(gated):
    buffer = gated.buffer
    assert (gated.num_waiting, buffer.admits(MAX_TOKENS), buffer.admits(100)) == (0, True, True), "it is empty"
    gated.begin_turn("a", 6)
    assert gated.num_waiting == 6
    assert [buffer.admits(more) for more in (4, 5)] == [True, False]
    buffer.make_room(4)
    assert gated.metrics.write_stall_s == 0
    with in_thread(lambda: buffer.make_room(6)):
        gated.write_out(1)
    assert gated.num_waiting == 4
    assert gated.metrics.write_stall_s > 0
    gated.is_room_coming = True
    gated.begin_turn("b", 5)
    assert gated.num_waiting == 4 + 5, "what waits for room in the store is on the device too"


def test_what_waits_for_the_store_is_given_up_oldest_first_where_nothing_else_makes_room(rig):
    rig.is_room_coming = True
    for key in ("a", "b", "c"):
        rig.buffer.end(rig.begin_turn(key, 3))
    assert rig.num_waiting == 9
    rig.buffer.make_room(4)
    assert rig.num_waiting == 6
    assert not any(rig.buffer.is_running(key) for key in "abc")
    assert [rig.buffer.is_unsaved(key) for key in "abc"] == [False, True, True]
    rig.is_room_coming = False
    rig.buffer.make_room(6)  # What waits has its room as soon as there is some.
    rig.buffer.settle()
    for key, num_tokens in (("a", 0), ("b", 3), ("c", 3)):
        rig.expect_stored(num_tokens, key)
    assert not any(info.pinned for info in rig.store.list())


def test_a_turn_runs_until_it_ends_and_is_unsaved_until_its_saves_are_taken_in(gated):
    done: list[int] = []
    turn = gated.begin_turn("a", 6)
    assert (gated.buffer.is_running("a"), gated.buffer.is_running("b")) == (True, False)
    assert gated.store.list()[0].pinned, "what a turn builds on may be evicted"
    gated.buffer.end(turn)
    assert (gated.buffer.is_running("a"), gated.buffer.is_unsaved("a")) == (False, True)
    gated.buffer.when_saved("b", lambda: done.append(0))
    assert done == [0], "nothing of it is unsaved"
    for number in (1, 2):
        gated.buffer.when_saved("a", lambda number=number: done.append(number))
    gated.buffer.collect()
    assert done == [0]
    gated.gate.open()
    gated.buffer.collect(wait=True, key="a")
    assert (done, gated.buffer.is_unsaved("a")) == ([0, 1, 2], False)
    assert not gated.store.list()[0].pinned
    gated.expect_stored(6, "a")
    gated.buffer.end(gated.begin_turn("a", 5, start=6))
    gated.buffer.settle()
    gated.expect_stored(11, "a")
