"""What is asked of a turn and what it gave: immutable host data.

Not here: a turn while it runs (jobs), drawing tokens (device.sampler).
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

from ca_jax.errors import InvalidRequestError, check
from ca_jax.turns.conversations import Message
from ca_jax.turns.grammars import Grammar
from ca_jax.turns.text import ReplyReader

_Tokens = TypeVar("_Tokens", list[int], np.ndarray)
MAX_LOGPROBS = 20
"""Most of the likeliest tokens that are told with a drawn one."""
_LOGPROBS = (None, *range(MAX_LOGPROBS + 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one answer is drawn and when it ends.

    Raises:
      InvalidRequestError: a value outside its range.
    """

    max_tokens: int = 256
    """Most tokens to generate, at least 1."""
    min_tokens: int = 0
    """Fewest tokens to generate: stop tokens are not drawn before that, and stop strings not looked for."""
    temperature: float = 0.0
    """0 is greedy, so that the same conversation gives the same answer; above, logits are divided by it."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0 means all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability, in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest, in [0, 1)."""
    repetition_penalty: float = 1.0
    """Divides (or multiplies, if negative) the logits of tokens seen so far; 1 is none."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that this answer has already, in [-2, 2]; OpenAI's, who do not count the prompt.
    Like all that is added to logits it comes behind the repetition penalty, before temperature."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit once for each time that this answer has it already, in [-2, 2]; OpenAI's."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of these tokens: pairs, or a mapping, of ids and of numbers in [-100, 100]; OpenAI's."""
    logprobs: int | None = None
    """Say how likely each drawn token was, and this many of the likeliest, 0 to 20; None says nothing. By the softmax
    of the model's own logits, whatever was drawn from: before penalties, biases, temperature and filters (what vLLM
    calls `raw_logprobs`)."""
    prompt_logprobs: int | None = None
    """Say how likely each token of the prompt was, and this many of the likeliest in its place; None says nothing."""
    prompt_logprobs_from: int = 1
    """Place of the first token of which that is said. Stored KV serves tokens before the one in front of it, and no
    others: what the model expects behind a token is not stored."""
    seed: int = 0
    """Of the draws; the same seed gives the same answer whatever else is in the batch."""
    stop: tuple[str, ...] = ()
    """The answer ends before any of these strings."""
    stop_token_ids: tuple[int, ...] = ()
    """The answer ends with any of these tokens, besides the model's own."""
    skip_special_tokens: bool = True
    """Leave special tokens that are drawn out of the text; those that end the answer are never part of it."""
    ignore_eos: bool = False
    """Go on past the model's own stop tokens."""
    grammar: Grammar | None = None
    """What the answer's text must match: a JSON schema, say. An answer that ends by itself does. A token that it does
    not allow is never drawn, whatever biases and `min_tokens` say."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        biases = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        object.__setattr__(self, "logit_bias", tuple((token, bias) for token, bias in biases))
        checks = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"0 to max_tokens, which is {self.max_tokens}"),
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "0 or above"),
            ("top_k", self.top_k >= 0, "0 or above"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p < 1, "in [0, 1)"),
            ("repetition_penalty", math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0, "above 0"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]"),
            ("logit_bias", all(-100 <= bias <= 100 for _, bias in self.logit_bias), "numbers in [-100, 100]"),
            ("logprobs", self.logprobs in _LOGPROBS, f"None or 0 to {MAX_LOGPROBS}"),
            ("prompt_logprobs", self.prompt_logprobs in _LOGPROBS, f"None or 0 to {MAX_LOGPROBS}"),
            ("prompt_logprobs_from", self.prompt_logprobs_from >= 1, "at least 1"),
            ("seed", 0 <= self.seed < 2**32, "in [0, 2**32)"),
            ("stop", all(self.stop), "no empty string"),
        )
        for name, holds, wanted in checks:
            check(holds, name, wanted, getattr(self, name), InvalidRequestError)

    def cacheable(self, prompt_ids: _Tokens) -> _Tokens:
        """First tokens of a prompt that stored KV may serve: what the model expects behind the others is wanted."""
        most = len(prompt_ids) - 1
        return prompt_ids[: most if self.prompt_logprobs is None else min(self.prompt_logprobs_from - 1, most)]


def with_max_tokens(sampling: SamplingParams | None, max_tokens: int | None) -> SamplingParams:
    """How to draw, greedily if not given, and at most so many tokens, if given."""
    params = sampling or SamplingParams()
    return params if max_tokens is None else dataclasses.replace(params, max_tokens=max_tokens)


class FinishReason(enum.Enum):
    """Why a job ended."""

    STOP = "stop"
    """A stop token or stop string."""
    LENGTH = "length"
    """`max_tokens`, or the end of the context window."""
    CANCELLED = "cancelled"
    """The caller stopped listening."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """What one turn took."""

    prompt_tokens: int
    """Tokens the answer was conditioned on: history and new."""
    cached_tokens: dict[str, int]
    """Of those, how many had their KV loaded, or are behind a sliding window and needed none, by tier."""
    completion_tokens: int
    """Tokens generated."""
    ttft_s: float
    """Seconds from submission to the first token, waiting included."""
    queued_s: float
    """Seconds of those spent waiting for a slot."""
    load_s: float
    """Seconds in which KV was being copied from the store; they overlap compute."""
    load_stall_s: float
    """Seconds in which compute waited for such a copy."""
    prefill_s: float = 0.0
    """Seconds of its prefill's passes, waiting for loads included; others' decode steps between them are not."""
    decode_s: float
    """Seconds from the first token to the last."""
    token_times_s: tuple[float, ...] = ()
    """Seconds from submission to each token; their differences are the times per output token (TPOT)."""
    dropped_tokens: int = 0
    """Tokens of the conversation that left in this turn, since the context window was full."""
    num_dropped: int = 0
    """Tokens that have left the conversation by its end, in earlier turns and by `Session.discard` too."""
    repaired_tokens: int = 0
    """Cached tokens whose KV was computed anew, since others had left or stand before them; of some layers alone, times
    their share of the layers."""
    missed_chunks: int = 0
    """Chunks of its context of which nothing was stored when its prefill began: those were computed in their places."""
    recompute_ratio: float = 0.0
    """Share of its chunks' tokens that was to be computed anew, `EngineConfig.blend`'s or what measured rates said; 0
    without chunks."""

    @property
    def num_cached_tokens(self) -> int:
        """Cached tokens of all tiers."""
        return sum(self.cached_tokens.values())

    @property
    def new_tokens(self) -> int:
        """Tokens that were prefilled."""
        return self.prompt_tokens - self.num_cached_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """How likely a token was by the model's own distribution; see `SamplingParams.logprobs`."""

    token_id: int
    """The token that was drawn, or that stands in the prompt."""
    logprob: float
    """The natural logarithm of its probability."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens and theirs, likeliest first; that one need not be among them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """An answer of `Engine.generate`."""

    token_ids: list[int]
    """Generated tokens, a stop token included."""
    text: str
    """Their text, without stop token or stop string."""
    finish_reason: FinishReason
    """Why it ended."""
    usage: Usage
    """What it took."""
    logprobs: list[TokenLogprob] | None = None
    """Of each generated token; None if that was not asked for."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """Of each token of the prompt from `SamplingParams.prompt_logprobs_from` on; None if that was not asked for."""


Keeps = Literal["all", "kv", "nothing"]
"""What is stored of a session: its turns and what was said; KV alone; nothing."""
Truncation = Literal["auto", "disabled"]
"""What becomes of a turn that does not fit behind its conversation: `auto` as the engine's config says, `disabled` is
an error."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """A turn as it is asked for; see `Session.send`.

    Raises:
      InvalidRequestError: a priority that is no whole number, or an unknown truncation.
    """

    new: str | Sequence[Message] | Sequence[int]  # Messages, or token ids.
    params: SamplingParams  # How to draw.
    priority: int = 0  # Jobs of lower values go first.
    context: Sequence[str | Sequence[int]] | None = None  # Chunks of text that stand in front of the last message.
    truncation: Truncation = "auto"  # Whether tokens of the conversation may leave for it.
    reader: ReplyReader | None = None  # What of the answer's text is which part of its message; None: all is content.
    note: Callable[[Any, FinishReason], tuple[str, str]] | None = None
    """Of the job, when it ends for a reason: an id of its own, and what is kept by that, JSON; see `Conversation`."""

    def __post_init__(self) -> None:
        is_whole = isinstance(self.priority, int) and not isinstance(self.priority, bool)
        check(is_whole, "priority", "a whole number", self.priority, InvalidRequestError)
        is_known = self.truncation in ("auto", "disabled")
        check(is_known, "truncation", "'auto' or 'disabled'", self.truncation, InvalidRequestError)


@dataclasses.dataclass(frozen=True)
class UsedAdapter:
    """The adapter that a turn is computed with."""

    name: str = ""  # Empty: none.
    fingerprint: str = ""  # Of its weights.
    slot: int = -1  # Where these are on the device.


NO_ADAPTER = UsedAdapter()
"""Of turns that are computed with the model alone."""
