"""Decoding: one token for each slot, in one function over all layers.

Shapes: n rows decoded, C slot capacity, L K G H F V as in models.

Not here: sampling (sampling), what else is done to slots (slot_steps).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from ca_jax.device.steps.common import ROW_HEADS, ROW_KV_HEADS, ROWS, SLOT_HEADS, STEP_KV, Params, apply, logits_of
from ca_jax.device.steps.slot_steps import Slots
from ca_jax.models import rope
from ca_jax.models.attention import attend_slots
from ca_jax.models.attention_received import slot_attention_received
from ca_jax.models.config import ModelConfig
from ca_jax.models.kv import LayerKV, quantize
from ca_jax.models.sharding import ModelSharding, by_device, constrain
from ca_jax.models.transformer import Layer, Transformer


def _update(slots: jax.Array, new: jax.Array, lengths: jax.Array) -> jax.Array:
    """Writes `new [n, 1, K, H]` behind the lengths of the first n slots `[slots, K, C, H]`, row by row."""
    for row in range(new.shape[0]):
        at = (row, 0, lengths[row], 0)
        slots = lax.dynamic_update_slice(slots, new[row].transpose(1, 0, 2)[None].astype(slots.dtype), at)
    return slots


def _scatter(slots: jax.Array, new: jax.Array, lengths: jax.Array) -> jax.Array:
    """The same, all rows at once."""
    rows = jnp.arange(new.shape[0])
    at = slots.at[rows, :, lengths]
    return at.set(new[:, 0].astype(slots.dtype), unique_indices=True, indices_are_sorted=True, mode="promise_in_bounds")


@partial(
    jax.jit,
    static_argnames=("config", "num_blocks", "scatter", "with_attention", "packs", "sharding"),
    donate_argnames=("slots",),
)
def decode(
    config: ModelConfig,
    params: Params,
    slots: Slots,
    tokens: jax.Array,
    lengths: jax.Array,
    table: rope.Rotation,
    num_blocks: int | None = None,
    scatter: bool = False,
    with_attention: bool = False,
    packs: bool = False,
    sharding: ModelSharding | None = None,
) -> tuple[jax.Array, jax.Array, Slots] | tuple[jax.Array, jax.Array, Slots, jax.Array]:
    """One token for the first n slots. Donates the slots. Where a mesh has them in parts n is all of them.

    Args:
      config: static.
      params: the model's.
      slots: donated.
      tokens: i32 `[n]`.
      lengths: i32 `[n]`, tokens already in each slot: the position of the new one.
      table: rotations of all positions.
      num_blocks: static, see `attend_slots`.
      scatter: static: write all rows at once. On CPU an update for each row is faster, on a GPU each is a kernel.
      with_attention: static: also return the attention that each token received.
      packs: static: return the new KV in int8.
      sharding: static.

    Returns:
      Logits f32 `[n, V]`; the new tokens' unrotated KV `[L, 2, n, K, H]`, or packed, a fresh buffer; the slots. If
      asked for, the attention that the tokens of each slot received, f32 `[n, C]`: summed over query heads and layers,
      0 behind the new token.
    """
    model = Transformer(config)
    rotation = rope.Rotation(*(part[lengths][:, None] for part in table))
    new_keys, new_values, new_kv, received = [], [], [], []

    def attend_heads(
        q: jax.Array,
        new: LayerKV,
        keys: jax.Array,
        values: jax.Array,
        lengths: jax.Array,
        rotation: rope.Rotation,
        window: int | None,
    ) -> tuple[jax.Array, ...]:
        rotated = rope.rotate(new.k, rotation).astype(keys.dtype)
        if scatter:
            keys, values = _scatter(keys, rotated, lengths), _scatter(values, new.v, lengths)
        else:
            keys, values = _update(keys, rotated, lengths), _update(values, new.v, lengths)
        grouped = rope.rotate(q, rotation)[:, 0].reshape(q.shape[0], keys.shape[1], -1, q.shape[-1])
        out = attend_slots(grouped, keys, values, lengths + 1, num_blocks, window=window).reshape(q.shape)
        kv = jnp.stack([new.k[:, 0], new.v[:, 0]])
        if not with_attention:
            return out, kv, keys, values
        given = slot_attention_received(grouped, keys, lengths + 1, num_blocks, window=window)
        return out, kv, keys, values, given[None]

    in_axes = (ROW_HEADS, ROW_KV_HEADS, SLOT_HEADS, SLOT_HEADS, ROWS, ROWS)
    out_axes = (ROW_HEADS, STEP_KV, SLOT_HEADS, SLOT_HEADS, *((("heads", "batch"),) if with_attention else ()))
    x = constrain(apply(model, params, tokens[:, None], method=Transformer.embed), sharding, ROWS)
    for i in range(config.num_layers):

        def attend_fn(
            q: jax.Array,
            new: LayerKV,
            keys: jax.Array = slots.keys[i],
            values: jax.Array = slots.values[i],
            window: int | None = config.window_of(i),
        ) -> tuple[jax.Array, list[jax.Array]]:
            of_device = by_device(partial(attend_heads, window=window), sharding, in_axes, out_axes)
            out, *carried = of_device(q, new, keys, values, lengths, rotation)
            return out, carried

        layer_params = params["params"][f"layer_{i}"]
        x, (kv, keys, values, *of_layer) = apply(Layer(config, sharding), {"params": layer_params}, x, attend_fn)
        x = constrain(x, sharding, ROWS)
        new_kv.append(kv)
        new_keys.append(keys)
        new_values.append(values)
        received += of_layer
    logits = logits_of(config, params, x, sharding, ROWS)
    kv = jnp.stack(new_kv)
    rows = None if sharding is not None and sharding.shares_rows else "batch"
    kv = constrain(quantize(kv) if packs else kv, sharding, (None, None, rows, "kv_heads", None))
    if not with_attention:
        return logits, kv, Slots(new_keys, new_values)
    return logits, kv, Slots(new_keys, new_values), constrain(sum(received, jnp.float32(0)).sum(0), sharding)
