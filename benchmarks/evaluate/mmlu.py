"""Multiple-choice questions behind a long text that has overflowed the window.

The text is fed once. Each question is asked of a copy of the context that is left, and answered by the likeliest of
" A", " B", " C" and " D".

Not here: rows (rows).
Source: MMLU (Hendrycks et al., ICLR 2021), whose few-shot prompt this is; asking behind an overflow: CachedAttention
(Gao et al., USENIX ATC 2024), section 4.3.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from benchmarks.evaluate.comparison import Answers, Comparison, Evaluation, accuracy_rows, check_overflows
from benchmarks.evaluate.statistics import log_softmax
from benchmarks.harness import Checked, ticked
from ca_jax.launch.texts import EvaluationError, read_file, read_ids, tokenizer_of
from ca_jax.models.tokenizer import Tokenizer
from ca_jax.pretrained import LoadedModel, Progress

CHOICES = ("A", "B", "C", "D")
"""What a question is answered with."""
_DEV, _TEST = "_dev.csv", "_test.csv"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """One multiple-choice question."""

    subject: str
    """Of its file, with blanks for underscores."""
    number: int
    """Its place in the file, from 0."""
    text: str
    choices: tuple[str, ...]
    answer: str
    """The right one of `CHOICES`."""

    def describe(self, answer: str = "") -> str:
        """The question, its choices, and "Answer:", with an answer if one is given."""
        lines = [self.text, *(f"{name}. {choice}" for name, choice in zip(CHOICES, self.choices, strict=True))]
        return "\n".join([*lines, f"Answer: {answer}" if answer else "Answer:"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class MmluConfig(Checked):
    """`mmlu`: multiple-choice questions behind a long text that has overflowed the window."""

    may_be_zero: ClassVar = frozenset({"num_shots", "seed"})

    comparison: Comparison
    """What is compared."""
    data: str
    """A directory of *_test.csv files, with *_dev.csv files beside them for the examples; where there are *_dev.csv
    files alone, their questions are asked, and are each other's examples."""
    preamble: str | None = None
    """The long text, as for `ppl`; None: the first wikitext*.txt beside the directory."""
    max_tokens: int | None = None
    """Tokens of the preamble; None: twice the window and a step."""
    num_shots: int = 2
    """Examples of the same subject that stand, with their answers, before each question."""
    max_items: int | None = None
    """Most questions, drawn from all; None: all."""
    seed: int = 0
    """Of which questions are drawn."""

    @property
    def preamble_tokens(self) -> int:
        """Tokens of the preamble."""
        if self.max_tokens is not None:
            return self.max_tokens
        return 2 * self.comparison.window + self.comparison.step_tokens


def run_mmlu(model: LoadedModel, config: MmluConfig, progress: Progress) -> Evaluation:
    """Asks each question behind the same overflowed text, with each method."""
    directory, comparison = Path(config.data), config.comparison
    streams = comparison.streams(model)
    tokenizer = tokenizer_of(model)
    subjects = read_subjects(directory)
    preamble_path = _preamble_path(directory, config)
    preamble = read_ids(model, preamble_path, config.preamble_tokens)
    check_overflows(len(preamble), window=comparison.window, path=preamble_path, max_tokens=config.preamble_tokens)
    before, choice_ids = choice_tokens(tokenizer)
    asked = [(subject, nth) for subject in subjects for nth in range(len(subject.questions))]
    if config.max_items is not None:
        drawn = np.random.default_rng(config.seed).permutation(len(asked))[: config.max_items]
        asked = [asked[i] for i in sorted(drawn)]
    answers = {name: Answers() for name in streams}
    for name, stream in streams.items():
        started_s = time.perf_counter()
        stream.extend(preamble, progress, f"preamble {name}")
        answers[name].seconds += time.perf_counter() - started_s
    logprobs: dict[str, list[np.ndarray]] = {name: [] for name in streams}
    items = []
    for subject, nth in ticked(progress, "mmlu", asked):
        question = subject.questions[nth]
        text = "\n\n" + prompt(question, subject.examples_of(nth, config.num_shots))
        token_ids = [*tokenizer.encode(text, add_bos=False), *before]
        for name, context in streams.items():
            started_s = time.perf_counter()
            stream = context.fork()
            stream.extend(token_ids)
            found = log_softmax(stream.logits())[choice_ids]
            given = CHOICES[int(found.argmax())]
            answers[name].add(given, given == question.answer, len(stream.truncations))
            logprobs[name].append(found)
            answers[name].seconds += time.perf_counter() - started_s
        items.append(
            {
                "subject": question.subject,
                "number": question.number,
                "expected": question.answer,
                "answers": {name: each.given[-1] for name, each in answers.items()},
                "logprobs": {name: [round(float(each), 4) for each in found[-1]] for name, found in logprobs.items()},
            }
        )
    return Evaluation(
        rows=accuracy_rows(
            directory.name,
            comparison,
            answers,
            range(len(items)),
            logprob_differences=_differences(logprobs, comparison.baseline),
        ),
        items=items,
    )


def choice_tokens(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """What tells " A", " B", " C" and " D" apart: the tokens that all begin with, and the one in which each differs."""
    spelled = [tokenizer.encode(f" {choice}", add_bos=False) for choice in CHOICES]
    columns = list(zip(*spelled, strict=False))
    num_common = next((i for i, column in enumerate(columns) if len(set(column)) > 1), len(columns))
    told_apart = [ids[num_common] for ids in spelled if len(ids) > num_common]
    if len(set(told_apart)) != len(CHOICES):
        raise EvaluationError(f"the tokenizer must tell {', '.join(CHOICES)} apart, got tokens {spelled}")
    return spelled[0][:num_common], told_apart


def _preamble_path(directory: Path, config: MmluConfig) -> Path:
    if config.preamble is not None:
        return Path(config.preamble)
    beside = sorted(directory.resolve().parent.glob("wikitext*.txt"))
    if not beside:
        raise EvaluationError(f"preamble must be given, or a wikitext*.txt be beside {directory}; got neither")
    return beside[0]


def _differences(logprobs: dict[str, list[np.ndarray]], baseline: str | None) -> dict[str, float]:
    """How far log probabilities are from those of `tt`, mean, for each other method."""
    if baseline is None:
        return {}
    base = np.array(logprobs[baseline])
    return {name: float(np.abs(np.array(found) - base).mean()) for name, found in logprobs.items() if name != baseline}


@dataclasses.dataclass(frozen=True)
class Subject:
    """The questions of one subject."""

    questions: list[Question]
    examples: list[Question] | None
    """Of the dev split; None where these are asked themselves."""

    def examples_of(self, nth: int, num_shots: int) -> list[Question]:
        """The examples of the nth question: the first of the dev split, or the questions behind it, round about."""
        if self.examples is not None:
            return self.examples[:num_shots]
        return [*self.questions[nth + 1 :], *self.questions[:nth]][:num_shots]


def read_subjects(directory: Path) -> list[Subject]:
    """The subjects of a directory, in the order of their names: its test split, or its dev split where it has no other.

    A row is question, four choices and the answer, a letter or a number from 0; a first row of headings, the last of
    them "answer", is passed by. Others are an EvaluationError.
    """
    tests = sorted(directory.glob(f"*{_TEST}"))
    if tests:
        return [Subject(_read(path), _read(path.with_name(path.name.removesuffix(_TEST) + _DEV))) for path in tests]
    paths = sorted(directory.glob(f"*{_DEV}"))
    if not paths:
        raise EvaluationError(f"data must be a directory of *{_TEST} or *{_DEV} files, got none in {directory}")
    return [Subject(_read(path), None) for path in paths]


def prompt(question: Question, examples: Sequence[Question]) -> str:
    """What a question is asked by: the subject, examples with their answers, the question up to "Answer:"."""
    head = f"The following are multiple choice questions (with answers) about {question.subject}."
    return "\n\n".join([head, *(each.describe(each.answer) for each in examples), question.describe()])


def _read(path: Path) -> list[Question]:
    subject = path.name.removesuffix(_DEV).removesuffix(_TEST).replace("_", " ")
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
                    f"{path}:{reader.line_num}: a row must have a question, four choices and one of A, B, C, D or 0 to "
                    f"3; got {len(row)} columns, the last {answer!r}"
                )
            questions.append(
                Question(
                    subject=subject, number=len(questions), text=text.strip(), choices=tuple(choices), answer=letter
                )
            )
    except csv.Error as error:
        raise EvaluationError(f"{path}:{reader.line_num} must be CSV, got {error}") from error
    if not questions:
        raise EvaluationError(f"{path} must have questions, got none")
    return questions
