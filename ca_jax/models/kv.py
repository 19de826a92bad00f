"""Unrotated KV as an explicit pytree: what models take as history, return for new tokens, and what the store keeps.

At rest it may be int8, each row of a head with a scale of its own behind it. A token's keys or values of one head are H
numbers; they are H int8 then and the two bytes of a bfloat16:

    row     q0 q1 q2 … qH-1 | s s        number i is  qi * s,  s = max |number| / 127, rounded up

so that a block stays one array, and heads an axis that can be sharded. The scale is rounded up, so that no number is
above 127 of it: what comes back is off by at most half of it. A row of zeros is zeros. A row that is not finite comes
back as NaN, and touches no other.

Not here: where KV lives (storage), how it moves and what is packed when (transfer, runner), pages
of it (paged_attention).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ca_jax.errors import check
from ca_jax.models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerKV:
    """One layer's keys and values. Keys are **unrotated**."""

    k: jax.Array
    """`[B, S, K, H]`."""
    v: jax.Array | None
    """`[B, S, K, H]`. None: what is called keys is both, see `values_of`."""

    @property
    def parts(self) -> tuple[jax.Array, ...]:
        """Keys and values, or what is both."""
        return (self.k,) if self.v is None else (self.k, self.v)

    @classmethod
    def of(cls, parts: jax.Array) -> LayerKV:
        """KV of one sequence, `[2, S, K, H]`, or `[1, S, K, H]` where that is both."""
        return cls(parts[:1], parts[1:] if len(parts) > 1 else None)


def value_dim(head_dim: int, num_parts: int, rotary_dim: int) -> int:
    """Numbers of a value, of R that are rotated of a key's H: as `values_of` gives them."""
    return head_dim if num_parts > 1 or rotary_dim == head_dim else head_dim - rotary_dim


def values_of(keys: jax.Array, values: jax.Array | None, rotary_dim: int) -> jax.Array:
    """The values `[..., H]`.

    Where what is kept is both, these are the numbers that lie behind those of keys that are rotated, `[..., H - R]`
    (latent attention); or, where all of a key is, all of them: keys are these times a scale.
    """
    return keys[..., keys.shape[-1] - value_dim(keys.shape[-1], 1, rotary_dim) :] if values is None else values


def scaled_keys(keys: jax.Array, key_scale: jax.Array | None) -> jax.Array:
    """Keys `[..., H]`, from what is kept of them; the scale f32 `[H]`, None: these are they."""
    return keys if key_scale is None else (keys.astype(jnp.float32) * key_scale).astype(keys.dtype)


State = tuple[jax.Array, ...]
"""What a layer keeps of rows in place of KV: `[n, *shape]`, shapes as `RecurrenceConfig.state_shapes` says."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """KV of all layers. Row b holds `lengths[b]` tokens; what lies behind them is never attended to, NaN included."""

    layers: tuple[LayerKV, ...]
    """Of the layers that have KV of their own, oldest token first."""
    lengths: jax.Array
    """i32 `[B]`, tokens that count."""
    states: tuple[State, ...] = ()
    """Of layers that keep a state in place of KV, those behind each row's last token."""

    @property
    def capacity(self) -> int:
        """S, tokens a row has room for."""
        return self.layers[0].k.shape[1]


def empty(config: ModelConfig, batch_size: int, capacity: int, dtype=jnp.float32) -> KVCache:
    """A cache of `batch_size` rows with room for `capacity` tokens each, none of them used."""
    zeros = [(parts, jnp.zeros((batch_size, capacity, *shape), dtype)) for parts, *shape in config.kv_shapes]
    layers = tuple(LayerKV(each, each if parts > 1 else None) for parts, each in zeros)
    states = tuple(no_states(config, batch_size, dtype) for _ in range(config.num_states))
    return KVCache(layers, jnp.zeros((batch_size,), jnp.int32), states)


def no_states(config: ModelConfig, num_rows: int, dtype: jnp.dtype | str) -> State:
    """What a layer that keeps a state holds of rows of no tokens; nothing where no layer of the model does."""
    shapes = () if config.recurrence is None else config.recurrence.state_shapes(config.embed_dim)
    return tuple(jnp.zeros((num_rows, *shape), of or dtype) for shape, of in shapes)


def append(cache: KVCache, new: KVCache) -> KVCache:
    """Puts `new` behind the tokens of `cache`, row by row; the capacity becomes the sum of both.

    Rows of different length stay compact: new tokens start at each row's own length.
    """

    def place(old: jax.Array, added: jax.Array) -> jax.Array:
        padded = jnp.pad(old, ((0, 0), (0, added.shape[1]), (0, 0), (0, 0)))
        return jax.vmap(lambda row, part, at: jax.lax.dynamic_update_slice_in_dim(row, part, at, 0))(
            padded, added.astype(old.dtype), cache.lengths
        )

    layers = jax.tree.map(place, cache.layers, new.layers)
    return KVCache(layers, cache.lengths + new.lengths, new.states)


def take(cache: KVCache, num_tokens: int) -> KVCache:
    """Keeps the oldest `num_tokens` of every row.

    Raises:
      ValueError: `num_tokens` is negative or above the capacity, or there are states, which nothing shortens.
    """
    check(not cache.states, "a cache to take first tokens of", "without states", len(cache.states))
    check(0 <= num_tokens <= cache.capacity, "tokens to keep", f"0..{cache.capacity}", num_tokens)
    layers = jax.tree.map(lambda part: part[:, :num_tokens], cache.layers)
    return KVCache(layers, jnp.minimum(cache.lengths, num_tokens))


def drop_oldest(cache: KVCache, num_tokens: int) -> KVCache:
    """Forgets the oldest `num_tokens` of every row; what remains is valid at its new positions as it stands.

    Every row must hold at least that many tokens: a shorter row ends up empty.

    Raises:
      ValueError: `num_tokens` is negative or above the capacity, or there are states, of which nothing leaves.

    Source: CachedAttention (Gao et al., USENIX ATC 2024), section 3.4.
    """
    check(not cache.states, "a cache to drop tokens of", "without states", len(cache.states))
    check(0 <= num_tokens <= cache.capacity, "tokens to drop", f"0..{cache.capacity}", num_tokens)
    layers = jax.tree.map(lambda part: part[:, num_tokens:], cache.layers)
    return KVCache(layers, jnp.maximum(cache.lengths - num_tokens, 0))


SCALE_BYTES = 2
"""Of a row's scale, behind its numbers."""
_LARGEST = 127
_LOW_BITS = 0xFFFF  # Of a float32, which a bfloat16 has not.


def quantize(kv: jax.Array) -> jax.Array:
    """Packs unrotated KV: `[*, H]` of floats to int8 `[*, H + 2]`."""
    numbers = kv.astype(jnp.float32)
    scale = _rounded_up(jnp.abs(numbers).max(-1, keepdims=True) / _LARGEST)
    wide = scale.astype(jnp.float32)
    quotients = jnp.where(wide > 0, numbers / jnp.where(wide > 0, wide, 1), 0)
    rows = jnp.clip(jnp.round(quotients), -_LARGEST, _LARGEST).astype(jnp.int8)
    return jnp.concatenate([rows, lax.bitcast_convert_type(scale[..., 0], jnp.int8)], axis=-1)


def dequantize(packed: jax.Array, dtype: jnp.dtype | str) -> jax.Array:
    """Unpacks: int8 `[*, H + 2]` to `[*, H]`."""
    # Byte by byte: a bitcast of two numbers to one is not fused with what reads them.
    low, high = (packed[..., place].astype(jnp.uint8).astype(jnp.uint16) for place in (-2, -1))
    scale = lax.bitcast_convert_type(high << 8 | low, jnp.bfloat16).astype(jnp.float32)
    return (packed[..., :-SCALE_BYTES].astype(jnp.float32) * scale[..., None]).astype(dtype)


def unpacked(kv: jax.Array, dtype: jnp.dtype | str) -> jax.Array:
    """KV as models compute with it: what is packed is unpacked, all else is as it was."""
    return dequantize(kv, dtype) if kv.dtype == jnp.int8 else kv


def _rounded_up(scale: jax.Array) -> jax.Array:
    """f32 >= 0 to the next bfloat16 that is not below it; NaN stays NaN."""
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    up = lax.bitcast_convert_type(((bits + _LOW_BITS) >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(scale), up, jnp.bfloat16(jnp.nan))
