"""The decode slots: making them, putting KV into one, cutting it. Donated by whatever changes them.

Shapes: T tokens, C slot capacity, L K H as in models.

Not here: decoding (decode_steps), which job has which slot (scheduler).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ca_jax.device.steps.common import KV_HEADS, SLOT_HEADS, slice_rotation
from ca_jax.models import rope
from ca_jax.models.config import ModelConfig
from ca_jax.models.kv import unpacked
from ca_jax.models.sharding import ModelSharding, by_device, constrain


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
      slot: i32 scalar.
      start: i32 scalar, position of the first token; `start + T` is at most C.
      table: rotations of all positions.
      sharding: static.

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
      slots: `[slots, K, C, H]` a layer, donated.
      slot: i32 scalar.
      places: i32 `[C]`, where the row of each place comes from, at or behind it; anything where none comes.
      turned: i32 `[C]`, positions that a key is turned back by, >= 0.
      table: rotations of all positions.
      sharding: static.

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
      slots: `[slots, K, C, H]` a layer, donated.
      slot: i32 scalar.
      span: i32 `[2]`, the first of the tokens and one past the last.
      drift: f32 `[L, 2, K, H]`, of unrotated keys and of values.
      table: rotations of all positions.
      sharding: static.

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
