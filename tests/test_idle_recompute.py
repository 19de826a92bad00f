"""What stays after a cut, computed anew while nothing else is to be done: exactly, once, and in nobody's way."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading

import jax
import numpy as np
import pytest

from ca_jax.overflow.config import OverflowConfig
from ca_jax.storage.records import Residency
from tests import engine_kit as kit
from tests import overflow_kit as ok
from tests import overlap_kit
from tests import server_kit as sk
from tests.test_overflow_repair import REPAIRS, drift, repairing  # noqa: F401


def idle(pair: ok.Pair) -> None:
    """The engine goes on until there is nothing to do; where it computes all anew, so does the reference."""
    pair.engine.wait_for_saves()
    num_before = pair.engine.metrics.idle_recomputes
    while pair.engine.step():
        pass
    if pair.engine.metrics.idle_recomputes > num_before:
        reference = pair.reference
        reference.cache.compute_anew(len(reference.cache.token_ids))
        reference.num_to_repair = 0
        reference.cache.feed(reference.pending)
        reference.pending = []


@pytest.mark.parametrize("keeps_pages", [False, True], ids=["loads", "keeps pages"])
@pytest.mark.parametrize("name", [*REPAIRS])
def test_what_is_computed_while_nothing_is_to_be_done_is_a_fresh_prefill(name, keeps_pages, drift):  # noqa: F811
    """After a cut in an answer, and one by hand: the KV, the turns behind it, and what these still have to do."""
    overflow, values = repairing(name, drift)
    with ok.pair(overflow, values, keep_pages=keeps_pages) as pair:
        metrics = pair.engine.metrics
        pair.turn(kit.prompt(100), 40)
        assert pair.session.conversation.num_to_repair
        usage = pair.session.usage
        idle(pair)
        assert metrics.idle_recomputes == 1
        assert pair.session.usage is usage
        assert pair.session.conversation.num_to_repair == 0
        assert pair.session.conversation.to_drift == []
        pair.expect_stored_kv()
        repaired = metrics.repaired_tokens
        pair.turn(kit.prompt(10, 1), 8)
        assert pair.session.usage.repaired_tokens == 0
        assert metrics.repaired_tokens == repaired
        assert metrics.resident_histories == keeps_pages
        pair.expect_stored_kv()
        pair.discard(np.arange(len(pair.session.token_ids)) % 3 == 1)
        idle(pair)
        assert metrics.idle_recomputes == 2
        pair.turn(kit.prompt(10, 2), 8)
        assert pair.session.usage.repaired_tokens == 0
        pair.expect_stored_kv()
        kit.expect_right(pair.session)
        assert metrics.turns == 3
        assert metrics.cancelled == 0


def test_it_is_done_once_and_waits_for_what_is_being_saved(drift):  # noqa: F811
    """Nothing of a turn is stored yet when it ends: the step after it waits for that, and then computes."""
    overflow, values = repairing("default", drift)
    with ok.pair(overflow, values) as pair:
        answer = pair.session.send_ids(kit.prompt(100), max_tokens=40)
        kit.drain(answer)
        num_steps = 0
        while pair.engine.step():
            num_steps += 1
        assert num_steps
        assert pair.engine.metrics.idle_recomputes == 1
        assert not pair.engine.step()
        assert pair.engine.metrics.idle_recomputes == 1


def test_a_job_goes_first(drift):  # noqa: F811
    """Of two sessions one answers: the other, which was cut, is computed when it has ended, and no sooner."""
    overflow, values = repairing("default", drift)
    with ok.pair(overflow, values) as pair:
        other = pair.engine.session()
        pair.turn(kit.prompt(100), 40)
        pair.engine.wait_for_saves()
        answer = other.send_ids(kit.prompt(20), max_tokens=12)
        while not answer.job.done:
            pair.engine.step()
            assert pair.engine.metrics.idle_recomputes == 0
        idle(pair)
        assert pair.engine.metrics.idle_recomputes == 1
        kit.expect_right(other)
        pair.turn(kit.prompt(10, 1), 8)


@pytest.mark.parametrize("why", ["asked for", "closed", "let go of", "forgotten", "not in DRAM"])
def test_what_cannot_be_computed_ahead_is_left_to_its_next_turn(why, drift, tmp_path):  # noqa: F811
    overflow, values = repairing("default", drift)
    changes = {"exact_when_idle": False} if why == "asked for" else {}
    overflow = OverflowConfig(**{**overflow.__dict__, **changes})
    with ok.pair(overflow, values, store=kit.ssd_store(tmp_path / "store")) as pair:
        engine, session = pair.engine, pair.session
        pair.turn(kit.prompt(100), 40)
        engine.wait_for_saves()
        if why == "closed":
            session.close()
        elif why == "let go of":
            engine.release(session)
        elif why == "forgotten":
            engine.drop_stored(session)
            pair.reference.forget(0)
        elif why == "not in DRAM":
            engine._kv.store.leave_dram(session.key)
            assert engine._kv.store.residency(session.key) is Residency.SSD
        while engine.step():
            pass
        assert engine.metrics.idle_recomputes == 0
        if why not in ("closed", "let go of"):
            pair.turn(kit.prompt(10, 2), 8)
            pair.expect_stored_kv()


@pytest.mark.parametrize("then", ["a turn", "a loss"])
def test_what_was_repaired_or_lost_meanwhile_is_computed_too(then, drift):  # noqa: F811
    overflow, values = repairing("default", drift)
    with ok.pair(overflow, values) as pair:
        pair.turn(kit.prompt(100), 40)
        if then == "a turn":
            pair.turn(kit.prompt(10, 1), 8)
            assert pair.session.usage.repaired_tokens
        else:
            pair.lose(20)
            pair.reference.cache.feed(pair.reference.pending)
            pair.reference.pending = []
        idle(pair)
        assert pair.engine.metrics.idle_recomputes == 1
        pair.expect_stored_kv()
        pair.turn(kit.prompt(10, 2), 8)


def test_who_asks_meanwhile_waits_for_a_pass_and_finds_all_as_it_was(drift, monkeypatch):  # noqa: F811
    """Behind the first of two passes: what it computed is dropped, and the next turn repairs. Later it is all done."""
    overflow, values = repairing("default", drift)
    with ok.pair(overflow, values) as pair:
        engine, passes = pair.engine, []
        pair.turn(kit.prompt(100), 40)
        engine.wait_for_saves()
        run_pass = engine._runner.run_pass

        def run(parts, jobs=()):
            passes.append(sum(part.num_tokens for part in parts))
            engine.wake()
            return run_pass(parts, jobs)

        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, "run_pass", run)
            assert engine.step()
        assert passes == [64]
        assert engine.num_jobs == (0, 0)
        assert (engine.metrics.idle_recomputes, engine.metrics.cancelled) == (0, 0)
        pair.turn(kit.prompt(10, 1), 8)
        assert pair.session.usage.repaired_tokens
        pair.expect_stored_kv()
        idle(pair)
        assert engine.metrics.idle_recomputes == 1
        pair.expect_stored_kv()


def test_where_it_breaks_the_next_turn_repairs(drift, monkeypatch):  # noqa: F811
    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    overflow, values = repairing("default", drift)
    with ok.pair(overflow, values) as pair:
        pair.turn(kit.prompt(100), 40)
        pair.engine.wait_for_saves()
        with monkeypatch.context() as patch:
            patch.setattr(pair.engine._runner, "run_pass", fail)
            while pair.engine.step():
                pass
        assert pair.engine.metrics.idle_recomputes == 0
        pair.turn(kit.prompt(10, 1), 8)
        assert pair.session.usage.repaired_tokens > 0
        pair.expect_stored_kv()


def test_sessions_that_nobody_has_any_more_are_not_kept_for_it(drift):  # noqa: F811
    """Nobody may ever call `step` while there is nothing to do."""
    overflow, values = repairing("default", drift)
    with ok.pair(overflow, values) as pair:
        inexact = pair.engine._truncator.inexact
        pair.turn(kit.prompt(100), 40)
        assert list(inexact) == [pair.session.key]
        pair.session.close()
        pair.session = None
        gc.collect()
        assert not list(inexact)


def test_what_is_computed_anew_outlives_the_engine(drift, tmp_path):  # noqa: F811
    overflow, values = repairing("default", drift)
    store, reference = kit.ssd_store(tmp_path / "store"), None
    for start in range(2):
        with kit.small_engine(**ok.SMALL, overflow=overflow, store=store) as engine:
            pair = ok.Pair(engine, engine.session(session_id="one"), reference, values)
            reference = pair.reference
            pair.turn(kit.prompt(100 if not start else 9, seed=start), 40 if not start else 4)
            assert pair.session.usage.repaired_tokens == 0
            if not start:
                idle(pair)
                assert engine.metrics.idle_recomputes == 1
            engine.wait_for_saves()


# Ahead of a cut. A window of 128 tokens, of which 64 leave behind the first 4.


def as_if_computed(pair: ok.Pair, prompt_tokens: int, max_tokens: int = 8) -> None:
    """A turn that overflows, and finds what it leaves computed: the reference computes it, as `tt` does."""
    overflow = pair.reference.overflow
    pair.reference.overflow = dataclasses.replace(overflow, method="tt")
    pair.turn(kit.prompt(prompt_tokens, 7), max_tokens)
    pair.reference.overflow = overflow
    assert pair.session.usage.repaired_tokens == 0
    kit.expect_right(pair.session)
    pair.expect_stored_kv()


def nearly_full(pair: ok.Pair) -> None:
    """A conversation of 106 tokens, and time to compute what its next cut leaves: 4 and 38."""
    pair.turn(kit.prompt(90), 16)
    idle_ahead(pair)


def idle_ahead(pair: ok.Pair) -> None:
    """Time to compute ahead, of which the session itself sees nothing."""
    pair.engine.wait_for_saves()
    conversation = pair.session.conversation
    while pair.engine.step():
        pass
    pair.engine.wait_for_saves()
    assert pair.session.conversation is conversation


def num_stored(pair: ok.Pair) -> int:
    """Sessions in the store."""
    pair.engine.wait_for_saves()
    return len(kit.store_in(pair.engine).list())


@pytest.mark.parametrize("keeps_pages", [False, True], ids=["loads", "keeps pages"])
def test_a_message_finds_what_its_cut_leaves_computed(keeps_pages, drift):  # noqa: F811
    overflow, values = repairing("default", drift)
    with ok.pair(overflow, values, keep_pages=keeps_pages) as pair:
        nearly_full(pair)
        assert pair.engine.metrics.idle_recomputes == 1
        assert num_stored(pair) == 2
        assert [name for _, name in pair.engine.stored.names()] == [pair.session.session_id]
        as_if_computed(pair, 30)
        assert pair.session.usage.dropped_tokens == 64
        assert pair.session.usage.num_cached_tokens == 42
        idle_ahead(pair)
        assert pair.engine.metrics.idle_recomputes == 1, "it is exact as it is"
        assert num_stored(pair) == 1
        pair.turn(kit.prompt(10, 1), 8)
        pair.expect_stored_kv()


def test_what_was_computed_ahead_grows_with_the_conversation(drift, monkeypatch):  # noqa: F811
    overflow, values = repairing("default", drift)
    with ok.pair(overflow, values) as pair:
        nearly_full(pair)
        pair.turn(kit.prompt(4, 1), 4)
        passes, run_pass = [], pair.engine._runner.run_pass

        def run(parts, jobs=()):
            passes.append(sum(part.num_tokens for part in parts))
            return run_pass(parts, jobs)

        with monkeypatch.context() as patch:
            patch.setattr(pair.engine._runner, "run_pass", run)
            idle_ahead(pair)
        assert passes == [8], "its new tokens alone"
        as_if_computed(pair, 30)
        assert pair.session.usage.num_cached_tokens == 50


def test_who_asks_while_it_is_computed_ahead_loses_nothing_of_it(drift, monkeypatch):  # noqa: F811
    """Passes of 16 tokens: what the first one gave is kept, and gone on with."""
    overflow, values = repairing("default", drift)
    monkeypatch.setattr("ca_jax.serving.batch._IDLE_TOKENS", 16)
    with ok.pair(overflow, values) as pair:
        pair.turn(kit.prompt(90), 16)
        pair.engine.wait_for_saves()
        passes, run_pass = [], pair.engine._runner.run_pass

        def run(parts, jobs=()):
            passes.append(sum(part.num_tokens for part in parts))
            if len(passes) == 1:
                pair.engine.wake()
            return run_pass(parts, jobs)

        with monkeypatch.context() as patch:
            patch.setattr(pair.engine._runner, "run_pass", run)
            assert pair.engine.step()
            assert passes == [16]
            idle_ahead(pair)
        assert passes == [16, 16, 10]
        as_if_computed(pair, 30)


@pytest.mark.parametrize(
    "how", ["too much leaves", "in the answer", "by hand", "no room", "quota", "off", "not shared"]
)
def test_another_cut_than_was_computed_ahead_is_repaired_as_ever(how, drift):  # noqa: F811
    overflow, values = repairing("default", drift)
    changes = {"store": kit.store_of(9)} if how == "no room" else {}
    if how == "quota":
        changes = {"store": dataclasses.replace(kit.store_of(1000), tenant_quota_gib=kit.store_of(9).dram_gib)}
    if how == "off":
        overflow = dataclasses.replace(overflow, exact_when_idle=False)
    if how == "not shared":
        changes = {"share_prefixes": False}
    with ok.pair(overflow, values, **changes) as pair:
        nearly_full(pair)
        assert pair.engine.metrics.idle_recomputes == (how not in ("no room", "quota", "off", "not shared"))
        if how == "by hand":
            pair.discard(np.arange(106) % 5 == 1)
        prompt_tokens, max_tokens = {"too much leaves": (100, 8), "in the answer": (10, 40)}.get(how, (30, 8))
        pair.turn(kit.prompt(prompt_tokens, 7), max_tokens)
        pair.turn(kit.prompt(9, 8), 4)
        assert pair.session.num_dropped > 0
        pair.expect_stored_kv()


def test_another_thread_waits_for_one_pass_of_it_alone(drift, monkeypatch):  # noqa: F811
    """Whatever it calls: it is in front of what is still to be computed, and the keeper of saves is not."""
    overflow, values = repairing("default", drift)
    monkeypatch.setattr("ca_jax.serving.batch._IDLE_TOKENS", 16)
    with ok.pair(overflow, values) as pair:
        engine = pair.engine
        pair.turn(kit.prompt(90), 16)
        engine.wait_for_saves()
        passes, run_pass = [], engine._runner.run_pass
        keeper, asker = (threading.Thread(target=each) for each in (engine.keep, engine.stored.names))

        def run(parts, jobs=()):
            passes.append(engine._lock.is_awaited)
            (keeper if len(passes) == 1 else asker).start()
            if len(passes) == 2:
                sk.wait_for(lambda: engine._lock.is_awaited)
            return run_pass(parts, jobs)

        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, "run_pass", run)
            assert engine.step()
        keeper.join()
        asker.join()
        assert engine.num_jobs == (0, 0)
        assert len(passes) == 2, "of three"
        assert not any(passes), "the keeper is not counted"


@pytest.mark.parametrize("who", ["a thread that waits", "a command of a server"])
def test_who_has_asked_before_it_begins_goes_first(who, drift):  # noqa: F811
    """Whoever steps the engine may have its lock again before another thread that waits for it."""
    overflow, values = repairing("default", drift)
    with ok.pair(overflow, values) as pair, contextlib.ExitStack() as asking:
        engine, waits = pair.engine, who == "a thread that waits"
        pair.turn(kit.prompt(90), 16)
        engine.wait_for_saves()
        with engine._lock:
            if waits:
                asking.enter_context(overlap_kit.in_thread(engine.stored.names))
                sk.wait_for(lambda: engine._lock.is_awaited)
            else:
                engine.wake()
            for num_steps in range(2):
                assert engine.step()
                assert engine.metrics.idle_recomputes == (num_steps == 1 and not waits)
        asking.close()
        idle_ahead(pair)
        assert engine.metrics.idle_recomputes == 1


@pytest.mark.parametrize(
    "how",
    ["closed", "dropped", "dropped behind the cut", "rewound to its beginning", "rewound", "discarded", "to expire"],
)
def test_what_was_computed_ahead_is_forgotten_at_once_with_what_is_stored(how, drift):  # noqa: F811
    """Whoever has KV forgotten need not wait for idle time."""
    overflow, values = repairing("default", drift)
    with ok.pair(overflow, values) as pair:
        nearly_full(pair)
        assert num_stored(pair) == 2
        if how == "dropped behind the cut":
            as_if_computed(pair, 30)
            assert num_stored(pair) == 2
        if how == "closed":
            pair.session.close()
        elif how.startswith("rewound"):
            pair.session.rewind(0 if how == "rewound to its beginning" else 60)
        elif how == "discarded":
            pair.session.discard(np.arange(70, 90))
        elif how == "to expire":
            pair.engine.stored.set_ttl(pair.session.session_id, 60.0)
        else:
            pair.engine.stored.drop(pair.session.session_id)
        assert num_stored(pair) == (how in ("rewound", "discarded", "to expire"))


@pytest.mark.parametrize("how", ["left open", "let go of"])
def test_what_was_computed_ahead_is_forgotten_with_its_conversation_after_a_restart_too(how, drift, tmp_path):  # noqa: F811
    overflow, values = repairing("default", drift)
    store = kit.ssd_store(tmp_path / "store")
    with kit.small_engine(**ok.SMALL, overflow=overflow, store=store) as engine:
        pair = ok.Pair(engine, engine.session(session_id="one"), None, values)
        nearly_full(pair)
        assert num_stored(pair) == 2
        if how == "let go of":
            engine.release(pair.session)
    with kit.small_engine(**ok.SMALL, overflow=overflow, store=store) as engine:
        session = engine.session(session_id="one")
        assert len(session.token_ids) == 106
        session.close()
        assert not kit.store_in(engine).list()


def test_a_conversation_that_finds_what_its_cut_leaves_stays_pinned(drift):  # noqa: F811
    overflow, values = repairing("default", drift)
    with ok.pair(overflow, values) as pair:
        nearly_full(pair)
        pair.engine.stored.pin(pair.session.session_id)
        as_if_computed(pair, 30)
        assert pair.engine.stored.pinned() == {pair.session.session_id}


@pytest.mark.parametrize("when", ["from the beginning", "later"])
def test_nothing_is_computed_ahead_that_would_live_longer_than_its_conversation(when, drift):  # noqa: F811
    overflow, values = repairing("default", drift)
    with ok.pair(overflow, values) as pair:
        pair.session = pair.engine.session(ttl_s=60.0 if when == "from the beginning" else None)
        pair.turn(kit.prompt(90), 16)
        if when == "later":
            pair.engine.wait_for_saves()
            pair.engine.stored.set_ttl(pair.session.session_id, 60.0)
        idle_ahead(pair)
        assert pair.engine.metrics.idle_recomputes == 0


def test_what_was_computed_ahead_in_small_part_is_not_used(drift, monkeypatch):  # noqa: F811
    """16 of 42 tokens: to repair takes fewer than to compute the others."""
    overflow, values = repairing("default", drift)
    monkeypatch.setattr("ca_jax.serving.batch._IDLE_TOKENS", 16)
    with ok.pair(overflow, values) as pair:
        pair.turn(kit.prompt(90), 16)
        pair.engine.wait_for_saves()
        run_pass = pair.engine._runner.run_pass

        def run(parts, jobs=()):
            pair.engine.wake()
            return run_pass(parts, jobs)

        with monkeypatch.context() as patch:
            patch.setattr(pair.engine._runner, "run_pass", run)
            assert pair.engine.step()
        pair.engine.wait_for_saves()
        assert num_stored(pair) == 2
        pair.turn(kit.prompt(30, 7), 8)
        assert pair.session.usage.repaired_tokens > 0
        pair.expect_stored_kv()


@pytest.mark.parametrize("how", ["closed", "let go of"])
def test_what_was_computed_ahead_goes_with_its_conversation(how, drift):  # noqa: F811
    overflow, values = repairing("default", drift)
    with ok.pair(overflow, values) as pair:
        nearly_full(pair)
        assert num_stored(pair) == 2
        pair.session.close() if how == "closed" else pair.engine.release(pair.session)
        while pair.engine.step():
            pass
        assert num_stored(pair) == (0 if how == "closed" else 1)
        assert not pair.engine._kv.ahead


def test_another_tenant_finds_nothing_of_what_was_computed_ahead(drift):  # noqa: F811
    overflow, values = repairing("default", drift)
    with ok.pair(overflow, values) as pair:
        own = pair.engine.session(tenant="one")
        ok.say(own, kit.prompt(90), 16)
        pair.session = own
        idle_ahead(pair)
        assert pair.engine.metrics.idle_recomputes == 1
        token_ids = own.token_ids
        left = [*token_ids[:4], *token_ids[68:]]
        for tenant, num_cached in (("other", 0), ("one", 42)):
            session = pair.engine.session(tenant=tenant)
            ok.say(session, [*left, 65], 4)
            assert session.usage.num_cached_tokens == num_cached
