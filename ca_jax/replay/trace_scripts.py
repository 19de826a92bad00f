"""Traces as conversations to be served: the tokens of every message, and how long every answer is.

Text becomes tokens as the model's tokenizer and chat template make them. Where a trace has none, tokens are made up: of
the same hash the same, of mere lengths random ones.

Not here: reading files (`ca_jax.traces`), when turns come (workload).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ca_jax.errors import CaJaxError
from ca_jax.models.tokenizer import Tokenizer
from ca_jax.pretrained import LoadedModel
from ca_jax.replay.scripts import LEAST_ANSWER_TOKENS, Exchange, Script, recorded_script
from ca_jax.traces.agents import AgentCall, agent_files, load_agent_calls
from ca_jax.traces.arrivals import load_arrivals
from ca_jax.traces.formats import TRACE_FORMATS
from ca_jax.traces.mooncake import load_mooncake
from ca_jax.traces.requests import HASH_BLOCK_TOKENS, Request
from ca_jax.traces.rows import BadRows
from ca_jax.traces.sharegpt import Turn, load_sharegpt

_HASHED, _RANDOM = 1, 2  # Seeds of made-up tokens begin with these, so that they differ.
_SPEAKER = re.compile(r"\s*(?:\w+: ?)?")  # What stands between a prompt and the answer to it, in the next prompt.


class ReplayError(CaJaxError, ValueError):
    """What was to be replayed is not there, or does not fit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """Which trace, and how it is read.

    Raises:
      ValueError: an unknown format, no file where one is needed, or a scale that is not positive.
    """

    trace_format: str = "sharegpt"
    """One of `TRACE_FORMATS`."""
    trace: str | None = None
    """The file, of agents also a directory of such; None for the installed ShareGPT."""
    skip_bad_rows: bool = False
    """Whether rows that cannot be used are left out and counted; if not, the first one is an error."""
    length_scale: float = 1.0
    """What lengths are multiplied by where a trace has no text."""

    def __post_init__(self) -> None:
        if self.trace_format not in TRACE_FORMATS:
            raise ValueError(f"trace_format must be one of {', '.join(TRACE_FORMATS)}, got {self.trace_format!r}")
        if self.trace is None and self.trace_format != "sharegpt":
            raise ValueError(f"trace must be a file of the format {self.trace_format}, got none")
        if not 0 < self.length_scale < float("inf"):
            raise ValueError(f"length_scale must be a number above 0, got {self.length_scale}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceSession:
    """One conversation of a trace."""

    session_id: str
    """Its name there."""
    script: Script
    """Its turns; never empty."""
    arrivals_s: tuple[float, ...] = ()
    """When each turn came, since the first of the trace; empty where it does not say."""


def trace_sessions(
    model: LoadedModel, config: TraceConfig, bad_rows: BadRows, *, max_turns: int, max_answer_tokens: int, seed: int
) -> Iterator[TraceSession]:
    """Yields the conversations of a trace, in order of their beginning where it says when that was.

    Args:
      model: whose tokens.
      config: which trace.
      bad_rows: what is done about rows that cannot be used.
      max_turns: most turns of a conversation; later ones are left out.
      max_answer_tokens: most tokens generated of an answer.
      seed: of random tokens.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is malformed (`TraceError` where rows have lines), or the model has no tokenizer for its text.
    """
    if config.trace_format == "sharegpt":
        tokenizer = _tokenizer(model)
        for conversation in load_sharegpt(None if config.trace is None else Path(config.trace).expanduser()):
            texts = spoken_texts(conversation.turns)[:max_turns]
            if texts:
                script = recorded_script(model, tokenizer, texts, max_answer_tokens)
                yield TraceSession(session_id=conversation.id, script=script)
        return
    if config.trace is None:
        raise ValueError(f"trace must be a file of the format {config.trace_format}, got none")
    path = Path(config.trace).expanduser()
    if config.trace_format == "agents":
        calls = list(load_agent_calls(agent_files(path), bad_rows))
        yield from _agent_sessions(_tokenizer(model), calls, max_turns, max_answer_tokens)
        return
    load = load_mooncake if config.trace_format == "mooncake" else load_arrivals
    requests: dict[str, list[Request]] = collections.defaultdict(list)
    for request in load(path, bad_rows):
        requests[request.session_id].append(request)
    tokens = _MadeTokens(model.config.vocab_size, config.length_scale, seed)
    for session_id, turns in requests.items():
        yield TraceSession(
            session_id=session_id,
            script=tokens.script(turns[:max_turns], max_answer_tokens),
            arrivals_s=tuple(request.arrival_s for request in turns[:max_turns]),
        )


def spoken_texts(turns: Sequence[Turn]) -> list[tuple[str, str]]:
    """What the user said and what was answered, of each turn that was answered."""
    return [
        (said.text, answered.text)
        for said, answered in itertools.pairwise(turns)
        if (said.role, answered.role) == ("user", "assistant")
    ]


# Agents.


@dataclasses.dataclass
class _AgentSession:
    session_id: str
    calls: list[AgentCall]
    messages: list[str]


def agent_conversations(calls: Iterable[AgentCall]) -> Iterator[tuple[str, list[AgentCall], list[str]]]:
    """Finds what of an agent's calls goes on from what, each prompt being told whole.

    A prompt that begins with the last one of a session of its task, and the answer to that, goes on from it, and only
    what follows is new; where several would do, from the longest. Any other begins a session of its own, as does a
    prompt that was answered before. Calls without a prompt or an answer are left out.

    Args:
      calls: of any number of tasks.

    Yields:
      For each session its name, its calls, and the new text of each.
    """
    found: list[_AgentSession] = []
    of_task: dict[str, list[_AgentSession]] = collections.defaultdict(list)
    for call in sorted((each for each in calls if each.prompt and each.answer), key=lambda each: each.arrival_s):
        sessions = of_task[call.session_id]
        longest_first = sorted(sessions, key=lambda each: len(each.calls[-1].prompt), reverse=True)
        for session in longest_first:
            message = _continuation(session.calls[-1], call)
            if message is not None:
                break
        else:
            session, message = _AgentSession(f"{call.session_id}/{len(sessions)}", [], []), call.prompt
            sessions.append(session)
            found.append(session)
        session.calls.append(call)
        session.messages.append(message)
    yield from ((each.session_id, each.calls, each.messages) for each in found)


def _continuation(last: AgentCall, call: AgentCall) -> str | None:
    """What a prompt has behind the last one and the answer to that; None where it does not begin with these."""
    if not call.prompt.startswith(last.prompt):
        return None
    rest = call.prompt[len(last.prompt) :]
    if not rest.startswith(last.answer):
        speaker = _SPEAKER.match(rest)
        rest = rest[speaker.end() :] if speaker else rest
    return rest[len(last.answer) :] or None if rest.startswith(last.answer) else None


def _agent_sessions(
    tokenizer: Tokenizer, calls: Sequence[AgentCall], max_turns: int, max_answer_tokens: int
) -> Iterator[TraceSession]:
    first_s = min((call.arrival_s for call in calls), default=0.0)
    for session_id, turns, messages in agent_conversations(calls):
        script: list[Exchange] = []
        rest: tuple[int, ...] = ()
        for call, message in zip(turns[:max_turns], messages, strict=False):
            new_ids = tokenizer.encode(message, add_bos=None if not script else False)
            answer_ids = tokenizer.encode(call.answer, add_bos=False)
            num_generated = max(min(len(answer_ids), max_answer_tokens), LEAST_ANSWER_TOKENS)
            script.append(Exchange((*rest, *new_ids), num_generated))
            rest = tuple(answer_ids[num_generated:])
        yield TraceSession(
            session_id=session_id,
            script=tuple(script),
            arrivals_s=tuple(call.arrival_s - first_s for call in turns[:max_turns]),
        )


# Lengths and hashes.


class _MadeTokens:
    """Prompts of tokens that are made up: a hash stands for the same ones wherever it is met.

    Args:
      vocab_size: V.
      scale: what lengths are multiplied by.
      seed: of the tokens of prompts without hashes.
    """

    def __init__(self, vocab_size: int, scale: float, seed: int) -> None:
        self._vocab_size = vocab_size
        self._scale = scale
        self._rng = np.random.default_rng((_RANDOM, seed))
        self._block_of = functools.lru_cache(maxsize=4096)(self._block)

    def script(self, requests: Sequence[Request], max_answer_tokens: int) -> Script:
        """The turns of a session, each with what of its prompt the context does not have by then."""
        script: list[Exchange] = []
        num_held = 0
        for request in requests:
            ids = self._prompt(request)
            message = ids[num_held:] or ids[-1:]
            answer_tokens = max(min(self._scaled(request.output_tokens), max_answer_tokens), LEAST_ANSWER_TOKENS)
            script.append(Exchange(tuple(message), answer_tokens))
            num_held += len(message) + answer_tokens
        return tuple(script)

    def _prompt(self, request: Request) -> list[int]:
        num_tokens = self._scaled(request.input_tokens)
        if not request.hash_ids:
            return self._random(self._rng, num_tokens)
        blocks = [self._block_of(each) for each in request.hash_ids]
        return list(itertools.chain.from_iterable(blocks))[:num_tokens]

    def _block(self, hash_id: int) -> list[int]:
        return self._random(np.random.default_rng((_HASHED, hash_id)), self._scaled(HASH_BLOCK_TOKENS))

    def _random(self, rng: np.random.Generator, num_tokens: int) -> list[int]:
        ids: list[int] = rng.integers(self._vocab_size, size=num_tokens).tolist()
        return ids

    def _scaled(self, num_tokens: int) -> int:
        return max(1, round(num_tokens * self._scale))


def _tokenizer(model: LoadedModel) -> Tokenizer:
    if model.tokenizer is None:
        raise ReplayError(f"a trace with text must come with a model with a tokenizer, got {model.name}")
    return model.tokenizer
