"""No failure of the store ends a turn, nor changes a token: no room, broken saves, eviction."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ca_jax.session import Session
from ca_jax.storage.records import SkipReason
from ca_jax.storage.tickets import SaveTicket
from tests import engine_kit as kit

PROMPTS = [kit.prompt(40), kit.prompt(30), kit.prompt(25)]


def cached_of(session: Session, *prompts: list[int]) -> list[int]:
    """Sends turns and checks their answers; cached tokens of each."""
    return [kit.check_turn(session, prompt).num_cached_tokens for prompt in prompts]


def test_a_conversation_larger_than_the_store_is_reused_as_far_as_it_fits():
    """Four blocks of 16: what a save that does not fit would have added is skipped, what is stored stays."""
    with kit.small_engine(store=kit.store_of(4)) as engine:
        assert cached_of(engine.session(), *PROMPTS) == [0, 51, 51]
        engine.wait_for_saves()
        stats = engine.store_stats()
        assert stats.skipped_saves[SkipReason.TOO_LARGE] == 2
        assert (stats.num_evictions, stats.num_hits, engine.metrics.failed_saves) == (0, 2, 0)


def test_the_least_recently_used_conversation_goes_when_room_is_needed():
    with kit.small_engine(store=kit.store_of(8)) as engine:
        old, used, new = engine.session(), engine.session(), engine.session()
        cached_of(old, PROMPTS[0])  # 51 tokens, 4 blocks
        cached_of(used, kit.prompt(20))  # 31 tokens, 2 blocks
        cached_of(old, [65])  # 64 tokens, still 4
        cached_of(new, kit.prompt(41))  # 4 blocks more than the 2 that are free
        assert engine.store_stats().num_evictions == 1
        assert cached_of(old, [66]) == [64]
        assert cached_of(used, [66]) == [0]


def test_conversations_that_all_run_are_not_evicted_under_each_other():
    """Each is pinned while it runs: one that finds no room is not saved, and recomputes."""
    with kit.small_engine(store=kit.store_of(5)) as engine:
        sessions = [engine.session() for _ in range(3)]
        for turn in range(2):
            prompts = [kit.prompt(40, seed=10 * turn + i) for i in range(3)]
            kit.drain(*(s.send_ids(p, max_tokens=12) for s, p in zip(sessions, prompts, strict=True)))
            kit.expect_right(*sessions)
        stats = engine.store_stats()
        assert stats.skipped_saves[SkipReason.NO_ROOM] > 0
        assert stats.used_bytes <= stats.capacity_bytes


def failing_after(num_calls: int, original: Callable) -> Callable:
    """The original, until it breaks."""
    calls = iter(range(num_calls))

    def call(*args: object) -> object:
        if next(calls, None) is None:
            raise OSError("the disk is on fire")
        return original(*args)

    return call


@pytest.mark.parametrize(
    ("method", "num_calls", "num_stored"),
    [("write", 0, 0), ("write", 2, 0), ("write_all", 0, 40), ("write_all", 1, 48)],
    ids=["first layer", "last layer", "first decoded tokens", "last decoded tokens"],
)
def test_a_save_that_breaks_shortens_what_is_stored_and_nothing_else(monkeypatch, method, num_calls, num_stored):
    with kit.small_engine() as engine:
        session = engine.session()
        with monkeypatch.context() as patch:
            patch.setattr(SaveTicket, method, failing_after(num_calls, getattr(SaveTicket, method)))
            cached_of(session, PROMPTS[0])
            engine.wait_for_saves()
        assert engine.metrics.failed_saves >= 1
        assert cached_of(session, *PROMPTS[1:]) == [num_stored, 52 + 42 - 1]
        assert engine.store_stats().num_aborted_saves >= 1
