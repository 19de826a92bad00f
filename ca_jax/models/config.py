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
        for name in ("theta", "factor", "attention_factor", "original_max_positions"):
            if getattr(self, name) <= 0:
                raise ValueError(f"rope {name} must be positive, got {getattr(self, name)}")
        for scaling, low, high in (
            ("llama3", "low_freq_factor", "high_freq_factor"),
            ("yarn", "beta_slow", "beta_fast"),
        ):
            found = getattr(self, low), getattr(self, high)
            if self.scaling == scaling and not 0 < found[0] < found[1]:
                raise ValueError(f"{scaling} rope scaling must have 0 < {low} < {high}, got {found[0]} and {found[1]}")
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
        object.__setattr__(self, "full_layers", tuple(self.full_layers))
        sizes = ("vocab_size", "embed_dim", "mlp_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "max_positions"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name, choices in (("norm", get_args(Norm)), ("mlp", get_args(Mlp))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        heads, experts = (self.num_heads, self.num_kv_heads), (self.num_experts_per_token, self.num_experts)
        outside = [layer for layer in self.full_layers if not 0 <= layer < self.num_layers]
        for holds, wanted, found in (
            (heads[0] % heads[1] == 0, "num_heads must be a multiple of num_kv_heads", heads),
            (self.head_dim % 2 == 0, "head_dim must be even for rotary embedding", self.head_dim),
            (
                self.rotary_dim <= self.head_dim,
                f"rope rotary_dim must be at most head_dim {self.head_dim}",
                self.rotary_dim,
            ),
            (self.is_parallel or not self.shares_norm, "shares_norm must come with is_parallel", self.is_parallel),
            (
                self.sliding_window is None or self.sliding_window > 0,
                "sliding_window must be positive or None",
                self.sliding_window,
            ),
            (not outside, f"full_layers must be layers in [0, {self.num_layers})", self.full_layers),
            (
                experts == (0, 0) or 0 < experts[0] <= experts[1],
                "experts must be 0 < num_experts_per_token <= num_experts, or both 0",
                experts,
            ),
            (
                not self.num_experts or (self.mlp == "swiglu" and not self.mlp_bias),
                "experts must have mlp='swiglu' without biases",
                (self.mlp, self.mlp_bias),
            ),
        ):
            if not holds:
                raise ValueError(f"{wanted}, got {found}")

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
