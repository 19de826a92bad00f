"""Tokens to text as they come, and text to tokens off the engine's thread.

Templates and tokenizers take a millisecond for each few thousand characters, in which nobody decodes. What asks for
more than that under the engine's lock is stopped by a `TextWork`: the caller does the work elsewhere, and asks again.
By then what is asked for may be something else (a conversation has moved on): then that is work too.

Not here: templates and tokenizers themselves (serving.prompts, models).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar


class TokenStream(Protocol):
    """What turns ids into text piece by piece (`models.tokenizer.TokenStream`)."""

    def push(self, token_id: int) -> str:
        """Takes an id and returns the text that is certain now."""

    def flush(self) -> str:
        """Returns what was held back."""


class TextOutput:
    """The text of one answer as it grows; holds back what may turn out to begin a stop string.

    Args:
      stream: detokeniser, or None where there is no tokenizer: the text is then empty.
      min_tokens: first tokens in whose text they are not looked for.
    """

    def __init__(self, stream: TokenStream | None, stop: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        self._stream = stream
        self._stop = stop
        self._num_exempt = min_tokens
        self._held = ""
        self.text = ""
        """All text given out so far."""
        self.stopped = False
        """Whether a stop string was met."""

    def push(self, token_id: int) -> str:
        """Takes a token and returns the text that can be shown."""
        if self._num_exempt and self._stream is not None:
            self._num_exempt -= 1
            shown = self._stream.push(token_id)
            self.text += shown
            return shown
        return self._give(self._stream.push(token_id)) if self._stream is not None and not self.stopped else ""

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
        ends = [at for at in (pending.find(stop) for stop in self._stop) if at >= 0]
        if ends:
            self.stopped = True
            shown, self._held = pending[: min(ends)], ""
        else:
            keep = max((_overlap(pending, stop) for stop in self._stop), default=0)
            shown, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        self.text += shown
        return shown


def _overlap(text: str, stop: str) -> int:
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

        Args:
          num_chars: of text that it works on.
          *args: its arguments.

        Raises:
          TextWork: it is not known yet, and is too much to be done at once.
          Exception: whatever the function raises.
        """
        for known, its_args, result in self._known:
            if known == function and its_args == args:
                return result
        if num_chars <= LIGHT_CHARS:
            return function(*args)
        raise TextWork(functools.partial(self._do, function, args))

    def _do(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._known.append((function, args, function(*args)))
