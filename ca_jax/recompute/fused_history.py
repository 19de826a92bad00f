"""Chunks and what is between them on their way to a prefill: each layer is blended as soon as it is loaded.

To a prefill this is a history like any other. What comes out is what the prefill reads, and what is stored as the
session's from then on.

Not here: what is computed anew (fusion), what is loaded (histories).
"""

from __future__ import annotations

import jax

from ca_jax.device.runner import LayerSource, Runner
from ca_jax.recompute.fusion import Fuser, FusionPlan, TokenKind
from ca_jax.recompute.repair import RepairedHistory


def make_fuser(runner: Runner, plan: FusionPlan, token_ids: list[int]) -> Fuser:
    """Has a context of stored chunks made whole.

    Args:
      runner: of the model.
      plan: what it consists of.
      token_ids: the plan's tokens, those of places `plan.start` and on.

    Raises:
      ValueError: not as many tokens as the plan says.
    """
    if len(token_ids) != len(plan.kinds):
        raise ValueError(f"the plan must have a token each, {len(plan.kinds)}; got {len(token_ids)}")
    x = runner.embed_history(token_ids)
    return Fuser(runner.config, runner.layers, runner.table, plan, x, runner.sharding)


def warm_up_fusion(runner: Runner, plan: FusionPlan) -> None:
    """Compiles what fusing a context of a plan needs, by running it."""
    empty = runner.empty_kv(runner.padded_history(plan.start + len(plan.kinds)))
    kv, fuser = runner.unpacked(runner.at_rest(empty)), make_fuser(runner, plan, [0] * len(plan.kinds))
    for layer in range(plan.num_layers):
        fused = fuser.layer(layer, kv)
    jax.block_until_ready(fused)


class FusedHistory:
    """A context that is blended layer by layer.

    Args:
      source: gives its layers as they are stored, the session's own part as it should be read.
      plan: what is computed anew.
      token_ids: of all its places.
      runner: computes.
    """

    def __init__(self, source: LayerSource, plan: FusionPlan, token_ids: list[int], runner: Runner) -> None:
        self.layers: list[jax.Array] = []
        """What was blended so far, unrotated `[2, S, K, H]`, of no staging."""
        self.num_recomputed = plan.num_recomputed
        """Tokens with stored KV that are computed anew; of some layers alone, times their share of the layers."""
        self.num_fused = int((plan.kinds != TokenKind.EXACT).sum())
        """Tokens whose KV is not what computing all of the context would give."""
        plain = [plan.start] if self.num_fused else []
        plain += [source.num_plain] if isinstance(source, RepairedHistory) else []
        self.num_plain: int | None = min(plain, default=None)
        """First tokens whose KV is; None: all."""
        self._source = source
        self._runner = runner
        self._fuser = make_fuser(runner, plan, token_ids[plan.start :])

    def layer(self, layer: int) -> jax.Array:
        """See `runner.LayerSource`."""
        kv = self._source.layer(layer)
        if not isinstance(self._source, RepairedHistory):
            kv = self._runner.unpacked(kv)
        kv = self._fuser.layer(layer, kv)
        self._source.computed(layer, kv)
        self._source.used(layer, kv)
        self.layers.append(kv)
        return kv

    def computed(self, layer: int, result: jax.Array) -> None:
        """See `runner.LayerSource`; what is blended is not in staging."""

    def used(self, layer: int, result: jax.Array) -> None:
        """Likewise."""
