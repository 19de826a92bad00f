"""How a model's KV lies at rest, by what the engine's config says.

Not here: blocks and tokens in them (storage.layout), packing (models.kv).
"""

from __future__ import annotations

import dataclasses

from ca_jax.config import EngineConfig
from ca_jax.device.transfer import held_heads
from ca_jax.models.config import ModelConfig
from ca_jax.models.kv import SCALE_BYTES
from ca_jax.pretrained import LoadedModel
from ca_jax.storage.layout import KVLayout


def rest_layout(model: ModelConfig, dtype: str, config: EngineConfig) -> KVLayout:
    """The shape of the blocks that an engine of that config keeps KV in, of a model that computes it in `dtype`."""
    is_packed = config.kv_rest_dtype == "int8"
    return KVLayout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim + (SCALE_BYTES if is_packed else 0),
        dtype="int8" if is_packed else dtype,
        block_tokens=config.store.block_tokens,
    )


def kept_window(model: ModelConfig, config: EngineConfig, window: int) -> int | None:
    """How many last tokens of a session have KV that is needed: as far as the model looks back. None: all of them.

    Args:
      model: of the session.
      config: of the engine.
      window: the engine's, tokens.
    """
    slides = model.kv_window is not None and model.kv_window < window
    return model.kv_window if slides and not (config.overflow and config.overflow.needs_everything) else None


def kv_layout(model: LoadedModel, config: EngineConfig) -> KVLayout:
    """The same, of a model that is loaded: of the heads that this process has."""
    layout = rest_layout(model.config, model.dtype, config)
    heads = None if model.sharding is None else held_heads(model.sharding.kv, layout.num_kv_heads)
    return layout if heads is None else dataclasses.replace(layout, num_kv_heads=heads.stop - heads.start)
