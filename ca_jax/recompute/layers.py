"""One layer of selective recompute: some tokens over the KV of all, and what it says of the others.

Everything here is pure. Shapes: n tokens that are computed, S places of stored KV, T new tokens, K KV heads, H head
dim, F embed. `x [1, n, F]` is what goes into a layer of the chosen tokens, `kv [2, S, K, H]` its stored unrotated KV,
of which a token sees places up to its own, `table` the rotations of all positions; `config`, `window` and `sharding`
are static.

Not here: which tokens and in which layers (plan), one sequence through all layers (recomputer).
Source: CacheBlend (Yao et al., EuroSys 2025), section 4.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ca_jax.device.steps import HEADS, KV_HEADS, Params, apply, slice_rotation, variables_of
from ca_jax.models import rope
from ca_jax.models.attention import attend, attend_chosen, pure_attention
from ca_jax.models.config import ModelConfig
from ca_jax.models.kv import LayerKV
from ca_jax.models.sharding import ModelSharding, by_device, constrain
from ca_jax.models.transformer import Layer

NOWHERE = 1 << 30
"""Places of padding begin here: behind every sequence."""
_RIDGE = 3.0  # Of the fit, times the mean squared length of what it is fitted to.
_LN_TOLERANCE = 16.0  # Of the fit, the natural logarithm of one over it: what f32 tells apart.


@partial(jax.jit, static_argnames=("config", "window", "sharding"))
def recompute_layer(
    config: ModelConfig,
    layer_params: Params,
    x: jax.Array,
    positions: jax.Array,
    kv: jax.Array,
    table: rope.Rotation,
    carried: tuple[jax.Array, ...] | None = None,
    window: int | None = None,
    sharding: ModelSharding | None = None,
    new_x: jax.Array | None = None,
    history_length: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Computes one layer of some tokens anew, over the KV of all; of new tokens over what that gives, if there are any.

    With new tokens weights are read once for both.

    Args:
      positions: i32 `[n]`, increasing: their places in `kv`. At S or beyond it is padding, which changes nothing.
      carried: bool `[n]` and `[S]`: by which of these tokens others move, and which places do, see `carry_along`; None:
        the others stay.
      new_x: `[1, T, F]`, tokens behind the history; None: there are none.
      history_length: i32 scalar, tokens of history that count; the new tokens' positions start there.

    Returns:
      `x [1, n, F]` for the next layer, and `kv` with the chosen tokens' own in their places. With new tokens also
      `new_x [1, T, F]` for the next layer, and their unrotated KV `[2, T, K, H]`.
    """
    num_chosen = x.shape[1]
    rotation = rope.Rotation(*(part.at[positions].get(mode="clip")[None] for part in table))
    all_rotations, new_rotation = slice_rotation(table, 0, kv.shape[1]), None
    if new_x is not None and history_length is not None:
        new_rotation = rope.Rotation(*(part[None] for part in slice_rotation(table, history_length, new_x.shape[1])))
        x = jnp.concatenate([x, new_x], axis=1)

    def attend_heads(
        q: jax.Array,
        new: LayerKV,
        kv: jax.Array,
        positions: jax.Array,
        history_length: jax.Array | None,
        rotations: tuple[Any, ...],
        carried: tuple[jax.Array, ...] | None,
    ) -> tuple[jax.Array, ...]:
        rotation, new_rotation, all_rotations = rotations
        both = jnp.concatenate([new.k, new.v], axis=0).astype(kv.dtype)
        rest = kv if carried is None else carry_along(both[:, :num_chosen], positions, kv, *carried)
        fused = rest.at[:, positions].set(
            both[:, :num_chosen], mode="drop", unique_indices=True, indices_are_sorted=True
        )
        keys = rope.rotate(fused[0], all_rotations)
        out = attend_chosen(rope.rotate(q[:, :num_chosen], rotation)[0], keys, fused[1], positions, window)[None]
        if history_length is None:
            return out, fused
        last = LayerKV(new.k[:, num_chosen:], new.v[:, num_chosen:])
        past = fused[:, None]
        over = (q[:, num_chosen:], last, past, history_length[None], new_rotation, all_rotations)
        how = None if sharding is None else pure_attention(q.dtype, q.shape[-1])
        return jnp.concatenate([out, attend(*over, how, window)], axis=1), fused, both[:, num_chosen:]

    def attend_fn(q: jax.Array, new: LayerKV) -> tuple[jax.Array, list[jax.Array]]:
        in_axes, out_axes = (HEADS, KV_HEADS, KV_HEADS, (), (), (), ()), (HEADS, KV_HEADS, KV_HEADS)
        of_device = by_device(attend_heads, sharding, in_axes, out_axes if new_x is not None else out_axes[:2])
        rotations = (rotation, new_rotation, all_rotations)
        out, *carrying = of_device(q, new, kv, positions, history_length, rotations, carried)
        return out, carrying

    x, (fused, *new_kv) = apply(Layer(config, sharding), variables_of(layer_params), x, attend_fn)
    x = constrain(x, sharding)
    return (x, fused) if new_x is None else (x[:, :num_chosen], fused, x[:, num_chosen:], *new_kv)


def carry_along(new: jax.Array, positions: jax.Array, kv: jax.Array, fitted: jax.Array, moves: jax.Array) -> jax.Array:
    """Moves KV as some tokens' has moved: by the map of it, a ridge regression, that says best how these moved.

    The ridge bounds how ill the regression can be conditioned, so that a fixed number of Newton's steps inverts it:
    matrix products alone. LAPACK, asked for so small a matrix in each layer, took 2 to 40 times as long, the longer the
    more other threads computed.

    Args:
      new: `[2, n, K, H]`, the tokens' KV as it is now.
      positions: i32 `[n]`, their places in `kv`; at S or beyond it is padding.
      fitted: bool `[n]`, tokens that the map is fitted to: none that has no KV in `kv`.
      moves: bool `[S]`, places that move.
    """
    num_kv, head_dim = kv.shape[2:]

    def by_head(kv: jax.Array) -> jax.Array:  # [2, T, K, H] to [2K, T, H]
        return kv.astype(jnp.float32).transpose(0, 2, 1, 3).reshape(2 * num_kv, -1, head_dim)

    def dot(a: jax.Array, b: jax.Array, axis: int = 2) -> jax.Array:
        return lax.dot_general(a, b, (((axis,), (1,)), ((0,), (0,))), precision=lax.Precision.HIGHEST)

    every, is_fitted = by_head(kv), fitted[:, None]
    old = jnp.where(is_fitted, by_head(kv.at[:, positions].get(mode="clip")), 0)
    moved = jnp.where(is_fitted, by_head(new) - old, 0)
    count = jnp.maximum(fitted.sum(), 1).astype(jnp.float32)
    mean, mean_moved = (each.sum(1, keepdims=True) / count for each in (old, moved))
    centred, rest = (jnp.where(is_fitted, each, 0) for each in (old - mean, moved - mean_moved))
    gram = dot(centred, centred, axis=1)
    size = jnp.trace(gram, axis1=1, axis2=2)[:, None, None] / count + 1e-12
    eye = jnp.eye(head_dim, dtype=jnp.float32)
    ridged = gram + _RIDGE * size * eye  # Its eigenvalues are from `_RIDGE` to `_RIDGE + count` times `size`.
    inverse = 2 / ((2 * _RIDGE + count) * size) * eye
    for _ in range(math.ceil(math.log2(_LN_TOLERANCE * (1 + new.shape[1] / (2 * _RIDGE))))):
        inverse = dot(inverse, 2 * eye - dot(ridged, inverse))
    linear = dot(inverse, dot(centred, rest, axis=1))
    carried = dot(every, eye + linear) + mean_moved - dot(mean, linear)
    carried = carried.reshape(2, num_kv, -1, head_dim).transpose(0, 2, 1, 3)
    return jnp.where(moves[:, None, None], carried.astype(kv.dtype), kv)


@partial(jax.jit, static_argnames=("config", "sharding"))
def kv_deviation(
    config: ModelConfig,
    layer_params: Params,
    x: jax.Array,
    positions: jax.Array,
    kv: jax.Array,
    sharding: ModelSharding | None = None,
) -> jax.Array:
    """How far the tokens' KV at a layer is from what is stored: sums of squared differences, f32 `[n]`.

    Keys are compared unrotated, which is the same as rotated: a rotation changes no distance.

    Args:
      positions: i32 `[n]`, places in `kv`; what padding at S or beyond gives means nothing.
    """
    new: LayerKV = Layer(config).apply(variables_of(layer_params), x, method=Layer.new_kv)  # type: ignore[assignment]
    found = jnp.concatenate([new.k, new.v], axis=0)
    moved = found.astype(jnp.float32) - kv.at[:, positions].get(mode="clip").astype(jnp.float32)
    return constrain((moved**2).sum((0, 2, 3)), sharding)


@jax.jit
def take_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Some rows of `x [1, n, F]`, i32 `[n]` to `[1, n, F]`; what is out of range gives the last."""
    return x.at[:, rows].get(mode="clip")


@partial(jax.jit, static_argnames=("config", "num_tokens", "num_rows", "sharding"))
def choose_deviating(
    config: ModelConfig,
    layer_params: Params,
    x: jax.Array,
    places: jax.Array,
    kv: jax.Array,
    always: jax.Array,
    num_tokens: int,
    num_rows: int,
    sharding: ModelSharding | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The tokens that are computed from a layer on: some in any case, and those whose KV deviates most at it.

    Args:
      places: i32 `[n]`, increasing; padding from `NOWHERE` on.
      always: bool `[S]`, places whose tokens are computed in any case.
      num_tokens: how many, at least as many as are computed in any case; static.
      num_rows: as many or more; static.

    Returns:
      `x [1, num_rows, F]` and their places i32 `[num_rows]`, increasing; padding as in `places`.
    """
    deviation = kv_deviation(config, layer_params, x, places, kv, sharding)
    is_always = always.at[places].get(mode="fill", fill_value=False)
    scores = jnp.where(is_always, jnp.inf, jnp.where(places < kv.shape[1], deviation, -jnp.inf))
    chosen = jnp.sort(lax.top_k(scores, num_tokens)[1])
    rows = jnp.concatenate([chosen, jnp.full(num_rows - num_tokens, chosen[-1], chosen.dtype)])
    padding = NOWHERE + jnp.arange(num_rows, dtype=places.dtype)
    return constrain(x[:, rows], sharding), jnp.where(jnp.arange(num_rows) < num_tokens, places[rows], padding)


@jax.jit
def fresh_copy(kv: jax.Array) -> jax.Array:
    """The same in a buffer of its own."""
    return jnp.copy(kv)
