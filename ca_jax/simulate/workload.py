"""What is asked of simulated servers: sessions, their turns, when they come, and the turn that a session is at.

A plan (`SessionPlan`) says of a session that many replicas may serve how long each turn is, and what a copy of an
earlier state is worth to it. It is made once for each recorded session, however often that session comes, and holds
numbers of tokens alone, so that a million turns fit in memory.

Not here: readers of traces (traces), serving (server), who holds which copy (replicas).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ca_jax.errors import check
from ca_jax.overflow.config import OverflowConfig, num_leaving
from ca_jax.simulate.traces.requests import AGENT_BLOCK_TOKENS, Request
from ca_jax.simulate.traces.sharegpt import Conversation
from ca_jax.storage.tickets import SaveTicket


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SimTurn:
    """One turn of a session."""

    user_tokens: int
    """New tokens before the answer, > 0."""
    answer_tokens: int
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
    arrival_s: float
    turns: tuple[SimTurn, ...]


Lengths = Sequence[Sequence[tuple[int, int]]]
"""For each conversation its turns' tokens: user, answer."""


def conversation_lengths(
    conversations: Iterable[Conversation], count_tokens: Callable[[str], int], *, max_turns: int | None = None
) -> Lengths:
    """Returns how long the turns of recorded conversations are, without turns and conversations that lack an answer.

    Args:
      conversations: as read.
      count_tokens: counts the tokens of a text; less than one counts as one.
      max_turns: most turns of a conversation; later ones are left out.
    """
    counted = (
        tuple((max(1, count_tokens(said)), max(1, count_tokens(told))) for said, told in each.exchanges[:max_turns])
        for each in conversations
    )
    return [turns for turns in counted if turns]


def poisson_sessions(
    lengths: Lengths,
    *,
    num_sessions: int,
    arrival_rate: float,
    think_s: float = 0.0,
    waits_for_answers: bool = True,
    seed: int = 0,
) -> Iterator[SimSession]:
    """Draws sessions that come at random, each a recorded conversation: all in random order, then all again.

    Args:
      lengths: of the conversations.
      num_sessions: how many.
      arrival_rate: sessions a second, Poisson.
      think_s: mean time between an answer and the next turn, exponential; 0 for none.
      waits_for_answers: whether a turn comes after the answer before it. If not, that time is between when turns come,
        as in a log of requests that is replayed.
      seed: of what is drawn.

    Raises:
      ValueError: no conversation, or a rate or time outside its range.
    """
    check(len(lengths) > 0, "conversations", "at least one", len(lengths))
    check(think_s >= 0, "think_s", "at least 0", think_s)
    rng = np.random.default_rng(seed)
    for index, which, arrival_s in _coming(len(lengths), num_sessions, arrival_rate, rng):
        turns = lengths[which]
        pauses = rng.exponential(think_s, len(turns)) if think_s else np.zeros(len(turns))
        pauses[:1] = 0.0
        name, times = ("think_s", pauses) if waits_for_answers else ("arrival_s", arrival_s + np.cumsum(pauses))
        sim_turns = (
            SimTurn(user_tokens=user, answer_tokens=answer, **{name: time_s})
            for (user, answer), time_s in zip(turns, times.tolist(), strict=True)
        )
        yield SimSession(session_id=f"s{index}", arrival_s=arrival_s, turns=tuple(sim_turns))


def recorded_sessions(
    requests: Iterable[Request],
    *,
    num_sessions: int | None = None,
    arrival_rate: float,
    waits_for_answers: bool = True,
    seed: int = 0,
) -> Iterator[SimSession]:
    """Draws recorded sessions that come at random, all in random order, then all again.

    Args:
      requests: those of a session in order.
      num_sessions: how many; None: each recorded one once.
      arrival_rate: sessions a second, Poisson.
      waits_for_answers: whether a request comes as long after the answer before it as recorded (`think_s`), however
        long answers take here. If not, as long after the session's first request.
      seed: of what is drawn.

    Raises:
      ValueError: no request, or a rate outside its range.
    """
    recorded = _by_session(requests)
    check(len(recorded) > 0, "requests", "at least one", len(recorded))
    rng = np.random.default_rng(seed)
    for index, which, arrival_s in _coming(len(recorded), num_sessions or len(recorded), arrival_rate, rng):
        first_s = recorded[which][0].arrival_s
        turns = (
            _turn_of(each, think_s=each.think_s)
            if waits_for_answers
            else _turn_of(each, arrival_s=arrival_s + each.arrival_s - first_s)
            for each in recorded[which]
        )
        yield SimSession(session_id=f"s{index}", arrival_s=arrival_s, turns=tuple(turns))


def _by_session(requests: Iterable[Request]) -> list[list[Request]]:
    of_session: dict[str, list[Request]] = collections.defaultdict(list)
    for request in requests:
        of_session[request.session_id].append(request)
    return list(of_session.values())


def _coming(
    num_recorded: int, num_sessions: int | None, arrival_rate: float, rng: np.random.Generator
) -> Iterator[tuple[int, int, float]]:
    """Sessions that come at random: number, which recorded one it is, and when; all in random order, then all again.

    Without `num_sessions` they have no end.
    """
    check(arrival_rate > 0, "arrival_rate", "above 0", arrival_rate)
    order = itertools.chain.from_iterable(rng.permutation(num_recorded) for _ in itertools.count())
    now_s = 0.0
    for index, which in enumerate(itertools.islice(order, num_sessions)):
        now_s += rng.exponential(1 / arrival_rate)
        yield index, which, now_s


def _turn_of(request: Request, **when: float) -> SimTurn:
    kept = min(request.shared_tokens, request.input_tokens - 1)  # One token at least gives the first of the answer.
    return SimTurn(
        user_tokens=request.input_tokens - kept, answer_tokens=request.output_tokens, kept_tokens=kept, **when
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
            raise ValueError(f"requests must be in order of arrival, got one of {request.arrival_s} after {last_s} s")
        last_s = request.arrival_s
        of_session[request.session_id].append(_turn_of(request, arrival_s=request.arrival_s))
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


@dataclasses.dataclass(eq=False, slots=True)
class Client:
    """A session that is being served."""

    session: SimSession
    num_done: int = 0
    is_served: bool = False
    """Whether one runs, or is being saved."""
    num_dropped: int = 0
    """Tokens that overflows dropped, as the store counts them."""
    num_offered: int = 0
    """Tokens of the context that the store has, or is being given."""
    gives_up: bool = False
    """Whether the store had no room for the KV of this turn."""
    tickets: list[SaveTicket] = dataclasses.field(default_factory=list)
    """Saves under way, in order."""
    answer_left: int = 0
    """Tokens of the answer that are to be generated."""
    answers: bool = False
    """Whether some of it is: then the last token has no KV, since nothing was computed behind it."""
    is_counted: bool = False
    """Whether the turn is none of the warm-up."""
    next_arrival_s: float | None = None
    """When the next turn comes, where that is known; None where it has come, or there is none."""
    _held_ids: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    _num_grown: int = 0  # Tokens behind these: the last that were made.
    _num_made: int = 0  # Tokens ever: the next one's id.

    @property
    def key(self) -> str:
        """Its name in the store."""
        return self.session.session_id

    @property
    def num_tokens(self) -> int:
        """Of the context."""
        return len(self._held_ids) + self._num_grown

    @property
    def num_computed(self) -> int:
        """Tokens of the context that have KV."""
        return self.num_tokens - self.answers

    @property
    def token_ids(self) -> np.ndarray:
        """Of the context, int32 `[num_tokens]`."""
        if self._num_grown:
            new_ids = np.arange(self._num_made - self._num_grown, self._num_made, dtype=np.int32)
            self._held_ids, self._num_grown = np.concatenate([self._held_ids, new_ids]), 0
        return self._held_ids

    @property
    def turn(self) -> SimTurn | None:
        """The one that is to be served, or is."""
        turns = self.session.turns
        return turns[self.num_done] if self.num_done < len(turns) else None

    def grow(self, num_tokens: int) -> None:
        """Puts new tokens behind the context."""
        self._num_grown += num_tokens
        self._num_made += num_tokens

    def keep(self, kept: np.ndarray) -> None:
        """Keeps some tokens of the context, bool `[num_tokens]`."""
        self._held_ids = self.token_ids[kept]

    def keep_first(self, num_tokens: int) -> None:
        """Keeps the first tokens of the context."""
        self._held_ids = self.token_ids[:num_tokens]
        self.num_offered = min(self.num_offered, num_tokens)


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
    return [_planned(each) for each in _by_session(requests)]


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
    check(think_s >= 0, "think_s", "at least 0", think_s)
    rng = np.random.default_rng(seed)
    for index, which, arrival_s in _coming(len(plans), None, arrival_rate, rng):
        plan = plans[which]
        drawn = rng.exponential(think_s, len(plan.turns)).tolist() if think_s else [0.0] * len(plan.turns)
        thinks = [one if turn.think_s is None else turn.think_s for one, turn in zip(drawn, plan.turns, strict=True)]
        yield Coming(session_id=f"s{index}", arrival_s=arrival_s, plan=plan, think_s=(0.0, *thinks[1:]))
