"""What one truncation takes of an engine: the gap it leaves in an answer, and the turn behind it.

Methods take turns, sample for sample, and every round begins with another one. Token ids are random.

Not here: engines and conversations (`suites.overflow`), bookkeeping alone (`overflow_store`), what rows hold
(`overflow_rows`).
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from benchmarks import harness
from benchmarks.compiles import CompileCounter
from benchmarks.engines import SETTLING_STEPS, answer_of, random_ids, send_turn, take_back
from benchmarks.harness import BenchError, Run, Sample
from benchmarks.overflow_rows import NOWHERE, PLACES, GapRow, NextTurnRow, OverflowBenchConfig
from ca_jax.engine import Engine
from ca_jax.session import Job, Session

_TOKENS_BEFORE = 12  # Of an answer, until the window is full.
_TOKENS_AFTER = 16

Engines = Mapping[str, Engine]
"""By method, idle and warm."""


def first_truncations(engine: Engine, config: OverflowBenchConfig, rng: np.random.Generator) -> int:
    """Has an idle engine truncate in the middle of an answer and for a message, for nothing.

    Functions that were compiled for it, or read from the compile cache: 0 unless its warm-up missed one.
    """
    with CompileCounter() as compiles:
        gap_sample(engine, 1, rng)
        for place in PLACES:
            _next_turn_sample(engine, place, config.next_turn_tokens, rng)
    return compiles.count


def gap_rows(run: Run[OverflowBenchConfig], engines: Engines, rng: np.random.Generator) -> Iterator[GapRow]:
    """The gap of every method and number of sessions."""
    config = run.config
    cells = {f"{method} {num}": (method, num) for num in config.gap_sessions for method in config.gap_methods}
    ways = {name: partial(gap_sample, engines[method], num, rng) for name, (method, num) in cells.items()}
    rounds = run.rounds(lambda: ways)
    for name, (method, num_sessions) in cells.items():
        taken = harness.of_way(rounds, name)
        extra_steps = harness.must_median(taken, "gap_ratio") - 1
        fixed = {"method": method, "sessions": num_sessions, "context_tokens": config.context_window}
        yield harness.make_row(GapRow, taken, **fixed, extra_steps=extra_steps)


def gap_sample(engine: Engine, num_sessions: int, rng: np.random.Generator) -> Sample:
    """An answer that overflows while others go on beside it; those are let go of then."""
    window = engine.window
    sessions = [engine.session() for _ in range(num_sessions)]
    others = [_submit(engine, session, window // 2, window // 2 - 1, rng) for session in sessions[1:]]
    while not all(job.token_times_s or job.done for job in others):
        engine.step()
    job = _submit(engine, sessions[0], window - _TOKENS_BEFORE, _TOKENS_BEFORE + _TOKENS_AFTER, rng)
    most = 0  # Tokens of one step.
    while not job.done:
        num_tokens = len(job.token_times_s)
        engine.step()
        most = max(most, len(job.token_times_s) - num_tokens)
    num_ended = sum(other.done for other in others)
    for other in others:
        engine.cancel(other)
    engine.wait_for_saves()
    for session in sessions:
        session.close()
    if job.error is not None:
        raise job.error
    usage = job.usage()
    if num_ended or not usage.dropped_tokens:
        raise BenchError(
            f"an answer must overflow beside {len(others)} others that go on, got {usage.dropped_tokens} tokens "
            f"dropped and {num_ended} that had ended"
        )
    if most > 1:
        raise BenchError(f"a step must give an answer one token, or the gap is in none of its times; got {most}")
    times_s = np.diff(usage.token_times_s)
    at = _TOKENS_BEFORE - 1  # The token behind as many as fill the window.
    tpot_s = float(np.median([*times_s[SETTLING_STEPS:at], *times_s[at + 2 :]]))
    gap_s = float(times_s[at : at + 2].max())
    return {"tpot_s": tpot_s, "gap_s": gap_s, "gap_ratio": gap_s / tpot_s, "dropped_tokens": usage.dropped_tokens}


def _submit(engine: Engine, session: Session, num_tokens: int, max_tokens: int, rng: np.random.Generator) -> Job:
    return session.submit(random_ids(rng, engine.model, num_tokens), sampling=answer_of(max_tokens))


def next_turn_rows(run: Run[OverflowBenchConfig], engines: Engines, rng: np.random.Generator) -> Iterator[NextTurnRow]:
    """The turn behind a truncation, of every method and by where the window overflowed."""
    config, num_new = run.config, run.config.next_turn_tokens
    cells = {f"{name} {place}": (name, place) for place in (*PLACES, NOWHERE) for name in config.next_turn_methods}
    ways = {
        name: partial(_next_turn_sample, engines[method], place, num_new, rng)
        for name, (method, place) in cells.items()
    }
    rounds = run.rounds(lambda: ways)
    for each in rounds:
        for name, sample in each.items():
            method, place = cells[name]
            sample["overflow_ratio"] = sample["ttft_s"] / each[f"{method} {NOWHERE}"]["ttft_s"]
            if (of_ca := each.get(f"ca {place}")) is not None:
                sample["ratio"] = sample["ttft_s"] / of_ca["ttft_s"]
    for name, (method, place) in cells.items():
        taken = harness.of_way(rounds, name)
        prefill_tokens = max(sample["prefill_tokens"] for sample in taken)
        yield harness.make_row(
            NextTurnRow,
            taken,
            method=method,
            overflowed=place,
            new_tokens=num_new,
            prefill_tokens=prefill_tokens,
            recomputed_tokens=prefill_tokens - num_new,
            repaired_tokens=max(sample["repaired_tokens"] for sample in taken),
        )


def _next_turn_sample(engine: Engine, place: str, num_new: int, rng: np.random.Generator) -> Sample:
    session, ids = engine.session(), partial(random_ids, rng, engine.model)
    if not place.startswith("answer"):
        num_history = engine.window - num_new // 2 - (place == "idle, then prompt")
        if place == NOWHERE and (overflow := engine.config.overflow) is not None:
            num_history -= round(overflow.truncation_ratio * engine.window)
        send_turn(engine, session, ids(num_history))
    else:
        params = answer_of(_TOKENS_BEFORE + _TOKENS_AFTER)
        collections.deque(session.send_ids(ids(engine.window - _TOKENS_BEFORE), sampling=params), maxlen=0)
        if not session.num_dropped:
            raise BenchError("an answer must overflow, got no tokens dropped")
    while "idle" in place and engine.step():
        pass
    if place == "idle, then prompt":  # The last token is computed ahead with the others.
        engine.wait_for_saves()
    else:  # An answer's last token was never computed: it would be now.
        take_back(engine, session, len(session.token_ids) - 1)
    _, ttft_s = send_turn(engine, session, ids(num_new))
    usage = session.usage
    session.close()
    if usage is None:
        raise RuntimeError(f"a turn of session {session.session_id} has ended without usage")
    if (usage.dropped_tokens > 0) != place.endswith("prompt"):
        raise BenchError(f"the {place} must overflow, got a turn that dropped {usage.dropped_tokens} tokens")
    return {
        "ttft_s": ttft_s,
        "history_tokens": usage.prompt_tokens - num_new,
        "prefill_tokens": usage.new_tokens,
        "repaired_tokens": usage.repaired_tokens,
    }
