"""Histories that were edited in the middle: what of a conversation comes again behind the edit keeps its tokens there.

    source    P P P | e e e e | s s s s s s s |       s begins with a reply
    edited    P P P | E E | s s s s s s s | q q q     E as the chat template writes it, P and s the source's own tokens

The KV of s has seen e, not E: it is used as that of a chunk is, some of it computed anew (`BlendConfig`). Where s would
be other tokens behind E, as of a template that numbers messages, nothing is taken over.

Not here: which conversation is the source (server.router), how its KV is read (kv.load) and blended (recompute).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from ca_jax.engine import Engine
from ca_jax.errors import CheckpointError, InvalidRequestError
from ca_jax.models.chat_template import ChatTemplate
from ca_jax.pretrained import LoadedModel
from ca_jax.serving.prompts import new_turn, told
from ca_jax.session import Session
from ca_jax.turns.conversations import Borrowed, Conversation, Message, chain_of

_LEAST_TOKENS = 32  # Behind the edit: fewer are computed as fast.


def fork_edited(engine: Engine, session: Session, messages: Sequence[Message]) -> tuple[Session, list[Message]]:
    """Begins a conversation with an edited history, whose first turn uses what is stored of another one.

        edited, new = fork_edited(engine, session, [*session.messages[:1], shorter, *session.messages[2:], question])
        answer = edited.send(new)

    That is not exact: KV behind the edit has seen what was there before. `session` stays as it is, and may be busy.

    Args:
      messages: all of the history, oldest first, with new ones behind its last reply.

    Returns:
      The conversation, and the messages that are new to it: all of them where nothing behind an edit can be used.

    Raises:
      UnknownAdapterError: the session's adapter is not loaded any more.
    """
    source = session.conversation
    begun = engine.session(tenant=session.tenant, ttl_s=session.ttl_s, adapter=session.adapter)
    found = edited(engine.model, source, session.session_id, messages, source.first_chain)
    if found is None:
        return begun, list(messages)
    begun.resume(found)
    return begun, list(messages[len(found.messages) :])


def edited(
    model: LoadedModel, source: Conversation, session_id: str, messages: Sequence[Message], first_chain: str
) -> Conversation | None:
    """An edited history up to its last reply, as a conversation that borrows what it has behind the edit.

    Args:
      source: the conversation that was edited: it has the last reply too, at the end of one of its turns.
      session_id: its name.
      messages: the history, with new ones behind its last reply.
      first_chain: as `source` must have it: of the same adapter.

    Returns:
      None where nothing can be borrowed: nothing of the source comes again behind an edit, or few tokens; tokens or
      messages have left it; layers of the model keep states, which are of all that was said; or the template writes
      otherwise what comes again.
    """
    is_left = source.num_dropped or source.num_slid or chain_of(source.messages, source.first_chain) != source.chain
    if is_left or not source.turn_starts or source.first_chain != first_chain or model.config.num_states:
        return None
    try:
        return _edited(model, source, session_id, messages)
    except (CheckpointError, InvalidRequestError):  # The template has no words for it.
        return None


def last_exchange(messages: Sequence[Message]) -> str:
    """Names the last reply of a history and what was said since the one before it; no chain is named so."""
    replies = (number for number, each in enumerate(messages, 1) if each["role"] == "assistant")
    *_, start, stop = 0, 0, *replies
    return f"exchange {chain_of(messages[start:stop])}"


def begins_alike(source: Conversation, messages: Sequence[Message]) -> bool:
    """Whether a history begins with the first turn of a conversation."""
    ends = [*(number for _, number in source.turn_starts), len(source.messages)]
    return len(ends) > 1 and list(messages[: ends[1]]) == source.messages[: ends[1]]


def _edited(
    model: LoadedModel, source: Conversation, session_id: str, messages: Sequence[Message]
) -> Conversation | None:
    replies = [number for number, each in enumerate(messages, 1) if each["role"] == "assistant"]
    history = messages[: max(replies, default=0)]
    own, asked = ([chain_of([each]) for each in part] for part in (source.messages, history))
    ends = [*source.turn_starts[1:], (len(source.token_ids), len(source.messages))]
    again = [_num_common(own[:number][::-1], asked[::-1]) for _, number in ends]  # Messages, by where they end there.
    num_same = _num_common(own, asked)
    last = max(range(len(ends)), key=lambda turn: (again[turn], turn))
    stop, num_there = ends[last]
    shift = len(history) - num_there  # From a message's number there to its number here.
    first_again = max(num_there - again[last], num_same - shift)
    turns = ((turn, ends[turn][1] - 1) for turn in range(last + 1))
    found = ((turn, reply, _begins_at(model, source, turn, reply)) for turn, reply in turns if reply >= first_again)
    turn, reply, first = next((each for each in found if each[2]), (0, 0, 0))
    if stop - first <= _LEAST_TOKENS or not first or num_same == len(history):
        return None
    if not _is_written_alike(model, source.messages[:num_there], reply, history, reply + shift):
        return None
    base = source.forked(max((tokens for tokens, number in ends if number <= num_same), default=0))
    if not base.token_ids:
        base = dataclasses.replace(base, messages=[])
    between = history[len(base.messages) : reply + shift]
    ids = base.token_ids + new_turn(model, base.token_ids[-1:], base.messages, between).ids
    chains = list(itertools.accumulate(history, lambda chain, each: chain_of([each], chain), initial=base.first_chain))
    further = len(ids) - first
    begun = len(base.token_ids), len(base.messages)
    return dataclasses.replace(
        base,
        token_ids=ids + source.token_ids[first:stop],
        messages=list(history),
        turn_starts=[
            *base.turn_starts,
            begun,
            *((tokens + further, number + shift) for tokens, number in ends[turn:last]),
        ],
        chain=chains[-1],
        states=base.states + [(chains[number + shift], tokens + further) for tokens, number in ends[turn : last + 1]],
        borrowed=Borrowed(session_id, first, len(ids), stop - first - 1),  # The last one was drawn, and never computed.
    )


def _begins_at(model: LoadedModel, source: Conversation, turn: int, reply: int) -> int:
    """The place of the first token of a turn's reply; 0 where the turn is not what the template writes before that."""
    start, number = source.turn_starts[turn]
    before, said = source.messages[:number], source.messages[number:reply]
    prompt = new_turn(model, source.token_ids[max(start - 1, 0) : start], before, said).ids
    is_prompt = source.token_ids[start : start + len(prompt)] == prompt
    return start + len(prompt) if is_prompt else 0


def _is_written_alike(
    model: LoadedModel, there: Sequence[Message], reply: int, here: Sequence[Message], its_reply: int
) -> bool:
    """Whether the template writes what is behind a reply, up to the last one, as it does behind the same one here."""
    tokenizer = model.tokenizer
    if tokenizer is None or reply == len(there) - 1:
        return tokenizer is not None
    template, behind = tokenizer.chat_template or ChatTemplate.plain(), there[reply + 1 : -1]
    texts = {
        template.next_turn(*([told(tokenizer, each) for each in part] for part in (before, behind)))
        for before in (there[: reply + 1], here[: its_reply + 1])
    }
    return len(texts) == 1


def _num_common(one: Sequence[str], other: Sequence[str]) -> int:
    """How many of the first ones are the same."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
