"""A process that serves conversations over an SSD directory until it is killed, telling what it has written there.

    python -m tests.reliability.victim DIRECTORY DRIVER COMPILE_CACHE

Each line on stdin is a seed: a fork of this process serves by it. It says on stdout

    start PID                   the fork is there
    open SESSIONS LOST          its engine is, with so many sessions found and lost
    publish KEY TOKENS DIGEST   this change of the catalog is about to be made,
    cut KEY TOKENS                or this, to so many tokens, with a new note perhaps,
    note KEY TOKENS               or only the note of a session of so many,
    forget KEY ...                or this
    ok [DIGEST]                 and is durable now
    turns N                     so many turns have ended
    broken MESSAGE              something raised
    end                         the fork is gone

Changes of the catalog are made one after the other on one thread, so that their lines are in order. A fork, since
starting Python takes as long as what is to be interrupted; it comes before anything of jax has started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ca_jax.config import BlendConfig
from ca_jax.engine import Engine
from ca_jax.errors import UnknownSessionError
from ca_jax.session import Session
from ca_jax.storage import opening
from ca_jax.storage.catalog.catalog import Catalog
from ca_jax.storage.catalog.records import Contents
from tests import engine_kit as kit
from tests.reliability import workload

NUM_CONVERSATIONS = 8
DRAM_BLOCKS = 40
SSD_BLOCKS = 56
MAX_TOKENS = 150
"""A conversation that is longer is closed, and begins anew."""


def tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())


class TellingCatalog(Catalog):
    """A catalog that says what it is about to change, and when that is durable."""

    _is_nested = False

    def publish(self, record, token_ids, sums, note=b""):
        contents = Contents(token_ids=np.asarray(token_ids, np.int32), sums=sums, note=note)
        tell(f"publish {record.key} {record.num_tokens} {workload.digest(record, contents)}")
        published = super().publish(record, token_ids, sums, note)
        tell("ok")
        return published

    def cut(self, key, kept, *args: Any, **options: Any):
        tell(f"cut {key} {int(np.count_nonzero(kept))}")
        with self._nested(key):
            return super().cut(key, kept, *args, **options)

    def set_note(self, key, note):
        found = self.load(key)
        tell(f"note {key} {0 if found is None else found[0].num_tokens}")
        with self._nested(key):
            return super().set_note(key, note)

    @contextlib.contextmanager
    def _nested(self, key):
        """What is done within is one change, and ends with what is said of a session then."""
        self._is_nested = True
        try:
            yield
        finally:
            self._is_nested = False
        found = self.load(key)
        tell("ok" if found is None else f"ok {workload.digest(*found)}")

    def forget(self, keys):
        keys = tuple(keys)
        if self._is_nested or not keys:
            return super().forget(keys)
        tell(f"forget {' '.join(keys)}")
        num_forgotten = super().forget(keys)
        tell("ok")
        return num_forgotten


def serve(directory: Path, driver: str, seed: int) -> None:
    """Turns of several conversations at a time, some broken off; conversations rewound, cut, dropped, closed.

    Some turns have a context of chunks, all of which are computed anew, so that KV is that of one pass.
    """
    random = np.random.default_rng(seed)
    store = workload.ssd_store(directory, driver, dram_blocks=DRAM_BLOCKS, ssd_blocks=SSD_BLOCKS)
    config = dataclasses.replace(kit.SMALL, max_batch_size=4, store=store, blend=BlendConfig(recompute_ratio=1.0))
    engine = Engine(kit.tiny_model(), config)
    stats = engine.store_stats()
    tell(f"open {stats.num_sessions} {stats.ssd.num_lost_sessions}")
    num_turns = 0
    while True:
        names = [f"conversation {i}" for i in random.choice(NUM_CONVERSATIONS, 4, replace=False)]
        sessions = [change(engine, engine.session(session_id=name), random) for name in names]
        answers = [
            session.send_ids(
                begun + kit.prompt(int(random.integers(3, 40)), seed=int(random.integers(1 << 30))),
                context=None if begun else context(random),
                max_tokens=n,
            )
            for session, begun, n in zip(
                sessions,
                [beginning(engine, session, random) for session in sessions],
                random.integers(2, 12, len(sessions)).tolist(),
                strict=True,
            )
        ]
        if random.random() < 0.2:  # A caller that goes away.
            next(answers[0])
            answers.pop(0).close()
        kit.drain(*answers)
        num_turns += len(sessions)
        if random.random() < 0.2:
            engine.wait_for_saves()
        tell(f"turns {num_turns}")


def beginning(engine: Engine, session: Session, random: np.random.Generator) -> list[int]:
    """What the longest uncut conversation begins with, for one that begins as a branch of it."""
    if session.token_ids or random.random() < 0.2:
        return []
    others = [engine.session(session_id=f"conversation {i}") for i in range(NUM_CONVERSATIONS)]
    longest = max((other.token_ids for other in others if not other.num_dropped), key=len, default=[])
    return longest[: int(random.integers(len(longest) // 2, len(longest) + 1))]


def context(random: np.random.Generator) -> list[tuple[int, ...]] | None:
    """Of one chunk or two, or none."""
    chosen = random.permutation(len(workload.CHUNKS))[: random.choice(3, p=[0.5, 0.2, 0.3])]
    return [workload.CHUNKS[i] for i in chosen] or None


def change(engine: Engine, session: Session, random: np.random.Generator) -> Session:
    """What may happen to a conversation between its turns."""
    what = random.random()
    if len(session.token_ids) > MAX_TOKENS or what < 0.1:
        session.close()
        return engine.session(session_id=session.session_id)
    if what < 0.2:
        with contextlib.suppress(UnknownSessionError):
            engine.stored.drop(session.session_id)
    elif what < 0.35:
        session.rewind(int(random.integers(len(session.token_ids) + 1)))
    elif what < 0.5 and session.token_ids:
        session.discard(tokens_to_discard(len(session.token_ids), random))
    return session


def tokens_to_discard(num_tokens: int, random: np.random.Generator) -> np.ndarray:
    """The oldest half behind the first four, or a third of all, as a mask; never the last one."""
    mask = (np.arange(num_tokens) >= 4) & (np.arange(num_tokens) < num_tokens // 2)
    if random.random() < 0.5:
        mask = random.random(num_tokens) < 1 / 3
    mask[-1] = False
    return mask


def work(directory: str, driver: str, compile_cache: str, seed: int) -> None:
    scratch = Path(directory).with_name("tmp")  # What a killed process leaves goes with its directory.
    scratch.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(scratch)
    jax.config.update("jax_compilation_cache_dir", compile_cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    try:
        serve(Path(directory), driver, seed)
    except BaseException as error:
        tell(f"broken {type(error).__name__}: {error}".replace("\n", " "))


def main() -> None:
    opening.Catalog = TellingCatalog
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            tell(f"start {os.getpid()}")
            work(sys.argv[1], sys.argv[2], sys.argv[3], int(line))
            os._exit(1)
        os.waitpid(pid, 0)
        tell("end")


if __name__ == "__main__":
    main()
