"""A response as OpenAI describes it: its id, the object, its items, what is told and kept of it, its events.

An id has a key of its own, and the name of the conversation that the response is a turn of.

Not here: requests (`response_bodies`, `response_routes`), what is found by an id (`places`).
Source: OpenAI's API reference (Response, OutputItem, ResponseItemList, ResponseStreamEvent).
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import itertools
import secrets
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import fastapi

from ca_jax.server.answering import Block, Kind, Step, blocks_of
from ca_jax.server.errors import ApiError
from ca_jax.session import Job
from ca_jax.turns.conversations import Message
from ca_jax.turns.requests import FinishReason

_PREFIX = "resp_"
_KEY_BYTES = 12
_EVENTS_OF = {"content": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
_ID_OF: dict[Kind, str] = {"reasoning": "rs", "content": "msg", "call": "fc"}
_Body = dict[str, Any]
Limit = Annotated[int, fastapi.Query(ge=1, le=100, description="Most of them.")]
Order = Annotated[Literal["asc", "desc"], fastapi.Query(description="desc: the newest first.")]
After = Annotated[str | None, fastapi.Query(max_length=64, description="The id behind which they begin.")]


def status_of(reason: FinishReason) -> _Body:
    """How a response ended, as it is kept and told."""
    if reason is FinishReason.LENGTH:
        return {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return {"status": "completed" if reason is FinishReason.STOP else "cancelled"}


def usage_of(job: Job) -> _Body:
    """Tokens that a response took."""
    usage = job.usage()
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def output_text(text: str, logprobs: list[_Body] | None = None) -> _Body:
    """Text of an answer."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def item_of(key: str, block: Block, status: str, logprobs: list[_Body] | None = None) -> _Body:
    """A block of an answer as an item.

    Args:
      key: the response's.
      block: of its answer, as far as it is there.
      status: `in_progress`, or how the response has ended.
      logprobs: of its tokens.
    """
    state = status if status in ("completed", "in_progress") else "incomplete"
    has_begun = bool(block.text) or status != "in_progress"
    if block.kind == "reasoning":
        content = [{"type": "reasoning_text", "text": block.text}] if has_begun else []
        return {"type": "reasoning", "id": item_id(key, block), "status": state, "summary": [], "content": content}
    if block.kind == "call":
        call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
        is_cut = not block.is_whole and status != "in_progress"
        return {"type": "function_call", "id": item_id(key, block), "status": "incomplete" if is_cut else state, **call}
    content = [output_text(block.text, logprobs)] if has_begun else []
    return {"type": "message", "id": item_id(key, block), "status": state, "role": "assistant", "content": content}


def item_id(key: str, block: Block) -> str:
    """Of an item, of a response's key."""
    return f"{_ID_OF[block.kind]}_{key}_{block.number}"


def items_of(key: str, message: Message, status: str, logprobs: list[_Body] | None = None) -> list[_Body]:
    """A whole answer as items."""
    whole = "completed" if message.get("tool_calls") else status  # Calls that were cut are not told.
    return [item_of(key, each, whole if each.kind == "call" else status, logprobs) for each in blocks_of(message)]


def response_object(response_id: str, kept: _Body, output: list[_Body]) -> _Body:
    """A response as OpenAI describes it.

    Args:
      response_id: its id.
      kept: what is kept of it: fields that say something, `told`, `status_of` and `usage` among them.
      output: its answer, if there is one.
    """
    return {
        "id": response_id,
        "object": "response",
        "background": False,
        "completed_at": None,
        "conversation": None,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "service_tier": "default",
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        **kept,
        "output": output,
    }


def input_items(key: str, number: int, message: Message) -> list[_Body]:
    """A message that a response was given, as items: their ids are of the response and of the message's number."""
    return items_of_message(f"{key}_{number}", message)


def items_of_message(own: str, message: Message) -> list[_Body]:
    """A message of anybody as items, in whose ids `own` stands for it."""
    if message["role"] == "assistant":
        return items_of(own, message, "completed")
    if message["role"] == "tool":
        output = {"call_id": message.get("tool_call_id", ""), "output": message["content"]}
        return [{"type": "function_call_output", "id": f"fco_{own}", "status": "completed", **output}]
    content = [{"type": "input_text", "text": message["content"]}]
    return [{"type": "message", "id": f"msg_{own}", "status": "completed", "role": message["role"], "content": content}]


def tools_of(messages: Sequence[Message]) -> list[_Body]:
    """The tools of a conversation, as responses tell them."""
    tools: list[_Body] = next((message["tools"] for message in messages if "tools" in message), [])
    return [{"type": "function", "parameters": None, "strict": None, **tool["function"]} for tool in tools]


def page_of(items: Sequence[_Body], limit: int, order: str, after: str | None) -> _Body:
    """A page of items, which are in the order in which they were said.

    Args:
      limit: most of them.
      order: `asc`, or `desc`: the newest first.
      after: the id behind which they begin; None: all.

    Raises:
      ApiError: no item has that id (404).
    """
    items = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise ApiError(404, f"after must be the id of an item, got {after!r}", param="after", code="item_not_found")
    start = 0 if after is None else ids.index(after) + 1
    page = list(items[start : start + limit])
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": "", "last_id": ""}
    return {"object": "list", "data": page, "has_more": start + limit < len(items), **ends}


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
        """The last one."""
        status = response["status"]
        return self.event(status if status in ("completed", "failed") else "incomplete", response=response)

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
