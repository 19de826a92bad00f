"""Attention of some tokens over all places, against a dense softmax in float64."""

from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ca_jax.models.attention import QUERY_BLOCK, SLOT_BLOCK, UNROLLED_KV_HEADS, ChosenAttention, attend_chosen
from tests.tolerances import ATTENTION_ATOL

HEAD_DIM = 8


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def dense(q: np.ndarray, keys: np.ndarray, values: np.ndarray, positions: np.ndarray, window: int = 1000) -> np.ndarray:
    """Token by token and head by head, over the places up to its own, as many as there are in the window."""
    groups = q.shape[1] // keys.shape[1]
    out = np.zeros(q.shape)
    for row, position in enumerate(positions):
        for head in range(q.shape[1]):
            k, v = (
                part[max(position + 1 - window, 0) : position + 1, head // groups].astype(np.float64)
                for part in (keys, values)
            )
            weights = np.exp(k @ q[row, head].astype(np.float64) / np.sqrt(q.shape[2]))
            out[row, head] = (weights / weights.sum()) @ v
    return out


@pytest.fixture(params=get_args(ChosenAttention))
def attend(request):
    return jax.jit(partial(attend_chosen, implementation=request.param), static_argnums=4)


@pytest.mark.parametrize("positions", [[0], [29], [0, 1, 2, 3], [3, 4, 11, 28], list(range(30))], ids=str)
@pytest.mark.parametrize(
    ("num_kv", "num_heads"), [(2, 6), (3, 3), (UNROLLED_KV_HEADS + 4, UNROLLED_KV_HEADS + 4)], ids=str
)
def test_each_token_sees_the_places_up_to_its_own(attend, num_kv, num_heads, positions):
    q, keys, values = normal(0, len(positions), num_heads, HEAD_DIM), *normal(1, 2, 30, num_kv, HEAD_DIM)
    out = attend(jnp.asarray(q), jnp.asarray(keys), jnp.asarray(values), jnp.asarray(positions, jnp.int32))
    assert out.dtype == jnp.float32
    expected = dense(q, keys, values, np.array(positions))
    np.testing.assert_allclose(np.asarray(out), expected, atol=ATTENTION_ATOL["float32"], rtol=0)


@pytest.mark.parametrize("window", [1, 4, 29, 30])
def test_in_a_window_each_token_sees_the_last_places_up_to_its_own(attend, window):
    positions = np.array([0, 3, 4, 11, 28])
    q, keys, values = normal(0, len(positions), 6, HEAD_DIM), *normal(1, 2, 30, 2, HEAD_DIM)
    out = attend(*map(jnp.asarray, (q, keys, values)), jnp.asarray(positions, jnp.int32), window)
    expected = dense(q, keys, values, positions, window)
    np.testing.assert_allclose(np.asarray(out), expected, atol=ATTENTION_ATOL["float32"], rtol=0)


@pytest.mark.parametrize("num_kv", [2, UNROLLED_KV_HEADS + 4])
def test_what_lies_behind_the_last_token_is_never_read(attend, num_kv):
    positions = np.array([2, 7, 19])
    q, keys, values = normal(0, 3, 2 * num_kv, HEAD_DIM), *normal(1, 2, 30, num_kv, HEAD_DIM)
    keys[20:], values[20:] = np.nan, np.nan
    keys[19], values[19] = 50.0, 50.0  # Of the last token alone.
    out = np.asarray(attend(*map(jnp.asarray, (q, keys, values)), jnp.asarray(positions, jnp.int32)))
    np.testing.assert_allclose(out[:2], dense(q, keys, values, positions)[:2], atol=ATTENTION_ATOL["float32"], rtol=0)
    assert np.isfinite(out).all()


def test_half_precision_is_as_near_as_its_roundings(attend):
    positions = np.array([5, 6, 21])
    q, keys, values = normal(0, 3, 6, HEAD_DIM), *normal(1, 2, 30, 2, HEAD_DIM)
    halves = [jnp.asarray(part, jnp.bfloat16) for part in (q, keys, values)]
    out = attend(*halves, jnp.asarray(positions, jnp.int32))
    assert out.dtype == jnp.bfloat16
    expected = dense(*(np.asarray(part, np.float32) for part in halves), positions)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=ATTENTION_ATOL["bfloat16"], rtol=0)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("num_places", [SLOT_BLOCK + 1, 2 * SLOT_BLOCK + 100])
def test_blocks_of_tokens_over_blocks_of_places(attend, num_places, window):
    rng = np.random.default_rng(num_places)
    positions = np.sort(rng.choice(num_places - 7, QUERY_BLOCK + 30, replace=False))
    q, keys, values = normal(0, len(positions), 2, HEAD_DIM), *normal(1, 2, num_places, 1, HEAD_DIM)
    keys[positions[-1] + 1 :], values[positions[-1] + 1 :] = np.nan, np.nan
    out = attend(*map(jnp.asarray, (q, keys, values)), jnp.asarray(positions, jnp.int32), window)
    expected = dense(q, keys, values, positions, window or num_places)
    np.testing.assert_allclose(np.asarray(out), expected, atol=ATTENTION_ATOL["float32"], rtol=0)


@pytest.mark.parametrize("positions", [[30, 31], [2, 7, 30, 1 << 30], [5, *range(2000, 2200)]], ids=len)
def test_padding_changes_nothing_and_gives_some_number(attend, positions):
    q, keys, values = normal(0, len(positions), 6, HEAD_DIM), *normal(1, 2, 30, 2, HEAD_DIM)
    positions = np.array(positions)
    real = positions < 30
    behind = max([0, *positions[real]]) + 1
    keys[behind:], values[behind:] = np.nan, np.nan
    out = np.asarray(attend(*map(jnp.asarray, (q, keys, values)), jnp.asarray(positions, jnp.int32)))
    assert np.isfinite(out).all()
    expected = dense(q[real], keys, values, positions[real])
    np.testing.assert_allclose(out[real], expected, atol=ATTENTION_ATOL["float32"], rtol=0)
