"""Conversations that go on turn by turn, and their turns while they run, as host data.

A session owns its token ids: history is never tokenised again, so that what is reused is exactly what was computed.

Not here: jax, KV, what is asked of a turn and what it took (turns.requests), when it runs (scheduler, engine).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ca_jax.errors import EmptyMessageError, InvalidRequestError, SessionBusyError, SessionClosedError
from ca_jax.overflow.config import check_discarded
from ca_jax.telemetry.timeline import SaveTimes
from ca_jax.turns import requests
from ca_jax.turns.conversations import Conversation, Message, as_messages
from ca_jax.turns.grammars import Matcher
from ca_jax.turns.requests import Completion, FinishReason, SamplingParams, TokenLogprob, Truncation, TurnRequest, Usage
from ca_jax.turns.text import ChunkSpan, ReplyReader, TextOutput, Texts

_job_ids = itertools.count()


@dataclasses.dataclass(eq=False)
class Job:
    """One turn, from submission to its last token. Only the engine writes to it."""

    prompt_ids: list[int]  # History and new tokens, when it was submitted.
    params: SamplingParams
    output: TextOutput  # Turns tokens into text.
    stop_ids: frozenset[int]  # Tokens that end it.
    session: Session | None = None  # Whose turn it is; its KV is loaded and saved. None keeps nothing.
    messages: list[Message] = dataclasses.field(default_factory=list)  # Said since the last answer.
    given_ids: list[int] = dataclasses.field(default_factory=list)  # New tokens given as ids, without template.
    may_drop: bool = True  # Whether tokens may leave its conversation, before it and in it, where the window is full.
    context_tokens: int = 0  # Tokens of its prompt that are chunks.
    spans: tuple[ChunkSpan, ...] = ()  # Chunks in its prompt, in order, whose KV is loaded and blended where stored.
    chunk: ChunkSpan | None = None  # Its prompt ends with this chunk, whose KV is all that is wanted.
    at_idle: str = ""  # `anew` or `ahead`, see `serving.idle_recompute`: only KV is wanted, and nobody waits for it.
    note: Callable[[Job, FinishReason], tuple[str, str]] | None = None  # As of `TurnRequest`.
    tenant: str = ""  # Of the chunk.
    matcher: Matcher | None = None  # What its text must be like; None: anything.
    adapter: requests.UsedAdapter = requests.NO_ADAPTER  # That it is computed with.
    job_id: int = dataclasses.field(default_factory=lambda: next(_job_ids))  # Order of submission.
    slid_ids: list[int] = dataclasses.field(default_factory=list)
    """First tokens of its conversation that no layer looks back to, and that are not in its context: see `skip`."""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    """The context: prompt and generated tokens, without those that left since the window was full."""
    num_gone: int = 0
    """Tokens that have left its conversation so far: with those that are there they tell one draw from another."""
    attention: np.ndarray | None = None  # f32, that its first tokens received so far; None where it is not measured.
    output_ids: list[int] = dataclasses.field(default_factory=list)  # Generated so far.
    token_logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)  # None if they were not asked for.
    prompt_logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)  # Likewise, of its prompt.
    token_texts: list[str] = dataclasses.field(default_factory=list)
    """The text that became certain with each generated token; together the output's. What was held back when the answer
    ended is with the last one. Each is appended last, so their number counts complete tokens."""
    pieces: collections.deque[str] = dataclasses.field(default_factory=collections.deque)  # Not taken by the caller.
    priority: int = 0  # Jobs of lower values go first; among equals the first to come.
    slot: int | None = None  # Its row in the pool of KV while it runs.
    finish_reason: FinishReason | None = None  # Set when it has ended.
    error: Exception | None = None  # What broke it, if something did.
    cached_tokens: int = 0  # History tokens whose KV was loaded.
    cached_tier: str = "dram"  # Where it was when the turn was queued: `device`, `dram`, `ssd` or `objects`.
    submitted_s: float = dataclasses.field(default_factory=time.perf_counter)  # When it was submitted.
    started_s: float = 0.0  # When its prefill began.
    first_token_s: float = 0.0  # When its first token was there.
    finished_s: float = 0.0  # When it ended.
    token_times_s: list[float] = dataclasses.field(default_factory=list)  # When each token was there.
    load_span_s: tuple[float, float] | None = None  # From its history's first copy to the last; None: none was loaded.
    fetch_span_s: tuple[float, float] | None = None  # Likewise, of what SSD had of it, which is before.
    save_times: SaveTimes | None = None  # When its KV was saved; None where none is, or it was not prefilled yet.
    # As in `Usage`:
    load_s: float = 0.0
    load_stall_s: float = 0.0
    prefill_s: float = 0.0
    dropped_tokens: int = 0
    repaired_tokens: int = 0
    missed_chunks: int = 0
    recompute_ratio: float = 0.0

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)

    @property
    def answers(self) -> bool:
        """Whether tokens are generated."""
        return self.chunk is None and not self.at_idle

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.finish_reason is not None or self.error is not None

    @property
    def num_tokens(self) -> int:
        """Of the context."""
        return len(self.token_ids)

    @property
    def most_tokens(self) -> int:
        """Of its context at most, if the window lets it become so long."""
        return len(self.prompt_ids) + self.params.max_tokens

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

    def take(self, token: int, logprob: TokenLogprob | None, is_full: Callable[[Job], bool]) -> FinishReason | None:
        """Takes a token that was drawn, and gives out the text that is certain with it.

        Args:
          token: its id.
          logprob: how likely it was, where that is asked for.
          is_full: whether a job has no room for another behind it.

        Returns:
          Why the job ends with it; None: it goes on.
        """
        self.add(token)
        self.token_times_s.append(time.perf_counter())
        self.first_token_s = self.token_times_s[0]
        if logprob is not None:
            self.token_logprobs.append(logprob)
        text, reason = "" if token in self.stop_ids else self.output.push(token), None
        if token in self.stop_ids or self.output.stopped or (self.matcher is not None and self.matcher.has_ended):
            reason = FinishReason.STOP
        elif is_full(self) or len(self.output_ids) >= self.params.max_tokens:
            reason = FinishReason.LENGTH
        self.show(text if reason is None else text + self.output.finish())
        return reason

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
            prompt_logprobs=None if self.params.prompt_logprobs is None else list(self.prompt_logprobs),
        )


class _Host(Protocol):
    """What a session asks of its engine; see there."""

    def submit_turn(self, session: Session, request: TurnRequest, texts: Texts | None = None) -> Job:
        """Queues a turn of `session` and returns its job. Raises what `Session.submit` says."""

    def stream(self, job: Job) -> Iterator[str]:
        """Runs turns until `job` ends, and yields its text as it comes. Raises what ended the job early."""

    def cancel(self, job: Job) -> None:
        """Ends a job. What it has generated so far stays part of the conversation."""

    def abandon(self, job: Job) -> None:
        """Notes that a job is to be cancelled later. Takes no lock."""

    def end_abandoned(self) -> None:
        """Cancels the jobs that `abandon` has noted."""

    def truncate_stored(self, session: Session, num_tokens: int, left: Conversation | None = None) -> None:
        """Forgets the stored KV behind the first `num_tokens` tokens; takes the session back to `left`, if given."""

    def discard(self, session: Session, discarded: np.ndarray) -> None:
        """Drops those tokens of a conversation, and their KV, that `discarded`, bool `[T]`, names."""

    def forget(self, session: Session) -> None:
        """Drops a conversation and its KV, and ends the turn of it that runs."""


class Answer(Iterator[str]):
    """The text of one turn as it comes. Iterating runs the engine; an answer that is let go of ends its turn."""

    def __init__(self, engine: _Host, job: Job) -> None:
        self._engine = engine
        self.job = job
        """The turn: its tokens, their texts and log-probabilities, and how it ended. For reading alone."""
        self._pieces = engine.stream(job)

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration:
            raise
        except BaseException:  # Ctrl-C among them: the turn must not stay in the batch with nobody listening.
            self.close()
            raise

    def close(self) -> None:
        """Ends the turn, if it has not ended. May be called again."""
        if not self.job.done:
            self._engine.cancel(self.job)

    def __del__(self) -> None:
        # Possibly in the middle of a step, and on any thread: only noted here, ended when the engine is next asked.
        if not self.job.done:
            self._engine.abandon(self.job)


class Session:
    """A conversation. Made by `Engine.session`; used by one caller at a time."""

    def __init__(
        self,
        engine: _Host,
        session_id: str,
        conversation: Conversation,
        *,
        tenant: str = "",
        ttl_s: float | None = None,
        keeps: requests.Keeps = "all",
    ) -> None:
        self._engine, self._closed = engine, False
        self._packed_ids: np.ndarray | None = None
        self.conversation = conversation
        """All that is to be known to go on with it elsewhere, but for its KV."""
        self.job: Job | None = None
        """Its last turn, ended or not; None before its first since it was opened. For reading alone."""
        self.session_id = session_id
        """Names the conversation in the store."""
        self.key = ""
        """Of its KV in the store; the engine says which."""
        self.tenant = tenant
        """Whose it is: no other tenant meets its KV."""
        self.ttl_s = ttl_s
        """How long its KV is kept after its last use, seconds; None: as the store's config says."""
        self.is_noted = keeps == "all"
        """Whether the conversation is kept with its KV; else its KV serves prompts that begin like it."""
        self.is_kept = keeps != "nothing"
        """Whether its turns are stored and it is found by its name. Else stored KV is read for it, and none written."""
        self.usage: Usage | None = None
        """Of the last turn that has ended."""
        self.finish_reason: FinishReason | None = None
        """Of the last turn that has ended."""

    @property
    def adapter(self) -> str | None:
        """Name of the adapter that it is held with, for good; None: the model alone."""
        return self.conversation.adapter or None

    @property
    def is_busy(self) -> bool:
        """Whether a turn of it waits or runs."""
        return self.job is not None and not self.job.done

    @property
    def messages(self) -> list[Message]:
        """The conversation as text, oldest first, without turns that have left the context window."""
        return self.conversation.messages

    @property
    def token_ids(self) -> list[int]:
        """The conversation as the model sees it: templates, answers and stop tokens, but not what has left."""
        return self.conversation.token_ids

    @property
    def packed_ids(self) -> np.ndarray:
        """`token_ids` as int32 `[T]`; once asked for it is kept, and what a turn adds is put behind."""
        if self._packed_ids is None:
            self._packed_ids = np.fromiter(self.token_ids, np.int32)
        return self._packed_ids

    @property
    def num_dropped(self) -> int:
        """Tokens that have left, since the context window was full or by `discard`."""
        return self.conversation.num_dropped

    def send(
        self,
        message: str | Sequence[Message],
        *,
        context: Sequence[str | Sequence[int]] | None = None,
        max_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        priority: int = 0,
        truncation: Truncation = "auto",
    ) -> Answer:
        """Queues a turn and returns its answer, piece by piece.

        The turn is queued by this call; iterating runs the engine. A caller that closes the answer or lets go of it
        ends the turn: what was generated so far stays part of the conversation.

        Args:
          message: of the user; or messages, each a `role`, its `content` and possibly its `context`.
          context: chunks of text, or token ids, that stand in front of the last message, documents for example. The KV
            of each is computed once, by itself, and used wherever in a prompt it comes (`EngineConfig.blend`), by all
            sessions of the tenant; `Engine.precompute` does that in advance. A text is tokenised alone.
          max_tokens: in place of the one in `sampling`.
          sampling: how to draw; greedy if not given.
          priority: turns of lower values go first; none waits forever.
          truncation: `auto` has tokens leave where the window is full, as `EngineConfig.overflow` says; `disabled` is
            an error there, and ends an answer that fills the window.

        Raises:
          SessionClosedError: the session or its engine is closed.
          SessionBusyError: the last turn still runs.
          EmptyMessageError: the message is blank or there is none, or a chunk, or there is a context without chunks.
          InvalidRequestError: `max_tokens` below 1, an unknown `truncation`, a context given twice, a priority that is
            no whole number, a `logit_bias` outside the vocabulary, a grammar that cannot be followed, or messages that
            the model's chat template refuses.
          ContextWindowError: the message and its context leave no room for an answer (it says by how much), or the
            history does and none of it may be dropped (`EngineConfig.overflow`). The session stays as it was.

        Source: `context` is CacheBlend (Yao et al., EuroSys 2025).
        """
        params, new = requests.with_max_tokens(sampling, max_tokens), as_messages(message)
        job = self.submit(new, context=context, sampling=params, priority=priority, truncation=truncation)
        return Answer(self._engine, job)

    def send_ids(
        self,
        token_ids: Sequence[int],
        *,
        context: Sequence[str | Sequence[int]] | None = None,
        max_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        priority: int = 0,
        truncation: Truncation = "auto",
    ) -> Answer:
        """Queues a turn of token ids, which are taken as they are, without template; otherwise as `send`.

        Raises too: EmptyMessageError for no tokens, InvalidRequestError for an id outside the vocabulary.
        """
        params = requests.with_max_tokens(sampling, max_tokens)
        job = self.submit(token_ids, context=context, sampling=params, priority=priority, truncation=truncation)
        return Answer(self._engine, job)

    def submit(
        self,
        new: str | Sequence[Message] | Sequence[int],
        *,
        context: Sequence[str | Sequence[int]] | None = None,
        sampling: SamplingParams | None = None,
        priority: int = 0,
        texts: Texts | None = None,
        truncation: Truncation = "auto",
        note: Callable[[Job, FinishReason], tuple[str, str]] | None = None,
        reader: ReplyReader | None = None,
    ) -> Job:
        """Queues a turn of messages or of token ids, without running the engine; otherwise as `send` and `send_ids`.

        Only `sampling` or `Engine.cancel` ends the job. With `texts` it may raise `TextWork`, as `Engine.submit_turn`
        says. `reader` says what of the answer's text is which part of its message.
        """
        self.check_ready()
        last = new[-1] if len(new) else None
        if isinstance(last, Mapping) and last["role"] != "tool" and not last["content"].strip():
            raise EmptyMessageError("a message must have text in it, got a blank one")
        given = TurnRequest(new=new, params=sampling or SamplingParams(), context=context, truncation=truncation)
        asked = dataclasses.replace(given, priority=priority, reader=reader, note=note)
        return self._engine.submit_turn(self, asked, texts)

    def rewind(self, num_tokens: int) -> None:
        """Forgets the conversation and its KV behind the first `num_tokens` tokens; what remains is used as it stands.

        Turns that began behind that point leave `messages`.

        Raises:
          InvalidRequestError: `num_tokens` is not 0 to the conversation's tokens.
          SessionClosedError: the session is closed.
          SessionBusyError: a turn still runs.
        """
        self.check_ready()
        if not 0 <= num_tokens <= len(self.token_ids):
            raise InvalidRequestError(f"tokens to keep must be 0..{len(self.token_ids)}, got {num_tokens}")
        self._engine.truncate_stored(self, num_tokens, self.conversation.take(num_tokens))

    def discard(self, tokens: npt.ArrayLike) -> int:
        """Forgets some tokens of the conversation and their KV; what remains is used as it stands.

        Args:
          tokens: which: their places in `token_ids`, or a bool mask over it.

        Returns:
          How many tokens are left.

        Raises:
          InvalidRequestError: tokens that do not exist or are named twice, all of them, or a mask of another length.
          SessionClosedError: the session is closed.
          SessionBusyError: a turn still runs.

        Source: token discarding lists, CachedAttention (Gao et al., USENIX ATC 2024), section 3.4.
        """
        self.check_ready()
        self._engine.discard(self, check_discarded(tokens, len(self.token_ids)))
        return len(self.token_ids)

    def forget_lost(self, num_stored: int, num_slid: int) -> None:
        """Tokens behind what is stored are computed anew: at their places, with nothing to repair."""
        if self.conversation.num_slid != num_slid:
            self.resume(self.conversation.slid(num_slid))
        if self.conversation.num_to_repair > num_stored:
            self.resume(self.conversation.with_kv_of(num_stored))

    def resume(self, conversation: Conversation) -> None:
        """Makes the conversation another one; for the engine."""
        if conversation.token_ids is not self.conversation.token_ids:
            self._packed_ids = None
        self.conversation = conversation

    def check_ready(self) -> None:
        """Raises SessionClosedError or SessionBusyError where no turn of it may begin."""
        self._engine.end_abandoned()
        if self._closed:
            raise SessionClosedError(f"session {self.session_id!r} is closed")
        if self.is_busy:
            raise SessionBusyError(f"session {self.session_id!r} still answers; that must end before the next turn")

    def adopt(self, job: Job, reason: FinishReason) -> None:
        """Makes a turn that ends for a reason part of the conversation; for the engine."""
        num_before = len(self.token_ids)
        token_ids, note = [*job.slid_ids, *job.token_ids], None if job.note is None else job.note(job, reason)
        answer = job.output.message(is_whole=reason is FinishReason.STOP)
        turn = (token_ids, job.messages, answer, job.attention, job.given_ids, note)
        self.conversation = self.conversation.with_turn(*turn)
        if self._packed_ids is not None:
            added = np.fromiter(self.token_ids[num_before:], np.int32)
            self._packed_ids = np.concatenate([self._packed_ids, added])
        self.usage = job.usage()
        self.finish_reason = reason

    def end(self) -> None:
        """Takes no more turns; for the engine."""
        self._closed = True

    def close(self) -> None:
        """Ends the conversation for good: the store forgets it. May be called again.

        One that is to go on later, with another engine, is left open: `Engine.close` keeps it.
        """
        if not self._closed:
            self._closed = True
            self._engine.forget(self)
