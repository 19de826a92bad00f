"""How good an answer is: F1 and ROUGE-L against the right ones; and how alike two orders are.

ROUGE-L is a few lines here: packages that have it bring stemmers of natural languages along, of which it needs none.

Not here: distributions of the next token (statistics), asking (rag).
"""

from __future__ import annotations

import collections
import re
import string
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def first_line(text: str) -> str:
    """The first line of an answer that is not blank, where a model goes on behind its answer; "" where all are."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def f1_score(answer: str, truths: Sequence[str]) -> float:
    """Overlap of an answer's words with those of a right one, the best over all right ones, in [0, 1].

    Without case, punctuation and articles, as of SQuAD. Two answers of no words are alike.

    Raises:
      ValueError: there is no right one.

    Source: Rajpurkar et al., EMNLP 2016, section 6.1.
    """
    return _best(answer, truths, _f1, _squad_words)


def rouge_l(answer: str, truths: Sequence[str]) -> float:
    """F-measure of the longest common subsequence of words, the best over all right answers, in [0, 1].

    Words are runs of letters a to z and digits, without case, as in the `rouge-score` package without its stemmer.

    Raises:
      ValueError: there is no right one.

    Source: Lin, Text Summarization Branches Out 2004, section 3.
    """
    return _best(answer, truths, _rouge_l, _rouge_words)


def rank_correlation(first: npt.ArrayLike, second: npt.ArrayLike) -> float:
    """Spearman's rank correlation of two rows of values `[n]`, in [-1, 1]; of equal values the ranks are their mean.

    Raises:
      ValueError: rows of different lengths, or where all values are equal.
    """
    ranks = [_ranks(np.asarray(values, np.float64)) for values in (first, second)]
    if ranks[0].shape != ranks[1].shape or not all(len(np.unique(each)) > 1 for each in ranks):
        raise ValueError("there must be two rows of as many values, not all equal; got others")
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _best(
    answer: str,
    truths: Sequence[str],
    score: Callable[[list[str], list[str]], float],
    words: Callable[[str], list[str]],
) -> float:
    if not truths:
        raise ValueError("there must be at least one right answer, got none")
    return float(max(score(words(answer), words(truth)) for truth in truths))


def _squad_words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _rouge_words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _f1(answer: list[str], truth: list[str]) -> float:
    if not answer or not truth:
        return float(answer == truth)
    return _f_measure((collections.Counter(answer) & collections.Counter(truth)).total(), len(answer), len(truth))


def _rouge_l(answer: list[str], truth: list[str]) -> float:
    if not answer or not truth:
        return 0.0
    before = [0] * (len(truth) + 1)
    for word in answer:
        row = [0]
        for i, other in enumerate(truth):
            row.append(before[i] + 1 if word == other else max(before[i + 1], row[i]))
        before = row
    return _f_measure(before[-1], len(answer), len(truth))


def _f_measure(num_common: int, num_found: int, num_true: int) -> float:
    return 2 * num_common / (num_found + num_true)


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]
