"""Which stored conversation a request goes on with.

OpenAI's clients send the whole history with every turn. The router finds its conversation by what was said, contexts
included: each state of a conversation that a turn has ended in has a name, its message chain, and a history is looked
up by the chain up to its last reply:

    history     system, user, assistant, user, assistant, user
    names       c1      c2    c3         c4    c5                    c5 known: go on there; else begin anew

A conversation that stands there and is idle goes on, even if the engine has truncated it. One that is busy or has
moved on is forked there: its token ids up to there are kept, and only what differs is tokenised. A history that no
conversation has begins anew, and the store still finds KV of the same first tokens. So does a history whose
conversation has lost other tokens than the whole history would lose: the answer depends on the request alone.

A request is answered from text that its own client has sent or named. Two clients may have said the same so far, and
both know the name of one conversation: once it has gone on by its history, a request that names it must also say where
it stands. A conversation that goes on by its name is forked for clients that send its history.
KV behind an edit, where a request asks for it, has seen what was there before.

Belongs to the engine's thread.

Not here: KV (the store finds prefixes by itself), what other replicas have (elsewhere), tenants' keys.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import uuid
from collections.abc import Sequence

from ca_jax.edits import begins_alike, edited, last_exchange
from ca_jax.engine import Engine
from ca_jax.errors import (
    InvalidRequestError,
    SessionBusyError,
    SessionMovedError,
    TenantError,
    UnknownAdapterError,
    UnknownSessionError,
)
from ca_jax.server import elsewhere
from ca_jax.server.conversation_notes import BESIDE, bare, with_waiting
from ca_jax.server.elsewhere import Theirs
from ca_jax.session import Job, Session
from ca_jax.storage.catalog.file import CatalogLateError
from ca_jax.turns.conversations import OTHERWISE, Conversation, Message, chain_of, first_chain, message_chars
from ca_jax.turns.text import MESSAGE_CHARS, Texts

BY_NAME, _BY_HISTORY = "name", "history"  # Of `Conversation.reached`.
_KNOWN_PER_OPEN = 16  # Conversations found by their history, for each that may be open: others are found by name.
_HASHED_CHARS = 100  # As many characters are hashed in the time that one takes to be rendered and tokenised.


@dataclasses.dataclass(frozen=True)
class Found:
    """The conversation that a request goes on with."""

    session: Session
    messages: list[Message]
    """Of the request, what is new to it."""
    reached: str
    """What the conversation's `reached` is from this request on; empty for one that was begun or forked for it, and
    that is closed if the request fails."""


class Router:
    """States of the conversations of all tenants by name. Keeps each tenant's open ones, and those known, under a cap.

    Args:
      engine: whose conversations.
      max_open_sessions: most of a tenant that are open; then its least recently used one is released to the store.
    """

    def __init__(self, engine: Engine, max_open_sessions: int) -> None:
        self._engine = engine
        self._max_open = max_open_sessions
        self.max_known = _KNOWN_PER_OPEN * max_open_sessions
        """Most conversations of a tenant that are found by their history."""
        self._states: dict[tuple[str, str], str] = {}  # Names of sessions, by tenant and chain.
        # By tenant and session; those that are open likewise.
        self._chains = collections.defaultdict[str, collections.OrderedDict[str, list[str]]](collections.OrderedDict)
        self._used = collections.defaultdict[str, collections.OrderedDict[str, None]](collections.OrderedDict)

    def by_id(
        self,
        tenant: str,
        session_id: str,
        messages: Sequence[Message],
        texts: Texts,
        state: str | None = None,
        adapter: str | None = None,
    ) -> Found:
        """The conversation of a name, and those of a request's messages that are new to it.

        Args:
          tenant: whose request it is.
          session_id: of a conversation of that tenant.
          messages: new ones alone, or the whole conversation with new ones behind it.
          texts: as of `by_history`.
          state: the chain that it must end with.
          adapter: the name of that it must be held with; None: with none.

        Raises:
          UnknownSessionError: there is none of that name.
          SessionMovedError: it stands elsewhere.
          SessionBusyError: a turn of it runs.
          InvalidRequestError: the messages are neither, or it is held with another adapter.
          ObjectsError: another replica may have it, and that cannot be found out.
          TextWork: what has to be asked of others first is to be done elsewhere.
        """
        session = self.owned(tenant, session_id, texts)
        if session.adapter != adapter:
            held, asked = (each or "no adapter" for each in (session.adapter, adapter))
            raise InvalidRequestError(
                f"model must name the adapter that session {session_id!r} has, {held}; got {asked}"
            )
        if session.is_busy:
            raise SessionBusyError(f"session {session_id!r} still answers; it must have ended before the next turn")
        if state is not None and session.conversation.chain != state:
            raise SessionMovedError(
                f"session {session_id!r} does not stand where session_state says, but behind "
                f"{len(session.messages)} messages; it was gone on with, perhaps by an answer that never arrived, "
                "or lost its last turns as the system went down: send the whole history"
            )
        num_known = _num_known(session.conversation, messages, texts)
        if not num_known and session.token_ids:
            messages = _without_tools(session, messages)
        reached = session.conversation.reached or BY_NAME
        if reached == _BY_HISTORY and state is None and not num_known:
            raise SessionMovedError(
                f"session {session_id!r} was gone on with by its whole history: with its name must come the "
                "session_state of its last answer, or all of its messages"
            )
        others = sorted({message["role"] for message in messages} - {"user", "tool"})
        if others and session.token_ids and not num_known:
            raise InvalidRequestError(
                f"messages must be what is new to session {session_id!r}, of user and tools alone, or all of it and "
                f"that; got messages of {', '.join(others)} that are not the session's"
            )
        return Found(session, with_waiting(session.conversation, messages[num_known:]), reached)

    def by_history(
        self,
        tenant: str,
        messages: Sequence[Message],
        texts: Texts,
        adapter: str | None = None,
        *,
        may_drop: bool = True,
        name: str | None = None,
        reuse_edited: bool = False,
        state: str | None = None,
    ) -> Found:
        """A conversation that stands where a history ends, and what of it is new: it is found, forked or begun.

        Args:
          tenant: whose request it is.
          messages: the whole history, oldest first, with its contexts.
          texts: has their names, or raises `TextWork` where that is much to hash.
          adapter: the name of that it is held with; None: with none.
          may_drop: whether it may be one that tokens have left.
          name: of one that is begun, where no other has it and no replica shares conversations; None: one is made up.
          reuse_edited: whether one that is begun may use what is stored of a history that was edited; see `edits`.
          state: the chain of that history before it was edited; None: it is found by its last exchange.
        """
        # Behind an earlier reply more than one turn would come at once: that begins anew, cut as a whole history is.
        replies = (number for number, each in enumerate(messages[:-1], 1) if each["role"] == "assistant")
        num_known = max(replies, default=0)
        first = _first_chain(self._engine, adapter)
        chain = _chains_of(messages, texts, first)[num_known - 1] if num_known else ""
        known = self._states.get((tenant, chain))
        session = None if known is None else self._at(tenant, known, chain, may_drop)
        if session is None and chain:
            session = self._elsewhere(tenant, chain, texts)
        if session is not None:
            return Found(session, list(messages[num_known:]), _BY_HISTORY if session.session_id == known else "")
        if name is not None and (self._engine.elsewhere is not None or self.look(tenant, name) is not None):
            name = None
        edit = self._edited(tenant, messages, texts, first, state) if reuse_edited and chain else None
        begun = self.begin(tenant, name, adapter=adapter)
        if edit is not None:
            begun.resume(edit)
        return Found(begun, list(messages[0 if edit is None else num_known :]), "")

    def by_place(self, tenant: str, session_id: str, chain: str, messages: Sequence[Message], texts: Texts) -> Found:
        """A conversation of a client's name at the end of the turn that a chain names: itself, or a fork.

        Args:
          tenant: whose request it is.
          session_id: of a conversation of that tenant.
          chain: behind one of its turns.
          messages: what is new to it.
          texts: as of `by_history`.

        Raises:
          UnknownSessionError: no session has that name, or it no longer has that place.
        """
        elsewhere.claim(self._engine, engine_name(tenant, session_id), tenant, texts)
        session = self.find(tenant, session_id)
        num_tokens = next((num for each, num in session.conversation.states if each == chain), None)
        if num_tokens is None:
            raise unknown_session(session_id)
        behind = self._behind(session, num_tokens)
        return Found(behind, list(messages), _BY_HISTORY if behind is session else "")

    def keep_for(self, session: Session, ttl_s: float) -> None:
        """Says how long a conversation's KV is kept after its last use, seconds."""
        session.ttl_s = ttl_s
        with contextlib.suppress(UnknownSessionError):  # Nothing is stored of it yet.
            self._engine.stored.set_ttl(session.session_id, ttl_s, tenant=session.tenant)

    def begin(
        self,
        tenant: str,
        session_id: str | None = None,
        *,
        system: str | None = None,
        ttl_s: float | None = None,
        adapter: str | None = None,
        texts: Texts | None = None,
    ) -> Session:
        """A new conversation, held with an adapter or with none; its name is made up if not given.

        Raises:
          UnknownAdapterError: the adapter is not loaded.
          InvalidRequestError: there is one of that name.
          TextWork, ObjectsError: as of `look`.
        """
        name, session = engine_name(tenant, session_id or uuid.uuid4().hex), None
        if session_id is None or self.look(tenant, session_id, texts) is None:
            with contextlib.suppress(TenantError):
                session = self._engine.session(
                    session_id=name, system=system, tenant=tenant, ttl_s=ttl_s, adapter=adapter
                )
        if session is None:
            raise InvalidRequestError(f"session_id must be a name that is not taken, got {session_id!r}")
        self.use(session)
        return session

    def find(self, tenant: str, session_id: str) -> Session:
        """The conversation of a client's name, which is open from now on.

        Raises:
          UnknownSessionError: there is none, or what is stored by that name is not its own.
        """
        session = None
        with contextlib.suppress(TenantError):
            session = self._engine.find_session(engine_name(tenant, session_id), tenant=tenant)
        if session is None:
            raise unknown_session(session_id)
        self.use(session)
        return session

    def owned(self, tenant: str, session_id: str, texts: Texts) -> Session:
        """As `find`, whichever replica has it: from now on this one owns it.

        Raises:
          UnknownSessionError: as of `find`.
          ObjectsError: another replica may have it, and that cannot be found out.
          TextWork: what has to be asked of others first is to be done elsewhere.
        """
        is_known = elsewhere.claim(self._engine, engine_name(tenant, session_id), tenant, texts)
        try:
            return self.find(tenant, session_id)
        except UnknownSessionError as error:
            if is_known:
                raise
            raise elsewhere.no_answer() from error

    def delete(self, tenant: str, session_id: str, texts: Texts) -> None:
        """Forgets the conversation of a client's name and its KV; cancels a turn of it that runs. Raises as `owned`."""
        name = engine_name(tenant, session_id)
        try:
            self.owned(tenant, session_id, texts).close()
        except UnknownAdapterError:  # It cannot be opened now, and need not be.
            self._engine.stored.drop(name, tenant=tenant)
        self.forget(tenant, name)

    def look(self, tenant: str, session_id: str, texts: Texts | None = None) -> Conversation | None:
        """The conversation of a client's name, open or not, to look at: it is not opened. None where `find` raises.

        Args:
          texts: as of `by_id`: what another replica that owns it has published is shown; None: what is here.

        Raises:
          TextWork: as of `owned`; so is ObjectsError, where nothing is here.
        """
        name, theirs = engine_name(tenant, session_id), Theirs()
        if texts is not None and self._engine.elsewhere is not None:
            theirs = elsewhere.theirs(self._engine, name, tenant, texts)
            if theirs.owner not in ("", self._engine.elsewhere.replica):
                return theirs.conversation
        if (opened := self._engine.opened(name, tenant=tenant)) is not None:
            return opened.conversation
        with contextlib.suppress(TenantError):
            kept = self._engine.stored.conversation(name, tenant=tenant)
            if kept is None and not theirs.is_known:
                raise elsewhere.no_answer()
            said = theirs.conversation
            return said if kept is None or (said is not None and said.generation > kept.generation) else kept
        return None

    def let_go(self, sessions: Sequence[Session]) -> None:
        """Closes conversations that no client knows by name; what is stored of them stays."""
        for session in sessions:
            self.forget(session.tenant, session.session_id)
            if not session.is_busy:
                self._engine.release(session)

    def sibling(self, session: Session, num_tokens: int) -> Session:
        """Another conversation that begins like one that is about to go on, for another answer to the same.

        It does not count as open yet: with all that one request goes on with, the first could be released.
        """
        return self._engine.fork(session, num_tokens, session_id=engine_name(session.tenant, uuid.uuid4().hex))

    def goes_on(self, found: Found) -> None:
        """Notes that a request goes on with what was found for it."""
        if found.session.conversation.reached != found.reached:
            found.session.resume(dataclasses.replace(found.session.conversation, reached=found.reached))

    def ended(self, job: Job) -> str | None:
        """Notes where a turn's conversation stands now that it has ended; its chain."""
        if job.session is None or not job.session.is_kept:
            return None
        if job.output_ids:
            self.note(job.session.tenant, job.session.session_id, job.session.conversation)
        return job.session.conversation.chain

    def note(self, tenant: str, session_id: str, conversation: Conversation) -> None:
        """Notes where a conversation stands, if a history may find it there."""
        if self._tokens_at(conversation, conversation.chain) is None:
            return
        known = self._chains[tenant]
        chains = known.setdefault(session_id, [])
        known.move_to_end(session_id)
        for chain in (conversation.chain, last_exchange(conversation.messages)):
            self._states[tenant, chain] = session_id
            if chain not in chains[-2:]:
                chains.append(chain)
        while len(known) > self.max_known:
            self.forget(tenant, next(iter(known)))

    def learn(self, tenant: str, session_id: str, engine: Engine) -> None:
        """Notes where a stored conversation stands that is not open; not of one that cannot be read in time."""
        with contextlib.suppress(CatalogLateError):
            conversation = engine.stored.conversation(session_id, tenant=tenant)
            if conversation is not None:
                self.note(tenant, session_id, conversation)

    def forget(self, tenant: str, session_id: str) -> None:
        """Forgets the states of a conversation that is gone."""
        for chain in self._chains[tenant].pop(session_id, ()):
            if self._states.get((tenant, chain)) == session_id:
                del self._states[tenant, chain]
        self._used[tenant].pop(session_id, None)

    def _elsewhere(self, tenant: str, chain: str, texts: Texts) -> Session | None:
        """A fork of a conversation that another replica published where a history ends; None: none is known."""
        manifest = elsewhere.published(self._engine, tenant, chain, texts)
        said = None if manifest is None else elsewhere.said_in(manifest)
        if self._engine.elsewhere is None or manifest is None or said is None:
            return None
        num_tokens = self._tokens_at(said, chain)
        if num_tokens is None:
            return None
        session = self._engine.elsewhere.fork(manifest, num_tokens, engine_name(tenant, uuid.uuid4().hex))
        self.use(session)
        return session

    def _edited(
        self, tenant: str, messages: Sequence[Message], texts: Texts, first: str, state: str | None
    ) -> Conversation | None:
        """A history up to its last reply that borrows from a conversation which ended with that; None: it cannot.

        Another replica's is not looked for, and that conversation is not opened. Its KV has seen what was edited: one
        that is found by what others may have said too must have begun with the same turn.
        """
        size = message_chars(messages) // _HASHED_CHARS + len(messages) * MESSAGE_CHARS
        known = self._states.get((tenant, state or texts.get(size, last_exchange, messages)))
        if known is None:
            return None
        if (opened := self._engine.opened(known, tenant=tenant)) is not None:
            source: Conversation | None = opened.conversation
        else:
            with contextlib.suppress(TenantError, CatalogLateError):
                source = self._engine.stored.conversation(known, tenant=tenant)
        if source is None:
            return None
        stood = any(chain == state for chain, _ in source.states)  # The name of an exchange is no place of it.
        if not (stood or (state is None and begins_alike(source, messages))):
            return None
        size = message_chars(messages) + len(messages) * MESSAGE_CHARS
        return texts.get(size, edited, self._engine.model, source, known, messages, first)

    def _at(self, tenant: str, session_id: str, chain: str, may_drop: bool) -> Session | None:
        """A conversation at the end of one of its turns, itself or a fork; None if it cannot be had any more."""
        session = self._engine.find_session(session_id, tenant=tenant)
        if session is None:
            self.forget(tenant, session_id)
            return None
        self.use(session)
        conversation = session.conversation
        num_tokens = self._tokens_at(conversation, chain)
        if num_tokens is None or (conversation.num_dropped and not may_drop):
            return None
        return self._behind(session, num_tokens)

    def _behind(self, session: Session, num_tokens: int) -> Session:
        """A conversation behind its first tokens: itself where it stands there and is free, or else a fork."""
        is_free = not session.is_busy and session.conversation.reached != BY_NAME
        if num_tokens == len(session.token_ids) and is_free:
            return session
        forked = self.sibling(session, num_tokens)
        self.use(forked)
        return forked

    def _tokens_at(self, conversation: Conversation, chain: str) -> int | None:
        """How many tokens a conversation had where a history ends; None if it must not go on there.

        It must not if it has lost other tokens since than the whole history would lose.
        """
        is_as_told = not conversation.cut_by or conversation.cut_by == self._engine.truncation_rule != OTHERWISE
        return next((num for name, num in conversation.states if name == chain), None) if is_as_told else None

    def use(self, session: Session) -> None:
        """Notes a use; releases what its tenant has not used for longest where that has too many open."""
        used = self._used[session.tenant]
        used[session.session_id] = None
        used.move_to_end(session.session_id)
        while len(used) > self._max_open:
            session_id = next(iter(used))
            oldest = self._engine.opened(session_id, tenant=session.tenant)
            if oldest is not None and oldest.is_busy:
                used.move_to_end(session_id)
                return
            if oldest is not None:
                self._engine.release(oldest)
            del used[session_id]


def _without_tools(session: Session, messages: Sequence[Message]) -> Sequence[Message]:
    """New messages without the tools, and the variables of the template, that the conversation was begun with.

    Raises:
      InvalidRequestError: they are others.
    """
    for extra, name in zip(BESIDE, ("tools", "chat_template_kwargs"), strict=True):
        begun = next((each[extra] for each in session.messages if extra in each), None)
        if any(each[extra] != begun for each in messages if extra in each):
            raise InvalidRequestError(f"{name} must be those that the session began with, or left out: got others")
    return bare(messages)


def _first_chain(engine: Engine, adapter: str | None) -> str:
    """The chain of a conversation with an adapter, or with none, before anything is said.

    Raises:
      UnknownAdapterError: it is not loaded.
    """
    if adapter is None:
        return ""
    weights = [each.fingerprint for each in engine.adapters if each.name == adapter]
    if not weights:
        raise UnknownAdapterError(f"the adapter must be one that is loaded, got {adapter!r}")
    return first_chain(adapter, *weights)


def _chains_of(messages: Sequence[Message], texts: Texts, first: str = "") -> list[str]:
    """The chain behind each message, behind the chain `first`; raises `TextWork` where there is much to hash."""
    size = message_chars(messages) // _HASHED_CHARS
    return texts.get(size + len(messages) * MESSAGE_CHARS, _chains, messages, first)


def _chains(messages: Sequence[Message], first: str) -> list[str]:
    return list(itertools.accumulate(messages, lambda chain, message: chain_of([message], chain), initial=first))[1:]


def unknown_session(session_id: str) -> UnknownSessionError:
    """The error of a client's name that names no conversation of its tenant."""
    return UnknownSessionError(f"there must be a session of that name, got {session_id!r}")


def engine_name(tenant: str, session_id: str) -> str:
    """The engine's name of a conversation: tenants do not share names."""
    return f"{tenant}/{session_id}" if tenant else session_id


def client_name(tenant: str, name: str) -> str:
    """The client's name of a conversation of the engine."""
    return name.removeprefix(f"{tenant}/") if tenant else name


def _num_known(conversation: Conversation, messages: Sequence[Message], texts: Texts) -> int:
    """How many of the first messages are all that was said in a conversation; 0 where none are."""
    chains = _chains_of(messages[:-1], texts, conversation.first_chain)
    return chains.index(conversation.chain) + 1 if conversation.chain in chains else 0
