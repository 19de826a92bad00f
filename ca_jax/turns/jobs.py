"""One turn, from what was asked for to what it took, as host data.

Not here: jax, conversations (session), when a job runs (scheduler), running (engine).
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ca_jax.errors import InvalidRequestError
from ca_jax.turns.chunks import ChunkSpan
from ca_jax.turns.conversations import Message
from ca_jax.turns.text_output import TextOutput

if TYPE_CHECKING:
    from ca_jax.session import Session

MAX_LOGPROBS = 20
"""Most of the likeliest tokens that are told with a drawn one."""

_job_ids = itertools.count()


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
    seed: int = 0
    """Of the draws; the same seed gives the same answer whatever else is in the batch."""
    stop: tuple[str, ...] = ()
    """The answer ends before any of these strings."""
    stop_token_ids: tuple[int, ...] = ()
    """The answer ends with any of these tokens, besides the model's own."""
    ignore_eos: bool = False
    """Go on past the model's own stop tokens."""

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
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"None or 0 to {MAX_LOGPROBS}"),
            ("seed", 0 <= self.seed < 2**32, "in [0, 2**32)"),
            ("stop", all(self.stop), "no empty string"),
        )
        for name, holds, wanted in checks:
            if not holds:
                raise InvalidRequestError(f"{name} wanted {wanted}, found {getattr(self, name)!r}")


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
    """How likely a generated token was by the model's own distribution; see `SamplingParams.logprobs`."""

    token_id: int
    """The token that was drawn."""
    logprob: float
    """The natural logarithm of its probability."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens and theirs, likeliest first; the drawn one need not be among them."""


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


@dataclasses.dataclass
class SaveTimes:
    """When a turn's KV was saved, on the clock of its other times. Goes on behind the turn's end."""

    begun_s: float = 0.0
    """When the first of it was handed in; 0 before."""
    published_s: float = 0.0
    """When the last of it so far was in the store, readable; 0 before."""
    num_published: int = 0
    """Its tokens that are."""
    ended: bool = False
    """Whether no more comes: all is published, or was given up."""


@dataclasses.dataclass(eq=False)
class Job:
    """One turn, from submission to its last token. Only the engine writes to it."""

    prompt_ids: list[int]
    """History and new tokens, when it was submitted."""
    params: SamplingParams
    output: TextOutput
    """Turns tokens into text."""
    stop_ids: frozenset[int]
    """Tokens that end it."""
    session: Session | None = None
    """Whose turn it is; its KV is loaded and saved. None keeps nothing."""
    messages: list[Message] = dataclasses.field(default_factory=list)
    """What was said since the last answer, the user's message mostly."""
    given_ids: list[int] = dataclasses.field(default_factory=list)
    """New tokens that were given as ids, without template; none where messages were given."""
    may_drop: bool = True
    """Whether tokens may leave its conversation, before it and in its middle, where the window is full."""
    context_tokens: int = 0
    """Tokens of its prompt that are chunks."""
    spans: tuple[ChunkSpan, ...] = ()
    """Chunks in its prompt whose KV may be stored, in order: what is of them is loaded and blended."""
    chunk: ChunkSpan | None = None
    """Its prompt is this chunk, and its KV is all that is wanted."""
    tenant: str = ""
    """Of the chunk."""
    job_id: int = dataclasses.field(default_factory=lambda: next(_job_ids))
    """Order of submission."""
    slid_ids: list[int] = dataclasses.field(default_factory=list)
    """First tokens of its conversation that no layer looks back to, and that are not in its context: see `skip`."""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    """The context: prompt and generated tokens, without those that left since the window was full."""
    num_gone: int = 0
    """Tokens that have left its conversation so far: with those that are there they tell one draw from another."""
    positions: list[int] = dataclasses.field(default_factory=list)
    """At which the keys of its first tokens are used, where those are not their places."""
    attention: np.ndarray | None = None
    """f32, the attention that its first tokens received so far; None where that is not measured."""
    output_ids: list[int] = dataclasses.field(default_factory=list)
    """Generated so far."""
    token_logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    """Of each generated token; none if that was not asked for."""
    token_texts: list[str] = dataclasses.field(default_factory=list)
    """The text that became certain with each generated token: "" where it only begins a character or may begin a stop
    string. Together they are the output's text; what was held back when the answer ended is with its last token. Each
    is put there when all else of its token is, so that who follows a running job goes by their number."""
    pieces: collections.deque[str] = dataclasses.field(default_factory=collections.deque)
    """Text not yet taken by the caller."""
    priority: int = 0
    """Jobs of lower values go first; among equals the first to come."""
    slot: int | None = None
    """Decode slot while running."""
    finish_reason: FinishReason | None = None
    """Set when it has ended."""
    error: Exception | None = None
    """What broke it, if something did."""
    cached_tokens: int = 0
    """History tokens whose KV was loaded."""
    cached_tier: str = "dram"
    """Where it was when the turn was queued: `dram` or `ssd`."""
    submitted_s: float = dataclasses.field(default_factory=time.perf_counter)
    """When it was submitted."""
    started_s: float = 0.0
    """When its prefill began."""
    first_token_s: float = 0.0
    """When its first token was there."""
    finished_s: float = 0.0
    """When it ended."""
    token_times_s: list[float] = dataclasses.field(default_factory=list)
    """When each token was there."""
    load_s: float = 0.0
    """See `Usage`."""
    load_stall_s: float = 0.0
    """See `Usage`."""
    load_span_s: tuple[float, float] | None = None
    """When the first copy of its history began and the last one ended; None where nothing was loaded."""
    save_times: SaveTimes | None = None
    """When its KV was saved; None where none is, or it was not prefilled yet."""
    prefill_s: float = 0.0
    """See `Usage`."""
    dropped_tokens: int = 0
    """See `Usage`."""
    repaired_tokens: int = 0
    """See `Usage`."""
    missed_chunks: int = 0
    """See `Usage`."""
    recompute_ratio: float = 0.0
    """See `Usage`."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.finish_reason is not None or self.error is not None

    @property
    def num_tokens(self) -> int:
        """Of the context."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """That the answer is conditioned on, those among them that a sliding window has left behind."""
        return len(self.slid_ids) + len(self.prompt_ids)

    def skip(self, num_tokens: int) -> None:
        """Leaves first tokens out of the context, which no layer looks back to: there is no KV of them.

        What is behind them is used at places and positions from 0 on, which is the same to attention.
        """
        self.slid_ids = self.prompt_ids[:num_tokens]
        self.spans = tuple(span.shifted(-num_tokens) for span in self.spans)
        self.prompt_ids, self.token_ids = self.prompt_ids[num_tokens:], self.token_ids[num_tokens:]
        self.num_gone += num_tokens

    def skip_none(self) -> None:
        """Takes back what was skipped, for a prompt that is prefilled whole. No token may have been generated."""
        self.num_gone -= len(self.slid_ids)
        self.spans = tuple(span.shifted(len(self.slid_ids)) for span in self.spans)
        self.prompt_ids = [*self.slid_ids, *self.prompt_ids]
        self.slid_ids, self.token_ids = [], list(self.prompt_ids)

    def add(self, token: int) -> None:
        """Puts a generated token behind the context."""
        self.output_ids.append(token)
        self.token_ids.append(token)

    def show(self, text: str) -> None:
        """Gives out the text that became certain with the last token, possibly none."""
        self.token_texts.append(text)
        if text:
            self.pieces.append(text)

    def show_rest(self, text: str) -> None:
        """Gives out what was held back still when it was ended from outside; it counts as its last token's."""
        if text:
            self.token_texts[-1] += text
            self.pieces.append(text)

    def usage(self) -> Usage:
        """What it took so far."""
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens={self.cached_tier: len(self.slid_ids) + self.cached_tokens},
            completion_tokens=len(self.output_ids),
            ttft_s=max(self.first_token_s - self.submitted_s, 0.0),
            queued_s=max(self.started_s - self.submitted_s, 0.0),
            load_s=self.load_s,
            load_stall_s=self.load_stall_s,
            prefill_s=self.prefill_s,
            decode_s=max(self.finished_s - self.first_token_s, 0.0),
            token_times_s=tuple(time_s - self.submitted_s for time_s in self.token_times_s),
            dropped_tokens=self.dropped_tokens,
            num_dropped=self.num_gone - len(self.slid_ids),
            repaired_tokens=self.repaired_tokens,
            missed_chunks=self.missed_chunks,
            recompute_ratio=self.recompute_ratio,
        )

    def completion(self) -> Completion:
        """The answer of a job that has ended well."""
        if self.finish_reason is None:
            raise ValueError(f"wanted a finished job, found job {self.job_id} with {len(self.output_ids)} tokens")
        return Completion(
            token_ids=list(self.output_ids),
            text=self.output.text,
            finish_reason=self.finish_reason,
            usage=self.usage(),
            logprobs=None if self.params.logprobs is None else list(self.token_logprobs),
        )
