"""Feed-forward blocks: one of three matrices or two, or experts of which each token goes through a few.

Shapes: B batch, T new tokens, R rows (tokens of all sequences), F embed, D mlp, E experts, k experts of a token.

Not here: what is before a block and behind it (transformer).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ca_jax.models.config import ModelConfig
from ca_jax.models.parts import INIT, Norm, adapted, matrix, packed_product, project
from ca_jax.models.sharding import ModelSharding, by_device, held_axes
from ca_jax.models.small_weights import Int4Matrix

EXPERT_BLOCK = 64
"""Most tokens that go through an expert at once."""

_CLIP, _CLIPPED_SLOPE = 7.0, 1.702  # Of "swiglu_clipped".
_LEAST_SHARES = 1e-20  # Of what adds up to nothing nothing is made.


def activated(config: ModelConfig, *wide: jax.Array) -> jax.Array:
    """What the last matrix of a feed-forward block reads: the gate and what it gates, or what there is of it alone.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020); clipped as in OpenAI, "gpt-oss" (2025).
    """
    if config.mlp == "swiglu":
        gate, up = wide
        return nn.silu(gate) * up
    if config.mlp == "swiglu_clipped":
        gate, up = jnp.minimum(wide[0], _CLIP), jnp.clip(wide[1], -_CLIP, _CLIP)
        return gate * nn.sigmoid(_CLIPPED_SLOPE * gate) * (up + 1)
    hidden = nn.gelu(wide[0], approximate=config.mlp.endswith("tanh"))
    return hidden * wide[1] if config.has_gate else hidden


class MLP(nn.Module):
    """Feed-forward: three matrices of which one gates (Shazeer, 2020), or two with GELU between them.

    It is `width` wide, and with `is_weighed` each token weighs what comes out.
    """

    config: ModelConfig
    width: int
    is_weighed: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, T, F]` to `[B, T, F]`."""
        c = self.config

        def linear(x: jax.Array, packed_as: str, shape: tuple[int, int], *names: str) -> list[jax.Array]:
            """Of the named matrices, which lie packed together."""
            packed = packed_product(self, packed_as, x, shape[1] * len(names))
            if packed is None:
                outs = [project(x, matrix(self, f"w_{name}", shape)) for name in names]
            else:
                outs = jnp.split(packed, len(names), axis=-1)
            outs = [adapted(self, f"w_{name}", x, out) for name, out in zip(names, outs, strict=True)]
            if not c.mlp_bias:
                return outs
            biases = [self.param(f"b_{name}", nn.initializers.zeros, shape[1:]) for name in names]
            return [out + bias for out, bias in zip(outs, biases, strict=True)]

        names = ("gate", "up") if c.has_gate else ("up",)
        hidden = activated(c, *linear(x, "wide", (c.embed_dim, self.width), *names))
        [out] = linear(hidden, "down", (self.width, c.embed_dim), "down")
        if self.is_weighed:
            out = out * nn.sigmoid(project(x, self.param("w_share", INIT, (c.embed_dim, 1))))
        return out


class Experts(nn.Module):
    """A feed-forward of E experts, of which each token goes through a few; how it weighs them says `shares_of`.

    Tokens are sorted by expert and go through theirs in blocks, so that no expert is read whom nobody chose, and none
    is computed for a token that did not choose it. On a mesh each device has its part of every expert: all go through
    the same blocks, and what they give is summed once. `lax.ragged_dot` gives the same to 2e-6 and takes longer: on 2
    CPU cores, for 8 experts of 512 x 1,792 of which each token chooses 2, it took 123 ms for 64 tokens where this took
    83, and 334 ms for 256 where this took 86.

    Source: Jiang et al., "Mixtral of Experts" (2024); blocks of tokens of one expert are those of MegaBlocks (Gale et
    al., 2023).
    """

    config: ModelConfig
    sharding: ModelSharding | None = None

    @nn.compact
    def __call__(self, x: jax.Array, stream: jax.Array | None = None) -> jax.Array:
        """`[B, T, F]` to `[B, T, F]`. With `norms_experts` the router reads the residual stream, `[B, T, F]` too."""
        c = self.config
        router = self.param("router", INIT, (c.embed_dim, c.num_experts))
        w_gate, w_up = (matrix(self, name, (c.num_experts, c.embed_dim, c.mlp_dim)) for name in ("w_gate", "w_up"))
        w_down = matrix(self, "w_down", (c.num_experts, c.mlp_dim, c.embed_dim))
        rows = x.reshape(-1, c.embed_dim)
        read = rows if stream is None else self._scaled(stream).reshape(rows.shape)
        scores = project(read, router).astype(jnp.float32)
        if c.router_bias:
            scores = scores + self.param("b_router", nn.initializers.zeros, (c.num_experts,))
        bias = self.param("choice_bias", nn.initializers.zeros, (c.num_experts,)) if c.choice_bias else None
        weights, chosen = shares_of(c, scores, bias)
        if c.norms_experts:
            weights = weights * self.param("share_scale", nn.initializers.ones, (c.num_experts,))[chosen]
        zeros, wide = nn.initializers.zeros, (c.num_experts, c.mlp_dim)
        biases = [self.param(f"b_{name}", zeros, wide) for name in ("gate", "up") if c.mlp_bias]

        def sums(
            rows: jax.Array, weights: jax.Array, chosen: jax.Array, gate: Any, up: Any, down: Any, *of_wide: jax.Array
        ) -> jax.Array:
            def apply(expert: jax.Array, rows: jax.Array) -> jax.Array:
                hidden = [project(rows, each, expert=expert) for each in (gate, up)]
                if of_wide:
                    own = [jax.lax.dynamic_index_in_dim(each, expert, keepdims=False) for each in of_wide]
                    hidden = [each + bias for each, bias in zip(hidden, own, strict=True)]
                return project(activated(c, *hidden), down, expert=expert)

            return _through_experts(apply, rows, weights, chosen, c.num_experts)[None]

        of_rows = ("batch",) if x.shape[0] > 1 else ()  # One sequence is on all devices.
        of_wide = [held_axes(each, (None, None, "mlp"), (None, "mlp")) for each in (w_gate, w_up)]
        of_matrices = (*of_wide, held_axes(w_down, (None, "mlp"), ()), *[(None, "mlp")] * len(biases))
        num_parts = w_down.scales.shape[1] if isinstance(w_down, Int4Matrix) else c.mlp_dim  # No group is divided.
        is_divided = self.sharding is not None and num_parts % self.sharding.num_tensor == 0
        in_axes, out_axes = (of_rows, of_rows, of_rows, *of_matrices), ("mlp", *of_rows)
        given = by_device(sums, self.sharding if is_divided else None, in_axes, out_axes)
        out = given(rows, weights, chosen, w_gate, w_up, w_down, *biases).sum(0)
        if c.mlp_bias:  # Once, and not on each device.
            b_down = self.param("b_down", zeros, (c.num_experts, c.embed_dim))
            out = out + (weights[..., None] * b_down[chosen].astype(jnp.float32)).sum(1)
        return out.astype(x.dtype).reshape(x.shape)

    def _scaled(self, stream: jax.Array) -> jax.Array:
        """What a router reads of the residual stream, `[B, T, F]`."""
        scale = self.param("router_scale", nn.initializers.ones, (self.config.embed_dim,))
        normed = Norm(self.config.norm_eps, has_scale=False, name="router_norm")(stream)
        return normed * scale * jnp.asarray(self.config.embed_dim**-0.5, stream.dtype)


def shares_of(config: ModelConfig, scores: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Which experts tokens go through, and how they weigh them.

    Args:
      config: `routing` and what is beside it.
      scores: f32 `[R, E]`, the router's.
      bias: `[E]`, added in choosing alone; None: none.

    Returns:
      Weights f32 `[R, k]`, and experts i32 `[R, k]`.

    Source: Jiang et al., "Mixtral of Experts" (2024); groups and biases: DeepSeek-AI, "DeepSeek-V3" (2024).
    """
    c = config
    shares = jax.nn.softmax(scores) if c.routing == "softmax" else nn.sigmoid(scores)
    ranks = shares if bias is None else shares + bias.astype(jnp.float32)
    if c.num_chosen_groups < c.num_expert_groups:
        in_groups = ranks.reshape(len(ranks), c.num_expert_groups, -1)
        best = jax.lax.top_k(in_groups, min(c.num_group_shares, in_groups.shape[-1]))[0].sum(-1)
        groups = jax.lax.top_k(best, c.num_chosen_groups)[1]
        is_chosen = (jnp.arange(c.num_expert_groups) == groups[..., None]).any(1)
        ranks = jnp.where(is_chosen[..., None], in_groups, -jnp.inf).reshape(ranks.shape)
    chosen = jax.lax.top_k(ranks, c.num_experts_per_token)[1]
    weights = jnp.take_along_axis(shares, chosen, axis=1)
    if c.normalizes_shares:
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), _LEAST_SHARES)
    return weights * c.routing_scale, chosen


def _through_experts(
    apply: Callable[[jax.Array, jax.Array], jax.Array],
    rows: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    num_experts: int,
) -> jax.Array:
    """The weighted sum of what the experts of each row give.

    With 3 rows of 2 experts each, sorted by expert, in blocks of 2:

        expert   0 0 0 | 1 1 | 2      ->   blocks   0 0 | 0 . | 1 1 | 2 .
        row      0 1 2 | 0 2 | 1

    Args:
      apply: an expert's number and rows `[block, F]` to the same shape.
      rows: `[R, F]`.
      weights: f32 `[R, k]`.
      chosen: i32 `[R, k]`, experts.
      num_experts: E.

    Returns:
      f32 `[R, F]`.
    """
    num_rows, num_chosen = chosen.shape
    size = min(EXPERT_BLOCK, num_rows)
    experts = chosen.reshape(-1)
    order = jnp.argsort(experts, stable=True)
    counts = jnp.bincount(experts, length=num_experts)
    firsts = jnp.cumsum(counts) - counts
    num_blocks = (counts + size - 1) // size
    ends = jnp.cumsum(num_blocks)
    order = jnp.pad(order, (0, size))

    def body(block: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(ends, block, side="right")
        done = (block - ends[expert] + num_blocks[expert]) * size  # Of its rows, those in blocks before.
        picks = jax.lax.dynamic_slice_in_dim(order, firsts[expert] + done, size)
        weight = jnp.where(done + jnp.arange(size) < counts[expert], weights.reshape(-1)[picks], 0)
        given = apply(expert, rows[picks // num_chosen])
        return out.at[picks // num_chosen].add(given.astype(jnp.float32) * weight[:, None])

    return jax.lax.fori_loop(0, ends[-1], body, jnp.zeros(rows.shape, jnp.float32))
