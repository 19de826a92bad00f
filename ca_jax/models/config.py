"""What a model is: its shapes and its position encoding, nothing about how it is run.

Not here: mesh, paths, dtypes of weights, kernels, tokenizer; which trained models there are (`checkpoint`).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from ca_jax.errors import UnsupportedArchitectureError

RopeScaling = Literal["none", "linear", "llama3"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021), in half-split ("rotate half") order.

    Raises:
      UnsupportedArchitectureError: `scaling` is not one of those served.
      ValueError: a factor or base that is not positive.
    """

    theta: float = 10000.0
    """Base of the frequencies."""
    scaling: RopeScaling = "none"
    """How frequencies are stretched: not at all, all alike (`linear`), or by wavelength (`llama3`)."""
    factor: float = 1.0
    """How far the context was stretched over what the model was first trained on."""
    low_freq_factor: float = 1.0
    """`llama3` only: wavelengths above original_max_positions / this are stretched by the whole factor."""
    high_freq_factor: float = 4.0
    """`llama3` only: wavelengths below original_max_positions / this are left alone."""
    original_max_positions: int = 8192
    """`llama3` only: the context length before stretching, tokens."""

    def __post_init__(self) -> None:
        if self.scaling not in ("none", "linear", "llama3"):
            raise UnsupportedArchitectureError(
                f"rope scaling {self.scaling!r} is not served; wanted one of none, linear, llama3"
            )
        if self.theta <= 0 or self.factor <= 0:
            raise ValueError(f"rope theta and factor must be positive, found theta={self.theta} factor={self.factor}")
        if self.scaling == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "llama3 rope scaling wants 0 < low_freq_factor < high_freq_factor, found "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of a decoder-only transformer.

    Raises:
      ValueError: a size that is not positive, or heads that KV heads do not divide.
    """

    architecture: str = "llama"
    """Which block: `llama` (pre-norm RMSNorm, SwiGLU, grouped-query attention)."""
    vocab_size: int
    """V, tokens."""
    embed_dim: int
    """F, width of the residual stream."""
    mlp_dim: int
    """D, width of the feed-forward block."""
    num_layers: int
    """L."""
    num_heads: int
    """N, query heads."""
    num_kv_heads: int
    """K, key/value heads; N is a multiple of K."""
    head_dim: int
    """H."""
    max_positions: int
    """The context length the model was trained for, tokens."""
    norm_eps: float = 1e-5
    """Added to the mean square inside RMSNorm."""
    tie_embeddings: bool = False
    """Whether the output head is the embedding table."""
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    """Rotary embedding."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "embed_dim",
            "mlp_dim",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_positions",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, found {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, found {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding, found {self.head_dim}")

    @property
    def num_groups(self) -> int:
        """G, query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, itemsize: int = 2) -> int:
        """Bytes of keys and values one token leaves in all layers, at `itemsize` bytes a number (2 for bf16)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    @classmethod
    def smollm2_135m(cls) -> ModelConfig:
        """SmolLM2-135M(-Instruct), the default model."""
        return PRESETS["smollm2-135m"]


def _llama2(*, embed_dim: int, mlp_dim: int, num_layers: int, num_heads: int) -> ModelConfig:
    """One of Llama 2 (Touvron et al., 2023) without grouped queries: 7B and 13B."""
    return ModelConfig(
        vocab_size=32000,
        embed_dim=embed_dim,
        mlp_dim=mlp_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=128,
        max_positions=4096,
    )


def _smollm2(
    *, embed_dim: int, mlp_dim: int, num_layers: int, num_heads: int, num_kv_heads: int, theta: float
) -> ModelConfig:
    """One of SmolLM2 (Allal et al., 2025)."""
    return ModelConfig(
        vocab_size=49152,
        embed_dim=embed_dim,
        mlp_dim=mlp_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=64,
        max_positions=8192,
        tie_embeddings=True,
        rope=RopeConfig(theta=theta),
    )


PRESETS = {
    "llama2-7b": _llama2(embed_dim=4096, mlp_dim=11008, num_layers=32, num_heads=32),
    "llama2-13b": _llama2(embed_dim=5120, mlp_dim=13824, num_layers=40, num_heads=40),
    "llama3-8b": ModelConfig(
        vocab_size=128256,
        embed_dim=4096,
        mlp_dim=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_positions=8192,
        rope=RopeConfig(theta=500000.0),
    ),
    "smollm2-135m": _smollm2(embed_dim=576, mlp_dim=1536, num_layers=30, num_heads=9, num_kv_heads=3, theta=100000.0),
    "smollm2-360m": _smollm2(embed_dim=960, mlp_dim=2560, num_layers=32, num_heads=15, num_kv_heads=5, theta=100000.0),
    "smollm2-1.7b": _smollm2(
        embed_dim=2048, mlp_dim=8192, num_layers=24, num_heads=32, num_kv_heads=32, theta=130000.0
    ),
}
"""Architectures by name, exactly as published. Random weights of them: `random_weights`; trained ones: `checkpoint`."""
