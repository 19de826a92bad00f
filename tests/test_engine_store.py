"""No failure of the store ends a turn, nor changes a token: no room, broken saves, broken loads, eviction, no store."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import pytest
import tensorstore as ts

import ca_jax
from ca_jax.session import Session
from ca_jax.storage.records import MissReason, SkipReason
from ca_jax.storage.tickets import LoadTicket, SaveTicket
from tests import engine_kit as kit

PROMPTS = [kit.prompt(40), kit.prompt(30), kit.prompt(25)]


def expect_right_answers(session: Session, prompts: list[list[int]]) -> list[int]:
    """Sends turns, checks every answer against full passes; cached tokens of each turn."""
    cached = []
    for prompt in prompts:
        expected = kit.greedy_answer(session.token_ids + prompt, 12)
        assert kit.say(session, prompt) == expected
        cached.append(session.usage.num_cached_tokens)
    return cached


def test_without_a_store_every_turn_recomputes():
    with kit.small_engine(store=kit.STORE_OFF) as engine:
        assert expect_right_answers(engine.session(), PROMPTS) == [0, 0, 0]
        assert engine.store_stats().skipped_saves[SkipReason.STORE_OFF] == 3


def test_a_conversation_larger_than_the_store_is_reused_as_far_as_it_fits():
    """Four blocks of 16: what a save that does not fit would have added is skipped, what is stored stays."""
    with kit.small_engine(store=kit.store_of(4)) as engine:
        session = engine.session()
        assert expect_right_answers(session, PROMPTS) == [0, 51, 51]
        engine.wait_for_saves()
        stats = engine.store_stats()
        assert stats.skipped_saves[SkipReason.TOO_LARGE] == 2
        assert (stats.num_evictions, stats.num_hits) == (0, 2)
        assert engine.metrics.failed_saves == 0


def test_the_least_recently_used_conversation_goes_when_room_is_needed():
    with kit.small_engine(store=kit.store_of(8)) as engine:
        old, used, new = engine.session(), engine.session(), engine.session()
        expect_right_answers(old, PROMPTS[:1])  # 51 tokens, 4 blocks
        expect_right_answers(used, [kit.prompt(20)])  # 31 tokens, 2 blocks
        expect_right_answers(old, [[65]])  # 64 tokens, still 4
        expect_right_answers(new, [kit.prompt(41)])  # 4 blocks more than the 2 that are free
        assert engine.store_stats().num_evictions == 1
        assert expect_right_answers(old, [[66]]) == [64]
        assert expect_right_answers(used, [[66]]) == [0]


def test_conversations_that_all_run_are_not_evicted_under_each_other():
    """Each is pinned while it runs: one that finds no room is not saved, and recomputes."""
    with kit.small_engine(store=kit.store_of(5)) as engine:
        sessions = [engine.session() for _ in range(3)]
        for turn in range(2):
            prompts = [kit.prompt(40, seed=10 * turn + i) for i in range(3)]
            expected = [kit.greedy_answer(s.token_ids + p, 12) for s, p in zip(sessions, prompts, strict=True)]
            kit.drain(*(s.send_ids(p, max_tokens=12) for s, p in zip(sessions, prompts, strict=True)))
            assert [s.token_ids[-12:] for s in sessions] == expected
        stats = engine.store_stats()
        assert stats.skipped_saves[SkipReason.NO_ROOM] > 0
        assert stats.used_bytes <= stats.capacity_bytes


def broken(*_: object) -> None:
    raise OSError("the disk is on fire")


def failing_after(num_calls: int, original: Callable) -> Callable:
    """The original, until it breaks."""
    calls = iter(range(num_calls))

    def call(*args: object) -> object:
        if next(calls, None) is None:
            broken()
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
            expect_right_answers(session, PROMPTS[:1])
            engine.wait_for_saves()
        assert engine.metrics.failed_saves >= 1
        assert expect_right_answers(session, PROMPTS[1:]) == [num_stored, 52 + 42 - 1]
        assert engine.store_stats().num_aborted_saves >= 1


def test_a_save_that_breaks_while_its_turn_runs_leaves_no_gap(monkeypatch):
    """The saver is held until the first group of decoded tokens is queued; then the prefill's save breaks before it."""
    gate = threading.Event()

    def late_and_broken(*_: object) -> None:
        assert gate.wait(60)
        broken()

    with kit.small_engine() as engine:
        session = engine.session()
        with monkeypatch.context() as patch:
            patch.setattr(SaveTicket, "write", late_and_broken)
            answer = session.send_ids(PROMPTS[0], max_tokens=30)
            try:
                for _ in range(12):
                    next(answer)
            finally:
                gate.set()
            engine.wait_for_saves()
            kit.drain(answer)
            engine.wait_for_saves()
        assert session.token_ids[40:] == kit.greedy_answer(PROMPTS[0], 30)
        assert engine.store_stats().used_bytes == 0
        assert engine.metrics.failed_saves >= 1
        assert expect_right_answers(session, PROMPTS[1:]) == [0, 70 + 42 - 1]


def failed_future() -> ts.Future:
    promise, future = ts.Promise.new()
    promise.set_exception(OSError("the disk is on fire"))
    return future


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("how", ["at once", "in flight"])
def test_a_load_that_breaks_is_a_counted_miss_and_a_recompute(monkeypatch, how, layer):
    def read(ticket, asked, destination, original=LoadTicket.read):
        if asked != layer:
            return original(ticket, asked, destination)
        return broken() if how == "at once" else failed_future()

    with kit.small_engine() as engine:
        session, other = engine.session(), engine.session()
        expect_right_answers(session, PROMPTS[:1])
        expect_right_answers(other, PROMPTS[:1])
        with monkeypatch.context() as patch:
            patch.setattr(LoadTicket, "read", read)
            assert expect_right_answers(session, PROMPTS[1:2]) == [0]
        assert engine.metrics.failed_loads == 1
        assert engine.store_stats().misses[MissReason.ABORTED] == 1
        assert expect_right_answers(session, PROMPTS[2:]) == [52 + 42 - 1], "stored again, and reused again"
        assert expect_right_answers(other, PROMPTS[1:2]) == [51], "another's KV is untouched"


def test_kv_that_was_dropped_is_recomputed_and_stored_again():
    with kit.small_engine() as engine:
        session = engine.session()
        expect_right_answers(session, PROMPTS[:1])
        engine.drop_stored(session)
        assert engine.store_stats().num_sessions == 0
        assert expect_right_answers(session, PROMPTS[1:]) == [0, 52 + 42 - 1]


def test_stored_kv_is_reused_up_to_where_the_conversation_went_another_way():
    with kit.small_engine() as engine:
        session = engine.session()
        expect_right_answers(session, PROMPTS[:1])
        other = dataclasses.replace(session.conversation, token_ids=session.token_ids[:30] + PROMPTS[2])
        session.resume(other)
        assert expect_right_answers(session, PROMPTS[1:]) == [30, 55 + 42 - 1]


def test_weights_that_differ_make_keys_that_differ(tmp_path):
    config = kit.tiny_model().config
    kit.tiny.write_tiny_hf(tmp_path, config, kit.tiny.tiny_params(config, seed=2))
    other = ca_jax.load_model(str(tmp_path), dtype="float32")
    with kit.small_engine() as engine, ca_jax.Engine(other, kit.SMALL) as another, kit.small_engine() as same:
        assert engine._kv.key("name") == same._kv.key("name")
        assert engine._kv.key("name") != another._kv.key("name")
        assert engine._kv.key("name") != engine._kv.key("name2")
