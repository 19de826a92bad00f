"""What is asked of the engine and when: conversations of a trace, cut to fit the window, and times between turns.

Not here: what turns say (trace_scripts), asking (serving).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable

import numpy as np

from ca_jax.overflow.config import OverflowConfig
from ca_jax.pretrained import LoadedModel
from ca_jax.replay.scripts import Exchange, Script
from ca_jax.replay.trace_scripts import ReplayError, TraceConfig, TraceSession, trace_sessions
from ca_jax.traces.rows import BadRows

THINK_TIMES = ("exponential", "constant", "lognormal")
"""How think times are distributed about their mean. Lognormal: with a standard deviation of 1 in the logarithm."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """How much of a trace is replayed, and how fast.

    Raises:
      ValueError: a number outside its range.
    """

    num_sessions: int = 100
    """Conversations, the first ones of the trace."""
    max_turns: int = 40
    """Most turns of each; later ones are left out. The paper's longest have 40."""
    max_answer_tokens: int = 64
    """Most tokens generated of an answer; what an answer had behind that comes with the next message."""
    arrival_rate: float = 0.0
    """Conversations that begin a second, Poisson. 0: turns come when they did in the trace, or all begin at once where
    it does not say."""
    think_time_s: float = 0.0
    """Mean time between the end of an answer and the next turn; 0 for none."""
    think_time_distribution: str = "exponential"
    """One of `THINK_TIMES`."""
    warmup_turns: int = 0
    """First turns that are served and not counted."""
    seed: int = 0
    """Of arrivals, think times and random tokens."""

    def __post_init__(self) -> None:
        for name, least in (("num_sessions", 1), ("max_turns", 1), ("max_answer_tokens", 2), ("warmup_turns", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("arrival_rate", "think_time_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number of at least 0, got {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        if self.think_time_distribution not in THINK_TIMES:
            raise ValueError(
                f"think_time_distribution must be one of {', '.join(THINK_TIMES)}; got {self.think_time_distribution!r}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayTurn:
    """One turn of a conversation."""

    exchange: Exchange
    """What is sent, and how much is generated."""
    not_before_s: float
    """When it comes at the earliest, since the replay began."""
    think_s: float
    """Least time since the answer before it ended; 0 of a first turn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplaySession:
    """One conversation."""

    session_id: str
    """Its name in the trace."""
    turns: tuple[ReplayTurn, ...]
    """In order; never empty."""

    @property
    def num_tokens(self) -> int:
        """Of all that is said in it."""
        return sum(turn.exchange.num_tokens for turn in self.turns)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What is replayed, and what of the trace is not."""

    sessions: tuple[ReplaySession, ...]
    """Conversations."""
    window: int
    """The context window that they were made for."""
    cut_turns: int
    """Turns whose message was cut to fit the window; its first tokens are left."""
    cut_tokens: int
    """Tokens that were cut off."""
    left_out_turns: int
    """Turns left out since the window was full and nothing may leave it (`EngineConfig.overflow` None)."""
    skipped_rows: int
    """Rows of the trace that could not be used."""
    first_skipped: str | None
    """What was wrong with the first of them."""

    @property
    def num_turns(self) -> int:
        """Of all conversations."""
        return sum(len(session.turns) for session in self.sessions)

    @property
    def largest_session_tokens(self) -> int:
        """Most tokens that a conversation comes to hold."""
        return max(min(session.num_tokens, self.window) for session in self.sessions)

    @property
    def stored_tokens(self) -> int:
        """Tokens of all conversations at their ends, within the window: what a store for all of it holds."""
        return sum(min(session.num_tokens, self.window) for session in self.sessions)


def make_workload(
    model: LoadedModel, trace: TraceConfig, config: WorkloadConfig, *, window: int, overflow: OverflowConfig | None
) -> Workload:
    """Reads a trace and makes of it what is served. The same arguments give the same.

    Args:
      model: whose tokens.
      trace: where from.
      config: how much, and how fast.
      window: most tokens of a context.
      overflow: what happens when one is full.

    Raises:
      FileNotFoundError: there is no such trace.
      ReplayError: it has too few conversations, or answers leave no room in the window.
      ValueError: it is malformed.
    """
    keep_first = 0 if overflow is None else overflow.keep_first_tokens
    if window - keep_first <= config.max_answer_tokens:
        raise ReplayError(
            f"max_answer_tokens must be fewer than the window of {window} tokens without the {keep_first} first ones, "
            f"got {config.max_answer_tokens}"
        )
    bad_rows = BadRows(trace.skip_bad_rows)
    found = trace_sessions(
        model,
        trace,
        bad_rows,
        max_turns=config.max_turns,
        max_answer_tokens=config.max_answer_tokens,
        seed=config.seed,
    )
    taken = list(itertools.islice(found, config.num_sessions))
    if len(taken) < config.num_sessions:
        raise ReplayError(f"num_sessions must be at most the {len(taken)} of the trace, got {config.num_sessions}")
    fitted = [_fit(each.script, window, keep_first, may_overflow=overflow is not None) for each in taken]
    return Workload(
        sessions=tuple(_timed(taken, [each.script for each in fitted], config)),
        window=window,
        cut_turns=sum(each.cut_turns for each in fitted),
        cut_tokens=sum(each.cut_tokens for each in fitted),
        left_out_turns=sum(len(each.script) - len(fit.script) for each, fit in zip(taken, fitted, strict=True)),
        skipped_rows=bad_rows.num_skipped,
        first_skipped=bad_rows.first,
    )


@dataclasses.dataclass(frozen=True)
class _Fitted:
    script: Script
    cut_turns: int
    cut_tokens: int


def _fit(script: Script, window: int, keep_first: int, *, may_overflow: bool) -> _Fitted:
    """A conversation each of whose turns fits the window by itself; all together where nothing may leave it."""
    fitted: list[Exchange] = []
    cut_turns = cut_tokens = num_tokens = 0
    for turn in script:
        most = window - keep_first - turn.answer_tokens
        cut = Exchange(turn.message[:most], turn.answer_tokens)
        num_tokens += cut.num_tokens
        if num_tokens > window and not may_overflow:
            break
        cut_turns += cut != turn
        cut_tokens += turn.num_tokens - cut.num_tokens
        fitted.append(cut)
    return _Fitted(tuple(fitted), cut_turns, cut_tokens)


def _timed(sessions: Iterable[TraceSession], scripts: Iterable[Script], config: WorkloadConfig) -> list[ReplaySession]:
    rng = np.random.default_rng(config.seed)
    timed, now_s = [], 0.0
    for session, script in zip(sessions, scripts, strict=True):
        arrivals_s: tuple[float, ...] = session.arrivals_s
        if config.arrival_rate:
            now_s += rng.exponential(1 / config.arrival_rate)
            arrivals_s = (now_s,) * len(script)
        pauses_s = [0.0, *(_think_s(config, rng) for _ in script[1:])]
        turns = [
            ReplayTurn(exchange=exchange, not_before_s=arrival_s, think_s=pause_s)
            for exchange, arrival_s, pause_s in zip(script, arrivals_s or (0.0,) * len(script), pauses_s, strict=False)
        ]
        timed.append(ReplaySession(session_id=session.session_id, turns=tuple(turns)))
    return timed


def _think_s(config: WorkloadConfig, rng: np.random.Generator) -> float:
    mean_s = config.think_time_s
    if not mean_s or config.think_time_distribution == "constant":
        return mean_s
    if config.think_time_distribution == "exponential":
        return float(rng.exponential(mean_s))
    return float(rng.lognormal(math.log(mean_s) - 0.5))
