"""Attention over pages: the KV of many contexts in one pool, unrotated; a row's page numbers say what is its own.

A step computes some tokens of each of several contexts, a row each: of one that decodes its last, of a prompt many.

    tokens      a0 a1 a2 a3 | b0 | c0 c1 | . .           starts 0 4 5 7, of 9: the last two are padding
    places       8  9 10 11    5    0  1   0 0           increasing in a row; where tokens are computed anew, with gaps
    table       a: 3 7 . .   b: 1 4 . .   c: 6 . . .     page 3 has places 0 to 7 of a, where pages have 8

The tokens' KV is put into its pages first; then each token attends to all of its row up to itself. How long anything is
is known at run time alone. Keys are rotated as they are read, at the places that they have then: so a context may be
cut, shared and kept as it is. What lies behind a row's last token, NaN included, cannot reach a result.

Shapes: T tokens of all rows (padded), n rows, P pages of so many tokens, M pages of a row at most, N query heads, K KV
heads, G = N / K, H head dim, C = M pages' tokens.

Not here: which pages are whose (device.pages), attention over one array (attention), over latents (latent_attention),
kernels (gpu_attention, tpu_attention, cpu_kernels).
Source: paged attention is vLLM's (Kwon et al., SOSP 2023).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ca_jax import backend
from ca_jax.models import cpu_kernels, gpu_attention, rope, tpu_attention
from ca_jax.models.attention import MASKED, accumulated, dot, nothing
from ca_jax.models.kv import LayerKV, scaled_keys, value_dim, values_of

PagedAttention = Literal["blocks"] | backend.Kernel
"""How `attend_pages` is computed. `blocks`: queries in blocks, a page at a time, on any backend; else a kernel."""

QUERY_BLOCK = 64
"""Queries of a row that are computed together."""


class Rows(NamedTuple):
    """What a step computes of which contexts."""

    table: jax.Array
    """i32 `[n, M]`, numbers of each row's pages, in order; any number where there is none."""
    starts: jax.Array
    """i32 `[n + 1]`, the first of each row's tokens among all, and one past the last."""
    places: jax.Array
    """i32 `[T]` or more, the place of each token in its row's context, increasing in a row; of padding anything."""


def attend_pages(
    q: jax.Array,
    new: LayerKV | None,
    pages: jax.Array,
    rows: Rows,
    rotation: rope.Rotation,
    window: int | None = None,
    implementation: PagedAttention | None = None,
    *,
    one_each: bool = False,
    has_gaps: bool = False,
    cap: float | None = None,
    sinks: jax.Array | None = None,
    key_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Puts new tokens' KV into the pages, and has each token attend to its row up to itself.

    Args:
      q: `[T, N, H]`, unrotated.
      new: the tokens' KV `[1, T, K, H]`, unrotated; None: it is in the pages.
      pages: `[P, 2, K, page, H]` (0 keys, 1 values), or `[P, 1, K, page, H]` where they are one, see `values_of`;
        unrotated; in place where they are donated.
      rows: whose the tokens are.
      rotation: of all places, f32 `[C', R/2]`, C' at least C.
      window: how many tokens a token sees, the last ones, itself among them; None: all.
      implementation: None: the backend's.
      one_each: static: whether each row has one token at most, its own number among them.
      has_gaps: static: whether places of a row's tokens may have gaps.
      cap: static: scores are `cap * tanh(score / cap)`, as in Gemma 2; None: as they are.
      sinks: f32 `[N]`, a score of each head beside those of keys, that weighs on no value, as in gpt-oss; None: none.
      key_scale: f32 `[H]`, where values alone are kept: keys are these times it; None: keys are kept.

    Returns:
      `[T, N, H]` in q's dtype, padding anything finite; and the pages.
    """
    implementation = implementation or paged_attention(pages)
    if implementation == "cpu" and cap is None and sinks is None:
        return cpu_kernels.attend_pages(q, new, pages, tuple(rows), rotation, window)
    if new is not None:
        pages = write_rows(pages, new, rows, one_each=one_each, has_gaps=has_gaps)
    if implementation == "triton":
        given = gpu_attention.attend_pages_kernel(q, pages, rows, rotation, window, cap, sinks, one_each=one_each)
        return given, pages
    blocks = blocks_of(q, pages, rows, rotation, 1 if one_each else _block_tokens(q, pages, implementation))
    if implementation == "mosaic":
        out = _by_kernel(blocks, pages, rows, rotation, window, cap, sinks, key_scale)
    else:
        out, _ = by_pages(blocks, pages, rows, rotation, window, cap, sinks, key_scale, receives=False)
    return blocks.taken_apart(out, q), pages


def attention_received(
    q: jax.Array,
    pages: jax.Array,
    rows: Rows,
    rotation: rope.Rotation,
    window: int | None = None,
    *,
    one_each: bool = False,
    cap: float | None = None,
    sinks: jax.Array | None = None,
    key_scale: jax.Array | None = None,
) -> jax.Array:
    """The attention that each place receives in `attend_pages`, summed over query heads and the row's new tokens.

    Takes what that takes, of the pages those that it gave.

    Returns:
      f32 `[n, C]`, 0 behind each row's last token.
    """
    blocks = blocks_of(q, pages, rows, rotation, 1 if one_each else QUERY_BLOCK)
    return by_pages(blocks, pages, rows, rotation, window, cap, sinks, key_scale, receives=True)[1]


def paged_attention(pages: jax.Array | jax.ShapeDtypeStruct) -> PagedAttention:
    """What `attend_pages` is computed with on this backend, for pages of this kind on a device."""
    kernel = backend.here().kernel
    dtype, head_dim = jnp.dtype(pages.dtype), pages.shape[-1]
    if kernel == "cpu":
        is_served = cpu_kernels.serves_attention(dtype, head_dim)
    elif kernel == "triton":
        is_served = gpu_attention.fits_kernel(pages) and gpu_attention.kernel_is_served(dtype, head_dim)
    else:
        is_served = kernel == "mosaic" and tpu_attention.fits_kernel(pages)
    is_served &= pages.shape[1] == 2 or kernel == "mosaic"
    return kernel if is_served and kernel is not None else "blocks"


def write_rows(
    pages: jax.Array, new: LayerKV, rows: Rows, *, one_each: bool = False, has_gaps: bool = False
) -> jax.Array:
    """Puts new tokens' KV `[1, T, K, H]` into the pages `[P, 2, K, page, H]` of their rows; padding goes nowhere.

    The rest is as in `attend_pages`.
    """
    num_tokens, size = new.k.shape[1], pages.shape[3]
    token = jnp.arange(num_tokens)
    row = jnp.clip(jnp.searchsorted(rows.starts, token, side="right", method="compare_all") - 1, 0, len(rows.table) - 1)
    place = rows.places[:num_tokens]
    number = rows.table.at[row, place // size].get(mode="clip")
    is_there = token < rows.starts[-1]
    kv = jnp.stack([part[0] for part in new.parts], axis=1).astype(pages.dtype)  # [T, 2, K, H]
    if not backend.here().writes_whole_pages:
        return _put(pages, kv, number, place, is_there)
    # Whole pages: of one that several tokens are of, the first one's row of the update has them all.
    number = jnp.where(is_there, number, len(pages))
    if one_each:
        source = jnp.where((jnp.arange(size) == (place % size)[:, None]) & is_there[:, None], token[:, None], -1)
    else:
        slot = jnp.cumsum(jnp.append(True, number[1:] != number[:-1])) - 1  # Tokens of a page follow one another.
        num_rows, most_pages = rows.table.shape
        num_pages = num_rows * most_pages + 1 if has_gaps else num_tokens // size + 2 * num_rows
        num_pages = min(num_pages, num_tokens)
        source = (
            jnp.full((num_pages, size), -1)
            .at[jnp.where(is_there, slot, num_pages), place % size]
            .set(token, mode="drop", unique_indices=True)
        )
        number = jnp.full(num_pages, len(pages)).at[slot].set(number, mode="drop")
    return _mixed(pages, kv, number, source)


def write_places(pages: jax.Array, kv: jax.Array, table: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    """Puts KV `[2, S, K, H]` into the pages `[P, 2, K, page, H]` of one row.

    Args:
      table: i32 `[M]`, the row's pages.
      start: i32 scalar, the place of the first token.
      count: i32 scalar, how many tokens there are, the first of S.
    """
    kv = kv.astype(pages.dtype)
    if paged_attention(pages) == "cpu":
        return cpu_kernels.write_pages(kv, pages, table, start, count)
    size = pages.shape[3]
    if backend.here().writes_whole_pages:
        index = start // size + jnp.arange(-(-kv.shape[1] // size) + 1)
        token = index[:, None] * size + jnp.arange(size) - start
        source = jnp.where((token >= 0) & (token < count), token, -1)
        number = jnp.where((source >= 0).any(1), table.at[index].get(mode="clip"), len(pages))
        return _mixed(pages, kv.swapaxes(0, 1), number, source)
    token = jnp.arange(kv.shape[1])
    number = table.at[(start + token) // size].get(mode="clip")
    return _put(pages, kv.swapaxes(0, 1), number, start + token, token < count)


def read_places(pages: jax.Array, table: jax.Array, places: jax.Array) -> jax.Array:
    """The KV `[2, S, K, H]` at places i32 `[S]` of the row that `table`, i32 `[M]`, says the pages of."""
    size = pages.shape[3]
    if backend.here().writes_whole_pages:
        kv = take_pages(pages, table).transpose(1, 0, 3, 2, 4)
        return kv.reshape(kv.shape[0], -1, *kv.shape[3:]).at[:, places].get(mode="clip")
    return pages.at[table[places // size], :, :, places % size].get(mode="clip").swapaxes(0, 1)


def take_pages(pages: jax.Array, numbers: jax.Array) -> jax.Array:
    """Pages `[m, 2, K, page, H]` by their numbers, i32 `[m]`; numbers out of range give any."""
    if backend.here().kernel == "mosaic" and tpu_attention.fits_kernel(pages):
        return tpu_attention.take_pages(pages, jnp.clip(numbers, 0, len(pages) - 1))
    return pages.at[numbers].get(mode="clip")


def _put(pages: jax.Array, kv: jax.Array, numbers: jax.Array, places: jax.Array, is_there: jax.Array) -> jax.Array:
    """Puts KV `[T, 2, K, H]` into pages `[P, 2, K, page, H]`."""
    numbers = jnp.where(is_there, numbers, len(pages))  # Out of range: nowhere.
    return pages.at[numbers, :, :, places % pages.shape[3]].set(kv, mode="drop", unique_indices=True)


def _mixed(pages: jax.Array, kv: jax.Array, numbers: jax.Array, source: jax.Array) -> jax.Array:
    """Pages `[P, 2, K, page, H]` with some of them mixed: of KV `[T, 2, K, H]` those that `source` says.

    Args:
      numbers: i32 `[m]`, which pages; out of range: nowhere.
      source: i32 `[m, page]`, a token of `kv` for each place, -1 where what is there stays.
    """
    is_new = (source >= 0)[:, None, None, :, None]
    new = kv.at[jnp.maximum(source, 0)].get(mode="clip").transpose(0, 2, 3, 1, 4)
    mixed = jnp.where(is_new, new, take_pages(pages, numbers))
    return pages.at[numbers].set(mixed, mode="drop", unique_indices=True)


class Blocks(NamedTuple):
    """Queries in blocks, each of one row."""

    queries: jax.Array
    """`[b, K, G, block, H]`, rotated and scaled, in the pages' dtype."""
    row: jax.Array
    """i32 `[b]`."""
    place: jax.Array
    """i32 `[b, block]`, -1 of padding."""
    token: jax.Array
    """i32 `[b, block]`, among all; out of range of padding."""

    @property
    def is_own(self) -> jax.Array:
        """Which are no padding."""
        return self.place >= 0

    def own(self) -> jax.Array:
        """Places of queries in their order with heads, i32 `[b, G block]`."""
        return jnp.tile(self.place, (1, self.queries.shape[2]))

    def first_page(self, size: int, window: int | None) -> jax.Array:
        """The first page that any of a block sees, i32 `[b]`."""
        if window is None:
            return jnp.zeros_like(self.row)
        first = jnp.where(self.is_own, self.place, jnp.iinfo(jnp.int32).max).min(1)
        return jnp.maximum(first - window + 1, 0) // size

    def of_heads(self, sinks: jax.Array) -> jax.Array:
        """What is of each head, `[N]`, for each query, `[K, G block]`."""
        num_kv, groups, block = self.queries.shape[1:4]
        return jnp.repeat(sinks.reshape(num_kv, groups), block, axis=1)

    def taken_apart(self, out: jax.Array, q: jax.Array) -> jax.Array:
        """What came out, `[b, K, G block, H]`, H of values, as `[T, N, H]` like q."""
        (b, num_kv, groups, block, _), width = self.queries.shape, out.shape[-1]
        out = out.reshape(b, num_kv, groups, block, width).transpose(0, 3, 1, 2, 4).reshape(b, block, -1, width)
        return (
            jnp.zeros((*q.shape[:2], width), q.dtype)
            .at[self.token]
            .set(out.astype(q.dtype), mode="drop", unique_indices=True)
        )


def _block_tokens(q: jax.Array, pages: jax.Array, implementation: PagedAttention) -> int:
    groups = q.shape[1] // pages.shape[2]
    return max(tpu_attention.MOST_QUERIES // groups, 1) if implementation == "mosaic" else QUERY_BLOCK


def blocks_of(q: jax.Array, pages: jax.Array, rows: Rows, rotation: rope.Rotation, block: int) -> Blocks:
    """Queries `[T, N, H]`, unrotated, in blocks of so many tokens; those of a row follow one another."""
    num_tokens, _, head_dim = q.shape
    num_rows = len(rows.table)
    num_blocks = num_tokens if block == 1 else min(num_tokens // block + num_rows, num_tokens)
    per_row = (rows.starts[1:] - rows.starts[:-1] + block - 1) // block
    ends = jnp.cumsum(per_row)
    index = jnp.arange(num_blocks)
    row = jnp.minimum(jnp.searchsorted(ends, index, side="right", method="compare_all"), num_rows - 1)
    offset = ((index - ends[row] + per_row[row]) * block)[:, None] + jnp.arange(block)
    token = rows.starts[row][:, None] + offset  # [blocks, block]
    is_own = (token < rows.starts[row + 1][:, None]) & (index < ends[-1])[:, None]
    token, place = jnp.where(is_own, token, num_tokens), jnp.where(is_own, rows.places.at[token].get(mode="clip"), -1)
    turned = rope.rotate(q.at[token].get(mode="clip"), at_places(rotation, place))
    scaled = (turned.astype(jnp.float32) / math.sqrt(head_dim)).astype(pages.dtype)
    queries = scaled.reshape(num_blocks, block, pages.shape[2], -1, head_dim).transpose(0, 2, 3, 1, 4)
    return Blocks(queries, row, place, token)


def _by_kernel(
    blocks: Blocks,
    pages: jax.Array,
    rows: Rows,
    rotation: rope.Rotation,
    window: int | None,
    cap: float | None,
    sinks: jax.Array | None,
    key_scale: jax.Array | None,
) -> jax.Array:
    """As a TPU is best at it: `[b, K, G block, H]`, H of values."""
    b, num_kv, *of_block, head_dim = blocks.queries.shape
    size, num_queries = pages.shape[3], math.prod(of_block)
    more = -num_queries % tpu_attention.LEAST_QUERIES
    queries = jnp.pad(blocks.queries.reshape(b, num_kv, num_queries, head_dim), ((0, 0), (0, 0), (0, more), (0, 0)))
    own = jnp.pad(blocks.own(), ((0, 0), (0, more)), constant_values=-1)
    of_heads = None if sinks is None else jnp.pad(blocks.of_heads(sinks), ((0, 0), (0, more)))
    last = blocks.place.max(1)
    bounds = jnp.stack([blocks.row, blocks.first_page(size, window), jnp.where(last < 0, 0, last // size + 1)])
    given = (queries, own, bounds, rows.table, pages, rotation)
    out = tpu_attention.attend_blocks(*given, window, cap, of_heads, key_scale)
    return out[:, :, :num_queries]


def by_pages(
    blocks: Blocks,
    pages: jax.Array,
    rows: Rows,
    rotation: rope.Rotation,
    window: int | None = None,
    cap: float | None = None,
    sinks: jax.Array | None = None,
    key_scale: jax.Array | None = None,
    *,
    receives: bool,
) -> tuple[jax.Array, jax.Array]:
    """What attention gives `[b, K, G block, H]`, and, if that is wanted, what each place receives of it f32 `[n, C]`.

    Each block reads its row's pages one after the other, with a running softmax; blocks of one token all at once.
    """
    size, block = pages.shape[3], blocks.queries.shape[3]
    num_rows, capacity = len(rows.table), rows.table.shape[1] * size
    rotary_dim = 2 * rotation.cos.shape[-1]
    num_values = value_dim(pages.shape[-1], pages.shape[1], rotary_dim)

    def attend(
        queries: jax.Array, row: jax.Array, own: jax.Array, first_page: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Blocks `[b, K, R, H]` of rows `[b]`, their queries' places `[b, R]`."""
        last, own = own.max(1), own[:, None, :, None]  # [b, 1, R, 1]
        num_pages = jnp.where(last < 0, 0, last // size + 1 - first_page).max()

        def scores_of(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            """Scores f32 `[b, K, R, page]` of the blocks' i-th pages, their values and where these are."""
            where = (first_page + i)[:, None] * size + jnp.arange(size)  # [b, page]
            kv = take_pages(pages, rows.table.at[row, first_page + i].get(mode="clip"))
            turning = rope.Rotation(*(part[:, None] for part in at_places(rotation, where)))
            keys = rope.rotate(scaled_keys(kv[:, 0], key_scale)[..., None, :], turning)[..., 0, :]
            is_there = (where <= last[:, None])[:, None, :, None]
            seen = where[:, None, None, :] <= own
            if window is not None:
                seen &= where[:, None, None, :] > own - window
            scores = dot(queries, keys, (3, 3), 2)
            scores = jnp.where(seen, scores if cap is None else cap * jnp.tanh(scores / cap), MASKED)
            values = values_of(kv[:, 0], kv[:, 1] if kv.shape[1] > 1 else None, rotary_dim)
            return scores, jnp.where(is_there, values, 0), where

        def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            scores, values, _ = scores_of(i)
            return accumulated(carry, scores, lambda weights: dot(weights.astype(values.dtype), values, (3, 2), 2))

        top, total, out = nothing((*queries.shape[:-1], num_values))
        if sinks is not None:
            top, total = jnp.broadcast_to(blocks.of_heads(sinks), top.shape), jnp.ones_like(total)
        top, total, out = lax.fori_loop(0, num_pages, body, (top, total, out))
        total = jnp.maximum(total, 1e-30)[..., None]
        if not receives:
            return out / total, jnp.zeros((len(row), 0))

        def share(i: jax.Array, received: jax.Array) -> jax.Array:
            scores, _, where = scores_of(i)
            weights = jnp.where((own >= 0) & (scores > MASKED), jnp.exp(scores - top[..., None]) / total, 0)
            return received.at[jnp.arange(len(row))[:, None], where].add(weights.sum((1, 2)), mode="drop")

        return out / total, lax.fori_loop(0, num_pages, share, jnp.zeros((len(row), capacity)))

    b, num_kv, *_, head_dim = blocks.queries.shape
    args = (
        blocks.queries.reshape(b, num_kv, -1, head_dim),
        blocks.row,
        blocks.own(),
        blocks.first_page(size, window),
    )
    if block == 1:
        out, received = attend(*args)
    else:
        one = tuple(part[:, None] for part in args)
        out, received = (part[:, 0] for part in lax.map(lambda args: attend(*args), one))
    return out, jax.ops.segment_sum(received, jnp.where(blocks.is_own[:, 0], blocks.row, num_rows), num_rows)


def at_places(rotation: rope.Rotation, places: jax.Array) -> rope.Rotation:
    """Of the rotations of all places those of some."""
    return rope.Rotation(*(part.at[places].get(mode="clip") for part in rotation))
