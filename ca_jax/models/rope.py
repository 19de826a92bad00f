"""Rotary position embedding: the only place where a position enters the model.

Keys are stored unrotated; whoever uses them rotates them here, at the positions they have then.

Not here: attention, masks, where positions come from.
Source: Su et al., "RoFormer" (2021); decoupling positions from stored keys is CachedAttention, section 3.4.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ca_jax.models.config import RopeConfig


class Rotation(NamedTuple):
    """Cosines and sines of the rotation angles of some positions, both f32 `[..., H/2]`."""

    cos: jax.Array
    sin: jax.Array


def inverse_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position of each rotated pair, f32 `[H/2]`, with the configured scaling applied.

    Source: `llama3` scaling as published with Llama 3.1; `linear` is position interpolation (Chen et al., 2023).
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    freqs = (1.0 / (np.float32(config.theta) ** exponents)).astype(np.float32)
    if config.scaling == "linear":
        return freqs / np.float32(config.factor)
    if config.scaling == "llama3":
        wavelengths = 2 * math.pi / freqs
        cycles = config.original_max_positions / wavelengths
        span = config.high_freq_factor - config.low_freq_factor
        # 1 where the wavelength is short (kept), 0 where it is long (stretched by the whole factor).
        keep = np.clip((cycles - config.low_freq_factor) / span, 0.0, 1.0)
        return ((1 - keep) * freqs / config.factor + keep * freqs).astype(np.float32)
    return freqs


def rotation_at(config: RopeConfig, head_dim: int, positions: jax.Array) -> Rotation:
    """The rotation of each position: i32 `[...]` to f32 `[..., H/2]` cosines and sines."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(inverse_frequencies(config, head_dim))
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotates heads to their positions, in half-split order: element i pairs with element i + H/2.

    Args:
      x: `[..., T, heads, H]`, unrotated.
      rotation: of the T positions, broadcastable to `[..., T, H/2]`.

    Returns:
      Rotated heads of the same shape and dtype; the arithmetic is f32.
    """
    cos, sin = rotation.cos[..., None, :], rotation.sin[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
