"""Conversations that go on turn by turn, as host data.

A session owns its token ids: history is never tokenised again, so that what is reused is exactly what was computed.

Not here: jax, KV, turns (jobs), scheduling (scheduler), running (engine).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ca_jax.errors import EmptyMessageError, InvalidRequestError, SessionBusyError, SessionClosedError
from ca_jax.overflow.discarding import check_discarded
from ca_jax.turns.conversations import Conversation, Message, as_messages
from ca_jax.turns.jobs import Job
from ca_jax.turns.requests import FinishReason, SamplingParams, Truncation, TurnRequest, Usage
from ca_jax.turns.text import Texts


class _Host(Protocol):
    """What a session asks of its engine; see there."""

    def submit_turn(self, session: Session, request: TurnRequest, texts: Texts | None = None) -> Job: ...
    def stream(self, job: Job) -> Iterator[str]: ...
    def cancel(self, job: Job) -> None: ...
    def abandon(self, job: Job) -> None: ...
    def end_abandoned(self) -> None: ...
    def truncate_stored(self, session: Session, num_tokens: int, left: Conversation | None = None) -> None: ...
    def discard(self, session: Session, discarded: np.ndarray) -> None: ...
    def forget(self, session: Session) -> None: ...


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
        is_kept: bool = True,
    ) -> None:
        self._engine = engine
        self._closed = False
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
        self.is_kept = is_kept
        """Whether its turns are stored and it is found by its name. Else stored KV is read for it, and none written."""
        self.usage: Usage | None = None
        """Of the last turn that has ended."""
        self.finish_reason: FinishReason | None = None
        """Of the last turn that has ended."""

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

        The turn is queued by this call; iterating runs the engine. A caller that stops early, closes the answer or lets
        go of it ends the turn: what was generated so far stays part of the conversation.

        Args:
          message: of the user; or messages, each a `role`, its `content` and possibly its `context`, where more was
            said since the last answer: those of a conversation that was held elsewhere, say.
          context: the last message's: chunks of text, or token ids, that stand in front of it, part of it: documents
            that were found for it, say. The KV of each is computed once, alone, and used wherever in a prompt the chunk
            comes (`EngineConfig.blend`), by all sessions of the tenant; `Engine.precompute` does that in advance. A
            text is tokenised alone, a blank line behind it.
          max_tokens: in place of the one in `sampling`.
          sampling: how to draw; greedy if not given.
          priority: turns of lower values go first; none waits forever.
          truncation: `auto` has tokens leave where the window is full, as `EngineConfig.overflow` says, those of a
            history that is given whole too; `disabled` is an error there, and ends an answer that fills the window.

        Raises:
          SessionClosedError: the session or its engine is closed.
          SessionBusyError: the last turn still runs.
          EmptyMessageError: the message is blank or there is none, or a chunk, or there is a context without chunks.
          InvalidRequestError: `max_tokens` below 1, an unknown `truncation`, a context given twice, a priority that is
            no whole number, an id in `logit_bias` that is outside the vocabulary, or messages that the model's chat
            template refuses.
          ContextWindowError: the message and its context leave no room for an answer (it says by how much), or the
            history does and none of it may be dropped (`EngineConfig.overflow`). The session stays as it was.

        Source: `context` is CacheBlend (Yao et al., EuroSys 2025).
        """
        params = _with_max_tokens(sampling, max_tokens)
        job = self.submit(
            as_messages(message), context=context, sampling=params, priority=priority, truncation=truncation
        )
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
        """Queues a turn whose new tokens are given as they are, without template; otherwise as `send`.

        Raises:
          EmptyMessageError: no tokens.
          InvalidRequestError: an id outside the vocabulary, and as for `send`.
          SessionClosedError: as for `send`; so are SessionBusyError and ContextWindowError.
        """
        params = _with_max_tokens(sampling, max_tokens)
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
    ) -> Job:
        """Queues a turn of messages or of token ids, without running the engine; otherwise as `send` and `send_ids`.

        Nothing ends the job by itself but what `sampling` says: `Engine.cancel` does. With `texts` it may raise
        `TextWork`, as `Engine.submit_turn` says.
        """
        self._check_ready()
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise InvalidRequestError(f"priority must be a whole number, got {priority!r}")
        if truncation not in ("auto", "disabled"):
            raise InvalidRequestError(f"truncation must be 'auto' or 'disabled', got {truncation!r}")
        last = new[-1] if len(new) else None
        if isinstance(last, Mapping) and not last["content"].strip():
            raise EmptyMessageError("a message must have text in it, got a blank one")
        params = sampling or SamplingParams()
        asked = TurnRequest(new=new, params=params, priority=priority, context=context, truncation=truncation)
        self.job = self._engine.submit_turn(self, asked, texts)
        return self.job

    def rewind(self, num_tokens: int) -> None:
        """Forgets the conversation and its KV behind the first `num_tokens` tokens; what remains is used as it stands.

        Turns that began behind that point leave `messages`.

        Raises:
          InvalidRequestError: `num_tokens` is negative or above what there is.
          SessionClosedError: the session is closed.
          SessionBusyError: a turn still runs.
        """
        self._check_ready()
        if not 0 <= num_tokens <= len(self.token_ids):
            raise InvalidRequestError(f"tokens to keep must be 0..{len(self.token_ids)}, got {num_tokens}")
        self._engine.truncate_stored(self, num_tokens, self.conversation.take(num_tokens))

    def discard(self, tokens: npt.ArrayLike) -> int:
        """Forgets some tokens of the conversation and their KV; what remains is used as it stands.

        Nothing is computed anew but the anchor and the repair that `EngineConfig.overflow` asks for.

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
        self._check_ready()
        self._engine.discard(self, check_discarded(tokens, len(self.token_ids)))
        return len(self.token_ids)

    def resume(self, conversation: Conversation) -> None:
        """Makes the conversation another one; for the engine."""
        if conversation.token_ids is not self.conversation.token_ids:
            self._packed_ids = None
        self.conversation = conversation

    def _check_ready(self) -> None:
        self._engine.end_abandoned()
        if self._closed:
            raise SessionClosedError(f"session {self.session_id!r} is closed")
        if self.is_busy:
            raise SessionBusyError(
                f"session {self.session_id!r} still answers; it must have ended before the next turn"
            )

    def adopt(self, job: Job, reason: FinishReason) -> None:
        """Makes a turn that ends for a reason part of the conversation; for the engine."""
        num_before = len(self.token_ids)
        token_ids = [*job.slid_ids, *job.token_ids]
        self.conversation = self.conversation.with_turn(
            token_ids, job.messages, job.output.text, job.attention, job.given_ids
        )
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
            if self.job is not None and not self.job.done:
                self._engine.cancel(self.job)
            self._engine.forget(self)


def _with_max_tokens(sampling: SamplingParams | None, max_tokens: int | None) -> SamplingParams:
    params = sampling or SamplingParams()
    return params if max_tokens is None else dataclasses.replace(params, max_tokens=max_tokens)
