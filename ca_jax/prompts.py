"""Messages, chunks and prompts to token ids. History is kept as ids and never tokenised again.

Not here: chat templates and tokenizers themselves (models), cutting texts into chunks (chunks), jobs (session).
"""

from __future__ import annotations

import reprlib
import secrets
from collections.abc import Mapping, Sequence
from typing import cast

from ca_jax.chunks import chunk_text
from ca_jax.conversations import Message, as_messages
from ca_jax.errors import EmptyMessageError, InvalidRequestError
from ca_jax.models.chat_template import ChatTemplate
from ca_jax.models.tokenizer import Tokenizer
from ca_jax.pretrained import LoadedModel, check_token_ids


def turn_ids(
    model: LoadedModel, token_ids: list[int], messages: list[Message], new: str | Sequence[Message]
) -> list[int]:
    """A conversation's tokens with the next messages behind them, ready to be answered.

    Args:
      model: whose tokenizer and chat template are used.
      token_ids: the conversation so far, as the model saw it; empty before its first turn.
      messages: the same as text; before the first turn a system message at most.
      new: the user's message, or messages.

    Raises:
      InvalidRequestError: the model has no tokenizer, or its template refuses the messages.
    """
    ids = _tokenizer(model).encode(_turn_text(model, token_ids, messages, as_messages(new)), add_bos=False)
    return token_ids + _behind(model, token_ids, ids)


def turn_parts(
    model: LoadedModel, token_ids: list[int], messages: list[Message], new: str | Sequence[Message]
) -> tuple[list[int], list[int]]:
    """The new tokens of a turn in two parts, between which its context goes: right before the last message's own text.

    What the chat template makes of the context's text with the message behind it, but that each part is tokenised
    alone.

    Args:
      model: whose tokenizer and chat template are used.
      token_ids: the conversation so far, as the model saw it; empty before its first turn.
      messages: the same as text; before the first turn a system message at most.
      new: the user's message, or messages.

    Returns:
      New ids before the message: what the template writes, a system message too before the first turn; possibly none.
      And new ids from the message on, with what the template writes behind it.

    Raises:
      InvalidRequestError: the model has no tokenizer, or its template does not write a message once and as it is, so
        that nothing says where the context goes.
    """
    tokenizer = _tokenizer(model)
    mark = f"context{secrets.token_hex(16)}"  # Nobody can have written it.
    *others, last = as_messages(new)
    marked = {**last, "content": mark + last["content"]}
    parts = _turn_text(model, token_ids, messages, [*others, marked]).split(mark)
    if len(parts) != 2:
        raise InvalidRequestError(
            "this model's chat template has no place for a context before a message: wanted the message to be written "
            f"once, as it is, found it {len(parts) - 1} times"
        )
    before, after = (tokenizer.encode(part, add_bos=False) for part in parts)
    return _behind(model, token_ids, before), after


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
        raise InvalidRequestError(f"wanted a list of chunks, found one text of {len(chunks)} characters")
    if not len(chunks):
        raise EmptyMessageError("wanted a context of at least one chunk, found none")
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
            raise EmptyMessageError("wanted a chunk with text in it, found a blank one")
        return _tokenizer(model).encode(chunk_text(chunk), add_bos=False)
    try:
        ids = [int(i) for i in chunk]
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"wanted a chunk of text or of token ids, found {reprlib.repr(chunk)}") from error
    if not ids:
        raise EmptyMessageError("wanted a chunk with at least one token, found an empty one")
    check_token_ids(ids, model.config.vocab_size)
    return ids


def prompt_ids(model: LoadedModel, prompt: str | Sequence[int]) -> list[int]:
    """The token ids of a prompt given as text or as ids.

    Raises:
      EmptyMessageError: there are none.
      InvalidRequestError: an id outside the vocabulary, or text for a model without tokenizer.
    """
    ids = _tokenizer(model).encode(prompt) if isinstance(prompt, str) else [int(i) for i in prompt]
    if not ids:
        raise EmptyMessageError("wanted a prompt with at least one token, found an empty one")
    check_token_ids(ids, model.config.vocab_size)
    return ids


def messages_or_ids(
    model: LoadedModel, new: str | Sequence[Message] | Sequence[int]
) -> tuple[list[Message], list[int]]:
    """What a turn begins with: messages, or where token ids are given no messages and these.

    Raises:
      EmptyMessageError: there is nothing.
      InvalidRequestError: an id outside the vocabulary.
    """
    if isinstance(new, str) or (len(new) and isinstance(new[0], Mapping)):
        return as_messages(cast("str | Sequence[Message]", new)), []
    return [], prompt_ids(model, cast(Sequence[int], new))


def text_of(model: LoadedModel, token_ids: Sequence[int]) -> str:
    """The text of token ids; empty for a model without tokenizer."""
    return "" if model.tokenizer is None else model.tokenizer.decode(token_ids)


def _turn_text(model: LoadedModel, token_ids: list[int], messages: list[Message], new: list[Message]) -> str:
    """What the chat template writes behind a conversation for its next messages, from the last answer's end."""
    template = _tokenizer(model).chat_template or ChatTemplate.plain()
    return template.next_turn(messages, new) if token_ids else template.first_turn([*messages, *new])


def _behind(model: LoadedModel, token_ids: list[int], ids: list[int]) -> list[int]:
    """New ids without the token that the template ends the last answer with, if the model ended it with that itself."""
    ended = bool(token_ids and ids) and ids[0] == token_ids[-1] and ids[0] in model.stop_token_ids
    return ids[int(ended) :]


def _tokenizer(model: LoadedModel) -> Tokenizer:
    if model.tokenizer is None:
        raise InvalidRequestError(f"{model.name} has no tokenizer; wanted token ids, found text")
    return model.tokenizer
