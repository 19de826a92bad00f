"""Choosing the next token on the device: greedy, temperature, top-k, top-p, min-p, penalties, biases, seeds.

How likely a drawn token was to the model itself is said here too.

Randomness is counter-based: a row's draw depends on its seed and the token's position alone, so that an answer does not
depend on what else is in the batch, nor on whether its history was reused.

Not here: stop conditions (session), which rows are running (scheduler).
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

FILTERED = -1e30
"""Logit of a token that may not be drawn."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerRows:
    """Sampling parameters of B rows, as arrays."""

    temperature: jax.Array
    """f32 `[B]`; 0 means greedy."""
    top_k: jax.Array
    """i32 `[B]`; 0 means all."""
    top_p: jax.Array
    """f32 `[B]` in (0, 1]; 1 means all."""
    min_p: jax.Array
    """f32 `[B]` in [0, 1): smallest probability kept, as a share of the largest."""
    repetition_penalty: jax.Array
    """f32 `[B]`; 1 means none (Keskar et al., 2019)."""
    seed: jax.Array
    """u32 `[B]`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogProbabilities:
    """How likely B drawn tokens were to the model, and what it held likeliest. All natural logarithms."""

    drawn: jax.Array
    """f32 `[B]`, of the drawn token."""
    top_ids: jax.Array
    """i32 `[B, n]`, the likeliest tokens, likeliest first; of equals the lower id."""
    top: jax.Array
    """f32 `[B, n]`, theirs."""


@jax.jit
def greedy(logits: jax.Array) -> jax.Array:
    """The likeliest token of each row: f32 `[B, V]` to i32 `[B]`."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@jax.jit
def sample(
    logits: jax.Array,
    rows: SamplerRows,
    seen: jax.Array,
    first_slot: jax.Array,
    positions: jax.Array,
    addends: jax.Array | None = None,
) -> jax.Array:
    """Draws a token per row, in the order of Hugging Face's processors: penalty, temperature, top-k, top-p, min-p.

    What is added to logits comes right behind the repetition penalty.

    Args:
      logits: f32 `[B, V]`.
      rows: parameters of the B rows.
      seen: bool `[slots, V]`, tokens the repetition penalty applies to.
      first_slot: i32 scalar, the slot that row 0 is.
      positions: i32 `[B]`, position of the token being drawn; with the seed it fixes the draw.
      addends: f32 `[slots, V]`, biases less presence and frequency penalties; None where all are 0.

    Returns:
      i32 `[B]`.
    """
    num_rows = logits.shape[0]
    seen = jax.lax.dynamic_slice_in_dim(seen, first_slot, num_rows, 0)
    penalty = rows.repetition_penalty[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    if addends is not None:
        logits = logits + jax.lax.dynamic_slice_in_dim(addends, first_slot, num_rows, 0)
    best = jnp.argmax(logits, axis=-1)

    scaled = logits / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    filtered = jnp.any((rows.temperature > 0) & ((rows.top_k > 0) | (rows.top_p < 1)))
    scaled = jax.lax.cond(filtered, _likeliest, lambda scaled, rows: scaled, scaled, rows)
    floor = jnp.max(scaled, axis=-1) + jnp.log(rows.min_p)  # Minus infinity where there is none.
    scaled = jnp.where(scaled >= floor[:, None], scaled, FILTERED)

    def draw(seed: jax.Array, position: jax.Array, row: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jnp.argmax(row + jax.random.gumbel(key, row.shape))

    drawn = jax.vmap(draw)(rows.seed, positions, scaled)
    return jnp.where(rows.temperature > 0, drawn, best).astype(jnp.int32)


def _likeliest(scaled: jax.Array, rows: SamplerRows) -> jax.Array:
    """Filters all but the top k, and of these all but the top p. Equally likely tokens go together.

    Nothing is sorted, which would take a hundred milliseconds for eight rows of 49,152 on a CPU: the least value that
    stays is found bit by bit, as an integer in the order of the floats.
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(scaled == 0, 0.0, scaled), jnp.uint32)  # -0 is 0.
    sign = jnp.uint32(1 << 31)
    ordered = jnp.where(bits >= sign, ~bits, bits | sign)
    least = _greatest(ordered, jnp.ones_like(scaled), rows.top_k.astype(scaled.dtype))
    scaled = jnp.where(ordered >= jnp.where(rows.top_k > 0, least, 0)[:, None], scaled, FILTERED)
    least = _greatest(ordered, jax.nn.softmax(scaled, axis=-1), rows.top_p)
    return jnp.where(ordered >= jnp.where(rows.top_p < 1, least, 0)[:, None], scaled, FILTERED)


def _greatest(ordered: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """The greatest number that entries of so much weight reach: u32 `[B, V]`, f32 `[B, V]`, f32 `[B]` to u32 `[B]`."""

    def narrow(step: jax.Array, found: jax.Array) -> jax.Array:
        tried = found | (jnp.uint32(1 << 31) >> step.astype(jnp.uint32))
        weight = jnp.sum(jnp.where(ordered >= tried[:, None], weights, 0), axis=-1)
        return jnp.where(weight >= wanted, tried, found)

    return jax.lax.fori_loop(0, 32, narrow, jnp.zeros(ordered.shape[0], jnp.uint32))


@partial(jax.jit, static_argnames=("num_top",))
def log_probabilities(logits: jax.Array, drawn: jax.Array, num_top: int) -> LogProbabilities:
    """How likely drawn tokens were by the model's own distribution, whatever they were drawn from.

    That is the softmax of the logits as they are: before penalties, biases, temperature and filters.

    Args:
      logits: f32 `[B, V]`.
      drawn: i32 `[B]`.
      num_top: static, how many of the likeliest tokens are wanted, at most V.
    """
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    top, top_ids = jax.lax.top_k(logprobs, num_top)
    return LogProbabilities(jnp.take_along_axis(logprobs, drawn[:, None], axis=-1)[:, 0], top_ids, top)


@jax.jit
def mark_seen(seen: jax.Array, row: jax.Array, token: jax.Array) -> jax.Array:
    """Adds one token to one row: bool `[slots, V]`, i32 scalars."""
    return seen.at[row, token].set(True)


@partial(jax.jit, donate_argnames=("addends",))
def set_addend(addends: jax.Array, row: jax.Array, token: jax.Array, value: jax.Array) -> jax.Array:
    """Replaces one number: f32 `[slots, V]`, which is donated, i32 scalars, f32 scalar."""
    return addends.at[row, token].set(value)


@jax.jit
def set_row(values: jax.Array, row: jax.Array, new: jax.Array) -> jax.Array:
    """Replaces one row: `[slots, V]`, i32 scalar, `[V]` of the same dtype."""
    return values.at[row].set(new)
