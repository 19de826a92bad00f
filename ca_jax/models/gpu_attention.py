"""Attention as a GPU is best at it: cuDNN's flash attention for prefill, a kernel of our own over the decode slots.

Both are for 16-bit floats. Neither reads a score or a value from behind a row's length, NaN included. Whether the
device at hand takes them is tried once, on small arrays, before the first use: `flash_is_served`, `kernel_is_served`.

Shapes: B batch, T new tokens, E keys, N query heads, K KV heads, G = N / K, H head dim, C slot capacity.

Not here: who uses which (attention), the textbook form that they replace (attention).
Source: flash attention (Dao, 2023); splitting keys over programs is flash decoding (Dao et al., 2023).
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

_LOG = logging.getLogger(__name__)

FLASH: Literal["cudnn", "xla"] = "cudnn"
"""What computes `attend_flash`."""

KEY_BLOCK = 64
"""Keys that a program of the decode kernel reads at a time; the capacity of slots is a multiple of it."""

_MASKED = -1e30
_LEAST_QUERIES = 16  # Fewer rows than this no tensor core takes.
_PROGRAMS = 256  # As many as keep the memory of a GPU with 100-odd multiprocessors busy.
_MAX_SPLITS = 16
_MAX_FLASH_HEAD_DIM = 128  # Of cuDNN before Hopper, which takes 256.
_MAX_INDEX = 2**31  # Numbers of one array that the kernel can tell apart.
_HALF = (jnp.bfloat16, jnp.float16)
_TRIAL_ATOL = 0.05
"""Most that an implementation may be off in its trial, on attention over numbers of order one in 16 bits."""


def attend_flash(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Scaled dot-product attention by cuDNN.

    Args:
      q: `[B, T, N, H]`, rotated, 16-bit.
      k: `[B, E, K, H]`, rotated; finite everywhere, since what is masked is added to and not replaced.
      v: `[B, E, K, H]`, finite everywhere.
      mask: bool `[B, T, E]`, which keys each query sees; None: causal, E = T.

    Returns:
      `[B, T, N, H]` in q's dtype.

    Raises:
      RuntimeError, NotImplementedError: there is no cuDNN, or it does not take these shapes.
    """
    heads = None if mask is None else mask[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=heads, is_causal=mask is None, implementation=FLASH)


def attend_slots_kernel(
    q: jax.Array,
    slot_keys: jax.Array,
    slot_values: jax.Array,
    lengths: jax.Array,
    *,
    window: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """One new token per row over the decode slots; each row's keys are read once, up to its own length and no further.

    A program takes one KV head of one row, and a share of its keys; the shares are put together behind it. The number
    of keys is found at run time on the device, so that one compiled function serves all lengths.

    Takes and gives what `attention.attend_slots` does. Slots have C keys of 16 bits, C a multiple of `KEY_BLOCK` and H
    a power of two of at least 16. With `interpret` the kernel runs step by step, on any backend.
    """
    from jax.experimental import pallas as pl  # Here: a jax without it serves all the same, by another implementation.
    from jax.experimental.pallas import triton

    batch_size, num_kv, groups, head_dim = q.shape
    capacity = slot_keys.shape[2]
    num_queries = max(_LEAST_QUERIES, 1 << (groups - 1).bit_length())
    scaled = (q.astype(jnp.float32) / math.sqrt(head_dim)).astype(slot_keys.dtype)
    scaled = jnp.pad(scaled, ((0, 0), (0, 0), (0, num_queries - groups), (0, 0)))
    most_blocks = capacity // KEY_BLOCK
    if window is not None:
        most_blocks = min(most_blocks, (window + KEY_BLOCK - 2) // KEY_BLOCK + 1)
    num_splits = _num_splits(batch_size * num_kv, most_blocks)

    def per_row(*block: int) -> Any:
        return pl.BlockSpec((None, None, *block), lambda b, h, s: (b, h, 0, 0))

    def per_share(*block: int) -> Any:
        return pl.BlockSpec((None, None, None, *block), lambda b, h, s: (b, h, s, *(0 for _ in block)))

    shares = (batch_size, num_kv, num_splits, num_queries)
    out, top, total = pl.pallas_call(
        functools.partial(_decode_kernel, num_splits=num_splits, window=window),
        grid=(batch_size, num_kv, num_splits),
        in_specs=[
            pl.BlockSpec((1,), lambda b, h, s: (b,)),
            per_row(num_queries, head_dim),
            per_row(capacity, head_dim),
            per_row(capacity, head_dim),
        ],
        out_specs=[per_share(num_queries, head_dim), per_share(num_queries), per_share(num_queries)],
        out_shape=[
            jax.ShapeDtypeStruct((*shares, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(shares, jnp.float32),
            jax.ShapeDtypeStruct(shares, jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="attend_slots",
    )(lengths.astype(jnp.int32), scaled, slot_keys, slot_values)
    weight = jnp.exp(top - top.max(axis=2, keepdims=True))
    out = (out * weight[..., None]).sum(axis=2)
    total = (total * weight).sum(axis=2)
    return (out / jnp.maximum(total, 1e-30)[..., None])[:, :, :groups].astype(q.dtype)


def _num_splits(num_pairs: int, num_blocks: int) -> int:
    """Into how many shares keys are divided, so that there is work for the whole device; a power of two."""
    wanted = min(-(-_PROGRAMS // num_pairs), num_blocks, _MAX_SPLITS)
    return 1 << (wanted.bit_length() - 1)


def _decode_kernel(
    lengths: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    top_ref: Any,
    total_ref: Any,
    *,
    num_splits: int,
    window: int | None,
) -> None:
    """`q [R, H]` over its share of `k` and `v` `[C, H]`: sums `[R, H]` and `[R]` relative to the top score `[R]`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    num_queries, head_dim = q_ref.shape
    length = lengths[0]
    num_blocks = (length + KEY_BLOCK - 1) // KEY_BLOCK
    hidden = 0 if window is None else jnp.maximum(length - window, 0)
    first_block = 0 if window is None else hidden // KEY_BLOCK
    share = (num_blocks - first_block + num_splits - 1) // num_splits
    first = first_block + pl.program_id(2) * share
    q = q_ref[:, :]

    def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, out = carry
        index = i * KEY_BLOCK + jnp.arange(KEY_BLOCK)
        used = index < length if window is None else (index < length) & (index >= hidden)
        keys = triton.load(k_ref.at[pl.ds(i * KEY_BLOCK, KEY_BLOCK), :])
        values = triton.load(v_ref.at[pl.ds(i * KEY_BLOCK, KEY_BLOCK), :], mask=used[:, None], other=0.0)
        scores = jnp.where(used[None, :], triton.dot(q, keys.T), _MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp(scores - new_top[:, None])
        rescale = jnp.exp(top - new_top)
        out = out * rescale[:, None] + triton.dot(weights.astype(values.dtype), values)
        return new_top, total * rescale + weights.sum(-1), out

    start = (
        jnp.full((num_queries,), _MASKED, jnp.float32),
        jnp.zeros((num_queries,), jnp.float32),
        jnp.zeros((num_queries, head_dim), jnp.float32),
    )
    stop = jnp.minimum(first + share, num_blocks)
    top_ref[:], total_ref[:], out_ref[:, :] = lax.fori_loop(first, stop, body, start)


# What the device at hand takes.


def fits_flash(dtype: jnp.dtype, head_dim: int) -> bool:
    """Whether `attend_flash` is for heads of this kind."""
    return dtype in _HALF and head_dim % 8 == 0 and head_dim <= _MAX_FLASH_HEAD_DIM


def fits_kernel(slots: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether `attend_slots_kernel` is for slots `[slots, K, C, H]` of this kind."""
    _, _, capacity, head_dim = slots.shape
    is_power_of_two = head_dim >= 16 and head_dim & (head_dim - 1) == 0
    return slots.dtype in _HALF and is_power_of_two and capacity % KEY_BLOCK == 0 and slots.size < _MAX_INDEX


@functools.cache
def flash_is_served(dtype: jnp.dtype, head_dim: int) -> bool:
    """Whether `attend_flash` runs on the default device and computes what it should. The first call compiles it.

    May be called while a function is traced.
    """

    def error() -> jax.Array:
        q, k, v = _numbers((1, 16, 4, head_dim), (1, 80, 2, head_dim), dtype)
        mask = jnp.arange(80)[None, None, :] <= 30 + jnp.arange(16)[None, :, None]
        expected = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])
        causal = jax.nn.dot_product_attention(q, k[:, :16], v[:, :16], is_causal=True)
        found = attend_flash(q, k, v, mask), attend_flash(q, k[:, :16], v[:, :16], None)
        return jnp.maximum(_distance(found[0], expected), _distance(found[1], causal))

    return _is_right("cuDNN's flash attention", error)


@functools.cache
def kernel_is_served(dtype: jnp.dtype, head_dim: int) -> bool:
    """Whether `attend_slots_kernel` runs on the default device and computes what it should. As `flash_is_served`."""

    def error() -> jax.Array:
        q, k, v = _numbers((2, 2, 2, head_dim), (2, 2, 4 * KEY_BLOCK, head_dim), dtype)
        lengths = jnp.array([KEY_BLOCK + 7, 3])
        mask = jnp.arange(4 * KEY_BLOCK)[None, None, None, :] < lengths[:, None, None, None]
        expected = jax.nn.dot_product_attention(
            q.reshape(2, 1, 4, head_dim), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), mask=mask
        )
        behind = jnp.where(mask[:, 0, 0, :, None][:, None], 0.0, jnp.nan).astype(dtype)
        return _distance(attend_slots_kernel(q, k + behind, v + behind, lengths), expected.reshape(q.shape))

    return _is_right("the decode kernel", error)


def _numbers(queries: tuple[int, ...], keys: tuple[int, ...], dtype: jnp.dtype) -> list[jax.Array]:
    """Queries, keys and values to try an implementation with."""
    shapes = (queries, keys, keys)
    return [jax.random.normal(jax.random.key(i), shape, jnp.float32).astype(dtype) for i, shape in enumerate(shapes)]


def _distance(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)).max()


def _is_right(name: str, error: Callable[[], jax.Array]) -> bool:
    """Whether something runs and is as near to its reference as 16-bit floats are; a warning says why it is not."""

    def run() -> float:
        with jax.transfer_guard("allow"):
            return float(jax.jit(error)())

    try:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:  # A function that is traced on this one is not there.
            found = thread.submit(run).result()
    except Exception as failure:  # Whatever it is, another implementation serves.
        _LOG.warning("%s is not used, it does not run here: %s", name, failure)
        return False
    if not found <= _TRIAL_ATOL:
        _LOG.warning("%s is not used, it was off by %g", name, found)
    return found <= _TRIAL_ATOL
