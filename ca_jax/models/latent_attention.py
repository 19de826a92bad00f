"""Attention over latents (multi-head latent attention): one of each token is stored, and read in one of two forms.

    absorbed   what makes keys of latents is applied to queries, and what makes values to what comes out: latents are
               read as they lie, as one KV head. 2R + Q products for a pair of tokens and a head.
    expanded   each head's keys and values are made of latents, once for all queries of a row. U + Q + V products for a
               pair and a head, and R (U + V) for a token that is seen.

Expanded is fewer products from R (U + V) / (2R - U - V) new tokens on, whatever is before them, 171 in DeepSeek-V3, and
faster from half more on. A decode step has fewer; in a pass each row has the form that is best for it. Some pages are
expanded at a time, so that a long history's keys and values are never all there at once. Kernels over pages read
latents as they lie: with one, all is absorbed.

Shapes: R numbers of a latent, Q numbers of a key that are rotated, U others of each head's keys, V of its values; the
KV head is `[..., Q + R]`, rotated numbers first. The rest is as in paged_attention.

Not here: projections (transformer), attention over KV that is one head already (attention, paged_attention).
Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1 and appendix C.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ca_jax.models import attention, rope
from ca_jax.models import paged_attention as paged
from ca_jax.models.attention import MASKED, accumulated, dot, matmul_precision, nothing
from ca_jax.models.kv import LayerKV

Form = Literal["absorbed", "expanded"]

QUERY_BLOCK = 128
"""Queries of a row that are computed together over expanded keys."""
KEY_BLOCK = 512
"""Tokens that are expanded together: of several pages."""
_MARGIN = 1.5  # Of products: narrower ones take longer. Measured on a CPU, over 8,192 tokens.


class Expansion(NamedTuple):
    """What makes each head's keys and values of a latent."""

    keys: jax.Array
    """`[R, N, U]`: to the numbers of a key that are not rotated."""
    values: jax.Array
    """`[R, N, V]`."""

    @property
    def least_tokens(self) -> int | None:
        """New tokens of a row from which on expanded is cheaper, None: never."""
        latent, made = self.keys.shape[0], self.keys.shape[-1] + self.values.shape[-1]
        saved = 2 * latent - made
        return int(_MARGIN * latent * made / saved) + 1 if saved > 0 else None

    def absorbed(self, q: jax.Array) -> jax.Array:
        """Queries `[..., N, Q + U]` as they read latents, `[..., N, Q + R]`; scores are the same but for no scale."""
        turned, rest = jnp.split(q, (q.shape[-1] - self.keys.shape[-1],), axis=-1)
        rest = jnp.einsum("...nd,cnd->...nc", rest, self.keys, precision=matmul_precision(q))
        return jnp.concatenate([turned, rest.astype(q.dtype)], axis=-1)

    def rescaled(self, q: jax.Array) -> jax.Array:
        """As `absorbed`, for attention that divides scores by the root of the queries' width."""
        taken = self.absorbed(q)
        return (taken.astype(jnp.float32) * math.sqrt(taken.shape[-1] / q.shape[-1])).astype(q.dtype)

    def valued(self, out: jax.Array) -> jax.Array:
        """What comes out of latents, `[..., N, R]`, as values `[..., N, V]`."""
        made = jnp.einsum("...nc,cnd->...nd", out, self.values, precision=matmul_precision(out))
        return made.astype(out.dtype)


def attend(
    q: jax.Array,
    new: LayerKV,
    history: jax.Array | None,
    history_lengths: jax.Array,
    rotation: rope.Rotation,
    history_rotation: rope.Rotation | None,
    window: int | None = None,
    cap: float | None = None,
    *,
    expansion: Expansion,
) -> jax.Array:
    """As `attention.attend`, of queries `[B, T, N, Q + U]`, to `[B, T, N, V]`. A history is never expanded."""
    least = expansion.least_tokens
    if history is not None or least is None or q.shape[1] < least:
        taken = expansion.rescaled(q)
        out = attention.attend(taken, new, history, history_lengths, rotation, history_rotation, window, cap)
        return expansion.valued(out)
    turned, latents = jnp.split(new.k, (q.shape[-1] - expansion.keys.shape[-1],), axis=-1)
    keys, values = (
        jnp.einsum("btc,cnd->btnd", latents[:, :, 0], part, precision=matmul_precision(q)) for part in expansion
    )
    turned = jnp.broadcast_to(turned, (*keys.shape[:3], turned.shape[-1]))
    made = LayerKV(jnp.concatenate([turned, keys.astype(turned.dtype)], axis=-1), values.astype(turned.dtype))
    return attention.attend(q, made, None, history_lengths, rotation, None, window, cap)


def attend_pages(
    q: jax.Array,
    new: LayerKV | None,
    pages: jax.Array,
    rows: paged.Rows,
    rotation: rope.Rotation,
    window: int | None = None,
    form: Form | None = None,
    *,
    expansion: Expansion,
    one_each: bool = False,
    has_gaps: bool = False,
    cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """As `paged_attention.attend_pages`, of queries `[T, N, Q + U]`.

    Args:
      form: of all rows; None: whichever is cheaper, for each row by itself where T are enough for one to be expanded.

    Returns:
      `[T, N, V]` in q's dtype, padding anything finite; and the pages.
    """
    least = _least_expanded(q, pages, expansion, form)
    if one_each or window is not None or cap is not None or least is None or len(q) < least:
        given = (expansion.rescaled(q), new, pages, rows, rotation, window)
        out, pages = paged.attend_pages(*given, one_each=one_each, has_gaps=has_gaps, cap=cap)
        return expansion.valued(out), pages
    if new is not None:
        pages = paged.write_rows(pages, new, rows, has_gaps=has_gaps)
    blocks = paged.blocks_of(q, pages, rows, rotation, QUERY_BLOCK)
    is_expanded = rows.starts[1:] - rows.starts[:-1] >= least
    out = _expanded(blocks, pages, rows, rotation, expansion, is_expanded)
    if least > 1:
        is_other = ~is_expanded[blocks.row] & blocks.is_own[:, 0]
        out = jnp.where(is_other[:, None, None, None], _others(blocks, pages, rows, rotation, expansion, is_other), out)
    return blocks.taken_apart(out, q), pages


def attention_received(
    q: jax.Array,
    pages: jax.Array,
    rows: paged.Rows,
    rotation: rope.Rotation,
    window: int | None = None,
    *,
    expansion: Expansion,
    one_each: bool = False,
    cap: float | None = None,
) -> jax.Array:
    """As `paged_attention.attention_received`, of queries `[T, N, Q + U]`; absorbed always."""
    return paged.attention_received(expansion.rescaled(q), pages, rows, rotation, window, one_each=one_each, cap=cap)


def _least_expanded(q: jax.Array, pages: jax.Array, expansion: Expansion, form: Form | None) -> int | None:
    """New tokens of a row from which on it is expanded; None: none is."""
    if form is not None:
        return 1 if form == "expanded" else None
    return expansion.least_tokens if paged.paged_attention(pages) == "blocks" else None


def _expanded(
    blocks: paged.Blocks,
    pages: jax.Array,
    rows: paged.Rows,
    rotation: rope.Rotation,
    expansion: Expansion,
    is_expanded: jax.Array,
) -> jax.Array:
    """What attention gives f32 `[b, 1, N block, V]`, 0 of blocks of rows that are not to be expanded, bool `[n]`.

    Each row's pages are expanded once, some after the other; a row's blocks read them in turn, those that see them.
    """
    queries, last_of_block = blocks.queries[:, 0], blocks.place.max(1)
    num_blocks, num_heads, block, width = queries.shape
    size = pages.shape[3]
    at_once = min(max(KEY_BLOCK // size, 1), rows.table.shape[1])
    num_turned = width - expansion.keys.shape[-1]
    of_keys, of_values = (part.astype(pages.dtype) for part in expansion)

    def of_row(row: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        is_own = (blocks.row == row) & (last_of_block >= 0)
        first = jnp.argmax(is_own)
        last = jnp.where(is_own & is_expanded[row], last_of_block, -1).max()

        def of_part(part: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            where = part * at_once * size + jnp.arange(at_once * size)
            numbers = rows.table.at[row, part * at_once + jnp.arange(at_once)].get(mode="clip")
            kept = paged.take_pages(pages, numbers)[:, 0, 0].reshape(len(where), -1)
            kept = jnp.where((where <= last)[:, None], kept, 0)
            turned = rope.rotate(kept[:, None, :num_turned], paged.at_places(rotation, where))[:, 0].T
            made, values = (
                dot(each, kept[:, num_turned:], (0, 1), 0).astype(pages.dtype) for each in (of_keys, of_values)
            )  # [N, U, keys] and [N, V, keys]
            turned = jnp.broadcast_to(turned, (num_heads, *turned.shape))
            keys = jnp.concatenate([turned, made], axis=1)

            def of_block(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                scores = dot(queries[i], keys, (2, 1), 1)
                scores = jnp.where(where <= blocks.place[i][:, None], scores, MASKED)
                before = tuple(lax.dynamic_index_in_dim(each, i, keepdims=False) for each in carry)
                after = accumulated(
                    before, scores, lambda weights: dot(weights.astype(values.dtype), values, (2, 2), 1)
                )
                pairs = zip(carry, after, strict=True)
                return tuple(lax.dynamic_update_index_in_dim(each, of_block, i, 0) for each, of_block in pairs)

            num_before = (is_own & (last_of_block < where[0])).sum()
            return lax.fori_loop(first + num_before, first + is_own.sum(), of_block, carry)

        return lax.fori_loop(0, last // (at_once * size) + 1, of_part, carry)

    carry = nothing((num_blocks, num_heads, block, of_values.shape[-1]))
    _, total, out = lax.fori_loop(0, len(rows.table), of_row, carry)
    out = out / jnp.maximum(total, 1e-30)[..., None]
    return out.reshape(num_blocks, 1, num_heads * block, -1)


def _others(
    blocks: paged.Blocks,
    pages: jax.Array,
    rows: paged.Rows,
    rotation: rope.Rotation,
    expansion: Expansion,
    is_other: jax.Array,
) -> jax.Array:
    """What attention gives of blocks that are absorbed, bool `[b]`, as `_expanded` gives others, and of these 0."""
    num_blocks, _, num_heads, block, _ = blocks.queries.shape
    shape = (num_heads, block, expansion.values.shape[-1])

    def absorbed(one: paged.Blocks) -> jax.Array:
        taken = expansion.absorbed(one.queries.swapaxes(2, 3)).swapaxes(2, 3)
        out, _ = paged.by_pages(one._replace(queries=taken), pages, rows, rotation, receives=False)
        by_head = out.reshape(num_heads, block, -1).swapaxes(0, 1)
        return expansion.valued(by_head).swapaxes(0, 1).astype(jnp.float32)

    def of_block(given: tuple[jax.Array, paged.Blocks]) -> jax.Array:
        return lax.cond(given[0], absorbed, lambda _: jnp.zeros(shape, jnp.float32), given[1])

    out = lax.map(of_block, (is_other, jax.tree.map(lambda part: part[:, None], blocks)))
    return out.reshape(num_blocks, 1, num_heads * block, -1)
