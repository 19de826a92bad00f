"""Rows of int8 with a scale behind them: how far they are off, what is in their bytes, and rows that are no numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ca_jax.models.kv import SCALE_BYTES, dequantize, quantize, unpacked
from tests.kv_rest_kit import as_kept, scales_of

SHAPE = (2, 33, 3, 16)


def random_kv(dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Rows of sizes from 1e-6 to 1e6, with outliers."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=SHAPE) * 10.0 ** rng.uniform(-6, 6, (*SHAPE[:-1], 1))
    rows[..., 3] *= rng.choice([1, 40], SHAPE[:-1])
    return rows.astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_comes_back_is_off_by_at_most_half_a_scale(dtype):
    kv = random_kv(ml_dtypes.bfloat16 if dtype == "bfloat16" else "float32")
    kv = np.clip(kv, -60000, 60000).astype(dtype)
    packed = jax.jit(quantize)(kv)
    assert packed.dtype == jnp.int8
    assert packed.shape == (*SHAPE[:-1], 16 + SCALE_BYTES)
    found = np.asarray(jax.jit(dequantize, static_argnums=1)(packed, "float32"), np.float64)
    wanted, scale = kv.astype(np.float64), scales_of(kv.astype(np.float32)).astype(np.float64)
    assert np.all(np.abs(found - wanted) <= scale / 2 * (1 + 1e-5))
    assert np.all(scale <= np.abs(wanted).max(-1, keepdims=True) / 127 * (1 + 2**-7) + 1e-30), "scales are as small"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_what_numpy_says_and_a_model_of_16_bits_gets_16_bits(dtype):
    kv = random_kv(seed=2).astype(dtype)
    packed = quantize(jnp.asarray(kv))
    scales = np.asarray(packed)[..., 16:].copy().view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(scales, scales_of(kv.astype(np.float32)))
    found = unpacked(packed, dtype)
    assert found.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(np.asarray(found), as_kept(kv.astype(np.float32)).astype(dtype))
    assert unpacked(jnp.asarray(kv), dtype).dtype == found.dtype, "what is not packed is as it was"


def test_zeros_are_zeros_and_what_is_not_finite_touches_no_other_row():
    kv = random_kv(seed=3)
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
