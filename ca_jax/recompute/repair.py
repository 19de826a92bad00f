"""The repair of a history that was truncated, on its way from the store to its prefill.

Each layer is repaired as soon as it is loaded, so that the pipeline stays one: its drift is added, and the tokens that
deviate most are computed anew. What comes out is what the prefill reads, and what is stored from then on.

Not here: which tokens deviate (blend), what drift is (drift), when a history is repaired (prefilling).
"""

from __future__ import annotations

import jax
import numpy as np

from ca_jax.device.runner import JOINED_TOKENS, Runner
from ca_jax.kv.layer_loader import LayerLoad
from ca_jax.kv.shared_load import SharedLoad
from ca_jax.recompute.blend import Blender, BlendPlan
from ca_jax.recompute.drift import Drift, add_drift


def make_blender(runner: Runner, plan: BlendPlan, token_ids: list[int]) -> Blender:
    """Has some tokens of a history computed anew, those that the plan says of the given ones.

    Args:
      runner: of the model.
      plan: how many in which layer.
      token_ids: the history's; those that may be chosen come first.
    """
    x = runner.embed_history(token_ids)
    return Blender(runner.config, runner.layers, runner.table, plan, x, runner.sharding)


def warm_up_repair(runner: Runner, plan: BlendPlan | None, drift: Drift | None) -> None:
    """Compiles what repairing a history of a plan's length needs, by running it: one layer of each window."""
    empty = runner.empty_kv(runner.padded_history(1 if plan is None else plan.num_tokens))
    kv, zero = runner.unpacked(runner.at_rest(empty)), runner.to_device(0, np.int32)
    if drift is not None:
        kv = add_drift(kv, runner.to_device(drift.values[0]), zero, zero)
    if plan is None:
        return
    blender, num_layers = make_blender(runner, plan, [0] * plan.num_tokens), plan.num_layers
    if runner.num_windows == 1:
        num_layers = 1 if plan.spreads else min(plan.check_layers + 2, num_layers)
    for layer in range(num_layers):
        blender.layer(layer, kv)
    if plan.spreads and not runner.with_attention:
        blender = make_blender(runner, plan, [0] * plan.num_tokens)
        x = runner.embed(np.zeros((1, JOINED_TOKENS), np.int32))
        for layer in range(num_layers):
            _, x, _ = blender.join(layer, kv, x, zero)


class RepairedHistory:
    """A history that is repaired layer by layer; to a prefill it is like any other.

    Args:
      load: the history's.
      token_ids: its tokens.
      plan: which of them are computed anew; None: none.
      drift: of the model; None adds nothing.
      to_drift: for each time that others left, how many of them, the first ones, were there.
      drifts_from: the first token that drifts.
      runner: computes.
    """

    def __init__(
        self,
        load: LayerLoad | SharedLoad,
        token_ids: list[int],
        plan: BlendPlan | None,
        drift: Drift | None,
        to_drift: list[int],
        *,
        drifts_from: int,
        runner: Runner,
    ) -> None:
        self.layers: list[jax.Array] = []
        """What was repaired so far, unrotated `[2, S, K, H]`, of no staging."""
        self.num_recomputed = 0.0
        """Tokens computed anew; of some layers alone, times their share of the layers."""
        self.num_plain = drifts_from
        """First tokens that had seen no token that left."""
        self.may_join = plan is not None and plan.spreads and not runner.with_attention
        """Whether it may be repaired in one pass with new tokens."""
        self._load = load
        self._runner = runner
        self._drift = drift
        self._start = runner.to_device(drifts_from, np.int32)
        self._stops = [runner.to_device(num_tokens, np.int32) for num_tokens in to_drift]
        self._blender: Blender | None = None
        if plan is not None:
            self.num_recomputed = plan.num_recomputed
            self._blender = make_blender(runner, plan, token_ids)

    def layer(self, layer: int) -> jax.Array:
        """See `runner.LayerSource`."""
        kv = loaded = self._loaded(layer)
        if self._blender is not None:
            kv = self._blender.layer(layer, kv)
        if kv is loaded and not self._stops:
            raise RuntimeError(f"layer {layer} was to be repaired, and nothing is to be done to it")
        self._took(layer, kv)
        return kv

    def join(self, layer: int, new_x: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `runner.JoinedSource`; only where `may_join`."""
        if self._blender is None:
            raise RuntimeError("there must be a plan to join with new tokens, got none")
        kv, new_x, new_kv = self._blender.join(layer, self._loaded(layer), new_x, length)
        self._took(layer, kv)
        return kv, new_x, new_kv

    def _loaded(self, layer: int) -> jax.Array:
        kv = self._runner.unpacked(self._load.layer(layer))
        if self._drift is not None:
            drift = self._runner.to_device(self._drift.values[layer])
            for stop in self._stops:
                kv = add_drift(kv, drift, self._start, stop)
        return kv

    def _took(self, layer: int, kv: jax.Array) -> None:
        """The layer is repaired, and what was loaded is read no more when that is computed."""
        self._load.computed(layer, kv)
        self._load.used(layer, kv)
        self.layers.append(kv)

    def computed(self, layer: int, result: jax.Array) -> None:
        """See `runner.LayerSource`; what is repaired is not in staging."""

    def used(self, layer: int, result: jax.Array) -> None:
        """Likewise."""
