"""What is asked of a simulated server: sessions, their turns, and when they come.

Not here: readers of traces (`ca_jax.traces`), serving.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ca_jax.traces.requests import Request
from ca_jax.traces.sharegpt import Conversation


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SimTurn:
    """One turn of a session."""

    user_tokens: int
    """New tokens before the answer, > 0."""
    answer_tokens: int
    """Of the answer, > 0."""
    think_s: float = 0.0
    """Since the answer before it ended, or since the session came."""
    arrival_s: float | None = None
    """When it comes, whatever became of the turn before it: recorded. None: `think_s` says."""
    kept_tokens: int | None = None
    """How many tokens of the context it goes on from; None for all. Those behind it are forgotten."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SimSession:
    """One conversation."""

    session_id: str
    """Its name."""
    arrival_s: float
    """When it comes."""
    turns: tuple[SimTurn, ...]
    """In order."""


def conversation_lengths(
    conversations: Iterable[Conversation], count_tokens: Callable[[str], int], *, max_turns: int | None = None
) -> list[tuple[tuple[int, int], ...]]:
    """How long the turns of recorded conversations are; those without an answer are left out.

    Args:
      conversations: as read.
      count_tokens: of a text; less than one counts as one.
      max_turns: most turns of a conversation; later ones are left out.

    Returns:
      For each conversation with a turn, its turns' tokens: user, answer.
    """
    lengths = []
    for conversation in conversations:
        said = itertools.dropwhile(lambda turn: turn.role != "user", conversation.turns)
        spoken = [(turn.role, max(1, count_tokens(turn.text))) for turn in said if turn.role != "system"]
        turns = tuple(
            (asked, told)
            for (role, asked), (next_role, told) in itertools.pairwise(spoken)
            if role == "user" and next_role == "assistant"
        )
        if turns:
            lengths.append(turns[:max_turns])
    return lengths


def poisson_sessions(
    lengths: Sequence[Sequence[tuple[int, int]]],
    *,
    num_sessions: int,
    arrival_rate: float,
    think_s: float = 0.0,
    waits_for_answers: bool = True,
    seed: int = 0,
) -> Iterator[SimSession]:
    """Sessions that come at random, each a recorded conversation: all of these in random order, then all again.

    Args:
      lengths: for each conversation its turns' tokens, (user, answer).
      num_sessions: how many.
      arrival_rate: sessions a second, Poisson.
      think_s: mean time between an answer and the next turn, exponential; 0 for none.
      waits_for_answers: whether a turn comes after the answer before it. If not, that time is between when turns come,
        as in a log of requests that is replayed.
      seed: of what is drawn.

    Raises:
      ValueError: no conversation, or a rate or time that cannot be.
    """
    if not lengths:
        raise ValueError("there must be at least one conversation, got none")
    if not arrival_rate > 0 or not think_s >= 0:
        raise ValueError(f"arrival_rate must be above 0 and think_s at least 0, got {arrival_rate} and {think_s}")
    rng = np.random.default_rng(seed)
    return _poisson_sessions(lengths, num_sessions, arrival_rate, think_s, waits_for_answers, rng)


def _poisson_sessions(
    lengths: Sequence[Sequence[tuple[int, int]]],
    num_sessions: int,
    arrival_rate: float,
    think_s: float,
    waits_for_answers: bool,
    rng: np.random.Generator,
) -> Iterator[SimSession]:
    order = itertools.chain.from_iterable(rng.permutation(len(lengths)) for _ in itertools.count())
    now_s = 0.0
    for index, which in enumerate(itertools.islice(order, num_sessions)):
        now_s += rng.exponential(1 / arrival_rate)
        turns = lengths[which]
        pauses = rng.exponential(think_s, len(turns)) if think_s else np.zeros(len(turns))
        pauses[:1] = 0.0
        comes_s = now_s + np.cumsum(pauses)
        yield SimSession(
            session_id=f"s{index}",
            arrival_s=now_s,
            turns=tuple(
                SimTurn(
                    user_tokens=user,
                    answer_tokens=answer,
                    think_s=pause if waits_for_answers else 0.0,
                    arrival_s=None if waits_for_answers else come_s,
                )
                for (user, answer), pause, come_s in zip(turns, pauses.tolist(), comes_s.tolist(), strict=True)
            ),
        )


def trace_sessions(requests: Iterable[Request]) -> list[SimSession]:
    """Sessions of a recorded trace, each of its requests a turn that comes when it came.

    Args:
      requests: in order of arrival.

    Returns:
      In order of arrival.

    Raises:
      ValueError: a request came before the one before it.
    """
    of_session: dict[str, list[SimTurn]] = collections.defaultdict(list)
    last_s = 0.0
    for request in requests:
        if request.arrival_s < last_s:
            raise ValueError(
                f"there must be requests in order of arrival, got one of {request.arrival_s} after {last_s} s"
            )
        last_s = request.arrival_s
        kept = min(request.shared_tokens, request.input_tokens - 1)  # One token at least gives the first of the answer.
        turn = SimTurn(
            user_tokens=request.input_tokens - kept,
            answer_tokens=request.output_tokens,
            arrival_s=request.arrival_s,
            kept_tokens=kept,
        )
        of_session[request.session_id].append(turn)
    return [
        SimSession(session_id=name, arrival_s=turns[0].arrival_s or 0.0, turns=tuple(turns))
        for name, turns in of_session.items()
    ]


def stored_tokens(session: SimSession) -> int:
    """The most tokens of a session that there are to keep at once, without a limit of its context."""
    most = num_tokens = 0
    for turn in session.turns:
        kept = num_tokens if turn.kept_tokens is None else min(turn.kept_tokens, num_tokens)
        num_tokens = kept + turn.user_tokens + turn.answer_tokens
        most = max(most, num_tokens)
    return most


def num_turns(sessions: Iterable[SimSession]) -> int:
    """Of all sessions."""
    return sum(len(session.turns) for session in sessions)
