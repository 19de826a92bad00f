"""Turns and chunks to jobs: what their prompts are, whether these fit the window, and what leaves it for them.

Not here: messages as token ids (prompts), the queue (scheduler), locks and sessions by name (engine).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

from ca_jax.config import EngineConfig
from ca_jax.device.processes import Processes, from_first
from ca_jax.errors import ContextWindowError, InvalidRequestError
from ca_jax.kv import blend_costs
from ca_jax.kv.session_kv import SessionKV
from ca_jax.pretrained import LoadedModel
from ca_jax.serving.prompts import NewTurn, context_ids, given_chunks, messages_or_ids, new_turn, text_of
from ca_jax.serving.truncator import Truncator
from ca_jax.turns.chunks import ChunkSpan
from ca_jax.turns.conversations import Conversation, Message, as_messages, chain_of, padded
from ca_jax.turns.jobs import Job, TurnSession
from ca_jax.turns.requests import SamplingParams, TurnRequest
from ca_jax.turns.text import MESSAGE_CHARS, TextOutput, Texts, num_chars


class TurnBuilder:
    """Makes jobs. Belongs to the engine's thread.

    Args:
      model: whose tokens.
      config: the engine's.
      window: most tokens of a context.
      kv: what is stored.
      truncator: says what leaves a full window.
      processes: those that serve as one.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        window: int,
        kv: SessionKV,
        truncator: Truncator,
        processes: Processes,
    ) -> None:
        self._model = model
        self._config = config
        self._window = window
        self._kv = kv
        self._truncator = truncator
        self._processes = processes

    def job(self, ids: list[int], params: SamplingParams, session: TurnSession | None = None, priority: int = 0) -> Job:
        """A job with a prompt.

        Raises:
          InvalidRequestError: a `logit_bias` outside the vocabulary.
          ContextWindowError: the prompt leaves no room for a token of its answer.
        """
        self._check_bias(params)
        self._check_length(len(ids))
        tokenizer = self._model.tokenizer
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self._model.stop_token_ids))
        return Job(
            prompt_ids=ids,
            params=params,
            output=TextOutput(None if tokenizer is None else tokenizer.stream(), params.stop, params.min_tokens),
            stop_ids=frozenset(stops),
            session=session,
            priority=priority,
        )

    def turn(self, session: TurnSession, request: TurnRequest, texts: Texts) -> Job:
        """The job of a session's next turn. Tokens that have to leave for it have left when this returns.

        Args:
          session: whose turn; it is idle.
          request: what is asked for.
          texts: what is known of its texts.

        Raises:
          TextWork: more text is to be made token ids than is done at once.
          InvalidRequestError, EmptyMessageError, ContextWindowError: see `Session.send`.
        """
        self._check_bias(request.params)  # Before any token leaves.
        said, given_ids = messages_or_ids(self._model, request.new, request.context)
        may_drop = request.truncation == "auto" and self._config.overflow is not None
        begun, history = session.conversation, None
        turn = self._new_turn(begun, said, given_ids, request.context, texts)
        if may_drop and said and not begun.token_ids and len(turn.ids) >= self._window:
            history, said = self._told(begun, said, texts)  # As if it had been held here: the oldest of it leaves.
            begun = history or begun
            turn = self._new_turn(begun, said, given_ids, request.context, texts)
        chunks = [turn.ids[start : start + num_tokens] for start, num_tokens in turn.chunks]
        if chunks:
            self.check_chunks(chunks, num_others=len(turn.ids) - sum(map(len, chunks)))
        discarded = None if not may_drop else self._truncator.for_prompt(session, len(turn.ids), history)
        num_leaving = 0 if discarded is None else int(discarded.sum())
        if said and discarded is not None and discarded.all():  # It begins anew, with this message.
            turn = self._new_turn(begun.take(0), said, given_ids, request.context, texts)
        self._check_length(len(begun.token_ids) - num_leaving + len(turn.ids))
        if history is not None:
            session.resume(self._truncator.without(history, discarded))
        elif discarded is not None:
            self._truncator.cut(session, discarded)
        held = session.conversation
        job = self.job([*held.token_ids, *turn.ids], request.params, session, request.priority)
        job.messages, job.given_ids = said, given_ids
        if given_ids:
            job.messages = as_messages(text_of(self._model, given_ids))
            if request.context is not None:
                job.messages[-1]["context"] = given_chunks(request.context)
        job.dropped_tokens, job.may_drop = num_leaving, may_drop
        job.num_gone = held.num_dropped
        if self._config.overflow is not None and self._config.overflow.token_discarder.needs_attention:
            job.attention = padded(held.attention, len(held.token_ids))
        job.context_tokens = sum(map(len, chunks))
        if self._config.blend.reuses_chunks:
            job.spans = tuple(
                ChunkSpan(self._kv.chunks.key(ids, session.tenant), len(held.token_ids) + start, len(ids))
                for ids, (start, _) in zip(chunks, turn.chunks, strict=True)
            )
        return job

    def chunk(self, ids: list[int], tenant: str, priority: int = 0) -> Job | None:
        """The job that computes a chunk; None where that is not needed, or would not be kept."""
        kv = self._kv.chunks
        span = ChunkSpan(kv.key(ids, tenant), 0, len(ids))
        if not from_first(self._processes, "a chunk", not kv.is_kept(span) and kv.has_room(len(ids))):
            return None
        job = self.job(ids, SamplingParams(), priority=priority)
        job.chunk, job.tenant = span, tenant
        kv.coming(job)
        return job

    def chunks(
        self, chunks: Sequence[str | Sequence[int]], tenant: str, tier: Literal["dram", "ssd"] | None
    ) -> list[Job]:
        """The jobs of those chunks that are not stored; see `Engine.precompute`."""
        each = context_ids(self._model, chunks)
        self.check_chunks(each)
        kv = self._kv.chunks
        jobs = [job for ids in each if (job := self.chunk(ids, tenant)) is not None]
        for ids in each:
            kv.ask_for(kv.key(ids, tenant))
        for job in jobs:
            if job.chunk is not None and (tier or self._tier_of(job.chunk.num_tokens)) == "ssd":
                kv.keep_on_ssd(job.chunk.key)
        return jobs

    def check_chunks(self, chunks: list[list[int]], num_others: int | None = None) -> None:
        """Checks that chunks fit the context window, each alone, and all with so many other tokens if that is given.

        Raises:
          ContextWindowError: they do not.
        """
        for number, ids in enumerate(chunks, 1):
            if len(ids) >= self._window:
                raise ContextWindowError(
                    f"chunks must be under the context window of {self._window} tokens, "
                    f"got {len(ids)} in chunk {number} of {len(chunks)}"
                )
        if num_others is None:
            return
        num_tokens = num_others + sum(map(len, chunks))
        if num_tokens >= self._window:
            raise ContextWindowError(
                f"a prompt must be under the context window of {self._window} tokens, got {num_tokens}: "
                f"{len(chunks)} chunks of {num_tokens - num_others} and {num_others} others; "
                f"leave out {num_tokens - self._window + 1} tokens of the chunks or more"
            )

    def _check_bias(self, params: SamplingParams) -> None:
        num_tokens = self._model.config.vocab_size
        wrong = next((token for token, _ in params.logit_bias if not 0 <= token < num_tokens), None)
        if wrong is not None:
            raise InvalidRequestError(f"logit_bias token ids must be in [0, {num_tokens}), got {wrong}")

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens >= self._window:
            raise ContextWindowError(
                f"a prompt must be under the context window of {self._window} tokens, got {num_tokens}"
            )

    def _new_turn(
        self,
        conversation: Conversation,
        said: list[Message],
        given_ids: list[int],
        context: Sequence[str | Sequence[int]] | None,
        texts: Texts,
    ) -> NewTurn:
        """What a turn of messages, or of token ids with a context before them, puts behind a conversation."""
        if said:
            messages = conversation.messages
            size = _num_chars(said) + len(messages) * MESSAGE_CHARS
            return texts.get(size, self._turn_behind, conversation.token_ids[-1:], messages, said)
        chunks = [] if context is None else texts.get(num_chars(context), self._context_ids, context)
        starts = itertools.accumulate(map(len, chunks), initial=0)
        spans = [(start, len(ids)) for ids, start in zip(chunks, starts, strict=False)]
        return NewTurn([*itertools.chain.from_iterable(chunks), *given_ids], spans, [])

    def _turn_behind(self, last_ids: list[int], messages: list[Message], said: list[Message]) -> NewTurn:
        """What messages put behind those whose last token id is given; none before the first turn."""
        return new_turn(self._model, last_ids, messages, said)

    def _context_ids(self, context: Sequence[str | Sequence[int]]) -> list[list[int]]:
        return context_ids(self._model, context)

    def _turn_with_replies(self, messages: list[Message]) -> NewTurn:
        return new_turn(self._model, [], [], messages, finds_replies=True)

    def _told(
        self, begun: Conversation, said: list[Message], texts: Texts
    ) -> tuple[Conversation | None, list[Message]]:
        """A history that is told at once as a conversation that was held, and the messages behind its last reply.

        No conversation, and all of the messages, where there is no reply before the last of them.
        """
        num_before = len(begun.messages)
        everything = [*begun.messages, *said]
        turn = texts.get(_num_chars(everything), self._turn_with_replies, everything)
        ends = [(num_tokens, number) for num_tokens, number in turn.reply_ends if number < num_before + len(said)]
        if not ends:
            return None, said
        num_tokens, num_messages = ends[-1]
        messages = everything[:num_messages]
        chain = chain_of(messages[num_before:], begun.chain)
        history = Conversation(
            token_ids=turn.ids[:num_tokens],
            messages=messages,
            turn_starts=[(0, num_before), *ends[:-1]],
            chain=chain,
            states=[(chain, num_tokens)],
            generation=begun.generation,
        )
        return history, said[num_messages - num_before :]

    def _tier_of(self, num_tokens: int) -> Literal["dram", "ssd"]:
        """Where a chunk is kept that is computed in advance."""
        rates, least, stats = self._kv.meter.rates, self._config.blend.min_recompute_ratio, self._kv.store.stats()
        if rates is None or self._config.store.ssd_dir is None or 2 * stats.used_bytes < stats.capacity_bytes:
            return "dram"
        return blend_costs.choose_tier(rates, num_tokens, 1, least)


def _num_chars(messages: Sequence[Message]) -> int:
    """Characters in messages and in the texts of their contexts."""
    return sum(num_chars([message["content"], *(message.get("context") or ())]) for message in messages)
