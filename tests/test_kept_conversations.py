"""Conversations of a process that was killed: known as their callers were told, whatever SSD had of them by then."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time

import pytest

from ca_jax.errors import TenantError
from ca_jax.overflow.config import OverflowConfig
from ca_jax.storage.catalog.file import CatalogFullError
from ca_jax.storage.catalog.notes import LOG_NAME, NoteLog
from ca_jax.storage.records import Residency
from tests import engine_kit as kit
from tests import overlap_kit
from tests.reliability import workload
from tests.storage.store_helpers import StoppedClock, open_gated, writer_stopped
from tests.test_engine_ssd import PROMPTS, cached_of


def nothing_gets_to_ssd(engine):
    """What SSD was asked for by now is done, and nothing else until the block ends."""
    return writer_stopped(engine._kv.store)


def as_killed(directory, to, **changes):
    """A store in a directory as SIGKILL would leave it now: what the system was given is there."""
    shutil.copytree(directory, to, ignore=shutil.ignore_patterns("*.__lock"))  # Files that come and go.
    return kit.ssd_store(to, **changes)


@pytest.mark.parametrize("num_on_ssd", [0, 51])
def test_turns_that_ssd_has_not_are_known_and_what_it_has_is_loaded(tmp_path, num_on_ssd):
    store = kit.ssd_store(tmp_path / "a")
    with kit.small_engine(store=store) as engine, contextlib.ExitStack() as held_up:
        if not num_on_ssd:
            held_up.enter_context(nothing_gets_to_ssd(engine))
        session = engine.session(session_id="one", tenant="a")
        kit.say(session, PROMPTS[0])
        if num_on_ssd:
            engine.wait_for_saves()
            held_up.enter_context(nothing_gets_to_ssd(engine))
        kit.converse(session, PROMPTS[1:])
        after = as_killed(tmp_path / "a", tmp_path / "b")
    for _ in range(2):  # The second time what the first one saved, and closed with, is on SSD.
        with kit.small_engine(store=after) as engine:
            assert engine.stored.names() == (("a", "one"),)
            assert [info.num_tokens for info in engine.stored.list()] == [num_on_ssd] * bool(num_on_ssd)
            assert engine.stored.conversation("one", tenant="a") == session.conversation
            with pytest.raises(TenantError):
                engine.session(session_id="one", tenant="b")
            again = engine.session(session_id="one", tenant="a")
            assert again.conversation == session.conversation
            assert cached_of(again, [65]).get("ssd", 0) == again.usage.num_cached_tokens == num_on_ssd
            session, num_on_ssd = again, len(again.token_ids) - 1


@contextlib.contextmanager
def engine_with_a_turn(directory, **changes):
    """An engine and its session "one", the first turn of which is on SSD."""
    with kit.small_engine(store=kit.ssd_store(directory, **changes)) as engine:
        session = engine.session(session_id="one")
        kit.say(session, PROMPTS[0])
        engine.wait_for_saves()
        yield engine, session


@contextlib.contextmanager
def known(store, told, **changes):
    """Session "one" in another engine, that knows what was told of it."""
    with kit.small_engine(store=store, **changes) as engine:
        session = engine.session(session_id="one")
        assert session.conversation == told
        yield session


def test_an_open_conversation_is_known_though_ssd_had_to_let_go_of_it(tmp_path):
    store = kit.ssd_store(tmp_path / "a", dram_blocks=8, ssd_blocks=8)
    with kit.small_engine(store=store, max_batch_size=1) as engine:
        first, second = (engine.session(session_id=name) for name in ("first", "second"))
        for session in (first, second):
            kit.say(session, kit.prompt(120), max_tokens=4)
            engine.wait_for_saves()
        assert {info.session_id for info in engine.stored.list()} == {"second"}
        after = as_killed(tmp_path / "a", tmp_path / "b")
    for directory in (after, store):  # Killed, and closed.
        with kit.small_engine(store=directory) as engine:
            assert engine.session(session_id="first").conversation == first.conversation
            assert engine.session(session_id="second").conversation == second.conversation
            cached_of(engine.session(session_id="first"), [65])


def test_one_that_was_let_go_of_stays_noted_until_it_is_on_ssd(tmp_path):
    with kit.small_engine(store=kit.ssd_store(tmp_path / "a")) as engine:
        with nothing_gets_to_ssd(engine):
            session = engine.session(session_id="one")
            kit.say(session, PROMPTS[0])
            engine.release(session)
            assert engine.stored.conversation("one") == session.conversation, "who looks does not open it"
            engine.step()
            before = as_killed(tmp_path / "a", tmp_path / "b")
        engine.wait_for_saves()
        engine.step()
        as_killed(tmp_path / "a", tmp_path / "c")
        with contextlib.closing(NoteLog(tmp_path / "c")) as log:
            assert not [*log.list()]
        assert engine.session(session_id="one").conversation == session.conversation
    with known(before, session.conversation):
        pass


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_what_was_to_be_forgotten_is(tmp_path, how):
    with engine_with_a_turn(tmp_path / "a") as (engine, session):
        if how == "closed":
            session.close()
        else:
            engine.stored.drop("one")
        engine.wait_for_saves()
        after = as_killed(tmp_path / "a", tmp_path / "b")
    with kit.small_engine(store=after) as engine:
        assert engine.stored.names() == ()
        assert engine.find_session("one") is None


@pytest.mark.parametrize(("how", "fails"), [("rewound", False), ("rewound", True), ("discarded", False)])
def test_what_was_taken_back_is_gone_before_ssd_knows_and_when_it_does(tmp_path, monkeypatch, how, fails):
    """Killed before SSD has taken it in, and later; also where the disk had no room for the last turn."""
    gates, clock = open_gated(monkeypatch), StoppedClock(time.time())
    with engine_with_a_turn(tmp_path / "a") as (engine, session):
        engine._kv.store._placement._clock = clock
        kit.say(session, PROMPTS[1])
        engine.wait_for_saves()
        with monkeypatch.context() as patch:
            if fails:
                no_space(engine, patch, gates)
            kit.say(session, PROMPTS[2])
            if fails:
                keep_until(engine, lambda: num_failed(engine) > 0)
            else:
                engine.wait_for_saves()
            with contextlib.nullcontext() if fails else nothing_gets_to_ssd(engine):
                session.rewind(60) if how == "rewound" else session.discard(range(20, 50))
                engine.keep()
                killed = as_killed(tmp_path / "a", tmp_path / "b")
        clock.now_s += 300.0
        keep_until(engine, lambda: kept_on_ssd(engine, session))
        (tmp_path / "a" / LOG_NAME).unlink()
        after = as_killed(tmp_path / "a", tmp_path / "c")
    for directory in (killed, after):
        with known(directory, session.conversation) as again:
            if how == "rewound":  # What is behind a gap has seen what is gone.
                assert cached_of(again, [65]) == {"ssd": 60}
            elif directory is killed:
                assert cached_of(again, [65]) == {"ssd": 20}


def test_kv_from_before_a_truncation_is_not_that_of_the_conversation_behind_it(tmp_path):
    """SSD has the turns before, the log what came of the truncation: only what both begin with is served."""
    overflow = OverflowConfig(truncation_ratio=0.5, keep_first_tokens=4)
    with kit.small_engine(store=kit.ssd_store(tmp_path / "a"), overflow=overflow) as engine:
        session = engine.session(session_id="one")
        while len(session.token_ids) + 52 < kit.WINDOW:
            kit.say(session, kit.prompt(40))
        engine.wait_for_saves()
        with nothing_gets_to_ssd(engine):
            kit.say(session, kit.prompt(60))
            assert session.num_dropped > 0
            after = as_killed(tmp_path / "a", tmp_path / "b")
    with known(after, session.conversation, overflow=overflow) as again:
        assert sum(cached_of(again, kit.prompt(10)).values()) <= 4


@pytest.mark.parametrize("how", ["ends", "is cancelled", "breaks"])
def test_a_turn_is_done_when_it_is_in_the_log(tmp_path, monkeypatch, how):
    """Whoever is told that it has ended may be told what it took, and finds it after a crash."""
    reached, may_write = threading.Event(), threading.Event()

    def put(log, *args, original=NoteLog.put, **options):
        reached.set()
        assert may_write.wait(60)
        return original(log, *args, **options)

    with kit.small_engine(store=kit.ssd_store(tmp_path)) as engine:
        session = engine.session(session_id="one")
        answer = session.send_ids(PROMPTS[0], max_tokens=5)
        next(answer)
        if how == "breaks":
            monkeypatch.setattr(answer.job.output, "push", None)
        monkeypatch.setattr(NoteLog, "put", put)
        with contextlib.ExitStack() as stack:
            if how == "breaks":
                stack.enter_context(pytest.raises(TypeError))
            stack.enter_context(overlap_kit.in_thread(answer.close if how == "is cancelled" else lambda: [*answer]))
            assert reached.wait(60)
            try:
                assert not answer.job.done
                assert session.is_busy
            finally:
                may_write.set()
        assert answer.job.done
        assert session.token_ids == ([] if how == "breaks" else [*PROMPTS[0], *answer.job.output_ids])
        assert session.usage == (None if how == "breaks" else answer.job.usage())


# Turns that were told, and cannot be written to SSD for a while.


def no_space(engine, monkeypatch, gates):
    """The disk has no room."""
    monkeypatch.setattr(gates[0]._tier, "_free_bytes", lambda: 0)


def deadline(engine, monkeypatch, gates):
    """The disk does not answer."""
    gates[0].writes.close()


def catalog(engine, monkeypatch, gates):
    """The catalog cannot be changed."""
    for name in ("publish", "set_note"):
        monkeypatch.setattr(workload.ssd_of(engine)._mover._catalog, name, unwritable)


def quota(engine, monkeypatch, gates):
    """The tenant may hold no more, and the catalog cannot be changed: its note cannot be written either."""
    monkeypatch.setattr(workload.ssd_of(engine)._blocks, "admits", lambda tenant, num_blocks: False)
    catalog(engine, monkeypatch, gates)


def unwritable(*_):
    raise CatalogFullError("there must be room on the disk, got none")


FAILURES = {"no_space": no_space, "deadline": deadline, "catalog": catalog, "quota": quota}


def keep_until(engine, reached, gates=()):
    """Keeps the store's tiers going until something is so."""
    for _ in range(600):
        seen = engine._wakeup.count
        engine.keep()
        if reached():
            return
        for gate in gates:
            gate.let_time_pass(10.0)
        engine._wakeup.wait(seen, 0.1)
    raise AssertionError("there must be the store to get there, got it where it was")


def num_failed(engine):
    return sum(engine.store_stats().ssd.failed_flushes.values())


@pytest.mark.parametrize(("failure", "end"), [*zip(FAILURES, ["let go of", "closed"] * 2, strict=True)])
def test_a_turn_whose_flush_fails_is_known_though_dram_let_go_of_it(tmp_path, monkeypatch, failure, end):
    gates = open_gated(monkeypatch)
    with engine_with_a_turn(tmp_path, dram_free_fraction=0.995) as (engine, session):
        with monkeypatch.context() as patch:
            FAILURES[failure](engine, patch, gates)
            kit.say(session, PROMPTS[1])
            told = session.conversation
            keep_until(engine, lambda: num_failed(engine) > 0, gates)
            keep_until(engine, lambda: engine.stored.find("one").residency is Residency.SSD)
            if end == "let go of":
                engine.release(session)
            for _ in range(3):
                engine.keep()
            assert engine.stored.conversation("one") == told
            engine._kv.conversations.close()  # As `Engine.close` does, before the disk goes on.
            engine._kv.conversations._log = None
        gates[0].writes.open()
        engine._kv.store._placement._dirty.clear()
    for says_more in (False, True):  # The second time it was opened, and nothing was said.
        with known(kit.ssd_store(tmp_path), told) as again:
            if says_more:
                cached_of(again, [65])


@pytest.mark.parametrize("failure", FAILURES)
def test_what_could_not_be_written_is_written_when_the_disk_goes_on(tmp_path, monkeypatch, failure):
    """With its KV, if that is in DRAM still: nobody has to say anything more."""
    gates, clock = open_gated(monkeypatch), StoppedClock(time.time())
    with engine_with_a_turn(tmp_path / "a") as (engine, session):
        engine._kv.store._placement._clock = clock
        with monkeypatch.context() as patch:
            FAILURES[failure](engine, patch, gates)
            kit.say(session, PROMPTS[1])
            keep_until(engine, lambda: num_failed(engine) > 0, gates)
            gates[0].writes.open()
        keep_until(engine, lambda: not workload.ssd_of(engine).busy)
        assert engine.stored.find("one").ssd_tokens == 51
        failed = num_failed(engine)
        engine.keep()
        assert num_failed(engine) == failed, "not before its time"
        clock.now_s += 300.0
        keep_until(engine, lambda: kept_on_ssd(engine, session))
        if failure != "quota":  # KV that is above its quota is not tried again: quotas do not change.
            keep_until(engine, lambda: engine.stored.find("one").ssd_tokens == len(session.token_ids) - 1)
        engine.release(session)
        engine.keep()
        (tmp_path / "a" / LOG_NAME).unlink()  # As another boot would find it: SSD alone counts.
        after = as_killed(tmp_path / "a", tmp_path / "b")
    with known(after, session.conversation):
        pass


def kept_on_ssd(engine, session):
    generation = session.conversation.generation
    return engine._kv.store.has_note_on_ssd(engine._kv.key(session.session_id), generation)


def test_a_log_that_took_nothing_is_tried_again(tmp_path, monkeypatch):
    clock = StoppedClock()
    with kit.small_engine(store=kit.ssd_store(tmp_path / "a")) as engine, nothing_gets_to_ssd(engine):
        kept = engine._kv.conversations
        kept._clock = clock
        session = engine.session(session_id="one")
        kit.say(session, PROMPTS[0])
        num_bytes, kept._log._max_bytes = kept._log._max_bytes, 0
        kit.say(session, PROMPTS[1])
        assert engine.metrics.refused_notes == 1
        told = session.conversation
        engine.release(session)
        engine.keep()
        assert engine.stored.conversation("one") == told, "this process knows it"
        kept._log._max_bytes = num_bytes
        clock.now_s += 60.0
        engine.keep()
        after = as_killed(tmp_path / "a", tmp_path / "b")
    with known(after, told):
        pass


def test_where_the_log_is_full_what_ssd_has_goes_first(tmp_path, monkeypatch):
    with kit.small_engine(store=kit.ssd_store(tmp_path)) as engine:
        log = engine._kv.conversations._log
        monkeypatch.setattr(log, "lacks", lambda num_bytes: len(log.list()) - 2)  # Notes of some KB, not pages, count.

        def tell(name):
            kit.say(engine.session(session_id=name), PROMPTS[0], max_tokens=2)
            return [each.session_id for each in log.list()]

        for name in ("on ssd", "on ssd too"):
            tell(name)
            engine.wait_for_saves()
            engine.keep()
        with nothing_gets_to_ssd(engine):
            tell("let go of")
            engine.release(engine.session(session_id="let go of"))
            assert tell("open") == ["on ssd too", "let go of", "open"]
            assert tell("open too") == ["let go of", "open", "open too"]
            assert engine.metrics.refused_notes == 0
            assert tell("open as well") == ["open", "open too", "open as well"]
            assert engine.metrics.refused_notes == 1
            assert tell("one too many") == ["open", "open too", "open as well"]
            assert engine.metrics.refused_notes == 2
        told = engine.session(session_id="one too many").conversation
    with kit.small_engine(store=kit.ssd_store(tmp_path)) as engine:
        assert engine.session(session_id="one too many").conversation == told, "it was on SSD in time"
