"""A sequence of stored KV, some tokens of which are computed anew as its layers come.

`Recomputer` is one sequence under one plan. `RecomputedHistory` is a history on its way from the store to its prefill:
each layer is repaired, and blended, as soon as it is loaded, so that the pipeline stays one. What comes out is what the
prefill reads, and what is stored from then on.

Shapes: n tokens of a plan, S places of KV, T new tokens, K KV heads, H head dim, F embed.

Not here: which tokens (plan), one layer (layers), what drift is (drift), what is loaded (kv.load).
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import numpy as np

from ca_jax.device.passes import JOINED_TOKENS, LayerSource
from ca_jax.device.runner import Runner
from ca_jax.device.steps import Params
from ca_jax.device.transfer import to_device
from ca_jax.models import rope
from ca_jax.models.config import ModelConfig
from ca_jax.models.sharding import ModelSharding, replicated
from ca_jax.recompute.drift import Drift, add_drift
from ca_jax.recompute.layers import NOWHERE, choose_deviating, fresh_copy, recompute_layer, take_rows
from ca_jax.recompute.plan import Plan


class Recomputer:
    """One sequence under a plan, layer by layer.

    Args:
      x: `[1, n', F]`, embeddings of the plan's tokens, from its `start` on; what is behind them is not read.

    Raises:
      ValueError: fewer embeddings than tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: list[Params],
        table: rope.Rotation,
        plan: Plan,
        x: jax.Array,
        sharding: ModelSharding | None = None,
    ) -> None:
        if x.shape[1] < plan.num_tokens:
            raise ValueError(f"there must be embeddings of {plan.num_tokens} tokens, got {x.shape[1]}")
        self._config = config
        self._layers = layers
        self._table = table
        self._plan = plan
        self._sharding = sharding
        self._put = partial(to_device, sharding=replicated(sharding))
        self._count = plan.counts[0]
        rows = NOWHERE + np.arange(plan.rows[0], dtype=np.int32)
        rows[: self._count] = plan.first_rows
        places = rows.copy()
        places[: self._count] += plan.start
        self._x = take_rows(x, self._put(rows))
        self._places = self._put(places)
        self._always: jax.Array | None = None
        self._carried: tuple[jax.Array, ...] | None = None

    def layer(self, layer: int, kv: jax.Array) -> jax.Array:
        """A layer's stored unrotated KV `[2, S, K, H]` to that with what was computed, a buffer of its own.

        In order of layers. S is at least `plan.start` and the plan's tokens. What is at places of new tokens and behind
        the plan's tokens is not read. Does not wait for the device.
        """
        count = self._plan.counts[layer]
        if not count:
            return fresh_copy(kv)
        if count < self._count:
            self._x, self._places = choose_deviating(
                self._config,
                self._layers[layer],
                self._x,
                self._places,
                kv,
                self._always_at(kv.shape[1]),
                num_tokens=count,
                num_rows=self._plan.rows[layer],
                sharding=self._sharding,
            )
            self._count = count
        [fused] = self._computed(layer, kv)
        return fused

    def join(
        self, layer: int, kv: jax.Array, new_x: jax.Array, history_length: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`layer`, of a plan by which tokens move, and that layer of new tokens in one. In order of layers.

        Args:
          layer: which.
          kv: its stored unrotated KV `[2, S, K, H]`.
          new_x: `[1, T, F]`, what goes into it of tokens behind the history.
          history_length: i32 scalar, tokens of history.

        Returns:
          KV as of `layer`; `new_x [1, T, F]` for the next layer and the new tokens' unrotated KV `[2, T, K, H]`.
        """
        if self._carried_at(layer, kv.shape[1]) is None:
            raise ValueError("a plan that joins with new tokens must spread, got one that chooses")
        fused, new_x, new_kv = self._computed(layer, kv, new_x, history_length)
        return fused, new_x, new_kv

    def _computed(self, layer: int, kv: jax.Array, *joined: jax.Array) -> list[jax.Array]:
        self._x, *found = recompute_layer(
            self._config,
            self._layers[layer],
            self._x,
            self._places,
            kv,
            self._table,
            self._carried_at(layer, kv.shape[1]),
            self._config.window_of(layer),
            self._sharding,
            *joined,
        )
        return found

    def _always_at(self, num_places: int) -> jax.Array:
        if self._always is None:
            self._always = self._put(self._at_places(self._plan.always, num_places))
        return self._always

    def _carried_at(self, layer: int, num_places: int) -> tuple[jax.Array, ...] | None:
        """Which of the computed tokens say how others move, and which places move; None where none does."""
        plan = self._plan
        if plan.moves is None or plan.fitted is None or layer < plan.moves_from:
            return None
        if self._carried is None:
            fitted = np.zeros(plan.rows[0], bool)
            fitted[: plan.counts[0]] = plan.fitted[plan.first_rows]
            self._carried = self._put(fitted), self._put(self._at_places(plan.moves, num_places))
        return self._carried

    def _at_places(self, of_tokens: np.ndarray, num_places: int) -> np.ndarray:
        found = np.zeros(num_places, bool)
        found[self._plan.start : self._plan.start + self._plan.num_tokens] = of_tokens
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repair:
    """What is to be done to a history from which tokens have left."""

    plan: Plan | None
    """Which of its tokens are computed anew; None: none."""
    drift: Drift | None = None
    """Of the model; None adds nothing."""
    to_drift: tuple[int, ...] = ()
    """For each time that others left, how many of its tokens, the first ones, were there."""
    num_plain: int = 0
    """First tokens that had seen no token that left; those behind them drift."""


class RecomputedHistory:
    """A history that is repaired, blended, or both, layer by layer; to a prefill it is like any other.

    Args:
      token_ids: of all its places.
      repair: of the session's own first tokens; None: they are as they should be.
      blend: how the chunks behind them are computed; None: without chunks.
    """

    def __init__(
        self,
        source: LayerSource,
        token_ids: list[int],
        runner: Runner,
        *,
        repair: Repair | None = None,
        blend: Plan | None = None,
    ) -> None:
        self.layers: list[jax.Array] = []
        """What was computed so far, unrotated `[2, S, K, H]`, of no staging."""
        plans = [plan for plan in (None if repair is None else repair.plan, blend) if plan is not None]
        plan = plans[-1] if plans else None
        self.num_recomputed = 0.0 if plan is None else plan.num_recomputed
        """Tokens with stored KV computed anew; of some layers alone, times their share of the layers."""
        self.is_blended = blend is not None
        """Whether it has chunks."""
        self.num_fused = 0 if blend is None else blend.num_tokens
        """Tokens whose KV is not what computing all of the context would give, since they are of chunks."""
        plain = [blend.start] if blend is not None and blend.num_tokens else []
        plain += [repair.num_plain] if repair is not None else []
        self.num_plain: int | None = min(plain, default=None)
        """First tokens whose KV is; None: all."""
        self._source = source
        self._runner = runner
        self._repair = repair
        self._start = runner.to_device(0 if repair is None else repair.num_plain, np.int32)
        self._stops = [runner.to_device(stop, np.int32) for stop in (() if repair is None else repair.to_drift)]
        self._recomputers = [make_recomputer(runner, each, token_ids) for each in plans]
        self.may_join = blend is None and plan is not None and plan.moves is not None and not runner.with_attention
        """Whether it may be computed in one pass with new tokens."""

    def computed(self, layer: int, result: jax.Array) -> None:
        """See `LayerSource`. Does nothing: what is computed is not in staging."""

    def layer(self, layer: int) -> jax.Array:
        """See `LayerSource`."""
        kv = self._loaded(layer)
        for recomputer in self._recomputers:
            kv = recomputer.layer(layer, kv)
        self._took(layer, kv)
        return kv

    def join(self, layer: int, new_x: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `passes.Join`; only where `may_join`."""
        [recomputer] = self._recomputers
        kv, new_x, new_kv = recomputer.join(layer, self._loaded(layer), new_x, length)
        self._took(layer, kv)
        return kv, new_x, new_kv

    def _loaded(self, layer: int) -> jax.Array:
        kv = self._runner.unpacked(self._source.layer(layer))
        if self._repair is not None and self._repair.drift is not None:
            drift = self._runner.to_device(self._repair.drift.values[layer])
            for stop in self._stops:
                kv = add_drift(kv, drift, self._start, stop)
        return kv

    def _took(self, layer: int, kv: jax.Array) -> None:
        """The layer is computed, and what was loaded is read no more when that is ready."""
        self._source.computed(layer, kv)
        self.layers.append(kv)


def make_recomputer(runner: Runner, plan: Plan, token_ids: list[int]) -> Recomputer:
    """Has tokens of a history computed anew."""
    places = len(token_ids)  # Padded as its KV is, however few are computed: no other function is compiled.
    own = token_ids[plan.start : plan.start + plan.num_tokens]
    row = np.zeros((1, runner.padded_history(places)), np.int32)
    row[0, : len(own)] = own
    x = runner.embed(row)
    return Recomputer(runner.config, runner.layers, runner.table, plan, x, runner.sharding)


def warm_up(runner: Runner, num_places: int, plan: Plan | None, drift: Drift | None = None) -> None:
    """Compiles what recomputing a history of so many places needs, by running it.

    Of layers that share compiled functions a few are run.
    """
    empty = runner.empty_kv(runner.padded_history(num_places))
    kv, zero = runner.unpacked(runner.at_rest(empty)), runner.to_device(0, np.int32)
    if drift is not None:
        kv = add_drift(kv, runner.to_device(drift.values[0]), zero, zero)
    if plan is None:
        return
    token_ids, counts = [0] * num_places, plan.counts
    recomputer = make_recomputer(runner, plan, token_ids)
    for layer in range(plan.num_layers):
        if runner.num_windows > 1 or layer < 2 or len(set(counts[layer - 2 : layer + 1])) > 1:
            done = recomputer.layer(layer, kv)
    jax.block_until_ready(done)
    if plan.moves is not None and not plan.moves_from and not runner.with_attention:
        recomputer = make_recomputer(runner, plan, token_ids)
        x = runner.embed(np.zeros((1, JOINED_TOKENS), np.int32))
        for layer in range(plan.num_layers if runner.num_windows > 1 else 1):
            _, x, _ = recomputer.join(layer, kv, x, zero)
