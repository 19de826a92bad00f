"""One layer of selective recompute: some tokens over the KV of all, and what it says of the others.

Everything here is pure. A context's KV lies in pages, in a row of its own (`models.paged_attention`), the first of its
part; the rows of the other parts have no tokens. Tokens are computed as those of a prompt are, at places with gaps
between them; what they find there gives way to theirs.

Shapes: D parts, T' tokens of a part of which the first n are computed, M pages of a row, C places of these, K KV heads,
H head dim, F embed. `config`, `num_tokens` (n), `kind` and `sharding` are static.

Not here: which tokens and in which layers (plan), one sequence through all layers (recomputer).
Source: CacheBlend (Yao et al., EuroSys 2025), section 4.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from ca_jax.device.steps import PAGES, ROWS, TOKEN_KV, Params, apply, through_layer, variables_of
from ca_jax.models import paged_attention as paged
from ca_jax.models import rope
from ca_jax.models.config import LayerKind, ModelConfig
from ca_jax.models.kv import LayerKV
from ca_jax.models.sharding import ModelSharding, by_device, constrain
from ca_jax.models.transformer import Layer

_RIDGE = 3.0  # Of the fit, times the mean squared length of what it is fitted to.
_LN_TOLERANCE = 16.0  # Of the fit, the natural logarithm of one over it: what f32 tells apart.
_MOVED_TOKENS = 1024  # Places that are moved at a time.


@partial(
    jax.jit,
    static_argnames=("config", "num_tokens", "kind", "sharding", "packs"),
    donate_argnames=("x", "pages"),
)
def recompute_layer(
    config: ModelConfig,
    layer_params: Params,
    x: jax.Array,
    pages: jax.Array,
    rows: paged.Rows,
    table: rope.Rotation,
    num_tokens: int,
    kind: LayerKind,
    carried: tuple[jax.Array, ...] = (),
    sharding: ModelSharding | None = None,
    packs: bool = False,
    adapters: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Computes one layer of some tokens anew, over the KV of all. Donates `x` and the pages.

    Args:
      x: `[D, T', F]`.
      pages: this layer's, `[P, 2, K, page, H]`, or those that it reads.
      rows: of each part one with these tokens, or none of them.
      table: the rotations of all places.
      carried: bool `[D, n]` and `[D, C]`: by which of these tokens others move, and which places do, see `carry_along`;
        empty: the others stay.
      packs: static: return the KV in int8, `[2, D n, K, H + 2]`.
      adapters: as of `steps.layer_step`.

    Returns:
      `x` for the next layer; the tokens' unrotated KV `[2, D n, K, H]`, or packed, None where the layer has none of its
      own; and the pages, with that in their places.
    """
    part, (kv, _, pages) = through_layer(
        config,
        layer_params,
        x[:, :num_tokens],
        pages,
        rows,
        table,
        kind,
        0,
        one_each=False,
        with_attention=False,
        sharding=sharding,
        has_gaps=True,
        packs=packs,
        move=carry_along if carried else None,
        moved=carried,
        adapters=None if adapters is None else adapters[:, :num_tokens],
    )
    return constrain(lax.dynamic_update_slice_in_dim(x, part, 0, 1), sharding, ROWS), kv, pages


def carry_along(pages: jax.Array, new: LayerKV, rows: paged.Rows, fitted: jax.Array, moves: jax.Array) -> jax.Array:
    """Moves KV as some tokens' has moved: by the map of it, a ridge regression, that says best how these moved.

    The ridge bounds how ill the regression can be conditioned, so that a fixed number of Newton's steps inverts it:
    matrix products alone. LAPACK, asked for so small a matrix in each layer, took 2 to 40 times as long, the longer the
    more other threads computed.

    Args:
      pages: `[P, 2, K, page, H]`.
      new: `[1, n, K, H]`, the tokens' KV as it is now.
      rows: the first of them has the tokens.
      fitted: bool `[n]`, tokens that the map is fitted to: none that has no KV in the pages.
      moves: bool `[C]`, places that move.
    """
    num_parts, num_kv, size, head_dim = pages.shape[1:]
    num_tokens, own = new.k.shape[1], rows.table[0]

    def by_head(kv: jax.Array) -> jax.Array:  # [2, n, K, H] to [2K, n, H]
        return kv.astype(jnp.float32).transpose(0, 2, 1, 3).reshape(num_parts * num_kv, -1, head_dim)

    def dot(a: jax.Array, b: jax.Array, axis: int = 2) -> jax.Array:
        return lax.dot_general(a, b, (((axis,), (1,)), ((0,), (0,))), precision=lax.Precision.HIGHEST)

    is_fitted = fitted[:, None]
    places = jnp.where(fitted, rows.places[:num_tokens], 0)
    old = jnp.where(is_fitted, by_head(paged.read_places(pages, own, places)), 0)
    moved = jnp.where(is_fitted, by_head(jnp.concatenate(new.parts).astype(pages.dtype)) - old, 0)
    count = jnp.maximum(fitted.sum(), 1).astype(jnp.float32)
    mean, mean_moved = (each.sum(1, keepdims=True) / count for each in (old, moved))
    centred, rest = (jnp.where(is_fitted, each, 0) for each in (old - mean, moved - mean_moved))
    gram = dot(centred, centred, axis=1)
    scale = jnp.trace(gram, axis1=1, axis2=2)[:, None, None] / count + 1e-12
    eye = jnp.eye(head_dim, dtype=jnp.float32)
    ridged = gram + _RIDGE * scale * eye  # Its eigenvalues are from `_RIDGE` to `_RIDGE + count` times `scale`.
    inverse = 2 / ((2 * _RIDGE + count) * scale) * eye
    for _ in range(math.ceil(math.log2(_LN_TOLERANCE * (1 + num_tokens / (2 * _RIDGE))))):
        inverse = dot(inverse, 2 * eye - dot(ridged, inverse))
    linear = dot(inverse, dot(centred, rest, axis=1))
    offset = mean_moved - dot(mean, linear)

    some = min(max(_MOVED_TOKENS // size, 1), len(own))  # Pages at a time.
    padded = -len(own) % some
    numbers = jnp.pad(own, (0, padded)).reshape(-1, some)
    moving = jnp.pad(moves, (0, padded * size)).reshape(-1, some, size)

    def move(i: jax.Array, pages: jax.Array) -> jax.Array:
        kv = paged.take_pages(pages, numbers[i])  # [some, 2, K, page, H]
        heads = kv.astype(jnp.float32).transpose(1, 2, 0, 3, 4).reshape(num_parts * num_kv, -1, head_dim)
        carried = dot(heads, eye + linear) + offset
        carried = carried.reshape(num_parts, num_kv, some, size, head_dim).transpose(2, 0, 1, 3, 4).astype(kv.dtype)
        where = jnp.where(moving[i].any(1), numbers[i], len(pages))  # Out of range: nowhere.
        return pages.at[where].set(jnp.where(moving[i][:, None, None, :, None], carried, kv), mode="drop")

    last = jnp.max(jnp.where(moving.any((1, 2)), jnp.arange(len(numbers)) + 1, 0))
    return lax.fori_loop(0, last, move, pages)


def kv_kind(config: ModelConfig, layer: int) -> LayerKind:
    """A layer's kind as far as what it keeps of a token goes: of layers that keep the same it is the same."""
    own = config.kind_of(layer)
    return config.kind_of(0)._replace(num_kv_heads=own.num_kv_heads, head_dim=own.head_dim, has_values=own.has_values)


@partial(jax.jit, static_argnames=("config", "num_tokens", "kind", "sharding"))
def choose_deviating(
    config: ModelConfig,
    layer_params: Params,
    x: jax.Array,
    pages: jax.Array,
    rows: paged.Rows,
    always: jax.Array,
    count: jax.Array,
    num_tokens: int,
    kind: LayerKind,
    sharding: ModelSharding | None = None,
    adapters: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The tokens that are computed from a layer on: some in any case, and those whose KV deviates most at it.

    How far a token's KV is from what is stored is the sum of squared differences. Keys are compared unrotated, which is
    the same as rotated: a rotation changes no distance.

    Args:
      x: `[D, T', F]`, what goes into the layer.
      rows: as in `recompute_layer`.
      always: bool `[D, C]`, places whose tokens are computed in any case.
      count: i32 scalar, how many tokens stay, at least as many as are computed in any case.
      kind: static, as `kv_kind` gives it.
      adapters: as of `steps.layer_step`; of one part all alike.

    Returns:
      `x [D, T', F]`, theirs first, and the places of all, as in `rows`.
    """

    def deviation(new: LayerKV, pages: jax.Array, rows: tuple[jax.Array, ...]) -> jax.Array:
        own = paged.Rows(*rows)
        found = jnp.concatenate(new.parts).astype(jnp.float32)
        stored = paged.read_places(pages, own.table[0], own.places[:num_tokens]).astype(jnp.float32)
        return ((found - stored) ** 2).sum((0, 2, 3))[None, None]

    variables = variables_of(layer_params, None if adapters is None else adapters[:, :num_tokens])
    new: LayerKV = apply(Layer(config, kind, sharding), variables, x[:, :num_tokens], method=Layer.new_kv)
    of_device = by_device(deviation, sharding, (TOKEN_KV, PAGES, (ROWS, ROWS, ROWS)), ("kv_heads", "batch"))
    deviations = of_device(new, pages, tuple(rows)).sum(0)  # [D, n]
    num_parts, width = x.shape[:2]
    places = rows.places.reshape(num_parts, -1)
    own = places[:, :num_tokens]
    is_there = jnp.arange(num_tokens) < rows.starts.reshape(num_parts, -1)[:, -1:]
    scores = jnp.where(jnp.take_along_axis(always, own, axis=1), jnp.inf, deviations)
    rank = jnp.argsort(jnp.argsort(-jnp.where(is_there, scores, -jnp.inf), axis=1), axis=1)
    index = jnp.arange(width)
    stays = jnp.pad(rank < count, ((0, 0), (0, width - num_tokens)))
    order = jnp.argsort(jnp.where(stays, index, width + index), axis=1)
    chosen = jnp.take_along_axis(x, order[..., None], axis=1)
    places = jnp.take_along_axis(places, order, axis=1).ravel()
    return constrain(chosen, sharding, ROWS), constrain(places, sharding, ROWS)
