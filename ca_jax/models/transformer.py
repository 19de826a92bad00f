"""A decoder-only transformer in Flax linen: pure functions of parameters, tokens, positions and an explicit history.

A layer does not know where its history is. It hands queries and the new tokens' KV to an `attend` function and adds
what comes back, so that one layer serves the research call (`Transformer.__call__`), layer-by-layer prefill and decode.
Which parts a model has is said by its config alone, so that one set of parts serves every family.

Shapes: B batch, T new tokens, S history tokens, L layers, N query heads, K KV heads, H head dim, F embed, D mlp,
E experts, V vocab.

Not here: attention itself, rotation, sharding, checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ca_jax.models import cpu_kernels, rope
from ca_jax.models.attention import attend, matmul_precision
from ca_jax.models.config import LayerKind, ModelConfig
from ca_jax.models.kv import KVCache, LayerKV
from ca_jax.models.sharding import ModelSharding, by_device

AttendFn = Callable[[jax.Array, LayerKV, jax.Array | None], tuple[jax.Array, Any]]
"""Unrotated queries `[B, T, N, H]`, new KV `[B, T, K, H]` and sinks f32 `[N]` to attention output `[B, T, N, H]` and
any carry. Scores are to be multiplied by 1 / sqrt(H)."""

INIT = nn.initializers.normal(0.02)
"""Of matrices, where parameters are made by linen."""

EXPERT_BLOCK = 64
"""Most tokens that go through an expert at once."""

_CLIP, _CLIPPED_SLOPE = 7.0, 1.702  # Of "swiglu_clipped".
_LEAST_SHARES = 1e-20  # Of what adds up to nothing nothing is made.


def project(x: jax.Array, weights: jax.Array, num_inputs: int = 1) -> jax.Array:
    """Contracts the last `num_inputs` axes of x with the first of the weights, as one plain matrix product.

    Written out as 2-D because the CPU backend has a fast path for that alone: 30 layers at one token took 20 ms so,
    31 ms as an einsum over `[B, T, F] [F, N, H]`.
    """
    split = x.ndim - num_inputs
    leading, trailing = x.shape[:split], weights.shape[num_inputs:]
    rows = math.prod(leading)
    flat = jnp.dot(
        x.reshape(rows, -1), weights.reshape(math.prod(weights.shape[:num_inputs]), -1), precision=matmul_precision(x)
    )
    return flat.reshape(*leading, *trailing)


def packed_product(module: nn.Module, name: str, x: jax.Array, num_outputs: int) -> jax.Array | None:
    """`x [..., inputs]` times weights that lie packed beside a module's parameters; None where it has none for it.

    They are in the collection `packed`, of `cpu_kernels.pack_params`, and serve few rows.
    """
    num_rows = math.prod(x.shape[:-1])
    if num_rows > cpu_kernels.MAX_PACKED_ROWS or not module.has_variable("packed", name):
        return None
    packed: jax.Array = module.get_variable("packed", name)
    return cpu_kernels.packed_dot(x.reshape(num_rows, -1), packed, num_outputs).reshape(*x.shape[:-1], num_outputs)


class Norm(nn.Module):
    """Divides by the root mean square over F and scales (Zhang and Sennrich, 2019); f32 inside.

    With `is_layer` it first takes off the mean, and may shift behind (LayerNorm: Ba et al., 2016). It may be over
    several axes, the last ones.
    """

    eps: float
    is_layer: bool = False
    has_bias: bool = False
    offset: float = 0.0
    num_axes: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., F]` to the same shape and dtype."""
        shape, axes = x.shape[-self.num_axes :], tuple(range(-self.num_axes, 0))
        scale = self.param("scale", nn.initializers.constant(1 - self.offset), shape)
        full = x.astype(jnp.float32)
        if self.is_layer:
            full = full - jnp.mean(full, axis=axes, keepdims=True)
        full = full * jax.lax.rsqrt(jnp.mean(full * full, axis=axes, keepdims=True) + self.eps)
        if self.offset:
            scale = scale.astype(jnp.float32) + self.offset
        elif not self.is_layer:
            return full.astype(x.dtype) * scale.astype(x.dtype)
        full = full * scale
        if self.has_bias:
            full = full + self.param("bias", nn.initializers.zeros, shape)
        return full.astype(x.dtype)


def norm_of(config: ModelConfig) -> Norm:
    """A norm over the residual stream."""
    is_layer = config.norm == "layer"
    return Norm(config.norm_eps, is_layer, is_layer and config.norm_bias, config.norm_offset)


class Attention(nn.Module):
    """Projections of grouped-query attention around an `attend` function."""

    config: ModelConfig

    def setup(self) -> None:
        """Declares the parameters; their names are those in the tree."""
        c = self.config
        heads, kv_heads = (c.num_heads, c.head_dim), (c.num_kv_heads, c.head_dim)
        self.wq = self.param("wq", INIT, (c.embed_dim, *heads))
        self.wk = self.param("wk", INIT, (c.embed_dim, *kv_heads))
        self.wv = self.param("wv", INIT, (c.embed_dim, *kv_heads))
        self.wo = self.param("wo", INIT, (*heads, c.embed_dim))
        if c.qkv_bias:
            self.bq = self.param("bq", nn.initializers.zeros, heads)
            self.bk = self.param("bk", nn.initializers.zeros, kv_heads)
            self.bv = self.param("bv", nn.initializers.zeros, kv_heads)
        if c.out_bias:
            self.bo = self.param("bo", nn.initializers.zeros, (c.embed_dim,))
        if c.qk_norm:
            num_axes = 2 if c.qk_norm_is_whole else 1
            self.q_norm = Norm(c.norm_eps, offset=c.norm_offset, num_axes=num_axes)
            self.k_norm = Norm(c.norm_eps, offset=c.norm_offset, num_axes=num_axes)
        if c.has_sinks:
            self.sinks = self.param("sinks", nn.initializers.zeros, heads[:1])

    def project(self, x: jax.Array) -> tuple[jax.Array, LayerKV]:
        """`x [B, T, F]` to unrotated queries `[B, T, N, H]` and KV `[B, T, K, H]`: nothing in them is of a position."""
        c = self.config
        sizes = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
        packed = packed_product(self, "qkv", x, sum(sizes) * c.head_dim)
        if packed is None:
            q, k, v = project(x, self.wq), project(x, self.wk), project(x, self.wv)
        else:
            heads = packed.reshape(*x.shape[:-1], -1, c.head_dim)
            q, k, v = jnp.split(heads, (c.num_heads, c.num_heads + c.num_kv_heads), axis=-2)
        if self.config.qkv_bias:
            q, k, v = q + self.bq, k + self.bk, v + self.bv
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if c.attention_scale is not None:
            q = (q.astype(jnp.float32) * (c.attention_scale * math.sqrt(c.head_dim))).astype(q.dtype)
        return q, LayerKV(k, v)

    def __call__(self, x: jax.Array, attend_fn: AttendFn) -> tuple[jax.Array, Any]:
        """`x [B, T, F]` to `[B, T, F]` and what `attend_fn` carries out."""
        sinks = self.sinks.astype(jnp.float32) if self.config.has_sinks else None
        out, carry = attend_fn(*self.project(x), sinks)
        packed = packed_product(self, "out", out.reshape(*out.shape[:-2], -1), self.config.embed_dim)
        out = project(out, self.wo, num_inputs=2) if packed is None else packed
        return (out + self.bo if self.config.out_bias else out), carry


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
                outs = [project(x, self.param(f"w_{name}", INIT, shape)) for name in names]
            else:
                outs = jnp.split(packed, len(names), axis=-1)
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
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, T, F]` to `[B, T, F]`."""
        c = self.config
        router = self.param("router", INIT, (c.embed_dim, c.num_experts))
        w_gate = self.param("w_gate", INIT, (c.num_experts, c.embed_dim, c.mlp_dim))
        w_up = self.param("w_up", INIT, (c.num_experts, c.embed_dim, c.mlp_dim))
        w_down = self.param("w_down", INIT, (c.num_experts, c.mlp_dim, c.embed_dim))
        rows = x.reshape(-1, c.embed_dim)
        scores = project(rows, router).astype(jnp.float32)
        if c.router_bias:
            scores = scores + self.param("b_router", nn.initializers.zeros, (c.num_experts,))
        bias = self.param("choice_bias", nn.initializers.zeros, (c.num_experts,)) if c.choice_bias else None
        weights, chosen = shares_of(c, scores, bias)
        zeros, wide = nn.initializers.zeros, (c.num_experts, c.mlp_dim)
        biases = [self.param(f"b_{name}", zeros, wide) for name in ("gate", "up") if c.mlp_bias]

        def sums(rows: jax.Array, weights: jax.Array, chosen: jax.Array, *matrices: jax.Array) -> jax.Array:
            def apply(expert: jax.Array, rows: jax.Array) -> jax.Array:
                gate, up, down, *of_wide = (jax.lax.dynamic_index_in_dim(w, expert, keepdims=False) for w in matrices)
                hidden = [project(rows, gate), project(rows, up)]
                if of_wide:
                    hidden = [each + bias for each, bias in zip(hidden, of_wide, strict=True)]
                return project(activated(c, *hidden), down)

            return _through_experts(apply, rows, weights, chosen, c.num_experts)[None]

        of_rows = ("batch",) if x.shape[0] > 1 else ()  # One sequence is on all devices.
        of_matrices = ((None, None, "mlp"), (None, None, "mlp"), (None, "mlp"), *[(None, "mlp")] * len(biases))
        is_divided = self.sharding is not None and c.mlp_dim % self.sharding.num_tensor == 0
        in_axes, out_axes = (of_rows, of_rows, of_rows, *of_matrices), ("mlp", *of_rows)
        given = by_device(sums, self.sharding if is_divided else None, in_axes, out_axes)
        out = given(rows, weights, chosen, w_gate, w_up, w_down, *biases).sum(0)
        if c.mlp_bias:  # Once, and not on each device.
            b_down = self.param("b_down", zeros, (c.num_experts, c.embed_dim))
            out = out + (weights[..., None] * b_down[chosen].astype(jnp.float32)).sum(1)
        return out.astype(x.dtype).reshape(x.shape)


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
        best = jax.lax.top_k(in_groups, min(2, in_groups.shape[-1]))[0].sum(-1)
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


class Layer(nn.Module):
    """One block: attention and feed-forward, each added to the residual stream; norms are before them, behind them or
    both.

    Sequential, the feed-forward reads what attention has added; parallel, both read the same, through a norm each or
    through one.
    """

    config: ModelConfig
    kind: LayerKind
    sharding: ModelSharding | None = None

    def setup(self) -> None:
        """Declares the parts; their names are the names in the parameter tree."""
        c = self.config
        if c.norms_before:
            self.attn_norm = norm_of(c)
            if not c.shares_norm:
                self.mlp_norm = norm_of(c)
        if c.norms_behind:
            self.attn_post_norm, self.mlp_post_norm = norm_of(c), norm_of(c)
        self.attn = Attention(c)
        has_experts = self.kind.has_experts
        self.mlp = Experts(c, self.sharding) if has_experts else MLP(c, c.dense_mlp_dim or c.mlp_dim)
        if has_experts and c.shared_mlp_dim:
            self.shared = MLP(c, c.shared_mlp_dim, c.gates_shared)

    def new_kv(self, x: jax.Array) -> LayerKV:
        """`x [B, T, F]` to the unrotated KV of these tokens, `[B, T, K, H]`."""
        return self.attn.project(self.attn_norm(x) if self.config.norms_before else x)[1]

    def feed_forward(self, x: jax.Array) -> jax.Array:
        """`x [B, T, F]`, normed, to `[B, T, F]`."""
        out = self.mlp(x)
        if self.kind.has_experts and self.config.shared_mlp_dim:
            out = out + self.shared(x)
        return self.mlp_post_norm(out) if self.config.norms_behind else out

    def __call__(self, x: jax.Array, attend_fn: AttendFn) -> tuple[jax.Array, Any]:
        """`x [B, T, F]` to `x [B, T, F]` and what `attend_fn` carries out."""
        c = self.config

        def add(x: jax.Array, out: jax.Array) -> jax.Array:
            return x + (out if c.residual_scale == 1 else out * jnp.asarray(c.residual_scale, out.dtype))

        normed = self.attn_norm(x) if c.norms_before else x
        out, carry = self.attn(normed, attend_fn)
        if c.norms_behind:
            out = self.attn_post_norm(out)
        summed = add(x, out)
        if not c.shares_norm:
            read = x if c.is_parallel else summed
            normed = self.mlp_norm(read) if c.norms_before else read
        return add(summed, self.feed_forward(normed)), carry


def scale_embedded(config: ModelConfig, x: jax.Array) -> jax.Array:
    """Embeddings as layers read them, from those in the table."""
    return x if config.embed_scale == 1 else x * jnp.asarray(config.embed_scale, x.dtype)


def scale_queries(config: ModelConfig, q: jax.Array, places: jax.Array) -> jax.Array:
    """Queries `[..., T, N, H]` as they are at places i32 `[..., T]`, but for their rotation."""
    if not config.query_beta:
        return q
    spans = jnp.floor(places.astype(jnp.float32) / config.query_span)
    scale = 1 + config.query_beta * jnp.log1p(spans)
    return (q.astype(jnp.float32) * scale[..., None, None]).astype(q.dtype)


class Transformer(nn.Module):
    """The whole model. `embed`, `layers[i]` and `head` are separately callable through `apply(..., method=...)`."""

    config: ModelConfig

    def setup(self) -> None:
        """Declares the parts; their names are the names in the parameter tree."""
        c = self.config
        self.embedder = nn.Embed(c.vocab_size, c.embed_dim, embedding_init=INIT, name="embed")
        self.layers = [Layer(c, c.kind_of(i), name=f"layer_{i}") for i in range(c.num_layers)]
        self.final_norm = norm_of(c)
        if not c.tie_embeddings:
            self.unembedder = nn.Dense(c.vocab_size, use_bias=False, kernel_init=INIT, name="head")

    def embed(self, tokens: jax.Array) -> jax.Array:
        """i32 `[B, T]` to `[B, T, F]` in the dtype of the parameters."""
        return scale_embedded(self.config, jnp.take(self.embedder.embedding, tokens, axis=0))

    def head(self, x: jax.Array) -> jax.Array:
        """`[B, T, F]` to logits, f32 `[B, T, V]`."""
        c, logits = self.config, self._unembed(self.final_norm(x))
        if c.logit_scale != 1:
            logits = logits * c.logit_scale
        return logits if c.logit_cap is None else c.logit_cap * jnp.tanh(logits / c.logit_cap)

    def _unembed(self, x: jax.Array) -> jax.Array:
        if (packed := packed_product(self, "unembed", x, self.config.vocab_size)) is not None:
            return packed
        if self.config.tie_embeddings:
            weights, axis = self.embedder.embedding, 1
        else:
            weights, axis = self.unembedder.variables["params"]["kernel"], 0
        rows = x.reshape(-1, x.shape[-1])
        logits = jax.lax.dot_general(
            rows,
            weights,
            (((1,), (axis,)), ((), ())),
            precision=matmul_precision(x),
            preferred_element_type=jnp.float32,
        )
        return logits.reshape(*x.shape[:-1], self.config.vocab_size)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        history: KVCache | None = None,
        context: int | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Runs the new tokens over their history.

        Args:
          tokens: i32 `[B, T]`.
          positions: i32 `[B, T]`, of the new tokens. History place s has position s.
          history: unrotated KV with room for S tokens a row, or None.
          context: how long the whole text may become, tokens; only `dynamic` rope asks for it. None: S + T.

        Returns:
          Logits f32 `[B, T, V]`, and the new tokens' unrotated KV (`lengths` all T): `kv.append(history, new)` is the
          history of the next call.
        """
        c = self.config
        batch_size, num_new = tokens.shape
        num_places = num_new + (0 if history is None else history.capacity)
        rotate_at = partial(rope.rotation_at, head_dim=c.head_dim, context=context or num_places)
        rotations = [rotate_at(each, positions=positions) for each in c.ropes]
        lengths = jnp.zeros((batch_size,), jnp.int32) if history is None else history.lengths
        history_rotations: list[rope.Rotation | None] = [None] * len(rotations)
        if history is not None:
            history_rotations = [rotate_at(each, positions=jnp.arange(history.capacity)) for each in c.ropes]
        x = self.embed(tokens)
        new_layers = []
        for i, layer in enumerate(self.layers):
            kind = c.kind_of(i)
            old = None if history is None else history.layers[i]

            def attend_fn(
                q: jax.Array,
                new: LayerKV,
                sinks: jax.Array | None,
                old: LayerKV | None = old,
                kind: LayerKind = kind,
            ) -> tuple[jax.Array, LayerKV]:
                past = None if old is None else jnp.stack([old.k, old.v])
                turns = rotations[kind.rope], history_rotations[kind.rope]
                q = scale_queries(c, q, positions)
                return attend(q, new, past, lengths, *turns, kind.window, c.score_cap, sinks), new

            x, new = layer(x, attend_fn)
            new_layers.append(new)
        return self.head(x), KVCache(tuple(new_layers), jnp.full((batch_size,), num_new, jnp.int32))
