"""The pure functional API: `model.apply`, its KV pytree, append, take and drop_oldest, against recomputing it all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ca_jax.models import kv
from ca_jax.models.kv import KVCache, LayerKV
from ca_jax.models.transformer import Transformer
from ca_jax.testing import tiny
from tests import families_kit
from tests.tolerances import LOGITS_ATOL

ATOL = LOGITS_ATOL["float32"]
CONFIG = tiny.tiny_config(vocab_size=96, embed_dim=32, mlp_dim=48, num_layers=2, num_kv_heads=2, head_dim=8)
MODEL, PARAMS = Transformer(CONFIG), tiny.tiny_params(CONFIG, seed=5)


@functools.partial(jax.jit, static_argnames=("model",))
def run(tokens, positions, history=None, model=MODEL, params=PARAMS):
    return model.apply(params, tokens, positions, history)


def tokens_of(*shape):
    return np.random.default_rng(7).integers(0, CONFIG.vocab_size, shape, dtype=np.int32)


def whole(tokens):
    return run(tokens, np.arange(tokens.shape[1])[None])


# The pytree, against lists of tokens.


def cache_of(rows, capacity):
    """A cache whose keys are the rows' numbers and whose values are their negatives; NaN behind each length."""
    keys = np.full((len(rows), capacity, CONFIG.num_kv_heads, CONFIG.head_dim), np.nan, np.float32)
    for b, row in enumerate(rows):
        keys[b, : len(row)] = np.array(row).reshape(-1, 1, 1)
    layers = tuple(LayerKV(jnp.asarray(keys * i), jnp.asarray(-keys * i)) for i in (1, 2))
    return KVCache(layers, jnp.asarray([len(row) for row in rows], jnp.int32))


def rows_of(cache):
    """The numbers a cache holds, once all layers, keys, values, heads and dims agree on them."""
    rows = [np.asarray(cache.layers[0].k)[b, :n, 0, 0].tolist() for b, n in enumerate(cache.lengths)]
    expected = cache_of(rows, cache.capacity)
    seen = np.arange(cache.capacity)[None, :] < np.asarray(cache.lengths)[:, None]
    for found, wanted in zip(jax.tree.leaves(cache.layers), jax.tree.leaves(expected.layers), strict=True):
        np.testing.assert_array_equal(np.asarray(found, np.float32)[seen], np.asarray(wanted)[seen])
    return rows


@st.composite
def batches(draw):
    """Rows of different lengths, and a capacity that holds them."""
    lengths = draw(st.lists(st.integers(0, 3), min_size=3, max_size=3))
    rows = [[float(100 * b + i + 1) for i in range(n)] for b, n in enumerate(lengths)]
    return rows, draw(st.integers(max(1, *lengths), 4))


@settings(max_examples=25, deadline=None)
@given(batches(), st.integers(1, 2), st.data())
def test_append_take_and_drop_oldest_do_to_each_row_what_lists_do(batch, num_new, data):
    rows, capacity = batch
    cache = cache_of(rows, capacity)
    new = [[float(-1 - 10 * b - i) for i in range(num_new)] for b in range(3)]
    joined = kv.append(cache, cache_of(new, num_new))
    assert joined.capacity == capacity + num_new
    assert rows_of(joined) == [old + added for old, added in zip(rows, new, strict=True)]
    num_tokens = data.draw(st.integers(0, capacity))
    taken, rest = kv.take(cache, num_tokens), kv.drop_oldest(cache, num_tokens)
    assert rows_of(taken) == [row[:num_tokens] for row in rows]
    assert rows_of(rest) == [row[num_tokens:] for row in rows]
    assert (taken.capacity, rest.capacity) == (num_tokens, capacity - num_tokens)


@pytest.mark.parametrize("num_tokens", [-1, 4])
@pytest.mark.parametrize(("operation", "name"), [(kv.take, "keep"), (kv.drop_oldest, "drop")])
def test_more_than_there_is_room_for_is_refused(operation, name, num_tokens):
    with pytest.raises(ValueError, match=rf"tokens to {name} must be 0\.\.3, got {num_tokens}"):
        operation(cache_of([[1.0]], 3), num_tokens)


# Reuse equals recompute.


@pytest.mark.parametrize(
    "name", ["llama3_rope", "mistral", "deepseek_v3"]
)  # Others are served so in `test_engine_families`.
def test_turns_that_append_their_kv_have_the_logits_of_transformers_over_everything(name):
    sizes, pair = (40, 1, 40), families_kit.pair(name)
    ids = np.array(families_kit.prompt(sum(sizes)))
    history, logits = kv.empty(pair.model.config, 1, 0), []
    for piece in np.split(ids[None], np.cumsum(sizes)[:-1], axis=1):
        positions = history.lengths[:, None] + np.arange(piece.shape[1])
        found, new = run(piece, positions, history, pair.model.model, pair.model.params)
        history = kv.append(history, new)
        logits.append(found[0])
    np.testing.assert_allclose(np.concatenate(logits), pair.their_logits(ids.tolist()), atol=ATOL, rtol=0)


def test_what_remains_after_dropping_is_used_at_its_new_positions_as_it_stands():
    """Keys hold no position: with one layer, whose KV has seen no other token, dropped tokens were never there."""
    config = tiny.tiny_config(vocab_size=96, embed_dim=32, mlp_dim=48, num_layers=1)
    one = {"model": Transformer(config), "params": tiny.tiny_params(config, seed=5)}
    tokens = tokens_of(1, 58)
    _, all_kv = run(tokens[:, :49], np.arange(49)[None], **one)
    logits, _ = run(tokens[:, 49:], np.arange(40, 49)[None], kv.drop_oldest(all_kv, 9), **one)
    anew, _ = run(tokens[:, 9:], np.arange(49)[None], **one)
    np.testing.assert_allclose(logits[0], anew[0, 40:], atol=ATOL, rtol=0)
    unmoved, _ = run(tokens[:, 49:], np.arange(49, 58)[None], kv.drop_oldest(all_kv, 9), **one)
    assert np.abs(np.asarray(unmoved) - np.asarray(logits)).max() > 0.01, "positions do not matter to this model"


def test_rows_with_histories_of_different_length_do_not_meet_nor_see_what_is_behind_them():
    lengths, num_new = (0, 17, 40), 9
    tokens = tokens_of(len(lengths), 57)
    history = cache_of([[]] * len(lengths), 48)  # NaN everywhere.
    layers = [LayerKV(np.array(layer.k), np.array(layer.v)) for layer in history.layers]
    for row, length in enumerate(lengths):
        for layer, part in zip(layers, whole(tokens[row : row + 1, : length or 1])[1].layers, strict=True):
            layer.k[row, :length], layer.v[row, :length] = part.k[0, :length], part.v[0, :length]
    new = np.stack([row[length : length + num_new] for row, length in zip(tokens, lengths, strict=True)])
    positions = np.array(lengths)[:, None] + np.arange(num_new)
    logits, new_kv = run(new, positions, KVCache(tuple(layers), np.array(lengths, np.int32)))
    assert np.asarray(new_kv.lengths).tolist() == [num_new] * len(lengths)
    for row, length in enumerate(lengths):
        alone, alone_kv = whole(tokens[row : row + 1, : length + num_new])
        np.testing.assert_allclose(logits[row], alone[0, length:], atol=ATOL, rtol=0)
        for layer, expected in zip(new_kv.layers, alone_kv.layers, strict=True):
            np.testing.assert_allclose(layer.k[row], expected.k[0, length:], atol=ATOL, rtol=0)
            np.testing.assert_allclose(layer.v[row], expected.v[0, length:], atol=ATOL, rtol=0)


# How it is put together.


def test_bfloat16_weights_give_the_logits_of_the_same_weights_in_float32():
    rounded = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), PARAMS)
    tokens, positions = tokens_of(1, 40), np.arange(40)[None]
    logits, new = run(tokens, positions, params=rounded)
    assert (logits.dtype, new.layers[0].k.dtype) == (jnp.float32, jnp.bfloat16)
    exact, _ = run(tokens, positions, params=jax.tree.map(lambda leaf: leaf.astype(jnp.float32), rounded))
    np.testing.assert_allclose(logits, exact, atol=LOGITS_ATOL["bfloat16"], rtol=0)


def test_every_matrix_product_of_float32_says_it_must_have_full_precision():
    """A GPU multiplies f32 in TF32, ten bits of mantissa, unless told not to: no tolerance here would hold then."""

    def equations(jaxpr):
        for equation in jaxpr.eqns:
            yield equation
            for value in equation.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)

    apply = jax.make_jaxpr(lambda *args: MODEL.apply(*args))
    jaxpr = apply(PARAMS, tokens_of(1, 9), np.arange(9)[None], kv.empty(CONFIG, 1, 20))
    products = [each for each in equations(jaxpr.jaxpr) if each.primitive.name == "dot_general"]
    assert len(products) >= 7 * CONFIG.num_layers + 1
    highest = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    assert [str(each.source_info) for each in products if each.params["precision"] != highest] == []
