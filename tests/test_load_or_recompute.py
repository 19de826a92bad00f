"""A stored history is loaded, recomputed, or both, as rates say: the tokens and what is stored are the same each time.

Not here: which of them is faster (test_costs).
"""

from __future__ import annotations

import numpy as np
import pytest

import ca_jax
from ca_jax.kv.costs import RateMeter
from ca_jax.storage.records import MissReason
from tests import engine_kit as kit
from tests import overlap_kit

LOAD_TOKEN_S = {"load": 1e-9, "mix": 1e-3, "recompute": 1e3}
"""Seconds of loading one token of all layers, against a millisecond of computing it."""
COUNTERS = {"load": "loaded_histories", "mix": "mixed_histories", "recompute": "recomputed_histories"}


@pytest.fixture
def set_rates(monkeypatch):
    """Says what every engine takes for measured."""
    return lambda rates: monkeypatch.setattr(RateMeter, "rates", property(lambda meter: rates))


def chosen(engine: ca_jax.Engine) -> dict[str, int]:
    return {kind: getattr(engine.metrics, counter) for kind, counter in COUNTERS.items()}


def num_saved(engine: ca_jax.Engine) -> int:
    """Tokens published since the engine was made."""
    engine.wait_for_saves()
    return engine.store_stats().saved_bytes // kit.TOKEN_BYTES


def expect_stored_whole(engine: ca_jax.Engine, session: ca_jax.Session) -> None:
    """All tokens but the last, which was never run, with the KV of one pass over them."""
    stored = kit.stored_kv(engine, session)
    token_ids = session.token_ids[:-1]
    assert stored.shape[2] == len(token_ids)
    np.testing.assert_allclose(stored, kit.full_pass(token_ids)[1], atol=kit.ATOL, rtol=0)


@pytest.mark.parametrize(("kind", "num_first"), [("load", 70), ("mix", 70), ("mix", 210), ("recompute", 210)])
def test_whatever_is_chosen_the_tokens_are_right_and_all_is_stored_once(set_rates, kind, num_first):
    """Behind 70 tokens what a mix recomputes fits a pass with the new ones, behind 210 it takes several."""
    with kit.small_engine(recompute_if_faster=True) as engine:
        session = engine.session()
        set_rates(None)
        kit.check_turn(session, kit.prompt(num_first), 8)
        assert chosen(engine) == {"load": 0, "mix": 0, "recompute": 0}, "there was nothing to choose"
        set_rates(overlap_kit.rates_of(LOAD_TOKEN_S[kind]))
        for nth in range(1, 3):
            num_stored = num_saved(engine)
            assert num_stored == len(session.token_ids) - 1
            kit.check_turn(session, kit.prompt(12, seed=nth), 8)
            assert chosen(engine) == {each: nth * (each == kind) for each in COUNTERS}
            cached = session.usage.num_cached_tokens
            if kind == "mix":
                assert 0 < cached < num_stored
                assert cached % kit.BLOCK_TOKENS == 0
            else:
                assert cached == (num_stored if kind == "load" else 0)
            assert num_saved(engine) == len(session.token_ids) - 1, "what is stored was saved again, or not all was"
            expect_stored_whole(engine, session)
        stats, metrics = engine.store_stats(), engine.metrics
        assert stats.misses.get(MissReason.RECOMPUTED, 0) == (2 if kind == "recompute" else 0)
        assert (metrics.failed_loads, metrics.failed_saves, stats.num_aborted_saves) == (0, 0, 0)


def test_how_well_a_prefill_was_predicted_is_told(set_rates):
    """Of turns that have the device for themselves and take one pass; the numbers here are of no machine."""
    with kit.small_engine(recompute_if_faster=True) as engine:
        session = engine.session()
        set_rates(None)
        kit.check_turn(session, kit.prompt(20), max_tokens=3)
        assert len(engine.metrics.prediction_errors) == 0, "there were no rates to predict by"
        set_rates(overlap_kit.rates_of(LOAD_TOKEN_S["load"]))
        kit.check_turn(session, kit.prompt(12, seed=1), max_tokens=3)
        assert len(engine.metrics.prediction_errors) == 1
        kit.check_turn(session, kit.prompt(90), max_tokens=3)
        assert len(engine.metrics.prediction_errors) == 1, "it took several passes"
        assert engine.metrics.prediction_errors[0] > -1
