"""Generated tokens to text, with stop strings.

Not here: detokenising (`models.tokenizer`), stop tokens (engine).
"""

from __future__ import annotations

from typing import Protocol


class TokenStream(Protocol):
    """What turns ids into text piece by piece (`models.tokenizer.TokenStream`)."""

    def push(self, token_id: int) -> str:
        """Takes an id and returns the text that is certain now."""
        ...

    def flush(self) -> str:
        """Returns what was held back."""
        ...


class TextOutput:
    """The text of one answer as it grows; holds back what may turn out to begin a stop string.

    Args:
      stream: detokeniser, or None where there is no tokenizer: the text is then empty.
      stop: strings that end the answer; they are not part of it.
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
