"""What the engine's thread does not wait for, and does not do: jobs wait instead, or other threads do it."""

import contextlib
import dataclasses
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import jax
import pytest

from ca_jax.device.runner import Runner
from ca_jax.engine import Engine
from ca_jax.errors import SessionBusyError, SessionClosedError
from ca_jax.models.tokenizer import Tokenizer
from ca_jax.overflow.config import OverflowConfig
from ca_jax.pretrained import LoadedModel
from ca_jax.serving.prompts import turn_ids
from ca_jax.session import Session
from ca_jax.storage.config import StoreConfig
from ca_jax.testing import tiny
from ca_jax.turns import text as text_work
from tests import engine_kit as kit
from tests import overlap_kit
from tests import server_kit as sk

CUTS: dict[str, Callable[[Session], object]] = {
    "rewind": lambda session: session.rewind(50),
    "discard": lambda session: session.discard(range(8, 40)),
    "overflow": lambda session: session.send_ids(kit.prompt(220, seed=3), max_tokens=6),
    "drop": lambda session: session._engine.stored.drop(session.session_id),
    "forget KV": lambda session: session._engine.drop_stored(session),
    "close": lambda session: session.close(),
}
WAITS = ("rewind", "discard", "overflow")  # For what the turn before has computed.


@contextlib.contextmanager
def unsaved(engine: Engine, reason: str) -> Iterator[None]:
    """What turns compute in the `with` block is not in the store before its end: no copy ends, or there is no room.

    The store must not be waited for meanwhile.
    """
    store = engine._kv.store

    def wait(*_: object) -> bool:
        raise AssertionError("the thread waits for the store")

    if reason == "room":
        store.room_is_coming, store.settle = lambda *_: True, wait
        try:
            yield
        finally:
            del store.room_is_coming, store.settle
    else:
        with overlap_kit.shut(store._saves):
            yield


def turns(cut: str, reason: str | None) -> tuple[list[int], dict[str, int]]:
    """Three turns with a cut behind the second, whose KV is not stored by then for that reason.

    Returns:
      The conversation's tokens, and how many were cached for its last turn.
    """
    changes = {"overflow": OverflowConfig(repair_ratio=0.0)} if cut == "overflow" else {}
    wrapper = overlap_kit.controlled(saves=overlap_kit.open_gate())
    with kit.small_engine(store_wrapper=wrapper, max_batch_size=2, **changes) as engine:
        session = engine.session(session_id="a")
        kit.say(session, kit.prompt(200))
        engine.wait_for_saves()
        held = contextlib.nullcontext() if reason is None else unsaved(engine, reason)
        done = []
        with held:
            kit.say(session, kit.prompt(100, seed=1))
            with overlap_kit.in_thread(lambda: done.append(CUTS[cut](session))):
                pass  # It ends while all else waits.
            if cut == "close":
                session = engine.session(session_id="a")
                assert not session.token_ids, "what was forgotten came back"
            (answer,) = done if cut == "overflow" else (session.send_ids(kit.prompt(30, seed=2), max_tokens=6),)
            for _ in range(3 if reason else 0):
                engine.step()
            assert not (answer.job.started_s and cut in WAITS)
        kit.drain(answer)
        if cut not in ("discard", "overflow"):  # What is left of these may waste a block.
            overlap_kit.assert_nothing_is_held(engine)
        return session.token_ids, session.usage.cached_tokens


@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_waits_for_no_save_and_the_turn_behind_it_does(cut, monkeypatch):
    monkeypatch.setattr("ca_jax.engine._STALL_S", 0.01)  # Of steps in which nothing can run, of which there are six.
    assert turns(cut, "copies") == turns(cut, "room") == turns(cut, None)


# Text.

LONG = "much to be read, " * 8


class GatedTokenizer(Tokenizer):
    """The tiny model's, which stops at long texts until it is let go on."""

    def __init__(self) -> None:
        known = kit.tiny_model().tokenizer
        ids = {"bos_id": known.bos_id, "eos_id": known.eos_id}
        super().__init__(tiny.byte_tokenizer(), **ids, chat_template=known.chat_template)
        self.come, self.gate, self.num_long = threading.Event(), threading.Event(), 0

    def encode(self, text, *args, **options):
        if LONG in text:
            self.num_long += 1
            self.come.set()
            assert self.gate.wait(overlap_kit.PATIENCE_S)
        return super().encode(text, *args, **options)


@pytest.fixture
def tokenizer(monkeypatch) -> Iterator[GatedTokenizer]:
    monkeypatch.setattr(text_work, "LIGHT_CHARS", 100)
    tokenizer = GatedTokenizer()
    yield tokenizer
    tokenizer.gate.set()


@pytest.fixture
def model(tokenizer) -> LoadedModel:
    return dataclasses.replace(kit.tiny_model(), tokenizer=tokenizer)


def test_much_text_of_one_caller_keeps_no_other_waiting_and_goes_where_its_conversation_stands_by_then(
    tokenizer, model
):
    with kit.small_engine(model) as engine:
        session, beside = engine.session(), engine.session()
        kit.say(session, "Hi")
        with overlap_kit.in_thread(lambda: kit.say(session, LONG)):
            assert tokenizer.come.wait(overlap_kit.PATIENCE_S)
            assert kit.say(beside, "Hello") == kit.greedy_answer(beside.job.prompt_ids, 12)
            session.rewind(0)
            tokenizer.gate.set()
        assert session.job.prompt_ids == turn_ids(engine.model, [], [], LONG)
        kit.expect_right(session)
        assert tokenizer.num_long == 3, "once behind the first turn, once without it, once here"


@pytest.mark.parametrize("how", ["closed", "let go of", "answers"])
def test_much_text_does_not_go_to_a_conversation_that_takes_no_turn_by_then(how, tokenizer, model):
    with kit.small_engine(model) as engine:
        session, raised = engine.session(), list[Exception]()
        kit.say(session, "Hi")

        def send() -> None:
            with pytest.raises((SessionClosedError, SessionBusyError)) as error:
                session.submit(LONG)
            raised.append(error.value)

        with overlap_kit.in_thread(send):
            assert tokenizer.come.wait(overlap_kit.PATIENCE_S)
            if how == "answers":
                job = session.submit("Hello")
            else:
                session.close() if how == "closed" else engine.release(session)
            tokenizer.gate.set()
        assert isinstance(raised[0], SessionBusyError if how == "answers" else SessionClosedError)
        assert engine.num_jobs == (0, int(how == "answers"))
        assert how != "answers" or session.job is job


@pytest.mark.parametrize("ask", ["chat", "completion", "context", "chunks", "history"])
def test_much_text_of_one_request_does_not_keep_others_from_being_answered(tokenizer, model, ask):
    asked = {"model": sk.MODEL, "max_tokens": 4}
    paths = {"completion": "/v1/completions", "chunks": "/v1/chunks"}
    bodies = {
        "chat": {**asked, "messages": [sk.user(LONG)], "n": 2},
        "completion": {**asked, "prompt": LONG},
        "context": {**asked, "messages": [sk.user("So?")], "context": [LONG]},
        "chunks": {"chunks": [LONG]},
        "history": {**asked, "messages": [sk.user(LONG), sk.assistant("b"), sk.user("c")]},
    }
    with sk.running(make_engine=lambda: kit.small_engine(model)) as server, server.http() as http:
        answers = []

        def post() -> None:
            with server.http() as other:
                answers.append(other.post(paths.get(ask, "/v1/chat/completions"), json=bodies[ask]))

        with overlap_kit.in_thread(post):
            assert tokenizer.come.wait(overlap_kit.PATIENCE_S)
            told = http.post("/v1/chat/completions", json={**asked, "messages": [sk.user("Hello")]})
            assert told.status_code == 200
            tokenizer.gate.set()
        assert answers[0].status_code == 200, answers[0].text
        assert tokenizer.num_long == 1


ENDING = """
import atexit, threading
def left():  # What touches memory has nothing of the device, and may be cut short.
    names = {each.name for each in threading.enumerate()} - {"ca_jax-first-touch"}
    return sorted(name for name in names if name.startswith("ca_jax"))
atexit.register(lambda: print(left()))
from ca_jax.storage.config import StoreConfig
from tests import engine_kit as kit
engine = kit.small_engine(store=StoreConfig(dram_gib=2.0, block_tokens=16))
{end}
"""


@pytest.mark.parametrize("end", ["engine.close()", "", "del engine"], ids=["closed", "left open", "let go of"])
def test_no_thread_of_an_engine_is_left_when_the_interpreter_ends(end):
    """One that frees what is on the device by then aborts the process."""
    done = subprocess.run(
        [sys.executable, "-c", ENDING.replace("{end}", end)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def test_what_touches_memory_holds_nothing_of_the_device():
    """Its thread may be the last that has what it holds, after the engine was closed."""
    with kit.small_engine(store=StoreConfig(dram_gib=2.0, block_tokens=16)) as engine:
        held, seen = [cell.cell_contents for cell in engine._kv._toucher._target.__closure__], set[int]()
        while held:
            each = held.pop()
            assert not isinstance(each, jax.Array | Runner)
            if id(each) not in seen and type(each).__module__.startswith("ca_jax"):
                seen.add(id(each))
                held += vars(each).values() if hasattr(each, "__dict__") else []
