"""A decoder-only transformer in Flax linen: pure functions of parameters, tokens, positions and an explicit history.

A layer does not know where its history is. It hands queries and the new tokens' KV to an `attend` function and adds
what comes back, so that one layer serves the research call (`Transformer.__call__`), layer-by-layer prefill and decode.
Which parts a model has is said by its config alone, so that one set of parts serves every family.

Shapes: B batch, T new tokens, S history tokens, L layers, N query heads, K KV heads, H head dim, F embed, V vocab.

Not here: attention itself, feed-forward blocks (feed_forward), rotation, sharding, checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from ca_jax.models import int4_product, latent_attention, rope
from ca_jax.models.attention import attend, matmul_precision
from ca_jax.models.config import LayerKind, ModelConfig
from ca_jax.models.feed_forward import MLP, Experts, activated
from ca_jax.models.kv import KVCache, LayerKV, State, no_states
from ca_jax.models.parts import INIT, Norm, Scale, adapted, look_up, matrix, norm_of, packed_product, project
from ca_jax.models.recurrent import RowStates, mixer_of
from ca_jax.models.sharding import ModelSharding
from ca_jax.models.small_weights import Int4Matrix, Int8Matrix, dtype_of


class Learned(NamedTuple):
    """What attention reads of a layer's parameters."""

    sinks: jax.Array | None = None
    """f32 `[N]`, a score of each head beside those of keys."""
    key_scale: jax.Array | None = None
    """f32 `[H]`, what kept values are multiplied by to be keys; None: keys are kept."""
    expansion: latent_attention.Expansion | None = None
    """What makes each head's keys and values of what is kept; None: that is they."""


AttendFn = Callable[[jax.Array, LayerKV | None, Learned], tuple[jax.Array, Any]]
"""Unrotated queries `[B, T, N, H]`, new KV `[B, T, K, H]`, None of a layer that has none of its own, and parameters to
attention output `[B, T, N, H]` and any carry. Scores are to be multiplied by 1 / sqrt(H), H of queries."""

_LATENT_EPS = 1e-6  # Of norms inside latent attention, whatever that of others is.


class Attention(nn.Module):
    """Projections of grouped-query attention around an `attend` function."""

    config: ModelConfig
    kind: LayerKind

    def setup(self) -> None:
        """Declares the parameters; their names are those in the tree."""
        c, kind = self.config, self.kind
        heads, kv_heads = (c.num_heads, kind.head_dim), (kind.num_kv_heads, kind.head_dim)
        zeros, num_axes = nn.initializers.zeros, 2 if c.qk_norm_is_whole else 1
        self.wq = matrix(self, "wq", (c.embed_dim, *heads))
        self.wo = matrix(self, "wo", (*heads, c.embed_dim))
        if c.qkv_bias:
            self.bq = self.param("bq", zeros, heads)
        if c.out_bias:
            self.bo = self.param("bo", zeros, (c.embed_dim,))
        if c.qk_norm:
            self.q_norm = Norm(c.norm_eps, offset=c.norm_offset, num_axes=num_axes)
        if kind.has_kv:
            self.wk = matrix(self, "wk", (c.embed_dim, *kv_heads))
            if c.qkv_bias:
                self.bk = self.param("bk", zeros, kv_heads)
            if c.value_norm:
                self.v_norm = Norm(c.norm_eps, has_scale=False)
            if kind.has_values:
                self.wv = matrix(self, "wv", (c.embed_dim, *kv_heads))
                if c.qkv_bias:
                    self.bv = self.param("bv", zeros, kv_heads)
            if c.qk_norm:
                # Where values alone are kept, what makes keys of them is the norm's scale.
                norm: Any = Norm(c.norm_eps, offset=c.norm_offset, num_axes=num_axes) if kind.has_values else Scale()
                self.k_norm = norm
        if c.has_sinks:
            self.sinks = self.param("sinks", nn.initializers.zeros, heads[:1])
        if c.gates_heads:
            self.wg = matrix(self, "wg", (c.embed_dim, *heads))

    def project(self, x: jax.Array) -> tuple[jax.Array, LayerKV | None]:
        """`x [B, T, F]` to unrotated queries `[B, T, N, H]` and KV `[B, T, K, H]`: nothing in them is of a position.

        Of a layer that has KV of its own.
        """
        c, kind = self.config, self.kind
        names = ("wq", "wk", "wv")[: 1 + kind.has_kv + (kind.has_kv and kind.has_values)]
        stops = [c.num_heads + i * kind.num_kv_heads for i in range(len(names))]
        packed = packed_product(self, "qkv", x, stops[-1] * kind.head_dim)
        if packed is None:
            of_heads = *x.shape[:-1], -1, kind.head_dim
            made = [project(x, getattr(self, name)).reshape(of_heads) for name in names]
        else:
            made = jnp.split(packed.reshape(*x.shape[:-1], -1, kind.head_dim), stops[:-1], axis=-2)
        made = [adapted(self, name, x, each) for name, each in zip(names, made, strict=True)]
        if c.qkv_bias:
            made = [each + getattr(self, f"b{name[1]}") for name, each in zip(names, made, strict=True)]
        q, *kv = made
        if c.qk_norm:
            q = self.q_norm(q)
            if len(kv) > 1:
                kv[0] = self.k_norm(kv[0])
        if c.value_norm and kv:
            kv[-1] = self.v_norm(kv[-1])
        if c.attention_scale is not None:
            q = (q.astype(jnp.float32) * (c.attention_scale * math.sqrt(kind.head_dim))).astype(q.dtype)
        return q, LayerKV(kv[0], kv[1] if len(kv) > 1 else None) if kv else None

    def __call__(self, x: jax.Array, attend_fn: AttendFn) -> tuple[jax.Array, Any]:
        """`x [B, T, F]` to `[B, T, F]` and what `attend_fn` carries out."""
        sinks = self.sinks.astype(jnp.float32) if self.config.has_sinks else None
        key_scale = None if self.kind.has_values or not self.kind.has_kv else self.k_norm(self.kind.head_dim)
        heads, carry = attend_fn(*self.project(x), Learned(sinks, key_scale))
        if self.config.gates_heads:
            heads = heads * nn.sigmoid(project(x, self.wg)).reshape(heads.shape).astype(heads.dtype)
        packed = packed_product(self, "out", heads.reshape(*heads.shape[:-2], -1), self.config.embed_dim)
        out = project(heads, self.wo, num_inputs=2) if packed is None else packed
        out = adapted(self, "wo", heads, out, num_inputs=2)
        return (out + self.bo if self.config.out_bias else out), carry


class LatentAttention(nn.Module):
    """Projections around attention of all heads over one latent of each token, and numbers of it that are rotated.

    What is stored is these, as one KV head; nothing of it has a position. What makes keys and values of it is handed to
    the `attend` function, which does so or applies it to queries and to what comes out (latent_attention).

    Source: multi-head latent attention: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.
    """

    config: ModelConfig

    def setup(self) -> None:
        """Declares the parameters; their names are those in the tree."""
        c = self.config
        num_inputs, num_heads = c.query_rank or c.embed_dim, c.num_heads
        if c.query_rank:
            self.wq_a = matrix(self, "wq_a", (c.embed_dim, c.query_rank))
            self.q_a_norm = Norm(_LATENT_EPS)
        self.wq = matrix(self, "wq", (num_inputs, num_heads, c.rotary_dim + c.nope_dim))
        self.wkv_a = matrix(self, "wkv_a", (c.embed_dim, c.head_dim))
        self.kv_norm = Norm(_LATENT_EPS)
        self.wuk = self.param("wuk", INIT, (c.latent_dim, num_heads, c.nope_dim))
        self.wuv = self.param("wuv", INIT, (c.latent_dim, num_heads, c.value_dim))
        self.wo = matrix(self, "wo", (num_heads, c.value_dim, c.embed_dim))

    def project(self, x: jax.Array) -> tuple[jax.Array, LayerKV]:
        """`x [B, T, F]` to unrotated queries and KV `[B, T, 1, H]`: nothing in them is of a position.

        Queries are as wide as keys that are made of latents, `[B, T, N, rotary_dim + nope_dim]`.
        """
        c = self.config
        q = project(self.q_a_norm(project(x, self.wq_a)) if c.query_rank else x, self.wq)
        q = q.reshape(*x.shape[:-1], c.num_heads, -1)
        if c.attention_scale is not None:
            q = (q.astype(jnp.float32) * (c.attention_scale * math.sqrt(q.shape[-1]))).astype(q.dtype)
        turned, latent = jnp.split(project(x, self.wkv_a), (c.rotary_dim,), axis=-1)
        return q, LayerKV(jnp.concatenate([turned, self.kv_norm(latent)], axis=-1)[:, :, None], None)

    def __call__(self, x: jax.Array, attend_fn: AttendFn) -> tuple[jax.Array, Any]:
        """`x [B, T, F]` to `[B, T, F]` and what `attend_fn` carries out."""
        expansion = latent_attention.Expansion(self.wuk, self.wuv)
        values, carry = attend_fn(*self.project(x), Learned(expansion=expansion))
        return project(values.astype(x.dtype), self.wo, num_inputs=2), carry


class Layer(nn.Module):
    """One block: attention and feed-forward, each added to the residual stream; norms are before them, behind them or
    both.

    Sequential, the feed-forward reads what attention has added; parallel, both read the same, through a norm each or
    through one.
    """

    config: ModelConfig
    kind: LayerKind
    sharding: ModelSharding | None = None
    number: int | None = None
    """Which of the layers, where what each is given is to be told by that; None: the variable `places` says it."""

    def setup(self) -> None:
        """Declares the parts; their names are the names in the parameter tree."""
        c = self.config
        if c.norms_before:
            self.attn_norm = norm_of(c)
            if not c.shares_norm:
                self.mlp_norm = norm_of(c)
        if c.norms_behind:
            self.attn_post_norm, self.mlp_post_norm = norm_of(c), norm_of(c)
        if self.kind.is_recurrent:
            self.mixer = mixer_of(c, self.sharding)
        else:
            self.attn = LatentAttention(c) if c.latent_dim else Attention(c, self.kind)
        has_experts = self.kind.has_experts
        self.mlp = Experts(c, self.sharding) if has_experts else MLP(c, c.mlp_dim_of(self.kind))
        if c.layer_input_dim:
            self.w_given_gate = self.param("w_given_gate", INIT, (c.embed_dim, c.layer_input_dim))
            self.w_given_out = self.param("w_given_out", INIT, (c.layer_input_dim, c.embed_dim))
            self.given_norm = norm_of(c)
        if c.has_layer_scale:
            self.out_scale = self.param("out_scale", nn.initializers.ones, (1,))
        if has_experts and c.shared_mlp_dim:
            self.shared = MLP(c, c.shared_mlp_dim, c.gates_shared)
        if has_experts and c.norms_experts:
            self.experts_norm, self.experts_post_norm, self.shared_post_norm = (norm_of(c) for _ in range(3))

    def new_kv(self, x: jax.Array) -> LayerKV:
        """`x [B, T, F]` to the unrotated KV of these tokens, `[B, T, K, H]`, of a layer that has some."""
        x = x[..., : self.config.embed_dim]
        return cast(LayerKV, self.attn.project(self.attn_norm(x) if self.config.norms_before else x)[1])

    def feed_forward(self, x: jax.Array, stream: jax.Array) -> jax.Array:
        """`x [B, T, F]`, normed, and the residual stream that it was made of, to `[B, T, F]`."""
        if isinstance(self.mlp, Experts) and self.config.norms_experts:
            out = self.experts_post_norm(self.mlp(self.experts_norm(stream), stream))
            out = out + self.shared_post_norm(self.shared(x))
        else:
            out = self.mlp(x)
            if self.kind.has_experts and self.config.shared_mlp_dim:
                out = out + self.shared(x)
        return self.mlp_post_norm(out) if self.config.norms_behind else out

    def given(self, x: jax.Array, behind: jax.Array) -> jax.Array:
        """The residual stream `[B, T, F]` and what the layer makes of what it is given, from behind the stream."""
        c = self.config
        number: Any = self.get_variable("places", "number") if self.number is None else self.number
        own = jax.lax.dynamic_slice_in_dim(behind, number * c.layer_input_dim, c.layer_input_dim, axis=-1)
        gate = project(x, self.w_given_gate)
        return x + self.given_norm(project(activated(c, gate, own), self.w_given_out))

    def __call__(self, x: jax.Array, attend_fn: AttendFn | RowStates) -> tuple[jax.Array, Any]:
        """`x [B, T, F]`, and behind it what layers are given, to `x [B, T, F]` and what `attend_fn` carries out; of a
        layer with states, those behind."""
        c = self.config
        x, behind = x[..., : c.embed_dim], x[..., c.embed_dim :]

        def add(x: jax.Array, out: jax.Array) -> jax.Array:
            return x + (out if c.residual_scale == 1 else out * jnp.asarray(c.residual_scale, out.dtype))

        normed = self.attn_norm(x) if c.norms_before else x
        mixer: Any = self.mixer if self.kind.is_recurrent else self.attn
        out, carry = mixer(normed, attend_fn)
        if c.norms_behind:
            out = self.attn_post_norm(out)
        summed = add(x, out)
        read = x if c.is_parallel else summed
        if not c.shares_norm:
            normed = self.mlp_norm(read) if c.norms_before else read
        x = add(summed, self.feed_forward(normed, read))
        if c.layer_input_dim:
            x = self.given(x, behind)
        return (x * self.out_scale.astype(x.dtype) if c.has_layer_scale else x), carry


class LayerInputs(nn.Module):
    """What layers are given of tokens beside the residual stream: of each layer a row of a table, and what the token's
    embedding is projected to.

    Source: per-layer embeddings, Gemma Team, "Gemma 3n" (2025).
    """

    config: ModelConfig

    def setup(self) -> None:
        """Declares the parameters; their names are those in the tree."""
        c = self.config
        width = c.num_layers * c.layer_input_dim
        self.embedding = self.param("embedding", INIT, (c.vocab_size, width))
        self.w = self.param("w", INIT, (c.embed_dim, width))
        self.norm = Norm(c.norm_eps, offset=c.norm_offset)

    def __call__(self, x: jax.Array, rows: jax.Array) -> jax.Array:
        """`x [B, T, F]`, as it goes into the first layer, and rows of the table `[B, T, L E]` to `[B, T, F + L E]`."""
        c = self.config
        made = (project(x, self.w) * jnp.asarray(c.embed_dim**-0.5, x.dtype)).reshape(*x.shape[:-1], c.num_layers, -1)
        found = rows.reshape(made.shape) * jnp.asarray(c.layer_input_dim**0.5, x.dtype)
        given = (self.norm(made) + found) * jnp.asarray(2**-0.5, x.dtype)
        return jnp.concatenate([x, given.reshape(rows.shape)], axis=-1)


def scale_embedded(config: ModelConfig, x: jax.Array) -> jax.Array:
    """Embeddings as layers read them, from those in the table."""
    return x if config.embed_scale == 1 else x * jnp.asarray(config.embed_scale, x.dtype)


def put_stream(x: jax.Array, stream: jax.Array) -> jax.Array:
    """What goes into the next layer: `x [B, T, F and more]`, its residual stream `[B, T, F]` another one."""
    return stream if stream.shape == x.shape else jax.lax.dynamic_update_slice_in_dim(x, stream, 0, 1)


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
        if c.layer_input_dim:
            self.inputs = LayerInputs(c)
        self.layers = [Layer(c, c.kind_of(i), number=i, name=f"layer_{i}") for i in range(c.num_layers)]
        self.final_norm = norm_of(c)
        if not c.tie_embeddings:
            self.unembedder = nn.Dense(c.vocab_size, use_bias=False, kernel_init=INIT, name="head")

    def embed(self, tokens: jax.Array) -> jax.Array:
        """i32 `[B, T]` to `[B, T, F]` in the dtype of the parameters, and behind it what layers are given."""
        dtype = dtype_of(self.variables)
        x = scale_embedded(self.config, look_up(self.embedder.embedding, tokens, dtype))
        if not self.config.layer_input_dim:
            return x
        return self.with_inputs(x, look_up(self.inputs.embedding, tokens, dtype))

    def with_inputs(self, x: jax.Array, rows: jax.Array) -> jax.Array:
        """As `LayerInputs`."""
        found: jax.Array = self.inputs(x, rows)
        return found

    def head(self, x: jax.Array) -> jax.Array:
        """`[B, T, F]` to logits, f32 `[B, T, V]`."""
        c = self.config
        logits = self._unembed(self.final_norm(x[..., : c.embed_dim]))
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
        rows, scales = x.reshape(-1, x.shape[-1]), None
        if isinstance(weights, Int4Matrix):
            logits = int4_product.product(rows, weights, dtype=jnp.float32)
            return logits.reshape(*x.shape[:-1], self.config.vocab_size)
        if isinstance(weights, Int8Matrix):
            weights, scales = weights.numbers.astype(x.dtype), weights.scales
        logits = jax.lax.dot_general(
            rows,
            weights,
            (((1,), (axis,)), ((), ())),
            precision=matmul_precision(x),
            preferred_element_type=jnp.float32,
        )
        return (logits if scales is None else logits * scales).reshape(*x.shape[:-1], self.config.vocab_size)

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
        rotate_at = partial(rope.rotation_at, context=context or num_places)
        rotations = [rotate_at(*each, positions) for each in c.ropes]
        lengths = jnp.zeros((batch_size,), jnp.int32) if history is None else history.lengths
        history_rotations: list[rope.Rotation | None] = [None] * len(rotations)
        if history is not None:
            history_rotations = [rotate_at(*each, jnp.arange(history.capacity)) for each in c.ropes]
        x = self.embed(tokens)
        new_layers: list[LayerKV] = []
        states = list(self._states(history, batch_size, x.dtype))
        for i, layer in enumerate(self.layers):
            kind, source = c.kind_of(i), c.kv_number(i)
            if kind.is_recurrent:
                at, starts = i - len(new_layers), jnp.arange(batch_size + 1) * num_new
                x, states[at] = layer(x, RowStates(states[at], starts))
                continue
            old = None if history is None else history.layers[source]

            def attend_fn(
                q: jax.Array,
                new: LayerKV | None,
                learned: Learned,
                old: LayerKV | None = old,
                kind: LayerKind = kind,
                source: int = source,
            ) -> tuple[jax.Array, LayerKV]:
                past = None if old is None else jnp.stack(old.parts)
                turns = rotations[kind.rope], history_rotations[kind.rope]
                q, new = scale_queries(c, q, positions), new_layers[source] if new is None else new
                given = (q, new, past, lengths, *turns, kind.window, c.score_cap)
                if learned.expansion is not None:
                    return latent_attention.attend(*given, expansion=learned.expansion), new
                return attend(*given, learned.sinks, learned.key_scale), new

            stream, new = layer(x, attend_fn)
            x = put_stream(x, stream)
            if kind.has_kv:
                new_layers.append(new)
        new_cache = KVCache(tuple(new_layers), jnp.full((batch_size,), num_new, jnp.int32), tuple(states))
        return self.head(x), new_cache

    def _states(self, history: KVCache | None, batch_size: int, dtype: Any) -> tuple[State, ...]:
        """Where layers with a state stand behind a history."""
        num_states = self.config.num_states
        if history is None:
            return tuple(no_states(self.config, batch_size, dtype) for _ in range(num_states))
        if len(history.states) != num_states:
            raise ValueError(f"a history must have the states of {num_states} layers, got {len(history.states)}")
        return history.states
