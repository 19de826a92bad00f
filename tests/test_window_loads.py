"""Of a history that layers slide over, those layers load what tokens behind it see, and nothing else is ever read.

All memory that holds nothing is full of NaN here, what was not loaded among it.
"""

from __future__ import annotations

import numpy as np
import pytest

from ca_jax.models.config import RopeConfig
from ca_jax.overflow.config import OverflowConfig
from ca_jax.storage.tokens import TokenPlaces
from tests import engine_kit as kit
from tests import overflow_kit as ok
from tests.overlap_kit import poison

SLIDING = 24
MODEL = {
    **{"num_layers": 6, "sliding_window": SLIDING, "full_layers": (5,), "local_rope": RopeConfig(theta=300.0)},
    "max_positions": kit.WINDOW,
}
LAYER_BYTES = kit.TOKEN_BYTES // kit.NUM_LAYERS  # Of a token; a layer of this model is one of the tiny model.


def model():
    return kit.model_of(**MODEL)


def bytes_of(num_tokens: int) -> int:
    """That a history of so many tokens takes: pages from that on whose first token the window reaches."""
    page = kit.BLOCK_TOKENS
    seen = num_tokens - max(num_tokens - SLIDING + 1, 0) // page * page
    return LAYER_BYTES * (num_tokens + 5 * seen)


@pytest.mark.parametrize("options", [{}, {"kv_rest_dtype": "int8"}, {"read_buffer": 1}], ids=["", "int8", "one layer"])
def test_layers_that_slide_load_what_is_seen(store, options):
    with kit.small_engine(model(), store=store, overflow=None, **options) as engine:
        if not options.get("kv_rest_dtype"):
            poison(engine, staged_layers=20)
        session, loaded = engine.session(), 0
        for turn, num_tokens in enumerate((100, 9, 1, 70)):
            prompt, num_before = kit.prompt(num_tokens, seed=turn), len(session.token_ids)
            if options.get("kv_rest_dtype"):
                kit.say(session, prompt, 8)
            else:
                kit.check_turn(session, prompt, 8, model=model())
                if turn:
                    loaded += bytes_of(num_before - 1)
                assert engine.store_stats().loaded_bytes == loaded
            assert session.usage.num_cached_tokens == max(num_before - 1, 0)
            engine.wait_for_saves()


def test_pages_that_lack_what_others_see_are_not_shared():
    """A context whose history was loaded in part stays on the device: others that begin like it, and it itself once it
    goes back, see more of it than is there.
    """
    with kit.small_engine(model(), keep_pages=True, overflow=None) as engine:
        poison(engine, staged_layers=20)
        session = engine.session()
        kit.check_turn(session, kit.prompt(100), 8, model=model())
        engine.wait_for_saves()
        engine._kv.resident.clear()
        kit.check_turn(session, kit.prompt(9, seed=1), 8, model=model())
        assert session.usage.cached_tokens == {"dram": 107}
        engine.wait_for_saves()
        branch, other = engine.fork(session), engine.session()
        kit.check_turn(branch, kit.prompt(5, seed=2), 8, model=model())
        assert branch.usage.cached_tokens == {"device": 124}, "all that it sees is there"
        kit.check_turn(other, [*session.token_ids[:60], 65], 8, model=model())
        assert other.usage.cached_tokens == {"dram": 60}
        session.rewind(80)
        kit.check_turn(session, kit.prompt(5, seed=3), 8, model=model())
        assert session.usage.cached_tokens == {"dram": 80}


@pytest.mark.parametrize("overflow", [ok.config(4, 0.5), OverflowConfig(keep_first_tokens=4, truncation_ratio=0.5)])
def test_what_may_be_cut_or_repaired_is_loaded_whole(overflow):
    """Turns that fit load in part; one that may be cut while it runs, and one that is repaired, do not."""
    with kit.small_engine(model(), overflow=overflow, **ok.SMALL) as engine:
        poison(engine, staged_layers=20)
        pair = ok.Pair(engine)
        pair.play((60, 8), (9, 8))
        pair.turn(kit.prompt(5), 60)  # It is cut in its answer; what is stored is repaired with the next turn.
        pair.play((9, 8), (9, 8))
        assert engine.metrics.truncations >= 1


def test_places_without_their_first_ones():
    places = TokenPlaces(((0, 2), (7, 3), (20, 1)))
    for count in range(8):
        np.testing.assert_array_equal(places.skip(count).to_array(), places.to_array()[count:])
