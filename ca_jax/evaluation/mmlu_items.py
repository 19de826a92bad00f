"""MMLU's questions: read from its files, and as the text a model is asked by.

Not here: asking (mmlu).
Source: MMLU (Hendrycks et al., ICLR 2021), whose few-shot prompt this is.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path

from ca_jax.evaluation.comparison import EvaluationError
from ca_jax.evaluation.texts import read_file

CHOICES = ("A", "B", "C", "D")
"""What a question is answered with."""
_SUFFIX = "_dev.csv"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """One multiple-choice question."""

    subject: str
    """Of its file, with blanks for underscores."""
    number: int
    """Its place in the file, from 0."""
    text: str
    """What is asked."""
    choices: tuple[str, ...]
    """Four answers."""
    answer: str
    """The right one of `CHOICES`."""

    def describe(self, answer: str = "") -> str:
        """The question, its choices, and "Answer:", with an answer if one is given."""
        lines = [self.text, *(f"{name}. {choice}" for name, choice in zip(CHOICES, self.choices, strict=True))]
        return "\n".join([*lines, f"Answer: {answer}" if answer else "Answer:"])


def read_questions(directory: Path) -> list[list[Question]]:
    """The questions of each file of a directory, in the order of their names.

    A row is question, four choices and the answer, a letter or a number from 0; a first row of headings, the last of
    them "answer", is passed by.

    Raises:
      EvaluationError: no such directory, no such file in it, or a row that is none.
    """
    paths = sorted(directory.glob(f"*{_SUFFIX}")) if directory.is_dir() else []
    if not paths:
        raise EvaluationError(f"there must be a directory of *{_SUFFIX} files, got {directory} to have none")
    return [_read(path) for path in paths]


def prompt(question: Question, examples: Sequence[Question]) -> str:
    """What a question is asked by: the subject, examples with their answers, the question up to "Answer:"."""
    head = f"The following are multiple choice questions (with answers) about {question.subject}."
    return "\n\n".join([head, *(each.describe(each.answer) for each in examples), question.describe()])


def examples_of(questions: Sequence[Question], nth: int, num_shots: int) -> list[Question]:
    """The questions of a file that follow the nth, round about, for it to be asked behind them."""
    others = [*questions[nth + 1 :], *questions[:nth]]
    return others[:num_shots]


def _read(path: Path) -> list[Question]:
    subject = path.name.removesuffix(_SUFFIX).replace("_", " ")
    reader = csv.reader(io.StringIO(read_file(path), newline=""), strict=True)
    questions: list[Question] = []
    try:
        for nth, row in enumerate(reader):
            if not row or (nth == 0 and row[-1].strip().lower() == "answer"):
                continue
            text, choices, answer = row[0], row[1:-1], row[-1].strip()
            letter = CHOICES[int(answer)] if answer in ("0", "1", "2", "3") else answer
            if len(row) != len(CHOICES) + 2 or letter not in CHOICES:
                raise EvaluationError(
                    f"{path}:{reader.line_num}: there must be a question, four choices and one of A, "
                    "B, C, D or 0 to 3; got "
                    f"{len(row)} columns, the last {answer!r}"
                )
            questions.append(
                Question(
                    subject=subject, number=len(questions), text=text.strip(), choices=tuple(choices), answer=letter
                )
            )
    except csv.Error as error:
        raise EvaluationError(f"{path}:{reader.line_num}: there must be CSV, got {error}") from error
    if not questions:
        raise EvaluationError(f"there must be questions, got none in {path}")
    return questions
