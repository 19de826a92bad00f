"""Bodies of answers, whole and as chunks of a stream, in OpenAI's shapes.

Chunks are written as text at once: they are most of what the server does for a token.

Not here: bodies of requests (`bodies`), errors.
Source: OpenAI's API reference (CreateChatCompletionResponse, CreateChatCompletionStreamResponse,
CreateCompletionResponse).
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from ca_jax.turns.requests import FinishReason, Usage

DONE = "data: [DONE]\n\n"
"""What ends a stream."""
_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "length"}


def finish_reason(reason: FinishReason | None) -> str:
    """OpenAI's word for why an answer ended; one that was given up was cut short."""
    return _REASONS.get(reason or FinishReason.CANCELLED, "length")


def usage_body(usages: Sequence[Usage], num_choices: int = 1) -> dict[str, Any]:
    """What a request took; `ca_jax` says more than OpenAI's fields: where KV came from, and what the first answer took.

    Args:
      usages: of all answers, those to one prompt side by side.
      num_choices: answers to one prompt, whose tokens count once.
    """
    of_prompts = usages[::num_choices]
    prompt = sum(usage.prompt_tokens for usage in of_prompts)
    completion = sum(usage.completion_tokens for usage in usages)
    by_tier: dict[str, int] = {}
    for usage in of_prompts:
        for tier, num_tokens in usage.cached_tokens.items():
            by_tier[tier] = by_tier.get(tier, 0) + num_tokens
    first = usages[0]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(by_tier.values()), "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
        "ca_jax": {
            "cached_tokens": by_tier,
            "ttft_s": round(first.ttft_s, 6),
            "queued_s": round(first.queued_s, 6),
            "load_s": round(first.load_s, 6),
            "load_stall_s": round(first.load_stall_s, 6),
            "prefill_s": round(first.prefill_s, 6),
            "decode_s": round(first.decode_s, 6),
            "dropped_tokens": first.dropped_tokens,
            "num_dropped": first.num_dropped,
            "repaired_tokens": first.repaired_tokens,
            "missed_chunks": first.missed_chunks,
        },
    }


def usage_so_far(prompt_tokens: int, completion_tokens: int) -> str:
    """What one answer took by the middle of a stream, as JSON."""
    return (
        f'{{"prompt_tokens": {prompt_tokens}, "completion_tokens": {completion_tokens}, '
        f'"total_tokens": {prompt_tokens + completion_tokens}}}'
    )


Session = dict[str, str]
"""Fields of our own in an answer: a session's name, and where it stands behind the answer. Without one, none."""


class Writer:
    """Writes one request's answer.

    Args:
      kind: `chat.completion` or `text_completion`.
      model: as the client named it.
    """

    def __init__(self, kind: str, model: str) -> None:
        self._is_chat = kind == "chat.completion"
        self._object = kind
        self.response_id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        """Names the answer."""
        self._created = int(time.time())
        self._model = model
        name = f"{kind}.chunk" if self._is_chat else kind
        head = {"id": self.response_id, "object": name, "created": self._created, "model": model}
        self._head = json.dumps(head)[:-1]

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any], session: Session) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        body = {
            "id": self.response_id,
            "object": self._object,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": usage,
        }
        return {**body, **session}

    def choice(self, index: int, text: str, reason: str, logprobs: Any = None) -> dict[str, Any]:
        """One answer."""
        if self._is_chat:
            message = {"role": "assistant", "content": text, "refusal": None}
            return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def first(self, index: int, usage: str | None, session: Session) -> str:
        """The chunk that begins an answer of a chat."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._chunk(index, json.dumps(delta), None, None, usage, session)

    def piece(
        self, index: int, text: str, reason: str | None, logprobs: Any, usage: str | None, session: Session
    ) -> str:
        """A chunk with new text; the last one of an answer says why it ended.

        Args:
          index: which answer's.
          text: what is new.
          reason: why it ended, if it has.
          logprobs: of the new tokens, where they are asked for.
          usage: as JSON; None: the field is not there.
          session: what is said of the session.
        """
        if self._is_chat:
            said = f'{{"content": {json.dumps(text)}}}' if text or reason is None else "{}"
            return self._chunk(index, said, reason, logprobs, usage, session)
        return self._chunk(index, json.dumps(text), reason, logprobs, usage, session)

    def last(self, usage: dict[str, Any]) -> str:
        """The chunk with usage, behind all answers."""
        return f'data: {self._head}, "choices": [], "usage": {json.dumps(usage)}}}\n\n'

    def _chunk(
        self, index: int, said: str, reason: str | None, logprobs: Any, usage: str | None, session: Session
    ) -> str:
        name = "delta" if self._is_chat else "text"
        parts = [
            f'data: {self._head}, "choices": [{{"index": {index}, "{name}": {said}, "logprobs": ',
            "null" if logprobs is None else json.dumps(logprobs),
            ', "finish_reason": ',
            "null" if reason is None else f'"{reason}"',
            "}]",
            "" if usage is None else f', "usage": {usage}',
            f", {json.dumps(session)[1:-1]}" if session else "",
            "}\n\n",
        ]
        return "".join(parts)


def error_event(body: dict[str, Any]) -> str:
    """An error in the middle of a stream, as OpenAI's clients understand it."""
    return f"data: {json.dumps(body)}\n\n"
