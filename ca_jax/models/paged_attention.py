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

Not here: which pages are whose (device.pages), attention over one array (attention), kernels (gpu_attention,
cpu_kernels).
Source: paged attention is vLLM's (Kwon et al., SOSP 2023).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ca_jax.models import cpu_kernels, gpu_attention, rope
from ca_jax.models.attention import MASKED, accumulated, dot, nothing
from ca_jax.models.kv import LayerKV

PagedAttention = Literal["blocks", "kernel", "cpu"]
"""How `attend_pages` is computed. `blocks`: queries in blocks, a page at a time, on any backend. `kernel` and `cpu`: a
kernel of ours for a GPU, and for a CPU."""

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
    new: LayerKV,
    pages: jax.Array,
    rows: Rows,
    rotation: rope.Rotation,
    window: int | None = None,
    implementation: PagedAttention | None = None,
    *,
    one_each: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Puts new tokens' KV into the pages, and has each token attend to its row up to itself.

    Args:
      q: `[T, N, H]`, unrotated.
      new: the tokens' KV `[1, T, K, H]`, unrotated.
      pages: `[P, 2, K, page, H]` (0 keys, 1 values), unrotated; in place where they are donated.
      rows: whose the tokens are.
      rotation: of all places, f32 `[C', R/2]`, C' at least C.
      window: how many tokens a token sees, the last ones, itself among them; None: all.
      implementation: None: the backend's.
      one_each: static: whether each row has one token at most, its own number among them.

    Returns:
      `[T, N, H]` in q's dtype, padding anything finite; and the pages.
    """
    implementation = implementation or paged_attention(pages)
    if implementation == "cpu":
        return cpu_kernels.attend_pages(q, new, pages, tuple(rows), rotation, window)
    pages = write_rows(pages, new, rows)
    if implementation == "kernel":
        return gpu_attention.attend_pages_kernel(q, pages, rows, rotation, window, one_each=one_each), pages
    out, _ = _by_blocks(q, pages, rows, rotation, window, 1 if one_each else QUERY_BLOCK, receives=False)
    return out, pages


def attention_received(
    q: jax.Array,
    pages: jax.Array,
    rows: Rows,
    rotation: rope.Rotation,
    window: int | None = None,
    *,
    one_each: bool = False,
) -> jax.Array:
    """The attention that each place receives in `attend_pages`, summed over query heads and the row's new tokens.

    Takes what that takes, of the pages those that it gave.

    Returns:
      f32 `[n, C]`, 0 behind each row's last token.
    """
    return _by_blocks(q, pages, rows, rotation, window, 1 if one_each else QUERY_BLOCK, receives=True)[1]


def paged_attention(pages: jax.Array | jax.ShapeDtypeStruct) -> PagedAttention:
    """What `attend_pages` is computed with on this backend, for pages of this kind on a device."""
    if cpu_kernels.serves_attention(pages.dtype, pages.shape[-1]):
        return "cpu"
    if jax.default_backend() != "gpu" or not gpu_attention.fits_kernel(pages):
        return "blocks"
    is_served = gpu_attention.kernel_is_served(jnp.dtype(pages.dtype), pages.shape[-1])
    return "kernel" if is_served else "blocks"


def write_rows(pages: jax.Array, new: LayerKV, rows: Rows) -> jax.Array:
    """Puts new tokens' KV `[1, T, K, H]` into the pages `[P, 2, K, page, H]` of their rows; padding goes nowhere."""
    token = jnp.arange(new.k.shape[1])
    row = jnp.searchsorted(rows.starts, token, side="right", method="compare_all") - 1
    row, place = jnp.clip(row, 0, len(rows.table) - 1), rows.places[: len(token)]
    number = rows.table.at[row, place // pages.shape[3]].get(mode="clip")
    return _put(pages, new, number, place, token < rows.starts[-1])


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
    token = jnp.arange(kv.shape[1])
    number = table.at[(start + token) // pages.shape[3]].get(mode="clip")
    return _put(pages, LayerKV(kv[:1], kv[1:]), number, start + token, token < count)


def read_places(pages: jax.Array, table: jax.Array, places: jax.Array) -> jax.Array:
    """The KV `[2, S, K, H]` at places i32 `[S]` of the row that `table`, i32 `[M]`, says the pages of."""
    size = pages.shape[3]
    return pages.at[table[places // size], :, :, places % size].get(mode="clip").swapaxes(0, 1)


def _put(pages: jax.Array, new: LayerKV, numbers: jax.Array, places: jax.Array, is_there: jax.Array) -> jax.Array:
    numbers = jnp.where(is_there, numbers, len(pages))  # Out of range: nowhere.
    kv = jnp.stack([new.k[0], new.v[0]], axis=1).astype(pages.dtype)  # [T, 2, K, H]
    return pages.at[numbers, :, :, places % pages.shape[3]].set(kv, mode="drop", unique_indices=True)


def _by_blocks(
    q: jax.Array,
    pages: jax.Array,
    rows: Rows,
    rotation: rope.Rotation,
    window: int | None,
    block: int,
    *,
    receives: bool,
) -> tuple[jax.Array, jax.Array]:
    """What attention gives `[T, N, H]`, and, if that is wanted, what each place receives of it f32 `[n, C]`.

    Each block is of one row, and reads that row's pages one after the other, with a running softmax; blocks of one
    token all at once.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv, size = pages.shape[2:4]
    num_rows, capacity = len(rows.table), rows.table.shape[1] * size
    num_blocks = num_tokens if block == 1 else min(num_tokens // block + num_rows, num_tokens)
    per_row = (rows.starts[1:] - rows.starts[:-1] + block - 1) // block
    ends = jnp.cumsum(per_row)
    index = jnp.arange(num_blocks)
    row = jnp.minimum(jnp.searchsorted(ends, index, side="right", method="compare_all"), num_rows - 1)
    offset = ((index - ends[row] + per_row[row]) * block)[:, None] + jnp.arange(block)
    token = rows.starts[row][:, None] + offset  # [blocks, block]
    is_own = (token < rows.starts[row + 1][:, None]) & (index < ends[-1])[:, None]
    token, place = jnp.where(is_own, token, num_tokens), jnp.where(is_own, rows.places.at[token].get(mode="clip"), -1)
    turned = rope.rotate(q.at[token].get(mode="clip"), _at(rotation, place))
    scaled = (turned.astype(jnp.float32) / math.sqrt(head_dim)).astype(pages.dtype)
    heads = scaled.reshape(num_blocks, block, num_kv, -1, head_dim).transpose(0, 2, 3, 1, 4)

    def attend(heads: jax.Array, row: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Blocks `[b, K, G, block, H]` of rows `[b]`, their tokens at places `[b, block]`, -1 for padding."""
        groups = heads.shape[2]
        queries = heads.reshape(len(row), num_kv, groups * block, head_dim)
        own = jnp.tile(place, (1, groups))[:, None, :, None]  # [b, 1, R, 1]
        last, first_page = place.max(1), jnp.zeros_like(row)
        if window is not None:
            first_page = jnp.maximum(jnp.where(place < 0, capacity, place).min(1) - window + 1, 0) // size
        num_pages = jnp.where(last < 0, 0, last // size + 1 - first_page).max()

        def scores_of(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            """Scores f32 `[b, K, R, page]` of the blocks' i-th pages, their values and where these are."""
            where = (first_page + i)[:, None] * size + jnp.arange(size)  # [b, page]
            kv = pages.at[rows.table.at[row, first_page + i].get(mode="clip")].get(mode="clip")
            turning = rope.Rotation(*(part[:, None] for part in _at(rotation, where)))
            keys = rope.rotate(kv[:, 0][..., None, :], turning)[..., 0, :]
            is_there = (where <= last[:, None])[:, None, :, None]
            seen = where[:, None, None, :] <= own
            if window is not None:
                seen &= where[:, None, None, :] > own - window
            scores = jnp.where(seen, dot(queries, keys, (3, 3), 2), MASKED)
            return scores, jnp.where(is_there, kv[:, 1], 0), where

        def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            scores, values, _ = scores_of(i)
            return accumulated(carry, scores, lambda weights: dot(weights.astype(values.dtype), values, (3, 2), 2))

        top, total, out = lax.fori_loop(0, num_pages, body, nothing(queries.shape))
        total = jnp.maximum(total, 1e-30)[..., None]
        given = (out / total).reshape(heads.shape)
        if not receives:
            return given, jnp.zeros((len(row), 0))

        def share(i: jax.Array, received: jax.Array) -> jax.Array:
            scores, _, where = scores_of(i)
            weights = jnp.where((own >= 0) & (scores > MASKED), jnp.exp(scores - top[..., None]) / total, 0)
            return received.at[jnp.arange(len(row))[:, None], where].add(weights.sum((1, 2)), mode="drop")

        return given, lax.fori_loop(0, num_pages, share, jnp.zeros((len(row), capacity)))

    if block == 1:
        out, received = attend(heads, row, place)
    else:
        one = (part[:, None] for part in (heads, row, place))
        out, received = (part[:, 0] for part in lax.map(lambda args: attend(*args), tuple(one)))
    out = out.transpose(0, 3, 1, 2, 4).reshape(num_blocks, block, num_heads, head_dim).astype(q.dtype)
    out = jnp.zeros_like(q).at[token].set(out, mode="drop", unique_indices=True)
    return out, jax.ops.segment_sum(received, jnp.where(is_own[:, 0], row, num_rows), num_rows)


def _at(rotation: rope.Rotation, places: jax.Array) -> rope.Rotation:
    return rope.Rotation(*(part.at[places].get(mode="clip") for part in rotation))
