"""Rotary embedding: against complex numbers, against `transformers`, and what it promises of relative positions."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ca_jax.models import rope
from ca_jax.models.config import RopeConfig
from tests.tolerances import ROTATION_ATOL, SCORE_ATOL

CONFIGS = {
    "plain": RopeConfig(theta=500.0),
    "linear": RopeConfig(theta=500.0, scaling="linear", factor=2.5),
    "llama3": RopeConfig(theta=5000.0, scaling="llama3", factor=8.0, original_max_positions=64),
}
HEAD_DIM = 16


def heads(num_tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_tokens, 2, HEAD_DIM)).astype(np.float32)


def rotated(x: np.ndarray, positions: np.ndarray, config: RopeConfig = CONFIGS["plain"]) -> np.ndarray:
    return np.asarray(rope.rotate(jnp.asarray(x), rope.rotation_at(config, HEAD_DIM, jnp.asarray(positions))))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_rotation_is_multiplication_by_a_complex_number(config):
    x, positions = heads(6), np.array([0, 1, 2, 7, 63, 300])
    pairs = x[..., : HEAD_DIM // 2] + 1j * x[..., HEAD_DIM // 2 :].astype(np.float64)
    turned = pairs * np.exp(1j * positions[:, None, None] * rope.inverse_frequencies(config, HEAD_DIM).astype(float))
    np.testing.assert_allclose(
        rotated(x, positions, config), np.concatenate([turned.real, turned.imag], -1), atol=ROTATION_ATOL["float32"]
    )


def test_unscaled_frequencies_are_powers_of_theta():
    expected = [500.0 ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)]
    np.testing.assert_allclose(rope.inverse_frequencies(CONFIGS["plain"], HEAD_DIM), expected, rtol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_frequencies_equal_those_of_transformers(name):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from ca_jax.testing import tiny

    config = tiny.tiny_config(head_dim=HEAD_DIM, rope=CONFIGS[name])
    module = LlamaRotaryEmbedding(transformers.LlamaConfig(**tiny.hf_config(config)))
    np.testing.assert_allclose(
        rope.inverse_frequencies(config.rope, HEAD_DIM), module.inv_freq.numpy(), rtol=1e-6, atol=0
    )


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500), st.sampled_from(sorted(CONFIGS)))
def test_scores_depend_on_the_distance_alone(query_at, key_at, shift, name):
    q, k = heads(1, seed=1), heads(1, seed=2)

    def scores(by: int) -> np.ndarray:
        q_turned = rotated(q, np.array([query_at + by]), CONFIGS[name])
        k_turned = rotated(k, np.array([key_at + by]), CONFIGS[name])
        return (q_turned * k_turned).sum(-1)

    np.testing.assert_allclose(scores(0), scores(shift), atol=SCORE_ATOL["float32"])


def test_dtype_and_shape_are_kept_and_the_arithmetic_is_f32():
    x = jnp.asarray(heads(5)).astype(jnp.bfloat16)
    rotation = rope.rotation_at(CONFIGS["plain"], HEAD_DIM, jnp.arange(100, 105))
    out = rope.rotate(x, rotation)
    assert (out.dtype, out.shape) == (jnp.bfloat16, x.shape)
    exact = rope.rotate(x.astype(jnp.float32), rotation).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(exact, np.float32))
