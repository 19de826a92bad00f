"""The texts of a turn: tokens to text as they come, text to tokens off the engine's thread, and texts cut into chunks.

Templates and tokenizers take a millisecond for each few thousand characters, in which nobody decodes. What asks for
more than that under the engine's lock is stopped by a `TextWork`: the caller does the work elsewhere, and asks again.
By then what is asked for may be something else (a conversation has moved on): then that is work too.

Chunks are reusable passages, whose KV is computed by itself and used wherever in a prompt they come. Chunks of text are
tokenised each alone, so that one is the same tokens wherever it stands:

    tokens     h h h h | a a a a a a | b b b b | a a a a a a | q q q q        h template, a and b chunks, q question
    ChunkSpan            start 4, 6    10, 4     14, 6

Not here: templates and tokenizers themselves (serving.prompts, models), the KV of chunks (kv.chunk_kv, recompute).
Source: CacheBlend (Yao et al., EuroSys 2025), section 5.1, KV cache store.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ca_jax.errors import EmptyMessageError, InvalidRequestError, check
from ca_jax.turns.conversations import Message

if TYPE_CHECKING:
    from ca_jax.models.tokenizer import TokenStream


class ReplyReader(Protocol):
    """Tells what of an answer's text is said, and what is something else: a call of a tool, say. Immutable."""

    spelled: frozenset[str]
    """Special tokens whose names are part of the text that it reads."""

    def message(self, text: str, *, is_whole: bool) -> Message:
        """The assistant's message that a text is.

        Args:
          text: all of the answer.
          is_whole: whether the answer ended by itself; else it was cut short.
        """


class TextOutput:
    """The text of one answer as it grows; holds back what may turn out to begin a stop string.

    Args:
      stream: detokeniser, or None where there is no tokenizer: the text is then empty.
      min_tokens: first tokens in whose text stop strings are not looked for.
      reader: tells what of the text is what; None: all of it is said.
    """

    def __init__(
        self,
        stream: TokenStream | None,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        reader: ReplyReader | None = None,
    ) -> None:
        self.reader = reader
        """Tells what of the text is what."""
        self._stream = stream
        self._stop = stop
        self._num_exempt = min_tokens
        self._held = ""
        self.text = ""
        """All text given out so far."""
        self.stopped_by: str | None = None
        """The stop string that was met."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met."""
        return self.stopped_by is not None

    def push(self, token_id: int) -> str:
        """Takes a token and returns the text that can be shown."""
        if self._stream is None or self.stopped:
            return ""
        shown = self._stream.push(token_id)
        if not self._num_exempt:
            return self._give(shown)
        self._num_exempt -= 1
        self.text += shown
        return shown

    def message(self, *, is_whole: bool) -> Message:
        """The message that the text is; `is_whole`: the answer ended by itself."""
        if self.reader is None:
            return {"role": "assistant", "content": self.text}
        return self.reader.message(self.text, is_whole=is_whole)

    def finish(self) -> str:
        """Returns the rest, at the end of the answer."""
        if self._stream is None or self.stopped:
            return ""
        shown = self._give(self._stream.flush())
        rest, self._held = self._held, ""
        self.text += rest
        return shown + rest

    def _give(self, piece: str) -> str:
        pending = self._held + piece
        ends = [(at, stop) for at, stop in ((pending.find(stop), stop) for stop in self._stop) if at >= 0]
        if ends:
            end, self.stopped_by = min(ends)
            shown, self._held = pending[:end], ""
        else:
            keep = max((overlap(pending, stop) for stop in self._stop), default=0)
            shown, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        self.text += shown
        return shown


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


LIGHT_CHARS = 4096
"""Most characters that are worked on at once: half a millisecond, which a hop to another thread takes too."""
MESSAGE_CHARS = 32
"""What rendering one earlier message counts for."""
T = TypeVar("T")


def num_chars(texts: Sequence[str | Sequence[int]]) -> int:
    """Characters in texts, some of which may be token ids already."""
    return sum(len(text) for text in texts if isinstance(text, str))


class TextWork(Exception):
    """Work that is to be done before what was asked for is asked for again.

    Args:
      do: does it; any thread may call it, once. What it raises is what is wrong with the text.
    """

    def __init__(self, do: Callable[[], None]) -> None:
        super().__init__("text is to be made token ids elsewhere")
        self.do = do


class Texts:
    """What functions gave for the texts of one request. For one thread at a time."""

    def __init__(self) -> None:
        self._known: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = []

    def get(self, num_chars: int, function: Callable[..., T], *args: Any) -> T:
        """What a function gives for these arguments, which must be all that it depends on.

        Raises `TextWork` where that is not known yet and `num_chars` of text are too many to be worked on at once.
        """
        for known, its_args, result in self._known:
            if known == function and its_args == args:
                return result
        if num_chars <= LIGHT_CHARS:
            return function(*args)
        raise TextWork(functools.partial(self._do, function, args))

    def _do(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._known.append((function, args, function(*args)))


# Chunks.

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
    is_exact: bool = False
    """Whether all that stands before it in the prompt is what its KV was computed behind."""
    first: int | None = None
    """Where in the session whose KV `key` names it begins; None: it was computed alone, and is all that is there."""

    def __post_init__(self) -> None:
        if self.start < 0 or self.num_tokens < 1:
            found = f"{self.num_tokens} from {self.start} on"
            raise ValueError(f"a chunk must be at least 1 token from place 0 on, got {found}")

    @property
    def stop(self) -> int:
        """The place behind its last token."""
        return self.start + self.num_tokens

    def shifted(self, num_tokens: int) -> ChunkSpan:
        """The same chunk so many tokens further on; before, where that is negative. ValueError before the prompt."""
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
    check(num_tokens >= 1, "chunks", "at least 1 token", num_tokens, InvalidRequestError)
    if not len(token_ids):
        raise EmptyMessageError("a chunk must have at least one token, got none")
    return [list(token_ids[start : start + num_tokens]) for start in range(0, len(token_ids), num_tokens)]
