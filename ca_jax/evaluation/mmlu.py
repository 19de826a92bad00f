"""Multiple-choice questions behind a long text that has overflowed the window.

The text is fed once. Each question is asked of a copy of the context that is left, and answered by the likeliest of
" A", " B", " C" and " D".

Not here: questions as text (mmlu_items), rows (accuracy).
Source: asking behind an overflow: CachedAttention (Gao et al., USENIX ATC 2024), section 4.3.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ca_jax.evaluation.accuracy import Answers, accuracy_rows
from ca_jax.evaluation.comparison import EvaluationError
from ca_jax.evaluation.mmlu_items import CHOICES, examples_of, prompt, read_questions
from ca_jax.evaluation.schema import Evaluation, MmluConfig
from ca_jax.evaluation.statistics import log_softmax
from ca_jax.evaluation.stream import ContextStream
from ca_jax.evaluation.texts import check_overflows, read_ids, tokenizer_of
from ca_jax.models.tokenizer import Tokenizer
from ca_jax.pretrained import LoadedModel, Progress


def run_mmlu(model: LoadedModel, config: MmluConfig, progress: Progress) -> Evaluation:
    """Asks each question behind the same overflowed text, with each method.

    Args:
      model: that answers.
      config: what is asked.
      progress: told of questions as they are answered.

    Raises:
      EvaluationError: the questions or the text cannot be had, the text does not overflow the window, or a window above
        the model's.
    """
    directory, comparison = Path(config.data), config.comparison
    streams = comparison.streams(model)
    tokenizer = tokenizer_of(model)
    by_subject = read_questions(directory)
    preamble_path = _preamble_path(directory, config)
    preamble = read_ids(model, preamble_path, config.preamble_tokens)
    check_overflows(len(preamble), window=comparison.window, path=preamble_path, max_tokens=config.preamble_tokens)
    before, choice_ids = choice_tokens(tokenizer)
    asked = [(questions, nth) for questions in by_subject for nth in range(len(questions))]
    if config.max_items is not None:
        drawn = np.random.default_rng(config.seed).permutation(len(asked))[: config.max_items]
        asked = [asked[i] for i in sorted(drawn)]
    answers = {name: Answers() for name in streams}
    for name, stream in streams.items():
        _feed_preamble(name, stream, preamble, answers[name], progress)
    logprobs: dict[str, list[np.ndarray]] = {name: [] for name in streams}
    items = []
    progress("mmlu", 0, len(asked))
    for questions, nth in asked:
        question = questions[nth]
        text = "\n\n" + prompt(question, examples_of(questions, nth, config.num_shots))
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
        progress("mmlu", len(items), len(asked))
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
    """What tells " A", " B", " C" and " D" apart: the tokens that all begin with, and the one in which each differs.

    Raises:
      EvaluationError: no token does.
    """
    spelled = [tokenizer.encode(f" {choice}", add_bos=False) for choice in CHOICES]
    columns = list(zip(*spelled, strict=False))
    num_common = next((i for i, column in enumerate(columns) if len(set(column)) > 1), len(columns))
    told_apart = [ids[num_common] for ids in spelled if len(ids) > num_common]
    if len(set(told_apart)) != len(CHOICES):
        raise EvaluationError(f"there must be a tokenizer that tells {', '.join(CHOICES)} apart, got tokens {spelled}")
    return spelled[0][:num_common], told_apart


def _preamble_path(directory: Path, config: MmluConfig) -> Path:
    if config.preamble is not None:
        return Path(config.preamble)
    beside = sorted(directory.resolve().parent.glob("wikitext*.txt"))
    if not beside:
        raise EvaluationError(f"there must be a preamble, or a wikitext*.txt beside {directory}; got none")
    return beside[0]


def _feed_preamble(
    name: str, stream: ContextStream, preamble: Sequence[int], answers: Answers, progress: Progress
) -> None:
    what = f"preamble {name}"

    def tell(_: int) -> None:
        progress(what, stream.num_fed, len(preamble))

    progress(what, 0, len(preamble))
    started_s = time.perf_counter()
    stream.extend(preamble, tell)
    answers.seconds += time.perf_counter() - started_s


def _differences(logprobs: dict[str, list[np.ndarray]], baseline: str | None) -> dict[str, float]:
    """How far log probabilities are from those of `tt`, mean, for each other method."""
    if baseline is None:
        return {}
    base = np.array(logprobs[baseline])
    return {name: float(np.abs(np.array(found) - base).mean()) for name, found in logprobs.items() if name != baseline}
