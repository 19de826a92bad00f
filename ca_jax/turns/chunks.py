"""Chunks of a prompt: reusable passages of text, whose KV is computed alone and used wherever in a prompt they come.

A text becomes chunks at a separator or every so many tokens, or its caller has cut it. Chunks of text are tokenised
each alone, so that one is the same tokens wherever it stands:

    tokens     h h h h | a a a a a a | b b b b | a a a a a a | q q q q        h template, a and b chunks, q question
    ChunkSpan            start 4, 6    10, 4     14, 6

Not here: tokenising them (prompts), whether their KV is stored (engine), how it is used (blend_config, fusion).
Source: CacheBlend (Yao et al., EuroSys 2025), section 5.1, KV cache store.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ca_jax.errors import EmptyMessageError, InvalidRequestError

CHUNK_END = "\n\n"
"""What is put behind a text that is a chunk and does not end in a line break, so that the next one begins a line."""


@dataclasses.dataclass(frozen=True)
class ChunkSpan:
    """One chunk of a prompt: which, and where it lies.

    Raises:
      ValueError: a negative start, or no tokens.
    """

    key: str
    """Of its KV in the store."""
    start: int
    """Place of its first token in the prompt."""
    num_tokens: int
    """How many it has, at least 1."""

    def __post_init__(self) -> None:
        if self.start < 0 or self.num_tokens < 1:
            raise ValueError(
                f"a chunk must be at least 1 token from place 0 on, got {self.num_tokens} from {self.start} on"
            )

    @property
    def stop(self) -> int:
        """The place behind its last token."""
        return self.start + self.num_tokens

    def shifted(self, num_tokens: int) -> ChunkSpan:
        """The same chunk so many tokens further on; before, where that is negative.

        Raises:
          ValueError: it would begin before the prompt.
        """
        return dataclasses.replace(self, start=self.start + num_tokens)


def chunk_text(text: str) -> str:
    """A chunk's text as it is tokenised: with `CHUNK_END` behind it, unless it ends in a line break."""
    return text if text.endswith("\n") else text + CHUNK_END


def split_text(text: str, separator: str) -> list[str]:
    """The pieces of a text between separators, blank ones left out.

    Line breaks around a piece are dropped, so that a passage is the same chunk wherever in a text it stands.

    Raises:
      InvalidRequestError: the separator is empty.
      EmptyMessageError: the text has no piece that is not blank.
    """
    if not separator:
        raise InvalidRequestError("the separator of chunks must be at least one character, got an empty one")
    pieces = [piece.strip("\r\n") for piece in text.split(separator) if piece.strip()]
    if not pieces:
        raise EmptyMessageError("a text must have at least one chunk in it, got a blank one")
    return pieces


def split_tokens(token_ids: Sequence[int], num_tokens: int) -> list[list[int]]:
    """Pieces of so many tokens each, the last one of what is left.

    Raises:
      InvalidRequestError: `num_tokens` below 1.
      EmptyMessageError: there are no tokens.
    """
    if num_tokens < 1:
        raise InvalidRequestError(f"chunks must be at least 1 token, got {num_tokens}")
    if not len(token_ids):
        raise EmptyMessageError("a chunk must have at least one token, got none")
    return [list(token_ids[start : start + num_tokens]) for start in range(0, len(token_ids), num_tokens)]
