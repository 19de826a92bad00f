"""KV kept in int8 between turns: rounded once, the same in DRAM and on SSD, never served for KV as it was computed.

The reference is the same cache in numpy, rounded between turns.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from ca_jax.kv.layout import kv_layout
from ca_jax.overflow.config import OverflowConfig
from tests import engine_kit as kit
from tests import overflow_kit as ok
from tests.kv_rest_kit import RoundedConversation
from tests.overlap_kit import poison
from tools import kv_rest

LAYOUT = kv_layout(kit.tiny_model(), dataclasses.replace(kit.SMALL, kv_rest_dtype="int8"))
ATOL = 1e-2
"""Of logits, where another order of sums has rounded some number to the int8 beside it."""


def int8_engine(overflow: OverflowConfig | None = None, **changes: object):
    return kit.small_engine(**{**ok.SMALL, **changes}, overflow=overflow, kv_rest_dtype="int8")


def pair_of(engine, drift=None) -> ok.Pair:
    """A session and its rounded reference."""
    overflow = engine.config.overflow or OverflowConfig()
    return ok.Pair(engine, None, RoundedConversation(overflow, engine.window, drift), atol=ATOL)


def unpacked(packed: np.ndarray) -> np.ndarray:
    """Rows of int8 to f32, by numpy."""
    scales = np.ascontiguousarray(packed[..., -2:]).view(ml_dtypes.bfloat16).astype(np.float32)
    return packed[..., :-2].astype(np.float32) * scales


def test_turns_over_rounded_history_are_those_of_a_rounded_cache(store):
    """Passes over a loaded history and behind one, with unused memory full of NaN."""
    with int8_engine(context_window=kit.WINDOW, store=store) as engine:
        poison(engine)
        pair = pair_of(engine)
        pair.turns(40, 9, 150, 1)  # A pass is 64 tokens.
        session = pair.session
        rows = kit.stored_kv(engine, session)
        pair.reference.cache.round_all()
        expected = pair.reference.cache.kv
        off = np.abs(unpacked(rows) - expected[:, :, : rows.shape[2]]) > 1e-4
        assert off.mean() < 1e-3, "it is the int8 of the same numbers, but for some that lay between two"
        read = engine._kv.histories.read(session, session.token_ids)
        found = np.stack([np.concatenate(layer.parts) for layer in read.layers])[:, :, : rows.shape[2]]
        np.testing.assert_array_equal(found, unpacked(rows))
        assert engine.store_stats().used_bytes % LAYOUT.block_bytes == 0


def test_int8_is_a_miss_for_plain_kv_and_the_other_way_round(tmp_path):
    store = kit.ssd_store(tmp_path / "store")
    prompts = {"model": kit.prompt(50, 1), "int8": kit.prompt(50, 2)}
    keys = set()
    for kind, prompt in prompts.items():
        with kit.small_engine(store=store, kv_rest_dtype=kind) as engine:
            session = engine.session(session_id="one")
            assert session.token_ids == []
            kit.say(session, prompt)
            assert session.usage.num_cached_tokens == 0
            keys.add(engine._kv.key("one"))
            engine.wait_for_saves()
            other = engine.session()
            kit.say(other, [*prompts["model"], 65])
            assert other.usage.num_cached_tokens == (50 if kind == "model" else 0), "KV of another kind was served"
    assert len(keys) == 2
    for kind, prompt in prompts.items():
        with kit.small_engine(store=store, kv_rest_dtype=kind) as engine:
            session = engine.session(session_id="one")
            assert session.token_ids[:50] == prompt
            kit.say(session, [66])
            assert session.usage.cached_tokens["ssd"] == 61


CUTS = {
    "sliced": ({}, [(60, 10), (50, 10), (20, 3)]),
    "computed anew": ({"method": "tt"}, [(40, 100)]),  # It overflows while it decodes.
    "invalidated": ({"method": "of"}, [(40, 100)]),
    "repaired": ({"repair_ratio": 1.0}, [(60, 8), (50, 8), (20, 8)]),
    "drift": ({"drift": "drift.npz"}, [(60, 8), (50, 8), (20, 8)]),
}


@pytest.mark.parametrize("name", CUTS)
def test_what_stays_after_a_cut_is_the_rounded_cache_with_it_done(name, tmp_path):
    """Before a prompt, in the middle of an answer, and by hand; rounded once, and saved so."""
    changes, turns = CUTS[name]
    drift = None
    if "drift" in changes:
        path, drift = ok.random_drift(kit.tiny_model(), ok.WINDOW, tmp_path)
        changes = {"drift": path}
    with int8_engine(ok.config(4, 0.5, **changes), store=kit.ssd_store(tmp_path / "store")) as engine:
        poison(engine)
        pair = pair_of(engine, drift)
        for num_tokens, max_tokens in turns:
            pair.turn(kit.prompt(num_tokens), max_tokens)
        if name == "sliced":
            places = np.arange(len(pair.session.token_ids))
            pair.discard((places % 2 == 1) & (places < 40))
            pair.turn(kit.prompt(12), 90)  # It overflows while it decodes.
        pair.turn(kit.prompt(12, 1), 8)
        assert engine.metrics.truncations > 0
        assert bool(engine.metrics.repaired_tokens) == (name == "repaired")
        assert engine.metrics.failed_saves == 0
        assert np.isfinite(unpacked(kit.stored_kv(engine, pair.session))).all()


# What the tool that measures it tells.


def test_perplexity_is_told_with_and_without_rounding():
    found = kv_rest.perplexity(kit.tiny_model(), kit.prompt(192), window=96, step_tokens=32)
    assert found["tokens"] == 2 * 95
    plain = kv_rest.perplexity(kit.tiny_model(), kit.prompt(192), window=96, step_tokens=96)
    assert plain["change"] == 0, "nothing is behind a step of a whole context"
    assert 0 < abs(found["change"]) < 0.05
    assert found["change"] == pytest.approx(found["perplexity_int8"] / found["perplexity"] - 1, rel=1e-3)


def test_answers_over_loaded_history_are_compared():
    found = kv_rest.agreement(kit.tiny_model(), kit.prompt(300), window=128, num_answers=2, answer_tokens=16)
    assert (found["answers"], found["history_tokens"]) == (2, 56)
    assert 0 <= found["same_answers"] <= found["same_first_tokens"] <= 2
    assert 0 <= found["mean_tokens_before_they_differ"] <= 16


def test_half_the_bytes_of_bfloat16_at_wide_heads():
    rows = kv_rest.token_bytes(kit.tiny_model())
    ratios = {(row["head_dim"], row["dtype"]): row["ratio"] for row in rows}
    assert ratios[128, "bfloat16"] == pytest.approx(0.508, abs=1e-3)
    assert ratios[16, "bfloat16"] == (16 + 2) / 32
