"""Unrotated KV caches: append, take and drop_oldest, against lists of tokens."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ca_jax.models import kv
from ca_jax.models.kv import KVCache, LayerKV
from ca_jax.testing import tiny

CONFIG = tiny.tiny_config(num_layers=2, num_kv_heads=2, head_dim=4)


def cache_of(rows: list[list[float]], capacity: int) -> KVCache:
    """A cache whose keys are the rows' numbers and whose values are their negatives; NaN behind each length."""
    layers = []
    for layer in range(CONFIG.num_layers):
        keys = np.full((len(rows), capacity, CONFIG.num_kv_heads, CONFIG.head_dim), np.nan, np.float32)
        for b, row in enumerate(rows):
            keys[b, : len(row)] = np.array(row).reshape(-1, 1, 1) + 1000 * layer
        layers.append(LayerKV(jnp.asarray(keys), jnp.asarray(-keys)))
    return KVCache(tuple(layers), jnp.asarray([len(row) for row in rows], jnp.int32))


def rows_of(cache: KVCache) -> list[list[float]]:
    """The numbers a cache holds, once all layers, keys, values, heads and dims agree on them."""
    lengths = np.asarray(cache.lengths)
    found: list[list[float]] = []
    for b, length in enumerate(lengths):
        first = np.asarray(cache.layers[0].k)[b, :length, 0, 0]
        for index, layer in enumerate(cache.layers):
            expected = np.broadcast_to((first + 1000 * index)[:, None, None], layer.k[b, :length].shape)
            np.testing.assert_array_equal(np.asarray(layer.k)[b, :length], expected)
            np.testing.assert_array_equal(np.asarray(layer.v)[b, :length], -expected)
        found.append(first.tolist())
    return found


@st.composite
def batches(draw: st.DrawFn, num_rows: int) -> tuple[list[list[float]], int]:
    """Rows of different lengths, and a capacity that holds them."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=num_rows, max_size=num_rows))
    start = draw(st.integers(1, 900))
    rows = [[float(start + 10 * b + i) for i in range(n)] for b, n in enumerate(lengths)]
    return rows, draw(st.integers(max(1, *lengths), 7))


@settings(max_examples=25, deadline=None)
@given(batches(3), st.integers(1, 4))
def test_append_puts_new_tokens_right_behind_each_row(batch, num_new):
    rows, capacity = batch
    new = [[float(-1 - 10 * b - i) for i in range(num_new)] for b in range(3)]
    joined = kv.append(cache_of(rows, capacity), cache_of(new, num_new))
    assert joined.capacity == capacity + num_new
    assert rows_of(joined) == [old + added for old, added in zip(rows, new, strict=True)]


@settings(max_examples=25, deadline=None)
@given(batches(2), st.data())
def test_take_keeps_the_oldest_and_drop_oldest_the_rest(batch, data):
    rows, capacity = batch
    cache, num_tokens = cache_of(rows, capacity), data.draw(st.integers(0, capacity))
    taken, rest = kv.take(cache, num_tokens), kv.drop_oldest(cache, num_tokens)
    assert rows_of(taken) == [row[:num_tokens] for row in rows]
    assert rows_of(rest) == [row[num_tokens:] for row in rows]
    assert (taken.capacity, rest.capacity) == (num_tokens, capacity - num_tokens)


def test_appending_in_pieces_equals_appending_at_once():
    rows = [[1.0, 2.0, 3.0, 4.0, 5.0], [11.0, 12.0, 13.0, 14.0, 15.0]]
    cache = kv.empty(CONFIG, batch_size=2, capacity=0)
    for start, stop in ((0, 1), (1, 4), (4, 5)):
        cache = kv.append(cache, cache_of([row[start:stop] for row in rows], stop - start))
    assert rows_of(cache) == rows


def test_an_empty_cache_has_room_and_no_tokens():
    cache = kv.empty(CONFIG, batch_size=3, capacity=6, dtype=jnp.bfloat16)
    assert cache.capacity == 6
    assert np.asarray(cache.lengths).tolist() == [0, 0, 0]
    assert cache.layers[0].k.shape == (3, 6, CONFIG.num_kv_heads, CONFIG.head_dim)
    assert cache.layers[0].v.dtype == jnp.bfloat16


def test_append_keeps_the_dtype_of_the_cache():
    joined = kv.append(kv.empty(CONFIG, 1, 2, jnp.bfloat16), cache_of([[1.0]], 1))
    assert joined.layers[1].k.dtype == jnp.bfloat16
    assert rows_of(joined)[0] == [1.0]


@pytest.mark.parametrize("num_tokens", [-1, 4])
@pytest.mark.parametrize("operation", [kv.take, kv.drop_oldest])
def test_more_than_there_is_room_for_is_refused(operation, num_tokens):
    with pytest.raises(ValueError, match=rf"tokens to (keep|drop) must be 0\.\.3 tokens, got {num_tokens}"):
        operation(cache_of([[1.0]], 3), num_tokens)
