"""Any conversations in any order over a small pool of pages: what is packed into a pass changes no answer.

A campaign of seeds. The reference computes one turn at a time and packs nothing: the model over the same cache, cut as
the engine should cut it (`overflow_kit.Conversation`).
"""

from __future__ import annotations

import collections
import dataclasses
import random
from pathlib import Path

import pytest

from ca_jax.engine import Engine
from ca_jax.serving import drafts
from ca_jax.session import Answer, Session
from ca_jax.storage.config import GIB, StoreConfig
from tests import engine_kit as kit
from tests import overflow_kit as ok
from tests import overlap_kit

NUM_ACTS = 70
SEEDS = (106, 132, 143, 151, 157)
"""Of one to four jobs at a time, with pages kept or not; contexts are cut in both ways, repaired, and given up then."""


@dataclasses.dataclass(eq=False)
class Talk:
    """A conversation, what it should be, and its turn that runs."""

    session: Session
    reference: ok.Conversation
    prompt: list[int] = dataclasses.field(default_factory=list)
    answer: Answer | None = None

    def end(self) -> None:
        """Its turn has ended: its answer, as far as it got, is the greedy one."""
        job, self.answer = self.answer.job, None
        assert job.error is None, job.error
        if job.output_ids:
            self.reference.follow(self.prompt, job.output_ids)
        else:
            self.reference.give_up(self.prompt)
        assert self.session.token_ids == self.reference.token_ids


def talk_of(engine: Engine, session: Session) -> Talk:
    """A conversation that begins with a session's tokens, of which nothing is computed."""
    reference = ok.Conversation(engine.config.overflow, engine.window)
    reference.pending = list(session.token_ids)
    return Talk(session, reference)


def store_of(rng: random.Random, directory: Path) -> tuple[str, StoreConfig]:
    """A store, and how tokens may leave with it: what is lost is computed anew, which is the same only in `tt`."""
    kind = rng.choice(["dram", "little dram", "ssd"])
    if kind == "little dram":
        return "tt", kit.store_of(12)
    store = kit.store_of(1000) if kind == "dram" else kit.ssd_store(directory, dram_blocks=40)
    return rng.choice(["ca", "tt"]), store


def engine_of(rng: random.Random, batch: int, directory: Path, **changes: object) -> Engine:
    """An engine of so many jobs at a time, whose other sizes and overlaps are any."""
    page_tokens, window = rng.choice([8, 16]), rng.choice([64, 96, 128])
    least = window // page_tokens
    num_pages = rng.choice([least, (least + batch * least) // 2, batch * least])
    method, store = store_of(rng, directory)
    repair = {"repair_ratio": 1.0} if method == "ca" and rng.random() < 0.7 else {}
    return kit.small_engine(
        page_tokens=page_tokens,
        context_window=window,
        max_batch_size=batch,
        kv_pool_gib=num_pages * page_tokens * kit.TOKEN_BYTES / GIB,
        keep_pages=rng.random() < 0.5,
        read_buffer=rng.choice(["auto", 1, "off"]),
        overflow=ok.config(method=method, **repair),
        store=store,
        **changes,
    )


def check_pages(engine: Engine) -> None:
    """A job holds the pages of its tokens and one at most, and every page is free or of those that say so."""
    pool, size = engine._runner.pool, engine._runner.pool.size
    for job in engine._scheduler.running:
        assert len(pool.pages_of(job.slot)) <= size.pages_of(job.num_tokens) + 1
    holdings = [*pool._rows.values(), *(each.holding for each in engine._kv.resident._kept.values())]
    held = collections.Counter(page for holding in holdings for page in holding.pages)
    assert dict(held) == dict(pool._holders[0])
    assert sorted([*held, *pool._free[0]]) == list(range(size.num_pages))


def act(rng: random.Random, engine: Engine, talks: list[Talk]) -> None:
    """Submits a turn, begins or forks a conversation, or closes an answer."""
    idle, busy = ([talk for talk in talks if (talk.answer is None) == is_idle] for is_idle in (True, False))
    chance = rng.random()
    if chance < 0.1 and busy:
        rng.choice(busy).answer.close()
    elif chance < 0.2 and idle and idle[0].session.token_ids:
        source = rng.choice(idle).session
        talks.append(talk_of(engine, engine.fork(source, rng.randint(0, len(source.token_ids)))))
    elif chance < 0.25:
        talks.append(talk_of(engine, engine.session()))
    elif idle:
        talk = rng.choice(idle[:4])  # So that some grow until their context is full.
        talk.prompt = kit.prompt(rng.choice([rng.randint(1, 12), rng.randint(13, 50)]), seed=rng.randint(0, 2))
        max_tokens = rng.choice([1, rng.randint(2, 12), rng.randint(13, 40)])
        talk.answer = talk.session.send_ids(talk.prompt, max_tokens=max_tokens, priority=rng.randint(-1, 1))


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in SEEDS else pytest.mark.slow) for seed in range(100, 180)]
)
def test_any_conversations_in_any_order_answer_as_one_at_a_time(seed, tmp_path, monkeypatch):
    rng, most_drafts = random.Random(seed), 15 * (seed % 2)
    monkeypatch.setattr(drafts.Drafter, "took", lambda self, *of_step: None)  # All that may be right is checked,
    monkeypatch.setattr(drafts, "ROW_TOKENS", 1)
    monkeypatch.setattr(drafts, "LEAST_MATCH", 1)  # and much is wrong.
    with engine_of(rng, 1 + seed % 4, tmp_path, max_draft_tokens=most_drafts) as engine:
        overlap_kit.poison(engine)
        talks, num_acts = [talk_of(engine, engine.session()) for _ in range(4)], NUM_ACTS
        while num_acts or any(talk.answer for talk in talks):
            burst = min(rng.choice([0, 0, 0, 0, 1, 2, 5]), num_acts)
            for _ in range(burst):
                act(rng, engine, talks)
            num_acts -= burst
            engine.step()
            check_pages(engine)
            for talk in talks:
                if talk.answer is not None and talk.answer.job.done:
                    talk.end()
        if engine.config.overflow.method == "tt":  # What else is left of a cut may waste a block of the store.
            overlap_kit.assert_nothing_is_held(engine)
        assert (engine.metrics.failed_loads, engine.metrics.failed_saves) == (0, 0)
        if most_drafts:
            assert engine.metrics.draft_tokens > 50 + engine.metrics.accepted_tokens
