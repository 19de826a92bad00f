"""Texts from files, as token ids; and the error of data that cannot be used.

Not here: the formats of benchmarks (`benchmarks.evaluate`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ca_jax.errors import CaJaxError
from ca_jax.models.tokenizer import Tokenizer
from ca_jax.pretrained import LoadedModel

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
