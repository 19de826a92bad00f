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
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ca_jax.errors import SessionMovedError
from ca_jax.kv.object_transfers import SharedKV
from ca_jax.session import Session
from ca_jax.storage.objects import parts
from ca_jax.storage.objects.store import ObjectsError, ObjectStore
from ca_jax.turns.requests import SamplingParams
from tests import engine_kit as kit

STEPS = ("load", "prefill", "decode", "answered", "object", "manifest", "published")
"""Of a turn, in their order: before its KV is loaded, behind a pass of its prefill, in the midst of decoding, once it
is answered, once an object of its KV is written, before its manifest is, and behind that."""
SESSION = "s"
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
RUN_BYTES = 2 * kit.BLOCK_TOKENS * kit.TOKEN_BYTES


class Replica:
    """One engine, and when it ends."""

    def __init__(self, directory: str, compile_cache: str, step: str, turn: int, with_signal: int) -> None:
        self._step, self._turn, self._signal = step, turn, with_signal
        self._num_turns = 0
        parts.RUN_BYTES = RUN_BYTES
        store = dataclasses.replace(kit.SMALL.store, objects_url=f"file://{directory}", objects_deadline_s=10.0)
        self.engine = kit.small_engine(store=store, compile_cache_dir=compile_cache)
        self._hook(SharedKV, "restore", before=lambda *_: self._at("load"))
        self._hook(type(self.engine._runner), "run_pass", after=lambda *_: self._at("prefill"))
        self._hook(ObjectStore, "write", before=self._before_write, after=self._after_write)

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
            for number, piece in enumerate(session.send(text, sampling=GREEDY)):
                answer += piece
                if number == 3:
                    self._at("decode")
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

    def _before_write(self, _: ObjectStore, name: str, *__: object, **___: object) -> None:
        if "/sessions/" in name and self._num_turns:
            self._at("manifest")

    def _after_write(self, _: ObjectStore, name: str, *__: object, **___: object) -> None:
        if "/kv/" in name:
            self._at("object")
        if "/sessions/" in name and self._num_turns:
            self._at("published")

    def _at(self, step: str) -> None:
        if (step, self._num_turns) == (self._step, self._turn):
            self._step = ""  # Whoever is let go on meets it no more.
            # To this thread: of one to the process another may take notice, and this one write on until it does.
            signal.pthread_kill(threading.get_ident(), self._signal)

    @staticmethod
    def _hook(
        owner: type,
        name: str,
        before: Callable[..., None] = lambda *_, **__: None,
        after: Callable[..., None] = lambda *_, **__: None,
    ) -> None:
        method = getattr(owner, name)

        def hooked(*args: Any, **options: Any) -> Any:
            before(*args, **options)
            result = method(*args, **options)
            after(*args, **options)
            return result

        setattr(owner, name, hooked)


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
