"""Estimates and how sure they are, distributions of the next token, and how good an answer's text is.

Neighbouring tokens of a text are hard or easy together, and so are questions on one record. Errors are therefore taken
over blocks of tokens, and over clusters of items, not over single ones. Differences are taken pairwise: two methods
read the same tokens and answer the same questions, so that what these have in common falls out.

Not here: measuring, tables.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
import string
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import numpy.typing as npt
import scipy.special
import scipy.stats

Interval = tuple[float, float]
"""Least and largest value of a 95 % confidence interval."""

_RESAMPLES = 10_000
_RESAMPLED_AT_ONCE = 10_000_000  # Values in memory at once.
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean and how sure it is."""

    mean: float
    stderr: float | None
    """Standard error of the mean; None of fewer than two blocks."""

    def exp(self) -> Estimate:
        """e to its power: of mean nats, a perplexity. The error by the delta method."""
        value = math.exp(self.mean)
        return Estimate(mean=value, stderr=None if self.stderr is None else value * self.stderr)


def block_estimate(values: npt.ArrayLike, block: int) -> Estimate:
    """The mean of a series `[T]`, its error from the spread of blocks of so many values.

    The mean is a ratio, of the blocks' sums over their lengths, since the last block may be short. Values may depend on
    each other within a block; what they have in common beyond one makes the error too small.

    Source: Cochran, Sampling Techniques (1977), section 6.4, the variance of a ratio.
    """
    array = np.asarray(values, np.float64)
    if block < 1 or not len(array):
        raise ValueError(f"values must be at least one in blocks of at least 1, got {len(array)} in blocks of {block}")
    starts = np.arange(0, len(array), block)
    sums, counts = np.add.reduceat(array, starts), np.diff([*starts, len(array)])
    mean = float(sums.sum() / len(array))
    if len(starts) < 2:
        return Estimate(mean=mean, stderr=None)
    squares = float(((sums - mean * counts) ** 2).sum())
    return Estimate(mean=mean, stderr=math.sqrt(squares * len(starts) / (len(starts) - 1)) / len(array))


def wilson_interval(num_right: int, num: int) -> Interval:
    """Wilson's 95 % interval of a share of independent items."""
    if not 0 <= num_right <= num or num == 0:
        raise ValueError(f"right answers must be 0 to all of at least one item, got {num_right} of {num}")
    found = scipy.stats.binomtest(num_right, num).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


def share_interval(is_right: Sequence[bool], clusters: Sequence[Hashable]) -> Interval:
    """The 95 % interval of a share of right answers, see `mean_interval`.

    Wilson's where each item is a cluster of its own, otherwise the bootstrap over clusters. Where all are right, or all
    wrong, which the bootstrap takes for certain, it is Wilson's of as many items as there are clusters.
    """
    num_clusters, num_right = len(set(clusters)), sum(is_right)
    if num_right in (0, len(is_right)):
        return wilson_interval(num_clusters if num_right else 0, num_clusters)
    if num_clusters == len(is_right):
        return wilson_interval(num_right, len(is_right))
    return mean_interval([float(each) for each in is_right], clusters)


def mcnemar_p(num_only_first: int, num_only_second: int) -> float:
    """How likely two methods differ at least so much by chance: the exact McNemar test, two-sided.

    Of the items that one method alone got right, and those that the other did.
    Source: McNemar, Psychometrika 12 (1947); exact: the sign test on the items they disagree on.
    """
    if min(num_only_first, num_only_second) < 0:
        raise ValueError(f"items must be counted from 0, got {num_only_first} and {num_only_second}")
    num = num_only_first + num_only_second
    return float(scipy.stats.binomtest(num_only_first, num).pvalue) if num else 1.0


def mean_interval(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> Interval:
    """The 95 % interval of a mean, by the percentile bootstrap over clusters of values; of one cluster the mean alone.

    Values of equal clusters depend on each other, and are drawn together; None: each alone. Where two methods are
    compared, a value is the one's score less the other's.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    clusters = range(len(values)) if clusters is None else clusters
    if len(values) != len(clusters) or not len(values):
        raise ValueError(f"each value must have a cluster, got {len(values)} and {len(clusters)}")
    places = {name: i for i, name in enumerate(dict.fromkeys(clusters))}
    of_value = [places[name] for name in clusters]
    sums, counts = np.bincount(of_value, values), np.bincount(of_value)
    if len(places) == 1:
        return float(sums[0] / counts[0]), float(sums[0] / counts[0])
    found = scipy.stats.bootstrap(
        (sums, counts),
        lambda sums, counts, axis: sums.sum(axis) / counts.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=_RESAMPLES,
        batch=max(1, _RESAMPLED_AT_ONCE // len(places)),
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


# Distributions of the next token.


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log probabilities, f64, of logits `[..., V]`."""
    return np.asarray(scipy.special.log_softmax(logits.astype(np.float64), axis=-1))


def kl_divergence(logprobs: np.ndarray, other: np.ndarray) -> float:
    """KL(first || other) of two distributions given as log probabilities `[V]`, nats."""
    return max(0.0, float((np.exp(logprobs) * (logprobs - other)).sum()))


# Answers.


def first_line(text: str) -> str:
    """The first line of an answer that is not blank, where a model goes on behind its answer; "" where all are."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def f1_score(answer: str, truths: Sequence[str]) -> float:
    """Overlap of an answer's words with those of a right one, the best over all right ones, in [0, 1].

    Without case, punctuation and articles, as of SQuAD. Two answers of no words are alike.
    Source: Rajpurkar et al., EMNLP 2016, section 6.1.
    """

    def f1(answer: list[str], truth: list[str]) -> float:
        if not answer or not truth:
            return float(answer == truth)
        num_common = (collections.Counter(answer) & collections.Counter(truth)).total()
        return 2 * num_common / (len(answer) + len(truth))

    return _best(answer, truths, f1, _words)


def has_answer(answer: str, truths: Sequence[str]) -> float:
    """1 where the words of a right answer stand in an answer, one behind the other, else 0; words as of `f1_score`.

    What stands before and behind them does not count: a model may say more than it was asked for.
    Source: Hsieh et al., RULER, COLM 2024, section 3 (recall of the expected outputs).
    """

    def has(answer: list[str], truth: list[str]) -> float:
        places = range(len(answer) - len(truth) + 1)
        return float(any(answer[place : place + len(truth)] == truth for place in places) and bool(truth or not answer))

    return _best(answer, truths, has, _words)


def _words(text: str) -> list[str]:
    """Without case, punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def rouge_l(answer: str, truths: Sequence[str]) -> float:
    """F-measure of the longest common subsequence of words, the best over all right answers, in [0, 1].

    Words are runs of letters a to z and digits, without case, as in the `rouge-score` package without its stemmer.
    Source: Lin, Text Summarization Branches Out 2004, section 3.
    """

    def words(text: str) -> list[str]:
        return re.findall(r"[a-z0-9]+", text.lower())

    def f_measure(answer: list[str], truth: list[str]) -> float:
        if not answer or not truth:
            return 0.0
        before = [0] * (len(truth) + 1)
        for word in answer:
            row = [0]
            for i, other in enumerate(truth):
                row.append(before[i] + 1 if word == other else max(before[i + 1], row[i]))
            before = row
        return 2 * before[-1] / (len(answer) + len(truth))

    return _best(answer, truths, f_measure, words)


def _best(
    answer: str,
    truths: Sequence[str],
    score: Callable[[list[str], list[str]], float],
    words: Callable[[str], list[str]],
) -> float:
    if not truths:
        raise ValueError("right answers must be at least one, got none")
    return float(max(score(words(answer), words(truth)) for truth in truths))
