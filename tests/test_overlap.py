"""Everything at once: 32 conversations whose loads, saves, passes and tiers overlap answer as if nothing ever did.

Transfers take random times, memory that nobody may read is NaN, and DRAM is so small that conversations come back from
SSD. How jobs break or are given up midway is in test_overlap_release.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from ca_jax.engine import Engine
from ca_jax.kv.costs import RateMeter
from ca_jax.session import Answer, Session
from ca_jax.storage.config import GIB
from ca_jax.storage.records import Residency
from tests import engine_kit as kit
from tests import overlap_kit
from tests.reliability import workload
from tests.storage.store_helpers import open_gated
from tests.transfers_kit import DelayedTransfers

NUM_SESSIONS = 32
ANSWER_TOKENS = 6


@dataclasses.dataclass(frozen=True)
class Turn:
    """What one session sends in one round."""

    prompt: list[int]
    priority: int
    closes_after: int | None
    """Steps of the round after which it closes the answer, however far that is; None: it listens to the end."""


def turns(num_rounds: int, seed: int = 0, *, closes: bool = False) -> list[list[Turn]]:
    """For each round a turn of each session. Every fourth session begins like three others."""
    rng = random.Random(seed)

    def turn(session: int, nth: int) -> Turn:
        prompt = kit.prompt(rng.randint(*((1, 45) if nth else (20, 80))), seed=1000 * nth + session)
        if not nth and session % 4 == 0:
            prompt = kit.prompt(36, seed=session % 16) + prompt
        closes_after = rng.randint(0, 2 * NUM_SESSIONS) if closes and rng.random() < 0.6 else None
        return Turn(prompt, rng.choice([-1, 0, 0, 1]), closes_after)

    return [[turn(session, nth) for session in range(NUM_SESSIONS)] for nth in range(num_rounds)]


def run(engine: Engine, answers: Sequence[Answer], turns_of_round: Sequence[Turn]) -> None:
    """Runs the engine, closes answers in passing, and listens to what is left of them."""
    for step in range(2 * NUM_SESSIONS):
        for answer, turn in zip(answers, turns_of_round, strict=True):
            if turn.closes_after == step:
                answer.close()
        engine.step()
    kit.drain(*answers)


def converse(engine: Engine, rounds: Sequence[Sequence[Turn]]) -> list[Session]:
    """Sends all turns of a round, then listens to them all. Each leaves all of it, its beginning, or no trace."""
    sessions: dict[Session, list[range]] = {engine.session(): [] for _ in rounds[0]}
    for turns_of_round in rounds:
        known = [session.token_ids for session in sessions]
        answers = [
            session.send_ids(turn.prompt, max_tokens=ANSWER_TOKENS, priority=turn.priority)
            for session, turn in zip(sessions, turns_of_round, strict=True)
        ]
        run(engine, answers, turns_of_round)
        for (session, said), turn, before in zip(sessions.items(), turns_of_round, known, strict=True):
            if turn.closes_after is not None and session.token_ids == before:
                continue
            assert session.token_ids[: len(before) + len(turn.prompt)] == before + turn.prompt
            said.append(kit.last_answer(session))
            assert len(said[-1]) == ANSWER_TOKENS or turn.closes_after is not None
    engine.wait_for_saves()
    assert [kit.num_wrong(session.token_ids, said) for session, said in sessions.items()] == [0] * NUM_SESSIONS
    return list(sessions)


@contextlib.contextmanager
def overlapping_engine(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    *,
    staged_layers: int = 2,
    device_ahead: int = 0,
    **changes: object,
) -> Iterator[Engine]:
    """An engine with every overlap on, DRAM for a quarter of the conversations, delays everywhere and NaN all over.

    Args:
      directory: of its SSD tier.
      monkeypatch: of the test.
      seed: of the delays.
      staged_layers: what the read buffer holds; by default it has no room but that for execution, two layers of three.
      device_ahead: 1 has layers put on the device before the one in front is dispatched, as on an accelerator.
      **changes: of the engine's config.
    """
    monkeypatch.setattr(RateMeter, "rates", overlap_kit.rates_of(load_token_s=1e-3, pair_s=2e-6))
    tiers = open_gated(monkeypatch)
    store = workload.ssd_store(directory, "raw", dram_blocks=80, ssd_blocks=1000)
    with contextlib.ExitStack() as stack:
        loads, saves, moves = (stack.enter_context(DelayedTransfers(max_s, seed=seed)) for max_s in (3e-3, 1e-3, 10e-3))
        wrapper = overlap_kit.controlled(loads=loads, saves=saves)
        engine = stack.enter_context(kit.small_engine(store_wrapper=wrapper, store=store, max_tpot_ms=1e-3, **changes))
        tiers[0].reads = overlap_kit.LateGate(moves, "load")
        tiers[0].writes = overlap_kit.LateGate(moves, "save")
        overlap_kit.poison(engine, staged_layers=staged_layers)
        engine._kv._loader.device_ahead = max(engine._kv._loader.device_ahead, device_ahead)
        yield engine
        overlap_kit.assert_nothing_is_held(engine)
        workload.check_books(engine, directory)
        assert (engine.metrics.failed_loads, engine.metrics.failed_saves) == (0, 0)


OVERLAPS = [
    {"read_buffer": "auto", "read_buffer_gib": 0.0, "write_buffer_gib": 4096 / GIB},
    {"read_buffer": "all", "device_ahead": 1, "write_buffer_gib": 65536 / GIB},
    {"read_buffer": 1, "staged_layers": 5, "recompute_if_faster": True},
    {"read_buffer": "off", "staged_layers": 3, "async_save": False},
]


def check_what_is_stored(engine: Engine, sessions: Sequence[Session]) -> None:
    """Of every conversation in DRAM all tokens but the last are stored, with the KV of one pass over them."""
    in_dram = {info.session_id: info for info in engine.stored.list() if info.residency is Residency.DRAM}
    assert in_dram
    for session in sessions:
        if session.session_id in in_dram:
            assert in_dram[session.session_id].num_tokens == len(session.token_ids) - 1
            stored, expected_kv = kit.stored_kv(engine, session), kit.full_pass(session.token_ids[:-1])[1]
            np.testing.assert_allclose(stored, expected_kv, atol=kit.ATOL, rtol=0)


LONG = [pytest.param(seed, 4, marks=pytest.mark.slow) for seed in range(100, 108)]
"""Seeds and rounds of slow runs."""


@pytest.mark.parametrize(("seed", "num_rounds"), [(0, 2), *LONG])
@pytest.mark.parametrize("changes", OVERLAPS, ids=[str(each["read_buffer"]) for each in OVERLAPS])
def test_32_conversations_with_every_overlap_on_answer_as_with_all_of_it_off(
    tmp_path, monkeypatch, changes, seed, num_rounds
):
    """Where nothing overlaps, each token is the likeliest by one pass over what is before it."""
    with overlapping_engine(tmp_path, monkeypatch, seed + OVERLAPS.index(changes), **changes) as engine:
        check_what_is_stored(engine, converse(engine, turns(num_rounds)))
        stats, metrics = engine.store_stats(), engine.metrics
        assert stats.num_hits_from_ssd > NUM_SESSIONS // 4, "nothing had to come back from SSD"
        assert stats.ssd is not None
        assert stats.ssd.num_fetches > NUM_SESSIONS // 4
        whole_passes = sum(-(-len(turn.prompt) // 64) for each in turns(num_rounds) for turn in each)
        assert metrics.prefill_passes > whole_passes, "passes were not cut short"
        assert (metrics.preloads > 0) == (changes["read_buffer"] != "off")
    if changes.get("recompute_if_faster"):
        assert metrics.mixed_histories > 0
    if changes["read_buffer"] == "auto":
        assert metrics.write_stall_s > 0, "a write buffer of five tokens was never full"


@pytest.mark.parametrize(("seed", "num_rounds"), [(0, 3), *LONG])
@pytest.mark.parametrize("keep_pages", [False, True])
def test_answers_closed_anywhere_leave_the_others_and_their_own_sessions_right(
    tmp_path, monkeypatch, keep_pages, seed, num_rounds
):
    """Of the last round all listen to the end. Where pages are kept, there are some for a few conversations."""
    pool = {"keep_pages": True, "kv_pool_gib": 64 * kit.BLOCK_TOKENS * kit.TOKEN_BYTES / GIB} if keep_pages else {}
    rounds = [*turns(num_rounds - 1, seed, closes=True), turns(num_rounds, seed)[-1]]
    with overlapping_engine(tmp_path, monkeypatch, seed, read_buffer="all", **pool) as engine:
        sessions = converse(engine, rounds)
        assert engine.metrics.cancelled > NUM_SESSIONS // 2
        assert sum(session.usage.num_cached_tokens > 0 for session in sessions) > NUM_SESSIONS // 2
        assert (engine.metrics.resident_histories > 0) == keep_pages
