"""Layers that keep a state: short convolutions, gated delta rules, state spaces, over tokens of several rows at once.

Tokens of rows lie one behind the other, as in `paged_attention`; each row goes on from a state of its own.

    tokens      a0 a1 a2 | b0 b1 | c0 | . .            starts 0 3 5 6, of 8: the last two are padding
    states      a: behind the token before a0          after: behind a2, b1 and c0

Nothing goes from one row to another. Of a row without tokens what comes out is the state that went in.

On a mesh tokens, rows and starts are those of its parts, one behind the other. A device convolves channels of its own
and has heads of its own. Between the two it is given all channels of its part's tokens: queries, keys and values lie
one behind the other among them, so that what one device convolves is not what its heads take.

Shapes: T tokens of all rows (padded), n rows, F embed, C numbers that are convolved, W conv width, J key heads, N value
heads, D and E numbers of a key and of a value.

Not here: which layers these are, sizes (recurrence), whose states are where (device.states).
Source: LFM2 (Liquid AI, 2025); gated delta rule: Yang et al., "Gated Delta Networks" (2024), as in Qwen3-Next;
each number by itself: Kimi Team, "Kimi Linear" (2025); state spaces: Dao and Gu, "Transformers are SSMs" (2024), as in
Granite 4.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from ca_jax.models.config import ModelConfig
from ca_jax.models.kv import State
from ca_jax.models.parts import INIT, project
from ca_jax.models.recurrence import RecurrenceConfig, RecurrenceKind
from ca_jax.models.sharding import Axes, ModelSharding, by_device, constrain

CHUNK = 64
"""Tokens of a row that a delta rule takes together."""
CHANNEL_CHUNK = 16
"""The same where each of a key's numbers forgets by itself: so many times as much lies between two tokens."""

CELLS: tuple[Axes, ...] = (("batch", None, "channels"), ("batch", "heads", None, None))
"""Of the states of rows, `[n, *shape]` of each of `RecurrenceConfig.state_shapes`."""
ROWS: Axes = ("batch",)
"""Of what has one entry for each row, or for each token."""
TOKEN_HEADS: Axes = ("batch", "heads", None)
"""Of queries, keys and values `[T, N, D]`."""

_NORM_EPS = 1e-6  # Of the lengths of queries and keys.


class RowStates(NamedTuple):
    """Where rows stand before a step, and which of its tokens are theirs."""

    states: State
    """Of each row."""
    starts: jax.Array
    """i32 `[n + 1]`, the first of each row's tokens among all, and one past the last."""
    one_each: bool = False
    """Whether each row has one token at most, its own number among them."""


def convolved(x: jax.Array, kernel: jax.Array, before: jax.Array, starts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A causal convolution of each number by itself, within rows.

    Args:
      x: `[T, C]`.
      kernel: `[C, W]`, the last column of the token itself.
      before: `[n, W - 1, C]`, the inputs before each row's first token.
      starts: as in `RowStates`.

    Returns:
      f32 `[T, C]`, and the last W - 1 inputs of each row, as `before`.
    """
    num_tokens, num_kept = len(x), before.shape[1]
    taps = kernel.astype(jnp.float32).T
    tokens, rows = jnp.arange(num_tokens), row_of(starts, num_tokens)
    place = tokens - starts[rows]
    out = x.astype(jnp.float32) * taps[-1]
    for lag in range(1, num_kept + 1):
        of_row = jnp.pad(x, ((lag, 0), (0, 0)))[:num_tokens]
        of_state = before[rows, jnp.clip(num_kept - lag + place, 0, num_kept - 1)]
        taken = jnp.where((place >= lag)[:, None], of_row, of_state)
        out = out + taken.astype(jnp.float32) * taps[num_kept - lag]
    last = (starts[1:] - starts[:-1])[:, None] + jnp.arange(num_kept)  # Among those before and a row's own.
    of_row = x[jnp.clip(starts[:-1, None] + last - num_kept, 0, num_tokens - 1)]
    of_state = jnp.take_along_axis(before, jnp.clip(last, 0, num_kept - 1)[..., None], axis=1)
    return out, jnp.where((last < num_kept)[..., None], of_state, of_row.astype(before.dtype))


def row_of(starts: jax.Array, num_tokens: int) -> jax.Array:
    """The row of each token, i32 `[T]`; of padding any."""
    rows = jnp.searchsorted(starts[1:], jnp.arange(num_tokens), side="right")
    return jnp.minimum(rows, len(starts) - 2)


def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array | None,
    before: jax.Array,
    starts: jax.Array,
    *,
    one_each: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Runs `S = exp(g) S + k (beta (v - (exp(g) S)^T k))^T` over each row's tokens; each gives `S^T q`.

    Without beta, `S = exp(g) S + k v^T`: a selective state space. All in f32. Tokens of a row are taken a chunk at a
    time: what each adds to the state is solved for all of them at once, from a triangular system.

    Args:
      q: `[T, N, D]`; k likewise.
      v: `[T, N, E]`.
      log_decay: g, `[T, N]`, or `[T, N, D]` of each of a key's numbers, not positive.
      beta: `[T, N]`; None: nothing of the state is corrected.
      before: `[n, N, D, E]`.
      starts: as in `RowStates`.
      one_each: static, likewise.

    Returns:
      `[T, N, E]`, and each row's state behind its last token, as `before`.
    """
    by_channel = log_decay.ndim == q.ndim
    log_decay = log_decay if by_channel else log_decay[..., None]
    if one_each:
        is_there = (starts[1:] > starts[:-1])[:, None]
        decayed = before * jnp.exp(jnp.where(is_there[..., None], log_decay, 0))[..., None]
        if beta is None:
            added = jnp.where(is_there[..., None], v, 0)
        else:
            wanted = v - jnp.einsum("tnde,tnd->tne", decayed, k)
            added = jnp.where(is_there, beta, 0)[..., None] * wanted
        after = decayed + k[..., None] * added[..., None, :]
        return jnp.einsum("tnde,tnd->tne", after, q), after
    num_tokens, size = len(q), min(CHANNEL_CHUNK if by_channel else CHUNK, len(q))
    counts = starts[1:] - starts[:-1]
    num_chunks = (counts + size - 1) // size
    ends = jnp.cumsum(num_chunks)
    given = (q, k, v, log_decay) if beta is None else (q, k, v, log_decay, beta)
    padded = [jnp.pad(each, ((0, size), *[(0, 0)] * (each.ndim - 1))) for each in given]
    lower, strict = jnp.tril(jnp.ones((size, size), bool)), jnp.tril(jnp.ones((size, size), bool), -1)

    def chunk(index: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, states = carried
        row = jnp.searchsorted(ends, index, side="right")
        done = (index - ends[row] + num_chunks[row]) * size
        first = starts[row] + done
        is_own = (done + jnp.arange(size) < counts[row])[:, None]
        taken = [jnp.moveaxis(lax.dynamic_slice_in_dim(each, first, size), 1, 0) for each in padded]
        q, k, v, g = (jnp.where(is_own, each, 0) for each in taken[:4])  # Whatever the next row's are, NaN too.
        total = jnp.cumsum(g, axis=1)  # [N, size, 1 or D]
        is_lower = lower[..., None]
        between = jnp.where(is_lower, total[:, :, None] - total[:, None], 0)  # Not positive: no exp of it is large.
        decays = jnp.where(is_lower, jnp.exp(between), 0)

        def decayed(a: jax.Array, b: jax.Array) -> jax.Array:
            if by_channel:
                return jnp.einsum("nid,njd,nijd->nij", a, b, decays)
            return decays[..., 0] * jnp.einsum("nid,njd->nij", a, b)

        state, from_first = states[row], jnp.exp(total)
        added = v
        for beta in taken[4:]:
            beta = jnp.where(is_own[:, 0], beta, 0)
            system = jnp.where(strict, beta[..., None] * decayed(k, k), 0) + jnp.eye(size)
            wanted = beta[..., None] * (v - jnp.einsum("nid,nde->nie", from_first * k, state))
            added = jax.scipy.linalg.solve_triangular(system, wanted, lower=True, unit_diagonal=True)
        given = jnp.einsum("nid,nde->nie", from_first * q, state) + jnp.einsum("nij,nje->nie", decayed(q, k), added)
        kept = jnp.exp(total[:, -1:] - total) * k
        state = jnp.exp(total[:, -1])[..., None] * state + jnp.einsum("njd,nje->nde", kept, added)
        # What lies behind a row's last token is written over by the next row.
        out = lax.dynamic_update_slice_in_dim(out, jnp.moveaxis(given, 0, 1), first, 0)
        return out, states.at[row].set(state)

    out = jnp.zeros((num_tokens + size, *v.shape[1:]), jnp.float32)
    out, after = lax.fori_loop(0, ends[-1], chunk, (out, before))
    return out[:num_tokens], after


def _convolve(x: jax.Array, kernel: jax.Array, rows: RowStates, sharding: ModelSharding | None) -> tuple[Any, Any]:
    """`convolved`, by each device of its rows' channels."""
    before: Axes = CELLS[0]
    token: Axes = ("batch", "channels")
    if sharding is not None:
        before, token = sharding.divided(before, rows.states[0].shape), sharding.divided(token, x.shape)
    of_device = by_device(convolved, sharding, (token, (*token[1:], None), before, ROWS), (token, before))
    return of_device(x, kernel, rows.states[0], rows.starts)


def _recur(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array | None,
    rows: RowStates,
    sharding: ModelSharding | None,
) -> tuple[Any, Any]:
    """`delta_rule`, by each device of its rows' heads."""
    token, before = TOKEN_HEADS, CELLS[1]
    if sharding is not None:
        token, before = sharding.divided(token, v.shape), sharding.divided(before, rows.states[1].shape)
    function = partial(delta_rule, one_each=rows.one_each)
    in_axes = (token, token, token, token[: log_decay.ndim], token[:2], before, ROWS)
    return by_device(function, sharding, in_axes, (token, before))(
        q, k, v, log_decay, beta, rows.states[1], rows.starts
    )


def _parts(x: jax.Array, stops: int | tuple[int, ...], sharding: ModelSharding | None) -> list[jax.Array]:
    """Splits numbers of tokens `[T, C]`. Each device has all of each: XLA would split what is divided by sending it."""
    return [constrain(each, sharding, ROWS) for each in jnp.split(constrain(x, sharding, ROWS), stops, axis=-1)]


class ShortConv(nn.Module):
    """A convolution of a few tokens between two gates."""

    config: ModelConfig
    sharding: ModelSharding | None = None

    @nn.compact
    def __call__(self, x: jax.Array, rows: RowStates) -> tuple[jax.Array, State]:
        """`x [B, T, F]`, tokens of rows, to `[B, T, F]` and the rows' states behind them."""
        c, r = self.config, _of(self.config)
        zeros = nn.initializers.zeros

        def biased(name: str, out: jax.Array) -> jax.Array:
            return out + self.param(name, zeros, out.shape[-1:]).astype(out.dtype) if r.has_bias else out

        wide = biased("b_in", project(x, self.param("w_in", INIT, (c.embed_dim, 3 * c.embed_dim))))
        before, behind, inner = _parts(wide.reshape(-1, wide.shape[-1]), 3, self.sharding)
        kernel = self.param("kernel", INIT, (c.embed_dim, r.conv_width))
        out, last = _convolve(before * inner, kernel, rows, self.sharding)
        gated = (behind * biased("b_kernel", out).astype(x.dtype)).reshape(x.shape)
        return biased("b_out", project(gated, self.param("w_out", INIT, (c.embed_dim, c.embed_dim)))), (last,)


class GatedDelta(nn.Module):
    """A matrix a head that forgets, and is corrected by what each token says; gated and normed behind."""

    config: ModelConfig
    sharding: ModelSharding | None = None

    @nn.compact
    def __call__(self, x: jax.Array, rows: RowStates) -> tuple[jax.Array, State]:
        """`x [B, T, F]`, tokens of rows, to `[B, T, F]` and the rows' states behind them."""
        c, r = self.config, _of(self.config)
        heads, conv_dim = r.num_value_heads, r.conv_dim(c.embed_dim)
        wide = project(x, self.param("w_qkv", INIT, (c.embed_dim, conv_dim))).reshape(-1, conv_dim)
        gate = project(x, self.param("w_z", INIT, (c.embed_dim, heads, r.value_dim)))
        beta = project(x, self.param("w_beta", INIT, (c.embed_dim, heads)))
        step = project(x, self.param("w_step", INIT, (c.embed_dim, heads)))
        kernel = self.param("kernel", INIT, (conv_dim, r.conv_width))
        a_log = self.param("a_log", nn.initializers.zeros, (heads,)).astype(jnp.float32)
        b_step = self.param("b_step", nn.initializers.zeros, (heads,)).astype(jnp.float32)
        out, last = _convolve(wide, kernel, rows, self.sharding)
        out = constrain(nn.silu(out).astype(x.dtype), self.sharding, ROWS).astype(jnp.float32)
        of_keys = r.num_key_heads * r.key_dim
        q, k, v = _parts(out, (of_keys, 2 * of_keys), self.sharding)
        of_heads = -1, r.num_key_heads, r.key_dim
        q, k = (_unit(constrain(each.reshape(of_heads), self.sharding, TOKEN_HEADS)) for each in (q, k))
        q, k = (jnp.repeat(each, heads // r.num_key_heads, axis=1) for each in (q, k))
        log_decay = -jnp.exp(a_log) * jax.nn.softplus(step.astype(jnp.float32) + b_step)
        with jax.default_matmul_precision("highest"):
            out, state = _recur(
                q / jnp.sqrt(jnp.float32(r.key_dim)),
                k,
                v.reshape(-1, heads, r.value_dim),
                log_decay.reshape(-1, heads),
                nn.sigmoid(beta.astype(jnp.float32)).reshape(-1, heads),
                rows,
                self.sharding,
            )
        scale = self.param("scale", nn.initializers.ones, (r.value_dim,))
        out = out * lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + c.norm_eps)
        out = out.astype(x.dtype) * scale.astype(x.dtype)
        out = (out.reshape(gate.shape) * nn.silu(gate.astype(jnp.float32))).astype(x.dtype)
        w_out = self.param("w_out", INIT, (heads, r.value_dim, c.embed_dim))
        return project(out, w_out, num_inputs=2), (last, state)


class ChannelDelta(nn.Module):
    """As `GatedDelta`, but each of a key's numbers forgets by itself, and gates are sigmoids (Kimi Delta Attention)."""

    config: ModelConfig
    sharding: ModelSharding | None = None

    @nn.compact
    def __call__(self, x: jax.Array, rows: RowStates) -> tuple[jax.Array, State]:
        """`x [B, T, F]`, tokens of rows, to `[B, T, F]` and the rows' states behind them."""
        c, r = self.config, _of(self.config)
        zeros, heads, size = nn.initializers.zeros, r.num_value_heads, r.value_dim
        width = heads * size

        def low_rank(name: str) -> jax.Array:
            narrow = project(x, self.param(f"w_{name}_a", INIT, (c.embed_dim, size)))
            return project(narrow, self.param(f"w_{name}_b", INIT, (size, width))).astype(jnp.float32)

        wide = [project(x, self.param(f"w_{part}", INIT, (c.embed_dim, width))) for part in "qkv"]
        kernels = [self.param(f"kernel_{part}", INIT, (width, r.conv_width)) for part in "qkv"]
        wide = [constrain(each, self.sharding, ROWS) for each in wide]
        flat = constrain(jnp.concatenate(wide, axis=-1).reshape(-1, 3 * width), self.sharding, ROWS)
        out, last = _convolve(flat, constrain(jnp.concatenate(kernels), self.sharding), rows, self.sharding)
        out = constrain(nn.silu(out).astype(x.dtype), self.sharding, ROWS).astype(jnp.float32)
        q, k, v = (part.reshape(-1, heads, size) for part in _parts(out, 3, self.sharding))
        q, k = (constrain(each, self.sharding, TOKEN_HEADS) for each in (q, k))
        beta = nn.sigmoid(project(x, self.param("w_beta", INIT, (c.embed_dim, heads))).astype(jnp.float32))
        a_log = self.param("a_log", zeros, (1, heads)).astype(jnp.float32)
        step = low_rank("decay") + self.param("b_step", zeros, (width,)).astype(jnp.float32)
        with jax.default_matmul_precision("highest"):
            out, state = _recur(
                _unit(q) / jnp.sqrt(jnp.float32(size)),
                _unit(k),
                v,
                -jnp.exp(a_log)[..., None] * jax.nn.softplus(step).reshape(-1, heads, size),
                beta.reshape(-1, heads),
                rows,
                self.sharding,
            )
        out = out.astype(x.dtype).astype(jnp.float32)
        out = out * lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + c.norm_eps)
        out = out * self.param("scale", nn.initializers.ones, (size,)).astype(jnp.float32)
        gated = out.reshape(*x.shape[:-1], heads, size) * nn.sigmoid(low_rank("gate")).reshape(
            *x.shape[:-1], heads, size
        )
        w_out = self.param("w_out", INIT, (heads, size, c.embed_dim))
        return project(gated.astype(x.dtype), w_out, num_inputs=2), (last, state)


class StateSpace(nn.Module):
    """A matrix a head that forgets as each token says, and to which it is added (Mamba-2); gated and normed behind."""

    config: ModelConfig
    sharding: ModelSharding | None = None

    @nn.compact
    def __call__(self, x: jax.Array, rows: RowStates) -> tuple[jax.Array, State]:
        """`x [B, T, F]`, tokens of rows, to `[B, T, F]` and the rows' states behind them."""
        c, r = self.config, _of(self.config)
        zeros, heads, conv_dim = nn.initializers.zeros, r.num_value_heads, r.conv_dim(c.embed_dim)
        wide = project(x, self.param("w_qkv", INIT, (c.embed_dim, conv_dim))).reshape(-1, conv_dim)
        gate = project(x, self.param("w_z", INIT, (c.embed_dim, heads, r.value_dim))).astype(jnp.float32)
        step = project(x, self.param("w_step", INIT, (c.embed_dim, heads))).reshape(-1, heads)
        out, last = _convolve(wide, self.param("kernel", INIT, (conv_dim, r.conv_width)), rows, self.sharding)
        if r.has_bias:
            out = out + self.param("b_kernel", zeros, (conv_dim,)).astype(jnp.float32)
        out = constrain(nn.silu(out).astype(x.dtype), self.sharding, ROWS).astype(jnp.float32)
        of_values, of_keys = heads * r.value_dim, r.num_key_heads * r.key_dim
        v, k, q = _parts(out, (of_values, of_values + of_keys), self.sharding)
        q, k = (each.reshape(-1, r.num_key_heads, r.key_dim) for each in (q, k))
        q, k = (constrain(each, self.sharding, TOKEN_HEADS) for each in (q, k))
        q, k = (jnp.repeat(each, heads // r.num_key_heads, axis=1) for each in (q, k))
        v = v.reshape(-1, heads, r.value_dim)
        a_log, b_step, skip = (
            self.param(name, zeros, (heads,)).astype(jnp.float32) for name in ("a_log", "b_step", "skip")
        )
        step = jax.nn.softplus(step.astype(jnp.float32) + b_step)
        with jax.default_matmul_precision("highest"):
            out, state = _recur(q, k, v * step[..., None], -jnp.exp(a_log) * step, None, rows, self.sharding)
        out = (out + skip[:, None] * v).astype(x.dtype).astype(jnp.float32).reshape(gate.shape) * nn.silu(gate)
        grouped = out.reshape(*out.shape[:-2], r.num_key_heads, -1)
        grouped = grouped * lax.rsqrt(jnp.mean(grouped * grouped, axis=-1, keepdims=True) + c.norm_eps)
        scale = self.param("scale", nn.initializers.ones, (heads * r.value_dim,)).astype(x.dtype)
        out = (grouped.reshape(*out.shape[:-2], -1).astype(x.dtype) * scale).reshape(out.shape)
        w_out = self.param("w_out", INIT, (heads, r.value_dim, c.embed_dim))
        return project(out, w_out, num_inputs=2), (last, state)


_MIXERS: dict[RecurrenceKind, Any] = {
    "short_conv": ShortConv,
    "gated_delta": GatedDelta,
    "channel_delta": ChannelDelta,
    "state_space": StateSpace,
}


def mixer_of(config: ModelConfig, sharding: ModelSharding | None = None) -> nn.Module:
    """What a layer with a state has in place of attention."""
    mixer: nn.Module = _MIXERS[_of(config).kind](config, sharding)
    return mixer


def _of(config: ModelConfig) -> RecurrenceConfig:
    if config.recurrence is None:
        raise ValueError(f"a model with states must have a recurrence, got {config.architecture} without")
    return config.recurrence


def _unit(x: jax.Array) -> jax.Array:
    """Vectors `[..., D]` of length 1."""
    return x * lax.rsqrt((x * x).sum(-1, keepdims=True) + _NORM_EPS)
