"""Questions behind retrieved texts: files of them, and the token ids of their prompts.

Two kinds of file are read. A list of items, as of Musique or 2WikiMQA, 150 of each in the paper:

    [{"ctxs": [{"title": ..., "text": ...}, ...], "question": ..., "answers": [...]}, ...]

and CacheBlend's own example inputs, one item each, whose query has the instruction in it and no answers beside it:

    {"0": text, "1": text, ..., "chunk_num": "6", "query": "\\n\\nAnswer the question ...: ...?\\nAnswer:"}

Not here: prompts made of conversations (rag_texts), what is asked of them (rag).
Source: CacheBlend (Yao et al., EuroSys 2025), section 7.1.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ca_jax.evaluation.comparison import EvaluationError
from ca_jax.evaluation.rag_schema import Chunking
from ca_jax.evaluation.texts import read_file, tokenizer_of
from ca_jax.pretrained import LoadedModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class RagItem:
    """One question and the texts that it is asked of."""

    source: str
    """Where it was read, "FILE" or "FILE:NUMBER"."""
    texts: tuple[str, ...]
    """Best first, as they were retrieved; at least one, none blank."""
    question: str
    """The question alone; of an example input its whole query."""
    answers: tuple[str, ...]
    """Right ones; none where the file has none."""
    is_whole: bool = False
    """Whether the question has its instruction in it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RagPrompt:
    """The token ids of one item: `head`, chunks, question, one behind the other."""

    source: str
    """See `RagItem`."""
    head: tuple[int, ...]
    """What begins a sequence, where the model wants it; otherwise none."""
    chunks: tuple[tuple[int, ...], ...]
    """Each tokenised alone."""
    question_ids: tuple[int, ...]
    """The instruction with the question in it."""
    answers: tuple[str, ...]
    """See `RagItem`."""

    @property
    def context_ids(self) -> list[int]:
        """What is before the question."""
        return [*self.head, *(token for chunk in self.chunks for token in chunk)]

    @property
    def chunk_starts(self) -> list[int]:
        """Place of the first token of each chunk."""
        starts = [len(self.head)]
        for chunk in self.chunks[:-1]:
            starts.append(starts[-1] + len(chunk))
        return starts


def read_items(path: Path) -> list[RagItem]:
    """The items of a file, or of all .json files of a folder, in the order of their names and numbers.

    Raises:
      EvaluationError: nothing is there, it is no JSON, or neither kind of file; it says which item lacks what.
    """
    if not path.is_dir():
        return _of_file(path)
    files = sorted(path.glob("*.json"), key=lambda each: [_by_number(part) for part in re.split(r"(\d+)", each.name)])
    if not files:
        raise EvaluationError(f"there must be a folder with .json files of items, got none in {path}")
    return [item for file in files for item in _of_file(file)]


def prompts_of(model: LoadedModel, items: Sequence[RagItem], chunking: Chunking) -> list[RagPrompt]:
    """The token ids of items' prompts; of each text so many first tokens.

    Raises:
      EvaluationError: the model has no tokenizer, or a prompt is longer than the model's window.
    """
    tokenizer = tokenizer_of(model)
    head = () if not tokenizer.add_bos or tokenizer.bos_id is None else (tokenizer.bos_id,)
    prompts = []
    for item in items:
        chunks = [
            tuple(tokenizer.encode(text, add_bos=False)[: chunking.chunk_tokens])
            for text in item.texts[: chunking.num_chunks]
        ]
        question = item.question if item.is_whole else chunking.instruction.replace("{question}", item.question)
        prompts.append(
            RagPrompt(
                source=item.source,
                head=head,
                chunks=tuple(chunks),
                question_ids=tuple(tokenizer.encode(question, add_bos=False)),
                answers=item.answers,
            )
        )
    return prompts


def check_window(model: LoadedModel, prompts: Sequence[RagPrompt], answer_tokens: int) -> None:
    """Refuses prompts that leave no room for an answer.

    Raises:
      EvaluationError: the longest one is too long; it says by how much.
    """
    longest = max(prompts, key=lambda prompt: len(prompt.context_ids) + len(prompt.question_ids))
    num_tokens = len(longest.context_ids) + len(longest.question_ids)
    over = num_tokens + answer_tokens - model.config.max_positions
    if over > 0:
        raise EvaluationError(
            f"there must be prompts and {answer_tokens} tokens of answer within the model's window of "
            f"{model.config.max_positions} tokens, got {num_tokens} in {longest.source}: {over} too many; take fewer "
            "or shorter chunks"
        )


def _of_file(path: Path) -> list[RagItem]:
    try:
        content = json.loads(read_file(path))
    except json.JSONDecodeError as error:
        raise EvaluationError(f"there must be a JSON file of items, got {path}: {error}") from error
    if isinstance(content, dict):
        return [_example(path, content)]
    if not isinstance(content, list) or not content:
        raise EvaluationError(
            f"{path}: there must be a list of items with ctxs, question and answers, or an object with "
            "texts by number and "
            f"query; got {'an empty list' if content == [] else type(content).__name__}"
        )
    return [_item(f"{path.name}:{number}", each) for number, each in enumerate(content)]


def _item(source: str, row: Any) -> RagItem:
    wanted = "an item with ctxs, a list of objects with a text, question and answers"
    if not isinstance(row, dict):
        raise EvaluationError(f"{source}: there must be {wanted}; got {type(row).__name__}")
    missing = [name for name in ("ctxs", "question", "answers") if name not in row]
    if missing:
        raise EvaluationError(f"{source}: there must be {wanted}; got none of {', '.join(missing)}")
    contexts, answers = row["ctxs"], row["answers"]
    if not isinstance(contexts, list) or not all(isinstance(each, dict) for each in contexts):
        raise EvaluationError(f"{source}: there must be {wanted}; got other ctxs")
    if not isinstance(answers, list) or not all(isinstance(each, str) for each in answers):
        raise EvaluationError(f"{source}: there must be answers, a list of strings; got {answers!r}")
    texts = [each.get("text") for each in contexts]
    return RagItem(
        source=source,
        texts=_checked_texts(source, dict(enumerate(texts))),
        question=_checked_question(source, row["question"]),
        answers=tuple(answers),
    )


def _example(path: Path, row: dict[str, Any]) -> RagItem:
    source = path.name
    if "query" not in row or "0" not in row:
        raise EvaluationError(
            f"{path}: there must be an object with texts by number from 0 on and query, or a list of items; "
            f"got {', '.join(map(str, row)) or 'nothing'}"
        )
    told = row.get("chunk_num", sum(key.isdecimal() for key in row))
    try:
        num_texts = int(told)
    except (TypeError, ValueError) as error:
        raise EvaluationError(f"{source}: there must be chunk_num, a number of texts; got {told!r}") from error
    missing = [str(number) for number in range(num_texts) if str(number) not in row]
    if missing or num_texts < 1:
        raise EvaluationError(
            f"{source}: there must be {num_texts} texts from 0 on, got no {', '.join(missing) or 'text'}"
        )
    return RagItem(
        source=source,
        texts=_checked_texts(source, {number: row[str(number)] for number in range(num_texts)}),
        question=_checked_question(source, row["query"]),
        answers=(),
        is_whole=True,
    )


def _checked_texts(source: str, texts: dict[int, Any]) -> tuple[str, ...]:
    if not texts:
        raise EvaluationError(f"{source}: there must be at least one text, got none")
    for number, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise EvaluationError(f"{source}: text {number} must have something in it, got {text!r}")
    return tuple(texts.values())


def _checked_question(source: str, question: Any) -> str:
    if not isinstance(question, str) or not question.strip():
        raise EvaluationError(f"{source}: there must be a question, got {question!r}")
    return question


def _by_number(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdecimal() else (-1, part)
