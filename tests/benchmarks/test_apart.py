"""A load and a compute, one without the other: each is the engine's own, and of all that was asked for."""

import dataclasses

import numpy as np
import pytest

from benchmarks.apart import ApartEngine
from benchmarks.engines import send_turn
from benchmarks.harness import BenchError
from ca_jax.config import BlendConfig
from ca_jax.engine import Engine
from ca_jax.storage.config import StoreConfig
from tests.benchmarks.suite_checks import ENGINE

STORE = StoreConfig(dram_gib=0.01, block_tokens=16)
CONFIG = dataclasses.replace(ENGINE, context_window=256, max_batch_size=1, store=STORE)


@pytest.mark.parametrize("ratio", [0.0, 0.6, 1.0])
def test_a_blend_over_what_was_loaded_is_the_engines(wordless, ratio):
    """Of a prefill over a whole history the suite `ttft` shows it: all ways draw the same token."""
    rng = np.random.default_rng(1)
    chunks = [rng.integers(wordless.config.vocab_size, size=40).tolist() for _ in range(3)]
    question = chunks.pop()
    config = dataclasses.replace(CONFIG, blend=BlendConfig(recompute_ratio=ratio))
    with Engine(wordless, config) as engine:
        engine.precompute(chunks)
        engine.wait_for_saves()
        alone = ApartEngine(engine, max_history_tokens=80)
        with alone.loaded_context(chunks) as context:
            token, elapsed_s = alone.blend(context, question, ratio)
        assert (context.num_tokens, elapsed_s > 0 < context.load_s) == (80, True)
        answer, _ = send_turn(engine, engine.session(), question, chunks)
        refused = pytest.raises(BenchError, match="a load of 2 chunks must find all of them in DRAM, got 1")
        with refused, alone.loaded_context([chunks[0], question]):
            pytest.fail("there must be no context")
        session = engine.session()
        send_turn(engine, session, question)
        refused = pytest.raises(BenchError, match="a load of 41 tokens must find all of them in DRAM, got 40")
        with refused, alone.loaded(session):
            pytest.fail("there must be no history")
        for chunk in chunks:
            assert engine._kv.store.drop(engine._kv.chunks.key(chunk, "")), "it is there, and not in use"
        alone.close()
    assert token == answer
    if ratio == 1:
        assert token == int(np.argmax(wordless.logits([*chunks[0], *chunks[1], *question])[-1]))
