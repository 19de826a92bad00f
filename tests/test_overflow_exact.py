"""KV that tokens were dropped from is the same cache sliced in memory: for every cut, in both tiers, after restarts."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import pytest

from ca_jax.engine import Engine
from ca_jax.overflow.discarding import DiscardContext, HeavyHitters, SinksAndRecent
from ca_jax.session import Session
from ca_jax.storage.records import Residency
from ca_jax.turns.requests import FinishReason
from tests import engine_kit as kit
from tests import overflow_kit as ok

BLOCK = kit.BLOCK_TOKENS
HISTORY = kit.prompt(100)
SHARE_OF_ONE = 1 / ok.WINDOW
"""Truncation ratio with which no more tokens leave than must."""


@pytest.fixture(params=["dram", "ssd"])
def store(request, tmp_path):
    return ok.dram_store() if request.param == "dram" else ok.ssd_store(tmp_path)


def prompt_that_drops(count: int) -> list[int]:
    """A prompt behind `HISTORY` and an answer of two, for which so many tokens must leave."""
    return kit.prompt(ok.WINDOW - 1 - len(HISTORY) - 2 + count, seed=count)


def send_away(engine: Engine, session: Session) -> None:
    """Has a session leave DRAM for another that takes its room."""
    ok.say(engine.session(), kit.prompt(ok.WINDOW - 8, seed=99), 2)
    engine.wait_for_saves()
    assert engine._kv.store.residency(engine._kv.key(session.session_id)) is Residency.SSD


@pytest.mark.parametrize("keep_first", range(BLOCK + 2))
def test_every_cut_point(keep_first):
    """The oldest c tokens behind the first k leave before the prompt, and one more for the answer's second token."""
    with ok.engine_of(ok.config(keep_first, SHARE_OF_ONE), store=ok.dram_store()) as engine:
        begun = ok.Pair(engine)
        begun.turn(HISTORY, 2)
        for count in range(1, BLOCK + 2):
            pair = ok.Pair(engine)
            ok.say(pair.session, HISTORY, 2)
            pair.reference = begun.reference.copy()
            pair.turn(prompt_that_drops(count), 2)
            assert pair.session.usage.dropped_tokens == count + 1
            assert pair.session.usage.num_cached_tokens == 101 - count
            pair.expect_stored_kv()
            pair.session.close()


@pytest.mark.parametrize("keep_first", [0, 1, 4, BLOCK - 1, BLOCK, BLOCK + 1])
def test_cut_points_of_what_is_on_ssd_alone(keep_first, tmp_path):
    """DRAM holds one conversation: it is cut where it lies on SSD, fetched, and cut in both tiers while it answers."""
    store = ok.ssd_store(tmp_path, dram_blocks=12)
    with ok.engine_of(ok.config(keep_first, SHARE_OF_ONE), store=store) as engine:
        begun = ok.Pair(engine)
        begun.turn(HISTORY, 2)
        for count in (1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 7):
            pair = ok.Pair(engine)
            ok.say(pair.session, HISTORY, 2)
            pair.reference = begun.reference.copy()
            send_away(engine, pair.session)
            pair.turn(prompt_that_drops(count), 3)
            assert pair.session.usage.cached_tokens == {"ssd": 101 - count}
            send_away(engine, pair.session)
            pair.turn(kit.prompt(9, seed=count), 2)
            assert pair.session.usage.cached_tokens == {"ssd": pair.reference.num_cached}
            pair.session.close()


@pytest.mark.parametrize(("keep_first", "ratio"), [(0, 0.1), (4, 0.1), (4, 0.5), (21, 0.5), (0, 1.0)])
def test_cuts_again_and_again(keep_first, ratio, store):
    """Before prompts and in the middle of answers, of all lengths."""
    with ok.engine_of(ok.config(keep_first, ratio), store=store) as engine:
        pair = ok.Pair(engine)
        for turn in range(5):
            pair.turn(kit.prompt(20 + 11 * turn, seed=turn), 10 + 15 * turn)
            pair.expect_stored_kv()
        assert pair.session.num_dropped == engine.metrics.dropped_tokens > 2 * ok.WINDOW


def test_several_shares_leave_at_once(store):
    with ok.engine_of(ok.config(4, 0.25), store=store) as engine:
        pair = ok.Pair(engine)
        pair.turns(80, 50, 90)
        assert pair.session.usage.dropped_tokens == 3 * 32
        assert engine.metrics.truncations == 2
        pair.turns(30, 30)


@pytest.mark.parametrize(("max_tokens", "num_cuts"), [(29, 0), (30, 1), (200, 3)])
def test_cuts_in_the_middle_of_one_answer(max_tokens, num_cuts, store):
    """A context of 100 is full with the 28th token; half of it leaves for the 29th, but for the first four."""
    with ok.engine_of(ok.config(4, 0.5), store=store) as engine:
        pair = ok.Pair(engine)
        pair.turn(kit.prompt(99), max_tokens)
        assert engine.metrics.truncations == num_cuts
        assert pair.session.usage.dropped_tokens == num_cuts * 64
        assert pair.session.usage.completion_tokens == max_tokens
        assert pair.session.finish_reason is FinishReason.LENGTH
        pair.expect_stored_kv()
        pair.turns(20, 60)


@pytest.mark.parametrize("keep_first", [4, 100])
def test_everything_leaves_for_a_message_that_fits_alone(keep_first, store):
    """Beside the first tokens it would not fit, or nothing but first tokens is stored."""
    with ok.engine_of(ok.config(keep_first), store=store) as engine:
        pair = ok.Pair(engine)
        pair.turn(kit.prompt(60), 8)
        pair.turn(kit.prompt(ok.WINDOW - 2, seed=1), 2)
        assert pair.session.usage.dropped_tokens == pair.session.num_dropped == 68
        assert pair.session.usage.prompt_tokens == ok.WINDOW - 2
        assert pair.session.usage.num_cached_tokens == 0
        pair.expect_stored_kv()
        pair.turns(20, 60)


def test_an_answer_ends_where_nothing_may_leave(store):
    """Between the first tokens and the last one there is none."""
    with ok.engine_of(ok.config(ok.WINDOW - 1), store=store) as engine:
        pair = ok.Pair(engine)
        pair.turn(kit.prompt(120), 50)
        assert pair.session.usage.completion_tokens == 8
        assert (pair.session.finish_reason, engine.metrics.truncations) == (FinishReason.LENGTH, 0)
        pair.turn(kit.prompt(20, seed=1), 5)
        assert pair.session.usage.dropped_tokens == ok.WINDOW


def test_one_token_leaves_for_each_where_no_more_may(store):
    with ok.engine_of(ok.config(ok.WINDOW - 2), store=store) as engine:
        pair = ok.Pair(engine)
        pair.turn(kit.prompt(120), 20)
        assert engine.metrics.truncations == pair.session.usage.dropped_tokens == 12
        pair.expect_stored_kv()


def test_cuts_outlive_the_engine(tmp_path):
    """Each engine finds what the last one left: cut before a prompt, in an answer, by hand; and cuts it again."""
    before, reference = None, None
    for start in range(4):
        with ok.engine_of(ok.config(5, 0.3), store=ok.ssd_store(tmp_path)) as engine:
            session = engine.session(session_id="one")
            pair = ok.Pair(engine, session, reference)
            reference = pair.reference
            assert session.token_ids == reference.token_ids
            if start:
                assert session.conversation == before
            pair.turn(kit.prompt(40, seed=start), 9)
            if start:
                assert session.usage.cached_tokens == {"ssd": reference.num_cached}
            if start != 1:
                pair.turn(kit.prompt(60, seed=start), 50)
            if start >= 1:
                pair.discard(np.random.default_rng(start).random(len(session.token_ids)) < 0.3)
            before = session.conversation
    assert before.num_dropped > 200


@pytest.mark.parametrize("seed", range(4))
def test_discarding_lists(seed, store):
    """Any tokens leave by hand, named by place or by mask, the last one too; then the window overflows."""
    rng = np.random.default_rng(seed)
    with ok.engine_of(ok.config(4, 0.5), store=store) as engine:
        pair = ok.Pair(engine)
        pair.turn(kit.prompt(90, seed), 10)
        for turn in range(3):
            discarded = rng.random(len(pair.session.token_ids)) < rng.choice([0.05, 0.5, 0.9])
            discarded[rng.integers(len(discarded))] = False
            pair.reference.discard(discarded)
            given = discarded if turn % 2 else rng.permutation(np.flatnonzero(discarded))
            num_left = pair.session.discard(given)
            assert num_left == len(pair.session.token_ids) == (~discarded).sum()
            assert pair.session.token_ids == pair.reference.token_ids
            pair.turn(kit.prompt(25, seed=turn), 6)
            pair.expect_stored_kv()
        pair.turn(kit.prompt(70), 40)
        pair.expect_stored_kv()
        assert engine.metrics.failed_loads == engine.metrics.failed_saves == 0


def test_discarding_lists_of_what_is_on_ssd_alone(tmp_path):
    with ok.engine_of(ok.config(), store=ok.ssd_store(tmp_path, dram_blocks=12)) as engine:
        pair = ok.Pair(engine)
        pair.turn(kit.prompt(100), 10)
        for turn in range(3):
            send_away(engine, pair.session)
            pair.discard(np.random.default_rng(turn).random(len(pair.session.token_ids)) < 0.3)
            pair.discard(np.arange(len(pair.session.token_ids)) % 7 == 3)
            pair.turn(kit.prompt(30, seed=turn), 8)
            assert pair.session.usage.cached_tokens == {"ssd": pair.reference.num_cached}


@pytest.mark.parametrize("which", ["first", "last", "nothing", "all but one"])
def test_discarding_lists_at_their_ends(which, store):
    with ok.engine_of(ok.config(), store=store) as engine:
        pair = ok.Pair(engine)
        pair.turn(kit.prompt(50), 3)
        places = {"first": [0], "last": [52], "nothing": [], "all but one": [*range(30), *range(31, 53)]}[which]
        mask = np.zeros(53, bool)
        mask[places] = True
        pair.reference.discard(mask)
        assert pair.session.discard(places) == 53 - len(places)
        pair.turn(kit.prompt(20), 5)
        assert pair.session.num_dropped == len(places)
        pair.expect_stored_kv()


@dataclasses.dataclass(frozen=True)
class EveryOther:
    """Every other token leaves, then those behind the first, until there are enough."""

    name: ClassVar[str] = "every other"
    needs_attention: ClassVar[bool] = False
    needs_kv: ClassVar[bool] = True

    def choose(self, context: DiscardContext) -> np.ndarray:
        places = np.arange(context.keep_first, context.num_tokens)
        return np.concatenate([places[::2], places[1::2]])[: context.num_leaving]


@pytest.mark.parametrize("inner", [EveryOther(), SinksAndRecent(num_sinks=7), HeavyHitters()], ids=lambda d: d.name)
def test_a_discarder_says_which_tokens_leave(inner, store):
    """Whatever it chooses. It is told of as many tokens as there are, and of the KV that is stored."""
    discarder = ok.Recorded(inner)
    with ok.engine_of(ok.config(3, 0.4, discarder=discarder), store=store) as engine:
        pair = ok.Pair(engine)
        for turn in range(4):
            before = pair.reference.cache.kv
            pair.turn(kit.prompt(40, seed=turn), 10 + 25 * turn)
            for context in discarder.contexts[:1] if turn == 2 else ():
                assert (context.num_tokens, context.keep_first) == (len(before[0, 0]) + 1, 3)
                assert (context.attention is not None) == inner.needs_attention
                if inner.needs_kv:
                    found = np.stack([np.concatenate([layer.k, layer.v]) for layer in context.kv.layers])
                    np.testing.assert_allclose(found[:, :, :-1], before, rtol=0, atol=ok.ATOL)
            discarder.contexts.clear()
            pair.expect_stored_kv()
        assert engine.metrics.truncations >= 3
        assert not discarder.choices
