"""What answers of several APIs have in common: tokens and how likely they were, events of a stream, errors in one.

Not here: the answers themselves (`openai_routes`, `response_routes`, `message_routes`).
Source: OpenAI's API reference (CreateCompletionResponse, ChatCompletionTokenLogprob); vLLM (`prompt_logprobs`).
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Sequence
from typing import Any

from asgi_correlation_id import correlation_id

from ca_jax.models.tokenizer import Tokenizer
from ca_jax.server.errors import ApiError, as_api_error
from ca_jax.server.observing import note_error
from ca_jax.session import Job
from ca_jax.turns.requests import TokenLogprob

_LOG = logging.getLogger(__name__)
_Body = dict[str, Any]


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
