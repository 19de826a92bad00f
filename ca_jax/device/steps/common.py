"""What the jitted functions share: names of axes, slices of the table of rotations, logits.

Not here: anything jitted.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
from jax import lax

from ca_jax.models import rope
from ca_jax.models.config import ModelConfig
from ca_jax.models.sharding import Axes, ModelSharding, constrain
from ca_jax.models.transformer import Transformer

Params = Any
"""A tree of linen variables."""

HEADS: Axes = (None, None, "heads", None)
"""Of queries `[1, T, N, H]`."""
KV_HEADS: Axes = (None, None, "kv_heads", None)
"""Of new KV `[1, T, K, H]` and of unrotated KV `[2, S, K, H]`."""
ROWS: Axes = ("batch",)
"""Of what has a row for each slot."""
ROW_HEADS: Axes = ("batch", None, "heads", None)
"""Of queries `[n, 1, N, H]`."""
ROW_KV_HEADS: Axes = ("batch", None, "kv_heads", None)
"""Of new KV `[n, 1, K, H]`."""
STEP_KV: Axes = (None, "batch", "kv_heads", None)
"""Of a layer's new KV of a decode step `[2, n, K, H]`."""
SLOT_HEADS: Axes = ("batch", "kv_heads", None, None)
"""Of a layer's slots `[slots, K, C, H]`."""


def apply(module: nn.Module, variables: Params, *args: Any, method: Any = None) -> Any:
    """`module.apply`, typed as it is used here."""
    return module.apply(variables, *args, method=method)


def slice_rotation(table: rope.Rotation, start: jax.Array | int, size: int) -> rope.Rotation:
    """The rotations of positions `start` to `start + size`."""
    return rope.Rotation(*(lax.dynamic_slice_in_dim(part, start, size, 0) for part in table))


def logits_of(
    config: ModelConfig, params: Params, x: jax.Array, sharding: ModelSharding | None, rows: Axes
) -> jax.Array:
    """`x [n, 1, F]` to logits f32 `[n, V]`: each device computes those of its part of the vocabulary."""
    logits = apply(Transformer(config), params, x, method=Transformer.head)[:, 0]
    return constrain(constrain(logits, sharding, (*rows, "vocab")), sharding)
