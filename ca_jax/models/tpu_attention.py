"""Attention over pages as a TPU is best at it: a kernel of our own.

    grid      a block of queries of one row after the other, all of its heads
    pages     stay in HBM; some at a time are copied to VMEM, the next ones while these are computed with, and behind
              a block's last ones the next block's first
    keys      are turned in VMEM: by the turn of their page's first place, and then by that within the page
    lanes     of which a vector has 128, have the numbers of a head, where these fill them; else the tokens of a page,
              as XLA lays out pages of narrower heads

Shapes: b blocks, K KV heads, R queries of a block and KV head (a multiple of 16), H head dim, V of values, n rows, M
pages of a row, P pages, C places. H or a page's tokens are a multiple of 128, the other of 16.

Not here: which queries make a block, and the form that this replaces (paged_attention).
Source: flash attention (Dao, 2023); copying pages ahead across programs is known from jax's paged attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ca_jax.models.attention import MASKED, matmul_precision
from ca_jax.models.kv import value_dim

LANES = 128
LEAST_QUERIES = 16
"""R is a multiple of it: rows of a tile of 16-bit floats."""
MOST_QUERIES = 256
"""R at most: more fill VMEM, and the matrix unit not better."""
_STAGE_BYTES = 1 << 19  # Of pages that are copied at a time: a copy of so many takes as long as HBM needs for them.
_MOST_AT_ONCE = 4


def fits_kernel(pages: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether `attend_blocks` is for pages `[P, 2, K, page, H]`, or `[P, 1, K, page, H]`, of this kind."""
    page, head_dim = pages.shape[3:]
    lanes, others = (page, head_dim) if _has_places_in_lanes(pages) else (head_dim, page)
    return pages.dtype == jnp.bfloat16 and lanes % LANES == 0 and others % LEAST_QUERIES == 0


def _has_places_in_lanes(pages: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return pages.shape[4] % LANES != 0


def take_pages(pages: jax.Array, numbers: jax.Array, *, interpret: Any = False) -> jax.Array:
    """Pages `[m, 2, K, page, H]` by their numbers, i32 `[m]`, each of them one of the P.

    Each is copied by itself: XLA would bring pages that fit VMEM there, all of them each time, before it took some.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    held, turned_back = _as_it_lies(pages, interpret)
    count = len(numbers)

    def kernel(numbers: Any, held: Any, out: Any, copied: Any) -> None:
        def each(do: Any) -> None:
            copy = functools.partial(pltpu.make_async_copy, sem=copied)
            lax.fori_loop(0, count, lambda i, _: do(copy(held.at[numbers[i]], out.at[i])), None)

        each(lambda copy: copy.start())
        each(lambda copy: copy.wait())

    taken = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct((count, *held.shape[1:]), pages.dtype),
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=2 * count * pages.nbytes // len(pages)
        ),
        interpret=interpret,
        name="take_pages",
    )(numbers, held)
    return turned_back(taken)


def _as_it_lies(pages: jax.Array, interpret: Any) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Pages in the order of their memory, there; and what puts some of them in the order of pages again."""
    from jax.experimental.pallas import tpu as pltpu

    def turned(pages: jax.Array) -> jax.Array:  # Moves nothing.
        return pages.swapaxes(3, 4) if has_places_in_lanes else pages

    has_places_in_lanes = _has_places_in_lanes(pages)
    held = turned(pages)
    return held if interpret else pltpu.with_memory_space_constraint(held, pltpu.HBM), turned


def attend_blocks(
    queries: jax.Array,
    own: jax.Array,
    bounds: jax.Array,
    table: jax.Array,
    pages: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
    window: int | None = None,
    cap: float | None = None,
    sinks: jax.Array | None = None,
    key_scale: jax.Array | None = None,
    *,
    interpret: Any = False,
) -> jax.Array:
    """Blocks of queries over their rows' pages.

    Args:
      queries: `[b, K, R, H]`, rotated and scaled, in the pages' dtype.
      own: i32 `[b, R]`, the queries' places, -1 of padding.
      bounds: i32 `[3, b]`, a block's row, the first of its pages that is read, and one past the last; where there is
        none, neither there nor in any block behind.
      table: i32 `[n, M]`, the rows' pages.
      pages: `[P, 2, K, page, H]`, unrotated; `[P, 1, K, page, H]` where keys and values are one, see `kv.values_of`.
      rotation: of all places, f32 `[C, R/2]` as in `rope`.
      window: how many tokens a token sees; None: all.
      cap: scores are `cap * tanh(score / cap)`; None: as they are.
      sinks: f32 `[K, R]`, a score beside those of keys, that weighs on no value; None: none.
      key_scale: f32 `[H]`, where values alone are kept: keys are these times it; None: keys are kept.
      interpret: run step by step on any backend: `pltpu.InterpretParams`.

    Returns:
      f32 `[b, K, R, V]`, 0 of padding.
    """
    from jax.experimental import pallas as pl  # Here: a jax without it serves all the same, by another implementation.
    from jax.experimental.pallas import tpu as pltpu

    num_blocks, num_kv, num_queries, head_dim = queries.shape
    page, page_bytes = pages.shape[3], pages.nbytes // len(pages)
    num_values = value_dim(head_dim, pages.shape[1], 2 * rotation[0].shape[1])
    at_once = min(max(_STAGE_BYTES // page_bytes, 1), _MOST_AT_ONCE, table.shape[1])
    within, starts = _turns(rotation, page, table.shape[1], head_dim)
    whole = [*within, *starts, *([] if sinks is None else [sinks[..., None]])]
    if key_scale is not None:
        whole.append(key_scale[:, None] if _has_places_in_lanes(pages) else key_scale[None])
    of_queries, of_block = (
        pl.BlockSpec((1, num_kv, num_queries, width), lambda b, *_: (b, 0, 0, 0)) for width in (head_dim, num_values)
    )
    most_keys = min(table.shape[1] * page, (window or table.shape[1] * page) + num_queries)
    held, _ = _as_it_lies(pages, interpret)
    kernel = functools.partial(
        _kernel,
        half=rotation[0].shape[1],
        has_places_in_lanes=_has_places_in_lanes(pages),
        at_once=at_once,
        window=window,
        cap=cap,
        has_sinks=sinks is not None,
        has_scale=key_scale is not None,
    )
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_blocks,),
            in_specs=[
                pl.BlockSpec((1, num_queries, 1), lambda b, *_: (b, 0, 0)),
                of_queries,
                *(pl.BlockSpec(memory_space=pltpu.VMEM) for _ in whole),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=of_block,
            scratch_shapes=[
                pltpu.VMEM((2, at_once, *held.shape[1:]), pages.dtype),
                *[pltpu.VMEM((num_kv, num_queries, 1), jnp.float32)] * 2,
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((*queries.shape[:3], num_values), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(  # Of rows as long as may be.
            flops=4 * queries.size * most_keys,
            transcendentals=queries.size // head_dim * most_keys,
            bytes_accessed=2 * queries.size * 4 + num_blocks * -(-most_keys // page) * page_bytes,
        ),
        interpret=interpret,
        name="attend_pages",
    )(bounds, table, own[..., None], queries, *whole, held)


def _turns(
    rotation: tuple[jax.Array, jax.Array], page: int, num_pages: int, head_dim: int
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Cosines and sines of the places within a page `[page, H]`, and of pages' first places `[M, H]`.

    One behind the other they turn as far as `rotation` says, and multiply by what that multiplies by.
    """
    rest = head_dim - 2 * rotation[0].shape[1]

    def whole(cos: jax.Array, sin: jax.Array) -> list[jax.Array]:
        ends = [jnp.full((len(cos), rest), value, jnp.float32) for value in (1, 0)]
        parts = zip((cos, sin), ends, strict=True)
        return [jnp.concatenate([part, part, end], axis=-1) for part, end in parts]

    cos, sin = rotation
    scale = cos[0]  # Nothing is turned at place 0.
    firsts = np.minimum(np.arange(num_pages) * page, len(cos) - 1)
    return whole(cos[:page] / scale, sin[:page] / scale), whole(cos[firsts], sin[firsts])


def _kernel(
    bounds: Any,
    table: Any,
    own: Any,
    queries: Any,
    cos: Any,
    sin: Any,
    first_cos: Any,
    first_sin: Any,
    *refs: Any,
    half: int,
    has_places_in_lanes: bool,
    at_once: int,
    window: int | None,
    cap: float | None,
    has_sinks: bool,
    has_scale: bool,
) -> None:
    """A block's queries over all that they see."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    *more, pages, out, buffers, tops, totals, slot, copied = refs
    sinks, scale = more[: int(has_sinks)], more[int(has_sinks) :]
    _, num_kv, _, head_dim = queries.shape
    page, block = cos.shape[0], pl.program_id(0)
    of_numbers, of_places = (0, 1) if has_places_in_lanes else (1, 0)  # Axes of a page's keys and values of a head.

    def num_stages(block: Any) -> Any:
        return lax.div(bounds[2, block] - bounds[1, block] + at_once - 1, jnp.int32(at_once))

    def each_copy(block: Any, stage: Any, into: Any, do: Any) -> None:
        """Does something with the copies of a stage of a block."""
        for i in range(at_once):
            number = bounds[1, block] + stage * at_once + i

            @pl.when(number < bounds[2, block])
            def copy_page(i: int = i, number: Any = number) -> None:
                source = pages.at[table[bounds[0, block], number]]
                do(pltpu.make_async_copy(source, buffers.at[into, i], copied.at[into]))

    @pl.when(block == 0)
    def begin() -> None:
        slot[0] = 0
        each_copy(0, 0, 0, lambda copy: copy.start())

    out[...] = jnp.zeros(out.shape, jnp.float32)
    if has_sinks:
        tops[...], totals[...] = sinks[0][...], jnp.ones(totals.shape, jnp.float32)
    else:
        tops[...], totals[...] = jnp.full(tops.shape, MASKED, jnp.float32), jnp.zeros(totals.shape, jnp.float32)
    places = own[0]  # [R, 1]
    last = places.max()

    def turned(keys: jax.Array, turn: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Keys of a page, element i paired with element i + half."""
        element = lax.broadcasted_iota(jnp.int32, keys.shape, of_numbers)
        before = pltpu.roll(keys, half, of_numbers)
        after = before if 2 * half == head_dim else pltpu.roll(keys, head_dim - half, of_numbers)
        return keys * turn[0] + jnp.where(element < half, -after, before) * turn[1]

    def attend(head: Any, at: Any, into: Any, i: int, turn: tuple[jax.Array, jax.Array]) -> None:
        """A page's keys and values of a head, its first at that place."""
        where = at + lax.broadcasted_iota(jnp.int32, (1, page), 1)
        kept = buffers[into, i, 0, head]
        keys = kept.astype(jnp.float32)
        if has_scale:
            keys = (keys * scale[0][...]).astype(buffers.dtype).astype(jnp.float32)
        keys = turned(keys, turn).astype(buffers.dtype)
        if buffers.shape[2] > 1:
            values = buffers[into, i, 1, head]
        else:
            values = lax.slice_in_dim(kept, head_dim - out.shape[3], head_dim, axis=of_numbers)
        of_page = (1, page) if has_places_in_lanes else (page, 1)
        is_there = at + lax.broadcasted_iota(jnp.int32, of_page, of_places) <= last
        values = jnp.where(is_there, values, jnp.zeros_like(values))
        precision = matmul_precision(keys)
        scores = lax.dot_general(
            queries[0, head], keys, (((1,), (of_numbers,)), ((), ())), precision, preferred_element_type=jnp.float32
        )
        if cap is not None:
            scores = cap * jnp.tanh(scores / cap)
        seen = where <= places
        if window is not None:
            seen &= where > places - window
        scores = jnp.where(seen, scores, MASKED)
        top = jnp.maximum(tops[head], scores.max(-1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - top), 0)
        rescale = jnp.exp(tops[head] - top)
        totals[head] = totals[head] * rescale + weights.sum(-1, keepdims=True)
        weights = weights.astype(values.dtype)
        added = lax.dot_general(
            weights, values, (((1,), (of_places,)), ((), ())), precision, preferred_element_type=jnp.float32
        )
        out[0, head] = out[0, head] * rescale + added
        tops[head] = top

    def stage(number: Any, _: Any) -> Any:
        now = slot[0]
        is_last = number + 1 == num_stages(block)
        next_block = jnp.where(is_last, jnp.minimum(block + 1, pl.num_programs(0) - 1), block)
        next_stage = jnp.where(is_last, 0, number + 1)

        @pl.when((next_block > block) | ~is_last)
        def copy_ahead() -> None:
            each_copy(next_block, next_stage, 1 - now, lambda copy: copy.start())

        each_copy(block, number, now, lambda copy: copy.wait())
        slot[0] = 1 - now
        for i in range(at_once):
            at = bounds[1, block] + number * at_once + i

            @pl.when(at < bounds[2, block])
            def with_page(i: int = i, at: Any = at) -> None:
                c, s = first_cos[pl.ds(at, 1), :], first_sin[pl.ds(at, 1), :]
                turn = cos[...] * c - sin[...] * s, sin[...] * c + cos[...] * s
                turn = tuple(each.T for each in turn) if has_places_in_lanes else turn
                each = functools.partial(attend, at=at * page, into=now, i=i, turn=turn)
                lax.fori_loop(0, num_kv, lambda head, _: each(head), None, unroll=num_kv <= 8)

        return 0

    lax.fori_loop(0, num_stages(block), stage, 0)
    is_there = places >= 0

    def divide(head: Any, _: Any) -> None:
        out[0, head] = jnp.where(is_there, out[0, head] / jnp.maximum(totals[head], 1e-30), 0)

    lax.fori_loop(0, num_kv, divide, None)
