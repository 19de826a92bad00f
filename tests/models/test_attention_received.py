"""Attention that tokens received, in prefill and in decode, against a dense softmax in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from ca_jax.device import steps
from ca_jax.models import attention, rope
from ca_jax.models.attention import BATCHED_QUERY_BLOCK, QUERY_BLOCK, SLOT_BLOCK
from ca_jax.models.attention_received import attention_received, slot_attention_received
from ca_jax.models.config import RopeConfig
from ca_jax.models.kv import LayerKV
from ca_jax.testing.tiny import tiny_config, tiny_params
from tests.tolerances import ATTENTION_ATOL, PROJECTION_ATOL

ATOL = ATTENTION_ATOL["float32"]  # Of what one query gives a key with one head.
ROPE = RopeConfig(theta=500.0)
HEAD_DIM = 8


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rotated(x: np.ndarray, positions: np.ndarray, theta: float = ROPE.theta) -> np.ndarray:
    """`x [T, heads, H]` at its positions, in float64."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:].astype(np.float64)) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], -1)


def dense(q: np.ndarray, k: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """What each key receives: rotated `q [T, N, H]` and `k [E, K, H]`, `seen [T, E]`, to `[E]`."""
    k = k.astype(np.float64).repeat(q.shape[1] // k.shape[1], axis=1)
    scores = np.einsum("tnh,enh->nte", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(np.where(seen, scores, -np.inf))
    return (weights / weights.sum(-1, keepdims=True)).sum((0, 1))


def causal(num_new: int, num_history: int) -> np.ndarray:
    return np.arange(num_history + num_new)[None] <= np.arange(num_history, num_history + num_new)[:, None]


def padded(x: np.ndarray, size: int) -> np.ndarray:
    """`x` with NaN behind it."""
    return np.concatenate([x, np.full((size - len(x), *x.shape[1:]), np.nan, np.float32)])


def received_and_expected(
    num_new: int,
    new_size: int,
    num_history: int,
    capacity: int,
    num_kv: int,
    num_heads: int,
    implementation: str,
    window: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """One sequence with NaN behind its history and behind its new tokens, and what the textbook gives it."""
    q, k = normal(0, num_new, num_heads, HEAD_DIM), normal(1, num_new, num_kv, HEAD_DIM)
    old = normal(2, num_history, num_kv, HEAD_DIM)
    new_keys, old_keys = jnp.asarray(padded(k, new_size))[None], jnp.asarray(padded(old, capacity))[None]
    received = attention_received(
        jnp.asarray(padded(q, new_size))[None],
        LayerKV(new_keys, jnp.full_like(new_keys, np.nan)),
        LayerKV(old_keys, jnp.full_like(old_keys, np.nan)) if capacity else None,
        jnp.asarray([num_history], jnp.int32),
        rope.rotation_at(ROPE, HEAD_DIM, num_history + jnp.arange(new_size)[None]),
        rope.rotation_at(ROPE, HEAD_DIM, jnp.arange(capacity)) if capacity else None,
        jnp.int32(num_new),
        implementation,
        window,
    )
    positions = np.arange(num_history + num_new)
    keys = rotated(np.concatenate([old, k]), positions)
    seen = causal(num_new, num_history)
    if window is not None:
        seen &= positions[None] > positions[num_history:, None] - window
    given = dense(rotated(q, positions[num_history:]), keys, seen)
    expected = np.zeros(capacity + new_size)
    expected[:num_history], expected[capacity : capacity + num_new] = given[:num_history], given[num_history:]
    return np.asarray(received), expected


@pytest.mark.parametrize("implementation", ["blocks", "batched", "flash"])
@pytest.mark.parametrize(
    ("num_new", "new_size", "num_history", "capacity"),
    [
        (1, 1, 0, 0),
        (5, 8, 0, 0),
        (5, 8, 0, 4),
        (3, 8, 5, 9),
        (8, 8, 9, 9),
        (QUERY_BLOCK + 30, QUERY_BLOCK + 40, 40, 64),
    ],
)
def test_prefill_counts_what_tokens_that_count_give_to_those_that_they_see(
    implementation, num_new, new_size, num_history, capacity
):
    received, expected = received_and_expected(num_new, new_size, num_history, capacity, 2, 6, implementation)
    assert received.dtype == np.float32
    np.testing.assert_allclose(received, expected, atol=ATOL * 6 * num_new, rtol=0)
    np.testing.assert_array_equal(received[expected == 0], 0.0)
    np.testing.assert_allclose(received.sum(), 6 * num_new, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 4, 60, QUERY_BLOCK])
@pytest.mark.parametrize(
    ("num_new", "new_size", "num_history", "capacity"), [(5, 8, 0, 0), (3, 8, 5, 9), (QUERY_BLOCK + 30, 160, 40, 64)]
)
def test_in_a_window_prefill_counts_what_tokens_see_there(num_new, new_size, num_history, capacity, window):
    received, expected = received_and_expected(num_new, new_size, num_history, capacity, 2, 6, "blocks", window)
    np.testing.assert_allclose(received, expected, atol=ATOL * 6 * num_new, rtol=0)
    np.testing.assert_array_equal(received[expected == 0], 0.0)


def test_more_new_tokens_than_a_block_of_batched_heads_count_the_same():
    num_new = BATCHED_QUERY_BLOCK + 3
    received, expected = received_and_expected(num_new, num_new + 1, 4, 8, 1, 2, "batched")
    np.testing.assert_allclose(received, expected, atol=ATOL * 2 * num_new, rtol=0)


def test_more_kv_heads_than_are_unrolled_count_the_same():
    num_kv = attention.UNROLLED_KV_HEADS + 4
    received, expected = received_and_expected(9, 12, 5, 8, num_kv, num_kv, "blocks")
    np.testing.assert_allclose(received, expected, atol=ATOL * num_kv * 9, rtol=0)


def test_no_token_that_counts_gives_nothing():
    received, _ = received_and_expected(0, 4, 3, 8, 2, 4, "blocks")
    np.testing.assert_array_equal(received, 0.0)


def test_a_batch_is_refused():
    q = jnp.zeros((2, 3, 4, HEAD_DIM))
    new = LayerKV(q, q)
    rotation = rope.rotation_at(ROPE, HEAD_DIM, jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match="one sequence, got a batch of 2"):
        attention_received(q, new, None, jnp.zeros(2, jnp.int32), rotation, None, 3)


@pytest.mark.parametrize("window", [None, 1, SLOT_BLOCK + 3])
@pytest.mark.parametrize("num_blocks", [None, 2, 3], ids=["as many blocks as needed", "two blocks", "all blocks"])
def test_decode_counts_for_each_row_its_own_keys_and_nothing_behind_them(num_blocks, window):
    lengths, num_kv, groups, num_slots = (1, 7, 0, SLOT_BLOCK, SLOT_BLOCK + 9), 2, 3, 6
    q = normal(0, len(lengths), num_kv, groups, HEAD_DIM)
    keys = np.full((num_slots, num_kv, 3 * SLOT_BLOCK, HEAD_DIM), np.nan, np.float32)
    for row, length in enumerate(lengths):
        keys[row, :, :length] = normal(row + 1, num_kv, length, HEAD_DIM)
    keys[4, :, SLOT_BLOCK:] *= 3  # So that the largest score is not in the first block.
    received = slot_attention_received(jnp.asarray(q), jnp.asarray(keys), jnp.asarray(lengths), num_blocks, window)
    received = np.asarray(received)
    assert received.shape == (len(lengths), 3 * SLOT_BLOCK)
    assert received.dtype == np.float32
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(received[row, length:], 0.0)
        if length:
            flat = q[row].reshape(1, num_kv * groups, HEAD_DIM)
            seen = np.arange(length)[None] >= length - (window or length)
            expected = dense(flat, keys[row, :, :length].transpose(1, 0, 2), seen)
            np.testing.assert_allclose(received[row, :length], expected, atol=ATOL * num_kv * groups, rtol=0)


# Through the layers of a model.

CONFIG = tiny_config(rope=ROPE)
PARAMS = tiny_params(CONFIG, seed=3)
LAYERS = [PARAMS["params"][f"layer_{i}"] for i in range(CONFIG.num_layers)]
TABLE = steps.rotation_table(CONFIG, CONFIG.max_positions)
TOKENS = np.random.default_rng(5).integers(0, 256, 40).astype(np.int32)


def prefilled(x, histories, num_history: int, num_new: int) -> tuple[list, np.ndarray]:
    """All layers with statistics: new KV of each, and what each token received of all layers, `[history + new]`."""
    new, received = [], 0
    for params, history in zip(LAYERS, histories, strict=True):
        x, kv, given = steps.prefill_layer_attention(
            CONFIG, params, x, history, jnp.int32(num_history), jnp.int32(num_new), TABLE
        )
        size = 0 if history is None else history.shape[1]
        received = received + np.concatenate([given[:num_history], given[size : size + num_new]])
        new.append(kv)
    return new, received


@pytest.fixture(scope="module")
def whole() -> tuple[list, np.ndarray]:
    """TOKENS in one pass, padded."""
    x = steps.embed(CONFIG, PARAMS, jnp.asarray(np.pad(TOKENS, (0, 8)))[None])
    return prefilled(x, [None] * CONFIG.num_layers, 0, len(TOKENS))


@pytest.mark.parametrize(("num_history", "capacity"), [(0, 0), (0, 16), (11, 16)])
def test_a_layer_with_statistics_computes_what_it_does_without(num_history, capacity):
    size, num_new, num_heads = 8, 6, CONFIG.num_heads
    shape = (CONFIG.num_kv_heads, CONFIG.head_dim)
    x = normal(1, 1, size, CONFIG.embed_dim)
    old = normal(2, num_history, 2, *shape)
    history = jnp.asarray(padded(old, capacity).transpose(1, 0, 2, 3)) if capacity else None
    args = (CONFIG, LAYERS[0], jnp.asarray(x), history, jnp.int32(num_history))
    wanted_x, wanted_kv = steps.prefill_layer(*args, TABLE)
    out, kv, received = steps.prefill_layer_attention(*args, jnp.int32(num_new), TABLE)
    np.testing.assert_allclose(out, wanted_x, atol=PROJECTION_ATOL["float32"], rtol=0)
    np.testing.assert_array_equal(kv, wanted_kv)

    full = x[0].astype(np.float64)
    full = full / np.sqrt((full**2).mean(-1, keepdims=True) + CONFIG.norm_eps) * LAYERS[0]["attn_norm"]["scale"]
    q, k = (np.einsum("tf,fnh->tnh", full, LAYERS[0]["attn"][name])[:num_new] for name in ("wq", "wk"))
    positions = np.arange(num_history + num_new)
    keys = rotated(np.concatenate([old[:, 0], k]), positions)
    given = dense(rotated(q, positions[num_history:]), keys, causal(num_new, num_history))
    expected = np.zeros(capacity + size)
    expected[:num_history], expected[capacity : capacity + num_new] = given[:num_history], given[num_history:]
    np.testing.assert_allclose(received, expected, atol=PROJECTION_ATOL["float32"] * num_heads * num_new, rtol=0)
    np.testing.assert_array_equal(np.asarray(received)[expected == 0], 0.0)


def test_passes_over_history_give_together_what_one_pass_gives(whole):
    kv, expected = whole
    num_history, num_new = 23, len(TOKENS) - 23
    histories = [
        jnp.asarray(padded(np.asarray(part[:, :num_history]).transpose(1, 0, 2, 3), 32).transpose(1, 0, 2, 3))
        for part in kv
    ]
    x = steps.embed(CONFIG, PARAMS, jnp.asarray(np.pad(TOKENS[:num_history], (0, 1)))[None])
    _, first = prefilled(x, [None] * CONFIG.num_layers, 0, num_history)
    x = steps.embed(CONFIG, PARAMS, jnp.asarray(np.pad(TOKENS[num_history:], (0, 3)))[None])
    _, second = prefilled(x, histories, num_history, num_new)
    pairs = CONFIG.num_layers * CONFIG.num_heads * len(TOKENS)
    found = np.pad(first, (0, num_new)) + second
    np.testing.assert_allclose(found, expected, atol=PROJECTION_ATOL["float32"] * pairs, rtol=0)


def filled_slots(kv: list, lengths: tuple[int, ...]) -> steps.Slots:
    """Slots that hold the first so many TOKENS, NaN behind them."""
    slots = steps.make_slots(CONFIG, len(lengths) + 1, SLOT_BLOCK, "float32")
    slots = steps.Slots(*([jnp.full_like(part, np.nan) for part in parts] for parts in slots))
    for layer in range(CONFIG.num_layers):
        for row, length in enumerate(lengths):
            slots.keys[layer], slots.values[layer], _ = steps.insert_slot(
                slots.keys[layer], slots.values[layer], kv[layer][:, :length], row, 0, TABLE
            )
    return slots


def test_decoded_tokens_give_what_they_give_when_prefilled(whole):
    kv, _ = whole
    lengths, num_decoded = (7, 25, 12), 3
    slots, received = filled_slots(kv, lengths), 0
    for step in range(num_decoded):
        at = np.array(lengths) + step
        out = steps.decode(CONFIG, PARAMS, slots, TOKENS[at], at.astype(np.int32), TABLE, with_attention=True)
        slots, given = out[2:]
        assert given.shape == (len(lengths), SLOT_BLOCK)
        np.testing.assert_allclose(given.sum(1), CONFIG.num_heads * CONFIG.num_layers, rtol=1e-5)
        received = received + np.asarray(given)

    def prefix(length: int) -> np.ndarray:
        x = steps.embed(CONFIG, PARAMS, jnp.asarray(TOKENS)[None])
        return np.pad(prefilled(x, [None] * CONFIG.num_layers, 0, length)[1], (0, SLOT_BLOCK - length))

    pairs = CONFIG.num_layers * CONFIG.num_heads * num_decoded
    for row, length in enumerate(lengths):
        expected = prefix(length + num_decoded) - prefix(length)
        np.testing.assert_allclose(received[row], expected, atol=PROJECTION_ATOL["float32"] * pairs, rtol=0)


def test_decode_returns_three_things_where_statistics_are_not_asked_for_and_the_same_ones(whole):
    kv, _ = whole
    lengths = np.array([9, 21], np.int32)
    plain = steps.decode(CONFIG, PARAMS, filled_slots(kv, (9, 21)), TOKENS[lengths], lengths, TABLE)
    counted = steps.decode(
        CONFIG, PARAMS, filled_slots(kv, (9, 21)), TOKENS[lengths], lengths, TABLE, num_blocks=1, with_attention=True
    )
    assert len(plain) == 3
    logits, new_kv, slots = plain
    np.testing.assert_allclose(counted[0], logits, atol=PROJECTION_ATOL["float32"], rtol=0)
    np.testing.assert_allclose(counted[1], new_kv, atol=PROJECTION_ATOL["float32"], rtol=0)
    for found, wanted in zip([*counted[2].keys, *counted[2].values], [*slots.keys, *slots.values], strict=True):
        np.testing.assert_allclose(found, wanted, atol=PROJECTION_ATOL["float32"], rtol=0)
