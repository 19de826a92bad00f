"""Conversations that replicas share, as a request finds them: asked of their store, never on the engine's thread.

Not here: conversations that this replica has (router), the store itself (`storage.objects`).
"""

from __future__ import annotations

import contextlib
import dataclasses

from ca_jax.engine import Engine
from ca_jax.storage.objects.manifest import Manifest
from ca_jax.storage.objects.store import ObjectsError
from ca_jax.turns.conversations import Conversation
from ca_jax.turns.text import LIGHT_CHARS, Texts

_AWAY = LIGHT_CHARS + 1  # Of so many characters `Texts` never lets the engine's thread do the work.


@dataclasses.dataclass(frozen=True)
class Theirs:
    """What is published of a conversation that is not held here."""

    is_known: bool = True
    """Whether it could be found out."""
    owner: str = ""
    """The replica whose it is; "": nothing is published, or this one holds it."""
    conversation: Conversation | None = None


def claim(engine: Engine, name: str, tenant: str, texts: Texts) -> bool:
    """Has an engine own a conversation that another replica may have; False: it cannot be found out whether one has.

    Raises:
      TextWork: it is to be asked elsewhere.
    """
    return True if engine.elsewhere is None else texts.get(_AWAY, _claimed, engine, name, tenant)


def theirs(engine: Engine, name: str, tenant: str, texts: Texts) -> Theirs:
    """What is published of a conversation. Raises as `claim`."""
    return Theirs() if engine.elsewhere is None else texts.get(_AWAY, _theirs, engine, name, tenant)


def published(engine: Engine, tenant: str, chain: str, texts: Texts) -> Manifest | None:
    """What some replica published where a history ends; None where nothing is known of it. Raises as `claim`."""
    return None if engine.elsewhere is None else texts.get(_AWAY, _published, engine, tenant, chain)


def said_in(manifest: Manifest) -> Conversation | None:
    """The conversation that was published; None where there is none, or one that this release cannot read."""
    with contextlib.suppress(ValueError):
        return None if manifest.conversation is None else Conversation.from_bytes(manifest.conversation)
    return None


def no_answer() -> ObjectsError:
    """The error where it cannot be found out what others have."""
    return ObjectsError("the store of shared sessions must answer in time, and did not")


def _claimed(engine: Engine, name: str, tenant: str) -> bool:
    with contextlib.suppress(ObjectsError):
        if engine.elsewhere is not None:
            engine.elsewhere.claim(name, tenant)
        return True
    return False


def _theirs(engine: Engine, name: str, tenant: str) -> Theirs:
    with contextlib.suppress(ObjectsError):
        if engine.elsewhere is None or (found := engine.elsewhere.theirs(name, tenant)) is None:
            return Theirs()
        return Theirs(owner=found.owner, conversation=said_in(found))
    return Theirs(is_known=False)


def _published(engine: Engine, tenant: str, chain: str) -> Manifest | None:
    with contextlib.suppress(ObjectsError):
        return None if engine.elsewhere is None else engine.elsewhere.look_up(tenant, chain)
    return None
