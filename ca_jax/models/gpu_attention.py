"""Attention over pages as a GPU is best at it: a kernel of our own.

It is for 16-bit floats. It reads no key or value from behind a row's length, NaN included. Whether the device at hand
takes it is tried once, on small arrays, before the first use: `kernel_is_served`.

Shapes: T tokens, N query heads, K KV heads, H head dim, S shares, P pages.

Not here: who uses it, and the form that it replaces (paged_attention).
Source: flash attention (Dao, 2023); splitting keys over programs is flash decoding (Dao et al., 2023).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ca_jax import backend
from ca_jax.models import rope
from ca_jax.models.config import RopeConfig

_MASKED = -1e30
_LEAST_TILE = 16  # Fewer rows or columns than this no tensor core takes.
_MAX_SPLITS = 16
_HALF = (jnp.bfloat16, jnp.float16)


class Tiling(NamedTuple):
    """How the kernel divides its work among programs, and each among the lanes of a multiprocessor.

    None of it was timed on a device; `gpu_bench --sections=tuning` times others.
    """

    num_warps: int
    num_stages: int
    """Blocks of keys that are on their way at a time."""
    query_tile: int = 16384
    """Numbers of a program's queries in a pass, and of its result, which stays in registers."""
    key_tile: int = 2048
    """Numbers of the keys that a program reads at a time; of 4,096 an A100 spills registers."""
    num_programs: int = 256
    """As many as keep the memory of a GPU with 100-odd multiprocessors busy."""


DECODING, PROMPTS = Tiling(num_warps=4, num_stages=5), Tiling(num_warps=8, num_stages=3)
_WIDE_PROMPTS = PROMPTS._replace(query_tile=8192)  # Of heads of 256 numbers: of more queries an A100 spills registers.
_NARROW = 128
_WIDEST = 256  # Of heads of 512 numbers every tiling that was tried spills hundreds of bytes a thread.


def attend_pages_kernel(
    q: jax.Array,
    pages: jax.Array,
    rows: tuple[jax.Array, ...],
    rotation: tuple[jax.Array, jax.Array],
    window: int | None = None,
    cap: float | None = None,
    sinks: jax.Array | None = None,
    *,
    one_each: bool = False,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> jax.Array:
    """What `paged_attention.attend_pages` gives, over pages that the new tokens' KV is in already.

    A program takes a block of one row's tokens, one KV head, and a share of the keys that they see; shares are put
    together behind it. How long anything is is found at run time on the device: one compiled function serves all.

    Takes what that takes, and how the work is divided; None: as `DECODING` or `PROMPTS`. With `interpret` the kernel
    runs step by step, on any backend.
    """
    from jax.experimental import pallas as pl  # Here: a jax without it serves all the same, by another implementation.
    from jax.experimental.pallas import triton

    num_tokens, num_heads, head_dim = q.shape
    num_kv, page = pages.shape[2:4]
    tiling = tiling or (DECODING if one_each else PROMPTS if head_dim <= _NARROW else _WIDE_PROMPTS)
    num_keys = math.gcd(page, max(min(64, tiling.key_tile // _padded(head_dim)), _LEAST_TILE))
    groups = num_heads // num_kv
    block = 1 if one_each else max(min(128, tiling.query_tile // _padded(head_dim)) // groups, 1)
    blocks = _row_blocks(rows, num_tokens, block)
    places = rows[2][:num_tokens]
    most_keys = rows[0].shape[1] * page
    if window is not None:
        most_keys = min(most_keys, window + block)
    num_splits = _num_splits(tiling.num_programs, blocks.shape[1] * num_kv, -(-most_keys // num_keys))
    shares = (num_splits, num_tokens, num_heads)
    out, weight = pl.pallas_call(
        functools.partial(
            _kernel,
            num_queries=_padded(block * groups),
            num_keys=num_keys,
            num_splits=num_splits,
            window=window,
            cap=cap,
            has_sinks=sinks is not None,
        ),
        grid=(blocks.shape[1], num_kv, num_splits),
        out_shape=[
            jax.ShapeDtypeStruct((*shares, head_dim), q.dtype if num_splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct(shares, jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=interpret,
        name="attend_pages",
    )(blocks, places, rows[0], *rotation, q, pages, *([] if sinks is None else [sinks.astype(jnp.float32)]))
    if num_splits == 1:
        return out[0]
    return (out * jax.nn.softmax(weight, axis=0)[..., None]).sum(0).astype(q.dtype)


def _padded(size: int) -> int:
    """Rows or columns of a tile that so many fit in."""
    return max(_LEAST_TILE, 1 << (size - 1).bit_length())


def _num_splits(num_programs: int, num_pairs: int, num_blocks: int) -> int:
    """Into how many shares keys are divided, so that there is work for the whole device; a power of two."""
    wanted = min(-(-num_programs // num_pairs), num_blocks, _MAX_SPLITS)
    return 1 << (wanted.bit_length() - 1)


def _row_blocks(rows: tuple[jax.Array, ...], num_tokens: int, block: int) -> jax.Array:
    """Tokens in blocks, each of one row: i32 `[5, blocks]`, its row, its first token, how many it has, and the places
    of the first and behind the last of them.

    Padding is one more row, that sees nothing.
    """
    starts = jnp.append(rows[1], num_tokens)
    per_row = (starts[1:] - starts[:-1] + block - 1) // block
    ends = jnp.cumsum(per_row)
    index = jnp.arange(min((num_tokens + len(per_row) * (block - 1)) // block, num_tokens))
    row = jnp.minimum((index[:, None] >= ends).sum(1), len(per_row) - 1)
    token = starts[row] + (index - ends[row] + per_row[row]) * block
    count = jnp.clip(starts[row + 1] - token, 0, block)
    first, last = (rows[2].at[each].get(mode="clip") for each in (token, token + count - 1))
    stop = jnp.where((row < len(per_row) - 1) & (count > 0), last + 1, 0)
    return jnp.stack([row, token, count, first, stop]).astype(jnp.int32)


def _kernel(
    blocks: Any,
    places: Any,
    table: Any,
    cos: Any,
    sin: Any,
    q: Any,
    pages: Any,
    *refs: Any,
    num_queries: int,
    num_keys: int,
    num_splits: int,
    window: int | None,
    cap: float | None,
    has_sinks: bool,
) -> None:
    """A block's tokens over a share of the keys that they see, so many of a page at a time: `out [S, T, N, H]`, and its
    logarithmic `weight`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    *sinks, out, weight = refs
    head_dim, half = q.shape[2], cos.shape[1]
    page, groups, size = pages.shape[3], q.shape[1] // pages.shape[2], num_keys
    block, kv_head, split = (pl.program_id(axis) for axis in range(3))
    row, token, count, place, behind = (blocks[i, block] for i in range(5))
    query = jnp.arange(num_queries)
    offset, head = query // groups, kv_head * groups + query % groups
    is_own = (offset < count)[:, None]
    own = triton.load(places.at[(token + offset)[:, None]], mask=is_own, other=0)

    def tile_of(start: int, width: int, used: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As many columns as a tile has, and which of them are there, in the rows `[n, 1]` that are used."""
        column = jnp.arange(_padded(width))[None, :]
        return start + column, used & (column < width)

    def tile(ref: Any, *index: Any, start: int = 0, width: int, used: jax.Array) -> jax.Array:
        """`ref[*index, start : start + width]`, 0 in what is not there or not used."""
        column, mask = tile_of(start, width, used)
        return triton.load(ref.at[(*index, column)], mask=mask, other=0)

    def turned(scale: float, places: jax.Array, used: jax.Array, ref: Any, *index: Any) -> list[jax.Array]:
        """Heads turned to their places, in parts: the halves of what turns, and the rest."""
        c, s = (tile(of_places, places, width=half, used=used) for of_places in (cos, sin))
        columns = ((0, half), (half, half), (2 * half, head_dim - 2 * half))
        parts = [tile(ref, *index, start=start, width=width, used=used) for start, width in columns if width]
        first, second, *rest = (part.astype(jnp.float32) for part in parts)
        parts = [first * c - second * s, second * c + first * s, *rest]
        return [(part * scale).astype(pages.dtype) for part in parts]

    queries = turned(1 / math.sqrt(head_dim), own, is_own, q, (token + offset)[:, None], head[:, None])

    def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, result = carry
        number, key = table[row, i * size // page], jnp.arange(size)
        within, at = (i * size % page + key)[:, None], i * size + key
        is_there = (at < behind)[:, None]
        keys = turned(1, at[:, None], is_there, pages, number, 0, kv_head, within)
        values = tile(pages, number, 1, kv_head, within, width=head_dim, used=is_there)
        scores, *more = (triton.dot(part, of_keys.T) for part, of_keys in zip(queries, keys, strict=True))
        seen = (at[None, :] <= own) & is_own
        if window is not None:
            seen &= at[None, :] > own - window
        scores = sum(more, scores)
        scores = jnp.where(seen, scores if cap is None else cap * jnp.tanh(scores / cap), _MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp(scores - new_top[:, None])
        rescale = jnp.exp(top - new_top)
        result = result * rescale[:, None] + triton.dot(weights.astype(values.dtype), values)
        return new_top, total * rescale + weights.sum(-1), result

    first = 0 if window is None else jnp.maximum(place - window + 1, 0) // size
    stop = (behind + size - 1) // size
    share = (stop - first + num_splits - 1) // num_splits
    first += split * share
    top, total = jnp.full((num_queries,), _MASKED, jnp.float32), jnp.zeros((num_queries,), jnp.float32)
    if has_sinks:
        top = jnp.where(split == 0, triton.load(sinks[0].at[head], mask=offset < count, other=0), top)
        total = jnp.where(split == 0, jnp.ones_like(total), total)
    result = jnp.zeros((num_queries, _padded(head_dim)), jnp.float32)
    top, total, result = lax.fori_loop(first, jnp.minimum(first + share, stop), body, (top, total, result))
    total = jnp.maximum(total, 1e-30)
    column, mask = tile_of(0, head_dim, is_own)
    at = split, (token + offset)[:, None], head[:, None]
    triton.store(out.at[(*at, column)], (result / total[:, None]).astype(out.dtype), mask=mask)
    triton.store(weight.at[at], (top + jnp.log(total))[:, None], mask=is_own)


# What the device at hand takes.


def fits_kernel(pages: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether `attend_pages_kernel` is for pages `[P, 2, K, page, H]` of this kind."""
    page, head_dim = pages.shape[3:]
    return pages.dtype in _HALF and head_dim % 8 == 0 and head_dim <= _WIDEST and page % _LEAST_TILE == 0


@functools.cache
def kernel_is_served(dtype: jnp.dtype, head_dim: int) -> bool:
    """Whether `attend_pages_kernel` runs on the default device and computes what it should. The first call compiles it.

    May be called while a function is traced. A warning says why it is not.
    """

    def error() -> jax.Array:
        shapes = ((2, 4, head_dim), *[(3, 2, 64, head_dim)] * 2)
        q, k, v = (jax.random.normal(jax.random.key(i), shape).astype(dtype) for i, shape in enumerate(shapes))
        rotation = rope.rotation_at(RopeConfig(theta=100.0), head_dim, jnp.arange(128))
        table, lengths = jnp.array([[2, 0], [1, 0]]), jnp.array([71, 3])
        keys, values = (part[table].swapaxes(2, 3).reshape(2, -1, 2, head_dim) for part in (k, v))
        at = rope.Rotation(*(part[lengths - 1, None] for part in rotation))
        mask = jnp.arange(128) < lengths[:, None, None, None]
        expected = jax.nn.dot_product_attention(
            rope.rotate(q[:, None], at), rope.rotate(keys, rotation), values, mask=mask
        )
        is_there = jnp.arange(64)[:, None] < jnp.array([7, 3, 64])[:, None, None, None, None]
        pages = jnp.where(is_there, jnp.stack([k, v], axis=1), jnp.nan)
        rows = table, jnp.arange(3), lengths - 1
        found = [attend_pages_kernel(q, pages, rows, rotation, one_each=one_each) for one_each in (True, False)]
        return jnp.abs(jnp.stack(found).astype(jnp.float32) - expected[:, 0].astype(jnp.float32)).max()

    return backend.passes_trial("the kernel over pages", error)
