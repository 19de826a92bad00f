"""Conversations that begin like others: edited, branched or sent again, they share KV token by token, and live on."""

from __future__ import annotations

import pytest

from ca_jax.engine import Engine
from ca_jax.overflow.config import METHODS, OverflowConfig
from ca_jax.session import Session
from tests import engine_kit as kit

SYSTEM = kit.prompt(70)  # More than four blocks of 16.
BLOCK_BYTES = kit.BLOCK_TOKENS * kit.TOKEN_BYTES


def cached_of(session: Session, prompt: list[int]) -> int:
    """Sends a turn and checks its answer; its cached tokens."""
    return kit.check_turn(session, prompt).num_cached_tokens


def used_blocks(engine: Engine) -> int:
    engine.wait_for_saves()
    return engine.store_stats().used_bytes // BLOCK_BYTES


def test_an_edited_history_forks_and_both_branches_live_on():
    with kit.small_engine() as engine:
        source, stranger = engine.session(tenant="alice"), engine.session(tenant="bob")
        cached_of(source, SYSTEM)
        cached_of(source, kit.prompt(30))
        before, num_before = source.token_ids, used_blocks(engine)
        assert (len(before), num_before) == (124, 8)

        branch = engine.session(tenant="alice")
        edited = [*before[:101], before[101] ^ 1, *kit.prompt(10)]
        assert cached_of(branch, edited) == 101, "token by token"
        assert used_blocks(engine) - num_before == 2, "of 124 tokens, 101 of which it has in common"
        assert cached_of(source, kit.prompt(20)) == 123
        assert cached_of(branch, kit.prompt(21)) == 123
        twig = engine.session(tenant="alice")
        assert cached_of(twig, [*branch.token_ids[:-1], 65]) == len(branch.token_ids) - 1

        assert cached_of(stranger, edited) == 0
        assert [info.session_id for info in engine.stored.list(tenant="bob")] == [stranger.session_id]
        engine.stored.drop(source.session_id, tenant="alice")
        assert cached_of(branch, [65]) == 123 + 21 + 12
        assert cached_of(source, [66]) >= 101, "dropped, and begins with what its branch has"


def test_conversations_that_begin_alike_share_what_is_there_while_the_first_runs():
    with kit.small_engine() as engine:
        first = engine.session()
        answer = first.send_ids(SYSTEM, max_tokens=60)
        while not any(info.num_tokens >= 64 for info in engine.stored.list()):
            next(answer)
        others = [engine.session() for _ in range(3)]
        for seed, other in enumerate(others):
            assert cached_of(other, [*SYSTEM, *kit.prompt(5, seed=seed)]) >= 64
        assert next(answer), "it runs still"
        kit.drain(answer)
        kit.expect_right(first)
        for other in (first, *others):
            assert cached_of(other, [67]) == len(other.token_ids) - 14
        # 64 tokens once; the others' 36 in three blocks each, and the first one's 79.
        assert used_blocks(engine) == 4 + 3 * 3 + 5


@pytest.mark.parametrize("driver", ["zarr3", "raw"])
def test_branches_share_blocks_on_ssd_and_go_on_in_another_engine(tmp_path, driver):
    store = kit.ssd_store(tmp_path, ssd_driver=driver)
    with kit.small_engine(store=store) as engine:
        cached_of(engine.session(session_id="source"), SYSTEM)
        engine.wait_for_saves()
        source_bytes = engine.store_stats().ssd.flushed_bytes
        for seed, name in enumerate(("left", "right")):
            cached_of(engine.session(session_id=name), [*SYSTEM, *kit.prompt(5, seed=seed)])
        engine.wait_for_saves()
        stats = engine.store_stats().ssd
        assert source_bytes == 6 * BLOCK_BYTES
        assert stats.flushed_bytes == source_bytes + 2 * 2 * BLOCK_BYTES, "four of six blocks are there"
    with kit.small_engine(store=store) as engine:
        assert engine.store_stats().ssd.used_bytes == stats.used_bytes
        assert engine.store_stats().ssd.num_lost_sessions == 0
        engine.stored.drop("source")
        for name in ("left", "right"):
            assert cached_of(engine.session(session_id=name), [65]) == len(SYSTEM) + 5 + 11
        assert cached_of(engine.session(), [*SYSTEM, 65]) == len(SYSTEM)


@pytest.mark.parametrize("method", METHODS)
def test_a_fork_that_is_not_kept_answers_alike_and_leaves_nothing(method, tmp_path):
    """Also where its context overflows, before a turn and in the middle of an answer."""
    with kit.small_engine(overflow=OverflowConfig(method=method), store=kit.ssd_store(tmp_path)) as engine:
        source = engine.session()
        cached_of(source, SYSTEM)
        engine.wait_for_saves()

        def stored():
            engine.wait_for_saves()
            return {info.key: (info.num_tokens, info.num_blocks, info.ssd_tokens) for info in engine.stored.list()}

        before, num_flushed = stored(), engine.store_stats().ssd.flushed_bytes
        passing = engine.fork(source, is_kept=False)
        assert cached_of(passing, kit.prompt(20)) == 81, "what is stored is read"
        assert passing.session_id not in {session.session_id for session in engine.sessions}
        said = ["".join(passing.send_ids(kit.prompt(number), max_tokens=420)) for number in (30, 200)]
        assert passing.usage.completion_tokens == 420
        assert passing.num_dropped
        assert stored() == before
        assert engine.store_stats().ssd.flushed_bytes == num_flushed
        assert engine.find_session(passing.session_id) is None
        kept = engine.fork(source)
        cached_of(kept, kit.prompt(20))
        assert "".join(kept.send_ids(kit.prompt(30), max_tokens=420)) == said[0]
