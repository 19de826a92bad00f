"""Selective recompute: stored KV is used as it stands, but for the few tokens whose KV deviates most.

Layer by layer, the chosen tokens are computed anew over all tokens, and their keys and values take the place of the
stored ones. Which are chosen is decided by how far their KV at a layer is from what was stored, and may become fewer
from layer to layer. Truncation uses it to repair what has seen dropped tokens.

    layer            0    1    2    3    4  ...        tokens that are computed anew (x); for all others
    token  0         x    x    x    x    x             the stored KV stands
           1         x    .    .    .    .
           2         x    x    x    .    .
           3         x    .    .    .    .

Or they are evenly apart, and say how the KV of all others moves: by a linear map of what is stored, which is fitted to
them in each layer and head. What moves KV when others left is mostly common to the tokens of a text.

Everything here is pure. Shapes: L layers, n chosen tokens, S places of stored KV, K KV heads, H head dim, F embed.

Not here: which KV, where it comes from and where it goes (repair, engine).
Source: CacheBlend (Yao et al., EuroSys 2025), section 4.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ca_jax.device.steps.common import HEADS, KV_HEADS, Params, apply, slice_rotation
from ca_jax.device.transfer import to_device
from ca_jax.models import rope
from ca_jax.models.attention import attend, attend_chosen
from ca_jax.models.config import ModelConfig
from ca_jax.models.kv import LayerKV
from ca_jax.models.sharding import ModelSharding, by_device, constrain, replicated
from ca_jax.models.transformer import Layer
from ca_jax.overflow.config import OverflowConfig

_COUNT_STEP = 8  # Chosen tokens are a multiple of it: each number is compiled for.
_UNFIT_TOKENS = 16  # First tokens move as no others do: nothing is fitted to them.
_RIDGE = 3.0  # Of the fit, times the mean squared length of what it is fitted to.
_LN_TOLERANCE = 16.0  # Of the fit, the natural logarithm of one over it: what f32 tells apart.


@partial(jax.jit, static_argnames=("config", "window", "sharding"))
def blend_layer(
    config: ModelConfig,
    layer_params: Params,
    x: jax.Array,
    positions: jax.Array,
    kv: jax.Array,
    table: rope.Rotation,
    carried: tuple[jax.Array, ...] | None = None,
    window: int | None = None,
    sharding: ModelSharding | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes one layer of some tokens anew, over the KV of all.

    Args:
      config: static.
      layer_params: of this layer.
      x: `[1, n, F]`, the chosen tokens.
      positions: i32 `[n]`, increasing: their places in `kv`. At S or beyond it is padding, which changes nothing.
      kv: this layer's unrotated KV `[2, S, K, H]`. A token sees places up to its own.
      table: rotations of all positions.
      carried: bool `[n]` and `[S]`: by which of these tokens others move, and which places do, see `carry_along`; None:
        the others stay.
      window: static, of the layer: `config.window_of`.
      sharding: static.

    Returns:
      `x [1, n, F]` for the next layer, and `kv` with the chosen tokens' own in their places.
    """
    rotation = rope.Rotation(*(part.at[positions].get(mode="clip")[None] for part in table))
    all_rotations = rope.Rotation(*(lax.slice_in_dim(part, 0, kv.shape[1]) for part in table))

    def attend_heads(
        q: jax.Array,
        new: LayerKV,
        kv: jax.Array,
        positions: jax.Array,
        rotation: rope.Rotation,
        all_rotations: rope.Rotation,
        carried: tuple[jax.Array, ...] | None,
    ) -> tuple[jax.Array, jax.Array]:
        both = jnp.concatenate([new.k, new.v], axis=0).astype(kv.dtype)
        return _attend_fused(q, both, positions, kv, rotation, all_rotations, carried, window)

    def attend_fn(q: jax.Array, new: LayerKV) -> tuple[jax.Array, jax.Array]:
        in_axes = (HEADS, KV_HEADS, KV_HEADS, (), (), (), ())
        of_device = by_device(attend_heads, sharding, in_axes, (HEADS, KV_HEADS))
        out: tuple[jax.Array, jax.Array] = of_device(q, new, kv, positions, rotation, all_rotations, carried)
        return out

    x, fused = apply(Layer(config, sharding), {"params": layer_params}, x, attend_fn)
    return constrain(x, sharding), fused


def _attend_fused(
    q: jax.Array,
    new: jax.Array,
    positions: jax.Array,
    kv: jax.Array,
    rotation: rope.Rotation,
    all_rotations: rope.Rotation,
    carried: tuple[jax.Array, ...] | None,
    window: int | None,
) -> tuple[jax.Array, jax.Array]:
    """Chosen tokens attend to KV `[2, S, K, H]` with their own `new [2, n, K, H]` in its places; also gives that KV."""
    rest = kv if carried is None else carry_along(new, positions, kv, *carried)
    fused = rest.at[:, positions].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)
    keys = rope.rotate(fused[0], all_rotations)
    return attend_chosen(rope.rotate(q, rotation)[0], keys, fused[1], positions, window)[None], fused


def carry_along(new: jax.Array, positions: jax.Array, kv: jax.Array, fitted: jax.Array, moves: jax.Array) -> jax.Array:
    """Moves KV as some tokens' has moved: by the map of it, a ridge regression, that says best how these moved.

    The ridge bounds how ill the regression can be conditioned, so that a fixed number of Newton's steps inverts it:
    matrix products alone. LAPACK, asked for so small a matrix in each layer, took 2 to 40 times as long, the longer the
    more other threads computed.

    Args:
      new: `[2, n, K, H]`, the tokens' KV as it is now.
      positions: i32 `[n]`, their places in `kv`; at S or beyond it is padding.
      kv: what is stored, unrotated, `[2, S, K, H]`; anything at places that neither move nor are fitted to.
      fitted: bool `[n]`, tokens that the map is fitted to: none that has no KV in `kv`.
      moves: bool `[S]`, places that move.
    """
    num_kv, head_dim = kv.shape[2:]

    def by_head(kv: jax.Array) -> jax.Array:  # [2, T, K, H] to [2K, T, H]
        return kv.astype(jnp.float32).transpose(0, 2, 1, 3).reshape(2 * num_kv, -1, head_dim)

    def dot(a: jax.Array, b: jax.Array, axis: int = 2) -> jax.Array:
        return lax.dot_general(a, b, (((axis,), (1,)), ((0,), (0,))), precision=lax.Precision.HIGHEST)

    every, is_fitted = by_head(kv), fitted[:, None]
    old = jnp.where(is_fitted, by_head(kv.at[:, positions].get(mode="clip")), 0)
    moved = jnp.where(is_fitted, by_head(new) - old, 0)
    count = jnp.maximum(fitted.sum(), 1).astype(jnp.float32)
    mean, mean_moved = (each.sum(1, keepdims=True) / count for each in (old, moved))
    centred, rest = (jnp.where(is_fitted, each, 0) for each in (old - mean, moved - mean_moved))
    gram = dot(centred, centred, axis=1)
    size = jnp.trace(gram, axis1=1, axis2=2)[:, None, None] / count + 1e-12
    eye = jnp.eye(head_dim, dtype=jnp.float32)
    ridged = gram + _RIDGE * size * eye  # Its eigenvalues are from `_RIDGE` to `_RIDGE + count` times `size`.
    inverse = 2 / ((2 * _RIDGE + count) * size) * eye
    for _ in range(math.ceil(math.log2(_LN_TOLERANCE * (1 + new.shape[1] / (2 * _RIDGE))))):
        inverse = dot(inverse, 2 * eye - dot(ridged, inverse))
    linear = dot(inverse, dot(centred, rest, axis=1))
    carried = dot(every, eye + linear) + mean_moved - dot(mean, linear)
    carried = carried.reshape(2, num_kv, -1, head_dim).transpose(0, 2, 1, 3)
    return jnp.where(moves[:, None, None], carried.astype(kv.dtype), kv)


@partial(jax.jit, static_argnames=("config", "window", "sharding"))
def join_layer(
    config: ModelConfig,
    layer_params: Params,
    x: jax.Array,
    positions: jax.Array,
    new_x: jax.Array,
    history_length: jax.Array,
    kv: jax.Array,
    table: rope.Rotation,
    carried: tuple[jax.Array, ...],
    window: int | None = None,
    sharding: ModelSharding | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`blend_layer` and, over what it gives, a layer of new tokens: weights are read once for both.

    Args:
      config: static.
      layer_params: of this layer.
      x: `[1, n, F]`, the chosen tokens.
      positions: i32 `[n]`, see `blend_layer`.
      new_x: `[1, T, F]`, tokens behind the history.
      history_length: i32 scalar, tokens of history that count; the new tokens' positions start there.
      kv: this layer's unrotated KV `[2, S, K, H]`.
      table: rotations of all positions.
      carried: see `blend_layer`.
      window: static, of the layer: `config.window_of`.
      sharding: static.

    Returns:
      `x [1, n, F]` and `new_x [1, T, F]` for the next layer, `kv` as of `blend_layer`, and the new tokens' unrotated KV
      `[2, T, K, H]`.
    """
    num_chosen = x.shape[1]
    rotation = rope.Rotation(*(part.at[positions].get(mode="clip")[None] for part in table))
    new_rotation = rope.Rotation(*(part[None] for part in slice_rotation(table, history_length, new_x.shape[1])))
    all_rotations = slice_rotation(table, 0, kv.shape[1])

    def attend_heads(
        q: jax.Array,
        new: LayerKV,
        kv: jax.Array,
        positions: jax.Array,
        history_length: jax.Array,
        rotations: tuple[rope.Rotation, ...],
        carried: tuple[jax.Array, ...],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        rotation, new_rotation, all_rotations = rotations
        both = jnp.concatenate([new.k, new.v], axis=0).astype(kv.dtype)
        of_chosen = (q[:, :num_chosen], both[:, :num_chosen], positions)
        out, fused = _attend_fused(*of_chosen, kv, rotation, all_rotations, carried, window)
        last = LayerKV(new.k[:, num_chosen:], new.v[:, num_chosen:])
        past = LayerKV(fused[:1], fused[1:])
        over = (q[:, num_chosen:], last, past, history_length[None], new_rotation, all_rotations)
        return jnp.concatenate([out, attend(*over, window=window)], axis=1), fused, both[:, num_chosen:]

    def attend_fn(q: jax.Array, new: LayerKV) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        of_device = by_device(
            attend_heads, sharding, (HEADS, KV_HEADS, KV_HEADS, (), (), (), ()), (HEADS, KV_HEADS, KV_HEADS)
        )
        rotations = (rotation, new_rotation, all_rotations)
        out, fused, new_kv = of_device(q, new, kv, positions, history_length, rotations, carried)
        return out, (fused, new_kv)

    x = jnp.concatenate([x, new_x], axis=1)
    x, (fused, new_kv) = apply(Layer(config, sharding), {"params": layer_params}, x, attend_fn)
    x = constrain(x, sharding)
    return x[:, :num_chosen], x[:, num_chosen:], fused, new_kv


@partial(jax.jit, static_argnames=("config", "sharding"))
def kv_deviation(
    config: ModelConfig,
    layer_params: Params,
    x: jax.Array,
    positions: jax.Array,
    kv: jax.Array,
    sharding: ModelSharding | None = None,
) -> jax.Array:
    """How far the tokens' KV at a layer is from what is stored: sums of squared differences, f32 `[n]`.

    Keys are compared unrotated, which is the same as rotated: a rotation changes no distance.

    Args:
      config: static.
      layer_params: of the layer.
      x: `[1, n, F]`, what goes into it.
      positions: i32 `[n]`, places in `kv`; what padding at S or beyond gives means nothing.
      kv: what is stored, unrotated, `[2, S, K, H]`.
      sharding: static.
    """
    new: LayerKV = Layer(config).apply({"params": layer_params}, x, method=Layer.new_kv)  # type: ignore[assignment]
    found = jnp.concatenate([new.k, new.v], axis=0)
    moved = found.astype(jnp.float32) - kv.at[:, positions].get(mode="clip").astype(jnp.float32)
    return constrain((moved**2).sum((0, 2, 3)), sharding)


@partial(jax.jit, static_argnames=("num_tokens",))
def choose_tokens(
    x: jax.Array, positions: jax.Array, scores: jax.Array, num_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """The tokens of the highest scores, in order of position; of equals the earlier.

    Args:
      x: `[1, n, F]`.
      positions: i32 `[n]`, increasing.
      scores: f32 `[n]`.
      num_tokens: how many, at most n; static.

    Returns:
      `x [1, num_tokens, F]` and positions i32 `[num_tokens]`.
    """
    chosen = jnp.sort(lax.top_k(scores, num_tokens)[1])
    return x[:, chosen], positions[chosen]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlendPlan:
    """How many tokens are computed anew in which layer.

    All of them in the first layers, which says how far each deviates at the next one; then as many in each as bring the
    mean over all layers to the ratio. Where they are spread, the same ones in all layers.

    Raises:
      ValueError: a number out of range.
    """

    num_layers: int
    """L."""
    num_tokens: int
    """Tokens that may be chosen."""
    ratio: float
    """Tokens computed anew, as a share of all, in the mean over the layers; in [0, 1]."""
    num_first: int = 0
    """First tokens that are chosen in any case; all of them where there are fewer."""
    check_layers: int = 1
    """Layers of which all tokens are computed. The KV of the first layer never deviates: it is of the token alone."""
    spreads: bool = False
    """Whether tokens are evenly apart, and the others move along."""
    carries_from: int = 0
    """The first token that moves along."""

    def __post_init__(self) -> None:
        if self.num_layers <= 0 or self.num_tokens <= 0 or self.num_first < 0:
            raise ValueError(
                "there must be layers, tokens, and 0 or more first ones; "
                f"got {self.num_layers}, {self.num_tokens} and {self.num_first}"
            )
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio must be a share of the tokens in [0, 1], got {self.ratio}")
        if not 0 <= self.check_layers <= self.num_layers:
            raise ValueError(f"check_layers must be 0 to {self.num_layers} layers, got {self.check_layers}")

    @property
    def counts(self) -> tuple[int, ...]:
        """Tokens of each layer: no more than the ratio says, unless there are more first ones; multiples of 8."""
        if self.spreads:
            count = int(self.ratio * self.num_tokens) // _COUNT_STEP * _COUNT_STEP
            return (self.num_tokens if self.ratio >= 1 else max(count, min(self.num_first, self.num_tokens)),) * (
                self.num_layers
            )
        budget = (self.ratio * self.num_layers - self.check_layers) * self.num_tokens
        num_rest = self.num_layers - self.check_layers
        if self.ratio >= 1:
            return (self.num_tokens,) * self.num_layers
        num_first = min(-(-self.num_first // _COUNT_STEP) * _COUNT_STEP, self.num_tokens)
        if budget <= 0 or not num_rest:
            return (num_first,) * self.num_layers
        count = max(int(budget / num_rest) // _COUNT_STEP * _COUNT_STEP, num_first)
        if not count:
            return (num_first,) * self.num_layers
        return (self.num_tokens,) * self.check_layers + (count,) * num_rest

    @property
    def chooses(self) -> bool:
        """Whether tokens are chosen by how far they deviate."""
        return not self.spreads and self.counts[0] == self.num_tokens

    @property
    def places(self) -> np.ndarray:
        """Where tokens are spread, which: i32, the first ones that are chosen in any case and others evenly apart."""
        num_first = min(self.num_first, self.counts[0])
        num_rest, room = self.counts[0] - num_first, self.num_tokens - num_first
        rest = num_first + np.arange(num_rest) * room // max(num_rest, 1)
        return np.concatenate([np.arange(num_first), rest]).astype(np.int32)

    @property
    def num_recomputed(self) -> float:
        """Tokens computed anew; of some layers alone, times their share of the layers."""
        return sum(self.counts) / self.num_layers


class Blender:
    """One sequence of stored KV, some tokens of which are computed anew, layer by layer.

    Args:
      config: of the model.
      layers: parameters of each layer.
      table: rotations of all positions.
      plan: how many tokens in which layer.
      x: `[1, n, F]`, embeddings of the tokens that may be chosen, the first of the sequence; n may be above
        `plan.num_tokens`, what is there is never chosen.
      sharding: of the model; None: it is on one device.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: list[Params],
        table: rope.Rotation,
        plan: BlendPlan,
        x: jax.Array,
        sharding: ModelSharding | None = None,
    ) -> None:
        self._config = config
        self._layers = layers
        self._table = table
        self._plan = plan
        self._x = x
        self._sharding = sharding
        self._to_device = partial(to_device, sharding=replicated(sharding))
        self._positions = self._to_device(np.arange(x.shape[1], dtype=np.int32))
        self._carried: tuple[jax.Array, ...] | None = None

    def layer(self, layer: int, kv: jax.Array) -> jax.Array:
        """A layer's stored unrotated KV `[2, S, K, H]` to the same with the chosen tokens' own. In order of layers.

        S is at least the number of embeddings. Does not wait for the device.
        """
        count = self._plan.counts[layer]
        if not count:
            return kv
        params = self._layers[layer]
        x, positions = self._x, self._positions
        if self._plan.spreads:
            return self._spread(layer, kv)
        if count < min(self._plan.num_tokens, positions.shape[0]):
            if self._plan.chooses:
                scores = kv_deviation(self._config, params, x, positions, kv, self._sharding)
            else:
                scores = -positions.astype(jnp.float32)
            scores = jnp.where(positions < self._plan.num_first, jnp.inf, scores)
            scores = jnp.where(positions < self._plan.num_tokens, scores, -jnp.inf)
            x, positions = choose_tokens(x, positions, scores, count)
        window = self._config.window_of(layer)
        self._x, fused = blend_layer(
            self._config, params, x, positions, kv, self._table, window=window, sharding=self._sharding
        )
        self._positions = positions
        if positions.shape[0] > self._plan.num_tokens:  # Others may lie where the padding does.
            fused = jnp.where(jnp.arange(kv.shape[1])[:, None, None] < self._plan.num_tokens, fused, kv)
        return fused

    def join(
        self, layer: int, kv: jax.Array, new_x: jax.Array, history_length: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`layer`, of a plan that spreads, and that layer of new tokens in one. In order of layers.

        Args:
          layer: which.
          kv: its stored unrotated KV `[2, S, K, H]`.
          new_x: `[1, T, F]`, what goes into it of tokens behind the history.
          history_length: i32 scalar, tokens of history.

        Returns:
          KV as of `layer`; `new_x [1, T, F]` for the next layer and the new tokens' unrotated KV `[2, T, K, H]`.
        """
        if not layer:
            self._begin_spread(kv)
        if self._carried is None:
            raise ValueError("a plan that joins with new tokens must spread, got one that chooses")
        self._x, new_x, fused, new_kv = join_layer(
            self._config,
            self._layers[layer],
            self._x,
            self._positions,
            new_x,
            history_length,
            kv,
            self._table,
            self._carried,
            self._config.window_of(layer),
            self._sharding,
        )
        return fused, new_x, new_kv

    def _begin_spread(self, kv: jax.Array) -> None:
        chosen, place = self._plan.places, np.arange(kv.shape[1])
        num_rows = max(dataclasses.replace(self._plan, num_tokens=kv.shape[1]).counts[0], len(chosen))
        places = kv.shape[1] + np.arange(num_rows, dtype=np.int32)  # As many for all plans over so many places.
        places[: len(chosen)] = chosen
        self._positions = self._to_device(places)
        self._x = jnp.take(self._x, self._positions, axis=1, mode="clip")
        start = max(self._plan.carries_from, self._plan.num_first)  # How first tokens moved says nothing of others.
        is_fitted = (places >= max(start, _UNFIT_TOKENS)) & (places < kv.shape[1])
        masks = is_fitted, (place >= start) & (place < self._plan.num_tokens)
        self._carried = tuple(map(self._to_device, masks))

    def _spread(self, layer: int, kv: jax.Array) -> jax.Array:
        if not layer:
            self._begin_spread(kv)
        self._x, fused = blend_layer(
            self._config,
            self._layers[layer],
            self._x,
            self._positions,
            kv,
            self._table,
            self._carried,
            self._config.window_of(layer),
            self._sharding,
        )
        return fused


def repair_plan(overflow: OverflowConfig, num_layers: int, num_tokens: int) -> BlendPlan | None:
    """How many of a truncated context's tokens are computed anew in which layer; None where none are."""
    if not num_tokens or not overflow.recomputes:
        return None
    plan = BlendPlan(
        num_layers=num_layers,
        num_tokens=num_tokens,
        ratio=overflow.repair_ratio,
        num_first=overflow.anchor_tokens,
        spreads=overflow.repair == "spread" and overflow.repair_ratio > 0,
        carries_from=overflow.keep_first_tokens,
    )
    return plan if any(plan.counts) else None  # Of few tokens a small share is none.
