"""The decode slots: making them, putting KV into one, decoding a token for each, cutting one. All donate them.

Shapes: n rows decoded, T tokens, C slot capacity, L K G H F V as in models. Slots are `[slots, K, C, H]` a layer,
`slot` is an i32 scalar, `table` the rotations of all positions; `config` and `sharding` are static.

Not here: sampling (sampler), which job has which slot (scheduler).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ca_jax.device.steps.common import (
    KV_HEADS,
    ROW_HEADS,
    ROW_KV_HEADS,
    ROWS,
    SLOT_HEADS,
    STEP_KV,
    Params,
    apply,
    logits_of,
    slice_rotation,
)
from ca_jax.models import rope
from ca_jax.models.attention import attend_slots
from ca_jax.models.attention_received import slot_attention_received
from ca_jax.models.config import ModelConfig
from ca_jax.models.kv import LayerKV
from ca_jax.models.kv_int8 import quantize, unpacked
from ca_jax.models.sharding import ModelSharding, by_device, constrain
from ca_jax.models.transformer import Layer, Transformer


class Slots(NamedTuple):
    """The decode slots: a rotated working copy of the running jobs' KV, per layer `[slots, K, C, H]`."""

    keys: list[jax.Array]
    values: list[jax.Array]


@partial(jax.jit, static_argnames=("config", "capacity", "num_slots", "dtype", "sharding"))
def make_slots(
    config: ModelConfig, num_slots: int, capacity: int, dtype: str, sharding: ModelSharding | None = None
) -> Slots:
    """Empty decode slots; every layer has its own buffers, so that each can be donated."""
    shape = (num_slots, config.num_kv_heads, capacity, config.head_dim)

    def make() -> list[jax.Array]:
        return [constrain(jnp.zeros(shape, dtype), sharding, SLOT_HEADS) for _ in range(config.num_layers)]

    return Slots(make(), make())


def _own_slot(slot: jax.Array, num_slots: int, sharding: ModelSharding | None) -> tuple[jax.Array, jax.Array | None]:
    """Where a slot is among the `num_slots` of this device, and whether it is one of them; None: each is."""
    if sharding is None or sharding.num_data == 1:
        return slot, None
    own = slot - lax.axis_index("data") * num_slots
    return jnp.clip(own, 0, num_slots - 1), (own >= 0) & (own < num_slots)


def _write_slot(
    buffer: jax.Array, rows: jax.Array, slot: jax.Array, start: jax.Array | int, is_own: jax.Array | None
) -> jax.Array:
    """Puts `rows [K, T, H]` into a slot of `[slots, K, C, H]` from place `start` on, if it is this device's."""
    new, at = rows[None].astype(buffer.dtype), (slot, 0, start, 0)
    if is_own is not None:
        new = jnp.where(is_own, new, lax.dynamic_slice(buffer, at, new.shape))
    return lax.dynamic_update_slice(buffer, new, at)


@partial(jax.jit, static_argnames=("sharding",), donate_argnames=("keys", "values"))
def insert_slot(
    keys: jax.Array,
    values: jax.Array,
    kv: jax.Array,
    slot: jax.Array,
    start: jax.Array,
    table: rope.Rotation,
    sharding: ModelSharding | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Puts one layer's unrotated KV into a slot, rotated at its positions. Donates the slots.

    Args:
      keys: `[slots, K, C, H]`, donated.
      values: `[slots, K, C, H]`, donated.
      kv: `[2, T, K, H]`, unrotated, or int8 `[2, T, K, H + 2]`.
      start: i32 scalar, position of the first token; `start + T` is at most C.

    Returns:
      The slots, and where the next token goes: a scalar that is ready when they are, and outlives them.
    """
    rotation = slice_rotation(table, start, kv.shape[1])

    def insert(
        keys: jax.Array,
        values: jax.Array,
        kv: jax.Array,
        slot: jax.Array,
        start: jax.Array,
        rotation: rope.Rotation,
    ) -> tuple[jax.Array, jax.Array]:
        own, is_own = _own_slot(slot, keys.shape[0], sharding)
        kv = unpacked(kv, keys.dtype)
        rotated = rope.rotate(kv[0], rotation)
        return (
            _write_slot(keys, rotated.transpose(1, 0, 2), own, start, is_own),
            _write_slot(values, kv[1].transpose(1, 0, 2), own, start, is_own),
        )

    in_axes, out_axes = (SLOT_HEADS, SLOT_HEADS, KV_HEADS, (), (), ()), (SLOT_HEADS, SLOT_HEADS)
    keys, values = by_device(insert, sharding, in_axes, out_axes)(keys, values, kv, slot, start, rotation)
    return keys, values, constrain(start + kv.shape[1], sharding)


@partial(jax.jit, static_argnames=("sharding",), donate_argnames=("slots",))
def cut_slot(
    slots: Slots,
    slot: jax.Array,
    places: jax.Array,
    turned: jax.Array,
    table: rope.Rotation,
    sharding: ModelSharding | None = None,
) -> Slots:
    """Moves the rows of a slot that stay to its beginning, keys rotated on to their new positions. Donates the slots.

    Args:
      places: i32 `[C]`, where the row of each place comes from, at or behind it; anything where none comes.
      turned: i32 `[C]`, positions that a key is turned back by, >= 0.

    Returns:
      The slots.
    """

    def moved(slots: Slots, slot: jax.Array, places: jax.Array, back: rope.Rotation) -> Slots:
        def move(buffer: jax.Array, turns: bool) -> jax.Array:
            own, is_own = _own_slot(slot, buffer.shape[0], sharding)
            rows = lax.dynamic_index_in_dim(buffer, own, 0, keepdims=False)[:, places].transpose(1, 0, 2)  # [C, K, H]
            rows = rope.rotate(rows, back) if turns else rows
            return _write_slot(buffer, rows.transpose(1, 0, 2), own, 0, is_own)

        return Slots([move(keys, True) for keys in slots.keys], [move(values, False) for values in slots.values])

    of_device = by_device(moved, sharding, (SLOT_HEADS, (), (), ()), SLOT_HEADS)
    return of_device(slots, slot, places, rope.turned_back(table, turned))


@partial(jax.jit, static_argnames=("sharding",), donate_argnames=("slots",))
def drift_slot(
    slots: Slots,
    slot: jax.Array,
    span: jax.Array,
    drift: jax.Array,
    table: rope.Rotation,
    sharding: ModelSharding | None = None,
) -> Slots:
    """Adds a model's drift to some tokens of a slot, whose keys are rotated. Donates the slots.

    Args:
      span: i32 `[2]`, the first of the tokens and one past the last.
      drift: f32 `[L, 2, K, H]`, of unrotated keys and of values.

    Returns:
      The slots.
    """
    capacity = slots.keys[0].shape[2]

    def moved(slots: Slots, slot: jax.Array, span: jax.Array, drift: jax.Array, rotation: rope.Rotation) -> Slots:
        places = jnp.arange(capacity)
        moves = ((places >= span[0]) & (places < span[1]))[None, :, None]

        def add(buffer: jax.Array, shift: jax.Array, is_key: bool) -> jax.Array:
            own, is_own = _own_slot(slot, buffer.shape[0], sharding)
            rows = lax.dynamic_index_in_dim(buffer, own, 0, keepdims=False)  # [K, C, H]
            full = jnp.broadcast_to(shift[None], (capacity, *shift.shape))
            full = (rope.rotate(full, rotation) if is_key else full).transpose(1, 0, 2).astype(buffer.dtype)
            return _write_slot(buffer, jnp.where(moves, rows + full, rows), own, 0, is_own)

        return Slots(
            [add(keys, shift[0], True) for keys, shift in zip(slots.keys, drift, strict=True)],
            [add(values, shift[1], False) for values, shift in zip(slots.values, drift, strict=True)],
        )

    of_device = by_device(moved, sharding, (SLOT_HEADS, (), (), KV_HEADS, ()), SLOT_HEADS)
    return of_device(slots, slot, span, drift, slice_rotation(table, 0, capacity))


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
      tokens: i32 `[n]`.
      lengths: i32 `[n]`, tokens already in each slot: the position of the new one.
      num_blocks: static, see `attend_slots`.
      scatter: static: write all rows at once. On CPU an update for each row is faster, on a GPU each is a kernel.
      with_attention: static: also return the attention that each token received.
      packs: static: return the new KV in int8.

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
