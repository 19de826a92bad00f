"""A decoder-only transformer in Flax linen: pure functions of parameters, tokens, positions and an explicit history.

A layer does not know where its history is. It hands queries and the new tokens' KV to an `attend` function and adds
what comes back, so that one layer serves the research call (`Transformer.__call__`), layer-by-layer prefill and decode.

Shapes: B batch, T new tokens, S history tokens, L layers, N query heads, K KV heads, H head dim, F embed, D mlp,
V vocab.

Not here: what layers are made of (blocks), attention itself, rotation, sharding, checkpoints.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ca_jax.models import rope
from ca_jax.models.attention import attend, matmul_precision
from ca_jax.models.blocks import INIT, MLP, AttendFn, Attention, Experts, norm_of
from ca_jax.models.config import ModelConfig
from ca_jax.models.kv import KVCache, LayerKV
from ca_jax.models.sharding import ModelSharding


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
        self.attn_norm = norm_of(c)
        self.attn = Attention(c)
        if not c.shares_norm:
            self.mlp_norm = norm_of(c)
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
        self.final_norm = norm_of(c)
        if not c.tie_embeddings:
            self.unembedder = nn.Dense(c.vocab_size, use_bias=False, kernel_init=INIT, name="head")

    def embed(self, tokens: jax.Array) -> jax.Array:
        """i32 `[B, T]` to `[B, T, F]` in the dtype of the parameters."""
        return jnp.take(self.embedder.embedding, tokens, axis=0)

    def head(self, x: jax.Array) -> jax.Array:
        """`[B, T, F]` to logits, f32 `[B, T, V]`."""
        x = self.final_norm(x)
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
        history_rotation = None
        if history is not None:
            history_rotation = rotate_at(jnp.arange(history.capacity))
        x = self.embed(tokens)
        new_layers = []
        for i, layer in enumerate(self.layers):
            old = None if history is None else history.layers[i]

            def attend_fn(
                q: jax.Array, new: LayerKV, old: LayerKV | None = old, window: int | None = c.window_of(i)
            ) -> tuple[jax.Array, LayerKV]:
                return attend(q, new, old, lengths, rotation, history_rotation, window=window), new

            x, new = layer(x, attend_fn)
            new_layers.append(new)
        return self.head(x), KVCache(tuple(new_layers), jnp.full((batch_size,), num_new, jnp.int32))
