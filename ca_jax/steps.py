"""Every jitted function of the engine. Each is pure: it takes and returns all it touches, and says what it donates.

Prefill walks the layers one by one, so that a layer's history may still be on its way while earlier layers compute.
It reads history unrotated. Decode is one function over all layers and reads the decode slots, which hold keys rotated
at their positions: a working copy, never saved. New tokens' KV leaves both unrotated.

Shapes: n rows decoded, T new tokens (padded), S history places (padded), C slot capacity, L K G H F V as in models.

Not here: buffers and their owners (runner), host transfers (transfer), sampling (sampling).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from ca_jax.models import rope
from ca_jax.models.attention import attend, attend_slots
from ca_jax.models.attention_received import attention_received, slot_attention_received
from ca_jax.models.config import ModelConfig
from ca_jax.models.kv import LayerKV
from ca_jax.models.transformer import Layer, Transformer

Params = Any
"""A tree of linen variables."""


class Slots(NamedTuple):
    """The decode slots: a rotated working copy of the running jobs' KV, per layer `[slots, K, C, H]`."""

    keys: list[jax.Array]
    values: list[jax.Array]


def _apply(module: nn.Module, variables: Params, *args: Any, method: Any = None) -> Any:
    return module.apply(variables, *args, method=method)


def _slice_rotation(table: rope.Rotation, start: jax.Array | int, size: int) -> rope.Rotation:
    return rope.Rotation(*(lax.dynamic_slice_in_dim(part, start, size, 0) for part in table))


@partial(jax.jit, static_argnames=("config", "num_positions", "context"))
def rotation_table(config: ModelConfig, num_positions: int, context: int | None = None) -> rope.Rotation:
    """The rotations of positions 0 to `num_positions` - 1, f32 `[P, R/2]` each, R as in `rope`.

    Args:
      config: static.
      num_positions: P, static.
      context: how long a text may become, tokens, static; `dynamic` rope asks for it. None: P.
    """
    return rope.rotation_at(config.rope, config.head_dim, jnp.arange(num_positions), context or num_positions)


@partial(jax.jit, static_argnames=("config", "capacity", "num_slots", "dtype"))
def make_slots(config: ModelConfig, num_slots: int, capacity: int, dtype: str) -> Slots:
    """Empty decode slots; every layer has its own buffers, so that each can be donated."""
    shape = (num_slots, config.num_kv_heads, capacity, config.head_dim)
    return Slots(*([jnp.zeros(shape, dtype) for _ in range(config.num_layers)] for _ in range(2)))


@partial(jax.jit, static_argnames=("config", "num_tokens", "dtype"))
def empty_kv(config: ModelConfig, num_tokens: int, dtype: str) -> jax.Array:
    """One layer's unrotated KV of so many tokens `[2, T, K, H]`, all zeros."""
    return jnp.zeros((2, num_tokens, config.num_kv_heads, config.head_dim), dtype)


@partial(jax.jit, static_argnames=("config",))
def embed(config: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """i32 `[1, T]` to `[1, T, F]`."""
    return _apply(Transformer(config), params, tokens, method=Transformer.embed)


def _prefill_layer(
    config: ModelConfig,
    layer_params: Params,
    x: jax.Array,
    history: jax.Array | None,
    history_length: jax.Array,
    table: rope.Rotation,
    history_rotation: rope.Rotation | None = None,
    num_new: jax.Array | None = None,
    window: int | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """`prefill_layer`: `x`, and the new KV; with `num_new`, behind it the attention received."""
    rotation = rope.Rotation(*(part[None] for part in _slice_rotation(table, history_length, x.shape[1])))
    past, past_rotation = None, None
    if history is not None:
        past = LayerKV(history[0][None], history[1][None])
        past_rotation = _slice_rotation(table, 0, history.shape[1]) if history_rotation is None else history_rotation

    def attend_fn(q: jax.Array, new: LayerKV) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        over = (q, new, past, history_length[None], rotation, past_rotation)
        out, kv = attend(*over, window=window), jnp.concatenate([new.k, new.v], axis=0)
        return out, (kv,) if num_new is None else (kv, attention_received(*over, num_new, window=window))

    return _apply(Layer(config), {"params": layer_params}, x, attend_fn)


@partial(jax.jit, static_argnames=("config", "window"))
def prefill_layer(
    config: ModelConfig,
    layer_params: Params,
    x: jax.Array,
    history: jax.Array | None,
    history_length: jax.Array,
    table: rope.Rotation,
    history_rotation: rope.Rotation | None = None,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One layer over new tokens and their unrotated history. Layers of a window share a compiled function per (T, S).

    Args:
      config: static.
      layer_params: of this layer.
      x: `[1, T, F]`.
      history: this layer's unrotated KV `[2, S, K, H]` (0 keys, 1 values), or None.
      history_length: i32 scalar, tokens of history that count; the new tokens' positions start there.
      table: rotations of all positions.
      history_rotation: of history places, `[S, R/2]`; None: place s has position s.
      window: static, of the layer: `config.window_of`.

    Returns:
      `x [1, T, F]` for the next layer and the new tokens' unrotated KV `[2, T, K, H]`, a fresh buffer.
    """
    x, (kv,) = _prefill_layer(config, layer_params, x, history, history_length, table, history_rotation, window=window)
    return x, kv


@partial(jax.jit, static_argnames=("config", "window"))
def prefill_layer_attention(
    config: ModelConfig,
    layer_params: Params,
    x: jax.Array,
    history: jax.Array | None,
    history_length: jax.Array,
    num_new: jax.Array,
    table: rope.Rotation,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`prefill_layer`, and the attention that each token received in it.

    Args:
      config: static.
      layer_params: of this layer.
      x: `[1, T, F]`.
      history: this layer's unrotated KV `[2, S, K, H]` (0 keys, 1 values), or None.
      history_length: i32 scalar, tokens of history that count; the new tokens' positions start there.
      num_new: i32 scalar, new tokens that count, at most T; those behind them are padding.
      table: rotations of all positions.
      window: static, of the layer: `config.window_of`.

    Returns:
      `x [1, T, F]` and the new KV `[2, T, K, H]` as of `prefill_layer`; f32 `[S + T]`, history places first: summed
      over query heads and new tokens that count, 0 behind `history_length` and behind `num_new`.
    """
    x, (kv, received) = _prefill_layer(
        config, layer_params, x, history, history_length, table, num_new=num_new, window=window
    )
    return x, kv, received


@partial(jax.jit, static_argnames=("config",))
def last_logits(config: ModelConfig, params: Params, x: jax.Array, index: jax.Array) -> jax.Array:
    """Logits of one token: `x [1, T, F]` and an i32 scalar to f32 `[1, V]`."""
    return _apply(Transformer(config), params, lax.dynamic_slice_in_dim(x, index, 1, 1), method=Transformer.head)[:, 0]


@partial(jax.jit, static_argnames=("config",))
def all_logits(config: ModelConfig, params: Params, x: jax.Array) -> jax.Array:
    """Logits of all tokens: `x [1, T, F]` to f32 `[1, T, V]`."""
    return _apply(Transformer(config), params, x, method=Transformer.head)


@partial(jax.jit, static_argnames=("capacity",))
def grow_history(history: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """A copy of unrotated history with more room: `[2, S, K, H]` to `[2, capacity, K, H]`, and a scalar.

    The scalar is ready when the copy is, and outlives it: the copy is donated later on.
    """
    _, num_places, num_kv, head_dim = history.shape
    room = jnp.zeros((2, capacity, num_kv, head_dim), history.dtype)
    room = lax.dynamic_update_slice(room, history[:, :capacity], (0, 0, 0, 0))
    return room, room[0, 0, 0, 0] * 0 + num_places


@partial(jax.jit, donate_argnames=("history",))
def append_history(history: jax.Array, new: jax.Array, length: jax.Array) -> jax.Array:
    """Puts new unrotated KV `[2, T, K, H]` behind the `length` tokens of `[2, S, K, H]`, which is donated.

    `length + T` is at most S.
    """
    return lax.dynamic_update_slice(history, new, (0, length, 0, 0))


@partial(jax.jit, donate_argnames=("keys", "values"))
def insert_slot(
    keys: jax.Array,
    values: jax.Array,
    kv: jax.Array,
    slot: jax.Array,
    start: jax.Array,
    table: rope.Rotation,
    rotation: rope.Rotation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Puts one layer's unrotated KV into a slot, rotated at its positions. Donates the slots.

    Args:
      keys: `[slots, K, C, H]`, donated.
      values: `[slots, K, C, H]`, donated.
      kv: `[2, T, K, H]`, unrotated.
      slot: i32 scalar.
      start: i32 scalar, position of the first token; `start + T` is at most C.
      table: rotations of all positions.
      rotation: of the T tokens, `[T, R/2]`; None: their positions go on from `start`.

    Returns:
      The slots, and where the next token goes: a scalar that is ready when they are, and outlives them.
    """
    rotated = rope.rotate(kv[0], _slice_rotation(table, start, kv.shape[1]) if rotation is None else rotation)
    at = (slot, 0, start, 0)
    keys = lax.dynamic_update_slice(keys, rotated.transpose(1, 0, 2)[None].astype(keys.dtype), at)
    values = lax.dynamic_update_slice(values, kv[1].transpose(1, 0, 2)[None].astype(values.dtype), at)
    return keys, values, start + kv.shape[1]


@partial(jax.jit, donate_argnames=("slots",))
def cut_slot(slots: Slots, slot: jax.Array, places: jax.Array, turned: jax.Array, table: rope.Rotation) -> Slots:
    """Moves the rows of a slot that stay to its beginning, keys rotated on to their new positions. Donates the slots.

    Args:
      slots: `[slots, K, C, H]` a layer, donated.
      slot: i32 scalar.
      places: i32 `[C]`, where the row of each place comes from, at or behind it; anything where none comes.
      turned: i32 `[C]`, positions that a key is turned back by, >= 0.
      table: rotations of all positions.

    Returns:
      The slots.
    """
    back = rope.turned_back(table, turned)

    def move(buffer: jax.Array, turns: bool) -> jax.Array:
        rows = lax.dynamic_index_in_dim(buffer, slot, 0, keepdims=False)[:, places].transpose(1, 0, 2)  # [C, K, H]
        rows = rope.rotate(rows, back) if turns else rows
        return lax.dynamic_update_slice(buffer, rows.transpose(1, 0, 2)[None].astype(buffer.dtype), (slot, 0, 0, 0))

    return Slots([move(keys, True) for keys in slots.keys], [move(values, False) for values in slots.values])


@partial(jax.jit, donate_argnames=("slots",))
def drift_slot(slots: Slots, slot: jax.Array, span: jax.Array, drift: jax.Array, table: rope.Rotation) -> Slots:
    """Adds a model's drift to some tokens of a slot, whose keys are rotated. Donates the slots.

    Args:
      slots: `[slots, K, C, H]` a layer, donated.
      slot: i32 scalar.
      span: i32 `[2]`, the first of the tokens and one past the last.
      drift: f32 `[L, 2, K, H]`, of unrotated keys and of values.
      table: rotations of all positions.

    Returns:
      The slots.
    """
    capacity = slots.keys[0].shape[2]
    places = jnp.arange(capacity)
    moves = ((places >= span[0]) & (places < span[1]))[None, :, None]
    rotation = _slice_rotation(table, 0, capacity)

    def add(buffer: jax.Array, shift: jax.Array, is_key: bool) -> jax.Array:
        rows = lax.dynamic_index_in_dim(buffer, slot, 0, keepdims=False)  # [K, C, H]
        full = jnp.broadcast_to(shift[None], (capacity, *shift.shape))
        full = (rope.rotate(full, rotation) if is_key else full).transpose(1, 0, 2).astype(buffer.dtype)
        return lax.dynamic_update_slice(buffer, jnp.where(moves, rows + full, rows)[None], (slot, 0, 0, 0))

    return Slots(
        [add(keys, shift[0], True) for keys, shift in zip(slots.keys, drift, strict=True)],
        [add(values, shift[1], False) for values, shift in zip(slots.values, drift, strict=True)],
    )


@jax.jit
def rotations_of(table: rope.Rotation, positions: jax.Array) -> rope.Rotation:
    """The rotations of some positions: i32 `[T]` to f32 `[T, R/2]`."""
    return rope.Rotation(*(part[positions] for part in table))


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


@partial(jax.jit, static_argnames=("config", "num_blocks", "scatter", "with_attention"), donate_argnames=("slots",))
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
) -> tuple[jax.Array, jax.Array, Slots] | tuple[jax.Array, jax.Array, Slots, jax.Array]:
    """One token for the first n slots. Donates the slots.

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

    Returns:
      Logits f32 `[n, V]`; the new tokens' unrotated KV `[L, 2, n, K, H]`, a fresh buffer; the slots. If asked for, the
      attention that the tokens of each slot received, f32 `[n, C]`: summed over query heads and layers, 0 behind the
      new token.
    """
    model = Transformer(config)
    num_rows = tokens.shape[0]
    rotation = rope.Rotation(*(part[lengths][:, None] for part in table))
    new_keys, new_values, new_kv, received = [], [], [], []
    x = _apply(model, params, tokens[:, None], method=Transformer.embed)
    for i in range(config.num_layers):

        def attend_fn(
            q: jax.Array,
            new: LayerKV,
            keys: jax.Array = slots.keys[i],
            values: jax.Array = slots.values[i],
            window: int | None = config.window_of(i),
        ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            rotated = rope.rotate(new.k, rotation).astype(keys.dtype)
            if scatter:
                keys, values = _scatter(keys, rotated, lengths), _scatter(values, new.v, lengths)
            else:
                keys, values = _update(keys, rotated, lengths), _update(values, new.v, lengths)
            q = rope.rotate(q, rotation)[:, 0].reshape(num_rows, config.num_kv_heads, config.num_groups, -1)
            out = attend_slots(q, keys, values, lengths + 1, num_blocks, window=window)
            kv = jnp.stack([new.k[:, 0], new.v[:, 0]])
            given: tuple[jax.Array, ...] = ()
            if with_attention:
                given = (slot_attention_received(q, keys, lengths + 1, num_blocks, window=window),)
            return out.reshape(num_rows, 1, config.num_heads, -1), (kv, keys, values, *given)

        layer_params = params["params"][f"layer_{i}"]
        x, (kv, keys, values, *of_layer) = _apply(Layer(config), {"params": layer_params}, x, attend_fn)
        new_kv.append(kv)
        new_keys.append(keys)
        new_values.append(values)
        received += of_layer
    logits = _apply(model, params, x, method=Transformer.head)[:, 0]
    out = (logits, jnp.stack(new_kv), Slots(new_keys, new_values))
    return (*out, sum(received, jnp.float32(0))) if with_attention else out
