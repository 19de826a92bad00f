"""The thread that copies new KV into the store: order, failures, and what is said to be pending."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.paced import ControlledStore
from ca_jax.device.transfer import to_device
from ca_jax.kv.save import AsyncSaver, DecodedPart, LayerPart, SaveAbandonedError
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.store import AttentionStore
from ca_jax.telemetry.timeline import Timeline
from tests.storage.store_helpers import as_bits, load, make_kv
from tests.transfers_kit import GatedTransfers

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32", block_tokens=4)
NUM_TOKENS, PADDED = 6, 8
KV = make_kv(LAYOUT, PADDED)
PATIENCE_S = 60


class Rig:
    """A saver, and a store whose saves stand before a gate that is shut."""

    def __init__(self, store: AttentionStore) -> None:
        self.gate = GatedTransfers()
        self.store = ControlledStore(store, saves=self.gate)
        self.timeline = Timeline()
        self.done, self.samples = [], []
        self.saver = AsyncSaver(
            lambda: self.done.append(threading.current_thread()),
            on_sample=lambda *sample: self.samples.append(sample),
            timeline=self.timeline,
        )

    def prepare(self, key: str, num_tokens: int = NUM_TOKENS):
        return self.store.prepare_save(key, 0, range(num_tokens))

    def write_out(self, num_transfers: int) -> list[tuple[str, int]]:
        """Lets so many copies through, one after the other; whose layers they are."""
        passed = []
        for _ in range(num_transfers):
            self.gate.wait_held()
            transfer = self.gate.let_through()
            passed.append((transfer.key, transfer.layer))
        return passed


@pytest.fixture
def rig() -> Iterator[Rig]:
    store = AttentionStore(LAYOUT, StoreConfig(dram_gib=16 * LAYOUT.block_bytes / GIB, block_tokens=4))
    rig = Rig(store)
    yield rig
    rig.gate.open()
    rig.saver.close()
    store.close()


def parts(num_tokens: int = NUM_TOKENS) -> list[LayerPart]:
    return [LayerPart(layer, to_device(KV[layer]), num_tokens, 0) for layer in range(LAYOUT.num_layers)]


def stored(rig: Rig, key: str) -> np.ndarray | None:
    return load(rig.store.store, key, range(100))


def test_saves_that_are_handed_in_together_are_written_and_come_back_in_order(rig):
    a, b = rig.prepare("a"), rig.prepare("b")
    for layer in range(LAYOUT.num_layers):
        rig.saver.add(b, parts()[layer])
        rig.saver.add(a, parts()[layer])
    rig.saver.end(a)
    rig.saver.end(b)
    assert rig.write_out(6) == [("b", 0), ("a", 0), ("b", 1), ("a", 1), ("b", 2), ("a", 2)]
    results = rig.saver.poll(wait=True)
    assert [(result.ticket, result.error) for result in results] == [(a, None), (b, None)]
    assert (rig.saver.num_open, rig.saver.poll(), rig.saver.poll(wait=True)) == (0, [], [])
    for key, ticket in (("a", a), ("b", b)):
        assert stored(rig, key) is None, "what is not published can be read"
        assert rig.store.complete_save(ticket)
        np.testing.assert_array_equal(as_bits(stored(rig, key)), as_bits(KV[:, :, :NUM_TOKENS]))


def test_a_part_may_begin_within_its_array_and_anywhere_within_its_save(rig):
    rig.gate.open()
    ticket = rig.prepare("a", 7)
    for layer in range(LAYOUT.num_layers):
        kv = to_device(KV[layer])
        rig.saver.add(ticket, LayerPart(layer, kv, 3, token_offset=4, first=5))
        rig.saver.add(ticket, LayerPart(layer, kv, 4, token_offset=0, first=1))
    rig.saver.end(ticket)
    rig.saver.poll(wait=True)
    assert rig.store.complete_save(ticket)
    np.testing.assert_array_equal(as_bits(stored(rig, "a")), as_bits(KV[:, :, 1:8]))


def test_decoded_tokens_are_gathered_from_their_rows(rig):
    rig.gate.open()
    ticket, rows = rig.prepare("a"), (2, 0, 1, 1, 2, 0)
    others = make_kv(LAYOUT, PADDED, seed=9)
    steps = []
    for token, row in enumerate(rows):
        step = np.stack([others[:, :, token]] * 3, axis=2)
        step[:, :, row] = KV[:, :, token]
        steps.append(to_device(step))
    part = DecodedPart(tuple(steps), rows)
    assert part.num_bytes == NUM_TOKENS * LAYOUT.token_bytes, "its share of what three sessions decoded"
    rig.saver.submit(ticket, [part])
    rig.saver.poll(wait=True)
    assert rig.store.complete_save(ticket)
    np.testing.assert_array_equal(as_bits(stored(rig, "a")), as_bits(KV[:, :, :NUM_TOKENS]))


def test_a_write_that_breaks_ends_its_save_and_no_other(rig):
    a, b = rig.prepare("a"), rig.prepare("b")
    rig.saver.submit(a, parts())
    rig.saver.submit(b, parts())
    assert rig.write_out(1) == [("a", 0)]
    rig.gate.wait_held()
    rig.gate.let_through(error=OSError("worn out"))
    assert rig.write_out(3) == [("b", 0), ("b", 1), ("b", 2)], "more of a broken save was written"
    broken, good = rig.saver.poll(wait=True)
    assert (broken.ticket, str(broken.error)) == (a, "worn out")
    assert (good.ticket, good.error) == (b, None)
    assert rig.saver.pending_bytes == 0
    rig.store.abort_save(a)
    assert rig.store.complete_save(b)
    assert rig.store.stats().used_bytes == 2 * LAYOUT.block_bytes
    again = rig.prepare("a")
    rig.gate.open()
    rig.saver.submit(again, parts())
    assert [result.error for result in rig.saver.poll(wait=True)] == [None], "an old error fell on a new save"


def test_a_write_of_what_does_not_fit_is_an_error_of_its_save(rig):
    rig.gate.open()
    ticket = rig.prepare("a")
    rig.saver.submit(ticket, [LayerPart(0, to_device(KV[0]), NUM_TOKENS + 1, 0)])
    (result,) = rig.saver.poll(wait=True)
    assert isinstance(result.error, ValueError)
    assert "there must be tokens within" in str(result.error)


def test_an_abandoned_save_comes_back_with_its_reason_behind_what_was_added(rig):
    a, b = rig.prepare("a"), rig.prepare("b")
    rig.saver.add(a, parts()[0])
    rig.saver.end(a, SaveAbandonedError("the turn was given up"))
    rig.saver.add(b, parts()[0])
    rig.saver.end(b, SaveAbandonedError("this one too"))
    assert rig.write_out(1) == [("a", 0)]
    rig.gate.wait_held()
    rig.gate.let_through(error=OSError("worn out"))
    results = rig.saver.poll(wait=True)
    assert [(result.ticket, str(result.error)) for result in results] == [(a, "the turn was given up"), (b, "worn out")]
    for result in results:
        rig.store.abort_save(result.ticket)
    assert rig.store.stats().used_bytes == 0


def test_a_save_that_was_aborted_meanwhile_writes_nothing_and_is_not_published(rig):
    ticket = rig.prepare("a")
    rig.saver.submit(ticket, parts())
    rig.gate.wait_held()
    rig.store.abort_save(ticket)
    rig.gate.open()
    (result,) = rig.saver.poll(wait=True)
    assert result.error is None
    assert not rig.store.complete_save(result.ticket)
    assert rig.store.stats().used_bytes == 0


def test_polling_returns_what_has_ended_and_waits_only_where_told(rig):
    a, b = rig.prepare("a"), rig.prepare("b")
    rig.saver.submit(a, parts())
    rig.saver.submit(b, parts())
    assert rig.saver.poll() == []
    assert rig.saver.poll(wait=True, key="c") == [], "there is no such save to wait for"
    rig.write_out(3)
    assert [result.ticket for result in rig.saver.poll(wait=True, key="a")] == [a], "b stands before the gate"
    assert (rig.saver.num_open, rig.saver.is_open("a"), rig.saver.is_open("b")) == (1, False, True)
    assert rig.saver.poll(wait=True, key="a") == []
    rig.gate.open()
    assert [result.ticket for result in rig.saver.poll(wait=True, key="b")] == [b]
    assert (rig.saver.num_open, rig.saver.is_open("b")) == (0, False)


def test_waiting_for_one_session_returns_all_of_its_saves_and_those_before(rig):
    rig.gate.open()
    tickets = [rig.prepare("a"), rig.prepare("b"), rig.store.prepare_save("a", NUM_TOKENS, range(2))]
    for ticket in tickets:
        rig.saver.submit(ticket, parts(ticket.num_tokens))
    assert [result.ticket for result in rig.saver.poll(wait=True, key="a")] == tickets


def test_what_is_added_and_not_written_is_pending_as_the_device_holds_it(rig):
    ticket, part_bytes = rig.prepare("a"), KV[0].nbytes
    assert rig.saver.pending_bytes == 0
    for count, part in enumerate(parts(), start=1):
        rig.saver.add(ticket, part)
        assert rig.saver.pending_bytes == count * part_bytes, "padding is held too"
    waiting = threading.Thread(target=rig.saver.wait_until_pending, args=(part_bytes,), daemon=True)
    waiting.start()
    rig.saver.wait_until_pending(3 * part_bytes)
    rig.write_out(1)
    rig.saver.wait_until_pending(2 * part_bytes)
    assert rig.saver.pending_bytes == 2 * part_bytes
    assert waiting.is_alive(), "two parts are pending, and it waits for one"
    rig.write_out(1)
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert rig.saver.pending_bytes == part_bytes
    rig.gate.wait_held()
    rig.gate.let_through(error=OSError("worn out"))
    rig.saver.wait_until_pending(0)
    rig.saver.end(ticket)
    assert [str(result.error) for result in rig.saver.poll(wait=True)] == ["worn out"]


def test_what_cannot_be_brought_to_the_host_is_not_pending(rig, monkeypatch):
    def refuse(part: LayerPart) -> LayerPart:
        raise RuntimeError("no memory to pin")

    monkeypatch.setattr(LayerPart, "on_host", refuse)
    with pytest.raises(RuntimeError, match="no memory to pin"):
        rig.saver.add(rig.prepare("a"), parts()[0])
    assert rig.saver.pending_bytes == 0
    rig.saver.wait_until_pending(0)


def test_whoever_waits_is_told_of_each_save_that_ended(rig):
    rig.gate.open()
    for key in ("a", "b"):
        rig.saver.submit(rig.prepare(key), parts())
    rig.saver.poll(wait=True)
    rig.saver.close()
    assert len(rig.done) == 2
    assert threading.current_thread() not in rig.done, "only the saver's thread tells"


def test_copies_large_enough_to_say_something_are_measured_and_all_are_on_the_timeline():
    layout = KVLayout(num_layers=1, num_kv_heads=2, head_dim=64, dtype="float32", block_tokens=64)
    store = AttentionStore(layout, StoreConfig(dram_gib=8 * layout.block_bytes / GIB, block_tokens=64))
    rig = Rig(store)
    rig.gate.open()
    kv = make_kv(layout, 70)
    for key, num_tokens in (("small", 63), ("large", 64)):
        rig.saver.submit(rig.prepare(key, num_tokens), [LayerPart(0, to_device(kv[0, :, :num_tokens]), num_tokens, 0)])
    rig.saver.submit(
        rig.prepare("decoded", 64), [DecodedPart(tuple(to_device(kv[:, :, :1]) for _ in range(64)), (0,) * 64)]
    )
    rig.saver.poll(wait=True)
    rig.saver.close()
    store.close()
    assert [num_bytes for num_bytes, _ in rig.samples] == [64 * layout.token_bytes]
    assert all(seconds > 0 for _, seconds in rig.samples)
    spans = [(span.track, span.name, span.args["key"]) for span in rig.timeline.spans()]
    assert spans == [("save", "save 0", "small"), ("save", "save 0", "large"), ("save", "save 64 decoded", "decoded")]
    assert rig.saver.busy_s > 0


def test_closing_finishes_what_was_added(rig):
    rig.gate.open()
    ticket = rig.prepare("a")
    rig.saver.submit(ticket, parts())
    rig.saver.close()
    assert ticket.num_missing == 0
    assert [result.ticket for result in rig.saver.poll()] == [ticket]
