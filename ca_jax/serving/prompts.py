"""Messages, chunks and prompts to token ids. History is kept as ids and never tokenised again.

Not here: chat templates and tokenizers themselves (models), cutting texts into chunks (chunks), jobs (session).
"""

from __future__ import annotations

import dataclasses
import re
import reprlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from ca_jax.errors import EmptyMessageError, InvalidRequestError
from ca_jax.models.chat_template import ChatTemplate
from ca_jax.models.tokenizer import Tokenizer
from ca_jax.pretrained import LoadedModel, check_token_ids
from ca_jax.turns.chunks import chunk_text
from ca_jax.turns.conversations import Message, as_messages


@dataclasses.dataclass(frozen=True)
class NewTurn:
    """What a turn puts behind a conversation."""

    ids: list[int]
    """Its tokens, those of its contexts among them."""
    chunks: list[tuple[int, int]]
    """Of each chunk of its contexts, where in `ids` it begins and how many tokens it has."""
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
    *,
    finds_replies: bool = False,
) -> NewTurn:
    """The new tokens of a turn. The context of a message stands right before its own text.

    They are what the chat template makes of the texts of contexts with the messages behind them, but that each chunk,
    and what is between contexts, is tokenised alone. What messages and chunks spell of special tokens is text.

    Args:
      model: whose tokenizer and chat template are used.
      token_ids: the conversation so far, as the model saw it; empty before its first turn.
      messages: the same as text; before the first turn a system message at most.
      new: the user's message, or messages.
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
        marked.append(_told(tokenizer, message))
        if "context" in message:
            if message["role"] == "assistant":
                raise InvalidRequestError("context must be of a message to the assistant, got one of the assistant's")
            contexts[number] = context_ids(model, message["context"])
            marked[-1]["content"] = f"{mark}{number}.{marked[-1]['content']}"
        elif finds_replies and message["role"] == "assistant":
            replies.add(number)
            marked[-1]["content"] += f"{mark}{number}."
    text = _turn_text(model, token_ids, [_told(tokenizer, message) for message in messages], marked)
    first, *pieces = re.split(rf"{mark}(\d+)\.", text)
    if sorted(map(int, pieces[::2])) != sorted([*contexts, *replies]):
        raise InvalidRequestError(
            "this model's chat template has no place for a context before a message: it must write the message "
            f"once, as it is, and wrote it {len(pieces) // 2} times"
        )
    ids, chunks, ends = _behind(model, token_ids, tokenizer.encode_said(first)), [], []
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

    Args:
      model: whose tokenizer is used.
      chunks: each as `chunk_ids` takes it.

    Raises:
      EmptyMessageError: there is no chunk, or one is blank or without tokens; the message says which.
      InvalidRequestError: what is given is one text, or as of `chunk_ids`; the message says which chunk.
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
    """The token ids of a chunk given as text or as ids.

    Text is tokenised alone and without a token that begins a sequence, `chunks.CHUNK_END` behind it unless it ends in a
    line break.

    Raises:
      EmptyMessageError: a blank text, or no ids.
      InvalidRequestError: an id outside the vocabulary, what is neither text nor ids, or text for a model without
        tokenizer.
    """
    if isinstance(chunk, str):
        if not chunk.strip():
            raise EmptyMessageError("a chunk must have text in it, got a blank one")
        return _tokenizer(model).encode_content(chunk_text(chunk))
    try:
        ids = [int(i) for i in chunk]
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"a chunk must be text or token ids, got {reprlib.repr(chunk)}") from error
    if not ids:
        raise EmptyMessageError("a chunk must have at least one token, got an empty one")
    check_token_ids(ids, model.config.vocab_size)
    return ids


def prompt_ids(model: LoadedModel, prompt: str | Sequence[int]) -> list[int]:
    """The token ids of a prompt given as text or as ids. A text is all of the prompt: what it spells of special tokens
    becomes those.

    Raises:
      EmptyMessageError: there are none.
      InvalidRequestError: an id outside the vocabulary, or text for a model without tokenizer.
    """
    ids = _tokenizer(model).encode(prompt) if isinstance(prompt, str) else [int(i) for i in prompt]
    if not ids:
        raise EmptyMessageError("a prompt must have at least one token, got an empty one")
    check_token_ids(ids, model.config.vocab_size)
    return ids


def messages_or_ids(
    model: LoadedModel,
    new: str | Sequence[Message] | Sequence[int],
    context: Sequence[str | Sequence[int]] | None = None,
) -> tuple[list[Message], list[int]]:
    """What a turn begins with: messages, or where token ids are given no messages and these.

    Args:
      model: whose vocabulary the ids are of.
      new: messages, or token ids.
      context: of the last message.

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
    return [list(map(_as_id, chunk)) if _is_ids(chunk) else chunk for chunk in context]


def _is_ids(chunk: Any) -> bool:
    return isinstance(chunk, Iterable) and not isinstance(chunk, str)


def _as_id(token: Any) -> Any:
    return int(token) if hasattr(token, "__index__") else token


def text_of(model: LoadedModel, token_ids: Sequence[int]) -> str:
    """The text of token ids; empty for a model without tokenizer."""
    return "" if model.tokenizer is None else model.tokenizer.decode(token_ids)


def _turn_text(model: LoadedModel, token_ids: list[int], messages: list[Message], new: list[Message]) -> str:
    """What the chat template writes behind a conversation for its next messages, from the last answer's end."""
    template = _tokenizer(model).chat_template or ChatTemplate.plain()
    return template.next_turn(messages, new) if token_ids else template.first_turn([*messages, *new])


def _told(tokenizer: Tokenizer, message: Message) -> Message:
    """A message as a chat template takes it: its own text, without its context."""
    return tokenizer.said({name: value for name, value in message.items() if name != "context"})


def _behind(model: LoadedModel, token_ids: list[int], ids: list[int]) -> list[int]:
    """New ids without the token that the template ends the last answer with, if the model ended it with that itself."""
    ended = bool(token_ids and ids) and ids[0] == token_ids[-1] and ids[0] in model.stop_token_ids
    return ids[int(ended) :]


def _tokenizer(model: LoadedModel) -> Tokenizer:
    if model.tokenizer is None:
        raise InvalidRequestError(f"{model.name} has no tokenizer; a prompt must be token ids, got text")
    return model.tokenizer
