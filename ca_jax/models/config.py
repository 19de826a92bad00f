"""What a model is: its shapes and its position encoding, nothing about how it is run.

Not here: mesh, paths, dtypes of weights, kernels, tokenizer; published architectures (`presets`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from ca_jax.errors import UnsupportedArchitectureError, check

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
            check(getattr(self, name) > 0, f"rope {name}", "positive", getattr(self, name))
        for scaling, low, high in (
            ("llama3", "low_freq_factor", "high_freq_factor"),
            ("yarn", "beta_slow", "beta_fast"),
        ):
            found = getattr(self, low), getattr(self, high)
            holds = self.scaling != scaling or 0 < found[0] < found[1]
            check(holds, f"{low} and {high} of {scaling} rope scaling", "0 < the first < the second", found)
        rotary_dim = self.rotary_dim
        is_even = rotary_dim is None or (rotary_dim > 0 and rotary_dim % 2 == 0)
        check(is_even, "rope rotary_dim", "positive and even", rotary_dim)


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
            check(getattr(self, name) > 0, name, "positive", getattr(self, name))
        for name, choices in (("norm", get_args(Norm)), ("mlp", get_args(Mlp))):
            check(getattr(self, name) in choices, name, f"one of {', '.join(choices)}", getattr(self, name))
        heads, experts = (self.num_heads, self.num_kv_heads), (self.num_experts_per_token, self.num_experts)
        check(heads[0] % heads[1] == 0, "num_heads", "a multiple of num_kv_heads", heads)
        check(self.head_dim % 2 == 0, "head_dim", "even for rotary embedding", self.head_dim)
        most = f"at most head_dim {self.head_dim}"
        check(self.rotary_dim <= self.head_dim, "rope rotary_dim", most, self.rotary_dim)
        check(self.is_parallel or not self.shares_norm, "shares_norm", "False without is_parallel", self.shares_norm)
        window = self.sliding_window
        check(window is None or window > 0, "sliding_window", "positive or None", window)
        are_layers = all(0 <= layer < self.num_layers for layer in self.full_layers)
        check(are_layers, "full_layers", f"layers in [0, {self.num_layers})", self.full_layers)
        are_chosen = experts == (0, 0) or 0 < experts[0] <= experts[1]
        check(are_chosen, "experts", "0 < num_experts_per_token <= num_experts, or both 0", experts)
        mlp = (self.mlp, self.mlp_bias)
        check(not self.num_experts or mlp == ("swiglu", False), "mlp of experts", "'swiglu' without biases", mlp)

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

    def kv_shape(self, layer: int) -> tuple[int, int, int]:
        """What a token leaves in a layer: parts (keys and values), KV heads, numbers of each."""
        return (2, self.num_kv_heads, self.head_dim)

    def kv_bytes_per_token(self, itemsize: int = 2) -> int:
        """Bytes of keys and values one token leaves in all layers, at `itemsize` bytes a number (2 for bf16)."""
        return sum(math.prod(self.kv_shape(layer)) for layer in range(self.num_layers)) * itemsize

    @classmethod
    def from_dict(cls, described: Mapping[str, Any]) -> ModelConfig:
        """The config that `dataclasses.asdict` describes, also after a way through JSON.

        Raises:
          TypeError: an entry that is no field, or one that is missing.
          ValueError, UnsupportedArchitectureError: as for the constructors.
        """
        return cls(**{**described, "rope": RopeConfig(**described["rope"])})
