"""A response as OpenAI describes it: the object, its items, what is told and kept of it.

Not here: requests (`response_bodies`), events of a stream (`response_events`).
Source: OpenAI's API reference (Response, OutputItem, ResponseItemList).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import fastapi

from ca_jax.server.errors import ApiError
from ca_jax.server.reply_blocks import Block, Kind
from ca_jax.session import Job
from ca_jax.turns.conversations import Message
from ca_jax.turns.requests import FinishReason

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


def blocks_of(message: Message) -> list[Block]:
    """A whole answer as blocks."""
    told: list[tuple[Kind, str, str, str]] = []
    if "reasoning_content" in message:
        told.append(("reasoning", message["reasoning_content"], "", ""))
    calls = message.get("tool_calls", ())
    if message["content"] or not (calls or told):
        told.append(("content", message["content"], "", ""))
    for call in calls:
        told.append(("call", call["function"]["arguments"], call["id"], call["function"]["name"]))
    return [Block(kind, number, call_id, name, text) for number, (kind, text, call_id, name) in enumerate(told)]


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
