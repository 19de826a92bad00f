"""Texts from files, as token ids; what is measured of a model on one; and the error of data that cannot be used.

Not here: the formats of benchmarks (`benchmarks.evaluate`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from absl import flags

from ca_jax.config import EngineConfig
from ca_jax.errors import CaJaxError
from ca_jax.launch.flags import define_dtype, define_model
from ca_jax.launch.terminal import progress_bars
from ca_jax.models.tokenizer import Tokenizer
from ca_jax.pretrained import LoadedModel, load_model
from ca_jax.serving.core import enable_compile_cache

flags.disclaim_key_flags()  # They are flags of the script that asks for them: its --help shows them.

T = TypeVar("T")
SUFFIXES = (".txt", ".jsonl")
"""Files that texts are read from."""


class EvaluationError(CaJaxError):
    """An evaluation cannot be made: its data are of another kind, or do not fit the settings."""


def read_text(path: Path) -> str:
    """The text of a file: all of a .txt; of a .jsonl its rows' `text`, a blank line between them.

    Raises:
      EvaluationError: there is no such file, it is of another kind, it is no UTF-8, a row has no text, or there is none
        at all.
    """
    if path.suffix not in SUFFIXES:
        raise EvaluationError(f"a text must be a {' or '.join(SUFFIXES)} file, got {path}")
    if path.suffix == ".txt":
        text = read_file(path)
    else:
        documents = []
        for place, row in read_rows(path):
            if not isinstance(row.get("text"), str):
                raise EvaluationError(f"{place}: a row must have a string `text`, got {', '.join(row) or 'no fields'}")
            documents.append(row["text"])
        text = "\n\n".join(documents)
    if not text.strip():
        raise EvaluationError(f"{path} must have text in it, got none")
    return text


def read_ids(model: LoadedModel, path: Path, max_tokens: int) -> list[int]:
    """The first tokens of a file's text; what begins a sequence comes first where the model wants it.

    Raises:
      EvaluationError: see `read_text`; the model has no tokenizer.
    """
    return tokenizer_of(model).encode(read_text(path))[:max_tokens]


def define_flags(made: str, most_tokens: int) -> None:
    """Defines the flags of a script that makes a file of a model and a text, and is to say what is `made`."""
    flags.DEFINE_string("data", None, "A text, .txt or .jsonl with a field text.", required=True)
    flags.DEFINE_string("out", None, f"File to write the {made} to, .npz.", required=True)
    define_model()
    define_dtype()
    flags.DEFINE_integer("max_tokens", most_tokens, "Most tokens of the text.")


def measured(measure: Callable[[LoadedModel, list[int], Callable[[int], None]], T]) -> tuple[LoadedModel, T]:
    """The model of those flags, and what a function makes of it and of their text; it says how many tokens are done.

    Raises:
      EvaluationError: see `read_ids`.
      Exception: as `load_model`, or whatever the function raises.
    """
    values = flags.FLAGS
    enable_compile_cache(EngineConfig().compile_cache_dir)
    with progress_bars() as progress:
        model = load_model(values.model, dtype=values.dtype, progress=progress)
        token_ids = read_ids(model, Path(values.data).expanduser(), values.max_tokens)
        num_done = 0

        def tell(num_tokens: int) -> None:
            nonlocal num_done
            num_done += num_tokens
            progress("tokens", num_done, len(token_ids))

        return model, measure(model, token_ids, tell)


def tokenizer_of(model: LoadedModel) -> Tokenizer:
    """The model's.

    Raises:
      EvaluationError: it has none.
    """
    if model.tokenizer is None:
        raise EvaluationError(f"the model must have a tokenizer, got {model.name} without one")
    return model.tokenizer


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a .jsonl file, each with its place, "FILE:LINE"; blank lines are passed by.

    Raises:
      EvaluationError: there is no such file, it is no UTF-8, or a line is no JSON object.
    """
    for number, line in enumerate(read_file(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise EvaluationError(f"{path}:{number}: a line must be a JSON object, got {error}") from error
        if not isinstance(row, dict):
            raise EvaluationError(f"{path}:{number}: a line must be a JSON object, got {type(row).__name__}")
        yield f"{path}:{number}", row


def read_file(path: Path) -> str:
    """All of a file.

    Raises:
      EvaluationError: it cannot be read, or is no UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise EvaluationError(f"data must be a file that can be read, got {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{path} must be UTF-8, got another byte at {error.start}") from error
