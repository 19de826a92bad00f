"""Engines of models whose layers keep KV of several shapes, of which some keep values alone and some nothing.

What each layer computes is held against `transformers` (`models/test_families.py`); here the same cache sliced in
memory says what turns, cuts and repairs make of it.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.compiles import CompileCounter
from ca_jax.models.config import ModelConfig, RopeConfig
from ca_jax.overflow.config import OverflowConfig
from ca_jax.recompute.drift import Drift
from ca_jax.testing.tiny import tiny_config
from tests import engine_kit as kit
from tests import overflow_kit as ok
from tests.overlap_kit import poison

UNLIKE = {
    **{"num_layers": 4, "sliding_window": 40, "full_layers": (1, 3), "full_head_dim": 24, "full_kv_heads": 1},
    **{"qk_norm": True, "value_norm": True, "local_rope": RopeConfig(theta=300.0)},
    **{"rope": RopeConfig(scaling="proportional", num_turning=4)},
}
READ = {**UNLIKE, "num_layers": 6, "full_layers": (1, 3, 5), "num_readers": 2, "layer_input_dim": 8}
VALUES_ALONE = {**UNLIKE, "full_keys_are_values": True}
MODELS = {"read": READ, "values alone": VALUES_ALONE}


@pytest.mark.parametrize("name", MODELS)
def test_turns_cuts_and_repairs_are_those_of_the_same_cache(name, store, tmp_path):
    """Before a prompt, joined with it or not, in an answer and by hand; with drift where it is of keys and values."""
    model, changes, drift = kit.model_of(**MODELS[name]), {}, None
    if name == "read":
        changes["drift"], drift = ok.random_drift(model, ok.WINDOW, tmp_path)
    overflow = OverflowConfig(keep_first_tokens=4, truncation_ratio=0.5, **changes)
    with kit.small_engine(model, overflow=overflow, store=store, **ok.SMALL) as engine:
        poison(engine)
        pair = ok.Pair(engine, drift=drift)
        pair.play((60, 8), (50, 8), 9, lambda num_tokens: np.arange(num_tokens) % 3 == 2, (14, 60), 20)
        assert engine.metrics.truncations > 0
        assert engine.metrics.repaired_tokens > 0


@pytest.mark.parametrize("name", MODELS)
def test_int8_at_rest_is_each_row_rounded_once_in_either_tier(name, tmp_path):
    model, prompt = kit.model_of(**MODELS[name]), kit.prompt(50)
    tiers = {"store": kit.ssd_store(tmp_path / "store"), "kv_rest_dtype": "int8"}
    with kit.small_engine(model, **tiers) as engine:
        kit.say(engine.session(session_id="one"), prompt, 8)
        engine.wait_for_saves()
    with kit.small_engine(model, **tiers) as engine:
        session = engine.session(session_id="one")
        kit.say(session, [65], 2)
        assert session.usage.num_cached_tokens == 57
        found = engine._kv.histories.read(session, session.token_ids).layers
        new = model.model.apply(model.params, np.array([session.token_ids]), np.arange(len(session.token_ids))[None])[1]
    assert [layer.k.shape[2:] for layer in found] == [shape[1:] for shape in model.config.kv_shapes]
    for layer, expected in zip(found, new.layers, strict=True):
        for rows, numbers in zip(layer.parts, expected.parts, strict=True):
            largest = np.abs(numbers[:, :57]).max(-1, keepdims=True)
            assert (np.abs(rows[:, :57] - numbers[:, :57]) <= 0.51 * 1.01 * largest / 127 + 1e-4).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_compiled_after_warmup(name):
    model = kit.model_of(**MODELS[name], embed_dim=32)  # Like no other test's.
    with kit.small_engine(model, overflow=OverflowConfig(), **ok.SMALL) as engine:
        engine.warmup()
        with CompileCounter() as during:
            session = engine.session()
            for num_tokens, max_tokens in ((60, 8), (50, 8), (9, 8), (14, 60), (20, 8)):
                kit.drain(session.send_ids(kit.prompt(num_tokens), max_tokens=max_tokens))
        assert during.count == 0
        assert engine.metrics.repaired_tokens > 0


def test_drift_of_layers_that_differ_is_kept_layer_by_layer(tmp_path):
    model = kit.model_of(**READ)
    path, drift = ok.random_drift(model, ok.WINDOW, tmp_path)
    found = Drift.load(path)
    found.check_model(model.config, model.fingerprint)
    for values, expected in zip(found.values, drift.values, strict=True):
        np.testing.assert_array_equal(values, expected)
    with pytest.raises(ValueError, match=r"drift must be \[3, 2, 2, 16\] .* got \[2, 2, 16\], \[2, 1, 24\]"):
        found.check_model(tiny_config(), model.fingerprint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": None, "full_layers": ()}, "full_head_dim must be None or False without sliding_window"),
        ({"full_head_dim": 7}, "full_head_dim must be positive and even, got 7"),
        ({"full_kv_heads": 3}, "full_kv_heads must be a divisor of 4 heads, got 3"),
        ({"num_readers": 6}, r"num_readers must be in \[0, 6\), got 6"),
        ({"num_readers": 5}, "num_readers must be so few that each finds a layer that slides as it does, got 5"),
        ({"full_keys_are_values": True}, "full_keys_are_values must be False with num_readers"),
        ({"num_readers": 0, "full_keys_are_values": True, "value_norm": False}, "full_keys_are_values must be False"),
        ({"rope": RopeConfig(scaling="proportional", num_turning=4), "layer_input_dim": -1}, "layer_input_dim must be"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**{**READ, **changes})


def test_layers_are_numbered_and_grouped_by_what_they_keep():
    config: ModelConfig = tiny_config(**READ)
    assert config.kv_layers == (0, 1, 2, 3)
    assert config.kv_groups == ((0, 2), (1, 3))
    assert [config.kv_number(layer) for layer in range(6)] == [0, 1, 2, 3, 2, 3]
    assert config.kv_bytes_per_token(4) == 4 * 2 * (2 * 2 * 16 + 2 * 24)
    assert [kind.has_kv for kind in map(config.kind_of, range(6))] == [True] * 4 + [False] * 2
