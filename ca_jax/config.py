"""What a user may say about the engine. One config per owner; each field is read by that owner alone.

Not here: the model's architecture (`models.config`), sizes of the store (`storage.config`).
"""

from __future__ import annotations

import dataclasses

from ca_jax.storage.config import StoreConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine runs a model.

    Raises:
      ValueError: a size that is not positive.
    """

    dtype: str | None = None
    """Of weights and KV: `float32` or `bfloat16`. None: float32 on CPU (bfloat16 is slow there), else bfloat16."""
    context_window: int | None = None
    """Most tokens a session may hold, answer included; None: the model's, at most 4,096. Every slot has this room."""
    max_batch_size: int = 8
    """Most jobs that decode together, each in a slot of its own."""
    prefill_chunk_tokens: int = 512
    """Most new tokens prefilled in one pass."""
    save_group_tokens: int = 64
    """Decoded tokens are saved in groups of this many, and at the end of a turn."""
    compile_cache_dir: str | None = "~/.cache/ca_jax/xla"
    """Where compiled functions are kept between runs; None turns that off. A directory set in jax already is left."""
    store: StoreConfig = dataclasses.field(default_factory=StoreConfig)
    """The AttentionStore."""

    def __post_init__(self) -> None:
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"dtype wanted float32, bfloat16 or None, found {self.dtype!r}")
        for name in ("context_window", "max_batch_size", "prefill_chunk_tokens", "save_group_tokens"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, found {value}")
        if self.prefill_chunk_tokens % 64:
            raise ValueError(f"prefill_chunk_tokens must be a multiple of 64, found {self.prefill_chunk_tokens}")
