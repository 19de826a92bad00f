"""Seeded schedules of conversations over a store that is too small: turns side by side, rewinds, forks, restarts.

Each answer is held against one pass of the model over all that was said, without engine and store.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from ca_jax.engine import Engine
from ca_jax.pretrained import LoadedModel
from ca_jax.session import Session
from ca_jax.storage.config import GIB, StoreConfig
from tests import engine_kit as kit
from tests.families_kit import VOCAB_SIZE

WINDOW = 256
NUM_OPERATIONS = 14
MAX_SESSIONS = 4


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What happens, by a seed."""

    seed: int
    model: LoadedModel
    directory: Path


def run_schedule(schedule: Schedule) -> int:
    """Runs one, and checks every answer; how many tokens were reused."""
    rng = np.random.default_rng(schedule.seed)
    block_bytes = kit.BLOCK_TOKENS * schedule.model.config.kv_bytes_per_token(4)
    store = StoreConfig(dram_gib=int(rng.integers(8, 48)) * block_bytes / GIB, block_tokens=kit.BLOCK_TOKENS)
    if rng.random() < 0.7:
        has_room = rng.random() < 0.7
        tier = {"ssd_gib": 0.05 if has_room else 0.0005, "ssd_free_floor_gib": 0.0}
        store = dataclasses.replace(store, ssd_dir=str(schedule.directory), **tier)
    changes = {
        "context_window": WINDOW,
        "overflow": None,
        "store": store,
        "keep_pages": bool(rng.random() < 0.4),
        "max_batch_size": int(rng.choice([1, 8])),
        "async_save": bool(rng.random() < 0.9),
    }
    run = _Run(rng, schedule.model, changes)
    try:
        for _ in range(NUM_OPERATIONS):
            run.step()
    finally:
        run.engine.close()
    return run.num_reused


class _Run:
    def __init__(self, rng: np.random.Generator, model: LoadedModel, changes: dict[str, object]) -> None:
        self.rng, self.model, self.changes = rng, model, changes
        self.engine: Engine = kit.small_engine(model, **changes)
        self.sessions: dict[str, Session] = {}
        self.num_reused = self.num_named = 0

    def step(self) -> None:
        names = ("turns", "rewind", "fork", "restart", "give_up", "forget_kv", "close", "settle")
        name = self.rng.choice(names, p=[0.46, 0.13, 0.08, 0.08, 0.13, 0.03, 0.03, 0.06])
        getattr(self, name)()

    def prompt(self) -> list[int]:
        most = (
            3 if self.rng.random() < 0.4 else 40
        )  # What a few tokens are answered with hangs most on what was before.
        return self.rng.integers(0, VOCAB_SIZE, int(self.rng.integers(1, most))).tolist()

    def begin(self, session_id: str | None = None) -> Session:
        if session_id is None:
            session_id, self.num_named = f"s{self.num_named}", self.num_named + 1
        self.sessions[session_id] = session = self.engine.session(session_id=session_id)
        return session

    def chosen(self) -> Session | None:
        ready = [each for each in self.sessions.values() if len(each.token_ids) < WINDOW - 60]
        return ready[int(self.rng.integers(len(ready)))] if ready else None

    def turns(self) -> None:
        """One to three sessions speak at once."""
        speakers: dict[str, Session] = {}
        for _ in range(int(self.rng.integers(1, 4))):
            may_begin = len(self.sessions) < MAX_SESSIONS
            session = self.begin() if may_begin and self.rng.random() < 0.3 else self.chosen() or self.begin()
            speakers[session.session_id] = session
        before = {name: list(each.token_ids) for name, each in speakers.items()}
        prompts = {name: self.prompt() for name in speakers}
        answers = [
            each.send_ids(prompts[name], max_tokens=int(self.rng.integers(1, 8))) for name, each in speakers.items()
        ]
        kit.drain(*answers)
        for name, session in speakers.items():
            assert session.token_ids[: len(before[name]) + len(prompts[name])] == before[name] + prompts[name]
            self.num_reused += session.usage.num_cached_tokens
        kit.expect_right(*speakers.values(), model=self.model)

    def rewind(self) -> None:
        """To the end of a turn, mostly, or to any token."""
        session = self.chosen()
        if session is None or not session.token_ids:
            return
        ends = [num_tokens for _, num_tokens in session.conversation.states]
        to = int(self.rng.choice(ends)) if ends and self.rng.random() < 0.7 else None
        session.rewind(int(self.rng.integers(0, len(session.token_ids) + 1)) if to is None else to)

    def fork(self) -> None:
        session = self.chosen()
        if session is not None and len(self.sessions) < MAX_SESSIONS:
            name, self.num_named = f"s{self.num_named}", self.num_named + 1
            self.sessions[name] = self.engine.fork(session, session_id=name)

    def restart(self) -> None:
        """What was on SSD is there again; without one all begin anew."""
        said = {name: each.conversation for name, each in self.sessions.items()}
        self.engine.close()
        self.engine = kit.small_engine(self.model, **self.changes)
        for name in self.sessions:
            session = self.begin(name)
            assert session.token_ids in ([], said[name].token_ids)

    def give_up(self) -> None:
        """A listener leaves in the middle of an answer, or before it begins."""
        session = self.chosen()
        if session is None:
            return
        answer = session.send_ids(self.prompt(), max_tokens=20)
        for _ in range(int(self.rng.integers(0, 8))):
            self.engine.step()
        answer.close()

    def forget_kv(self) -> None:
        session = self.chosen()
        if session is not None:
            self.engine.drop_stored(session)

    def close(self) -> None:
        session = self.chosen()
        if session is not None:
            del self.sessions[session.session_id]
            session.close()

    def settle(self) -> None:
        self.engine.wait_for_saves()
