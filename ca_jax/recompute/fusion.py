"""Knowledge fusion: text chunks whose KV was computed alone become one context, by computing few tokens anew.

A context is a row of places. A chunk's KV lies where the chunk is used: its keys are unrotated, so that this is its
position too. What it lacks is what the chunk would have seen of the tokens before it.

    place    0 1 2   3 4 5 6   7   8 9 10 ...      layer 0   all stored tokens, and new ones
    kind     exact   stored    new  stored         layer 1   those whose KV deviates most there, and new ones
    chunk            A              B              layer 2   of these, and so on (gradual filtering)

Everything here is pure. Shapes: n described tokens, m rows of tokens that are computed (padded), S places of KV, K KV
heads, H head dim, F embed.

Not here: one layer of some tokens (blend), where chunks come from (engine), the question behind them: it is prefilled
over what comes out.
Source: CacheBlend (Yao et al., EuroSys 2025), section 4.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ca_jax.config import SELECTIONS, Selection
from ca_jax.device.steps.common import Params
from ca_jax.device.transfer import to_device
from ca_jax.models import rope
from ca_jax.models.config import ModelConfig
from ca_jax.models.sharding import ModelSharding, constrain, replicated
from ca_jax.recompute.blend import blend_layer, kv_deviation

_ROW_STEP = 64  # Rows are padded to a multiple of it: each number is compiled for.
_SMALL_ROW_STEP = 16  # The same up to `_SMALL_ROWS`.
_SMALL_ROWS = 256
_MAX_STEPS = 6  # Times that tokens become fewer, about.
_SLOPE = 0.6  # By how much more than the mean the first filtered layer computes, and the last one less.
_SPREAD_FIRST = 2  # Tokens of every chunk's start that are computed, where others are evenly apart.
_UNFIT_TOKENS = 4  # Tokens of every chunk's start that say nothing of how others move.
_NOWHERE = 1 << 30  # Places of padding begin here: behind every context.


class TokenKind(enum.IntEnum):
    """What is known of a token's KV."""

    STORED = 0
    """That of its chunk computed alone: it may be computed anew."""
    NEW = 1
    """None is there, the place may hold anything: it is computed in every layer."""
    EXACT = 2
    """It is right as it stands: it is never computed."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FusionPlan:
    """What a context consists of, and how many of its tokens are computed in which layer.

    `hkvd`: all tokens in the first layers, which says how far each deviates at the next one; then fewer from layer to
    layer, as many as bring the mean of those layers to the ratio. Others: the same tokens in all layers.

    Raises:
      ValueError: a number out of range, or chunks that do not begin one behind the other among the tokens.
    """

    num_layers: int
    """L."""
    start: int
    """Place of the first token that is described; those before it are exact."""
    kinds: np.ndarray
    """`TokenKind` of places `start` to `start + n`, i32 `[n]`; any sequence of them is taken."""
    chunk_starts: tuple[int, ...]
    """Places where stored chunks begin, ascending."""
    ratio: float
    """Share of the stored tokens that is computed anew, in [0, 1]: the mean of the layers behind the check layers."""
    check_layers: int = 1
    """First layers of which all tokens are computed. The KV of the first never deviates: it is of the token alone."""
    selection: Selection = "hkvd"
    """Which tokens."""
    seed: int = 0
    """Of `random`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", np.fromiter(self.kinds, np.int32, len(self.kinds)))
        if self.num_layers <= 0 or self.start < 0:
            raise ValueError(f"there must be layers, and a start of at least 0; got {self.num_layers} and {self.start}")
        if not np.isin(self.kinds, list(TokenKind)).all():
            raise ValueError(f"kinds must be values of TokenKind, got {sorted({int(kind) for kind in self.kinds})}")
        bounds = [self.start - 1, *self.chunk_starts, self.start + len(self.kinds)]
        if any(low >= high for low, high in itertools.pairwise(bounds)):
            raise ValueError(
                f"chunk_starts must be ascending places from {self.start} to below {bounds[-1]}, "
                f"got {self.chunk_starts}"
            )
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio must be a share of the tokens in [0, 1], got {self.ratio}")
        if not 1 <= self.check_layers <= self.num_layers:
            raise ValueError(f"check_layers must be 1 to {self.num_layers} layers, got {self.check_layers}")
        if self.selection not in SELECTIONS:
            raise ValueError(f"selection must be one of {', '.join(SELECTIONS)}, got {self.selection!r}")

    @property
    def num_stored(self) -> int:
        """Tokens that may be chosen."""
        return int((self.kinds == TokenKind.STORED).sum())

    @property
    def num_new(self) -> int:
        """Tokens without KV."""
        return int((self.kinds == TokenKind.NEW).sum())

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """Tokens computed in each layer, new ones among them: behind the check layers no more, in the mean, than the
        ratio says."""
        stored, new = self.num_stored, self.num_new
        if self.ratio >= 1:
            return (new + stored,) * self.num_layers
        if not self.checks:
            return (new + int(self.ratio * stored),) * self.num_layers
        num_rest = self.num_layers - self.check_layers
        budget = int(self.ratio * stored * num_rest) + num_rest * new
        mean = budget / num_rest
        step = _ROW_STEP if mean >= _SMALL_ROWS else _SMALL_ROW_STEP
        while num_rest > _MAX_STEPS and 2 * _SLOPE * mean > _MAX_STEPS * step:
            step *= 2
        levels = np.array([new, *range((new // step + 1) * step, new + stored, step), new + stored])
        targets = new + (mean - new) * (1 + _SLOPE * np.linspace(1, -1, num_rest))
        steps = np.abs(levels[:, None] - targets).argmin(0)  # Of each layer the level, descending.
        while levels[steps].sum() > budget:
            steps[np.flatnonzero(steps == steps.max())[-1]] -= 1
        while True:  # What rounding has left over goes to the first layers that compute least.
            raised = steps.copy()
            raised[np.flatnonzero(steps == steps.min())[0]] += 1
            if raised.max() >= len(levels) or levels[raised].sum() > budget:
                break
            steps = raised
        return (new + stored,) * self.check_layers + tuple(int(count) for count in levels[steps])

    @property
    def checks(self) -> bool:
        """Whether tokens are chosen by how far they deviate: there is a choice."""
        has_choice = self.ratio < 1 and self.ratio * self.num_stored >= 1 and self.check_layers < self.num_layers
        return self.selection == "hkvd" and has_choice

    @property
    def carries(self) -> bool:
        """Whether stored tokens that are not computed are moved as those that are."""
        return self.selection == "spread" and 0 < self.counts[0] - self.num_new < self.num_stored

    @property
    def num_recomputed(self) -> float:
        """Stored tokens computed anew, in check layers too; of some layers alone, times their share of the layers."""
        return sum(self.counts) / self.num_layers - self.num_new

    @property
    def first_rows(self) -> np.ndarray:
        """Which tokens are computed in the first layer, counted from `start`: i32, ascending."""
        stored = np.flatnonzero(self.kinds == TokenKind.STORED)
        new = np.flatnonzero(self.kinds == TokenKind.NEW)
        count = self.counts[0] - len(new)
        if self.selection == "spread":
            in_order = stored[np.argsort(self._offsets()[stored], kind="stable")]
            num_first = min(count, int((self._offsets()[stored] < _SPREAD_FIRST).sum()))
            rest, num_rest = np.sort(in_order[num_first:]), count - num_first
            between = rest[(2 * np.arange(num_rest) + 1) * len(rest) // (2 * max(num_rest, 1))]
            return np.sort(np.concatenate([in_order[:num_first], between, new])).astype(np.int32)
        if self.selection == "random":
            order = np.random.default_rng(self.seed).permutation(len(stored))
        else:
            order = np.argsort(self._offsets()[stored], kind="stable")
        return np.sort(np.concatenate([stored[order[:count]], new])).astype(np.int32)

    @property
    def says_how_others_move(self) -> np.ndarray:
        """Of which tokens that is, were they computed: bool `[n]`. The first ones of a chunk move as no others do."""
        return (self.kinds == TokenKind.STORED) & (self._offsets() >= _UNFIT_TOKENS)

    def _offsets(self) -> np.ndarray:
        """How many tokens of its chunk are before each token, i64 `[n]`; of what is in no chunk it means nothing."""
        places = self.start + np.arange(len(self.kinds))
        starts = np.array([self.start, *self.chunk_starts])
        return places - starts[np.searchsorted(starts, places, side="right") - 1]


def padded_rows(count: int) -> int:
    """Rows that are computed for so many tokens."""
    step = _ROW_STEP if count > _SMALL_ROWS else _SMALL_ROW_STEP
    return -(-count // step) * step


@jax.jit
def take_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Some rows of `x [1, n, F]`, i32 `[m]` to `[1, m, F]`; what is out of range gives the last."""
    return x.at[:, rows].get(mode="clip")


@partial(jax.jit, static_argnames=("config", "num_tokens", "num_rows", "sharding"))
def choose_deviating(
    config: ModelConfig,
    layer_params: Params,
    x: jax.Array,
    places: jax.Array,
    kv: jax.Array,
    new_places: jax.Array,
    num_tokens: int,
    num_rows: int,
    sharding: ModelSharding | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The tokens that are computed from a layer on: new ones, and those whose KV deviates most at it.

    Args:
      config: static.
      layer_params: of the layer.
      x: `[1, m, F]`, what goes into it.
      places: i32 `[m]`, increasing; padding behind all that is a place.
      kv: this layer's stored unrotated KV `[2, S, K, H]`.
      new_places: bool `[S]`, which places are new tokens'.
      num_tokens: how many, at least as many as are new; static.
      num_rows: as many or more; static.
      sharding: static.

    Returns:
      `x [1, num_rows, F]` and their places i32 `[num_rows]`, increasing; padding as in `places`.
    """
    deviation = kv_deviation(config, layer_params, x, places, kv, sharding)
    is_new = new_places.at[places].get(mode="fill", fill_value=False)
    scores = jnp.where(is_new, jnp.inf, jnp.where(places < kv.shape[1], deviation, -jnp.inf))
    chosen = jnp.sort(lax.top_k(scores, num_tokens)[1])
    rows = jnp.concatenate([chosen, jnp.full(num_rows - num_tokens, chosen[-1], chosen.dtype)])
    padding = _NOWHERE + jnp.arange(num_rows, dtype=places.dtype)
    return constrain(x[:, rows], sharding), jnp.where(jnp.arange(num_rows) < num_tokens, places[rows], padding)


@jax.jit
def fresh_copy(kv: jax.Array) -> jax.Array:
    """The same in a buffer of its own."""
    return jnp.copy(kv)


class Fuser:
    """One context of stored KV that becomes whole, layer by layer.

    Args:
      config: of the model.
      layers: parameters of each layer.
      table: rotations of all positions.
      plan: what the context consists of, and how many tokens are computed in which layer.
      x: `[1, n', F]`, embeddings of the plan's tokens, from its `start` on; what is behind them is not read.
      sharding: of the model; None: it is on one device.

    Raises:
      ValueError: fewer embeddings than tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: list[Params],
        table: rope.Rotation,
        plan: FusionPlan,
        x: jax.Array,
        sharding: ModelSharding | None = None,
    ) -> None:
        if x.shape[1] < len(plan.kinds):
            raise ValueError(f"there must be embeddings of {len(plan.kinds)} tokens, got {x.shape[1]}")
        self._config = config
        self._layers = layers
        self._table = table
        self._plan = plan
        self._sharding = sharding
        self._count = plan.counts[0]
        put = partial(to_device, sharding=replicated(sharding))
        rows = _NOWHERE + np.arange(padded_rows(self._count), dtype=np.int32)
        rows[: self._count] = plan.first_rows
        places = rows.copy()
        places[: self._count] += plan.start
        self._x = take_rows(x, put(rows))
        self._places = put(places)
        self._put = put
        self._new_places: jax.Array | None = None
        self._carried: tuple[jax.Array, ...] | None = None

    def layer(self, layer: int, kv: jax.Array) -> jax.Array:
        """A layer's stored unrotated KV `[2, S, K, H]` to that of the context, a buffer of its own. In order of layers.

        S is at least `plan.start` and the plan's tokens. What is at places of new tokens and behind the plan's tokens
        is not read. Does not wait for the device.
        """
        count = self._plan.counts[layer]
        if not count:
            return fresh_copy(kv)
        params = self._layers[layer]
        if count < self._count:
            self._choose(params, kv, count)
        window = self._config.window_of(layer)
        carried = self._masks(kv.shape[1]) if layer and self._plan.carries else None  # Nothing has moved in layer 0.
        self._x, fused = blend_layer(
            self._config, params, self._x, self._places, kv, self._table, carried, window, self._sharding
        )
        return fused

    def _masks(self, num_places: int) -> tuple[jax.Array, ...]:
        """Which of the tokens that are computed say how others move, and which places move: those of stored tokens."""
        if self._carried is None:
            plan = self._plan
            is_stored = np.zeros(num_places, bool)
            is_stored[plan.start + np.flatnonzero(plan.kinds == TokenKind.STORED)] = True
            fitted = np.zeros(self._places.shape[0], bool)
            fitted[: self._count] = plan.says_how_others_move[plan.first_rows]
            self._carried = self._put(fitted), self._put(is_stored)
        return self._carried

    def _choose(self, params: Params, kv: jax.Array, count: int) -> None:
        if self._new_places is None:
            is_new = np.zeros(kv.shape[1], bool)
            is_new[self._plan.start + np.flatnonzero(self._plan.kinds == TokenKind.NEW)] = True
            self._new_places = self._put(is_new)
        self._x, self._places = choose_deviating(
            self._config,
            params,
            self._x,
            self._places,
            kv,
            self._new_places,
            num_tokens=count,
            num_rows=padded_rows(count),
            sharding=self._sharding,
        )
        self._count = count
