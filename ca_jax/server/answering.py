"""What answers of all APIs have in common: how they begin and end, their blocks, how likely tokens were, events.

One request for answers goes from its admission to its end, and is given whole, as a stream of events, or in the
background. An answer is blocks, one behind the other, which come piece by piece:

    reasoning | content | call 0 | call 1       each begins, gets text, and ends before the next begins

Not here: what is asked, and how an API tells it (the routes), who is admitted (`service`), how a model writes calls
(`tool_calls`).
Source: OpenAI's API reference (CreateCompletionResponse, ChatCompletionTokenLogprob); vLLM (`prompt_logprobs`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Literal

import fastapi
from asgi_correlation_id import correlation_id
from fastapi.responses import JSONResponse, Response

from ca_jax.models.tokenizer import Tokenizer
from ca_jax.server.engine_loop import Feed, Part
from ca_jax.server.errors import ApiError, as_api_error
from ca_jax.server.observing import note_error
from ca_jax.server.service import Service
from ca_jax.server.state import EventStream, while_connected
from ca_jax.server.tenants import Tenant
from ca_jax.server.tool_calls import ReplyDelta, parser_of
from ca_jax.session import Job
from ca_jax.turns.conversations import Message
from ca_jax.turns.requests import FinishReason, TokenLogprob

_LOG = logging.getLogger(__name__)
_Body = dict[str, Any]
Kind = Literal["reasoning", "content", "call"]
Step = Literal["begin", "text", "end"]
Events = Callable[[Feed, float | None], AsyncIterator[str]]
"""The events of answers that are being generated, until seconds of the event loop's clock."""


@dataclasses.dataclass(frozen=True)
class Answering:
    """A request whose answers are about to be begun. Belongs to the event loop.

    Raises:
      ApiError: its tenant may not have so many answers, by each way to give them.
      CaJaxError: the answers cannot be begun, likewise.
    """

    service: Service
    tenant: Tenant
    begun: contextlib.AbstractAsyncContextManager[Feed]
    """Begins the answers, and ends them with the block."""
    timeout_s: float | None
    """How long it may take; None: as long as the server lets it."""
    num_answers: int = 1
    priority: int | None = None

    async def whole(
        self, request: fastapi.Request, tell: Callable[[Feed, Sequence[Part]], dict[str, Any]]
    ) -> JSONResponse:
        """The answers when they have ended, as a function tells them. They end if the client goes away."""
        with self._admitted():
            return JSONResponse(await while_connected(request, self._ended(tell)))

    async def streamed(self, events: Events) -> Response:
        """The answers as they come. What is wrong with the request is a status: they are begun before the stream is."""
        async with contextlib.AsyncExitStack() as stack:
            feed, until_s = await self.begin(stack)
            return EventStream(events(feed, until_s), stack.pop_all(), until_s)

    async def begin(self, stack: contextlib.AsyncExitStack) -> tuple[Feed, float | None]:
        """Begins the answers, which end with a stack; and when they must have ended, by the event loop's clock."""
        stack.enter_context(self._admitted())
        async with self.service.deadline(self.timeout_s) as deadline:
            feed = await stack.enter_async_context(self.begun)
        return feed, deadline.when()

    def _admitted(self) -> contextlib.AbstractContextManager[None]:
        return self.service.admission.answering(self.tenant, self.num_answers, self.priority)

    async def _ended(self, tell: Callable[[Feed, Sequence[Part]], dict[str, Any]]) -> dict[str, Any]:
        try:
            async with self.service.deadline(self.timeout_s), self.begun as feed:
                parts = [part async for part in feed.parts()]
        except Exception as error:
            raise reported(error) from error
        return tell(feed, parts)


def event(body: _Body, name: str | None = None) -> str:
    """An event of a stream, of a name where its API names them."""
    return f"data: {json.dumps(body)}\n\n" if name is None else f"event: {name}\ndata: {json.dumps(body)}\n\n"


def event_begins(body: _Body) -> str:
    """An event of a stream up to where fields follow that differ from event to event; `body` must have a field."""
    return f"data: {json.dumps(body)[:-1]}, "


def event_ends(body: _Body) -> str:
    """The rest of such an event; `body` must have a field."""
    return f"{json.dumps(body)[1:]}\n\n"


def reported(error: Exception) -> ApiError:
    """The error that a client gets for what broke its answer; more of it is in the log."""
    api_error = as_api_error(error)
    note_error(api_error.code, api_error.status_code)
    if api_error.status_code >= 500:
        _LOG.error("an answer broke (%s)", correlation_id.get(), exc_info=error)
    return api_error


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """A token's text; its bytes where they are no text by themselves, as OpenAI writes them."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    raw = tokenizer.token_bytes(token_id)
    try:
        return tokenizer.token_text(token_id) if raw is None else raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw or b"")


def described(tokenizer: Tokenizer | None, token: TokenLogprob) -> _Body:
    """How likely a token was, and others in its place, as chats tell it."""

    def one(token_id: int, logprob: float) -> _Body:
        raw = None if tokenizer is None else tokenizer.token_bytes(token_id)
        text = token_text(tokenizer, token_id)
        return {"token": text, "logprob": logprob, "bytes": None if raw is None else list(raw)}

    return {**one(token.token_id, token.logprob), "top_logprobs": [one(*each) for each in token.top]}


def listed(tokenizer: Tokenizer | None, tokens: Sequence[TokenLogprob], offsets: Sequence[int], num_top: int) -> _Body:
    """How likely tokens were, as plain completions tell it.

    Args:
      offsets: where the text of each begins.
      num_top: how many of the likeliest are told.
    """
    tops = ([(token_id, lp) for token_id, lp in token.top[:num_top]] for token in tokens)
    return {
        "tokens": [token_text(tokenizer, token.token_id) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{token_text(tokenizer, token_id): lp for token_id, lp in top} for top in tops],
        "text_offset": list(offsets),
    }


def echoed(tokenizer: Tokenizer | None, job: Job, num_top: int) -> _Body:
    """How likely the tokens of a prompt were, likewise; nothing is said of those of which nothing was asked."""
    known, texts = _with_none(job), [token_text(tokenizer, token_id) for token_id in _prompt_ids(job)]
    tops = [None if each is None else dict([*each.top[:num_top], (each.token_id, each.logprob)]) for each in known]
    return {
        "tokens": texts,
        "token_logprobs": [None if each is None else each.logprob for each in known],
        "top_logprobs": [top and {token_text(tokenizer, token_id): lp for token_id, lp in top.items()} for top in tops],
        "text_offset": list(itertools.accumulate(map(len, texts[:-1]), initial=0)),
    }


def prompt_logprobs(tokenizer: Tokenizer | None, job: Job, num_top: int) -> list[_Body | None]:
    """How likely the tokens of a prompt were, as vLLM tells it: by id. A rank is told of the likeliest alone."""

    def one(each: TokenLogprob) -> _Body:
        found: dict[int, tuple[float, int | None]] = {
            token_id: (lp, rank) for rank, (token_id, lp) in enumerate(each.top[:num_top], 1)
        }
        found.setdefault(each.token_id, (each.logprob, None))
        return {
            str(token_id): {"logprob": lp, "rank": rank, "decoded_token": token_text(tokenizer, token_id)}
            for token_id, (lp, rank) in found.items()
        }

    return [None if each is None else one(each) for each in _with_none(job)]


def _prompt_ids(job: Job) -> list[int]:
    return [*job.slid_ids, *job.prompt_ids]


def _with_none(job: Job) -> list[TokenLogprob | None]:
    """Of each token of a prompt, its first one too."""
    return [*[None] * (job.num_prompt_tokens - len(job.prompt_logprobs)), *job.prompt_logprobs]


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
