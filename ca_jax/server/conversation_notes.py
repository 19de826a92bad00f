"""What is kept with a conversation for clients: metadata and items that no turn has taken yet, for those who know it as
OpenAI's, and what it was forked from.

    conversation    turn, turn, turn | item, item       items are said with the next turn, in front of what that says

Not here: HTTP (`conversation_routes`), which conversation a request goes on with (`router`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from ca_jax.turns.conversations import Conversation, Message

BESIDE = ("tools", "template")
"""What stands beside the first message of a conversation that is no system's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Notes:
    """Of one conversation."""

    created_at: int = 0
    """Seconds since the epoch; 0 where it was not begun as one of OpenAI's."""
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)
    waiting: list[Message] = dataclasses.field(default_factory=list)
    """Items, as messages, that are said with the next turn."""
    behind: str = ""
    """The chain that they were said behind: once the conversation has another one, they are part of it."""
    forked_from: str = ""
    """The client's name of the conversation that it began as a fork of; empty: none that a client asked for."""
    forked_at: int = 0
    """How many messages it had in common with that."""

    @classmethod
    def of(cls, conversation: Conversation) -> Notes:
        """What is kept of one, without items that have become part of it."""
        found = cls(**json.loads(conversation.kept)) if conversation.kept else cls()
        return found if found.behind == conversation.chain else dataclasses.replace(found, waiting=[])

    def kept_with(self, conversation: Conversation) -> Conversation:
        """The conversation with these."""
        told = json.dumps(dataclasses.asdict(self) | {"behind": conversation.chain}, ensure_ascii=False)
        return dataclasses.replace(conversation, kept=told, generation=conversation.generation + 1)


def with_waiting(conversation: Conversation, new: Sequence[Message]) -> list[Message]:
    """The messages of a turn, behind its instructions the items that wait for it, and then the rest."""
    waiting, new = Notes.of(conversation).waiting, list(new)
    if not waiting or new[: len(waiting)] == waiting:
        return new
    said = bare(new)
    said[(first := first_said(said)) : first] = waiting
    said[first_said(said)] |= beside(new)
    return said


def beside(messages: Sequence[Message]) -> Message:
    """What stands beside messages."""
    return {name: message[name] for message in reversed(messages) for name in BESIDE if name in message}


def bare(messages: Sequence[Message]) -> list[Message]:
    """Messages without that."""
    return [{name: value for name, value in message.items() if name not in BESIDE} for message in messages]


def first_said(messages: Sequence[Message]) -> int:
    """The number of the first message that is no system's; 0 where none is."""
    return next((number for number, message in enumerate(messages) if message["role"] != "system"), 0)
