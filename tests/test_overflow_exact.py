"""KV that tokens were dropped from is the same cache sliced in memory: wherever it is cut, in both tiers.

Not here: after restarts (test_overflow_endless, test_overflow_repair), and in batches (test_packing).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import pytest

from ca_jax.engine import Engine
from ca_jax.overflow.config import DiscardContext, HeavyHitters, OldestFirst
from ca_jax.session import Session
from ca_jax.storage.records import Residency
from tests import engine_kit as kit
from tests import overflow_kit as ok

BLOCK = kit.BLOCK_TOKENS
HISTORY = kit.prompt(100)
SHARE_OF_ONE = 1 / ok.WINDOW
"""Truncation ratio with which no more tokens leave than must."""


def prompt_that_drops(count: int) -> list[int]:
    """A prompt behind `HISTORY` and an answer of two, for which so many tokens must leave."""
    return kit.prompt(ok.WINDOW - 1 - len(HISTORY) - 2 + count, seed=count)


def send_away(engine: Engine, session: Session) -> None:
    """Has a session leave DRAM for another that takes its room."""
    ok.say(engine.session(), kit.prompt(ok.WINDOW - 8, seed=99), 2)
    engine.wait_for_saves()
    assert engine._kv.store.residency(engine._kv.key(session.session_id)) is Residency.SSD


@pytest.mark.parametrize("keep_first", [0, BLOCK + 1])
def test_cut_points_of_what_is_on_ssd_alone(keep_first, tmp_path):
    """DRAM holds one conversation: it is cut where it lies on SSD, fetched, and cut in both tiers while it answers."""
    store = kit.ssd_store(tmp_path, dram_blocks=12)
    with kit.small_engine(**ok.SMALL, overflow=ok.config(keep_first, SHARE_OF_ONE), store=store) as engine:
        begun = ok.Pair(engine)
        begun.turn(HISTORY, 2)
        for count in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 7):
            pair = ok.Pair(engine)
            ok.say(pair.session, HISTORY, 2)
            pair.reference = begun.reference.copy()
            send_away(engine, pair.session)
            pair.turn(prompt_that_drops(count), 3)
            assert pair.session.usage.cached_tokens == {"ssd": 101 - count}
            send_away(engine, pair.session)
            pair.discard(np.arange(len(pair.session.token_ids)) % 7 == 3)
            pair.turn(kit.prompt(9, seed=count), 2)
            assert pair.session.usage.cached_tokens == {"ssd": pair.reference.num_cached}
            pair.session.close()


def some(seed: int, share: float):
    """Discards tokens by chance, the last one too, but not all."""

    def discarded(num_tokens: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        mask = rng.random(num_tokens) < share
        mask[rng.integers(num_tokens)] = False
        return mask

    return discarded


def places(*which: int):
    """Discards these tokens, counted from the end where negative."""
    return lambda num_tokens: np.isin(np.arange(num_tokens), np.array(which, int) % num_tokens)


LONG_TURNS = [(20 + 11 * turn, 10 + 15 * turn) for turn in range(5)]
MIXED_TURNS = [(60, 10), (80, 10), (20, 3), (30, 150), (40, 5)]
"""One is cut before its prompt, one in its answer, twice."""
PLAYS: dict[str, tuple[dict, list[ok.Step], int]] = {
    **{f"again and again {at}": ({"at": at}, LONG_TURNS, 3) for at in ((0, 0.1), (4, 0.5), (21, 0.5), (0, 1.0))},
    "several shares at once": ({"at": (4, 0.25)}, [80, 50, 90, 30, 30], 4),
    "an answer that just fits": ({}, [(99, 29), 20], 1),
    "a cut in an answer": ({}, [(99, 30), 20, 60], 2),
    "many cuts in an answer": ({}, [(99, 200), 20, 60], 4),
    "all leave for a message that fits alone": ({}, [60, (ok.WINDOW - 2, 2), 20, 60], 3),
    "all first ones leave for a message that fits alone": ({"at": (100, 0.5)}, [60, (ok.WINDOW - 2, 2), 20], 2),
    "nothing may leave": ({"at": (ok.WINDOW - 1, 0.5)}, [(120, 50), (20, 5)], 1),
    "one may leave": ({"at": (ok.WINDOW - 2, 0.5)}, [(120, 20)], 12),
    "discarded by hand": ({}, [(90, 10), some(1, 0.5), 25, some(2, 0.05), 25, some(3, 0.9), (70, 40)], 1),
    "discarded in a row": ({}, [50, places(0), places(-1), places(), 20, places(*range(30)), 20], 0),
    "all but one discarded": ({}, [(50, 3), places(*range(30), *range(31, 53)), (20, 5)], 0),
    "lost, all of it": ({}, [80, 60, ("lose", 0), 40, ("lose", 0), 60], 2),
    "lost, behind the cut": ({}, [80, 60, ("lose", 30), 40, ("lose", 2), 60], 2),
    "rewound to behind the cut": ({}, [100, 20, ("rewind", 37), 30, 70], 2),
    "rewound to before the cut": ({}, [100, 20, ("rewind", 3), 30, 70], 1),
    "rewound to nothing": ({}, [100, 20, ("rewind", 0), 30, 70], 1),
    **{
        f"whole turns {at}": ({"at": at, "whole_turns": True}, [(10 + 3 * turn, 12) for turn in range(9)], 2)
        for at in ((0, 0.1), (5, 0.4), (0, 0.8))
    },
    "whole turns, in an answer": ({"at": (4, 0.3), "whole_turns": True}, [(20, 10)] * 3 + [(20, 200), 20, 40], 3),
    "computed anew": ({"method": "tt"}, MIXED_TURNS, 3),
    "computed anew, none stays": ({"at": (0, 1.0), "method": "tt"}, MIXED_TURNS, 3),
    "invalidated": ({"method": "of"}, MIXED_TURNS, 3),
}
"""Of each conversation: its `OverflowConfig`, what happens in it, and how many truncations there are at least."""


IN_DRAM_ALONE = [
    "a cut in an answer",
    "discarded by hand",
    "lost, behind the cut",
    "rewound to behind the cut",
    "invalidated",
]


@pytest.mark.parametrize(
    ("name", "store"),
    [*((name, "ssd") for name in PLAYS), *((name, "dram") for name in IN_DRAM_ALONE)],
    indirect=["store"],
)
def test_what_stays_is_the_same_cache_sliced(name, store):
    changes, steps, num_cuts = PLAYS[name]
    keep_first, ratio = changes.get("at", (4, 0.5))
    overflow = ok.config(keep_first, ratio, **{key: value for key, value in changes.items() if key != "at"})
    with ok.pair(overflow, store=store) as pair:
        pair.play(*steps)
        metrics = pair.engine.metrics
        assert metrics.truncations == pair.reference.num_cuts >= num_cuts
        assert (metrics.failed_loads, metrics.failed_saves, metrics.repaired_tokens) == (0, 0, 0)
        assert bool(metrics.invalidated_histories) == (overflow.method == "of")


@pytest.mark.parametrize(
    ("num_blocks", "repair"), [*((number, "none") for number in (0, 1, 3, 5)), (3, "all"), (3, "drift")]
)
def test_a_store_that_does_not_hold_all_of_it(num_blocks, repair, tmp_path):
    """What is stored ends before the cut, in it, or behind it: the rest is computed anew."""
    path, drift = ok.random_drift(kit.tiny_model(), ok.WINDOW, tmp_path)
    changes = {"none": {}, "all": {"repair_ratio": 1.0}, "drift": {"drift": path}}[repair]
    values = drift if repair == "drift" else None
    with ok.pair(ok.config(4, 0.3, **changes), values, store=kit.store_of(num_blocks)) as pair:
        for turn in range(6):
            infos = pair.engine.stored.list()
            num_stored = infos[0].num_tokens if infos else 0
            assert num_stored <= num_blocks * BLOCK
            pair.reference.forget(num_stored)
            pair.turn(kit.prompt(40, seed=turn), 10 + 8 * turn)
            pair.engine.wait_for_saves()
        assert pair.engine.metrics.truncations >= 4


@dataclasses.dataclass(frozen=True)
class EveryOther:
    """Every other token leaves, then those behind the first, until there are enough."""

    name: ClassVar[str] = "every other"
    needs_attention: ClassVar[bool] = False
    needs_kv: ClassVar[bool] = True

    def choose(self, context: DiscardContext) -> np.ndarray:
        places = np.arange(context.keep_first, context.num_tokens)
        return np.concatenate([places[::2], places[1::2]])[: context.num_leaving]


@pytest.mark.parametrize("inner", [EveryOther(), OldestFirst(num_sinks=7), HeavyHitters()], ids=lambda d: d.name)
def test_a_discarder_says_which_tokens_leave(inner, store):
    """Whatever it chooses. It is told of as many tokens as there are, and of the KV that is stored."""
    discarder = ok.Recorded(inner)
    with ok.pair(ok.config(3, 0.4, discarder=discarder), store=store) as pair:
        for turn in range(4):
            before = pair.reference.cache.kv
            pair.turn(kit.prompt(40, seed=turn), 10 + 25 * turn)
            for context in discarder.contexts[:1] if turn == 2 else ():
                assert (context.num_tokens, context.keep_first) == (len(before[0, 0]) + 1, 3)
                assert (context.attention is not None) == inner.needs_attention
                if inner.needs_kv:
                    found = np.stack([np.concatenate(layer.parts) for layer in context.kv.layers])
                    np.testing.assert_allclose(found[:, :, :-1], before, rtol=0, atol=ok.ATOL)
            discarder.contexts.clear()
            pair.expect_stored_kv()
        assert pair.engine.metrics.truncations >= 3
        assert not discarder.choices
