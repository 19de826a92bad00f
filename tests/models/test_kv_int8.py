"""Rows of int8 with a scale behind them: what is in their bytes, what comes back, and rows that are no numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ca_jax.models.kv import SCALE_BYTES, dequantize, quantize, unpacked
from tests.kv_rest_kit import as_kept, scales_of

SHAPE = (2, 33, 3, 16)


def random_kv() -> np.ndarray:
    """Rows of sizes from 1e-6 to 1e6, with outliers."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=SHAPE) * 10.0 ** rng.uniform(-6, 6, (*SHAPE[:-1], 1))
    rows[..., 3] *= rng.choice([1, 40], SHAPE[:-1])
    return rows.astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_it_is_what_numpy_says_and_a_model_of_16_bits_gets_16_bits(dtype):
    kv = random_kv() if dtype != "float16" else np.clip(random_kv(), -60000, 60000)
    kv = kv.astype(dtype)
    packed = jax.jit(quantize)(kv)
    assert (packed.dtype, packed.shape) == (jnp.int8, (*SHAPE[:-1], 16 + SCALE_BYTES))
    scales = np.asarray(packed)[..., 16:].copy().view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(scales, scales_of(kv.astype(np.float32)))
    found = unpacked(packed, dtype)
    assert found.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(np.asarray(found), as_kept(kv.astype(np.float32)).astype(dtype))
    assert unpacked(jnp.asarray(kv), dtype).dtype == found.dtype, "what is not packed is as it was"


def test_zeros_are_zeros_and_what_is_not_finite_touches_no_other_row():
    kv = random_kv()
    expected = np.asarray(dequantize(quantize(kv), "float32")).copy()
    kv[0, 4] = 0
    kv[0, 5, 1] = np.nan
    kv[1, 6, 2, 7] = np.nan
    kv[1, 7, 0, 0] = -np.inf
    found = np.asarray(dequantize(quantize(kv), "float32"))
    expected[0, 4] = 0
    expected[0, 5, 1] = expected[1, 6, 2] = expected[1, 7, 0] = np.nan
    np.testing.assert_array_equal(found, expected)
    assert np.all(np.isnan(dequantize(np.full((1, 1, 1, 18), -1, np.int8), "float32"))), "memory that nobody may read"
