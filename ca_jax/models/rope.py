"""Rotary position embedding: the only place where a position enters the model.

Keys are stored unrotated; their users rotate them here, at the positions they have then.

Not here: attention, masks, where positions come from.
Source: Su et al., "RoFormer" (2021); decoupling positions from stored keys is CachedAttention, section 3.4.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ca_jax.errors import check
from ca_jax.models.config import RopeConfig


class Rotation(NamedTuple):
    """Cosines and sines of the rotation angles of some positions, both f32 `[..., R/2]`, times `attention_factor`."""

    cos: jax.Array
    sin: jax.Array


def inverse_frequencies(config: RopeConfig, head_dim: int, context: int | None = None) -> np.ndarray:
    """Radians per position of each rotated pair, f32 `[R/2]`, with the configured scaling applied.

    `R` is `config.rotary_dim`, or `head_dim`.

    Args:
      config: which frequencies.
      head_dim: H.
      context: how long a text may become, tokens: `dynamic` and `longrope` scaling are by that. It is one number for
        all tokens, since keys and queries of different frequencies do not fit together; so where `transformers`
        rescales as a text grows past the original length, and leaves keys that it has rotated as they were, a text here
        has the frequencies of the longest it may become from its first token on. The same as there are: contexts
        within the original length, and a text as long as the context that is computed at once. None: the original
        length.

    Source: `linear` is position interpolation (Chen et al., 2023), `dynamic` NTK-aware scaling (emozilla, 2023),
      `llama3` as published with Llama 3.1, `yarn` Peng et al. (2023), section 3.2, `longrope` Ding et al. (2024).
    """
    dim = config.rotary_dim or head_dim
    theta = config.theta
    if config.scaling == "dynamic":
        stretch = max(context or 0, config.original_max_positions) / config.original_max_positions
        theta *= (config.factor * stretch - (config.factor - 1)) ** (dim / (dim - 2))
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    freqs = (1.0 / (np.float32(theta) ** exponents)).astype(np.float32)
    if config.scaling == "proportional":
        freqs = np.where(np.arange(dim // 2) < (config.num_turning or 0), freqs, np.float32(0))
    if config.scaling in ("linear", "proportional"):
        return freqs / np.float32(config.factor)
    if config.scaling == "llama3":
        wavelengths = 2 * math.pi / freqs
        cycles = config.original_max_positions / wavelengths
        span = config.high_freq_factor - config.low_freq_factor
        # 1 where the wavelength is short (kept), 0 where it is long (stretched by the whole factor).
        keep = np.clip((cycles - config.low_freq_factor) / span, 0.0, 1.0)
        return ((1 - keep) * freqs / config.factor + keep * freqs).astype(np.float32)
    if config.scaling == "yarn":
        keep = _yarn_kept(config, dim)
        return ((1 - keep) * freqs / config.factor + keep * freqs).astype(np.float32)
    if config.scaling == "longrope":
        is_long = (context or 0) > config.original_max_positions
        factors = config.long_factors if is_long else config.short_factors
        check(len(factors) == len(freqs), "factors of longrope rope scaling", f"{len(freqs)} numbers", len(factors))
        return (freqs / factors).astype(np.float32)
    return freqs


def _yarn_kept(config: RopeConfig, dim: int) -> np.ndarray:
    """How much of its frequency each pair keeps, f32 `[dim/2]`: 1 where it turns often, 0 where it hardly does."""

    def pair_of(num_turns: float) -> float:
        """The pair that turns so often within the original length, were there one for each number."""
        return dim * math.log(config.original_max_positions / (num_turns * 2 * math.pi)) / (2 * math.log(config.theta))

    first, last = pair_of(config.beta_fast), pair_of(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 if first == last else 0
    return 1 - np.clip((np.arange(dim // 2, dtype=np.float32) - first) / (last - first), 0, 1)


def rotation_at(config: RopeConfig | None, head_dim: int, positions: jax.Array, context: int | None = None) -> Rotation:
    """The rotation of each position: i32 `[...]` to f32 `[..., R/2]` cosines and sines; see `inverse_frequencies`.

    None: of layers that rotate nothing; all numbers are turned by 0, so that these need no form of their own.
    """
    if config is None:
        shape = (*positions.shape, head_dim // 2)
        return Rotation(jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32))
    freqs = jnp.asarray(inverse_frequencies(config, head_dim, context))
    angles = positions[..., None].astype(jnp.float32) * freqs
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if config.attention_factor != 1:
        cos, sin = cos * config.attention_factor, sin * config.attention_factor
    return Rotation(cos, sin)


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotates heads to their positions, in half-split order: element i pairs with element i + R/2.

    Args:
      x: `[..., T, heads, H]`, unrotated.
      rotation: of the T positions, broadcastable to `[..., T, R/2]`; where R is less than H, what is behind the first
        R elements stays.

    Returns:
      Rotated heads of the same shape and dtype; the arithmetic is f32.
    """
    cos, sin = rotation.cos[..., None, :], rotation.sin[..., None, :]
    rotary_dim = 2 * cos.shape[-1]
    first, second = jnp.split(x[..., :rotary_dim].astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return rotated if rotary_dim == x.shape[-1] else jnp.concatenate([rotated, x[..., rotary_dim:]], axis=-1)
