"""An answer as blocks, one behind the other: what is thought, what is said, each call of a tool; as they come.

    reasoning | content | call 0 | call 1       each begins, gets text, and ends before the next begins

Not here: how a model writes them (`tool_calls`), how an API tells them (`response_routes`, `message_routes`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from ca_jax.server.tool_calls import ReplyDelta, parser_of
from ca_jax.session import Job
from ca_jax.turns.requests import FinishReason

Kind = Literal["reasoning", "content", "call"]
Step = Literal["begin", "text", "end"]


@dataclasses.dataclass
class Block:
    """One of an answer's."""

    kind: Kind
    number: int
    """Its place among them."""
    call_id: str = ""
    """Of a call: what names it."""
    name: str = ""
    """Of a call: the function."""
    text: str = ""
    """So far; of a call its arguments."""
    is_whole: bool = True
    """Of a call: whether it was not cut."""


class BlockReader:
    """Reads one answer. What is thought or said of it begins a block if it is no more of the one before."""

    def __init__(self, job: Job) -> None:
        self._job, self._parser = job, parser_of(job)
        self._open: Block | None = None
        self._num_begun = 0
        self.has_calls = False
        """Whether a whole call came."""

    def feed(self, text: str, is_last: bool) -> Iterator[tuple[Step, Block, str]]:
        """Takes a piece of the answer, possibly its last one; what each block does with it, with its new text."""
        yield from self._take(self._parser.feed(text))
        if is_last:
            is_whole = self._job.finish_reason is FinishReason.STOP
            yield from self._take(self._parser.finish(is_whole))
            if self._num_begun == 0:
                yield from self._put("content", "", "")
            yield from self._end()

    def _take(self, delta: ReplyDelta) -> Iterator[tuple[Step, Block, str]]:
        if delta.reasoning:
            yield from self._put("reasoning", delta.reasoning, "")
        if delta.content:
            yield from self._put("content", delta.content, "")
        for call in delta.calls:
            yield from self._put("call", call.arguments, call.call_id, call.name)
            if call.is_whole and self._open is not None:
                self._open.is_whole = self.has_calls = True
                yield from self._end()

    def _put(self, kind: Kind, text: str, call_id: str, name: str = "") -> Iterator[tuple[Step, Block, str]]:
        if self._open is None or (self._open.kind, self._open.call_id) != (kind, call_id):
            yield from self._end()
            self._open = Block(kind, self._num_begun, call_id, name, is_whole=kind != "call")
            self._num_begun += 1
            yield "begin", self._open, ""
        self._open.text += text
        if text:
            yield "text", self._open, text

    def _end(self) -> Iterator[tuple[Step, Block, str]]:
        block, self._open = self._open, None
        if block is not None:
            yield "end", block, ""
