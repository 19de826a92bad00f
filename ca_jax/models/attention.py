"""Attention over unrotated history that is one array: of new tokens, and of some among it.

Both take masks from lengths, never from values: what lies behind a row's length, NaN included, cannot reach a result.
Where a layer slides, a token sees the last `window` tokens, itself among them. They are counted by places, which are
positions unless truncation has left keys at their old ones.
There are implementations for CPUs, for GPUs, and some that serve everywhere; which is taken is said by the backend, or
by the caller. They differ in rounding alone.

Shapes: B batch, T new tokens, S history tokens, N query heads, K KV heads, G = N / K, H head dim.

Not here: projections (the models), rotation angles (rope), history in pages (paged_attention), kernels (gpu_attention,
cpu_kernels), what each key receives (attention_received).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from ca_jax.models import cpu_kernels, gpu_attention, rope
from ca_jax.models.kv import LayerKV

PrefillAttention = Literal["blocks", "batched", "flash", "cpu"]
"""How `attend` is computed. `blocks`: heads and blocks of queries one by one, as CPUs like it. `batched`: all heads at
once, in large blocks, on any backend. `flash`: cuDNN's. `cpu`: a CPU kernel, of which there is no gradient."""

ChosenAttention = Literal["blocks", "batched"]
"""How `attend_chosen` is computed. `blocks`: a loop over blocks of keys, as far as each block of queries needs.
`batched`: all heads, queries and keys at once, which leaves a GPU nothing to wait for."""

MASKED = -1e30
"""Score of a key that must not be seen. Finite, so that a wholly masked block of keys gives no NaN."""

QUERY_BLOCK = 128
"""Queries per block: a block attends only to keys up to its own end, and its scores stay in cache."""

BATCHED_QUERY_BLOCK = 512
"""The same where heads are batched: few kernels, and scores of 512 queries over 16K keys still fit."""

KEY_BLOCK = 512
"""Keys per block of a loop over keys. Of 128, 256, 512 and 1,024 the fastest on CPU, or within its noise."""

UNROLLED_KV_HEADS = 8
"""Up to this many KV heads, heads are separate matmuls: on CPU 10-20 % faster than batched at 64-128 new tokens."""


def matmul_precision(x: jax.Array) -> lax.Precision | None:
    """f32 means f32: GPUs would otherwise round the inputs of f32 matmuls to TF32."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int], num_batch: int) -> jax.Array:
    """Contracts axis `contract[0]` of `a` with `contract[1]` of `b` behind `num_batch` axes of both; gives f32."""
    batch = tuple(range(num_batch))
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), (batch, batch)),
        precision=matmul_precision(a),
        preferred_element_type=jnp.float32,
    )


def _softmax_weighted(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """`q [*, R, H]`, `k` and `v` `[*, E, H]`, `mask [R, E]` to f32 `[*, R, H]`; `*` is one batch axis or none."""
    num_batch = q.ndim - 2
    scores = jnp.where(mask, dot(q, k, (q.ndim - 1, k.ndim - 1), num_batch), MASKED)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    return dot(weights.astype(v.dtype), v, (q.ndim - 1, v.ndim - 2), num_batch) / total


def by_head(function: Callable[..., jax.Array], is_batched: bool, *arrays: jax.Array) -> jax.Array:
    """A function of arrays `[K, *]`: over all KV heads at once or, where they are few, one by one, as CPUs like it."""
    num_kv = arrays[0].shape[0]
    if is_batched or num_kv > UNROLLED_KV_HEADS:
        return function(*arrays)
    return jnp.stack([function(*(array[head] for array in arrays)) for head in range(num_kv)])


def accumulated(
    carry: tuple[jax.Array, ...], scores: jax.Array, weighted: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, ...]:
    """A running softmax, taken on by a block of keys.

    Args:
      carry: the top score and the sum of weights, f32 `[*]`, and the weighted sum `[*, H]`, relative to the top.
      scores: f32 `[*, E]`.
      weighted: the sum of the block's values by weights `[*, E]`.
    """
    top, total, out = carry
    new_top = jnp.maximum(top, scores.max(-1))
    weights = jnp.exp(scores - new_top[..., None])
    rescale = jnp.exp(top - new_top)
    return new_top, total * rescale + weights.sum(-1), out * rescale[..., None] + weighted(weights)


def nothing(shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """What `accumulated` begins with; of the weighted sum's shape."""
    return jnp.full(shape[:-1], MASKED, jnp.float32), jnp.zeros(shape[:-1], jnp.float32), jnp.zeros(shape, jnp.float32)


def attend(
    q: jax.Array,
    new: LayerKV,
    history: jax.Array | None,
    history_lengths: jax.Array,
    rotation: rope.Rotation,
    history_rotation: rope.Rotation | None,
    implementation: PrefillAttention | None = None,
    window: int | None = None,
) -> jax.Array:
    """Causal attention of new tokens over their unrotated history and themselves.

    With S = 4 places of which 3 are used, and T = 3 (x seen, . not):

        key      h0 h1 h2 -- n0 n1 n2
        query n0  x  x  x  .  x  .  .
              n1  x  x  x  .  x  x  .
              n2  x  x  x  .  x  x  x

    and in a window of 3:

        query n0  .  x  x  .  x  .  .
              n1  .  .  x  .  x  x  .
              n2  .  .  .  .  x  x  x

    Args:
      q: `[B, T, N, H]`, unrotated.
      new: the new tokens' KV, `[B, T, K, H]`, unrotated.
      history: keys and values `[2, B, S, K, H]`, unrotated, or None for no history.
      history_lengths: i32 `[B]`, history tokens that count, at most S.
      rotation: of the new tokens' positions, `[B, T, H/2]`.
      history_rotation: of history places, `[S, H/2]`.
      implementation: None: the backend's.
      window: how many tokens a token sees, itself among them; None: all before it.

    Returns:
      `[B, T, N, H]` in q's dtype.
    """
    implementation = implementation or prefill_attention(q.dtype, q.shape[-1])
    if implementation == "cpu":
        return cpu_kernels.attend_new(q, new, history, history_lengths, rotation, history_rotation, window)
    past = None if history is None else LayerKV(history[0], history[1])
    if window is not None and past is not None and history_rotation is not None:
        past, history_lengths, history_rotation, _ = in_window(past, history_lengths, history_rotation, window)
    keys, values = rope.rotate(new.k, rotation), new.v
    num_history = 0
    if past is not None and history_rotation is not None:
        num_history = past.k.shape[1]
        used = jnp.arange(num_history)[None, :, None, None] < history_lengths[:, None, None, None]
        old_keys = rope.rotate(past.k, history_rotation)
        if implementation == "flash":  # It adds to the scores of masked keys: they must be numbers.
            old_keys = jnp.where(used, old_keys, 0)
        keys = jnp.concatenate([old_keys, keys], axis=1)
        values = jnp.concatenate([jnp.where(used, past.v, 0).astype(values.dtype), values], axis=1)
    q = rope.rotate(q, rotation)
    if implementation == "flash":
        has_mask = num_history or (window is not None and window < q.shape[1])
        places, queries = jnp.arange(keys.shape[1])[None, None, :], jnp.arange(q.shape[1])[None, :, None]
        seen = seen_keys(places, queries, history_lengths[:, None, None], num_history, window)
        return gpu_attention.attend_flash(q, keys, values, seen if has_mask else None)

    def attend_row(q: jax.Array, k: jax.Array, v: jax.Array, history_length: jax.Array) -> jax.Array:
        return _attend_row(q, k, v, history_length, num_history, window, is_batched=implementation == "batched")

    if q.shape[0] == 1:  # Unbatched matmuls are what the CPU backend is best at.
        return attend_row(q[0], keys[0], values[0], history_lengths[0])[None]
    return jax.vmap(attend_row)(q, keys, values, history_lengths)


def in_window(
    history: LayerKV, lengths: jax.Array, rotation: rope.Rotation, window: int
) -> tuple[LayerKV, jax.Array, rope.Rotation, jax.Array]:
    """The end of each row's history that new tokens can see at all, so that attention costs no more than the window.

    Args:
      history: `[B, S, K, H]`.
      lengths: i32 `[B]`.
      rotation: of history places, `[S, H/2]`.
      window: how many tokens a token sees.

    Returns:
      History of at most `window` places, how many of them count, their rotation `[S, H/2]` or `[B, S, H/2]`, and the
      place of the first, i32 `[B]`.
    """
    if history.k.shape[1] <= window:
        return history, lengths, rotation, jnp.zeros_like(lengths)
    starts = jnp.maximum(lengths - window, 0)

    def cut(row: jax.Array, start: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(row, start, window)

    kept = LayerKV(jax.vmap(cut)(history.k, starts), jax.vmap(cut)(history.v, starts))
    turned = rope.Rotation(*(jax.vmap(cut, in_axes=(None, 0))(part, starts) for part in rotation))
    return kept, lengths - starts, turned, starts


def prefill_attention(dtype: jnp.dtype, head_dim: int) -> PrefillAttention:
    """What `attend` is computed with on this backend, for heads of this kind."""
    if cpu_kernels.serves_attention(dtype, head_dim):
        return "cpu"
    return pure_attention(dtype, head_dim)


def pure_attention(dtype: jnp.dtype, head_dim: int) -> PrefillAttention:
    """The same where it is to be differentiated."""
    if jax.default_backend() != "gpu":
        return "blocks"
    served = gpu_attention.fits_flash(dtype, head_dim) and gpu_attention.flash_is_served(jnp.dtype(dtype), head_dim)
    return "flash" if served else "batched"


def seen_keys(
    key_index: jax.Array, query_index: jax.Array, history_length: jax.Array, num_history: int, window: int | None
) -> jax.Array:
    """Whether queries see keys, bool, from the keys' numbers (history first) and the queries' among new tokens."""
    seen = jnp.where(key_index < num_history, key_index < history_length, key_index - num_history <= query_index)
    if window is None:
        return seen
    # Keys of new tokens are right behind the history that counts, whatever padding is between.
    places = jnp.where(key_index < num_history, key_index, key_index - num_history + history_length)
    return seen & (query_index + history_length - places < window)


def query_blocks(
    q: jax.Array, num_kv: int, history_length: jax.Array, num_history: int, window: int | None, is_batched: bool
) -> Iterator[tuple[jax.Array, jax.Array, slice, jax.Array]]:
    """The rotated queries `[T, N, H]` of one sequence in blocks, and the keys that each may see; see `attend`.

    Yields:
      Scaled queries `[K, R, H]`, those of a KV head's G query heads one behind the other; which new token each of them
      is of, i32 `[R, 1]`; the keys; and which of these each row sees, bool `[R, keys]`.
    """
    size = BATCHED_QUERY_BLOCK if is_batched else QUERY_BLOCK
    num_new, num_heads, head_dim = q.shape
    groups = num_heads // num_kv
    scaled = (q.astype(jnp.float32) / math.sqrt(head_dim)).astype(q.dtype)
    heads = scaled.reshape(num_new, num_kv, groups, head_dim).transpose(1, 2, 0, 3)  # [K, G, T, H]
    for start in range(0, num_new, size):
        stop = min(start + size, num_new)
        # The first key that the block may see, and behind the last one.
        first = 0 if window is None or start < window - 1 else num_history + start - window + 1
        extent = num_history + stop
        index = jnp.tile(jnp.arange(start, stop), groups)[:, None]
        seen = seen_keys(jnp.arange(first, extent)[None, :], index, history_length, num_history, window)
        yield heads[:, :, start:stop].reshape(num_kv, -1, head_dim), index, slice(first, extent), seen


def _attend_row(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    history_length: jax.Array,
    num_history: int,
    window: int | None,
    is_batched: bool,
) -> jax.Array:
    """One sequence: rotated `q [T, N, H]`, rotated `k` and `v` `[S + T, K, H]` to `[T, N, H]`."""
    num_kv, groups, head_dim = k.shape[1], q.shape[1] // k.shape[1], q.shape[2]
    k_heads, v_heads = k.transpose(1, 0, 2), v.transpose(1, 0, 2)  # [K, S + T, H]
    blocks = []
    for rows, _, keys, seen in query_blocks(q, num_kv, history_length, num_history, window, is_batched):
        out = by_head(partial(_softmax_weighted, mask=seen), is_batched, rows, k_heads[:, keys], v_heads[:, keys])
        blocks.append(out.reshape(num_kv, groups, -1, head_dim))
    return jnp.concatenate(blocks, axis=2).transpose(2, 0, 1, 3).reshape(q.shape).astype(q.dtype)


def attend_chosen(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    window: int | None = None,
    implementation: ChosenAttention | None = None,
) -> jax.Array:
    """Attention of some tokens of one sequence over all of it: each sees the places up to its own, or the last of them.

    Args:
      q: `[n, N, H]`, rotated.
      keys: `[S, K, H]`, rotated.
      values: `[S, K, H]`; numbers at all places up to the largest position.
      positions: i32 `[n]`, increasing: the tokens' places; what is at S or beyond is padding, which gives some number.
      window: how many tokens a token sees, itself among them; None: all before it.
      implementation: None: the backend's.

    Returns:
      `[n, N, H]` in q's dtype.
    """
    if implementation is None:
        implementation = "batched" if jax.default_backend() == "gpu" else "blocks"
    num_tokens, num_heads, head_dim = q.shape
    num_places, num_kv = keys.shape[:2]
    scaled = (q.astype(jnp.float32) / math.sqrt(head_dim)).astype(q.dtype)
    heads = scaled.reshape(num_tokens, num_kv, -1, head_dim).transpose(1, 2, 0, 3)  # [K, G, n, H]
    last = jnp.where(positions < num_places, positions, 0).max()
    positions = jnp.minimum(positions, last)
    k_heads, v_heads = keys.transpose(1, 0, 2), values.transpose(1, 0, 2)
    if implementation == "blocks":
        out = _chosen_in_blocks(heads, k_heads, v_heads, positions, window)
    else:
        place, own = jnp.arange(num_places), jnp.tile(positions, num_heads // num_kv)[:, None]
        rows = heads.reshape(num_kv, -1, head_dim)
        v_heads = jnp.where((place <= last)[:, None], v_heads, 0)
        out = _softmax_weighted(rows, k_heads, v_heads, _seen_from(own, place, window)).reshape(heads.shape)
    return out.transpose(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim).astype(q.dtype)


def _seen_from(own: jax.Array, place: jax.Array, window: int | None) -> jax.Array:
    """Whether a token at a place, `own [R, 1]`, sees places `[E]`, bool `[R, E]`."""
    seen = place[None, :] <= own
    return seen if window is None else seen & (place[None, :] > own - window)


def _chosen_in_blocks(
    heads: jax.Array, k_heads: jax.Array, v_heads: jax.Array, positions: jax.Array, window: int | None
) -> jax.Array:
    """`heads [K, G, n, H]` over `[K, S, H]` to f32 `[K, G, n, H]`: each block of queries reads the keys it may see.

    Which those are is known on the device alone: a loop over blocks of keys with a running softmax.
    """
    num_kv, groups, num_tokens, head_dim = heads.shape
    size, key_block = min(QUERY_BLOCK, num_tokens), min(KEY_BLOCK, k_heads.shape[1])
    last = positions.max()
    padding = -num_tokens % size
    heads = jnp.pad(heads, ((0, 0), (0, 0), (0, padding), (0, 0)))
    blocks = heads.reshape(num_kv, groups, -1, size, head_dim).transpose(2, 0, 1, 3, 4)
    blocks = blocks.reshape(-1, num_kv, groups * size, head_dim)

    def attend_block(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, places = args  # [K, R, H], [block]
        own = jnp.tile(places, groups)[:, None]
        first = 0 if window is None else jnp.maximum(places.min() - window + 1, 0) // key_block

        def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            start = jnp.minimum(i * key_block, k_heads.shape[1] - key_block)  # The last block overlaps the one before.
            place = start + jnp.arange(key_block)
            seen = _seen_from(own, place, window) & (place >= i * key_block)
            keys, values = (lax.dynamic_slice_in_dim(part, start, key_block, 1) for part in (k_heads, v_heads))
            values = jnp.where((place <= last)[:, None], values, 0)
            scores = by_head(lambda a, b: dot(a, b, (a.ndim - 1, b.ndim - 1), a.ndim - 2), False, rows, keys)

            def weighted(weights: jax.Array) -> jax.Array:
                product = lambda a, b: dot(a, b, (a.ndim - 1, b.ndim - 2), a.ndim - 2)  # noqa: E731
                return by_head(product, False, weights.astype(values.dtype), values)

            return accumulated(carry, jnp.where(seen, scores, MASKED), weighted)

        _, total, out = lax.fori_loop(first, places.max() // key_block + 1, body, nothing(rows.shape))
        return out / total[..., None]

    out = lax.map(attend_block, (blocks, jnp.pad(positions, (0, padding), mode="edge").reshape(-1, size)))
    out = out.reshape(-1, num_kv, groups, size, head_dim).transpose(1, 2, 0, 3, 4)
    return out.reshape(num_kv, groups, -1, head_dim)[:, :, :num_tokens]
