"""The flags that make a text file the context of a question, and its chunks.

Not here: how texts and tokens are cut (`chunks`), what becomes of chunks (`ca_jax.session`).
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from ca_jax.errors import InvalidRequestError
from ca_jax.pretrained import LoadedModel
from ca_jax.turns.chunks import split_text, split_tokens

flags.disclaim_key_flags()  # They are flags of the script that asks for them: its --help shows them.

SEPARATOR = "\n---\n"
"""Between chunks, unless a flag says otherwise: a line of three dashes."""


def define(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags.

    Raises:
      absl.flags.DuplicateFlagError: another flag has such a name.
    """
    flags.DEFINE_string(
        "context_file", None, "Text file whose chunks are the context of the first question.", flag_values=flag_values
    )
    flags.DEFINE_string(
        "chunk_separator",
        None,
        "What is between two chunks of context_file, \\n for a line break; by default a line of three dashes.",
        flag_values=flag_values,
    )
    flags.DEFINE_integer(
        "chunk_tokens",
        None,
        "Cut context_file into chunks of so many tokens instead, the last one shorter.",
        lower_bound=1,
        flag_values=flag_values,
    )


def context_chunks(model: LoadedModel, *, flag_values: flags.FlagValues = flags.FLAGS) -> list[str] | list[list[int]]:
    """The chunks that parsed flags stand for; none where no file is given.

    Args:
      model: whose tokenizer counts tokens.
      flag_values: where the flags were defined.

    Raises:
      ValueError: flags that exclude each other or need a file, or a file that is no text.
      OSError: the file cannot be read.
      EmptyMessageError: it is blank.
      InvalidRequestError: an empty separator, or tokens of a model without tokenizer.
    """
    path, separator = flag_values["context_file"].value, flag_values["chunk_separator"].value
    num_tokens = flag_values["chunk_tokens"].value
    if path is None:
        if separator is not None or num_tokens is not None:
            raise ValueError("chunk_separator and chunk_tokens wanted a context_file to cut, found none")
        return []
    if separator is not None and num_tokens is not None:
        raise ValueError("wanted chunk_separator or chunk_tokens, found both")
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"context_file wanted text in UTF-8, found other bytes in {path}: {error}") from error
    if num_tokens is None:
        return split_text(text, SEPARATOR if separator is None else separator.replace("\\n", "\n"))
    if model.tokenizer is None:
        raise InvalidRequestError(f"chunk_tokens wanted a model with a tokenizer, found {model.name}")
    return split_tokens(model.tokenizer.encode(text, add_bos=False) if text.strip() else [], num_tokens)
