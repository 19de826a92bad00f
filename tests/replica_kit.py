"""Engines that share sessions as objects in one directory, and what is said to them, for tests of several rooms."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ca_jax.engine import Engine
from ca_jax.session import Session
from ca_jax.turns.requests import SamplingParams
from tests import engine_kit as kit

GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
SAID = (
    "Who wrote Faust, and how long did it take from the first page to the last one of all?",
    "And what did he do on the days between?",
    "Then tell me of the second part.",
    "Who was it that came to Weimar with him, and why did they both stay there for so long?",
)
RUN_BLOCKS = 2
"""Blocks in a run here, so that short conversations have some."""


def make_replica(
    directory: Path,
    ssd: str | None = None,
    write: str = "turn",
    url: str | None = None,
    codec: object = None,
    **changes: object,
) -> Engine:
    """An engine that shares `directory/shared` with others, or what is at a URL.

    Args:
      ssd: a directory of its own beside that; None: it has DRAM alone.
      write: when it publishes.
      codec: file of what codes objects.
    """
    store = kit.SMALL.store if ssd is None else kit.ssd_store(directory / ssd)
    url = url or f"file://{directory}/shared"
    store = dataclasses.replace(store, objects_url=url, objects_write=write, objects_deadline_s=2.0)
    if codec is not None:
        store = dataclasses.replace(store, objects_codec=str(codec))
    return kit.small_engine(store=store, **changes)


def say(session: Session, text: str) -> str:
    return "".join(session.send(text, sampling=GREEDY))


def serial(said: tuple[str, ...] = SAID, **changes: object) -> list[str]:
    """What one engine that shares nothing answers."""
    with kit.small_engine(**changes) as engine:
        session = engine.session()
        return [say(session, text) for text in said]


def say_and_publish(engine: Engine, session: Session, text: str) -> str:
    num_before = engine.metrics.publishes
    answer = say(session, text)
    kit.until(engine, lambda: engine.metrics.publishes > num_before)
    return answer


def claimed(engine: Engine, session_id: str = "s") -> Session:
    assert engine.elsewhere is not None
    engine.elsewhere.claim(session_id)
    return engine.session(session_id=session_id)
