"""Jitted functions of models whose layers keep states in place of KV. Each is pure and says what it donates.

A running job's row has two cells of each such layer: the one in which it stands, and one that a step writes.

    cells    row 0: 0 1    row 1: 2 3    row 2: 4 5         read   0 3 4
             stands in 0   stands in 3   stands in 4        write  1 2 5

So a step that is thrown away has changed nothing: its row goes on to stand where it stood.

Shapes: as in `steps`; c cells, n rows of a step. There is no mesh: such models are on one device.

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
from ca_jax.models.recurrent import RowStates
from ca_jax.models.transformer import Layer


class Cells(NamedTuple):
    """Where rows of a step stand, and where they will."""

    read: jax.Array
    """i32 `[n]`; of padding any cell."""
    write: jax.Array
    """i32 `[n]`; of padding one behind the last."""


@partial(jax.jit, static_argnames=("config", "num_cells", "dtype"))
def make_states(config: ModelConfig, num_cells: int, dtype: str) -> list[State]:
    """Of each layer with a state so many cells, `[c, *shape]`, all zeros, in buffers of their own."""
    return [no_states(config, num_cells, dtype) for _ in range(config.num_states)]


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
) -> tuple[jax.Array, State]:
    """`x [1, T, F]` through a layer with a state. A row whose first token is at place 0 has nothing before it."""
    if cells is None:
        raise ValueError("a step of layers that keep states must have cells, got none")
    first = rows.places[jnp.minimum(rows.starts[:-1], len(rows.places) - 1)]
    before = tuple(jnp.where((first == 0).reshape(-1, *[1] * (each.ndim - 1)), 0, each[cells.read]) for each in states)
    given = RowStates(before, rows.starts, one_each)
    x, after = steps.apply(Layer(config, kind), steps.variables_of(layer_params), x, given)
    put = (each.at[cells.write].set(new, mode="drop") for each, new in zip(states, after, strict=True))
    return x, tuple(put)


@partial(jax.jit, static_argnames=("config", "num_tokens", "kind"), donate_argnames=("x", "states"))
def layer_step(
    config: ModelConfig,
    layer_params: steps.Params,
    x: jax.Array,
    states: State,
    cells: Cells | None,
    rows: paged.Rows,
    num_tokens: int,
    kind: LayerKind,
) -> tuple[jax.Array, State]:
    """One layer with a state over some tokens of each row; as `steps.layer_step`. Donates `x` and the states.

    Args:
      x: `[1, T', F]`, of which the first T tokens are computed.
      states: this layer's cells.
      num_tokens: T, static.
    """
    part, states = through_layer(config, layer_params, x[:, :num_tokens], states, cells, rows, kind, one_each=False)
    return lax.dynamic_update_slice_in_dim(x, part, 0, 1), states


@partial(jax.jit, static_argnames=("config", "packs"), donate_argnames=("pages", "states"))
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
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...], list[jax.Array], list[State]]:
    """One token for each row, through all layers; as `steps.decode`. Donates pages and states.

    Returns:
      Logits f32 `[n, V]`; the likeliest tokens i32 `[n]`; the tokens' unrotated KV `[L, 2, n, K, H]` of the layers that
      have any, or packed, fresh; the pages; the states.
    """
    x = steps.embed(config, params, tokens[None])
    new_kv: list[jax.Array] = []
    new_pages, new_states = list(pages), list(states)
    for i in range(config.num_layers):
        kind, layer_params = config.kind_of(i), steps.layer_of(params, i)
        if kind.is_recurrent:
            at = i - len(new_kv)
            x, new_states[at] = through_layer(config, layer_params, x, new_states[at], cells, rows, kind, one_each=True)
            continue
        at = len(new_kv)
        of_layer = layer_params, x, new_pages[at], rows, tables[kind.rope], kind, 0
        x, (kv, _, new_pages[at]) = steps.through_layer(
            config, *of_layer, one_each=True, with_attention=False, sharding=None
        )
        new_kv.append(kv)
    logits = steps.logits_of(config, params, x.reshape(-1, 1, x.shape[-1]), None, steps.ROWS)
    return logits, greedy(logits), steps.stack_layers(config, new_kv, packs), new_pages, new_states


@jax.jit
def read_state(states: Sequence[State], cell: jax.Array) -> State:
    """What all layers hold in a cell, i32 scalar: arrays `[l, *shape]`, fresh."""
    return tuple(jnp.stack([each[cell] for each in part]) for part in zip(*states, strict=True))


@partial(jax.jit, donate_argnames=("states",))
def write_state(states: Sequence[State], cell: jax.Array, state: Any) -> list[State]:
    """Puts what `read_state` gave into a cell. Donates the states."""
    return [
        tuple(each.at[cell].set(new[i].astype(each.dtype)) for each, new in zip(of_layer, state, strict=True))
        for i, of_layer in enumerate(states)
    ]
