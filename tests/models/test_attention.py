"""Attention over history that is one array against the textbook.

Not here: over pages (test_paged_attention), and what places receive through all layers (tests/test_runner.py).
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ca_jax.models import rope
from ca_jax.models.attention import QUERY_BLOCK, attend
from ca_jax.models.config import RopeConfig
from ca_jax.models.kv import LayerKV
from tests.tolerances import ATTENTION_ATOL

ATOL = ATTENTION_ATOL["float32"]
ROPE = RopeConfig(theta=500.0)
HEAD_DIM = 8


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def weights_of(q: np.ndarray, k: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """softmax(q k / sqrt(H)) in float64: rotated `q [T, N, H]`, `k [S, K, H]`, `seen [T, S]` to `[N, T, S]`."""
    k = k.astype(np.float64).repeat(q.shape[1] // k.shape[1], axis=1)
    scores = np.einsum("tnh,snh->nts", q.astype(np.float64), k) / np.sqrt(q.shape[-1])
    weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    return weights / weights.sum(-1, keepdims=True)


def textbook(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """The same weights over `v [S, K, H]`: `[T, N, H]`."""
    values = v.astype(np.float64).repeat(q.shape[1] // v.shape[1], axis=1)
    return np.einsum("nts,snh->tnh", weights_of(q, k, seen), values)


rotation_at = jax.jit(partial(rope.rotation_at, ROPE, HEAD_DIM))


def rotate(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(rope.rotate)(x, rotation_at(positions)))


def padded(x: np.ndarray, size: int) -> np.ndarray:
    """`x` with NaN behind it."""
    return np.concatenate([x, np.full((size - len(x), *x.shape[1:]), np.nan, np.float32)])


def prefilled(num_new, num_history, capacity, num_kv=2, num_heads=6, window=None):
    """What one sequence attends to, NaN behind its history, and what is expected of it."""
    q, k, v = (normal(i, num_new, n, HEAD_DIM) for i, n in enumerate((num_heads, num_kv, num_kv)))
    old_k, old_v = (normal(i, num_history, num_kv, HEAD_DIM) for i in (3, 4))
    history = jnp.stack([padded(part, capacity)[None] for part in (old_k, old_v)]) if capacity else None
    positions = np.arange(num_history + num_new)
    own = positions[num_history:]
    rotations = rotation_at(own[None]), rotation_at(np.arange(capacity)) if capacity else None
    new, lengths = LayerKV(jnp.asarray(k)[None], jnp.asarray(v)[None]), jnp.asarray([num_history], jnp.int32)
    found = jax.jit(partial(attend, window=window))(jnp.asarray(q)[None], new, history, lengths, *rotations)
    seen = positions[None] <= own[:, None]
    seen &= positions[None] > own[:, None] - (window or len(positions))
    rotated = rotate(q, own), rotate(np.concatenate([old_k, k]), positions)
    return np.asarray(found[0]), textbook(*rotated, np.concatenate([old_v, v]), seen)


def test_heads_of_bfloat16_are_rotated_in_f32_and_stay_bfloat16():
    x, rotation = jnp.asarray(normal(0, 5, 2, HEAD_DIM)).astype(jnp.bfloat16), rotation_at(np.arange(100, 105))
    expected = rope.rotate(x.astype(jnp.float32), rotation).astype(jnp.bfloat16)
    assert rope.rotate(x, rotation).dtype == jnp.bfloat16
    np.testing.assert_array_equal(rope.rotate(x, rotation), expected)


LONG = (QUERY_BLOCK + 30, 40, 64)  # New tokens, of history, places for it.


@pytest.mark.parametrize(
    ("sizes", "window"),
    [
        *((sizes, None) for sizes in ((1, 0, 0), (5, 0, 8), (5, 3, 8), (5, 8, 8), LONG)),
        *(((5, 0, 8), 3), ((5, 3, 8), 1), ((5, 8, 16), 10), ((3, 90, 96), 3), ((3, 90, 96), 70)),
        *((LONG, 10), (LONG, QUERY_BLOCK)),
    ],
)
def test_attention_over_history_is_the_textbooks_of_all_tokens_or_of_a_window(sizes, window):
    np.testing.assert_allclose(*prefilled(*sizes, window=window), atol=ATOL, rtol=0)
