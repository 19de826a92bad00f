"""Attention that tokens received, through the layers of a model: in prefill, in passes and in decode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ca_jax.device import steps
from ca_jax.models.attention import SLOT_BLOCK
from ca_jax.testing.tiny import tiny_config, tiny_params
from tests.models.test_attention import ROPE, normal, padded
from tests.tolerances import PROJECTION_ATOL

CONFIG = tiny_config(rope=ROPE)
PARAMS = tiny_params(CONFIG, seed=3)
LAYERS = [PARAMS["params"][f"layer_{i}"] for i in range(CONFIG.num_layers)]
TABLE = steps.rotation_table(CONFIG, CONFIG.max_positions)
TOKENS = np.random.default_rng(5).integers(0, 256, 40).astype(np.int32)


def prefilled(x, histories, num_history: int, num_new: int) -> tuple[list, np.ndarray]:
    """All layers with statistics: new KV of each, and what each token received of all layers, `[history + new]`."""
    new, received = [], 0
    for params, history in zip(LAYERS, histories, strict=True):
        x, kv, given = steps.prefill_layer(
            CONFIG, params, x, history, jnp.int32(num_history), TABLE, num_new=jnp.int32(num_new)
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
    out, kv, received = steps.prefill_layer(*args, TABLE, num_new=jnp.int32(num_new))
    np.testing.assert_allclose(out, wanted_x, atol=PROJECTION_ATOL["float32"], rtol=0)
    np.testing.assert_array_equal(kv, wanted_kv)

    np.testing.assert_allclose(received.sum(), num_heads * num_new, rtol=1e-5)
    np.testing.assert_array_equal(received[num_history:capacity], 0.0)
    np.testing.assert_array_equal(received[capacity + num_new :], 0.0)


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
        args = (TOKENS[at], at.astype(np.int32), TABLE)
        plain = steps.decode(CONFIG, PARAMS, jax.tree.map(jnp.copy, slots), *args)
        *out, given = steps.decode(CONFIG, PARAMS, slots, *args, with_attention=True)
        slots = out[2]
        for found, wanted in zip(jax.tree.leaves(out), jax.tree.leaves(plain), strict=True):
            np.testing.assert_allclose(found, wanted, atol=PROJECTION_ATOL["float32"], rtol=0, equal_nan=True)
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
