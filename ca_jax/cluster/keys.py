"""Which conversation a request is of, as a key. What has the same key goes to the same replica.

    header   x-session-id                                    a name that clients and gateways give
    body     session_id, conversation                        the server's name of a conversation
    body     previous_response_id                            has that name in it
    path     /v1/sessions/{id}, /v1/conversations/{id}, /v1/responses/{id}, /live?session_id={id}   the same
    body     first messages of the system and of the user    a history: all its turns begin alike
    body     how a plain prompt begins

The first of these that a request has is its key. All others of a tenant have one, so that what is listed or measured is
of one replica. Keys tell nothing of what they were made of.

Not here: which replica a key is sent to (`choice`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import secrets
import urllib.parse
from collections.abc import Iterable
from typing import Any

from ca_jax.server.response_items import key_and_name

REPLICA_HEADER = "x-ca-jax-replica"
"""Of a request: the replica that must answer it, by its name. Of an answer: the one that did."""
REQUEST_ID = b"x-request-id"
"""Of an answer: Ray Serve says it there, and the server does."""

_SESSION_HEADER = b"x-session-id"
_SESSION_PATH = re.compile(r"/v1/(?:sessions|conversations)/([^/]+)(/.*)?")
_BEGINNINGS = ("/v1/sessions", "/v1/conversations")  # Where a conversation is begun without a turn.
_FORK_PATH = re.compile(r"/v1/sessions/[^/]+/fork")
_RESPONSE_PATH = re.compile(r"/v1/responses/([^/]+)(?:/.*)?")
# Paths whose bodies may have a key.
_READ = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/sessions"})
# By a field of a body, a path whose bodies have it. Those of the same field are read alike.
_TELLING = {
    "messages": "/v1/chat/completions",
    "input": "/v1/responses",
    "previous_response_id": "/v1/responses",
    "conversation": "/v1/responses",
    "prompt": "/v1/completions",
}
_PROMPT_CHARS = 256  # Of a plain prompt, or as many tokens: what follows is new with each request.
_TOLD = re.compile(rb'"session_id":\s*("(?:[^"\\]|\\.)*")')  # Quotes in a text are escaped, so no text looks so.
_TOLD_RESPONSE = re.compile(rb'"id":\s*"(resp_[A-Za-z0-9_-]+)"')


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys of one request."""

    key: str
    """What it is routed by."""
    tenant: str = ""
    """The server's name of whose it is."""
    names: tuple[str, ...] = ()
    """Those of the conversation's names: its holder may be asked for it by any of them."""
    is_bound: bool = False
    """Whether the holder alone can answer: the request names what it goes on with, and does not tell it."""


def keys_of(tenant: str, path: str, query: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> Keys:
    """The keys of a request.

    Args:
      tenant: the server's name of whose it is.
      path: of its URL.
      query: of its URL, as it was sent.
      headers: of it.
      body: all of it.
    """
    fields = _fields(body) if path in _READ else {}
    return _keys(tenant, path, query, headers, fields, has_body=bool(body))


def keys_of_body(headers: Iterable[tuple[bytes, bytes]], body: bytes) -> Keys:
    """The keys of a request with a body, of which no more is known: its fields tell what it asks for.

    They are those of no tenant, as `keys_of` gives them.
    """
    fields = _fields(body)
    path = next((path for field, path in _TELLING.items() if field in fields), "/v1/sessions")
    return _keys("", path, b"", headers, fields, has_body=True)


def _keys(
    tenant: str,
    path: str,
    query: bytes,
    headers: Iterable[tuple[bytes, bytes]],
    fields: dict[str, Any],
    *,
    has_body: bool,
) -> Keys:
    named = {name.lower().replace(b"_", b"-"): value.decode("latin-1") for name, value in headers}
    if replica := named.get(REPLICA_HEADER.encode()):
        return Keys(replica_key(replica), tenant, is_bound=True)
    names = (named.get(_SESSION_HEADER, ""), _name_in(path, query, fields))
    keys = tuple(dict.fromkeys(session_key(tenant, name) for name in names if name))
    if keys:
        return Keys(keys[0], tenant, keys, is_bound=bool(names[1]) and path not in _BEGINNINGS)
    if path in _BEGINNINGS and has_body:  # One that the server names. Its answer says how.
        return Keys(secrets.token_hex(8), tenant)
    return Keys(_key("begins", tenant, _beginning(path, fields)), tenant)


def session_key(tenant: str, name: str) -> str:
    """The key of a conversation of a name."""
    return _key("session", tenant, name)


def replica_key(name: str) -> str:
    """The key of a replica, which holds it."""
    return _key("replica", "", name)


def ends_conversation(method: str, path: str) -> bool:
    """Whether a request deletes a conversation, and not something in it."""
    return method == "DELETE" and (found := _SESSION_PATH.fullmatch(path)) is not None and not found[2]


def told_name(path: str, body: bytes) -> str | None:
    """The name of the conversation that an answer is of, where it says; by this a client may go on.

    Args:
      path: of the request.
      body: of the answer, from its beginning on.
    """
    if path == "/v1/chat/completions":
        found = _TOLD.search(body)
        name = json.loads(found[1]) if found else None
    elif path == "/v1/responses":
        found = _TOLD_RESPONSE.search(body)
        name = _name_of(found[1].decode()) if found else None
    else:
        begins = path in _BEGINNINGS or _FORK_PATH.fullmatch(path)
        name = _fields(body).get("id") if begins else None
    return name if isinstance(name, str) else None


def _name_in(path: str, query: bytes, fields: dict[str, Any]) -> str:
    """The server's name of a conversation that a request has; empty where it has none."""
    if path.startswith("/live"):
        return urllib.parse.parse_qs(query.decode("latin-1")).get("session_id", [""])[0]
    if path.startswith("/v1/responses"):
        found = _RESPONSE_PATH.fullmatch(path)
        response, named = found[1] if found else fields.get("previous_response_id"), fields.get("conversation")
        name = _name_of(response) or (named.get("id") if isinstance(named, dict) else named)
    else:
        found = _SESSION_PATH.fullmatch(path)
        name = found[1] if found else fields.get("session_id")
    return name if isinstance(name, str) else ""


def _name_of(response: Any) -> str | None:
    """The name of the conversation that a response is of; None where it is no id that was given here."""
    return (key_and_name(response)[1] or None) if isinstance(response, str) else None


def _fields(body: bytes) -> dict[str, Any]:
    """An object in JSON; nothing of what is none, which the server refuses."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _beginning(path: str, fields: dict[str, Any]) -> Any:
    """What all turns of a conversation begin with; None where nothing is said that they would."""
    if path == "/v1/completions":
        prompt = fields.get("prompt")
        first = prompt[0] if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else prompt
        return first[:_PROMPT_CHARS] if isinstance(first, str | list) else None
    messages = fields.get("input") if path == "/v1/responses" else fields.get("messages")
    begins = [each for each in (fields.get("instructions"), fields.get("system")) if each is not None]
    if isinstance(messages, str):
        return [*begins, messages]
    for each in messages if isinstance(messages, list) else ():
        role = each.get("role") if isinstance(each, dict) else None
        if role in ("system", "developer", "user"):
            begins.append(each.get("content"))
        if role == "user":
            return begins
    return None


def _key(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]
