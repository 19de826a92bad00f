"""Every architecture through the engine: with reuse across turns, and past the end of its window.

Turns that fit are held against `transformers`, each token by a full pass; turns that overflow against the same cache
sliced in memory, or against `transformers` where no layer looks back to what has left. Prompts are longer than the
sliding windows, and of lengths that few functions are compiled for.
"""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from ca_jax.device import steps
from ca_jax.device.runner import Prefill, Runner
from ca_jax.device.slots import RunnerSizes
from ca_jax.models import huggingface
from ca_jax.models.random_weights import random_params
from ca_jax.telemetry.metrics import CompileCounter
from tests import engine_kit as kit
from tests import families_kit
from tests import overflow_kit as ok

WINDOW = 128
ANSWER = 4
CONFIG = {"context_window": WINDOW, "max_batch_size": 1, "overflow": ok.config(ratio=0.25)}
NAMES = (
    "yarn_rope",
    "dynamic_rope",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_sliding",
    "qwen3",
    "falcon_7b",
    "falcon_40b",
    "neox",
)


def overflows_unseen(engine, pair):
    """Where all layers slide, what leaves is what none looks back to: answers are as if no context were full."""
    session, everything = engine.session(), []
    for turn, num_tokens in enumerate((80, 14, 14, 14)):
        prompt = families_kit.prompt(num_tokens, seed=turn)
        expected = pair.their_answer([*everything, *prompt], 12)
        assert ok.say(session, prompt, 12) == expected
        everything += [*prompt, *expected]
        engine.wait_for_saves()
    assert session.num_dropped > 0
    assert session.token_ids == everything[session.num_dropped :]


@pytest.mark.parametrize("name", NAMES)
def test_three_turns_and_an_overflow(name):
    pair = families_kit.pair(name)
    with kit.small_engine(pair.model, **CONFIG) as engine:
        session, ids = engine.session(), list[int]()
        for turn, num_tokens in enumerate((56, 14, 2)):
            prompt = families_kit.prompt(num_tokens, seed=turn)
            expected = pair.their_answer([*ids, *prompt], ANSWER)
            assert ok.say(session, prompt, ANSWER) == expected
            assert session.usage.num_cached_tokens == max(len(ids) - 1, 0)
            ids += [*prompt, *expected]
        if pair.model.config.kv_window is not None:
            overflows_unseen(engine, pair)
            return
        overflowing = ok.Pair(engine)
        for turn, num_tokens in enumerate((80, 14, 14)):
            overflowing.turn(families_kit.prompt(num_tokens, seed=turn), 30 if turn == 2 else 12)
        assert overflowing.session.num_dropped == WINDOW // 2, "before the last prompt, and in its answer"
        overflowing.expect_stored_kv()


def test_layers_of_each_window_are_compiled_once_and_by_the_warm_up(recorded_data):
    described = json.loads((recorded_data / "family_qwen2" / "config.json").read_text())
    config = dataclasses.replace(
        huggingface.config_from_hf(described), num_layers=4, sliding_window=20, full_layers=(0, 3)
    )
    params = random_params(config, dtype="float32")
    runner = Runner(config, params, RunnerSizes(window=WINDOW, num_slots=1, chunk_tokens=64))
    before = steps.prefill_layer._cache_size()
    runner.warmup(max_history=0, max_new=8)
    assert steps.prefill_layer._cache_size() - before == 2
    with CompileCounter() as counter:
        prefill = Prefill(0, [1, 2, 3], 0)
        runner.run_pass(prefill, 3)
        runner.insert(prefill)
        runner.slots.decode(np.array([4], np.int32), np.array([3], np.int32))
    assert counter.count == 0
