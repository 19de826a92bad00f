"""Events of a response, as it is generated and as it is told again.

Not here: the response itself (`response_items`), requests for one (`response_routes`).
Source: OpenAI's API reference (ResponseStreamEvent).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from ca_jax.server.reply_blocks import Block, Step
from ca_jax.server.response_items import blocks_of, item_id, item_of, output_text
from ca_jax.turns.conversations import Message

_EVENTS_OF = {"content": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
_Body = dict[str, Any]


class ResponseEvents:
    """Makes the events of one response, numbered in the order in which they are made.

    Args:
      key: the response's own part of its id.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._numbers = itertools.count()

    def event(self, kind: str, **fields: Any) -> _Body:
        """The next one."""
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers), **fields}

    def ended(self, response: _Body) -> _Body:
        """The last one, of a response that has not failed."""
        return self.event("completed" if response["status"] == "completed" else "incomplete", response=response)

    def of_block(self, step: Step, block: Block, text: str, logprobs: Sequence[_Body] = ()) -> Iterator[_Body]:
        """Those of what happens to a block of the answer.

        Args:
          step: what happens.
          block: as far as it is there.
          text: what is new of it.
          logprobs: of the tokens of that; at its end, of all.
        """
        at: _Body = {"item_id": item_id(self._key, block), "output_index": block.number}
        is_call, has_ended = block.kind == "call", step == "end"
        if not is_call:
            at["content_index"] = 0
        kind = _EVENTS_OF[block.kind]
        likely = {"logprobs": list(logprobs)} if block.kind == "content" else {}
        part = (
            output_text(block.text, list(logprobs) if has_ended else None)
            if likely
            else {"type": "reasoning_text", "text": block.text}
        )
        if step == "text":
            yield self.event(f"{kind}.delta", **at, delta=text, **likely)
            return
        if has_ended:
            done = {"arguments": block.text, "name": block.name} if is_call else {"text": block.text}
            yield self.event(f"{kind}.done", **at, **done, **likely)
            if not is_call:
                yield self.event("content_part.done", **at, part=part)
        item = item_of(self._key, block, "completed" if has_ended else "in_progress")
        yield self.event(f"output_item.{'done' if has_ended else 'added'}", output_index=block.number, item=item)
        if not has_ended and not is_call:
            yield self.event("content_part.added", **at, part=part)


def replayed(key: str, response: _Body, answer: Message) -> Iterator[_Body]:
    """The events of a response that is kept: each block of its answer comes as one piece.

    Args:
      key: its own part of its id.
      response: as it has ended.
      answer: the message that it is.
    """
    events = ResponseEvents(key)
    begun = {**response, "status": "in_progress", "output": [], "completed_at": None, "incomplete_details": None}
    begun.pop("usage", None)
    yield events.event("created", response=begun)
    yield events.event("in_progress", response=begun)
    for block in blocks_of(answer):
        yield from events.of_block("begin", dataclasses.replace(block, text=""), "")
        if block.text:
            yield from events.of_block("text", block, block.text)
        yield from events.of_block("end", block, "")
    yield events.ended(response)
