"""What a model is: its shapes and its position encoding, nothing about how it is run.

Not here: mesh, paths, dtypes of weights, kernels, tokenizer; published architectures (`presets`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from ca_jax.errors import UnsupportedArchitectureError

RopeScaling = Literal["none", "linear", "dynamic", "llama3", "yarn"]
Norm = Literal["rms", "layer"]
Mlp = Literal["swiglu", "gelu", "gelu_tanh"]

ROPE_SCALINGS: tuple[str, ...] = get_args(RopeScaling)
"""Ways to stretch rotary frequencies that are served."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021), in half-split ("rotate half") order.

    Raises:
      UnsupportedArchitectureError: `scaling` is not one of those served.
      ValueError: a number out of range.
    """

    theta: float = 10000.0
    """Base of the frequencies."""
    scaling: RopeScaling = "none"
    """How frequencies are stretched: not at all, all alike (`linear`), by wavelength (`llama3`, `yarn`), or by how long
    the context is (`dynamic`)."""
    factor: float = 1.0
    """How far the context was stretched over what the model was first trained on."""
    low_freq_factor: float = 1.0
    """`llama3` only: wavelengths above original_max_positions / this are stretched by the whole factor."""
    high_freq_factor: float = 4.0
    """`llama3` only: wavelengths below original_max_positions / this are left alone."""
    original_max_positions: int = 8192
    """`llama3`, `yarn` and `dynamic` only: the context length before stretching, tokens."""
    beta_fast: float = 32.0
    """`yarn` only: pairs that turn at least so often within original_max_positions are left alone."""
    beta_slow: float = 1.0
    """`yarn` only: pairs that turn at most so often are stretched by the whole factor."""
    truncate: bool = True
    """`yarn` only: whether the first and the last pair that are stretched in part are rounded to whole ones."""
    attention_factor: float = 1.0
    """`yarn` only: what rotated queries and keys are multiplied by."""
    rotary_dim: int | None = None
    """How many of a head's numbers are rotated, the first ones; None: all."""

    def __post_init__(self) -> None:
        if self.scaling not in ROPE_SCALINGS:
            raise UnsupportedArchitectureError(
                f"rope scaling {self.scaling!r} is not served; it must be one of {', '.join(ROPE_SCALINGS)}"
            )
        for name in ("theta", "factor", "attention_factor"):
            if getattr(self, name) <= 0:
                raise ValueError(f"rope {name} must be positive, got {getattr(self, name)}")
        if self.scaling == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "llama3 rope scaling must have 0 < low_freq_factor < high_freq_factor, got "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )
        if self.scaling == "yarn" and not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"yarn rope scaling must have 0 < beta_slow < beta_fast, got {self.beta_slow} and {self.beta_fast}"
            )
        if self.original_max_positions <= 0:
            raise ValueError(f"rope original_max_positions must be positive, got {self.original_max_positions}")
        if self.rotary_dim is not None and (self.rotary_dim <= 0 or self.rotary_dim % 2):
            raise ValueError(f"rope rotary_dim must be positive and even, got {self.rotary_dim}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of a decoder-only transformer.

    Raises:
      ValueError: a size that is not positive, heads that KV heads do not divide, or parts that do not go together.
    """

    architecture: str = "llama"
    """Its family, one of `families.FAMILIES`. What is computed is said by the fields below alone."""
    vocab_size: int
    """V, tokens."""
    embed_dim: int
    """F, width of the residual stream."""
    mlp_dim: int
    """D, width of the feed-forward block, or of each expert."""
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
    """Added to the mean square, or to the variance, inside norms."""
    tie_embeddings: bool = False
    """Whether the output head is the embedding table."""
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    """Rotary embedding."""
    norm: Norm = "rms"
    """RMSNorm, or LayerNorm with a bias."""
    mlp: Mlp = "swiglu"
    """The feed-forward block: gated by SiLU, or ungated with GELU, exact or by its tanh approximation."""
    is_parallel: bool = False
    """Whether attention and feed-forward read the same residual stream, instead of one after the other."""
    shares_norm: bool = False
    """Parallel only: whether both read it through one norm."""
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias."""
    out_bias: bool = False
    """Whether the attention's output has a bias."""
    mlp_bias: bool = False
    """Whether the feed-forward block's matrices have biases."""
    qk_norm: bool = False
    """Whether each head of queries and keys goes through an RMSNorm before it is rotated."""
    sliding_window: int | None = None
    """How many tokens a token sees, itself among them, in layers that slide; None: all before it."""
    full_layers: tuple[int, ...] = ()
    """Layers that do not slide although there is a window, ascending."""
    num_experts: int = 0
    """E, experts of each feed-forward block; 0: one block that is no expert."""
    num_experts_per_token: int = 0
    """How many of them a token goes through."""

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
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding, got {self.head_dim}")
        if self.rotary_dim > self.head_dim:
            raise ValueError(f"rope rotary_dim must be at most head_dim {self.head_dim}, got {self.rotary_dim}")
        for name, choices in (("norm", get_args(Norm)), ("mlp", get_args(Mlp))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.shares_norm and not self.is_parallel:
            raise ValueError("shares_norm needs is_parallel: a norm is shared by attention and feed-forward")
        if self.sliding_window is not None and self.sliding_window <= 0:
            raise ValueError(f"sliding_window must be positive or None, got {self.sliding_window}")
        object.__setattr__(self, "full_layers", tuple(self.full_layers))
        if any(not 0 <= layer < self.num_layers for layer in self.full_layers):
            raise ValueError(f"full_layers must be layers in [0, {self.num_layers}), got {self.full_layers}")
        if not (
            self.num_experts == self.num_experts_per_token == 0 or 0 < self.num_experts_per_token <= self.num_experts
        ):
            raise ValueError(
                "experts must be 0 < num_experts_per_token <= num_experts, or both 0; got "
                f"{self.num_experts_per_token} and {self.num_experts}"
            )
        if self.num_experts and (self.mlp != "swiglu" or self.mlp_bias):
            raise ValueError(
                f"experts must have mlp='swiglu' without biases, got {self.mlp!r}, mlp_bias={self.mlp_bias}"
            )

    @property
    def num_groups(self) -> int:
        """G, query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rotary_dim(self) -> int:
        """R, how many of a head's numbers are rotated."""
        return self.head_dim if self.rope.rotary_dim is None else self.rope.rotary_dim

    @property
    def steady_positions(self) -> int:
        """The longest context whose rotary frequencies are those of any shorter one; only `dynamic` scaling has less
        than `max_positions`."""
        if self.rope.scaling == "dynamic":
            return min(self.max_positions, self.rope.original_max_positions)
        return self.max_positions

    def window_of(self, layer: int) -> int | None:
        """How many tokens a token sees in a layer, itself among them; None: all before it."""
        return None if layer in self.full_layers else self.sliding_window

    @property
    def kv_window(self) -> int | None:
        """How far all layers look back, tokens, the one that looks among them; None: some layer looks at all."""
        return None if self.full_layers else self.sliding_window

    def kv_bytes_per_token(self, itemsize: int = 2) -> int:
        """Bytes of keys and values one token leaves in all layers, at `itemsize` bytes a number (2 for bf16)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    @classmethod
    def from_dict(cls, described: Mapping[str, Any]) -> ModelConfig:
        """The config that `dataclasses.asdict` describes, also after a way through JSON.

        Raises:
          TypeError: an entry that is no field, or one that is missing.
          ValueError, UnsupportedArchitectureError: as for the constructors.
        """
        return cls(**{**described, "rope": RopeConfig(**described["rope"])})
