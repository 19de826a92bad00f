"""Responses by their ids: each is the end of a turn of a conversation, and is kept with that.

    id             resp_, a key of its own, the name of its conversation
    conversation   R1 ---- R2 ---- R3          R3 names the place behind all, R1 one that was gone on from
                     `---- R4                  what goes on from R1 now is a fork, a conversation of its own

A client that knows an id continues from there with the same tokens and KV, even after the server has restarted.
What goes on with other instructions, another adapter or replies of its own is told anew: its history as messages.

A response is found until it is deleted, its conversation is, or tokens leave the conversation. One that is deleted
takes its turn along, unless another stands on it, or the conversation is one that clients name.

Belongs to the engine's thread.

Not here: HTTP (`response_routes`), ids (`response_items`), how a conversation goes on (`router`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from ca_jax.engine import Engine
from ca_jax.errors import InvalidRequestError, SessionBusyError
from ca_jax.server.conversation_notes import bare, beside, first_said
from ca_jax.server.errors import ApiError
from ca_jax.server.response_items import key_and_name, tools_of
from ca_jax.server.router import BY_NAME, Found, Router, engine_name
from ca_jax.turns.conversations import Conversation, Message
from ca_jax.turns.text import Texts

_INSTRUCTED = "instructed"  # Of what is kept: the conversation begins with the response's instructions.


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a response stands."""

    key: str
    """Its own."""
    name: str
    """Of its conversation, as clients have it."""
    chain: str
    """Of that, behind its turn."""
    told: dict[str, Any]
    """What is told of it beside its text."""
    messages: list[Message]
    """All up to its end, the answer among them."""
    adapter: str
    """That its conversation is held with; empty: none."""

    @property
    def instructions(self) -> str | None:
        """Those that its conversation begins with; None where it had none, or they have left."""
        return self.told.get("instructions")

    @property
    def said(self) -> list[Message]:
        """The messages without instructions, which are not handed on."""
        return self.messages[self.instructions is not None :]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a request says of the conversation that it goes on with, beside its name."""

    instructions: str | None
    """Those that it is to begin with."""
    messages: list[Message]
    """What is new, its tools with the first that is no system's."""
    adapter: str | None
    """That it is to be held with."""


def kept(told: dict[str, Any], messages: Sequence[Message]) -> dict[str, Any]:
    """What is kept of what is told of a response: its instructions and tools are with its conversation already.

    Args:
      told: all that is told beside its text.
      messages: of the conversation, up to the response.
    """
    others = {name: value for name, value in told.items() if name not in ("instructions", "tools")}
    begins = bool(messages) and list(messages[:1]) == instructed(told.get("instructions"))
    return {**others, _INSTRUCTED: True} if begins else others


def _told(kept: dict[str, Any], messages: Sequence[Message]) -> dict[str, Any]:
    """The opposite."""
    has_instructions = kept.pop(_INSTRUCTED, False) and messages[0]["role"] == "system"
    instructions = {"instructions": messages[0]["content"]} if has_instructions else {}
    return {**kept, **instructions, "tools": tools_of(messages)}


def look(router: Router, tenant: str, response: str, texts: Texts, param: str | None = None) -> Place:
    """The place of a response.

    Args:
      tenant: whose request it is.
      response: the id.
      texts: as of `Router.look`.
      param: the field of the request that has it.

    Raises:
      ApiError: no response has that id (404).
      TextWork: as of `Router.look`.
    """
    key, name = key_and_name(response)
    conversation = router.look(tenant, name, texts) if name else None
    entries = [] if conversation is None else conversation.responses
    chain, entry = next(((chain, entry) for each, chain, entry in entries if each == key), ("", ""))
    num_messages = None if conversation is None or not entry else _num_messages(conversation, chain)
    if conversation is None or num_messages is None:
        has_lost = conversation is not None and conversation.num_dropped > 0
        why = ": tokens have left its conversation since it was given, so that only later ones are found" * has_lost
        message = f"there must be a response of that id, got {response!r}{why}"
        raise ApiError(404, message, param=param, code="response_truncated" if has_lost else "response_not_found")
    messages = conversation.messages[:num_messages]
    return Place(key, name, chain, _told(json.loads(entry), messages), messages, conversation.adapter)


def find_behind(router: Router, tenant: str, response: str, asked: Asked, texts: Texts) -> Found:
    """The conversation that goes on behind a response, and what is new to it.

    Raises:
      ApiError: as of `look`.
      UnknownAdapterError: the conversation's adapter is not loaded.
    """
    place, messages = look(router, tenant, response, texts, "previous_response_id"), asked.messages
    begins = (place.instructions, place.adapter or None, beside(place.messages))
    is_same = begins == (asked.instructions, asked.adapter, beside(messages))
    if is_same and all(message["role"] != "assistant" for message in messages):
        return router.by_place(tenant, place.name, place.chain, bare(messages), texts)
    history = bare([*instructed(asked.instructions), *place.said, *messages])
    history[first_said(history)] |= beside(messages)
    return router.by_history(tenant, history, texts, asked.adapter)


def find_named(router: Router, tenant: str, name: str, asked: Asked, texts: Texts) -> Found:
    """The conversation of a name, and what is new to it; raises what `Router.by_id` does.

    Raises:
      InvalidRequestError: it has begun, with other instructions.
    """
    conversation, begins = router.look(tenant, name, texts), instructed(asked.instructions)
    if conversation is not None and conversation.messages:
        if begins and conversation.messages[:1] != begins:
            raise InvalidRequestError("instructions must be those that the conversation begins with, or left out")
        begins = []
    return router.by_id(tenant, name, [*begins, *asked.messages], texts, None, asked.adapter)


def instructed(instructions: str | None) -> list[Message]:
    """The system message that a conversation with these instructions begins with; empty without instructions."""
    return [{"role": "system", "content": instructions}] if instructions is not None else []


def delete(router: Router, engine: Engine, tenant: str, response: str, texts: Texts) -> None:
    """Forgets a response, with its turn's text and KV where nothing else stands on it.

    Raises:
      ApiError: as of `look`.
      SessionBusyError: its conversation answers.
    """
    place = look(router, tenant, response, texts)
    session = router.owned(tenant, place.name, texts)
    if session.is_busy:
        raise SessionBusyError(f"the conversation of response {response!r} still answers; it must have ended")
    takes_turn = session.conversation.reached != BY_NAME
    left = session.conversation.without_response(place.key, takes_turn=takes_turn)
    if left.token_ids:
        engine.truncate_stored(session, len(left.token_ids), left)
        router.note(tenant, session.session_id, left)
    else:
        session.close()
        router.forget(tenant, engine_name(tenant, place.name))


def _num_messages(conversation: Conversation, chain: str) -> int | None:
    """How many messages a conversation had behind a turn; None: it does not stand there any more."""
    num_tokens = next((num for each, num in conversation.states if each == chain), None)
    ends = [*conversation.turn_starts, (len(conversation.token_ids), len(conversation.messages))]
    return next((messages for tokens, messages in reversed(ends) if tokens == num_tokens), None)
