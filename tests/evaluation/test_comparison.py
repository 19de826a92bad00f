"""What is compared: names, settings, refusals, and which tokens survive everywhere."""

import dataclasses

import pytest

from benchmarks.evaluate.comparison import Answers, Comparison, accuracy_rows, name_of
from benchmarks.evaluate.stream import ComparedOverflow
from ca_jax.launch.texts import EvaluationError
from tests import engine_kit as kit


def test_a_name_says_what_a_method_has():
    full = ComparedOverflow(truncation_ratio=0.25, keep_first_tokens=2, anchor_tokens=16, repair_ratio=0.125)
    for overflow, name in (
        (ComparedOverflow(method="tt", keep_first_tokens=0, anchor_tokens=3), "tt"),
        (ComparedOverflow(method="of", drift="a.npz"), "of, keep 4"),
        (full, "ca, drop 0.25, keep 2, anchor 16, spread repair 12.5%"),
        (dataclasses.replace(full, repair="deviating"), "ca, drop 0.25, keep 2, anchor 16, repair 12.5%"),
        (ComparedOverflow(), "ca, keep 4, anchor 32, spread repair 10%"),
        (ComparedOverflow(repair="none", drift="a.npz"), "ca, keep 4, drift"),
        (ComparedOverflow(repair="none", repair_ratio=0.1, discarder="heavy_hitters"), "ca, heavy_hitters, keep 4"),
    ):
        assert name_of(overflow) == name


def test_the_first_tt_is_what_others_are_held_against():
    methods = tuple(ComparedOverflow(method=name) for name in ("ca", "tt", "of"))
    comparison = Comparison(methods=(*methods, ComparedOverflow(method="tt", keep_first_tokens=0)))
    assert comparison.baseline == "tt, keep 4"
    assert Comparison(methods=methods[:1]).baseline is None
    anchored = ComparedOverflow(method="nkvt", keep_first_tokens=1, anchor_tokens=4, repair_ratio=0.1)
    assert Comparison(methods=(anchored,), window=256).setting("nkvt, keep 1") == {
        **{"name": "nkvt, keep 1", "method": "nkvt", "window": 256, "truncation_ratio": 0.5},
        **{"keep_first_tokens": 1, "anchor_tokens": 0, "repair_ratio": 0.0, "repair": None},
        **{"drift": None, "discarder": "oldest"},
    }


def test_a_drift_that_is_none_is_refused(tmp_path):
    (tmp_path / "bad.npz").write_bytes(b"none")
    for name, message in (("no.npz", "No such file"), ("bad.npz", "must be of drift")):
        comparison = Comparison(methods=(ComparedOverflow(drift=str(tmp_path / name)),), window=64, step_tokens=16)
        with pytest.raises(EvaluationError, match=message):
            comparison.streams(kit.tiny_model())


@pytest.mark.parametrize("num_tokens", [64, 65, 200])
@pytest.mark.parametrize("ratios", [(1.0,), (0.5, 0.2)])
def test_what_survives_is_what_streams_have_left(num_tokens, ratios):
    methods = tuple(ComparedOverflow(truncation_ratio=ratio, keep_first_tokens=3) for ratio in ratios)
    comparison = Comparison(methods=methods, window=64, step_tokens=16)
    token_ids = list(range(num_tokens))  # Each is its own place.
    left = set(token_ids)
    for stream in comparison.streams(kit.tiny_model()).values():
        stream.feed(token_ids)
        before = stream.truncations[-1].num_fed if stream.truncations else 0
        left &= {place for place in stream.token_ids if place < before}
    assert set(comparison.surviving(num_tokens).nonzero()[0].tolist()) == left
    assert bool(left) == (num_tokens > 64)


def answers_of(is_right: str) -> Answers:
    return Answers(
        given=list(is_right), is_right=[each == "y" for each in is_right], num_truncations=[1] * len(is_right)
    )


def test_a_bound_on_right_answers_is_kept_with_the_whole_interval():
    methods = (ComparedOverflow(method="tt"), ComparedOverflow(), ComparedOverflow(repair="none"))
    comparison = Comparison(methods=methods)
    tt, near, far = comparison.by_name
    answers = {tt: answers_of("y" * 100), near: answers_of("n" * 4 + "y" * 96), far: answers_of("n" * 20 + "y" * 80)}

    def passes(max_loss: float | None) -> list[bool | None]:
        return [row.passes for row in accuracy_rows("a", comparison, answers, range(100), max_loss=max_loss)]

    assert passes(None) == [None, None, None]
    assert passes(0.05) == [None, False, False], "4 points fewer, and 8 at the interval's end"
    assert passes(0.1) == [None, True, False]


def test_a_bound_needs_something_to_be_held_against():
    comparison = Comparison(methods=(ComparedOverflow(),))
    comparison.check_bound(None)
    for methods, bound in (((ComparedOverflow(),), 0.1), ((ComparedOverflow(method="tt"), ComparedOverflow()), 0.0)):
        with pytest.raises(ValueError, match="max_loss must be above 0, beside a method tt"):
            Comparison(methods=methods).check_bound(bound)
