"""Ids of responses. Each has a key of its own, and the name of the conversation that it is a turn of.

Not here: what is found by them (`places`).
"""

from __future__ import annotations

import base64
import binascii
import secrets

_PREFIX = "resp_"
_KEY_BYTES = 12


def new_key() -> str:
    """A response's own part of its id."""
    return secrets.token_hex(_KEY_BYTES)


def response_id(key: str, name: str) -> str:
    """The id of a response of a conversation; of none that is kept where the name is empty."""
    return f"{_PREFIX}{key}{base64.urlsafe_b64encode(name.encode()).decode().rstrip('=')}"


def key_and_name(response: str) -> tuple[str, str]:
    """A response's key, and the name of its conversation; both empty where it is no id that was given here."""
    key, name = response[len(_PREFIX) :][: 2 * _KEY_BYTES], response[len(_PREFIX) + 2 * _KEY_BYTES :]
    try:
        found = base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode()
    except (binascii.Error, ValueError):
        return "", ""
    return (key, found) if response_id(key, found) == response else ("", "")
