"""The jitted functions that move KV into pages, between them and out of them. Each says what it donates.

Shapes as in `steps`: P pages, M pages of a row, S places of history, L K H as in models. `sharding` is static.

Not here: what is computed (steps), which pages are whose (pages).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from ca_jax.device.steps import KV_HEADS, PAGES, STEP_KV, handed_out
from ca_jax.models import paged_attention as paged
from ca_jax.models.config import ModelConfig
from ca_jax.models.kv import quantize, unpacked
from ca_jax.models.sharding import ModelSharding, by_device, constrain


@partial(jax.jit, static_argnames=("config", "num_pages", "page_tokens", "dtype", "sharding"))
def make_pages(
    config: ModelConfig, num_pages: int, page_tokens: int, dtype: str, sharding: ModelSharding | None = None
) -> list[jax.Array]:
    """Per layer `[P, 2, K, page, H]`, all zeros, in buffers of their own."""
    shapes = map(config.kv_shape, range(config.num_layers))
    pages = [(num_pages, parts, num_kv, page_tokens, width) for parts, num_kv, width in shapes]
    return [constrain(jnp.zeros(shape, dtype), sharding, PAGES) for shape in pages]


@partial(jax.jit, static_argnames=("sharding",), donate_argnames=("pages",))
def fill_pages(
    pages: jax.Array,
    kv: jax.Array,
    table: jax.Array,
    part: jax.Array,
    start: jax.Array,
    count: jax.Array,
    sharding: ModelSharding | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Puts one layer's unrotated KV `[2, S, K, H]`, or int8 `[2, S, K, H + 2]`, into a row's pages. Donates the pages.

    Args:
      table: i32 `[M]`, the row's pages among its part's.
      part: i32 scalar, that the row is in.
      start: i32 scalar, the place of the first token.
      count: i32 scalar, tokens that count, the first ones.

    Returns:
      The pages, and a scalar that is ready when they are, and outlives them.
    """

    def fill(
        pages: jax.Array, kv: jax.Array, table: jax.Array, part: jax.Array, start: jax.Array, count: jax.Array
    ) -> jax.Array:
        own = jnp.where(_is_own(part, sharding), count, 0)
        return paged.write_places(pages, unpacked(kv, pages.dtype), table, start, own)

    of_device = by_device(fill, sharding, (PAGES, KV_HEADS, (), (), (), ()), PAGES)
    pages = of_device(pages, kv, table, part, start, count)
    return pages, constrain(start + count, sharding)


def _is_own(part: jax.Array, sharding: ModelSharding | None) -> jax.Array | bool:
    """Whether a part of the rows is this device's."""
    return True if sharding is None or sharding.num_data == 1 else part == lax.axis_index("data")


@partial(jax.jit, static_argnames=("num_tokens", "packs", "sharding"))
def read_pages(
    pages: jax.Array,
    table: jax.Array,
    start: jax.Array,
    num_tokens: int,
    packs: bool = False,
    sharding: ModelSharding | None = None,
) -> jax.Array:
    """One layer's unrotated KV of places of a row, `[2, D S, K, H]` or packed as int8, its part's at the part's S.

    Args:
      table: i32 `[M]`, the row's pages among its part's.
      start: i32 scalar, the first place.
      num_tokens: S, static.
    """

    def read(pages: jax.Array, table: jax.Array, start: jax.Array) -> jax.Array:
        size = pages.shape[3]
        first = start // size
        own = table.at[first + jnp.arange(num_tokens // size + 2)].get(mode="clip")
        return paged.read_places(pages, own, start - first * size + jnp.arange(num_tokens))

    kv = by_device(read, sharding, (PAGES, (), ()), STEP_KV)(pages, table, start)
    return constrain(quantize(kv) if packs else kv, sharding, handed_out(sharding))


@partial(jax.jit, static_argnames=("sharding",), donate_argnames=("pages",))
def cut_pages(
    pages: Sequence[jax.Array],
    tables: jax.Array,
    part: jax.Array,
    places: jax.Array,
    count: jax.Array,
    drift: jax.Array | None = None,
    drifts_from: jax.Array | None = None,
    sharding: ModelSharding | None = None,
) -> list[jax.Array]:
    """Moves the tokens of a row that stay to its beginning. Nothing is rotated that would have to be turned. Donates.

    Args:
      pages: per layer `[P, 2, K, page, H]`.
      tables: i32 `[2, M]`, the pages that the tokens are in, and those that they go to.
      part: i32 scalar, that the row is in.
      places: i32 `[C]`, where the token of each place comes from; anything where none comes.
      count: i32 scalar, tokens that stay.
      drift: f32 `[L, 2, K, H]`, added to keys and values; None adds nothing.
      drifts_from: i32 scalar, with a drift: the new place of the first of the tokens that drift.
    """

    def cut(
        pages: jax.Array,
        tables: jax.Array,
        part: jax.Array,
        places: jax.Array,
        count: jax.Array,
        drift: jax.Array | None,
        drifts_from: jax.Array | None,
    ) -> jax.Array:
        kv = paged.read_places(pages, tables[0], places)
        if drift is not None and drifts_from is not None:
            drifts = (jnp.arange(len(places)) >= drifts_from)[:, None, None]
            kv = jnp.where(drifts, kv + drift[:, None].astype(kv.dtype), kv)
        own = jnp.where(_is_own(part, sharding), count, 0)
        return paged.write_places(pages, kv, tables[1], jnp.int32(0), own)

    of_device = by_device(cut, sharding, (PAGES, (), (), (), (), (None, "kv_heads"), ()), PAGES)
    drifts, moved = [None] * len(pages) if drift is None else list(drift), []
    for of_layer, each in zip(pages, drifts, strict=True):
        of_layer = of_device(of_layer, tables, part, places, count, each, drifts_from)
        of_layer, places = lax.optimization_barrier((of_layer, places))  # One layer's KV is out of pages at a time.
        moved.append(of_layer)
    return moved


@partial(jax.jit, static_argnames=("sharding",), donate_argnames=("pages",))
def copy_page(
    pages: Sequence[jax.Array],
    part: jax.Array,
    source: jax.Array,
    target: jax.Array,
    sharding: ModelSharding | None = None,
) -> list[jax.Array]:
    """Copies a page of each layer's `[P, 2, K, page, H]` over another of its part, i32 scalars. Donates the pages."""

    def copy(pages: jax.Array, part: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
        own = jnp.where(_is_own(part, sharding), target, len(pages))  # Out of range: nowhere.
        return pages.at[own].set(pages[source], mode="drop")

    of_device = by_device(copy, sharding, (PAGES, (), (), ()), PAGES)
    return [of_device(of_layer, part, source, target) for of_layer in pages]
