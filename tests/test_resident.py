"""Conversations whose pages stay on the device between turns answer as ever, share, make room, and are forgotten."""

import pytest

from ca_jax.overflow.config import OverflowConfig
from ca_jax.storage.config import GIB
from tests import engine_kit as kit

PAGE = kit.BLOCK_TOKENS


def engine_of(pages=None, **changes):
    pool = None if pages is None else pages * PAGE * kit.TOKEN_BYTES / GIB
    return kit.small_engine(keep_pages=True, kv_pool_gib=pool, **changes)


def resident(engine):
    return engine._kv.resident


def pool(engine):
    return engine._runner.pool


def expect_nothing_lost(engine):
    """Every page is free or a kept conversation's, once nothing runs."""
    resident(engine).clear()
    assert pool(engine).num_held == 0


def test_a_turn_goes_on_from_pages_that_are_there_and_loads_nothing():
    with engine_of() as engine:
        session = engine.session()
        kit.check_turn(session, kit.prompt(40))
        loaded = engine.store_stats().loaded_bytes
        for turn in range(3):
            usage = kit.check_turn(session, kit.prompt(9, seed=turn))
            assert usage.cached_tokens == {"device": usage.prompt_tokens - 10}
        assert engine.store_stats().loaded_bytes == loaded
        assert engine.metrics.resident_histories == 3
        engine.stored.drop(session.session_id)
        assert not len(resident(engine)), "what is dropped is nowhere"
        assert kit.check_turn(session, kit.prompt(5)).num_cached_tokens == 0
        expect_nothing_lost(engine)


def test_branches_go_on_from_the_pages_of_what_they_begin_like_and_write_to_their_own():
    with engine_of() as engine:
        source = engine.session()
        kit.check_turn(source, kit.prompt(70))
        engine.wait_for_saves()  # A fork shares what is stored by then.
        held = pool(engine).num_held
        branches = [engine.fork(source) for _ in range(3)]
        answers = [branch.send_ids(kit.prompt(5, seed=seed), max_tokens=8) for seed, branch in enumerate(branches)]
        next(answers[0])
        kit.drain(*answers)
        kit.expect_right(*branches)
        assert all(branch.usage.cached_tokens == {"device": 81} for branch in branches)
        assert pool(engine).num_held <= held + 3 * 2, "full pages are counted once"
        kit.check_turn(source, kit.prompt(9))
        kit.expect_right(*branches)
        expect_nothing_lost(engine)


def test_what_saw_tokens_leave_is_not_shared_and_what_is_edited_is_computed():
    window = 64
    config = {"context_window": window, "overflow": OverflowConfig(repair="none", keep_first_tokens=4)}
    with engine_of(**config) as engine:
        session = engine.session()
        for turn in range(5):
            kit.say(session, kit.prompt(20, seed=turn), 8)
        assert session.num_dropped
        other = engine.session()
        kit.say(other, [*session.token_ids, 65])
        assert other.usage.cached_tokens.get("device", 0) <= 4
        expect_nothing_lost(engine)


def test_the_least_recently_used_make_room_but_not_before_those_whose_turn_waits():
    with engine_of(pages=kit.WINDOW // PAGE, max_batch_size=1) as engine:
        sessions = [engine.session() for _ in range(4)]
        for session in sessions:
            kit.check_turn(session, kit.prompt(110), 10)  # 8 pages of 32.
        assert len(resident(engine)) == 4
        long = engine.session().send_ids(kit.prompt(40), max_tokens=100)  # 9 pages: one of the four has to go.
        answers = [session.send_ids(kit.prompt(5), max_tokens=4) for session in sessions[:2]]
        kit.drain(long, *answers)
        assert [list(session.usage.cached_tokens) for session in sessions[:2]] == [["device"]] * 2
        kit.expect_right(*sessions[:2])
        expect_nothing_lost(engine)


def test_int8_at_rest_loads_what_was_rounded():
    with engine_of(kv_rest_dtype="int8") as engine:
        session = engine.session()
        kit.say(session, kit.prompt(40))
        kit.say(session, kit.prompt(9))
        assert session.usage.cached_tokens == {"dram": 51}
        expect_nothing_lost(engine)


def test_a_pool_smaller_than_a_window_is_refused_and_says_by_how_much():
    with pytest.raises(ValueError, match=r"kv_pool_gib must be at least .* for one context window of 512 tokens"):
        engine_of(pages=kit.WINDOW // PAGE - 1)
