"""Replicas that are killed or stopped at any step of a turn: the conversation goes on at another one, and is one.

What an owner said was published is there; at most the turn that it had not said so of is computed again. No token
differs from those of an engine that served the conversation alone.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import engine_kit as kit
from tests import server_kit as sk
from tests.reliability.replica import GREEDY, STEPS, serve

SAID = (
    "Who wrote Faust, and how long did it take him?",
    "And the second part?",
    "Was it read?",
    "Who read it first, then?",
    "When?",
    "Say more.",
)


FORKS = multiprocessing.get_context("forkserver")


class Process:
    """A replica: a fork of a process that has imported what it needs, which takes longer than what most of them do."""

    def __init__(self, directory: Path, cache: str, step: str = "none", turn: int = 0, with_signal: str = "SIGKILL"):
        FORKS.set_forkserver_preload([serve.__module__])
        self._pipe, theirs = FORKS.Pipe()
        self.child = FORKS.Process(target=serve, args=(theirs, str(directory), cache, step, turn, with_signal))
        self.child.start()
        theirs.close()

    def tell(self, **command: Any) -> None:
        self._pipe.send(command)

    def hear(self) -> dict[str, Any] | None:
        """The next answer; None: it has died."""
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            return None

    def ask(self, **command: Any) -> dict[str, Any] | None:
        try:
            self.tell(**command)
        except BrokenPipeError:
            return None
        return self.hear()

    def signal(self, number: int) -> None:
        os.kill(self.child.pid, number)

    def wait_until_stopped(self) -> None:
        status = Path(f"/proc/{self.child.pid}/stat")
        sk.wait_for(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")

    def exit_code(self) -> int | None:
        self.child.join(60)
        return self.child.exitcode

    def end(self) -> None:
        if self.child.is_alive():
            self.signal(signal.SIGCONT)
        self._pipe.close()
        assert self.exit_code() is not None


@pytest.fixture
def replica(tmp_path: Path, compile_cache: str) -> Iterator[Any]:
    made: list[Process] = []

    def make(*args: Any, **options: Any) -> Process:
        made.append(Process(tmp_path / "shared", str(compile_cache), *args, **options))
        return made[-1]

    yield make
    for process in made:
        process.end()


def serial() -> list[str]:
    """What an engine answers that serves the conversation alone."""
    with kit.small_engine() as engine:
        session = engine.session()
        return ["".join(session.send(text, sampling=GREEDY)) for text in SAID]


def rounds(few: int, many: int, timeout_s: int) -> Any:
    slow = pytest.param(many, marks=[pytest.mark.slow, pytest.mark.timeout(timeout_s)])
    return pytest.mark.parametrize("num_rounds", [few, slow], ids=["few", "many"])


@rounds(len(STEPS), 500, 7200)
def test_a_conversation_outlives_every_owner_that_is_killed(tmp_path, replica, num_rounds) -> None:
    answers, rng = serial(), random.Random(3)
    num_turns, num_published, num_killed = 0, 0, 0
    process = None
    for number in range(num_rounds):
        step, turn = (STEPS[number % len(STEPS)], 1) if number < len(STEPS) else (rng.choice(STEPS), rng.randint(1, 2))
        process = replica(step, turn)
        found = process.ask(do="look")
        assert num_published <= found["turns"] <= num_turns, (
            "what was published is there, and nothing that was not said"
        )
        num_turns = num_published = found["turns"]
        assert found["said"][1::2] == answers[:num_turns]
        while (answered := process.ask(do="say", text=SAID[num_turns])) is not None:
            assert answered == {"answer": answers[num_turns], "published": True}
            num_turns += 1
            num_published = num_turns
            if num_turns == len(SAID):
                break
        else:
            num_turns += 1  # It may have been published before its owner died.
            num_killed += 1
            assert process.exit_code() == -signal.SIGKILL
        if num_turns >= len(SAID):  # The conversation is at its end: another one begins.
            process.end()
            (tmp_path / "shared").rename(tmp_path / f"shared-{number}")
            num_turns = num_published = 0
    assert num_killed >= num_rounds // 2


@rounds(2, 200, 7200)
def test_an_owner_that_was_stopped_and_replaced_mixes_nothing_in(tmp_path, replica, num_rounds) -> None:
    answers, rng = serial(), random.Random(5)
    for number in range(num_rounds):
        step = ("manifest", "decode")[number] if number < 2 else rng.choice(STEPS[1:])
        directory = tmp_path / "shared"
        old, new = replica(step, 2, with_signal="SIGSTOP"), replica()
        assert old.ask(do="say", text=SAID[0]) == {"answer": answers[0], "published": True}
        old.tell(do="say", text=SAID[1])
        old.wait_until_stopped()
        found = new.ask(do="look")
        if "unknown" in found:  # It stands within a write and holds the file's lock: until it goes on nobody knows.
            old.signal(signal.SIGCONT)
            assert old.hear() == {"answer": answers[1], "published": True}
            assert new.ask(do="look")["said"][1::2] == answers[:2]
            old.end()
            new.end()
            directory.rename(tmp_path / f"shared-{number}")
            continue
        assert found["turns"] == (2 if step == "published" else 1)
        num_turns = found["turns"]
        for text in SAID[num_turns : num_turns + 2]:
            answered = new.ask(do="say", text=text)
            assert answered == {"answer": answers[num_turns], "published": True}
            num_turns += 1
        old.signal(signal.SIGCONT)
        told = old.hear()
        assert told["published"] == (step == "published"), "its client is told"
        found = new.ask(do="look")
        assert (found["turns"], found["said"][1::2]) == (num_turns, answers[:num_turns])
        assert old.ask(do="look")["said"][1::2] == answers[:num_turns]
        old.end()
        new.end()
        directory.rename(tmp_path / f"shared-{number}")
