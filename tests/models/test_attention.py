"""Attention over history and over decode slots, against the textbook formula in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from ca_jax.models import attention, rope
from ca_jax.models.attention import QUERY_BLOCK, SLOT_BLOCK, attend, attend_slots
from ca_jax.models.config import RopeConfig
from ca_jax.models.kv import LayerKV
from tests.tolerances import ATTENTION_ATOL

ATOL = ATTENTION_ATOL["float32"]
ROPE = RopeConfig(theta=500.0)
HEAD_DIM = 8


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def textbook(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """softmax(q k / sqrt(H)) v for rotated `q [T, N, H]`, `k` and `v` `[S, K, H]`, `seen [T, S]`."""
    q, k, v = (part.astype(np.float64) for part in (q, k, v))
    k, v = (part.repeat(q.shape[1] // k.shape[1], axis=1) for part in (k, v))
    scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(q.shape[-1])
    weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    return np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), v)


def rotate(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return np.asarray(rope.rotate(jnp.asarray(x), rope.rotation_at(ROPE, HEAD_DIM, jnp.asarray(positions))))


def attended(
    num_new: int, num_history: int, capacity: int, num_kv: int, num_heads: int, window: int | None = None
) -> tuple:
    """One row by `attend`, NaN behind its history, and by the textbook."""
    q, k, v = (normal(i, num_new, n, HEAD_DIM) for i, n in enumerate((num_heads, num_kv, num_kv)))
    old_k, old_v = (np.full((capacity, num_kv, HEAD_DIM), np.nan, np.float32) for _ in range(2))
    old_k[:num_history], old_v[:num_history] = (normal(i, num_history, num_kv, HEAD_DIM) for i in (3, 4))
    positions = np.arange(num_history, num_history + num_new)
    out = attend(
        jnp.asarray(q)[None],
        LayerKV(jnp.asarray(k)[None], jnp.asarray(v)[None]),
        LayerKV(jnp.asarray(old_k)[None], jnp.asarray(old_v)[None]) if capacity else None,
        jnp.asarray([num_history], jnp.int32),
        rope.rotation_at(ROPE, HEAD_DIM, jnp.asarray(positions)[None]),
        rope.rotation_at(ROPE, HEAD_DIM, jnp.arange(capacity)) if capacity else None,
        window=window,
    )
    keys = rotate(np.concatenate([old_k[:num_history], k]), np.arange(num_history + num_new))
    places = np.arange(num_history + num_new)[None]
    seen = (places <= positions[:, None]) & (places > positions[:, None] - (window or len(places[0])))
    values = np.concatenate([old_v[:num_history], v])
    return np.asarray(out[0]), textbook(rotate(q, positions), keys, values, seen)


@pytest.mark.parametrize("unrolled", [True, False], ids=["head by head", "heads together"])
@pytest.mark.parametrize(
    ("num_new", "num_history", "capacity"),
    [(1, 0, 0), (5, 0, 8), (5, 3, 8), (5, 8, 8), (QUERY_BLOCK + 30, 40, 64)],
)
def test_attention_over_history_is_the_textbooks_on_both_paths(monkeypatch, unrolled, num_new, num_history, capacity):
    monkeypatch.setattr(attention, "UNROLLED_KV_HEADS", 2 if unrolled else 1)
    out, expected = attended(num_new, num_history, capacity, num_kv=2, num_heads=6)
    np.testing.assert_allclose(out, expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("window", [1, 3, 10, 70, QUERY_BLOCK])
@pytest.mark.parametrize(
    ("num_new", "num_history", "capacity"), [(5, 0, 0), (5, 3, 8), (5, 8, 16), (QUERY_BLOCK + 30, 40, 64), (3, 90, 96)]
)
def test_in_a_window_a_token_sees_those_right_before_it_and_itself(num_new, num_history, capacity, window):
    out, expected = attended(num_new, num_history, capacity, num_kv=2, num_heads=6, window=window)
    np.testing.assert_allclose(out, expected, atol=ATOL, rtol=0)


def test_more_kv_heads_than_are_unrolled_give_the_same():
    num_kv = attention.UNROLLED_KV_HEADS + 4
    out, expected = attended(9, 5, 8, num_kv=num_kv, num_heads=num_kv)
    np.testing.assert_allclose(out, expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("window", [None, 1, 5, SLOT_BLOCK - 1, SLOT_BLOCK + 3, 5 * SLOT_BLOCK])
@pytest.mark.parametrize("num_blocks", [None, 2], ids=["as many blocks as needed", "two blocks"])
def test_decode_attends_to_each_rows_own_keys_and_to_nothing_behind_them(num_blocks, window):
    lengths, num_kv, groups, num_slots = (1, 7, 0, SLOT_BLOCK, SLOT_BLOCK + 9), 2, 3, 6
    q = normal(0, len(lengths), num_kv, groups, HEAD_DIM)
    keys, values = (np.full((num_slots, num_kv, 2 * SLOT_BLOCK, HEAD_DIM), np.nan, np.float32) for _ in range(2))
    for row, length in enumerate(lengths):
        keys[row, :, :length], values[row, :, :length] = (normal(i, num_kv, length, HEAD_DIM) for i in (1, 2))
        if window is not None:  # What is before it is as little read as what is behind the length.
            keys[row, :, : max(length - window, 0)] = values[row, :, : max(length - window, 0)] = np.nan
    slots = jnp.asarray(keys), jnp.asarray(values)
    out = np.asarray(attend_slots(q, *slots, jnp.asarray(lengths), num_blocks, window=window))
    for row, length in enumerate(lengths):
        if not length:
            np.testing.assert_array_equal(out[row], 0.0)
            continue
        flat = q[row].reshape(1, num_kv * groups, HEAD_DIM)
        seen = slice(max(length - (window or length), 0), length)
        k, v = (part[row, :, seen].transpose(1, 0, 2) for part in (keys, values))
        expected = textbook(flat, k, v, np.ones((1, len(k)), bool))
        np.testing.assert_allclose(out[row].reshape(1, -1, HEAD_DIM), expected, atol=ATOL, rtol=0)
