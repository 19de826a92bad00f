"""Estimates against values worked out by hand or published."""

import math

import numpy as np
import pytest

from ca_jax.evaluation.statistics import block_estimate, mcnemar_p, paired_interval, wilson_interval


@pytest.mark.parametrize(
    ("num_right", "num", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals_are_newcombes(num_right, num, low, high):
    """Newcombe, Statistics in Medicine 17 (1998), table I, method 3."""
    assert wilson_interval(num_right, num) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson_interval(num - num_right, num)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_wilson_intervals_stay_in_range():
    assert wilson_interval(0, 3)[0] == pytest.approx(0, abs=1e-12)
    assert wilson_interval(3, 3)[1] == pytest.approx(1)
    with pytest.raises(ValueError, match="got 0 of 0"):
        wilson_interval(0, 0)
    with pytest.raises(ValueError, match="got 4 of 3"):
        wilson_interval(4, 3)


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"), [(1, 5, 14 / 64), (5, 1, 14 / 64), (0, 5, 2 / 32), (3, 3, 1.0), (0, 0, 1.0)]
)
def test_mcnemar_is_the_sign_test_on_what_differs(only_first, only_second, p):
    assert mcnemar_p(only_first, only_second) == p
    with pytest.raises(ValueError, match="got -1"):
        mcnemar_p(-1, only_second)


def test_errors_are_of_block_means():
    values = [1, 3, 2, 4, 6, 8]  # Blocks of mean 2, 3 and 7.
    estimate = block_estimate(values, 2)
    assert estimate.mean == 4
    assert estimate.stderr == pytest.approx(math.sqrt(7 / 3))
    single = block_estimate(values, 1)
    assert single.stderr == pytest.approx(np.std(values, ddof=1) / math.sqrt(6))


def test_a_short_last_block_counts_by_its_length():
    estimate = block_estimate([1, 2, 6], 2)  # Sums 3 and 6 where a mean of 3 wants 6 and 3.
    assert (estimate.mean, estimate.stderr) == (3, pytest.approx(math.sqrt(2 * (9 + 9)) / 3))
    assert block_estimate([1, 2], 2).stderr is None
    with pytest.raises(ValueError, match="got 0 in blocks of 2"):
        block_estimate([], 2)


def test_a_perplexity_has_the_error_of_its_logarithm_times_itself():
    nats = block_estimate([1, 3], 1)
    assert nats.exp().mean == pytest.approx(math.e**2)
    assert nats.exp().stderr == pytest.approx(math.e**2 * nats.stderr)
    assert block_estimate([1], 1).exp().stderr is None


def test_paired_errors_are_of_differences_not_of_texts():
    rng = np.random.default_rng(0)
    text = rng.normal(3, 1, 1000)
    ours, theirs = text + 0.1 + rng.normal(0, 0.01, 1000), text
    assert block_estimate(ours - theirs, 10).stderr < 0.001 < 0.02 < block_estimate(ours, 10).stderr


def test_the_paired_interval_is_that_of_the_normal_law_where_there_is_much():
    differences = [1] * 600 + [0] * 400
    half = 1.96 * math.sqrt(0.24 / 1000)
    assert paired_interval(differences, range(1000)) == pytest.approx((0.6 - half, 0.6 + half), abs=0.003)
    assert paired_interval([-1, -1, -1], "abc") == (-1, -1)


def test_items_of_a_cluster_are_drawn_together():
    differences = [1, 0, 0, 1, -1, 0, 1, 1]
    alone = paired_interval(differences, range(8), seed=3)
    twice = paired_interval(differences * 2, [*range(8), *range(8)], seed=3)
    assert twice == pytest.approx(alone)
    independent = paired_interval(differences * 2, range(16), seed=3)
    assert independent[1] - independent[0] < alone[1] - alone[0]
    with pytest.raises(ValueError, match="got 8 and 3"):
        paired_interval(differences, "abc")
