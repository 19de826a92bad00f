"""Conversations of a process that was killed: known as their callers were told, whatever SSD had of them by then."""

from __future__ import annotations

import contextlib
import shutil
import threading

import pytest

from ca_jax.errors import TenantError
from ca_jax.overflow import OverflowConfig
from ca_jax.storage.note_log import NoteLog
from tests import engine_kit as kit
from tests import overlap_kit
from tests.reliability import workload
from tests.test_engine_ssd import PROMPTS, expect_right_answer, ssd_store


@pytest.fixture(params=["zarr3", "raw"])
def driver(request):
    return request.param


@contextlib.contextmanager
def nothing_gets_to_ssd(engine):
    """What SSD was asked for by now is done, and nothing else until the block ends."""
    reached, may_write = threading.Event(), threading.Event()
    workload.ssd_of(engine)._worker._writes.put(lambda: (reached.set(), may_write.wait()))
    assert reached.wait(60)
    try:
        yield
    finally:
        may_write.set()


def as_killed(directory, to, **changes):
    """A store in a directory as SIGKILL would leave it now: what the system was given is there."""
    shutil.copytree(directory, to)
    return ssd_store(to, **changes)


def noted(directory):
    """Names in the log of a copy."""
    with contextlib.closing(NoteLog(directory)) as log:
        return {each.session_id for each in log.list()}


def test_turns_that_ssd_has_nothing_of_are_known(tmp_path, driver):
    store = ssd_store(tmp_path / "a", ssd_driver=driver)
    with kit.small_engine(store=store) as engine, nothing_gets_to_ssd(engine):
        session = engine.session(session_id="one", tenant="a")
        kit.converse(session, PROMPTS[:2])
        after = as_killed(tmp_path / "a", tmp_path / "b", ssd_driver=driver)
    with kit.small_engine(store=after) as engine:
        assert engine.stored.list() == ()
        assert engine.stored.names() == (("a", "one"),)
        assert engine.stored.conversation("one", tenant="a") == session.conversation
        with pytest.raises(TenantError):
            engine.session(session_id="one", tenant="b")
        again = engine.session(session_id="one", tenant="a")
        assert again.conversation == session.conversation
        assert sum(expect_right_answer(again, PROMPTS[2]).values()) == 0


def test_turns_behind_what_is_on_ssd_are_known_and_it_is_loaded(tmp_path, driver):
    store = ssd_store(tmp_path / "a", ssd_driver=driver)
    with kit.small_engine(store=store) as engine:
        session = engine.session(session_id="one")
        kit.say(session, PROMPTS[0])
        engine.wait_for_saves()
        num_on_ssd = engine.stored.find("one").ssd_tokens
        with nothing_gets_to_ssd(engine):
            kit.converse(session, PROMPTS[1:])
            after = as_killed(tmp_path / "a", tmp_path / "b", ssd_driver=driver)
    for _ in range(2):  # The second time what the first one saved, and closed with, is on SSD.
        with kit.small_engine(store=after) as engine:
            again = engine.session(session_id="one")
            assert again.conversation == session.conversation
            assert expect_right_answer(again, [65]) == {"ssd": num_on_ssd}
            num_on_ssd = len(again.token_ids) - 1
            session = again


def test_an_open_conversation_is_known_though_ssd_had_to_let_go_of_it(tmp_path):
    store = ssd_store(tmp_path / "a", dram_blocks=8, ssd_blocks=8)
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
            expect_right_answer(engine.session(session_id="first"), [65])


def test_one_that_was_let_go_of_stays_noted_until_it_is_on_ssd(tmp_path):
    with kit.small_engine(store=ssd_store(tmp_path / "a")) as engine:
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
        assert noted(tmp_path / "c") == set()
        assert engine.session(session_id="one").conversation == session.conversation
    with kit.small_engine(store=before) as engine:
        assert engine.session(session_id="one").conversation == session.conversation


def test_one_that_closes_soundly_leaves_it_all_to_ssd(tmp_path):
    with kit.small_engine(store=ssd_store(tmp_path)) as engine:
        kit.say(engine.session(session_id="one"), PROMPTS[0])
    assert noted(tmp_path) == set()


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_what_was_to_be_forgotten_is(tmp_path, how):
    with kit.small_engine(store=ssd_store(tmp_path / "a")) as engine:
        session = engine.session(session_id="one")
        kit.say(session, PROMPTS[0])
        if how == "closed":
            session.close()
        else:
            engine.stored.drop("one")
        engine.wait_for_saves()
        after = as_killed(tmp_path / "a", tmp_path / "b")
    with kit.small_engine(store=after) as engine:
        assert engine.stored.names() == ()
        assert engine.find_session("one") is None


@pytest.mark.parametrize("how", ["rewound", "discarded"])
def test_what_was_taken_back_is_gone_before_ssd_knows(tmp_path, how):
    with kit.small_engine(store=ssd_store(tmp_path / "a")) as engine:
        session = engine.session(session_id="one")
        kit.converse(session, PROMPTS)
        engine.wait_for_saves()
        with nothing_gets_to_ssd(engine):
            if how == "rewound":
                session.rewind(60)
            else:
                session.discard(range(20, 50))
            after = as_killed(tmp_path / "a", tmp_path / "b")
    with kit.small_engine(store=after) as engine:
        again = engine.session(session_id="one")
        assert again.conversation == session.conversation
        if how == "rewound":
            assert expect_right_answer(again, [65]) == {"ssd": 60}
        else:  # What is behind the gap has seen what is gone, as SSD has it; it is computed.
            assert expect_right_answer(again, [65]) == {"ssd": 20}


def test_kv_from_before_a_truncation_is_not_that_of_the_conversation_behind_it(tmp_path):
    """SSD has the turns before, the log what came of the truncation: only what both begin with is served."""
    overflow = OverflowConfig(truncation_ratio=0.5, keep_first_tokens=4)
    with kit.small_engine(store=ssd_store(tmp_path / "a"), overflow=overflow) as engine:
        session = engine.session(session_id="one")
        while len(session.token_ids) + 52 < kit.WINDOW:
            kit.say(session, kit.prompt(40))
        engine.wait_for_saves()
        with nothing_gets_to_ssd(engine):
            kit.say(session, kit.prompt(60))
            assert session.num_dropped > 0
            after = as_killed(tmp_path / "a", tmp_path / "b")
    with kit.small_engine(store=after, overflow=overflow) as engine:
        again = engine.session(session_id="one")
        assert again.conversation == session.conversation
        cached = expect_right_answer(again, kit.prompt(10))
        assert sum(cached.values()) <= 4


@pytest.mark.parametrize("how", ["ends", "is cancelled", "breaks"])
def test_a_turn_is_done_when_it_is_in_the_log(tmp_path, monkeypatch, how):
    """Whoever is told that it has ended may be told what it took, and finds it after a crash."""
    reached, may_write = threading.Event(), threading.Event()

    def put(log, *args, original=NoteLog.put):
        reached.set()
        assert may_write.wait(60)
        original(log, *args)

    with kit.small_engine(store=ssd_store(tmp_path)) as engine:
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
