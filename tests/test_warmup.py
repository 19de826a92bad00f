"""Rates are measured when an engine warms up: through what stands before its store, and leaving nothing behind.

Not here: what is compiled (test_invariants), how rates are fitted (test_costs), and kept up (test_rate_meter).
"""

from __future__ import annotations

import collections
from collections.abc import Callable

import pytest

from ca_jax.storage.store import AttentionStore
from ca_jax.testing.controlled_store import ControlledStore
from ca_jax.testing.paced import Future, Transfer
from tests import engine_kit as kit

MODEL = kit.tiny_model().config


class Counted:
    """Transfers that take place at once, and are counted; the first `num_broken` break."""

    def __init__(self, num_broken: int = 0) -> None:
        self.counts: collections.Counter[tuple[str, int | None]] = collections.Counter()
        self._num_broken = num_broken

    def submit(self, transfer: Transfer, copy: Callable[[], object]) -> Future:
        self.counts[transfer.direction, transfer.layer] += 1
        future: Future = Future()
        if self.counts.total() <= self._num_broken:
            future.set_exception(OSError("broken"))
        else:
            future.set_result(copy())
        return future


def warm_up(engine) -> None:
    engine.warmup(max_history_tokens=0, max_new_tokens=8)


def test_warming_up_measures_rates_through_the_wrapped_store_and_leaves_nothing_in_it():
    transfers = Counted()

    def wrapper(store: AttentionStore) -> ControlledStore:
        return ControlledStore(store, loads=transfers, saves=transfers)

    with kit.small_engine(store_wrapper=wrapper) as engine:
        assert engine.rates is None
        warm_up(engine)
        assert set(transfers.counts) == {(way, layer) for way in ("load", "save") for layer in range(MODEL.num_layers)}
        rates = engine.rates
        assert (rates.num_layers, rates.layer_token_bytes) == (MODEL.num_layers, kit.TOKEN_BYTES // MODEL.num_layers)
        assert rates.load.seconds(1 << 20) > 0
        assert rates.save.seconds(1 << 20) > 0
        assert rates.prefill.seconds(256, 16) > 0
        stats = engine.store_stats()
        assert (stats.num_sessions, stats.used_bytes, stats.num_aborted_saves) == (0, 0, 0)
        assert engine._kv._loader.room(engine._kv._loader.buffer.memory.nbytes) is not None, "staging is held"
        measured = engine.metrics
        assert (measured.turns, measured.prefill_passes, measured.failed_saves, measured.loaded_histories) == (0,) * 4


@pytest.mark.parametrize("store", [kit.STORE_OFF, kit.store_of(2)], ids=["off", "two blocks"])
def test_without_room_in_the_store_there_are_no_rates_and_turns_run_all_the_same(store):
    with kit.small_engine(store=store, max_tpot_ms=1.0, recompute_if_faster=True) as engine:
        warm_up(engine)
        assert engine.rates is None
        sessions = [engine.session() for _ in range(2)]
        kit.drain(*(session.send("Hello.", max_tokens=6) for session in sessions))
        for session in sessions:
            prompt = session.token_ids[: session.usage.prompt_tokens]
            assert session.token_ids[len(prompt) :] == kit.greedy_answer(prompt, 6)


def test_rates_are_measured_where_staging_holds_less_than_a_history():
    with kit.small_engine(read_buffer_gib=0.0) as engine:
        warm_up(engine)
        assert engine.rates is not None
        assert engine.metrics.failed_loads == 0
        kit.converse(session := engine.session(), ("Hello.", "Go on."))
        assert session.usage.num_cached_tokens > 0


@pytest.mark.parametrize("num_broken", [1, 2])
def test_a_measurement_that_breaks_is_left_out(num_broken):
    """Of a save: there is nothing to load then, and the engine goes on without rates or with those of the rest."""
    transfers = Counted(num_broken)
    with kit.small_engine(store_wrapper=lambda store: ControlledStore(store, saves=transfers)) as engine:
        warm_up(engine)
        assert engine.store_stats().used_bytes == 0
        kit.say(engine.session(), "Hello.", 3)
