"""Sessions as many replicas serve them: how long each turn is, and what a copy of an earlier state is worth to it.

A plan is made once for each recorded session, however often that session comes. It holds numbers of tokens alone, so
that a million turns fit in memory; who holds which copy is `replicas`.

Not here: readers of traces (traces), serving (replicas).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ca_jax.errors import check
from ca_jax.overflow.config import OverflowConfig, num_leaving
from ca_jax.simulate.traces.requests import AGENT_BLOCK_TOKENS, Request


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTurn:
    """One turn."""

    new_tokens: int
    """Of the prompt, those that no earlier prompt of the session has; > 0."""
    history_tokens: int
    """The others."""
    answer_tokens: int
    think_s: float | None
    """Since the answer before it, as recorded; None where that is drawn."""
    found_tokens: tuple[int, ...]
    """For each earlier turn: how many tokens of this history its state of the session has; the last has all."""
    stored_tokens: int
    """Tokens of the session that are stored once this turn has ended."""
    made_tokens: int
    """Tokens that were ever stored of it by then, those that have left its context included."""
    shared_tokens: int = 0
    """First ones of its prompt that other sessions have, too."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return self.history_tokens + self.new_tokens


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SessionPlan:
    """One recorded session."""

    turns: tuple[PlannedTurn, ...]
    shared_key: str | None = None
    """Names the tokens that its prompts begin with and that other sessions have, too: definitions of tools."""
    shared_tokens: int = 0
    """How many these are. They are no part of what is stored of the session itself, but of its histories."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Coming:
    """A session that comes."""

    session_id: str
    arrival_s: float
    plan: SessionPlan
    think_s: tuple[float, ...]
    """Before each turn, since the answer before it."""


def plan_conversation(lengths: Sequence[tuple[int, int]], window: int, overflow: OverflowConfig) -> SessionPlan:
    """The plan of a conversation whose every turn goes on from all of the turn before it.

    Where the context is full its oldest tokens leave before a turn, as many as the engine lets go; what is stored of
    the others stays valid. An answer that does not fit behind its prompt is cut.

    Args:
      lengths: tokens of each turn, user and answer.
      window: most tokens of a context.
      overflow: how many tokens leave at once.
    """
    turns: list[PlannedTurn] = []
    ends: list[int] = []  # All tokens that the session had after each turn, dropped ones included.
    num_dropped = num_made = 0
    for user, answer in lengths:
        new = min(user, window - overflow.keep_first_tokens - 1)
        leaving = num_leaving(overflow, window=window, num_tokens=num_made - num_dropped, num_wanted=new + 1)
        num_dropped = min(num_made, num_dropped + leaving)
        history, num_answered = num_made - num_dropped, min(answer, window - (num_made - num_dropped) - new)
        num_made += new + num_answered
        turns.append(
            PlannedTurn(
                new_tokens=new,
                history_tokens=history,
                answer_tokens=num_answered,
                think_s=None,
                found_tokens=tuple(max(0, end - num_dropped) for end in ends),
                stored_tokens=num_made - num_dropped,
                made_tokens=num_made,
            )
        )
        ends.append(num_made)
    return SessionPlan(turns=tuple(turns))


def plan_requests(requests: Iterable[Request]) -> list[SessionPlan]:
    """The plans of agents' sessions: a history is what of a prompt any earlier prompt of the session begins with.

    Answers are computed and not stored: hashes of prompts do not say which tokens of the next one they are.

    Args:
      requests: with the ids of `load_agent_sessions`, those of a session in order.
    """
    of_session: dict[str, list[Request]] = collections.defaultdict(list)
    for request in requests:
        of_session[request.session_id].append(request)
    return [_planned(each) for each in of_session.values()]


def _planned(requests: Sequence[Request]) -> SessionPlan:
    tools = collections.Counter(request.tool_tokens for request in requests).most_common(1)[0][0]
    first = next(request for request in requests if request.tool_tokens == tools)
    shared_ids = frozenset(first.hash_ids[: tools // AGENT_BLOCK_TOKENS])
    seen_in: dict[int, int] = {}  # By id: the turn whose prompt had it first.
    turns: list[PlannedTurn] = []
    for turn, request in enumerate(requests):
        num_found = [0] * (turn + 1)  # For each earlier turn: how many leading blocks prompts up to it have.
        latest = 0
        for block in request.hash_ids:
            if (seen := seen_in.get(block)) is None:
                break
            latest = max(latest, seen)
            num_found[latest] += 1
        most = request.input_tokens - 1  # One token at least gives the first of the answer.
        found = tuple(min(AGENT_BLOCK_TOKENS * each, most) for each in itertools.accumulate(num_found[:turn]))
        for block in request.hash_ids:
            seen_in.setdefault(block, turn)
        history = found[-1] if found else 0
        stored = AGENT_BLOCK_TOKENS * (len(seen_in) - len(shared_ids & seen_in.keys()))
        turns.append(
            PlannedTurn(
                new_tokens=request.input_tokens - history,
                history_tokens=history,
                answer_tokens=request.output_tokens,
                think_s=request.think_s,
                found_tokens=found,
                stored_tokens=stored,
                made_tokens=stored,
                shared_tokens=AGENT_BLOCK_TOKENS * sum(each in shared_ids for each in request.hash_ids),
            )
        )
    shared = AGENT_BLOCK_TOKENS * len(shared_ids)
    return SessionPlan(turns=tuple(turns), shared_key=f"tools-{tools}" if shared else None, shared_tokens=shared)


def coming_sessions(
    plans: Sequence[SessionPlan], *, arrival_rate: float, think_s: float, seed: int
) -> Iterator[Coming]:
    """Draws sessions without end: all plans in random order, then all again, each time under another name.

    Args:
      plans: of recorded sessions.
      arrival_rate: sessions a second, Poisson.
      think_s: mean time before a further turn, exponential, where none is recorded; 0 for none.
      seed: of what is drawn.

    Raises:
      ValueError: no plan, or a rate or time outside its range.
    """
    check(len(plans) > 0, "plans", "at least one session", len(plans))
    check(arrival_rate > 0, "arrival_rate", "above 0", arrival_rate)
    check(think_s >= 0, "think_s", "at least 0", think_s)
    rng = np.random.default_rng(seed)
    now_s = 0.0
    for index in itertools.count():
        if index % len(plans) == 0:
            order = rng.permutation(len(plans))
        plan = plans[order[index % len(plans)]]
        now_s += rng.exponential(1 / arrival_rate)
        drawn = rng.exponential(think_s, len(plan.turns)).tolist() if think_s else [0.0] * len(plan.turns)
        thinks = [one if turn.think_s is None else turn.think_s for one, turn in zip(drawn, plan.turns, strict=True)]
        yield Coming(session_id=f"s{index}", arrival_s=now_s, plan=plan, think_s=(0.0, *thinks[1:]))
