"""What is asked of the engine and when: conversations of a trace as tokens, cut to fit the window, and their times.

A recorded conversation is served with its recorded lengths. Where answers are capped, what lies behind the cap is not
generated: it comes with the next message, so that histories still grow as they did.

    recorded   user 1        answer 1               user 2        answer 2
    served     [message 1]   <generated, capped>    [the rest of answer 1, message 2]   <generated, capped>

Text becomes tokens as the model's tokenizer and chat template make them. Where a trace has none, tokens are made up:
equal ones for equal hashes, random ones where only lengths are known.

Not here: reading files (`ca_jax.simulate.traces`), asking (serving).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from benchmarks.harness import Checked, require
from ca_jax.errors import CaJaxError, check
from ca_jax.models.tokenizer import Tokenizer
from ca_jax.overflow.config import OverflowConfig
from ca_jax.pretrained import LoadedModel
from ca_jax.serving.prompts import turn_ids
from ca_jax.simulate.traces.requests import (
    HASH_BLOCK_TOKENS,
    AgentCall,
    BadRows,
    Request,
    TraceConfig,
    load_agent_calls,
    load_requests,
)
from ca_jax.simulate.traces.sharegpt import load_sharegpt

LEAST_ANSWER_TOKENS = 2
"""Of every answer, so that there is a time between its tokens."""
THINK_TIMES = ("exponential", "constant", "lognormal")
"""How think times are distributed about their mean. Lognormal: with a standard deviation of 1 in the logarithm."""
_HASHED, _RANDOM = 1, 2  # Seeds of made-up tokens begin with these, so that they differ.
_SPEAKER = re.compile(r"\s*(?:\w+: ?)?")  # What stands between a prompt and the answer to it, in the next prompt.


class ReplayError(CaJaxError, ValueError):
    """What was to be replayed is not there, or does not fit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayedTrace(TraceConfig):
    """Which trace is replayed, and how it is read."""

    length_scale: float = 1.0
    """What lengths are multiplied by where a trace has no text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0 < self.length_scale < math.inf, "length_scale", "a number above 0", self.length_scale)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One turn to be served."""

    message: tuple[int, ...]
    """Tokens sent, behind what the conversation has."""
    answer_tokens: int
    not_before_s: float = 0.0
    """When it comes at the earliest, since the replay began."""
    think_s: float = 0.0
    """Least time since the answer before it ended; 0 of a first turn."""

    @property
    def num_tokens(self) -> int:
        """Tokens of both."""
        return len(self.message) + self.answer_tokens


Script = tuple[Exchange, ...]
"""A conversation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkloadConfig(Checked):
    """How much of a trace is replayed, and how fast."""

    may_be_zero: ClassVar = frozenset({"arrival_rate", "think_time_s", "warmup_turns", "seed"})
    choices: ClassVar = {"think_time_distribution": THINK_TIMES}

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
        super().__post_init__()
        require(self.max_answer_tokens >= 2, "max_answer_tokens", "at least 2", self.max_answer_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplaySession:
    """One conversation."""

    session_id: str
    turns: Script
    """In order; never empty."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all that is said in it."""
        return num_tokens(self.turns)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What is replayed, and what of the trace is not."""

    sessions: tuple[ReplaySession, ...]
    window: int
    cut_turns: int
    """Turns whose message was cut to its first tokens to fit the window."""
    cut_tokens: int
    left_out_turns: int
    """Turns left out since the window was full and nothing may leave it (`EngineConfig.overflow` None)."""
    skipped_rows: int
    """Rows of the trace that could not be used."""
    first_skipped: str | None
    """What was wrong with the first of them."""

    @property
    def num_turns(self) -> int:
        """Turns of all conversations."""
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
    model: LoadedModel, trace: ReplayedTrace, config: WorkloadConfig, *, window: int, overflow: OverflowConfig | None
) -> Workload:
    """Reads a trace and makes of it what is served, in windows of so many tokens. The same arguments give the same.

    Raises:
      ReplayError: it has too few conversations, or answers leave no room in the window; or it has text, and the model
        no tokenizer.
      ValueError: it is malformed (`TraceError` where rows have lines).
    """
    keep_first = 0 if overflow is None else overflow.keep_first_tokens
    if window - keep_first <= config.max_answer_tokens:
        raise ReplayError(
            f"max_answer_tokens must be fewer than the window of {window} tokens without the {keep_first} first ones, "
            f"got {config.max_answer_tokens}"
        )
    bad_rows = BadRows(trace.skip_bad_rows)
    taken = list(itertools.islice(_recorded(model, trace, config, bad_rows), config.num_sessions))
    if len(taken) < config.num_sessions:
        raise ReplayError(f"num_sessions must be at most the {len(taken)} of the trace, got {config.num_sessions}")
    rng = np.random.default_rng(config.seed)
    sessions, cut_turns, cut_tokens, left_out_turns, now_s = [], 0, 0, 0, 0.0
    for session_id, script, arrivals_s in taken:
        fitted = _fit(script, window, keep_first, may_overflow=overflow is not None)
        kept = script[: len(fitted)]
        cut_turns += sum(turn != whole for turn, whole in zip(fitted, kept, strict=True))
        cut_tokens += num_tokens(kept) - num_tokens(fitted)
        left_out_turns += len(script) - len(fitted)
        if config.arrival_rate:
            now_s += rng.exponential(1 / config.arrival_rate)
            arrivals_s = (now_s,) * len(fitted)
        pauses_s = [0.0, *(_think_s(config, rng) for _ in fitted[1:])]
        turns = tuple(
            dataclasses.replace(turn, not_before_s=arrival_s, think_s=pause_s)
            for turn, arrival_s, pause_s in zip(fitted, arrivals_s, pauses_s, strict=False)
        )
        sessions.append(ReplaySession(session_id=session_id, turns=turns))
    return Workload(
        sessions=tuple(sessions),
        window=window,
        cut_turns=cut_turns,
        cut_tokens=cut_tokens,
        left_out_turns=left_out_turns,
        skipped_rows=bad_rows.num_skipped,
        first_skipped=bad_rows.first,
    )


def recorded_script(model: LoadedModel, texts: Sequence[tuple[str, str]], most_answer_tokens: int) -> Script:
    """Makes a script of a recorded conversation, what was said and answered in each turn, in the model's template.

    Of an answer the first `most_answer_tokens` are generated.
    """
    tokenizer, turns = _tokenizer(model), []
    answer_ids: list[int] = []  # Of the turn before: stands for the conversation so far, which is not tokenised again.
    messages: list[dict[str, str]] = []
    for said, answered in texts:
        new_ids = turn_ids(model, answer_ids, messages, said)[len(answer_ids) :]
        answer_ids = tokenizer.encode(answered, add_bos=False)
        turns.append((new_ids, answer_ids))
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answered}]
    return _capped(turns, most_answer_tokens)


def _capped(turns: Iterable[Sequence[Sequence[int]]], most_answer_tokens: int) -> Script:
    """A script of messages and answers, of which so many tokens are generated and the rest comes with the next one."""
    script: list[Exchange] = []
    rest: tuple[int, ...] = ()
    for new_ids, answer_ids in turns:
        num_generated = max(min(len(answer_ids), most_answer_tokens), LEAST_ANSWER_TOKENS)
        script.append(Exchange((*rest, *new_ids), num_generated))
        rest = tuple(answer_ids[num_generated:])
    return tuple(script)


_Recorded = tuple[str, Script, tuple[float, ...]]  # Name, turns, and when each came, since the first of the trace.


def _recorded(
    model: LoadedModel, trace: ReplayedTrace, config: WorkloadConfig, bad_rows: BadRows
) -> Iterator[_Recorded]:
    """The conversations of a trace, in order of their beginning where it says when that was."""
    wanted = "one that replays; agent_sessions is for simulate alone"
    check(trace.trace_format != "agent_sessions", "trace_format", wanted, trace.trace_format)
    path = None if trace.trace is None else Path(trace.trace).expanduser()
    most_turns, most_answer_tokens = config.max_turns, config.max_answer_tokens
    if path is None or trace.trace_format == "sharegpt":
        for conversation in load_sharegpt(path):
            if texts := conversation.exchanges[:most_turns]:
                script = recorded_script(model, texts, most_answer_tokens)
                yield conversation.id, script, (0.0,) * len(script)
    elif trace.trace_format == "agents":
        encode = functools.partial(_tokenizer(model).encode, add_bos=False)
        calls = list(load_agent_calls(path, bad_rows))
        first_s = min((call.arrival_s for call in calls), default=0.0)
        for name, turns in _agent_conversations(calls).items():
            ids = [[encode(message), encode(call.answer)] for call, message in turns[:most_turns]]
            ids[0][0] = _tokenizer(model).encode(turns[0][1])
            yield name, _capped(ids, most_answer_tokens), tuple(call.arrival_s - first_s for call, _ in turns)
    else:
        requests: dict[str, list[Request]] = collections.defaultdict(list)
        for request in load_requests(trace.trace_format, path, len, bad_rows):
            requests[request.session_id].append(request)
        tokens = _MadeTokens(model.config.vocab_size, trace.length_scale, config.seed)
        for name, asked in requests.items():
            script = tokens.script(asked[:most_turns], most_answer_tokens)
            yield name, script, tuple(request.arrival_s for request in asked)


def _tokenizer(model: LoadedModel) -> Tokenizer:
    if model.tokenizer is None:
        raise ReplayError(f"a trace with text must come with a model with a tokenizer, got {model.name}")
    return model.tokenizer


_AgentTurns = list[tuple[AgentCall, str]]  # Calls, and the new text of each.


def _agent_conversations(calls: Iterable[AgentCall]) -> dict[str, _AgentTurns]:
    """Finds which of an agent's calls continues which, each prompt being told whole; sessions by name.

    A prompt that begins with the last one of a session of its task, and the answer to that, continues it, and only
    what follows is new; where several would do, the longest. Any other begins a session of its own, as does a
    prompt that was answered before. Calls without a prompt or an answer are left out.
    """
    found: dict[str, _AgentTurns] = {}
    of_task: dict[str, list[_AgentTurns]] = collections.defaultdict(list)
    for call in sorted((each for each in calls if each.prompt and each.answer), key=lambda each: each.arrival_s):
        sessions = of_task[call.session_id]
        for session in sorted(sessions, key=lambda turns: len(turns[-1][0].prompt), reverse=True):
            if (message := _continuation(session[-1][0], call)) is not None:
                session.append((call, message))
                break
        else:
            found[f"{call.session_id}/{len(sessions)}"] = session = [(call, call.prompt)]
            sessions.append(session)
    return found


def _continuation(last: AgentCall, call: AgentCall) -> str | None:
    """What a prompt has behind the last one and the answer to that; None where it does not begin with these."""
    if not call.prompt.startswith(last.prompt):
        return None
    rest = call.prompt[len(last.prompt) :]
    if not rest.startswith(last.answer):
        speaker = _SPEAKER.match(rest)
        rest = rest[speaker.end() :] if speaker else rest
    return rest[len(last.answer) :] or None if rest.startswith(last.answer) else None


class _MadeTokens:
    """Prompts of tokens that are made up: a hash stands for the same ones wherever it is met; others are random."""

    def __init__(self, vocab_size: int, scale: float, seed: int) -> None:
        self._vocab_size = vocab_size
        self._scale = scale
        self._rng = np.random.default_rng((_RANDOM, seed))
        self._block = functools.lru_cache(maxsize=4096)(self._make_block)

    def script(self, requests: Sequence[Request], max_answer_tokens: int) -> Script:
        """The turns of a session, each with what of its prompt the context does not have by then."""
        script: list[Exchange] = []
        num_held = 0
        for request in requests:
            num_tokens = self._scaled(request.input_tokens)
            if request.hash_ids:
                ids = list(itertools.chain.from_iterable(map(self._block, request.hash_ids)))[:num_tokens]
            else:
                ids = self._random(self._rng, num_tokens)
            message = ids[num_held:] or ids[-1:]
            answer_tokens = max(min(self._scaled(request.output_tokens), max_answer_tokens), LEAST_ANSWER_TOKENS)
            script.append(Exchange(tuple(message), answer_tokens))
            num_held += len(message) + answer_tokens
        return tuple(script)

    def _make_block(self, hash_id: int) -> list[int]:
        return self._random(np.random.default_rng((_HASHED, hash_id)), self._scaled(HASH_BLOCK_TOKENS))

    def _random(self, rng: np.random.Generator, num_tokens: int) -> list[int]:
        ids: list[int] = rng.integers(self._vocab_size, size=num_tokens).tolist()
        return ids

    def _scaled(self, num_tokens: int) -> int:
        return max(1, round(num_tokens * self._scale))


def _fit(script: Script, window: int, keep_first: int, *, may_overflow: bool) -> Script:
    """A conversation each of whose turns fits the window by itself; all together where nothing may leave it."""
    fitted = [Exchange(turn.message[: window - keep_first - turn.answer_tokens], turn.answer_tokens) for turn in script]
    totals = itertools.accumulate(turn.num_tokens for turn in fitted)
    return tuple(turn for turn, total in zip(fitted, totals, strict=True) if may_overflow or total <= window)


def num_tokens(script: Iterable[Exchange]) -> int:
    """Of all its messages and answers."""
    return sum(turn.num_tokens for turn in script)


def _think_s(config: WorkloadConfig, rng: np.random.Generator) -> float:
    mean_s = config.think_time_s
    if not mean_s or config.think_time_distribution == "constant":
        return mean_s
    if config.think_time_distribution == "exponential":
        return float(rng.exponential(mean_s))
    return float(rng.lognormal(math.log(mean_s) - 0.5))
