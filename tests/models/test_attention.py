"""Attention over history that is one array against the textbook, and what tokens receive through a model's layers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.evaluate.by_layer import LayerByLayer
from ca_jax.device import steps
from ca_jax.models import rope
from ca_jax.models.attention import QUERY_BLOCK, attend
from ca_jax.models.config import RopeConfig
from ca_jax.models.kv import LayerKV
from ca_jax.models.paged_attention import Rows
from tests import engine_kit as kit
from tests.tolerances import ATTENTION_ATOL, PROJECTION_ATOL

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


# What tokens receive through the layers of a model.

MODEL = kit.model_of(rope=ROPE, seed=3)
CONFIG, PARAMS = MODEL.config, MODEL.params
BY_LAYER = LayerByLayer(MODEL, CONFIG.max_positions, CONFIG.max_positions)
TABLE = BY_LAYER.table
TOKENS = np.random.default_rng(5).integers(0, 256, 40).astype(np.int32)


def through_layers(num_new: int, with_attention: bool = True) -> tuple[list, np.ndarray]:
    """The first TOKENS: KV of each layer, and what each of all tokens received in all layers."""
    x = BY_LAYER.embedded(TOKENS, len(TOKENS))
    kv, received = [], 0
    for layer in range(CONFIG.num_layers):
        empty = BY_LAYER.empty(len(TOKENS))
        x, new, _, *given = BY_LAYER.layer(layer, x, empty, 0, num_new, with_attention=with_attention)
        received = received + sum(np.asarray(each)[0] for each in given)
        kv.append(new)
    return kv, received


@pytest.mark.parametrize("num_new", [1, 11, 40])
def test_a_layer_with_statistics_computes_what_it_does_without(num_new):
    (kv, received), (plain, _) = through_layers(num_new), through_layers(num_new, with_attention=False)
    for found, wanted in zip(kv, plain, strict=True):
        np.testing.assert_array_equal(found[:, :num_new], wanted[:, :num_new])
    np.testing.assert_allclose(received.sum(), CONFIG.num_layers * CONFIG.num_heads * num_new, rtol=1e-5)
    assert not received[num_new:].any()


def test_decoded_tokens_give_what_they_give_when_prefilled():
    kv, _ = through_layers(len(TOKENS))
    lengths, num_decoded, page = np.array([7, 25, 12]), 3, 8
    numbers = np.random.default_rng(0).permutation(15).astype(np.int32).reshape(3, 5)  # Whose are any pages.
    pages, received = [], 0
    for layer, empty in enumerate(steps.make_pages(CONFIG, numbers.size, page, "float32")):
        pages.append(jnp.full_like(empty, np.nan))
        for table, length in zip(numbers, lengths, strict=True):
            pages[-1], _ = steps.fill_pages(pages[-1], kv[layer], table, *map(jnp.int32, (0, 0, length)))
    for step in range(num_decoded):
        at = lengths + step
        args = (TOKENS[at], Rows(jnp.array(numbers), jnp.arange(4), jnp.array(at, jnp.int32)), TABLE)
        *plain, _ = steps.decode(CONFIG, PARAMS, jax.tree.map(jnp.copy, pages), *args)
        *out, given = steps.decode(CONFIG, PARAMS, pages, *args, with_attention=True)
        pages = out[-1]
        for found, wanted in zip(jax.tree.leaves(out), jax.tree.leaves(plain), strict=True):
            np.testing.assert_allclose(found, wanted, atol=PROJECTION_ATOL["float32"], rtol=0, equal_nan=True)
        assert given.shape == (len(lengths), 5 * page)
        np.testing.assert_allclose(given.sum(1), CONFIG.num_heads * CONFIG.num_layers, rtol=1e-5)
        received = received + np.asarray(given)

    pairs = CONFIG.num_layers * CONFIG.num_heads * num_decoded
    for row, length in enumerate(lengths):
        expected = through_layers(length + num_decoded)[1] - through_layers(length)[1]
        np.testing.assert_allclose(received[row], expected, atol=PROJECTION_ATOL["float32"] * pairs, rtol=0)
