"""Attention over history that is one array and of chosen tokens, and what each key receives, against the textbook."""

from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ca_jax.device import steps
from ca_jax.models import attention, cpu_kernels, rope
from ca_jax.models.attention import (
    BATCHED_QUERY_BLOCK,
    KEY_BLOCK,
    QUERY_BLOCK,
    UNROLLED_KV_HEADS,
    ChosenAttention,
    attend,
    attend_chosen,
)
from ca_jax.models.attention_received import attention_received
from ca_jax.models.config import RopeConfig
from ca_jax.models.kv import LayerKV
from ca_jax.models.paged_attention import Rows
from ca_jax.testing.tiny import tiny_config, tiny_params
from tests.tolerances import ATTENTION_ATOL, PROJECTION_ATOL

ATOL = ATTENTION_ATOL["float32"]
ROPE = RopeConfig(theta=500.0)
HEAD_DIM = 8
MANY_HEADS = UNROLLED_KV_HEADS + 4


@pytest.fixture(params=["cpu kernels", "xla"])
def computed_by(request, monkeypatch):
    """By what the backend's own choice is computed here."""
    if request.param == "xla":
        monkeypatch.setattr(cpu_kernels, "serves_attention", lambda dtype, head_dim: False)
    elif cpu_kernels.library() is None:
        pytest.skip("the package was built without its CPU kernels")


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


def prefilled(num_new, num_history, capacity, num_kv=2, num_heads=6, window=None, new_size=None, implementation=None):
    """What one sequence attends to and what its keys receive, NaN behind its history and behind its new tokens.

    Returns:
      Outputs of the new tokens and what is expected of them; what keys received and what is expected of that.
    """
    size = new_size or num_new
    q, k, v = (normal(i, num_new, n, HEAD_DIM) for i, n in enumerate((num_heads, num_kv, num_kv)))
    old_k, old_v = (normal(i, num_history, num_kv, HEAD_DIM) for i in (3, 4))
    new = LayerKV(*(jnp.asarray(padded(part, size))[None] for part in (k, v)))
    history = jnp.stack([padded(part, capacity)[None] for part in (old_k, old_v)]) if capacity else None
    args = (
        *(jnp.asarray(padded(q, size))[None], new, history, jnp.asarray([num_history], jnp.int32)),
        *(rotation_at(num_history + np.arange(size)[None]), rotation_at(np.arange(capacity)) if capacity else None),
    )
    positions = np.arange(num_history + num_new)
    seen = positions[None] <= positions[num_history:, None]
    seen &= positions[None] > positions[num_history:, None] - (window or len(positions))
    rotated = rotate(q, positions[num_history:]), rotate(np.concatenate([old_k, k]), positions)
    out = None
    if size == num_new and implementation is None:
        attended = jax.jit(partial(attend, window=window))(*args)
        out = np.asarray(attended[0]), textbook(*rotated, np.concatenate([old_v, v]), seen)
    receive = jax.jit(partial(attention_received, implementation=implementation, window=window))
    received = np.asarray(receive(*args, jnp.int32(num_new)))
    given = weights_of(*rotated, seen).sum((0, 1))
    expected = np.zeros(capacity + size)
    expected[:num_history], expected[capacity : capacity + num_new] = given[:num_history], given[num_history:]
    return out, (received, expected)


def test_heads_of_bfloat16_are_rotated_in_f32_and_stay_bfloat16():
    x, rotation = jnp.asarray(normal(0, 5, 2, HEAD_DIM)).astype(jnp.bfloat16), rotation_at(np.arange(100, 105))
    expected = rope.rotate(x.astype(jnp.float32), rotation).astype(jnp.bfloat16)
    assert rope.rotate(x, rotation).dtype == jnp.bfloat16
    np.testing.assert_array_equal(rope.rotate(x, rotation), expected)


LONG = (QUERY_BLOCK + 30, 40, 64)  # New tokens, of history, places for it.


def expect_both(num_new, num_history, capacity, **options):
    """Checks what new tokens attend to, and what keys receive."""
    out, (received, expected) = prefilled(num_new, num_history, capacity, **options)
    if out is not None:
        np.testing.assert_allclose(*out, atol=ATOL, rtol=0)
    num_heads = options.get("num_heads", 6)
    assert received.dtype == np.float32
    np.testing.assert_allclose(received, expected, atol=ATOL * num_heads * max(num_new, 1), rtol=0)
    np.testing.assert_array_equal(received[expected == 0], 0.0)
    np.testing.assert_allclose(received.sum(), num_heads * num_new, rtol=1e-5)


@pytest.mark.parametrize("sizes", [(5, 3, 8), LONG])
def test_heads_together_give_what_they_give_one_by_one(monkeypatch, sizes):
    monkeypatch.setattr(attention, "UNROLLED_KV_HEADS", 1)
    expect_both(*sizes)


@pytest.mark.usefixtures("computed_by")
@pytest.mark.parametrize(
    ("sizes", "window"),
    [
        *((sizes, None) for sizes in ((1, 0, 0), (5, 0, 8), (5, 3, 8), (5, 8, 8), LONG)),
        *(((5, 0, 8), 3), ((5, 3, 8), 1), ((5, 8, 16), 10), ((3, 90, 96), 3), ((3, 90, 96), 70)),
        *((LONG, 10), (LONG, QUERY_BLOCK)),
    ],
)
def test_attention_over_history_is_the_textbooks_of_all_tokens_or_of_a_window(sizes, window):
    expect_both(*sizes, window=window)


@pytest.mark.parametrize(
    ("implementation", "sizes"),
    [
        *(("blocks", (0, 3, 8)), ("blocks", (5, 3, 8)), ("blocks", LONG)),
        *(("batched", (5, 0, 8)), ("batched", (BATCHED_QUERY_BLOCK + 3, 4, 8)), ("flash", (5, 3, 8))),
    ],
)
def test_keys_receive_what_tokens_that_count_give_them(implementation, sizes):
    expect_both(*sizes, new_size=sizes[0] + 3, implementation=implementation)


def test_what_a_batch_receives_is_refused():
    q = jnp.zeros((2, 3, 4, HEAD_DIM))
    rotation = rope.rotation_at(ROPE, HEAD_DIM, jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match="must get one sequence, got a batch of 2"):
        attention_received(q, LayerKV(q, q), None, jnp.zeros(2, jnp.int32), rotation, None, 3)


# Some tokens of a sequence over all of it.


@pytest.fixture(params=get_args(ChosenAttention))
def chosen(request):
    """Attends with one implementation; what is found, and the textbook's at those that are no padding."""
    run = jax.jit(partial(attend_chosen, implementation=request.param), static_argnums=4)

    def chosen(positions, num_places=30, num_kv=2, num_heads=6, window=None, dtype="float32"):
        positions = np.array(positions)
        q, keys, values = normal(0, len(positions), num_heads, HEAD_DIM), *normal(1, 2, num_places, num_kv, HEAD_DIM)
        real = positions < num_places
        behind = max([0, *positions[real]]) + 1
        keys[behind:], values[behind:] = np.nan, np.nan  # Never read.
        given = [jnp.asarray(part, dtype) for part in (q, keys, values)]
        out = run(*given, jnp.asarray(positions, jnp.int32), window)
        assert out.dtype == dtype
        assert np.isfinite(np.asarray(out, np.float32)).all(), "padding gives some number"
        q, keys, values = (np.asarray(part, np.float32) for part in given)
        place, own = np.arange(behind)[None], positions[real][:, None]
        seen = (place <= own) & (place > own - (window or num_places))
        expected = textbook(q[real], keys[:behind], values[:behind], seen)
        np.testing.assert_allclose(np.asarray(out, np.float32)[real], expected, atol=ATTENTION_ATOL[dtype], rtol=0)

    return chosen


POSITIONS = ([0], [29], [3, 4, 11, 28], range(30), [30, 31], [2, 7, 30, 1 << 30], [5, *range(2000, 2200)])
SOME = [0, 3, 4, 11, 28]


@pytest.mark.parametrize(
    ("positions", "options"),
    [
        *((positions, {}) for positions in POSITIONS),
        (SOME, {"num_kv": 3, "num_heads": 3}),
        (SOME, {"num_kv": MANY_HEADS, "num_heads": 2 * MANY_HEADS}),
        *((SOME, {"window": window}) for window in (1, 4, 29)),
        (SOME, {"dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_each_chosen_token_sees_the_places_up_to_its_own(chosen, positions, options):
    chosen(positions, **options)


@pytest.mark.parametrize(("num_places", "window"), [(KEY_BLOCK + 1, None), (2 * KEY_BLOCK + 100, 100)])
def test_blocks_of_chosen_tokens_over_blocks_of_places(chosen, num_places, window):
    positions = np.sort(np.random.default_rng(num_places).choice(num_places - 7, QUERY_BLOCK + 30, replace=False))
    chosen(positions, num_places, 1, 2, window)


# What tokens receive through the layers of a model.

CONFIG = tiny_config(rope=ROPE)
PARAMS = tiny_params(CONFIG, seed=3)
LAYERS = [PARAMS["params"][f"layer_{i}"] for i in range(CONFIG.num_layers)]
TABLE = steps.rotation_table(CONFIG, CONFIG.max_positions)
TOKENS = np.random.default_rng(5).integers(0, 256, 40).astype(np.int32)


def through_layers(num_new: int) -> tuple[list, np.ndarray]:
    """The first TOKENS with statistics: KV of each layer, and what each token received of all layers."""
    x = steps.embed(CONFIG, PARAMS, jnp.asarray(TOKENS)[None])
    kv, received = [], 0
    for params in LAYERS:
        x, new, given = steps.prefill_layer(CONFIG, params, x, None, jnp.int32(0), TABLE, num_new=jnp.int32(num_new))
        received = received + np.asarray(given)
        kv.append(new)
    return kv, received


@pytest.mark.parametrize(("num_history", "capacity"), [(0, 0), (0, 16), (11, 16)])
def test_a_layer_with_statistics_computes_what_it_does_without(num_history, capacity):
    size, num_new, num_heads = 8, 6, CONFIG.num_heads
    shape = (CONFIG.num_kv_heads, CONFIG.head_dim)
    x = normal(1, 1, size, CONFIG.embed_dim)
    old = normal(2, num_history, 2, *shape)
    history = jnp.asarray(padded(old, capacity).transpose(1, 0, 2, 3)) if capacity else None
    args = (CONFIG, LAYERS[0], jnp.asarray(x), history, jnp.int32(num_history))
    wanted_x, wanted_kv = steps.prefill_layer(*args, TABLE)
    out, kv, received = steps.prefill_layer(*args, TABLE, num_new=jnp.int32(num_new))
    np.testing.assert_allclose(out, wanted_x, atol=PROJECTION_ATOL["float32"], rtol=0)
    np.testing.assert_array_equal(kv, wanted_kv)

    np.testing.assert_allclose(received.sum(), num_heads * num_new, rtol=1e-5)
    np.testing.assert_array_equal(received[num_history:capacity], 0.0)
    np.testing.assert_array_equal(received[capacity + num_new :], 0.0)


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
