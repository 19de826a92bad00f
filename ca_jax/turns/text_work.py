"""Text to token ids for the engine, without its lock and off its thread.

Templates and tokenizers take a millisecond for each few thousand characters, in which nobody decodes. What asks for
more than that under the engine's lock is stopped by a `TextWork`: whoever called does the work elsewhere, and asks
again. By then what is asked for may be something else (a conversation has moved on): then that is work too.

Not here: templates and tokenizers (prompts), who does the work (engine, server.service).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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
          function: which.
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
