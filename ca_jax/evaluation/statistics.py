"""Estimates and how sure they are: perplexity, accuracy, differences between methods; distributions of the next token.

Neighbouring tokens of a text are hard or easy together, and so are questions on one record. Errors are therefore taken
over blocks of tokens, and over clusters of items, not over single ones. Differences are taken pairwise: two methods
read the same tokens and answer the same questions, so that what these have in common falls out.

Not here: measuring, tables.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

Interval = tuple[float, float]
"""Least and largest value of a 95 % confidence interval."""

Z_95 = 1.959963984540054
"""Standard errors on either side of a mean that 95 % lie within."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean and how sure it is."""

    mean: float
    """Of the values."""
    stderr: float | None
    """Standard error of the mean; None of fewer than two blocks."""

    def exp(self) -> Estimate:
        """e to its power: of mean nats, a perplexity. The error by the delta method."""
        value = math.exp(self.mean)
        return Estimate(mean=value, stderr=None if self.stderr is None else value * self.stderr)


def block_estimate(values: npt.ArrayLike, block: int) -> Estimate:
    """The mean of values that stand in a row, its error from the spread of blocks of them.

    The mean is a ratio, of the blocks' sums over their lengths, since the last block may be short. Values may depend on
    each other within a block; what they have in common beyond one makes the error too small.

    Args:
      values: `[T]`.
      block: values in a block.

    Raises:
      ValueError: there are no values, or a block of none.

    Source: Cochran, Sampling Techniques (1977), section 6.4, the variance of a ratio.
    """
    array = np.asarray(values, np.float64)
    if block < 1 or not len(array):
        raise ValueError(f"there must be values in blocks of at least 1, got {len(array)} in blocks of {block}")
    starts = np.arange(0, len(array), block)
    sums, counts = np.add.reduceat(array, starts), np.diff([*starts, len(array)])
    mean = float(sums.sum() / len(array))
    if len(starts) < 2:
        return Estimate(mean=mean, stderr=None)
    squares = float(((sums - mean * counts) ** 2).sum())
    return Estimate(mean=mean, stderr=math.sqrt(squares * len(starts) / (len(starts) - 1)) / len(array))


def wilson_interval(num_right: int, num: int) -> Interval:
    """The 95 % interval of a share of independent items.

    Raises:
      ValueError: there are no items, or more right ones than there are.

    Source: Wilson, Journal of the American Statistical Association 22 (1927).
    """
    if not 0 <= num_right <= num or num == 0:
        raise ValueError(f"right answers must be 0 to all of at least one item, got {num_right} of {num}")
    share, z2 = num_right / num, Z_95**2
    middle = (share + z2 / (2 * num)) / (1 + z2 / num)
    half = Z_95 * math.sqrt(share * (1 - share) / num + z2 / (4 * num**2)) / (1 + z2 / num)
    return max(0.0, middle - half), min(1.0, middle + half)


def mcnemar_p(num_only_first: int, num_only_second: int) -> float:
    """How likely two methods differ at least so much by chance: the exact McNemar test, two-sided.

    Args:
      num_only_first: items that the first method alone got right.
      num_only_second: items that the second alone got right.

    Raises:
      ValueError: a number below 0.

    Source: McNemar, Psychometrika 12 (1947); exact: the sign test on the items they disagree on.
    """
    fewer, num = min(num_only_first, num_only_second), num_only_first + num_only_second
    if fewer < 0:
        raise ValueError(f"there must be numbers of items, got {num_only_first} and {num_only_second}")
    return min(1.0, 2 * sum(math.comb(num, i) for i in range(fewer + 1)) / 2**num)


def paired_interval(
    differences: Sequence[float], clusters: Sequence[Hashable], *, seed: int = 0, num_resamples: int = 10_000
) -> Interval:
    """The 95 % interval of the mean of paired differences, by the percentile bootstrap over clusters.

    Args:
      differences: of each item, the one method's score less the other's.
      clusters: which items depend on each other: those of equal values.
      seed: of the resampling.
      num_resamples: how many.

    Raises:
      ValueError: there are no items, or not one cluster for each.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    if len(differences) != len(clusters) or not len(differences):
        raise ValueError(f"there must be a cluster for each difference, got {len(differences)} and {len(clusters)}")
    places = {name: i for i, name in enumerate(dict.fromkeys(clusters))}
    sums, counts = np.zeros(len(places)), np.zeros(len(places))
    for difference, cluster in zip(differences, clusters, strict=True):
        sums[places[cluster]] += difference
        counts[places[cluster]] += 1
    rng = np.random.default_rng(seed)
    times_drawn = rng.multinomial(len(places), np.full(len(places), 1 / len(places)), size=num_resamples)
    low, high = np.percentile(times_drawn @ sums / (times_drawn @ counts), [2.5, 97.5])
    return float(low), float(high)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log probabilities, f64, of logits `[V]`."""
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def kl_divergence(logprobs: np.ndarray, other: np.ndarray) -> float:
    """KL(first || other) of two distributions given as log probabilities `[V]`, nats."""
    return max(0.0, float((np.exp(logprobs) * (logprobs - other)).sum()))
