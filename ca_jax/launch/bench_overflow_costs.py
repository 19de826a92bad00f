"""Measures what one truncation takes of an engine: the gap it leaves in an answer, and the turn behind it.

Methods take turns, sample for sample, and every round begins with another one (A B C, B C A, ...). The first round is
for nothing. Token ids are random.

Not here: engines and conversations (`bench_overflow`), bookkeeping alone (`bench_overflow_bookkeeping`), what rows hold
(`bench_overflow_schema`).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from ca_jax.engine import Engine
from ca_jax.launch.bench_overflow_schema import NOWHERE, PLACES, GapRow, NextTurnRow, OverflowBenchConfig
from ca_jax.launch.bench_schema import SETTLING_STEPS, BenchError, Samples
from ca_jax.launch.bench_suites import send_turn
from ca_jax.pretrained import Progress
from ca_jax.session import Session
from ca_jax.telemetry.metrics import CompileCounter
from ca_jax.turns.jobs import Job
from ca_jax.turns.requests import SamplingParams

_TOKENS_BEFORE = 12  # Of an answer, until the window is full.
_TOKENS_AFTER = 16

Cell = TypeVar("Cell")


def first_truncations(engine: Engine, config: OverflowBenchConfig, rng: np.random.Generator) -> int:
    """Has an idle engine truncate in the middle of an answer and for a message, for nothing.

    Returns:
      Functions that were compiled for it, or read from the compile cache: 0 unless its warm-up missed one.

    Raises:
      BenchError: it did not truncate.
    """
    with CompileCounter() as compiles:
        _gap_sample(engine, 1, rng)
        for place in PLACES:
            _next_turn_sample(engine, place, config.next_turn_tokens, rng)
    return compiles.count


# The gap in an answer.


def gap_rows(
    engines: Mapping[str, Engine], config: OverflowBenchConfig, rng: np.random.Generator, progress: Progress
) -> list[GapRow]:
    """Measures the gap of every method and number of sessions.

    Args:
      engines: by method, idle and warm.
      config: methods, sessions, repeats.
      rng: draws token ids.
      progress: told of every sample.

    Raises:
      BenchError: an answer did not overflow where it should have, or another one ended meanwhile.
    """
    cells = [(method, num_sessions) for num_sessions in config.gap_sessions for method in config.gap_methods]
    found: dict[tuple[str, int], list[_Gap]] = {cell: [] for cell in cells}
    recompiles: collections.Counter[tuple[str, int]] = collections.Counter()
    for (method, num_sessions), is_measured in _rounds("decode_gap", cells, config.repeats, progress):
        with CompileCounter() as compiles:
            sample = _gap_sample(engines[method], num_sessions, rng)
        if is_measured:
            found[method, num_sessions].append(sample)
            recompiles[method, num_sessions] += compiles.count
    rows = []
    for (method, num_sessions), gaps in found.items():
        samples = Samples()
        for gap in gaps:
            samples.add(tpot_s=gap.tpot_s, gap_s=gap.gap_s, gap_ratio=gap.gap_s / gap.tpot_s)
        row = GapRow(
            method=method,
            sessions=num_sessions,
            context_tokens=config.context_window,
            dropped_tokens=gaps[-1].dropped_tokens,
            tpot_s=samples.median("tpot_s"),
            gap_s=samples.median("gap_s"),
            gap_ratio=samples.median("gap_ratio"),
            extra_steps=samples.median("gap_ratio") - 1,
            recompiles=recompiles[method, num_sessions],
            spread=samples.spread(),
        )
        rows.append(row)
    return rows


@dataclasses.dataclass(frozen=True)
class _Gap:
    """One answer with a truncation in it."""

    tpot_s: float
    gap_s: float
    dropped_tokens: int


def _gap_sample(engine: Engine, num_sessions: int, rng: np.random.Generator) -> _Gap:
    """An answer that overflows while others go on beside it; those are let go of then."""
    window = engine.window
    sessions = [engine.session() for _ in range(num_sessions)]
    others = [_submit(engine, session, window // 2, window // 2 - 1, rng) for session in sessions[1:]]
    while not all(job.token_times_s or job.done for job in others):
        engine.step()
    job = _submit(engine, sessions[0], window - _TOKENS_BEFORE, _TOKENS_BEFORE + _TOKENS_AFTER, rng)
    while not job.done:
        engine.step()
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
            f"wanted an answer that overflows beside {len(others)} others, found {usage.dropped_tokens} tokens dropped "
            f"and {num_ended} that had ended"
        )
    times_s = np.diff(usage.token_times_s)
    at = _TOKENS_BEFORE - 1  # The token behind as many as fill the window.
    plain_s = [*times_s[SETTLING_STEPS:at], *times_s[at + 2 :]]
    return _Gap(float(np.median(plain_s)), float(times_s[at : at + 2].max()), usage.dropped_tokens)


def _submit(engine: Engine, session: Session, num_tokens: int, max_tokens: int, rng: np.random.Generator) -> Job:
    return engine.submit_turn(session, _ids(engine, num_tokens, rng), _answer_of(max_tokens))


# The turn behind a truncation.


def next_turn_rows(
    engines: Mapping[str, Engine], config: OverflowBenchConfig, rng: np.random.Generator, progress: Progress
) -> list[NextTurnRow]:
    """Measures the turn behind a truncation, of every method and by where the window overflowed.

    Args:
      engines: by method, idle and warm.
      config: methods, the message's tokens, repeats.
      rng: draws token ids.
      progress: told of every sample.

    Raises:
      BenchError: a turn did not overflow where it should have.
    """
    cells = [(method, place) for place in (*PLACES, NOWHERE) for method in config.next_turn_methods]
    found: dict[tuple[str, str], list[_NextTurn]] = {cell: [] for cell in cells}
    recompiles: collections.Counter[tuple[str, str]] = collections.Counter()
    for (method, place), is_measured in _rounds("next_turn", cells, config.repeats, progress):
        with CompileCounter() as compiles:
            turn = _next_turn_sample(engines[method], place, config.next_turn_tokens, rng)
        if is_measured:
            found[method, place].append(turn)
            recompiles[method, place] += compiles.count
    rows = []
    for (method, place), turns in found.items():
        samples = Samples()
        for turn, of_ca, plain in zip(turns, found.get(("ca", place), turns), found[method, NOWHERE], strict=True):
            ratios = {"ratio": turn.ttft_s / of_ca.ttft_s, "overflow_ratio": turn.ttft_s / plain.ttft_s}
            samples.add(ttft_s=turn.ttft_s, **ratios)
        row = NextTurnRow(
            method=method,
            overflowed=place,
            history_tokens=turns[-1].history_tokens,
            new_tokens=config.next_turn_tokens,
            prefill_tokens=max(turn.prefill_tokens for turn in turns),
            recomputed_tokens=max(turn.prefill_tokens for turn in turns) - config.next_turn_tokens,
            repaired_tokens=max(turn.repaired_tokens for turn in turns),
            ttft_s=samples.median("ttft_s"),
            ratio=samples.median("ratio") if ("ca", place) in found else None,
            overflow_ratio=samples.median("overflow_ratio"),
            recompiles=recompiles[method, place],
            spread=samples.spread(),
        )
        rows.append(row)
    return rows


@dataclasses.dataclass(frozen=True)
class _NextTurn:
    """One turn behind a truncation, or where there was none."""

    ttft_s: float
    history_tokens: int
    prefill_tokens: int
    repaired_tokens: int


def _next_turn_sample(engine: Engine, place: str, num_new: int, rng: np.random.Generator) -> _NextTurn:
    session = engine.session()
    if place != "answer":
        num_history = engine.window - num_new // 2
        if place == NOWHERE and engine.config.overflow is not None:
            num_history -= round(engine.config.overflow.truncation_ratio * engine.window)
        send_turn(engine, session, _ids(engine, num_history, rng))
    else:
        ids = _ids(engine, engine.window - _TOKENS_BEFORE, rng)
        collections.deque(session.send_ids(ids, sampling=_answer_of(_TOKENS_BEFORE + _TOKENS_AFTER)), maxlen=0)
        if not session.num_dropped:
            raise BenchError("wanted an answer that overflows, found no tokens dropped")
    session.rewind(len(session.token_ids) - 1)  # An answer's last token was never computed: it would be now.
    engine.wait_for_saves()
    _, ttft_s = send_turn(engine, session, _ids(engine, num_new, rng))
    usage = session.usage
    session.close()
    if usage is None:
        raise RuntimeError(f"a turn of session {session.session_id} has ended without usage")
    if (usage.dropped_tokens > 0) != (place == "prompt"):
        raise BenchError(f"wanted an overflow by the {place}, found a turn that dropped {usage.dropped_tokens} tokens")
    return _NextTurn(ttft_s, usage.prompt_tokens - num_new, usage.new_tokens, usage.repaired_tokens)


# What both share.


def _rounds(what: str, cells: Sequence[Cell], repeats: int, progress: Progress) -> Iterator[tuple[Cell, bool]]:
    """Each cell once a round, and whether the round counts: all but the first. Tells of every sample."""
    if not cells:
        return
    total, done = len(cells) * (1 + repeats), itertools.count()
    progress(what, next(done), total)
    for index in range(1 + repeats):
        first = index % len(cells)
        for cell in (*cells[first:], *cells[:first]):
            yield cell, index > 0
            progress(what, next(done), total)


def _ids(engine: Engine, num_tokens: int, rng: np.random.Generator) -> list[int]:
    return rng.integers(engine.model.config.vocab_size, size=num_tokens).tolist()


def _answer_of(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)
