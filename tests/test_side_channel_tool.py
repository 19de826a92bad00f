"""What `tools.side_channel` says of two arms: nothing where they are alike, much where they are not."""

from __future__ import annotations

import random

import numpy as np

from tests import engine_kit as kit
from tools.side_channel import compare, made_up


def test_arms_that_are_alike_and_arms_that_are_not():
    rng = np.random.default_rng(1)
    one, other = (rng.normal(1.0, 0.1, 60).tolist() for _ in range(2))
    alike = compare(one, other)
    assert min(alike["mann_whitney_p"], alike["wilcoxon_p"]) > 0.05
    low, high = alike["cliffs_delta_95"]
    assert low < 0 < high
    assert compare(one, one)["cliffs_delta"] == 0
    assert compare(one, one)["wilcoxon_p"] == 1
    faster = compare([seconds - 0.5 for seconds in one], other)
    assert max(faster["mann_whitney_p"], faster["wilcoxon_p"]) < 1e-6
    assert faster["auc"] < 0.01
    assert faster["cliffs_delta_95"][1] < -0.9
    low, high = faster["median_difference_ms_95"]
    assert low < -500 + alike["median_difference_ms"] < high < -400


def test_a_small_difference_in_every_round_shows_under_a_large_spread():
    rng = np.random.default_rng(2)
    new = rng.normal(1.0, 0.3, 40)
    found = compare((new - 0.01 - rng.normal(0, 0.001, 40)).tolist(), new.tolist())
    assert found["mann_whitney_p"] > 0.05
    assert found["wilcoxon_p"] < 1e-6
    assert found["median_difference_ms_95"][1] < 0


def test_prompts_are_of_so_many_tokens_and_all_different():
    tokenizer = kit.tiny_model().tokenizer
    prompts = [made_up(tokenizer, 100, random.Random(seed)) for seed in range(5)]
    assert all(90 < len(tokenizer.encode(prompt, add_bos=False)) <= 100 for prompt in prompts)
    assert len({prompt[:16] for prompt in prompts}) == 5
