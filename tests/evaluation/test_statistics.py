"""Estimates against values worked out by hand or published."""

import math

import numpy as np
import pytest
import scipy.stats

from benchmarks.evaluate import statistics


def test_mcnemar_is_the_sign_test_on_what_differs_and_a_share_has_newcombes_interval():
    assert (statistics.mcnemar_p(1, 5), statistics.mcnemar_p(0, 5), statistics.mcnemar_p(0, 0)) == pytest.approx(
        (14 / 64, 2 / 32, 1)
    )
    assert statistics.wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)  # Newcombe (1998), table I.


def test_errors_are_of_block_means():
    values = [1, 3, 2, 4, 6, 8]  # Blocks of mean 2, 3 and 7.
    estimate = statistics.block_estimate(values, 2)
    assert estimate.mean == 4
    assert estimate.stderr == pytest.approx(math.sqrt(7 / 3))
    assert statistics.block_estimate(values, 1).stderr == pytest.approx(scipy.stats.sem(values))
    short = statistics.block_estimate([1, 2, 6], 2)  # Sums 3 and 6 where a mean of 3 wants 6 and 3.
    assert (short.mean, short.stderr) == (3, pytest.approx(math.sqrt(2 * (9 + 9)) / 3))
    assert statistics.block_estimate([1, 2], 2).stderr is None
    with pytest.raises(ValueError, match="got 0 in blocks of 2"):
        statistics.block_estimate([], 2)


def test_the_mean_interval_is_that_of_the_normal_law_where_there_is_much():
    differences = [1] * 600 + [0] * 400
    half = 1.96 * math.sqrt(0.24 / 1000)
    assert statistics.mean_interval(differences, range(1000)) == pytest.approx((0.6 - half, 0.6 + half), abs=0.003)
    assert statistics.mean_interval([-1, -1, -1], "abc") == (-1, -1)


def test_a_share_is_of_records_where_several_questions_are_on_one():
    is_right = [True] * 4 + [False] * 4
    assert statistics.share_interval(is_right, range(8)) == statistics.wilson_interval(4, 8)
    by_record = statistics.share_interval(is_right, [i // 2 for i in range(8)])
    alone = statistics.mean_interval(is_right, range(8))
    assert by_record == statistics.mean_interval(is_right, [i // 2 for i in range(8)])
    assert by_record[1] - by_record[0] > alone[1] - alone[0]
    assert statistics.share_interval([True] * 8, [i // 2 for i in range(8)]) == statistics.wilson_interval(4, 4), (
        "nothing is certain"
    )
    assert statistics.share_interval([False] * 8, [i // 2 for i in range(8)]) == statistics.wilson_interval(0, 4)


def test_items_of_a_cluster_are_drawn_together():
    differences = [1, 0, 0, 1, -1, 0, 1, 1]
    alone = statistics.mean_interval(differences, range(8))
    twice = statistics.mean_interval(differences * 2, [*range(8), *range(8)])
    assert twice == pytest.approx(alone)
    independent = statistics.mean_interval(differences * 2, range(16))
    assert independent[1] - independent[0] < alone[1] - alone[0]
    with pytest.raises(ValueError, match="got 8 and 3"):
        statistics.mean_interval(differences, "abc")


def test_log_probabilities_and_divergence_are_the_textbooks():
    logprobs = statistics.log_softmax(np.array([[1e4, 1e4, 0.0]], np.float32))
    assert np.exp(logprobs) == pytest.approx(np.array([[0.5, 0.5, 0]]))
    even, odd = np.array([0.5, 0.5]), np.array([0.75, 0.25])
    for one, other in ((even, odd), (odd, even), (even, even)):
        assert statistics.kl_divergence(np.log(one), np.log(other)) == pytest.approx(scipy.stats.entropy(one, other))


# Answers.


OF_WORDS = [  # F1: the overlap of words with the best right answer.
    ("The Exeter College!", ["Exeter College"], 1.0),
    ("He was at Exeter College", ["Exeter College"], 4 / 7),  # 2 of 5 words, 2 of 2
    ("in London", ["Exeter College"], 0.0),
    ("no no", ["no"], 2 / 3),  # a word counts as often as the other has it
    ("Charles", ["Exeter College", "Charles County"], 2 / 3),
    ("", ["Exeter"], 0.0),
    ("the", ["a"], 1.0),  # nothing is left of either
]
IN_ORDER = [  # ROUGE-L: of the longest common subsequence.
    ("police killed the gunman", ["police kill the gunman"], 3 / 4),
    ("the gunman kill police", ["police kill the gunman"], 1 / 2),  # Lin's example: "the gunman" in order
    ("College, Exeter", ["exeter college"], 1 / 2),
    ("Exeter-College", ["exeter college"], 1.0),
    ("x", ["y", "x z"], 2 / 3),
    ("", ["y"], 0.0),
]
HELD = [  # Whether an answer has a right one in it.
    ("It is 4821, I think.", ["4821"], 1.0),
    ("It is 48210.", ["4821"], 0.0),  # a word is a whole one
    ("the College of Exeter", ["Exeter College"], 0.0),
    ("He was at the Exeter College then", ["Oxford", "exeter college"], 1.0),
    ("Exeter", ["Exeter College"], 0.0),
    ("", ["Exeter"], 0.0),
    ("Exeter", ["the"], 0.0),  # nothing is left of it
    ("a", ["the"], 1.0),
]


def test_scores_of_answers_are_those_of_their_words_and_of_words_in_order():
    scores = ((statistics.f1_score, OF_WORDS), (statistics.rouge_l, IN_ORDER), (statistics.has_answer, HELD))
    for score_of, cases in scores:
        for answer, truths, score in cases:
            assert score_of(answer, truths) == pytest.approx(score), (score_of.__name__, answer)


def test_an_answer_is_its_first_line_that_is_not_blank():
    assert statistics.first_line("\n \n Exeter College \nQuestion:") == "Exeter College"
    assert statistics.first_line(" \n") == ""
