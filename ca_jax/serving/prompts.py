"""Turns and chunks to jobs: their messages as token ids, whether they fit the window, and what leaves it for them.

History is kept as ids and never tokenised again.

Not here: chat templates and tokenizers themselves (models), cutting texts into chunks (chunks), the queue (scheduler),
locks and sessions by name (engine).
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import reprlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from ca_jax.config import ChunkHead, EngineConfig
from ca_jax.device.processes import Processes, from_first
from ca_jax.errors import ContextWindowError, EmptyMessageError, InvalidRequestError, check
from ca_jax.kv import costs
from ca_jax.kv.session_kv import SessionKV
from ca_jax.models.chat_template import ChatTemplate, with_arguments
from ca_jax.models.tokenizer import Tokenizer
from ca_jax.pretrained import LoadedModel, check_token_ids
from ca_jax.serving.adapters import LoadedAdapters
from ca_jax.serving.grammars import CompiledGrammar, Grammars
from ca_jax.serving.truncator import Truncator
from ca_jax.session import Job, Session
from ca_jax.turns.conversations import Conversation, Message, as_messages, chain_of, message_chars, padded
from ca_jax.turns.requests import NO_ADAPTER, SamplingParams, TurnRequest, UsedAdapter
from ca_jax.turns.text import (
    LIGHT_CHARS,
    MESSAGE_CHARS,
    ChunkSpan,
    ReplyReader,
    TextOutput,
    Texts,
    chunk_text,
    num_chars,
)

_MAX_HEAD_TOKENS = 64  # Each chunk is computed behind as many, once; 16 took a sink's part as well.


@dataclasses.dataclass(frozen=True)
class NewTurn:
    """What a turn puts behind a conversation."""

    ids: list[int]  # Its tokens, those of its contexts among them.
    chunks: list[tuple[int, int]]  # Of each chunk of its contexts, where in `ids` it begins and how many tokens it has.
    reply_ends: list[tuple[int, int]]
    """Of each reply among the new messages, how many of `ids` and how many messages there are up to its end; where
    that was asked for."""


def turn_ids(
    model: LoadedModel, token_ids: list[int], messages: list[Message], new: str | Sequence[Message]
) -> list[int]:
    """A conversation's tokens with the next messages behind them, ready to be answered; see `new_turn`."""
    return token_ids + new_turn(model, token_ids, messages, new).ids


def new_turn(
    model: LoadedModel,
    token_ids: list[int],
    messages: list[Message],
    new: str | Sequence[Message],
    finds_replies: bool = False,
) -> NewTurn:
    """The new tokens of a turn. The context of a message stands right before its own text.

    They are what the chat template makes of the texts of contexts with the messages behind them, but that each chunk,
    and what is between contexts, is tokenised alone. What messages and chunks spell of special tokens is text.

    Args:
      token_ids: the conversation so far, as the model saw it; empty before its first turn.
      messages: the same as text; before the first turn a system message at most.
      finds_replies: whether to say where the replies among the new messages end; they are tokenised up to there.

    Raises:
      EmptyMessageError, InvalidRequestError: a context as of `context_ids`, or of a reply; the model has no tokenizer;
        its template refuses the messages, or does not write one that has a context once and as it is.
    """
    tokenizer = _tokenizer(model)
    mark = f"context{secrets.token_hex(16)}"  # Nobody can have written it.
    marked: list[Message] = []
    contexts: dict[int, list[list[int]]] = {}
    replies: set[int] = set()
    for number, message in enumerate(as_messages(new)):
        marked.append(told(tokenizer, message))
        if "context" in message:
            if message["role"] == "assistant":
                raise InvalidRequestError("context must be of a message to the assistant, got one of the assistant's")
            contexts[number] = context_ids(model, message["context"])
            marked[-1]["content"] = f"{mark}{number}.{marked[-1]['content']}"
        elif finds_replies and message["role"] == "assistant" and "tool_calls" not in message:
            replies.add(number)
            marked[-1]["content"] += f"{mark}{number}."
    before = [told(tokenizer, message) for message in messages]
    template = tokenizer.chat_template or ChatTemplate.plain()
    text = template.next_turn(before, marked) if token_ids else template.first_turn([*before, *marked])
    first, *pieces = re.split(rf"{mark}(\d+)\.", text)
    if sorted(map(int, pieces[::2])) != sorted([*contexts, *replies]):
        raise InvalidRequestError(
            "this model's chat template has no place for a context before a message: it must write the message "
            f"once, as it is, and wrote it {len(pieces) // 2} times"
        )
    ids, chunks, ends = tokenizer.encode_said(first), [], []
    if token_ids and ids and ids[0] == token_ids[-1] and ids[0] in model.stop_token_ids:
        ids = ids[1:]  # The template ends the last answer, and the model has ended it with that itself.
    for number, piece in zip(map(int, pieces[::2]), pieces[1::2], strict=True):
        for chunk in contexts.get(number, []):
            chunks.append((len(ids), len(chunk)))
            ids += chunk
        if number in replies:
            ends.append((len(ids), number + 1))
        ids += tokenizer.encode_said(piece)
    return NewTurn(ids, chunks, ends)


def context_ids(model: LoadedModel, chunks: Sequence[str | Sequence[int]]) -> list[list[int]]:
    """The token ids of each chunk of a context.

    Raises:
      EmptyMessageError, InvalidRequestError: there is no chunk, or one is as `chunk_ids` refuses it; it says which.
    """
    if isinstance(chunks, str):
        raise InvalidRequestError(f"a context must be a list of chunks, got one text of {len(chunks)} characters")
    if not len(chunks):
        raise EmptyMessageError("a context must have at least one chunk, got none")
    found = []
    for number, chunk in enumerate(chunks, 1):
        try:
            found.append(chunk_ids(model, chunk))
        except (EmptyMessageError, InvalidRequestError) as error:
            raise type(error)(f"chunk {number} of {len(chunks)}: {error}") from error
    return found


def chunk_ids(model: LoadedModel, chunk: str | Sequence[int]) -> list[int]:
    """The token ids of a chunk: of ids as they are, of text tokenised alone, without a token that begins a sequence.

    Raises:
      EmptyMessageError: a blank text, or no ids.
      InvalidRequestError: it is neither, an id is outside the vocabulary, or the model has no tokenizer for the text.
    """
    if isinstance(chunk, str):
        if not chunk.strip():
            raise EmptyMessageError("a chunk must have text in it, got a blank one")
        return _tokenizer(model).encode_content(chunk_text(chunk))
    try:
        ids = [int(i) for i in chunk]
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"a chunk must be text or token ids, got {reprlib.repr(chunk)}") from error
    return _checked(model, "a chunk", ids)


def chunk_head(model: LoadedModel, kind: ChunkHead) -> list[int]:
    """The token ids that a model's chunks are computed behind, see `ChunkHead`.

    They are what its conversations begin with, up to the first message's text, at most 64; without a chat template a
    token that begins a sequence, where the model has one, and "User: ". None where there is no tokenizer.
    """
    tokenizer = model.tokenizer
    if kind == "none" or tokenizer is None:
        return []
    template = tokenizer.chat_template
    try:
        begun = None if template is None else template.before_message()
    except InvalidRequestError:  # It writes messages in a way of its own.
        begun = None
    ids = tokenizer.encode(ChatTemplate.plain().before_message()) if begun is None else tokenizer.encode(begun, False)
    return ids[:_MAX_HEAD_TOKENS]


def prompt_ids(model: LoadedModel, prompt: str | Sequence[int]) -> list[int]:
    """The token ids of a prompt given as ids, or as text: what that spells of special tokens becomes those.

    Raises:
      EmptyMessageError: there are none.
      InvalidRequestError: an id outside the vocabulary, or text for a model without tokenizer.
    """
    ids = _tokenizer(model).encode(prompt) if isinstance(prompt, str) else [int(i) for i in prompt]
    return _checked(model, "a prompt", ids)


def params_of_each(
    prompts: Sequence[object], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """Sampling parameters of each prompt, where one may be given for all, or none.

    Raises:
      InvalidRequestError: there is not one for each.
    """
    params = SamplingParams() if params is None else params
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise InvalidRequestError(f"there must be one params for each of {len(prompts)} prompts, got {len(each)}")
    return each


def _checked(model: LoadedModel, what: str, ids: list[int]) -> list[int]:
    if not ids:
        raise EmptyMessageError(f"{what} must have at least one token, got an empty one")
    check_token_ids(ids, model.config.vocab_size)
    return ids


def messages_or_ids(
    model: LoadedModel,
    new: str | Sequence[Message] | Sequence[int],
    context: Sequence[str | Sequence[int]] | None = None,
) -> tuple[list[Message], list[int]]:
    """What a turn begins with: messages, or where token ids are given no messages and these.

    Raises:
      EmptyMessageError: there is nothing.
      InvalidRequestError: an id outside the vocabulary, or the last message has a context already.
    """
    if not isinstance(new, str) and not (len(new) and isinstance(new[0], Mapping)):
        return [], prompt_ids(model, cast(Sequence[int], new))
    messages = as_messages(cast("str | Sequence[Message]", new))
    if context is not None:
        if "context" in messages[-1]:
            raise InvalidRequestError("context must be given once, got it with the last message and beside it")
        messages[-1] = {**messages[-1], "context": context}
    return [
        {**message, "context": given_chunks(message["context"])} if "context" in message else message
        for message in messages
    ], []


def given_chunks(context: Any) -> Any:
    """A context as conversations keep it: texts, and lists of ids. What is neither is left as it is."""
    if isinstance(context, str) or not isinstance(context, Iterable):
        return context
    return [
        chunk if isinstance(chunk, str) or not isinstance(chunk, Iterable) else list(map(_as_id, chunk))
        for chunk in context
    ]


def _as_id(token: Any) -> Any:
    return int(token) if hasattr(token, "__index__") else token


def told(tokenizer: Tokenizer, message: Message) -> Message:
    """A message as a chat template takes it: its own text, without its context."""
    return tokenizer.said(with_arguments({name: value for name, value in message.items() if name != "context"}))


def _tokenizer(model: LoadedModel) -> Tokenizer:
    if model.tokenizer is None:
        raise InvalidRequestError(f"{model.name} has no tokenizer; a prompt must be token ids, got text")
    return model.tokenizer


class TurnBuilder:
    """Makes jobs. Belongs to the engine's thread."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        window: int,
        kv: SessionKV,
        truncator: Truncator,
        processes: Processes,
        adapters: LoadedAdapters,
    ) -> None:
        self._model = model
        self._config = config
        self._window = window
        self._limit = f"the context window of {window} tokens"
        self._kv = kv
        self._truncator = truncator
        self._processes = processes
        self._adapters = adapters
        self._grammars = Grammars(model.tokenizer, model.config.vocab_size)

    def job(
        self,
        ids: list[int],
        params: SamplingParams,
        session: Session | None = None,
        priority: int = 0,
        reader: ReplyReader | None = None,
        compiled: CompiledGrammar | None = None,
    ) -> Job:
        """A job with a prompt. `compiled` is its grammar, where that has been compiled already.

        Raises:
          UnknownAdapterError: the session's adapter is not loaded.
          InvalidRequestError: a `logit_bias` outside the vocabulary, a grammar as of `Grammars.compiled`.
          ContextWindowError: the prompt leaves no room for a token of its answer.
        """
        self._check_bias(params)
        self._check_length(len(ids))
        if params.grammar is not None and compiled is None:
            compiled = self._grammars.compiled(params.grammar)
        tokenizer = self._model.tokenizer
        spelled = frozenset() if reader is None else reader.spelled
        if tokenizer is not None and not params.skip_special_tokens:
            spelled = tokenizer.special_names
        stream = None if tokenizer is None else tokenizer.stream(spelled)
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self._model.stop_token_ids))
        return Job(
            prompt_ids=ids,
            params=params,
            output=TextOutput(stream, params.stop, params.min_tokens, reader),
            stop_ids=frozenset(stops),
            matcher=None if compiled is None else compiled.begin(stops),
            session=session,
            priority=priority,
            adapter=NO_ADAPTER if session is None else self._adapters.of(session.conversation),
        )

    def turn(self, session: Session, request: TurnRequest, texts: Texts) -> Job:
        """The job of a session's next turn. Tokens that have to leave for it have left when this returns.

        Raises:
          TextWork: more text is to be made token ids than is done at once.
          InvalidRequestError, EmptyMessageError, ContextWindowError: see `Session.send`.
        """
        self._adapters.of(session.conversation)  # Before any token leaves.
        self._check_bias(request.params)
        grammar, compiled = request.params.grammar, None
        if grammar is not None:  # Never compiled under the lock.
            compiled = texts.get(LIGHT_CHARS + 1, self._grammars.compiled, grammar)
        said, given_ids = messages_or_ids(self._model, request.new, request.context)
        may_drop = request.truncation == "auto" and self._config.overflow is not None
        begun = session.conversation
        history = begun if begun.borrowed else None  # Nothing of it is computed: the oldest would leave, as if told.
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
        ids = [*held.token_ids, *turn.ids]
        job = self.job(ids, request.params, session, request.priority, request.reader, compiled)
        job.messages, job.given_ids, job.note = said, given_ids, request.note if session.is_kept else None
        if given_ids:
            tokenizer = self._model.tokenizer
            job.messages = as_messages("" if tokenizer is None else tokenizer.decode(given_ids))
            if request.context is not None:
                job.messages[-1]["context"] = given_chunks(request.context)
        job.dropped_tokens, job.may_drop = num_leaving, may_drop
        job.num_gone = held.num_dropped
        if self._config.overflow is not None and self._config.overflow.token_discarder.needs_attention:
            job.attention = padded(held.attention, len(held.token_ids))
        job.context_tokens = sum(map(len, chunks))
        if self._config.blend.reuses_chunks and request.params.prompt_logprobs is None:  # Else they are computed.
            weights = job.adapter.fingerprint
            job.spans = tuple(
                self._kv.chunks.span(ids, len(held.token_ids) + start, num_tokens, session.tenant, weights)
                for start, num_tokens in turn.chunks
            )
            if (part := held.borrowed) is not None:
                key = self._kv.key(part.session_id, session.tenant, held.adapter_weights)
                job.spans = (ChunkSpan(key, part.start, part.num_tokens, first=part.first), *job.spans)
        return job

    def at_idle(self, session: Session, token_ids: list[int], kind: str) -> Job:
        """A job as of `Job.at_idle`. Raises what `job` does."""
        job = self.job(token_ids, SamplingParams(max_tokens=1), session)
        job.at_idle = kind
        return job

    def missing_chunks(self, job: Job, session: Session) -> list[Job]:
        """The jobs that compute the chunks of a turn of which nothing is stored; none of one that keeps nothing."""
        alone = [span for span in job.spans if span.first is None] if session.is_kept else []
        each = [job.prompt_ids[span.start : span.stop] for span in alone]
        return self._chunk_jobs(each, session.tenant, job.priority, job.adapter)

    def chunks(self, chunks: Sequence[str | Sequence[int]], tenant: str, tier: costs.Tier | None) -> list[Job]:
        """The jobs of those chunks that are not stored; see `Engine.precompute`."""
        each = context_ids(self._model, chunks)
        self.check_chunks(each)
        kv, jobs = self._kv.chunks, self._chunk_jobs(each, tenant)
        for ids in each:
            kv.ask_for(kv.key(ids, tenant))
        for job in jobs:
            if job.chunk is not None and (tier or self._tier_of(job.chunk.num_tokens)) == "ssd":
                kv.keep_on_ssd(job.chunk.key)
        return jobs

    def _chunk_jobs(
        self, chunks: list[list[int]], tenant: str, priority: int = 0, adapter: UsedAdapter = NO_ADAPTER
    ) -> list[Job]:
        """The jobs that compute chunks, but for those where that is not needed, or that would not be kept."""
        kv, jobs = self._kv.chunks, []
        for ids in chunks:
            span = ChunkSpan(kv.key(ids, tenant, adapter.fingerprint), 0, len(ids))
            if from_first(self._processes, "a chunk", not kv.is_kept(span) and kv.has_room(len(ids))):
                job = self.job([*kv.head_of(len(ids)), *ids], SamplingParams(), priority=priority)
                job.chunk, job.tenant, job.adapter = span, tenant, adapter
                kv.coming(job)
                jobs.append(job)
        return jobs

    def check_chunks(self, chunks: list[list[int]], num_others: int = 0) -> None:
        """Checks that chunks fit the context window together with so many other tokens; without others, each alone.

        Raises:
          ContextWindowError: they do not.
          InvalidRequestError: layers of the model keep states, which cannot be put together of chunks.
        """
        if self._model.config.num_states and self._config.blend.reuses_chunks:
            raise InvalidRequestError(
                f"chunks cannot be put together for {self._model.config.architecture}, layers of which keep a state of "
                f"all that was said: blend mode must be 'prefix' or 'recompute', got {self._config.blend.mode!r}"
            )
        for number, ids in enumerate(chunks, 1):
            which = f"chunk {number} of {len(chunks)}"
            check(len(ids) < self._window, which, f"under {self._limit}", len(ids), ContextWindowError)
        num_tokens = num_others + sum(map(len, chunks))
        if num_others and num_tokens >= self._window:
            raise ContextWindowError(
                f"a prompt must be under {self._limit}, got {num_tokens}: "
                f"{len(chunks)} chunks of {num_tokens - num_others} and {num_others} others; "
                f"leave out {num_tokens - self._window + 1} tokens of the chunks or more"
            )

    def _check_bias(self, params: SamplingParams) -> None:
        num_tokens = self._model.config.vocab_size
        wrong = next((token for token, _ in params.logit_bias if not 0 <= token < num_tokens), None)
        if wrong is not None:
            raise InvalidRequestError(f"logit_bias token ids must be in [0, {num_tokens}), got {wrong}")

    def _check_length(self, num_tokens: int) -> None:
        check(num_tokens < self._window, "a prompt", f"under {self._limit}", num_tokens, ContextWindowError)

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
            size = message_chars(said) + message_chars(messages[:1]) + len(messages) * MESSAGE_CHARS
            return texts.get(size, new_turn, self._model, conversation.token_ids[-1:], messages, said)
        chunks = [] if context is None else texts.get(num_chars(context), context_ids, self._model, context)
        starts = itertools.accumulate(map(len, chunks), initial=0)
        spans = [(start, len(ids)) for ids, start in zip(chunks, starts, strict=False)]
        return NewTurn([*itertools.chain.from_iterable(chunks), *given_ids], spans, [])

    def _told(
        self, begun: Conversation, said: list[Message], texts: Texts
    ) -> tuple[Conversation | None, list[Message]]:
        """A history that is told at once as a conversation that was held, and the messages behind its last reply.

        No conversation, and all of the messages, where there is no reply before the last of them.
        """
        num_before = len(begun.messages)
        everything = [*begun.messages, *said]
        turn = texts.get(message_chars(everything), new_turn, self._model, [], [], everything, True)
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
            adapter=begun.adapter,
            adapter_weights=begun.adapter_weights,
        )
        return history, said[num_messages - num_before :]

    def _tier_of(self, num_tokens: int) -> costs.Tier:
        """Where a chunk is kept that is computed in advance."""
        rates, least, stats = self._kv.meter.rates, self._config.blend.min_recompute_ratio, self._kv.store.stats()
        if rates is None or self._config.store.ssd_dir is None or 2 * stats.used_bytes < stats.capacity_bytes:
            return "dram"
        return costs.choose_tier(rates, num_tokens, 1, least)
