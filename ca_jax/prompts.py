"""Messages and prompts to token ids. History is kept as ids and never tokenised again.

Not here: chat templates and tokenizers themselves (models), jobs (session).
"""

from __future__ import annotations

from collections.abc import Sequence

from ca_jax.errors import EmptyMessageError, InvalidRequestError
from ca_jax.models.chat_template import ChatTemplate
from ca_jax.models.tokenizer import Tokenizer
from ca_jax.pretrained import LoadedModel, check_token_ids


def turn_ids(model: LoadedModel, token_ids: list[int], messages: list[dict[str, str]], message: str) -> list[int]:
    """A conversation's tokens with the user's next message behind them, ready to be answered.

    Args:
      model: whose tokenizer and chat template are used.
      token_ids: the conversation so far, as the model saw it; empty before its first turn.
      messages: the same as text; before the first turn a system message at most.
      message: of the user.

    Raises:
      InvalidRequestError: the model has no tokenizer.
    """
    tokenizer = _tokenizer(model)
    template = tokenizer.chat_template or ChatTemplate.plain()
    new = {"role": "user", "content": message}
    if not token_ids:
        return tokenizer.encode(template.first_turn([*messages, new]), add_bos=False)
    ids = tokenizer.encode(template.next_turn(messages, [new]), add_bos=False)
    # The template ends the answer with the token that the model may have ended it with itself.
    ended = bool(ids) and ids[0] == token_ids[-1] and ids[0] in model.stop_token_ids
    return token_ids + ids[int(ended) :]


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


def text_of(model: LoadedModel, token_ids: Sequence[int]) -> str:
    """The text of token ids; empty for a model without tokenizer."""
    return "" if model.tokenizer is None else model.tokenizer.decode(token_ids)


def _tokenizer(model: LoadedModel) -> Tokenizer:
    if model.tokenizer is None:
        raise InvalidRequestError(f"{model.name} has no tokenizer; wanted token ids, found text")
    return model.tokenizer
