"""An engine on whatever device there is: its tokens are those of a plain pass, with every overlap on and off."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ca_jax
from ca_jax.kv.save import AsyncSaver
from tests import engine_kit as kit
from tests.tolerances import LOGITS_ATOL

OPENINGS = ("Hello there.", "Tell me of rivers.", "Why?")
NUM_TURNS = 3
OVERLAPS = {
    "all of it": {"read_buffer": "all", "async_save": True},
    "one layer": {"read_buffer": 1, "async_save": True},
    "no buffer": {"read_buffer": 0, "async_save": True},
    "none of it": {"read_buffer": "off", "async_save": False},
}


def fill_with_nan(engine: ca_jax.Engine) -> None:
    """Leaves nothing but NaN where nothing is yet: in blocks, in staging, in the decode slots."""
    engine._kv.store._dram.slab[...] = np.nan
    engine._kv._loader.buffer.memory.view(np.float32)[...] = np.nan
    engine._runner.slots.buffers = jax.tree.map(lambda slot: jnp.full_like(slot, jnp.nan), engine._runner.slots.buffers)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_tokens_are_those_of_a_plain_pass_with_unused_memory_full_of_nan(overlap):
    with kit.small_engine(**OVERLAPS[overlap], recompute_if_faster=False) as engine:
        engine.wait_until_ready()
        fill_with_nan(engine)
        sessions = [engine.session() for _ in OPENINGS]
        for turn in range(NUM_TURNS):
            num_known = [len(session.token_ids) for session in sessions]
            kit.drain(*(s.send(f"{o} {turn}", max_tokens=10) for s, o in zip(sessions, OPENINGS, strict=True)))
            for session, known in zip(sessions, num_known, strict=True):
                assert session.usage.num_cached_tokens == max(known - 1, 0), "the history was not reused"
                prompt = session.token_ids[: session.usage.prompt_tokens]
                assert session.token_ids[len(prompt) :] == kit.greedy_answer(prompt, 10)
        assert engine.metrics.failed_loads == engine.metrics.failed_saves == 0


def test_saves_that_wait_until_the_slots_were_donated_many_times_write_what_was_computed(monkeypatch):
    gate = threading.Event()

    def held_back(self, ticket, part, original=AsyncSaver._write):
        assert gate.wait(60)
        original(self, ticket, part)

    prompt_ids = kit.prompt(70)
    with kit.small_engine() as engine:
        monkeypatch.setattr(AsyncSaver, "_write", held_back)
        try:
            session = engine.session()
            slots = engine._runner.slots.buffers
            kit.say(session, prompt_ids, 30)
            assert all(buffer.is_deleted() for buffer in jax.tree.leaves(slots)), "no buffer was donated"
            assert engine.store_stats().num_saves == 0, "saves were not held back"
        finally:
            gate.set()
        stored = kit.stored_kv(engine, session)
    expected = kit.full_pass(session.token_ids[: stored.shape[2]])[1]
    assert stored.shape[2] == len(session.token_ids) - 1
    np.testing.assert_allclose(stored, expected, atol=LOGITS_ATOL["float32"], rtol=0)
