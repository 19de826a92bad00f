"""One turn from its submission to its end, as host data.

Not here: jax, what was asked and what is told of it (requests), when a job runs (scheduler), running (engine).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from typing import Protocol

import numpy as np

from ca_jax.turns.chunks import ChunkSpan
from ca_jax.turns.conversations import Conversation, Message
from ca_jax.turns.requests import Completion, FinishReason, SamplingParams, TokenLogprob, Usage
from ca_jax.turns.text import TextOutput

_job_ids = itertools.count()


class TurnSession(Protocol):
    """What is to be known of the session whose turn a job is; see `ca_jax.Session`."""

    session_id: str
    key: str
    tenant: str
    ttl_s: float | None
    is_kept: bool
    conversation: Conversation

    @property
    def token_ids(self) -> list[int]:
        """The conversation as the model sees it."""

    @property
    def packed_ids(self) -> np.ndarray:
        """`token_ids` as int32 `[T]`."""

    @property
    def is_busy(self) -> bool:
        """Whether a turn of it waits or runs."""

    def resume(self, conversation: Conversation) -> None:
        """Makes the conversation another one."""

    def adopt(self, job: Job, reason: FinishReason) -> None:
        """Makes a turn that ends for a reason part of the conversation."""


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
    session: TurnSession | None = None
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
            raise ValueError(f"the job must have ended, got job {self.job_id} with {len(self.output_ids)} tokens")
        return Completion(
            token_ids=list(self.output_ids),
            text=self.output.text,
            finish_reason=self.finish_reason,
            usage=self.usage(),
            logprobs=None if self.params.logprobs is None else list(self.token_logprobs),
        )
