"""Delta rules and state spaces, over rows one behind the other, against one token after the other in float64."""

import jax
import numpy as np
import pytest

from ca_jax.models.recurrent import delta_rule

HEADS, KEY, VALUE = 3, 5, 4
ATOL = 2e-5


def given(counts: list[int], num_padding: int, form: str, seed: int = 0) -> list[np.ndarray | None]:
    """Arguments of `delta_rule`; what is behind the last row's tokens is NaN."""
    rng = np.random.default_rng(seed)
    num = sum(counts)
    q, k, v = (rng.normal(size=(num, HEADS, size)) for size in (KEY, KEY, VALUE))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    decay = -rng.exponential(size=(num, HEADS, KEY) if form == "channel" else (num, HEADS))
    tokens = [q, k, v, decay, rng.uniform(size=(num, HEADS))]
    tokens = [np.concatenate([each, np.full((num_padding, *each.shape[1:]), np.nan)]) for each in tokens]
    beta = None if form == "space" else tokens[4]
    before = rng.normal(size=(len(counts), HEADS, KEY, VALUE))
    return [*tokens[:4], beta, before, np.cumsum([0, *counts]).astype(np.int32)]


def one_by_one(q, k, v, log_decay, beta, before, starts) -> tuple[np.ndarray, np.ndarray]:
    """As the docstring of `delta_rule` says it."""
    out, after = np.zeros((starts[-1], HEADS, VALUE)), before.copy()
    for row in range(len(starts) - 1):
        for i in range(starts[row], starts[row + 1]):
            decay = np.exp(log_decay[i] if log_decay.ndim == 3 else log_decay[i][:, None])
            state = after[row] * decay[..., None]
            added = v[i]
            if beta is not None:
                added = beta[i][:, None] * (v[i] - np.einsum("nde,nd->ne", state, k[i]))
            after[row] = state + k[i][..., None] * added[:, None]
            out[i] = np.einsum("nde,nd->ne", after[row], q[i])
    return out, after


@pytest.mark.parametrize("form", ["head", "channel", "space"])
@pytest.mark.parametrize(
    ("counts", "num_padding"),
    [([1], 0), ([7, 0, 130, 3, 16, 64], 11), ([200], 56), ([0, 0], 4)],
    ids=["one", "ragged", "long", "none"],
)
def test_rows_are_what_one_token_after_the_other_gives(form, counts, num_padding):
    arguments = given(counts, num_padding, form)
    found, after = jax.jit(delta_rule)(
        *(each if each is None else each.astype(np.float32) for each in arguments[:6]), arguments[6]
    )
    expected, expected_after = one_by_one(*arguments)
    np.testing.assert_allclose(found[: len(expected)], expected, atol=ATOL)
    np.testing.assert_allclose(after, expected_after, atol=ATOL)


@pytest.mark.parametrize("form", ["head", "channel", "space"])
def test_rows_of_one_token_at_most_each(form):
    arguments = given([1] * 6, 0, form)
    starts = np.array([0, 1, 2, 3, 4, 5, 5], np.int32)  # The last row has none.
    found, after = delta_rule(
        *(each if each is None else each.astype(np.float32) for each in arguments[:6]), starts, one_each=True
    )
    expected, expected_after = one_by_one(*arguments[:6], starts)
    np.testing.assert_allclose(found[:5], expected, atol=ATOL)
    np.testing.assert_allclose(after, expected_after, atol=ATOL)
