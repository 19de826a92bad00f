"""Scores of answers and ranks, against values worked out by hand and against scipy."""

import numpy as np
import pytest
import scipy.stats

from ca_jax.evaluation.rag_metrics import f1_score, first_line, rank_correlation, rouge_l


@pytest.mark.parametrize(
    ("answer", "truths", "score"),
    [
        ("The Exeter College!", ["Exeter College"], 1.0),
        ("exeter", ["Exeter College"], 2 / 3),  # precision 1, recall 1/2
        ("He was at Exeter College", ["Exeter College"], 4 / 7),  # 2 of 5 words, 2 of 2
        ("in London", ["Exeter College"], 0.0),
        ("no no", ["no"], 2 / 3),  # a word counts as often as the other has it
        ("Charles", ["Exeter College", "Charles County"], 2 / 3),
        ("", ["Exeter"], 0.0),
        ("the", ["a"], 1.0),  # nothing is left of either
    ],
)
def test_f1_is_the_overlap_of_words_with_the_best_right_answer(answer, truths, score):
    assert f1_score(answer, truths) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "truths", "score"),
    [
        ("police killed the gunman", ["police kill the gunman"], 3 / 4),
        ("the gunman kill police", ["police kill the gunman"], 1 / 2),  # Lin's example: "the gunman" in order
        ("College, Exeter", ["exeter college"], 1 / 2),
        ("Exeter-College", ["exeter college"], 1.0),
        ("x", ["y", "x z"], 2 / 3),
        ("", ["y"], 0.0),
    ],
)
def test_rouge_l_is_of_the_longest_common_subsequence(answer, truths, score):
    assert rouge_l(answer, truths) == pytest.approx(score)


@pytest.mark.parametrize("score", [f1_score, rouge_l])
def test_without_a_right_answer_there_is_no_score(score):
    with pytest.raises(ValueError, match="at least one right answer"):
        score("x", [])


def test_an_answer_is_its_first_line_that_is_not_blank():
    assert first_line("\n \n Exeter College \nQuestion:") == "Exeter College"
    assert first_line(" \n") == ""


def test_rank_correlation_is_spearmans():
    rng = np.random.default_rng(0)
    first = rng.integers(0, 5, 40).astype(float)  # with ties
    second = first + rng.normal(size=40)
    assert rank_correlation(first, second) == pytest.approx(scipy.stats.spearmanr(first, second).statistic)
    assert rank_correlation([1, 2, 3], [10, 100, 1000]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    with pytest.raises(ValueError, match="not all equal"):
        rank_correlation([1, 1], [1, 2])
    with pytest.raises(ValueError, match="as many values"):
        rank_correlation([1, 2, 3], [1, 2])
