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
from ca_jax.models.config import ModelConfig
from ca_jax.models.kv import KVCache, LayerKV
from ca_jax.models.sharding import ModelSharding, by_device

AttendFn = Callable[[jax.Array, LayerKV], tuple[jax.Array, Any]]
"""Unrotated queries `[B, T, N, H]` and new KV `[B, T, K, H]` to attention output `[B, T, N, H]` and any carry."""

INIT = nn.initializers.normal(0.02)
"""Of matrices, where parameters are made by linen."""

EXPERT_BLOCK = 64
"""Most tokens that go through an expert at once."""


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

    With `is_layer` it first takes off the mean, and shifts behind (LayerNorm: Ba et al., 2016).
    """

    eps: float
    is_layer: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., F]` to the same shape and dtype."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        full = x.astype(jnp.float32)
        if self.is_layer:
            full = full - jnp.mean(full, axis=-1, keepdims=True)
        full = full * jax.lax.rsqrt(jnp.mean(full * full, axis=-1, keepdims=True) + self.eps)
        if not self.is_layer:
            return full.astype(x.dtype) * scale.astype(x.dtype)
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        return (full * scale + bias).astype(x.dtype)


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
            self.q_norm = Norm(c.norm_eps)
            self.k_norm = Norm(c.norm_eps)

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
        return q, LayerKV(k, v)

    def __call__(self, x: jax.Array, attend_fn: AttendFn) -> tuple[jax.Array, Any]:
        """`x [B, T, F]` to `[B, T, F]` and what `attend_fn` carries out."""
        out, carry = attend_fn(*self.project(x))
        packed = packed_product(self, "out", out.reshape(*out.shape[:-2], -1), self.config.embed_dim)
        out = project(out, self.wo, num_inputs=2) if packed is None else packed
        return (out + self.bo if self.config.out_bias else out), carry


class MLP(nn.Module):
    """Feed-forward: SwiGLU (Shazeer, 2020), or two matrices with GELU between them."""

    config: ModelConfig

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

        wide, narrow = (c.embed_dim, c.mlp_dim), (c.mlp_dim, c.embed_dim)
        if c.mlp == "swiglu":
            gate, up = linear(x, "wide", wide, "gate", "up")
            hidden = nn.silu(gate) * up
        else:
            [up] = linear(x, "wide", wide, "up")
            hidden = nn.gelu(up, approximate=c.mlp == "gelu_tanh")
        [out] = linear(hidden, "down", narrow, "down")
        return out


class Experts(nn.Module):
    """A feed-forward of E experts, of which each token goes through a few; it weighs them by a softmax.

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
        shares = jax.nn.softmax(project(rows, router).astype(jnp.float32))
        weights, chosen = jax.lax.top_k(shares, c.num_experts_per_token)
        weights = weights / weights.sum(-1, keepdims=True)

        def sums(rows: jax.Array, weights: jax.Array, chosen: jax.Array, *matrices: jax.Array) -> jax.Array:
            def apply(expert: jax.Array, rows: jax.Array) -> jax.Array:
                gate, up, down = (jax.lax.dynamic_index_in_dim(w, expert, keepdims=False) for w in matrices)
                return project(nn.silu(project(rows, gate)) * project(rows, up), down)

            return _through_experts(apply, rows, weights, chosen, c.num_experts)[None]

        of_rows = ("batch",) if x.shape[0] > 1 else ()  # One sequence is on all devices.
        of_matrices = ((None, None, "mlp"), (None, None, "mlp"), (None, "mlp"))
        is_divided = self.sharding is not None and c.mlp_dim % self.sharding.num_tensor == 0
        in_axes, out_axes = (of_rows, of_rows, of_rows, *of_matrices), ("mlp", *of_rows)
        given = by_device(sums, self.sharding if is_divided else None, in_axes, out_axes)
        out = given(rows, weights, chosen, w_gate, w_up, w_down).sum(0)
        return out.astype(x.dtype).reshape(x.shape)


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
    """One pre-norm block: attention and feed-forward, each added to the residual stream.

    Sequential, the feed-forward reads what attention has added; parallel, both read the same, through a norm each or
    through one.
    """

    config: ModelConfig
    sharding: ModelSharding | None = None

    def setup(self) -> None:
        """Declares the parts; their names are the names in the parameter tree."""
        c = self.config
        self.attn_norm = Norm(c.norm_eps, c.norm == "layer")
        self.attn = Attention(c)
        if not c.shares_norm:
            self.mlp_norm = Norm(c.norm_eps, c.norm == "layer")
        self.mlp = Experts(c, self.sharding) if c.num_experts else MLP(c)

    def new_kv(self, x: jax.Array) -> LayerKV:
        """`x [B, T, F]` to the unrotated KV of these tokens, `[B, T, K, H]`."""
        return self.attn.project(self.attn_norm(x))[1]

    def __call__(self, x: jax.Array, attend_fn: AttendFn) -> tuple[jax.Array, Any]:
        """`x [B, T, F]` to `x [B, T, F]` and what `attend_fn` carries out."""
        normed = self.attn_norm(x)
        out, carry = self.attn(normed, attend_fn)
        if self.config.is_parallel:
            return x + out + self.mlp(normed if self.config.shares_norm else self.mlp_norm(x)), carry
        x = x + out
        return x + self.mlp(self.mlp_norm(x)), carry


class Transformer(nn.Module):
    """The whole model. `embed`, `layers[i]` and `head` are separately callable through `apply(..., method=...)`."""

    config: ModelConfig

    def setup(self) -> None:
        """Declares the parts; their names are the names in the parameter tree."""
        c = self.config
        self.embedder = nn.Embed(c.vocab_size, c.embed_dim, embedding_init=INIT, name="embed")
        self.layers = [Layer(c, name=f"layer_{i}") for i in range(c.num_layers)]
        self.final_norm = Norm(c.norm_eps, c.norm == "layer")
        if not c.tie_embeddings:
            self.unembedder = nn.Dense(c.vocab_size, use_bias=False, kernel_init=INIT, name="head")

    def embed(self, tokens: jax.Array) -> jax.Array:
        """i32 `[B, T]` to `[B, T, F]` in the dtype of the parameters."""
        return jnp.take(self.embedder.embedding, tokens, axis=0)

    def head(self, x: jax.Array) -> jax.Array:
        """`[B, T, F]` to logits, f32 `[B, T, V]`."""
        x = self.final_norm(x)
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
        rotate_at = partial(rope.rotation_at, c.rope, c.head_dim, context=context or num_places)
        rotation = rotate_at(positions)
        lengths = jnp.zeros((batch_size,), jnp.int32) if history is None else history.lengths
        history_rotation = None if history is None else rotate_at(jnp.arange(history.capacity))
        x = self.embed(tokens)
        new_layers = []
        for i, layer in enumerate(self.layers):
            old = None if history is None else history.layers[i]

            def attend_fn(
                q: jax.Array, new: LayerKV, old: LayerKV | None = old, window: int | None = c.window_of(i)
            ) -> tuple[jax.Array, LayerKV]:
                past = None if old is None else jnp.stack([old.k, old.v])
                return attend(q, new, past, lengths, rotation, history_rotation, window), new

            x, new = layer(x, attend_fn)
            new_layers.append(new)
        return self.head(x), KVCache(tuple(new_layers), jnp.full((batch_size,), num_new, jnp.int32))
