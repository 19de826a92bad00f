"""Attention of new tokens over unrotated history that is one array: the textbook's, on any backend, differentiable.

Masks are of lengths, never of values: what lies behind a row's length, NaN included, cannot reach a result. Where a
layer slides, a token sees the last `window` tokens, itself among them. They are counted by places, which are positions
unless truncation has left keys at their old ones.

Shapes: B batch, T new tokens, S history tokens, N query heads, K KV heads, G = N / K, H head dim.

Not here: projections (the models), rotation angles (rope), history in pages, as engines have it (paged_attention).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from ca_jax.models import rope
from ca_jax.models.kv import LayerKV, scaled_keys, values_of

MASKED = -1e30
"""Score of a key that must not be seen. Finite, so that a wholly masked block of keys gives no NaN."""

QUERY_BLOCK = 128
"""Queries per block: a block attends only to keys up to its own end, and its scores stay in cache."""


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
    window: int | None = None,
    cap: float | None = None,
    sinks: jax.Array | None = None,
    key_scale: jax.Array | None = None,
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
      history: keys and values `[2, B, S, K, H]`, or what is both `[1, B, S, K, H]`, unrotated; None for no history.
      history_lengths: i32 `[B]`, history tokens that count, at most S.
      rotation: of the new tokens' positions, `[B, T, H/2]`.
      history_rotation: of history places, `[S, H/2]`.
      window: how many tokens a token sees, itself among them; None: all before it.
      cap: scores are `cap * tanh(score / cap)`; None: as they are.
      sinks: f32 `[N]`, a score of each head beside those of keys, that weighs on no value; None: none.
      key_scale: f32 `[H]`, where values alone are kept: keys are these times it; None: keys are kept.

    Returns:
      `[B, T, N, H]` in q's dtype, H of values.
    """
    rotary_dim = 2 * rotation.cos.shape[-1]
    keys, values = rope.rotate(scaled_keys(new.k, key_scale), rotation), values_of(new.k, new.v, rotary_dim)
    num_history = 0
    if history is not None and history_rotation is not None:
        num_history = history.shape[2]
        used = jnp.arange(num_history)[None, :, None, None] < history_lengths[:, None, None, None]
        keys = jnp.concatenate([rope.rotate(scaled_keys(history[0], key_scale), history_rotation), keys], axis=1)
        old = values_of(history[0], history[1] if len(history) > 1 else None, rotary_dim)
        values = jnp.concatenate([jnp.where(used, old, 0).astype(values.dtype), values], axis=1)
    attend_row = partial(_attend_row, num_history=num_history, window=window, cap=cap, sinks=sinks)
    return jax.vmap(attend_row)(rope.rotate(q, rotation), keys, values, history_lengths)


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


def _attend_row(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    history_length: jax.Array,
    *,
    num_history: int,
    window: int | None,
    cap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """One sequence: rotated `q [T, N, H]`, rotated `k` and `v` `[S + T, K, H]` to `[T, N, H]`."""
    num_new, _, head_dim = q.shape
    num_kv = k.shape[1]
    k, v = k.transpose(1, 0, 2), v.transpose(1, 0, 2)  # [K, S + T, H]
    scaled = (q.astype(jnp.float32) / math.sqrt(head_dim)).astype(q.dtype)
    heads = scaled.reshape(num_new, num_kv, -1, head_dim).transpose(1, 2, 0, 3)  # [K, G, T, H]
    blocks = []
    for start in range(0, num_new, QUERY_BLOCK):
        rows = heads[:, :, start : start + QUERY_BLOCK]
        index = start + jnp.arange(rows.shape[2])[:, None]
        extent = num_history + start + rows.shape[2]
        seen = seen_keys(jnp.arange(extent)[None], index, history_length, num_history, window)
        scores = dot(rows.reshape(num_kv, -1, head_dim), k[:, :extent], (2, 2), 1).reshape(*rows.shape[:3], extent)
        scores = jnp.where(seen, scores if cap is None else cap * jnp.tanh(scores / cap), MASKED)
        top, sink_weights = scores.max(-1, keepdims=True), jnp.zeros(())
        if sinks is not None:
            of_heads = sinks.astype(jnp.float32).reshape(num_kv, -1, 1, 1)
            top = jnp.maximum(top, of_heads)
            sink_weights = jnp.exp(of_heads - top)
        weights = jnp.exp(scores - top)
        out = dot(weights.astype(v.dtype).reshape(num_kv, -1, extent), v[:, :extent], (2, 1), 1)
        out = out.reshape(*rows.shape[:-1], v.shape[-1])
        blocks.append(out / (weights.sum(-1, keepdims=True) + sink_weights))
    return jnp.concatenate(blocks, axis=2).transpose(2, 0, 1, 3).reshape(*q.shape[:2], -1).astype(q.dtype)
