"""Parts of answers in OpenAI's shapes: why they ended, what they took, log-probabilities.

Not here: the bodies that they are parts of (`openai_routes`), bodies of requests (`bodies`), errors, computing
log-probabilities (`ca_jax.device.sampling`).
Source: OpenAI's API reference (CreateChatCompletionResponse, CreateChatCompletionStreamResponse,
CreateCompletionResponse, ChatCompletionTokenLogprob).
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ca_jax.models.tokenizer import Tokenizer
from ca_jax.session import Job
from ca_jax.turns.requests import FinishReason, Usage

DONE = "data: [DONE]\n\n"
"""What ends a stream."""
Session = dict[str, str]
"""The project's own fields of an answer: a session's name, and where it stands behind the answer. Empty without one."""
_SECONDS = ("ttft_s", "queued_s", "load_s", "load_stall_s", "prefill_s", "decode_s")  # Of the first answer's `Usage`.
_COUNTS = ("dropped_tokens", "num_dropped", "repaired_tokens", "missed_chunks")


def finish_reason(reason: FinishReason | None) -> str:
    """OpenAI's word for why an answer ended; one that was given up was cut short."""
    return "stop" if reason is FinishReason.STOP else "length"


def usage_body(usages: Sequence[Usage], num_choices: int = 1) -> dict[str, Any]:
    """What a request took. `ca_jax` adds to OpenAI's fields where KV came from, and what the first answer took.

    Args:
      usages: of all answers, those to one prompt side by side.
      num_choices: answers to one prompt, whose tokens count once.
    """
    of_prompts, first = usages[::num_choices], usages[0]
    by_tier: Counter[str] = Counter()
    for usage in of_prompts:
        by_tier.update(usage.cached_tokens)
    counts = usage_counts(
        sum(usage.prompt_tokens for usage in of_prompts), sum(usage.completion_tokens for usage in usages)
    )
    no_predictions = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    return {
        **counts,
        "prompt_tokens_details": {"cached_tokens": by_tier.total(), "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0, **no_predictions},
        "ca_jax": {
            "cached_tokens": dict(by_tier),
            **{name: round(getattr(first, name), 6) for name in _SECONDS},
            **{name: getattr(first, name) for name in _COUNTS},
        },
    }


def usage_counts(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Tokens of a prompt and of what was generated so far."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def error_event(body: dict[str, Any]) -> str:
    """An error in the middle of a stream, as OpenAI's clients understand it."""
    return f"data: {json.dumps(body)}\n\n"


def chat_logprobs(tokenizer: Tokenizer | None, job: Job, start: int, stop: int | None) -> dict[str, Any]:
    """Log-probabilities of a chat's tokens `[start, stop)`: of each and of the likeliest, with their bytes."""

    def described(token_id: int, logprob: float) -> dict[str, Any]:
        raw = None if tokenizer is None else tokenizer.token_bytes(token_id)
        token = _token_text(tokenizer, token_id)
        return {"token": token, "logprob": logprob, "bytes": None if raw is None else list(raw)}

    content = []
    for drawn in job.token_logprobs[start:stop]:
        top = [described(token_id, logprob) for token_id, logprob in drawn.top]
        content.append({**described(drawn.token_id, drawn.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer | None, job: Job, start: int, stop: int | None) -> dict[str, Any]:
    """The same for a plain completion; offsets are of characters of the answer."""
    each = job.token_logprobs[start:stop]
    ends = list(itertools.accumulate(map(len, job.token_texts), initial=0))
    return {
        "tokens": [_token_text(tokenizer, drawn.token_id) for drawn in each],
        "token_logprobs": [drawn.logprob for drawn in each],
        "top_logprobs": [{_token_text(tokenizer, token_id): lp for token_id, lp in drawn.top} for drawn in each],
        "text_offset": ends[start : start + len(each)],
    }


def _token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """A token's text; its bytes where they are no text by themselves, as OpenAI writes them."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    raw = tokenizer.token_bytes(token_id)
    try:
        return tokenizer.token_text(token_id) if raw is None else raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw or b"")
