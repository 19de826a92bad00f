"""Drift as measured, against the mean worked out by hand: fresh KV minus stale, of a full pass over each context."""

import numpy as np
import pytest

from benchmarks.evaluate.stream import ComparedOverflow
from ca_jax.overflow.config import OverflowConfig
from ca_jax.recompute.drift import measure_drift
from tests import engine_kit as kit
from tests.tolerances import LOGITS_ATOL

WINDOW = 128
TEXT = kit.prompt(400)


def by_hand(token_ids: list[int], keep: int, share: int) -> tuple[np.ndarray, int]:
    """The mean `[L, 2, K, H]` and what it is of; those that lost most, a tenth of the window, are left out."""
    context, moved, unsettled = token_ids[:WINDOW], [], keep + 13
    rest = token_ids[WINDOW:]
    while len(context) == WINDOW:
        left = context[:keep] + context[keep + share :]
        stale = kit.full_pass(context)[1]
        stale = np.concatenate([stale[:, :, :keep], stale[:, :, keep + share :]], axis=2)
        moved.append((kit.full_pass(left)[1] - stale.astype(np.float64))[:, :, unsettled:])
        context, rest = left + rest[:share], rest[share:]
    moved = np.concatenate(moved, axis=2)
    return moved.mean(2), moved.shape[2]


@pytest.mark.parametrize(("keep", "ratio", "num_tokens"), [(4, 0.5, 400), (0, 0.25, 200), (10, 0.75, 128)])
def test_it_is_the_mean_of_what_moved(keep, ratio, num_tokens):
    overflow = OverflowConfig(keep_first_tokens=keep, truncation_ratio=ratio)
    found = measure_drift(kit.tiny_model(), TEXT[:num_tokens], overflow, window=WINDOW)
    values, count = by_hand(TEXT[:num_tokens], keep, round(ratio * WINDOW))
    assert (found.num_tokens, found.window, found.truncation_ratio) == (count, WINDOW, ratio)
    assert found.fingerprint == kit.tiny_model().fingerprint
    assert {each.dtype for each in found.values} == {np.dtype(np.float32)}
    np.testing.assert_allclose(np.stack(found.values), values, atol=LOGITS_ATOL["float32"], rtol=0)
    assert np.abs(values[1:]).max() > 0.01, "nothing moved"
    found.check_model(kit.tiny_model().config, kit.tiny_model().fingerprint)


def test_what_else_would_be_done_to_what_stays_is_not():
    plain = measure_drift(kit.tiny_model(), TEXT[:200], OverflowConfig(), window=WINDOW)
    for changes in ({"method": "nkvt"}, {"anchor_tokens": 8, "repair_ratio": 0.5}, {"drift": "none.npz"}):
        found = measure_drift(kit.tiny_model(), TEXT[:200], ComparedOverflow(**changes), window=WINDOW)
        np.testing.assert_array_equal(found.values, plain.values)


@pytest.mark.parametrize(
    ("num_tokens", "overflow", "message"),
    [
        (127, OverflowConfig(), "the text must have at least 128 tokens, .*; got 127, of which 64 would"),
        (400, OverflowConfig(truncation_ratio=0.9), "more than 17 of them must stay; got 400, of which 13 would"),
    ],
)
def test_a_text_that_says_nothing_is_refused(num_tokens, overflow, message):
    with pytest.raises(ValueError, match=message):
        measure_drift(kit.tiny_model(), TEXT[:num_tokens], overflow, window=WINDOW)
