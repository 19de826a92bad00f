"""Jitted functions of models whose layers keep states in place of KV. Each is pure and says what it donates.

A running job's row has two cells of each such layer: the one in which it stands, and one that a step writes.

    cells    row 0: 0 1    row 1: 2 3    row 2: 4 5         read   0 3 4
             stands in 0   stands in 3   stands in 4        write  1 2 5

So a step that is thrown away has changed nothing: its row goes on to stand where it stood.

Shapes: as in `steps`; c cells, n rows of a step. On a mesh cells are with their rows, and each part numbers its own
from 0.

Not here: which row stands where (states), attention and its pages (steps).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ca_jax.device import steps
from ca_jax.device.sampler import greedy
from ca_jax.models import paged_attention as paged
from ca_jax.models import rope
from ca_jax.models.config import LayerKind, ModelConfig
from ca_jax.models.kv import State, no_states
from ca_jax.models.recurrent import CELLS, RowStates
from ca_jax.models.sharding import Axes, ModelSharding, by_device, constrain
from ca_jax.models.transformer import Layer


class Cells(NamedTuple):
    """Where rows of a step stand, and where they will."""

    read: jax.Array
    """i32 `[n]`, among their part's; of padding any cell."""
    write: jax.Array
    """i32 `[n]`, likewise; of padding one behind the last."""


def axes_of(states: State, sharding: ModelSharding | None) -> tuple[Axes, ...]:
    """How a layer's cells `[c, *shape]` lie: by rows, and by channels and heads where devices divide these."""
    axes = CELLS[: len(states)]
    if sharding is None:
        return axes
    return tuple(sharding.divided(of, each.shape) for of, each in zip(axes, states, strict=True))


@partial(jax.jit, static_argnames=("config", "num_cells", "dtype", "sharding"))
def make_states(config: ModelConfig, num_cells: int, dtype: str, sharding: ModelSharding | None = None) -> list[State]:
    """Of each layer with a state so many cells, `[c, *shape]`, all zeros, in buffers of their own."""

    def of_layer() -> State:
        zeros = no_states(config, num_cells, dtype)
        return tuple(
            constrain(each, sharding, axes) for each, axes in zip(zeros, axes_of(zeros, sharding), strict=True)
        )

    return [of_layer() for _ in range(config.num_states)]


def through_layer(
    config: ModelConfig,
    layer_params: steps.Params,
    x: jax.Array,
    states: State,
    cells: Cells | None,
    rows: paged.Rows,
    kind: LayerKind,
    *,
    one_each: bool,
    sharding: ModelSharding | None,
) -> tuple[jax.Array, State]:
    """`x [D, T, F]` through a layer with a state. A row whose first token is at place 0 has nothing before it."""
    if cells is None:
        raise ValueError("a step of layers that keep states must have cells, got none")

    def standing(states: State, read: jax.Array, starts: jax.Array, places: jax.Array) -> State:
        first = places[jnp.minimum(starts[:-1], len(places) - 1)]
        return tuple(jnp.where((first == 0).reshape(-1, *[1] * (each.ndim - 1)), 0, each[read]) for each in states)

    def put(states: State, write: jax.Array, after: State) -> State:
        return tuple(each.at[write].set(new, mode="drop") for each, new in zip(states, after, strict=True))

    axes = axes_of(states, sharding)
    in_axes = (axes, steps.ROWS, steps.ROWS, steps.ROWS)
    before = by_device(standing, sharding, in_axes, axes)(states, cells.read, rows.starts, rows.places)
    given = RowStates(before, rows.starts, one_each)
    x, after = steps.apply(Layer(config, kind, sharding), steps.variables_of(layer_params), x, given)
    states = by_device(put, sharding, (axes, steps.ROWS, axes), axes)(states, cells.write, after)
    return constrain(x, sharding, steps.ROWS), states


@partial(jax.jit, static_argnames=("config", "num_tokens", "kind", "sharding"), donate_argnames=("x", "states"))
def layer_step(
    config: ModelConfig,
    layer_params: steps.Params,
    x: jax.Array,
    states: State,
    cells: Cells | None,
    rows: paged.Rows,
    num_tokens: int,
    kind: LayerKind,
    sharding: ModelSharding | None = None,
) -> tuple[jax.Array, State]:
    """One layer with a state over some tokens of each row; as `steps.layer_step`. Donates `x` and the states.

    Args:
      x: `[D, T', F]`, of which the first T tokens of each part are computed.
      states: this layer's cells.
      num_tokens: T, static.
    """
    given = layer_params, x[:, :num_tokens], states, cells, rows, kind
    part, states = through_layer(config, *given, one_each=False, sharding=sharding)
    return constrain(lax.dynamic_update_slice_in_dim(x, part, 0, 1), sharding, steps.ROWS), states


@partial(jax.jit, static_argnames=("config", "packs", "sharding"), donate_argnames=("pages", "states"))
def decode(
    config: ModelConfig,
    params: steps.Params,
    pages: Sequence[jax.Array],
    states: Sequence[State],
    cells: Cells | None,
    tokens: jax.Array,
    rows: paged.Rows,
    tables: tuple[rope.Rotation, ...],
    *,
    packs: bool = False,
    sharding: ModelSharding | None = None,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...], list[jax.Array], list[State]]:
    """One token for each row, through all layers; as `steps.decode`. Donates pages and states.

    Returns:
      Logits f32 `[n, V]`; the likeliest tokens i32 `[n]`; the tokens' unrotated KV `[L, 2, n, K, H]` of the layers that
      have any, or packed, fresh; the pages; the states.
    """
    by_part = tokens[None] if sharding is None else tokens.reshape(sharding.num_data, -1)
    x = steps.embed(config, params, by_part, sharding)
    new_kv: list[jax.Array] = []
    new_pages, new_states = list(pages), list(states)
    for i in range(config.num_layers):
        kind, layer_params = config.kind_of(i), steps.layer_of(params, i)
        if kind.is_recurrent:
            at = i - len(new_kv)
            given = layer_params, x, new_states[at], cells, rows, kind
            x, new_states[at] = through_layer(config, *given, one_each=True, sharding=sharding)
            continue
        at = len(new_kv)
        of_layer = layer_params, x, new_pages[at], rows, tables[kind.rope], kind, 0
        x, (kv, _, new_pages[at]) = steps.through_layer(
            config, *of_layer, one_each=True, with_attention=False, sharding=sharding
        )
        new_kv.append(kv)
    logits = steps.logits_of(config, params, x.reshape(-1, 1, x.shape[-1]), sharding, steps.ROWS)
    return logits, greedy(logits), steps.stack_layers(config, new_kv, packs, sharding), new_pages, new_states


@partial(jax.jit, static_argnames=("sharding",))
def read_state(states: Sequence[State], cell: jax.Array, sharding: ModelSharding | None = None) -> State:
    """What all layers hold in a cell of each part, i32 scalar: arrays `[D l, *shape]`, fresh, a part's at its l."""

    def read(states: tuple[State, ...], cell: jax.Array) -> State:
        return tuple(jnp.stack([each[cell] for each in part]) for part in zip(*states, strict=True))

    axes = axes_of(states[0], sharding)
    return by_device(read, sharding, ((axes,) * len(states), ()), axes)(tuple(states), cell)


@partial(jax.jit, static_argnames=("sharding",), donate_argnames=("states",))
def write_state(
    states: Sequence[State],
    cell: jax.Array,
    state: Any,
    part: jax.Array | None = None,
    sharding: ModelSharding | None = None,
) -> list[State]:
    """Puts what a part had in a cell, `[l, *shape]`, into another. Donates the states.

    Args:
      cell: i32 scalar, among its part's.
      part: i32 scalar, that the cell is in; None without a mesh.
    """

    def write(states: tuple[State, ...], cell: jax.Array, state: State, part: jax.Array | None) -> tuple[State, ...]:
        if part is not None:  # Elsewhere out of range: nowhere.
            cell = jnp.where(part == lax.axis_index("data"), cell, len(states[0][0]))
        return tuple(
            tuple(each.at[cell].set(new[i].astype(each.dtype)) for each, new in zip(of_layer, state, strict=True))
            for i, of_layer in enumerate(states)
        )

    axes = axes_of(states[0], sharding)
    of_all, of_state = (axes,) * len(states), tuple((None, *each[1:]) for each in axes)
    return list(by_device(write, sharding, (of_all, (), of_state, ()), of_all)(tuple(states), cell, state, part))
