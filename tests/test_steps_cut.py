"""Rows that are cut and drift, in half precision: what stays is moved bit for bit, and nothing else is touched.

Not here: the same in float32, and what batches decode then (test_overflow_exact, test_overflow_turns).
"""

import jax.numpy as jnp
import numpy as np
import pytest

from ca_jax.device import page_steps
from ca_jax.testing import tiny
from tests.storage.store_helpers import as_bits

CONFIG = tiny.tiny_config()
PAGE, NUM_PAGES, NUM_TOKENS, MOST = 8, 40, 100, 16
SHAPE = (2, CONFIG.num_kv_heads, CONFIG.head_dim)


def read(pages: np.ndarray, table: np.ndarray) -> np.ndarray:
    """All that a row's pages hold: `[L, P, 2, K, page, H]` to `[L, 2, T, K, H]`."""
    found = pages[:, table].transpose(0, 2, 1, 4, 3, 5)
    return found.reshape(*found.shape[:2], -1, *SHAPE[1:])


@pytest.mark.parametrize("num_others", [0, 3, MOST])  # Of its first pages, which stay as they are.
@pytest.mark.parametrize("drifts_from", [None, 0, 4, 52])
def test_half_precision_rows_are_cut_in_half_precision(drifts_from, num_others):
    rng, kept = np.random.default_rng(0), np.r_[0:4, 52:NUM_TOKENS]
    shape = (CONFIG.num_layers, NUM_PAGES, 2, CONFIG.num_kv_heads, PAGE, CONFIG.head_dim)
    before = np.asarray(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16))
    tables = rng.permutation(NUM_PAGES)[: 2 * MOST].astype(np.int32).reshape(2, MOST)
    tables[1, num_others:] = tables[0, num_others:]
    expected, drift = read(before, tables[0])[:, :, kept], ()
    if drifts_from is not None:
        values = np.asarray(jnp.asarray(rng.standard_normal((CONFIG.num_layers, *SHAPE)), jnp.bfloat16))
        expected[:, :, drifts_from:] += values[:, :, None]
        drift = (jnp.asarray(values, jnp.float32), jnp.int32(drifts_from))
    places = jnp.zeros(MOST * PAGE, jnp.int32).at[: len(kept)].set(kept)
    counts = jnp.int32(0), places, jnp.int32(len(kept))
    found = np.stack(page_steps.cut_pages([*map(jnp.array, before)], jnp.array(tables), *counts, *drift))
    np.testing.assert_array_equal(as_bits(read(found, tables[1])[:, :, : len(kept)]), as_bits(expected))
    touched = tables[1, : -(-len(kept) // PAGE)]
    np.testing.assert_array_equal(*(as_bits(np.delete(part, touched, axis=1)) for part in (found, before)))
