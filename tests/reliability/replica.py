"""A replica as a process of its own, which dies or stops at a step that it is told.

    serve(pipe, directory, compile_cache, step, turn, with_signal)

It takes commands from a pipe and answers each:

    {"do": "say", "text": ...}    claims the session, says a turn, waits until it is published or the session is lost
    {"do": "look"}                claims the session, says how many turns it has

Where the store of objects does not answer it says `unknown`.

Not here: what must hold (test_replica_kill).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

from ca_jax.errors import SessionMovedError
from ca_jax.session import Session
from ca_jax.storage.objects.store import ObjectsError
from ca_jax.turns.requests import SamplingParams
from tests import engine_kit as kit
from tests.reliability.steps import TOLD, tell_steps

STEPS = (*TOLD[:4], "answered", *TOLD[4:])
"""Of a turn, in their order; `answered`: once its client has all of its answer."""
SESSION = "s"
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


class Replica:
    """One engine, and when it ends."""

    def __init__(self, directory: str, compile_cache: str, step: str, turn: int, with_signal: int) -> None:
        self._step, self._turn, self._signal = step, turn, with_signal
        self._num_turns = 0
        store = dataclasses.replace(kit.SMALL.store, objects_url=f"file://{directory}", objects_deadline_s=10.0)
        self.engine = kit.small_engine(store=store, compile_cache_dir=compile_cache)
        tell_steps(self._at)

    def serve(self, pipe: Connection[dict[str, Any], dict[str, Any]]) -> None:
        """Answers commands until there are no more."""
        with contextlib.suppress(EOFError):
            while True:
                asked = pipe.recv()
                try:
                    told = self._look() if asked["do"] == "look" else self._say(asked["text"])
                except ObjectsError as error:
                    told = {"unknown": str(error)}
                pipe.send(told)
        self.engine.close()

    def _look(self) -> dict[str, Any]:
        session = self._claimed()
        return {"turns": len(session.messages) // 2, "said": [each["content"] for each in session.messages]}

    def _say(self, text: str) -> dict[str, Any]:
        session, answer = self._claimed(), ""
        self._num_turns += 1
        before = self.engine.metrics.publishes
        try:
            for piece in session.send(text, sampling=GREEDY):
                answer += piece
        except SessionMovedError:
            return {"answer": None, "published": False}
        self._at("answered")
        metrics = self.engine.metrics
        # For as long as it takes: it may be stopped meanwhile.
        kit.until(self.engine, lambda: metrics.publishes > before or metrics.refused_publishes > 0, math.inf)
        return {"answer": answer, "published": metrics.refused_publishes == 0}

    def _claimed(self) -> Session:
        assert self.engine.elsewhere is not None
        self.engine.elsewhere.claim(SESSION)
        return self.engine.session(session_id=SESSION)

    def _at(self, step: str) -> None:
        if (step, self._num_turns) == (self._step, self._turn):
            self._step = ""  # Whoever is let go on meets it no more.
            # To this thread: of one to the process another may take notice, and this one write on until it does.
            signal.pthread_kill(threading.get_ident(), self._signal)


def serve(
    pipe: Connection[dict[str, Any], dict[str, Any]],
    directory: str,
    compile_cache: str,
    step: str,
    turn: int,
    with_signal: str,
) -> None:
    """All that the process does: one replica, until its pipe is closed or it ends itself."""
    Replica(directory, compile_cache, step, turn, getattr(signal, with_signal)).serve(pipe)
