"""Prefill: layer by layer, over history that is unrotated.

Shapes: T new tokens (padded), S history places (padded), L K G H F V as in models.

Not here: the decode slots (slot_steps, decode_steps).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from ca_jax.device.steps.common import HEADS, KV_HEADS, Params, apply, logits_of, slice_rotation
from ca_jax.models import rope
from ca_jax.models.attention import attend
from ca_jax.models.attention_received import attention_received
from ca_jax.models.config import ModelConfig
from ca_jax.models.kv import LayerKV, dequantize, quantize, unpacked
from ca_jax.models.sharding import Axes, ModelSharding, by_device, constrain
from ca_jax.models.transformer import Layer, Transformer


@partial(jax.jit, static_argnames=("config", "num_positions", "context", "sharding"))
def rotation_table(
    config: ModelConfig, num_positions: int, context: int | None = None, sharding: ModelSharding | None = None
) -> rope.Rotation:
    """The rotations of positions 0 to `num_positions` - 1, f32 `[P, R/2]` each, R as in `rope`.

    Args:
      config: static.
      num_positions: P, static.
      context: how long a text may become, tokens, static; `dynamic` rope asks for it. None: P.
      sharding: static.
    """
    table = rope.rotation_at(config.rope, config.head_dim, jnp.arange(num_positions), context or num_positions)
    return rope.Rotation(*(constrain(part, sharding) for part in table))


@partial(jax.jit, static_argnames=("config", "num_tokens", "dtype", "sharding"))
def empty_kv(config: ModelConfig, num_tokens: int, dtype: str, sharding: ModelSharding | None = None) -> jax.Array:
    """One layer's unrotated KV of so many tokens `[2, T, K, H]`, all zeros."""
    return constrain(jnp.zeros((2, num_tokens, config.num_kv_heads, config.head_dim), dtype), sharding, KV_HEADS)


@partial(jax.jit, static_argnames=("sharding",))
def pack_kv(kv: jax.Array, sharding: ModelSharding | None = None) -> jax.Array:
    """Unrotated KV `[2, T, K, H]` as it is kept in int8, `[2, T, K, H + 2]`."""
    return constrain(quantize(kv), sharding, KV_HEADS)


@partial(jax.jit, static_argnames=("dtype", "sharding"))
def unpack_kv(kv: jax.Array, dtype: str, sharding: ModelSharding | None = None) -> jax.Array:
    """KV that is kept in int8 `[2, S, K, H + 2]`, unrotated, `[2, S, K, H]`."""
    return constrain(dequantize(kv, dtype), sharding, KV_HEADS)


@partial(jax.jit, static_argnames=("config", "sharding"))
def embed(config: ModelConfig, params: Params, tokens: jax.Array, sharding: ModelSharding | None = None) -> jax.Array:
    """i32 `[1, T]` to `[1, T, F]`."""
    return constrain(apply(Transformer(config), params, tokens, method=Transformer.embed), sharding)


def _prefill_layer(
    config: ModelConfig,
    layer_params: Params,
    x: jax.Array,
    history: jax.Array | None,
    history_length: jax.Array,
    table: rope.Rotation,
    num_new: jax.Array | None = None,
    window: int | None = None,
    sharding: ModelSharding | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """`prefill_layer`: `x`, and the new KV; with `num_new`, behind it the attention received."""
    rotation = rope.Rotation(*(part[None] for part in slice_rotation(table, history_length, x.shape[1])))
    past_rotation = None if history is None else slice_rotation(table, 0, history.shape[1])

    def attend_heads(
        q: jax.Array,
        new: LayerKV,
        history: jax.Array | None,
        history_length: jax.Array,
        rotation: rope.Rotation,
        past_rotation: rope.Rotation | None,
        num_new: jax.Array | None,
    ) -> tuple[jax.Array, ...]:
        past = None
        if history is not None:
            history = unpacked(history, q.dtype)
            past = LayerKV(history[0][None], history[1][None])
        over = (q, new, past, history_length[None], rotation, past_rotation)
        out, kv = attend(*over, window=window), jnp.concatenate([new.k, new.v], axis=0)
        return (out, kv) if num_new is None else (out, kv, attention_received(*over, num_new, window=window)[None])

    def attend_fn(q: jax.Array, new: LayerKV) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        in_axes = (HEADS, KV_HEADS, KV_HEADS, (), (), (), ())
        out_axes: tuple[Axes, ...] = (HEADS, KV_HEADS) if num_new is None else (HEADS, KV_HEADS, ("heads",))
        of_device = by_device(attend_heads, sharding, in_axes, out_axes)
        out, kv, *received = of_device(q, new, history, history_length, rotation, past_rotation, num_new)
        return out, (kv, *(constrain(each.sum(0), sharding) for each in received))  # Of all devices.

    x, carried = apply(Layer(config, sharding), {"params": layer_params}, x, attend_fn)
    return constrain(x, sharding), carried


@partial(jax.jit, static_argnames=("config", "window", "sharding"))
def prefill_layer(
    config: ModelConfig,
    layer_params: Params,
    x: jax.Array,
    history: jax.Array | None,
    history_length: jax.Array,
    table: rope.Rotation,
    window: int | None = None,
    sharding: ModelSharding | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One layer over new tokens and their unrotated history. Layers of a window share a compiled function per (T, S).

    Args:
      config: static.
      layer_params: of this layer.
      x: `[1, T, F]`.
      history: this layer's unrotated KV `[2, S, K, H]` (0 keys, 1 values), or int8 `[2, S, K, H + 2]`, or None.
      history_length: i32 scalar, tokens of history that count; the new tokens' positions start there.
      table: rotations of all positions.
      window: static, of the layer: `config.window_of`.
      sharding: static.

    Returns:
      `x [1, T, F]` for the next layer and the new tokens' unrotated KV `[2, T, K, H]`, a fresh buffer.
    """
    x, (kv,) = _prefill_layer(config, layer_params, x, history, history_length, table, window=window, sharding=sharding)
    return x, kv


@partial(jax.jit, static_argnames=("config", "window", "sharding"))
def prefill_layer_attention(
    config: ModelConfig,
    layer_params: Params,
    x: jax.Array,
    history: jax.Array | None,
    history_length: jax.Array,
    num_new: jax.Array,
    table: rope.Rotation,
    window: int | None = None,
    sharding: ModelSharding | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`prefill_layer`, and the attention that each token received in it.

    Args:
      config: static.
      layer_params: of this layer.
      x: `[1, T, F]`.
      history: this layer's unrotated KV `[2, S, K, H]` (0 keys, 1 values), or int8 `[2, S, K, H + 2]`, or None.
      history_length: i32 scalar, tokens of history that count; the new tokens' positions start there.
      num_new: i32 scalar, new tokens that count, at most T; those behind them are padding.
      table: rotations of all positions.
      window: static, of the layer: `config.window_of`.
      sharding: static.

    Returns:
      `x [1, T, F]` and the new KV `[2, T, K, H]` as of `prefill_layer`; f32 `[S + T]`, history places first: summed
      over query heads and new tokens that count, 0 behind `history_length` and behind `num_new`.
    """
    x, (kv, received) = _prefill_layer(
        config, layer_params, x, history, history_length, table, num_new=num_new, window=window, sharding=sharding
    )
    return x, kv, received


@partial(jax.jit, static_argnames=("config", "sharding"))
def last_logits(
    config: ModelConfig, params: Params, x: jax.Array, index: jax.Array, sharding: ModelSharding | None = None
) -> jax.Array:
    """Logits of one token: `x [1, T, F]` and an i32 scalar to f32 `[1, V]`."""
    return logits_of(config, params, lax.dynamic_slice_in_dim(x, index, 1, 1), sharding, (None,))


@partial(jax.jit, static_argnames=("config",))
def all_logits(config: ModelConfig, params: Params, x: jax.Array) -> jax.Array:
    """Logits of all tokens: `x [1, T, F]` to f32 `[1, T, V]`."""
    return apply(Transformer(config), params, x, method=Transformer.head)


@partial(jax.jit, static_argnames=("capacity", "dtype", "sharding"))
def grow_history(
    history: jax.Array, capacity: int, dtype: str, sharding: ModelSharding | None = None
) -> tuple[jax.Array, jax.Array]:
    """A copy of unrotated history with more room: `[2, S, K, H]` to `[2, capacity, K, H]` of `dtype`, and a scalar.

    What is packed in int8 is unpacked. The scalar is ready when the copy is, and outlives it: the copy is donated later
    on.
    """
    history = unpacked(history, dtype)
    _, num_places, num_kv, head_dim = history.shape
    room = jnp.zeros((2, capacity, num_kv, head_dim), history.dtype)
    room = constrain(lax.dynamic_update_slice(room, history[:, :capacity], (0, 0, 0, 0)), sharding, KV_HEADS)
    return room, constrain(room[0, 0, 0, 0] * 0 + num_places, sharding)


@partial(jax.jit, static_argnames=("sharding",), donate_argnames=("history",))
def append_history(
    history: jax.Array, new: jax.Array, length: jax.Array, sharding: ModelSharding | None = None
) -> jax.Array:
    """Puts new unrotated KV `[2, T, K, H]` behind the `length` tokens of `[2, S, K, H]`, which is donated.

    `length + T` is at most S.
    """
    return constrain(lax.dynamic_update_slice(history, new, (0, length, 0, 0)), sharding, KV_HEADS)
