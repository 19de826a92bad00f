"""The attention that each key receives, by which discarding lists tell tokens that matter (heavy hitters).

Computed beside `attend` in the same blocks, so that XLA shares their scores. Shapes as there.

Not here: attention itself (attention), over pages (paged_attention), who sums what over layers and turns (runner).
Source: accumulated attention scores, H2O (Zhang et al., NeurIPS 2023).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from ca_jax.models import rope
from ca_jax.models.attention import (
    MASKED,
    PrefillAttention,
    by_head,
    dot,
    in_window,
    pure_attention,
    query_blocks,
)
from ca_jax.models.kv import LayerKV


def attention_received(
    q: jax.Array,
    new: LayerKV,
    history: jax.Array | None,
    history_lengths: jax.Array,
    rotation: rope.Rotation,
    history_rotation: rope.Rotation | None,
    num_queries: jax.Array | int,
    implementation: PrefillAttention | None = None,
    window: int | None = None,
) -> jax.Array:
    """The attention that each key of one sequence receives in `attend`, summed over query heads and new tokens.

    A new token that counts gives N in all. Heads and queries go in the blocks of `attend`, so that within one jitted
    function the scores and the softmax of both are computed once, but for `flash`, which does not hand them out.

    Takes what `attend` does, for B = 1, and `num_queries`, the number of new tokens that count: those behind them give
    nothing, and receive nothing.

    Returns:
      f32 `[S + T]`, history places first; 0 where no token that counts sees the key.

    Raises:
      ValueError: more than one sequence.
    """
    if q.shape[0] != 1:
        raise ValueError(f"attention_received must get one sequence, got a batch of {q.shape[0]}")
    num_places, first_place = 0 if history is None else history.shape[2], None
    past = None if history is None else LayerKV(history[0], history[1])
    if window is not None and past is not None and history_rotation is not None:
        past, history_lengths, history_rotation, starts = in_window(past, history_lengths, history_rotation, window)
        first_place = starts[0]
    is_batched = (implementation or pure_attention(q.dtype, q.shape[-1])) != "blocks"
    num_new, num_history = q.shape[1], 0
    keys = rope.rotate(new.k, rotation)
    if past is not None and history_rotation is not None:
        num_history = past.k.shape[1]
        keys = jnp.concatenate([rope.rotate(past.k, history_rotation), keys], axis=1)
    k_heads = keys[0].transpose(1, 0, 2)  # [K, S + T, H]
    q = rope.rotate(q, rotation)[0]
    received = jnp.zeros(num_history + num_new, jnp.float32)
    for rows, index, keys_seen, seen in query_blocks(
        q, len(k_heads), history_lengths[0], num_history, window, is_batched
    ):
        sums = partial(_softmax_sums, mask=seen, counts=index < num_queries)
        given = by_head(sums, is_batched, rows, k_heads[:, keys_seen])
        received += jnp.pad(given.sum(range(given.ndim - 1)), (keys_seen.start, len(received) - keys_seen.stop))
    if first_place is None or num_history == num_places:
        return received
    at_places = lax.dynamic_update_slice_in_dim(jnp.zeros(num_places), received[:num_history], first_place, 0)
    return jnp.concatenate([at_places, received[num_history:]])


def _softmax_sums(q: jax.Array, k: jax.Array, mask: jax.Array, counts: jax.Array) -> jax.Array:
    """The softmax of `attend`, summed over heads and those rows that `counts [R, 1]` says: f32 `[E]`."""
    scores = jnp.where(mask, dot(q, k, (q.ndim - 1, k.ndim - 1), q.ndim - 2), MASKED)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    return jnp.where(counts, weights / total, 0).sum(range(q.ndim - 1))
