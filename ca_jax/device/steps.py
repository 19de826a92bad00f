"""Every jitted function of the engine. Each is pure: it takes and returns all it touches, and says what it donates.

Prefill walks the layers one by one, so that a layer's history may still be on its way while earlier layers compute.
It reads history unrotated. Decode is one function over all layers and reads the decode slots, which hold keys rotated
at their positions: a working copy, never saved, donated by whatever changes it. New tokens' KV leaves both unrotated.

Shapes: n rows decoded, T new tokens (padded), S history places (padded), C slot capacity, L K G H F V as in models.
Slots are `[slots, K, C, H]` a layer, `slot` is an i32 scalar, `table` the rotations of all positions; `config`,
`window` (`config.window_of` the layer) and `sharding` are static. With a `sharding` functions run over its mesh: what
is done for each head by each device for the heads that it has, the products between by all, and what is small is whole
on each device.

Not here: buffers and their owners (runner, slots), host transfers (transfer), sampling (sampler).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from ca_jax.models import rope
from ca_jax.models.attention import attend, attend_slots, pure_attention, slot_attention
from ca_jax.models.attention_received import attention_received, slot_attention_received
from ca_jax.models.config import ModelConfig
from ca_jax.models.kv import LayerKV, dequantize, quantize, unpacked
from ca_jax.models.sharding import Axes, ModelSharding, by_device, constrain
from ca_jax.models.transformer import Layer, Transformer

Params = Any
"""A tree of linen variables."""

HEADS: Axes = (None, None, "heads", None)
"""Of queries `[1, T, N, H]`."""
KV_HEADS: Axes = (None, None, "kv_heads", None)
"""Of new KV `[1, T, K, H]` and of unrotated KV `[2, S, K, H]`."""
ROWS: Axes = ("batch",)
"""Of what has a row for each slot."""
ROW_HEADS: Axes = ("batch", None, "heads", None)
"""Of queries `[n, 1, N, H]`."""
ROW_KV_HEADS: Axes = ("batch", None, "kv_heads", None)
"""Of new KV `[n, 1, K, H]`."""
STEP_KV: Axes = (None, "batch", "kv_heads", None)
"""Of a layer's new KV of a decode step `[2, n, K, H]`."""
SLOT_HEADS: Axes = ("batch", "kv_heads", None, None)
"""Of a layer's slots `[slots, K, C, H]`."""


def apply(module: nn.Module, variables: Params, *args: Any, method: Any = None) -> Any:
    """`module.apply`, typed as it is used here."""
    return module.apply(variables, *args, method=method)


def variables_of(layer_params: Params) -> Params:
    """A layer's variables, from its parameters and, under `packed`, those that lie packed beside them."""
    params = dict(layer_params)
    packed = params.pop("packed", None)
    return {"params": params} if packed is None else {"params": params, "packed": packed}


def layer_of(variables: Params, layer: int) -> Params:
    """The parameters of one layer, with what lies packed beside them."""
    name = f"layer_{layer}"
    packed = variables.get("packed", {}).get(name)
    return variables["params"][name] if packed is None else {**variables["params"][name], "packed": packed}


def slice_rotation(table: rope.Rotation, start: jax.Array | int, size: int) -> rope.Rotation:
    """The rotations of positions `start` to `start + size`."""
    return rope.Rotation(*(lax.dynamic_slice_in_dim(part, start, size, 0) for part in table))


def logits_of(
    config: ModelConfig, params: Params, x: jax.Array, sharding: ModelSharding | None, rows: Axes
) -> jax.Array:
    """`x [n, 1, F]` to logits f32 `[n, V]`: each device computes those of its part of the vocabulary."""
    logits = apply(Transformer(config), params, x, method=Transformer.head)[:, 0]
    return constrain(constrain(logits, sharding, (*rows, "vocab")), sharding)


# Prefill.


@partial(jax.jit, static_argnames=("config", "num_positions", "context", "sharding"))
def rotation_table(
    config: ModelConfig, num_positions: int, context: int | None = None, sharding: ModelSharding | None = None
) -> rope.Rotation:
    """The rotations of positions 0 to `num_positions` - 1, f32 `[P, R/2]` each, R as in `rope`.

    Args:
      num_positions: P, static.
      context: how long a text may become, tokens, static; `dynamic` rope asks for it. None: P.
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
    num_new: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """One layer over new tokens and their unrotated history. Layers of a window share a compiled function per (T, S).

    Args:
      x: `[1, T, F]`.
      history: this layer's unrotated KV `[2, S, K, H]` (0 keys, 1 values), or int8 `[2, S, K, H + 2]`, or None.
      history_length: i32 scalar, tokens of history that count; the new tokens' positions start there.
      num_new: i32 scalar, new tokens that count, at most T, where the attention that tokens receive is wanted.

    Returns:
      `x [1, T, F]` for the next layer and the new tokens' unrotated KV `[2, T, K, H]`, a fresh buffer. With `num_new`
      also the attention that each token received, f32 `[S + T]`, history places first: summed over query heads and new
      tokens that count, 0 behind `history_length` and behind `num_new`.
    """
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
            past = unpacked(history, q.dtype)[:, None]
        over = (q, new, past, history_length[None], rotation, past_rotation)
        # Over a mesh, and where the attention that tokens receive is wanted too, it is XLA's.
        how = pure_attention(q.dtype, q.shape[-1]) if sharding is not None or num_new is not None else None
        out, kv = attend(*over, how, window), jnp.concatenate([new.k, new.v], axis=0)
        return (out, kv) if num_new is None else (out, kv, attention_received(*over, num_new, window=window)[None])

    def attend_fn(q: jax.Array, new: LayerKV) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        in_axes = (HEADS, KV_HEADS, KV_HEADS, (), (), (), ())
        out_axes: tuple[Axes, ...] = (HEADS, KV_HEADS) if num_new is None else (HEADS, KV_HEADS, ("heads",))
        of_device = by_device(attend_heads, sharding, in_axes, out_axes)
        out, kv, *received = of_device(q, new, history, history_length, rotation, past_rotation, num_new)
        return out, (kv, *(constrain(each.sum(0), sharding) for each in received))  # Of all devices.

    x, carried = apply(Layer(config, sharding), variables_of(layer_params), x, attend_fn)
    return constrain(x, sharding), *carried


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


# The decode slots.


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
    drift: jax.Array | None = None,
    span: jax.Array | None = None,
    sharding: ModelSharding | None = None,
) -> Slots:
    """Moves the rows of a slot that stay to its beginning, keys rotated on to their new positions. Donates the slots.

    Args:
      places: i32 `[C]`, where the row of each place comes from, at or behind it; anything where none comes.
      turned: i32 `[C]`, positions that a key is turned back by, >= 0.
      drift: f32 `[L, 2, K, H]`, added to unrotated keys and to values; None adds nothing.
      span: i32 `[2]`, with a drift: the first of the tokens that drift at its new place, and one past the last.

    Returns:
      The slots.
    """
    capacity = slots.keys[0].shape[2]

    def moved(
        slots: Slots,
        slot: jax.Array,
        places: jax.Array,
        back: rope.Rotation,
        drift: jax.Array | None,
        span: jax.Array | None,
        rotation: rope.Rotation,
    ) -> Slots:
        def move(buffer: jax.Array, shift: jax.Array | None, is_key: bool) -> jax.Array:
            own, is_own = _own_slot(slot, buffer.shape[0], sharding)
            rows = lax.dynamic_index_in_dim(buffer, own, 0, keepdims=False)[:, places].transpose(1, 0, 2)  # [C, K, H]
            rows = rope.rotate(rows, back) if is_key else rows
            if shift is not None and span is not None:
                drifts = (jnp.arange(capacity) >= span[0]) & (jnp.arange(capacity) < span[1])
                full = jnp.broadcast_to(shift, (capacity, *shift.shape))
                full = (rope.rotate(full, rotation) if is_key else full).astype(rows.dtype)
                rows = jnp.where(drifts[:, None, None], rows + full, rows)
            return _write_slot(buffer, rows.transpose(1, 0, 2), own, 0, is_own)

        shifts = [(None, None)] * len(slots.keys) if drift is None else [(layer[0], layer[1]) for layer in drift]
        return Slots(
            [move(keys, shift, True) for keys, (shift, _) in zip(slots.keys, shifts, strict=True)],
            [move(values, shift, False) for values, (_, shift) in zip(slots.values, shifts, strict=True)],
        )

    of_device = by_device(moved, sharding, (SLOT_HEADS, (), (), (), KV_HEADS, (), ()), SLOT_HEADS)
    back, rotation = rope.turned_back(table, turned), slice_rotation(table, 0, capacity)
    return of_device(slots, slot, places, back, drift, span, rotation)


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
        how = slot_attention(keys) if sharding is None and not with_attention else None
        out = attend_slots(grouped, keys, values, lengths + 1, num_blocks, how, window=window).reshape(q.shape)
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

        layer_params = layer_of(params, i)
        x, (kv, keys, values, *of_layer) = apply(Layer(config, sharding), variables_of(layer_params), x, attend_fn)
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
