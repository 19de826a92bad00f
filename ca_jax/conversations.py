"""Conversations as bytes, so that a store can keep them beside their KV and another process can go on with them.

Not here: sessions (session), where the bytes are kept (storage).
"""

from __future__ import annotations

import dataclasses
import json
import zlib

_FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """All that a session knows, but for its KV."""

    token_ids: list[int]
    """The conversation as the model saw it."""
    messages: list[dict[str, str]]
    """The conversation as text, oldest first."""
    turn_starts: list[tuple[int, int]]
    """Tokens and messages there were before each turn."""

    def to_bytes(self) -> bytes:
        """As compressed JSON."""
        return zlib.compress(json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}).encode(), level=1)

    @classmethod
    def from_bytes(cls, data: bytes) -> Conversation:
        """What `to_bytes` gave.

        Raises:
          ValueError: the bytes are others, or of another version.
        """
        try:
            fields = json.loads(zlib.decompress(data))
            if fields["format"] != _FORMAT:
                raise ValueError(f"wanted a conversation of format {_FORMAT}, found {fields['format']!r}")
            return cls(
                token_ids=[int(token) for token in fields["token_ids"]],
                messages=[{"role": str(m["role"]), "content": str(m["content"])} for m in fields["messages"]],
                turn_starts=[(int(tokens), int(messages)) for tokens, messages in fields["turn_starts"]],
            )
        except (zlib.error, KeyError, TypeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
            raise ValueError(f"wanted a conversation, found {len(data)} other bytes: {error}") from error
