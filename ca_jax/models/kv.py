"""Unrotated KV as an explicit pytree: what models take as history, return for new tokens, and what the store keeps.

Not here: where KV lives (storage), how it moves (transfer), the decode slots' rotated working copy (steps).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ca_jax.models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerKV:
    """One layer's keys and values. Keys are **unrotated**."""

    k: jax.Array
    """`[B, S, K, H]`."""
    v: jax.Array
    """`[B, S, K, H]`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """KV of all layers. Row b holds `lengths[b]` tokens; what lies behind them is never attended to, NaN included."""

    layers: tuple[LayerKV, ...]
    """L layers, oldest token first."""
    lengths: jax.Array
    """i32 `[B]`, tokens that count."""

    @property
    def capacity(self) -> int:
        """S, tokens a row has room for."""
        return self.layers[0].k.shape[1]


def empty(config: ModelConfig, batch_size: int, capacity: int, dtype=jnp.float32) -> KVCache:
    """A cache of `batch_size` rows with room for `capacity` tokens each, none of them used."""
    shape = (batch_size, capacity, config.num_kv_heads, config.head_dim)
    zeros = jnp.zeros(shape, dtype)
    layers = tuple(LayerKV(zeros, zeros) for _ in range(config.num_layers))
    return KVCache(layers, jnp.zeros((batch_size,), jnp.int32))


def append(cache: KVCache, new: KVCache) -> KVCache:
    """Puts `new` behind the tokens of `cache`, row by row; the capacity becomes the sum of both.

    Rows of different length stay compact: new tokens start at each row's own length.
    """

    def place(old: jax.Array, added: jax.Array) -> jax.Array:
        padded = jnp.pad(old, ((0, 0), (0, added.shape[1]), (0, 0), (0, 0)))
        return jax.vmap(lambda row, part, at: jax.lax.dynamic_update_slice_in_dim(row, part, at, 0))(
            padded, added.astype(old.dtype), cache.lengths
        )

    layers = tuple(LayerKV(place(a.k, b.k), place(a.v, b.v)) for a, b in zip(cache.layers, new.layers, strict=True))
    return KVCache(layers, cache.lengths + new.lengths)


def take(cache: KVCache, num_tokens: int) -> KVCache:
    """Keeps the oldest `num_tokens` of every row.

    Raises:
      ValueError: `num_tokens` is negative or above the capacity.
    """
    if not 0 <= num_tokens <= cache.capacity:
        raise ValueError(f"tokens to keep must be 0..{cache.capacity}, got {num_tokens}")
    layers = tuple(LayerKV(layer.k[:, :num_tokens], layer.v[:, :num_tokens]) for layer in cache.layers)
    return KVCache(layers, jnp.minimum(cache.lengths, num_tokens))


def drop_oldest(cache: KVCache, num_tokens: int) -> KVCache:
    """Forgets the oldest `num_tokens` of every row; what remains is valid at its new positions as it stands.

    Every row must hold at least that many tokens: a shorter row ends up empty.

    Raises:
      ValueError: `num_tokens` is negative or above the capacity.

    Source: CachedAttention (Gao et al., USENIX ATC 2024), section 3.4.
    """
    if not 0 <= num_tokens <= cache.capacity:
        raise ValueError(f"tokens to drop must be 0..{cache.capacity}, got {num_tokens}")
    layers = tuple(LayerKV(layer.k[:, num_tokens:], layer.v[:, num_tokens:]) for layer in cache.layers)
    return KVCache(layers, jnp.maximum(cache.lengths - num_tokens, 0))
