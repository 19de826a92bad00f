"""The parts that layers are made of, in Flax linen: norms, the projections around attention, feed-forwards.

Which of them a model has is said by its config alone, so that one set of parts serves every family.

Shapes: B batch, T new tokens, N query heads, K KV heads, H head dim, F embed, D mlp.

Not here: attention itself, rotation, how parts are put together (transformer).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ca_jax.models.attention import matmul_precision
from ca_jax.models.config import ModelConfig
from ca_jax.models.kv import LayerKV

AttendFn = Callable[[jax.Array, LayerKV], tuple[jax.Array, Any]]
"""Unrotated queries `[B, T, N, H]` and new KV `[B, T, K, H]` to attention output `[B, T, N, H]` and any carry."""

INIT = nn.initializers.normal(0.02)
"""Of matrices, where parameters are made by linen."""


def _project(x: jax.Array, weights: jax.Array, num_inputs: int = 1) -> jax.Array:
    """Contracts the last `num_inputs` axes of x with the first of the weights, as one plain matrix product.

    Written out as 2-D because the CPU backend has a fast path for that alone: 30 layers at one token took 20 ms so,
    31 ms as an einsum over `[B, T, F] [F, N, H]`.
    """
    split = x.ndim - num_inputs
    leading, trailing = x.shape[:split], weights.shape[num_inputs:]
    rows = math.prod(leading)
    flat = jnp.dot(
        x.reshape(rows, -1), weights.reshape(math.prod(weights.shape[:num_inputs]), -1), precision=matmul_precision(x)
    )
    return flat.reshape(*leading, *trailing)


class RMSNorm(nn.Module):
    """Divides by the root mean square over F and scales; f32 inside (Zhang and Sennrich, 2019)."""

    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., F]` to the same shape and dtype."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        full = x.astype(jnp.float32)
        full = full * jax.lax.rsqrt(jnp.mean(full * full, axis=-1, keepdims=True) + self.eps)
        return full.astype(x.dtype) * scale.astype(x.dtype)


class Attention(nn.Module):
    """Projections of grouped-query attention around an `attend` function."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array, attend_fn: AttendFn) -> tuple[jax.Array, Any]:
        """`x [B, T, F]` to `[B, T, F]` and what `attend_fn` carries out."""
        c = self.config
        wq = self.param("wq", INIT, (c.embed_dim, c.num_heads, c.head_dim))
        wk = self.param("wk", INIT, (c.embed_dim, c.num_kv_heads, c.head_dim))
        wv = self.param("wv", INIT, (c.embed_dim, c.num_kv_heads, c.head_dim))
        wo = self.param("wo", INIT, (c.num_heads, c.head_dim, c.embed_dim))
        out, carry = attend_fn(_project(x, wq), LayerKV(_project(x, wk), _project(x, wv)))
        return _project(out, wo, num_inputs=2), carry


class MLP(nn.Module):
    """SwiGLU feed-forward (Shazeer, 2020)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, T, F]` to `[B, T, F]`."""
        c = self.config
        w_gate = self.param("w_gate", INIT, (c.embed_dim, c.mlp_dim))
        w_up = self.param("w_up", INIT, (c.embed_dim, c.mlp_dim))
        w_down = self.param("w_down", INIT, (c.mlp_dim, c.embed_dim))
        return _project(nn.silu(_project(x, w_gate)) * _project(x, w_up), w_down)
