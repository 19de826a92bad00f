"""Which stored conversation a request goes on with.

OpenAI's clients send the whole history with every turn. It is found again by what was said, contexts included: each
state of a conversation that a turn has ended in has a name, its message chain, which the history is looked up by, up to
its last reply:

    history     system, user, assistant, user, assistant, user
    names       c1      c2    c3         c4    c5                    c5 known: go on there; else begin anew

A conversation that stands there and is idle goes on, also where the engine has truncated it. One that has moved on, or
is busy, is forked there: token ids up to there are those that were generated, and only what differs is tokenised. What
is known of no conversation begins anew, and the store still finds KV of the same first tokens. So does what is known
only of one that has lost other tokens than the whole history would lose: what is answered depends on the request alone.

Belongs to the engine's thread.

Not here: KV (the store finds prefixes by itself), tenants' keys.
"""

from __future__ import annotations

import collections
import dataclasses
import uuid
from collections.abc import Sequence

from ca_jax.conversations import OTHERWISE, Conversation, Message, chain_of
from ca_jax.engine import Engine
from ca_jax.errors import InvalidRequestError, SessionBusyError, SessionMovedError, TenantError, UnknownSessionError
from ca_jax.jobs import Job
from ca_jax.session import Session

_KNOWN_PER_OPEN = 16  # Conversations found by their history, for each that may be open: others are found by name.


@dataclasses.dataclass(frozen=True)
class Found:
    """The conversation that a request goes on with."""

    session: Session
    messages: list[Message]
    """Of the request, what is new to it."""
    is_new: bool
    """Whether it was begun or forked for this request: nobody misses it if the request fails."""


class Router:
    """States of the conversations of all tenants by name. Keeps open conversations, and those known, under a cap.

    Args:
      engine: whose conversations.
      max_open_sessions: most that are open; of those, what was used least recently is released to the store.
    """

    def __init__(self, engine: Engine, max_open_sessions: int) -> None:
        self._engine = engine
        self._max_open = max_open_sessions
        self.max_known = _KNOWN_PER_OPEN * max_open_sessions
        """Most conversations that are found by their history."""
        self._states: dict[tuple[str, str], str] = {}  # Names of sessions, by tenant and chain.
        self._chains: collections.OrderedDict[tuple[str, str], list[str]] = collections.OrderedDict()
        self._used: collections.OrderedDict[tuple[str, str], None] = collections.OrderedDict()

    def by_id(self, tenant: str, session_id: str, messages: Sequence[Message], state: str | None = None) -> Found:
        """The conversation of a name, and those of a request's messages that are new to it.

        Args:
          tenant: whose request it is.
          session_id: of a conversation of that tenant.
          messages: new ones alone, or the whole conversation with new ones behind it.
          state: the chain that it must end with.

        Raises:
          UnknownSessionError: there is none of that name.
          SessionMovedError: it stands elsewhere.
          SessionBusyError: a turn of it runs.
          InvalidRequestError: the messages are neither.
        """
        session = self.find(tenant, session_id)
        if session is None:
            raise UnknownSessionError(f"wanted a session that there is, found {session_id!r}")
        if session.is_busy:
            raise SessionBusyError(f"session {session_id!r} still answers; wanted one turn at a time")
        if state is not None and session.conversation.chain != state:
            raise SessionMovedError(
                f"session {session_id!r} does not stand where session_state says, but behind "
                f"{len(session.messages)} messages; it was gone on with, perhaps by an answer that never arrived, "
                "or lost its last turns as the system went down: send the whole history"
            )
        self._use(session)
        num_known = _num_known(session.conversation, messages)
        if num_known:
            return Found(session, list(messages[num_known:]), is_new=False)
        others = sorted({message["role"] for message in messages} - {"user"})
        if others and session.token_ids:
            raise InvalidRequestError(
                f"messages wanted what is new to session {session_id!r}, of the user alone, or all of it and that; "
                f"found messages of {', '.join(others)} that are not the session's"
            )
        return Found(session, list(messages), is_new=False)

    def by_history(self, tenant: str, messages: Sequence[Message], *, may_drop: bool = True) -> Found:
        """A conversation that stands where a history ends, and what of it is new: it is found, forked or begun.

        Args:
          tenant: whose request it is.
          messages: the whole history, oldest first, with its contexts.
          may_drop: whether it may be one that tokens have left.
        """
        # Behind an earlier reply more than one turn would come at once: that begins anew, and is cut as what is told.
        replies = (number for number, each in enumerate(messages[:-1], 1) if each["role"] == "assistant")
        num_known = max(replies, default=0)
        chain = chain_of(messages[:num_known])
        name = self._states.get((tenant, chain))
        session = None if name is None else self._at(tenant, name, chain, may_drop)
        if session is not None:
            return Found(session, list(messages[num_known:]), is_new=session.session_id != name)
        return Found(self.begin(tenant), list(messages), is_new=True)

    def begin(
        self, tenant: str, session_id: str | None = None, *, system: str | None = None, ttl_s: float | None = None
    ) -> Session:
        """A new conversation; its name is made up if not given.

        Raises:
          InvalidRequestError: there is one of that name.
        """
        taken = InvalidRequestError(f"session_id wanted a name that is not taken, found {session_id!r}")
        if session_id is not None and self.find(tenant, session_id) is not None:
            raise taken
        name = engine_name(tenant, session_id or uuid.uuid4().hex)
        try:
            session = self._engine.session(session_id=name, system=system, tenant=tenant, ttl_s=ttl_s)
        except TenantError:
            raise taken from None
        self._use(session)
        return session

    def find(self, tenant: str, session_id: str) -> Session | None:
        """The conversation of a client's name; None if there is none, or what is stored by that name is not its own."""
        try:
            return self._engine.find_session(engine_name(tenant, session_id), tenant=tenant)
        except TenantError:
            return None

    def let_go(self, sessions: Sequence[Session]) -> None:
        """Closes conversations that nobody will ask for by name; what is stored of them stays."""
        for session in sessions:
            self.forget(session.tenant, session.session_id)
            if not session.is_busy:
                self._engine.release(session)

    def sibling(self, session: Session, num_tokens: int) -> Session:
        """Another conversation that begins like one that is about to go on, for another answer to the same."""
        forked = self._engine.fork(session, num_tokens, session_id=engine_name(session.tenant, uuid.uuid4().hex))
        self._use(forked)
        return forked

    def ended(self, job: Job) -> str | None:
        """Notes where a turn's conversation stands now that it has ended; its chain."""
        if job.session is None:
            return None
        if job.output_ids:
            self.note(job.session.tenant, job.session.session_id, job.session.conversation)
        return job.session.conversation.chain

    def note(self, tenant: str, session_id: str, conversation: Conversation) -> None:
        """Notes where a conversation stands, if a history may find it there."""
        if self._tokens_at(conversation, conversation.chain) is None:
            return
        self._states[tenant, conversation.chain] = session_id
        chains = self._chains.setdefault((tenant, session_id), [])
        self._chains.move_to_end((tenant, session_id))
        if not chains or chains[-1] != conversation.chain:
            chains.append(conversation.chain)
        while len(self._chains) > self.max_known:
            self.forget(*next(iter(self._chains)))

    def learn(self, tenant: str, session_id: str, engine: Engine) -> None:
        """Notes where a stored conversation stands that is not open."""
        conversation = engine.stored.conversation(session_id, tenant=tenant)
        if conversation is not None:
            self.note(tenant, session_id, conversation)

    def forget(self, tenant: str, session_id: str) -> None:
        """Forgets the states of a conversation that there is no more."""
        for chain in self._chains.pop((tenant, session_id), ()):
            if self._states.get((tenant, chain)) == session_id:
                del self._states[tenant, chain]
        self._used.pop((tenant, session_id), None)

    @property
    def num_states(self) -> int:
        """States that are known."""
        return len(self._states)

    def _at(self, tenant: str, session_id: str, chain: str, may_drop: bool) -> Session | None:
        """A conversation at the end of one of its turns, itself or a fork; None if it cannot be had any more."""
        session = self._engine.find_session(session_id, tenant=tenant)
        if session is None:
            self.forget(tenant, session_id)
            return None
        self._use(session)
        conversation = session.conversation
        num_tokens = self._tokens_at(conversation, chain)
        if num_tokens is None or (conversation.num_dropped and not may_drop):
            return None
        if num_tokens == len(conversation.token_ids) and not session.is_busy:
            return session
        return self.sibling(session, num_tokens)

    def _tokens_at(self, conversation: Conversation, chain: str) -> int | None:
        """How many tokens a conversation had where a history ends; None if it is not to go on there.

        That is so where others of its tokens have left since than would leave a history that is told anew.
        """
        is_as_told = not conversation.cut_by or conversation.cut_by == self._engine.truncation_rule != OTHERWISE
        found = (num_tokens for name, num_tokens in conversation.states if name == chain)
        return next(found, None) if is_as_told else None

    def _use(self, session: Session) -> None:
        """Notes a use; releases what was not used for longest where too many are open."""
        self._used[session.tenant, session.session_id] = None
        self._used.move_to_end((session.tenant, session.session_id))
        while len(self._used) > self._max_open:
            tenant, session_id = next(iter(self._used))
            oldest = self._engine.find_session(session_id, tenant=tenant)
            if oldest is not None and oldest.is_busy:
                self._used.move_to_end((tenant, session_id))
                return
            if oldest is not None:
                self._engine.release(oldest)
            del self._used[tenant, session_id]


def engine_name(tenant: str, session_id: str) -> str:
    """The engine's name of a conversation: tenants do not share names."""
    return f"{tenant}/{session_id}" if tenant else session_id


def client_name(tenant: str, name: str) -> str:
    """The client's name of a conversation of the engine."""
    return name.removeprefix(f"{tenant}/") if tenant else name


def _num_known(conversation: Conversation, messages: Sequence[Message]) -> int:
    """How many of the first messages are all that was said in a conversation; 0 where none are."""
    chain = ""
    for number, message in enumerate(messages[:-1], 1):
        chain = chain_of([message], chain)
        if chain == conversation.chain:
            return number
    return 0
