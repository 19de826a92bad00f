"""Log-probabilities of generated tokens in OpenAI's shapes.

Not here: computing them (`ca_jax.device.sampling`).
Source: OpenAI's API reference (ChatCompletionTokenLogprob; `logprobs` of CreateCompletionResponse).
"""

from __future__ import annotations

from typing import Any

from ca_jax.models.tokenizer import Tokenizer
from ca_jax.turns.jobs import Job


def chat_logprobs(tokenizer: Tokenizer | None, job: Job, start: int = 0, stop: int | None = None) -> dict[str, Any]:
    """Of generated tokens from `start` to before `stop`, for a chat: the token and the likeliest, with their bytes."""
    content = []
    for told in job.token_logprobs[start:stop]:
        top = [_token(tokenizer, token_id, logprob) for token_id, logprob in told.top]
        content.append({**_token(tokenizer, told.token_id, told.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer | None, job: Job, start: int = 0, stop: int | None = None
) -> dict[str, Any]:
    """The same for a plain completion; offsets are of characters of the answer."""
    each = job.token_logprobs[start:stop]
    texts = [_text(tokenizer, told.token_id) for told in each]
    offset = sum(map(len, job.token_texts[:start]))
    offsets = []
    for told_text in job.token_texts[start : start + len(each)]:
        offsets.append(offset)
        offset += len(told_text)
    return {
        "tokens": texts,
        "token_logprobs": [told.logprob for told in each],
        "top_logprobs": [{_text(tokenizer, token_id): logprob for token_id, logprob in told.top} for told in each],
        "text_offset": offsets,
    }


def _token(tokenizer: Tokenizer | None, token_id: int, logprob: float) -> dict[str, Any]:
    raw = None if tokenizer is None else tokenizer.token_bytes(token_id)
    return {"token": _text(tokenizer, token_id), "logprob": logprob, "bytes": None if raw is None else list(raw)}


def _text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """A token's text; its bytes where they are no text by themselves, as OpenAI writes them."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    raw = tokenizer.token_bytes(token_id)
    try:
        return tokenizer.token_text(token_id) if raw is None else raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw or b"")
