"""What a GGUF file's metadata says that families spell alike.

Not here: what each family says besides (its own module), opening files (`gguf`), what becomes of a rope scaling
(`rope`).
Source: the GGUF specification; layouts and defaults are those of llama.cpp, whose converter wrote such files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ca_jax.errors import UnsupportedArchitectureError
from ca_jax.models import rope
from ca_jax.models.config import RopeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufDescription:
    """What a family is told of a GGUF file."""

    entries: Mapping[str, Any]
    """Metadata of the architecture, by keys without its name: `block_count`."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the tensors, by name, outermost first; `token_embd.weight` is there."""
    rope_factors: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """What the tensors of `ROPE_FACTORS` hold that are there, by name: divisors of rotary frequencies, f32 `[R/2]`."""


ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are no parameters: of llama3 or proportional scaling; of LongRoPE in long contexts, in short ones."""
_NOTHING = 1e30  # Divided by this, a frequency turns nothing.
_LLAMA3_ORIGINAL_POSITIONS = 8192  # Every Llama 3.x release; files rarely say.


def sizes_from_gguf(
    described: GgufDescription,
    *,
    mlp_key: str = "feed_forward_length",
    eps_key: str = "layer_norm_rms_epsilon",
    may_rotate_part: bool = False,
    keeps_latents: bool = False,
    layers_differ: bool = False,
    truncates: bool = True,
) -> dict[str, Any]:
    """The fields of `ModelConfig` that all families spell alike.

    Args:
      described: the file.
      mlp_key: what the family calls the width of the feed-forward block.
      eps_key: what it calls the number added inside its norms.
      may_rotate_part: whether the family has models that rotate a part of each head.
      keeps_latents: whether its layers keep latents, which have another length as keys than as values.
      layers_differ: whether KV heads and that width may be said of each layer. The greatest is given here then.
      truncates: `RopeConfig.truncate` of its models, which files leave unsaid.

    Raises:
      KeyError: an entry is missing.
      UnsupportedArchitectureError: something about it is not served, by name.
    """
    entries, shapes = described.entries, described.shapes
    embed_dim, num_heads = entries["embedding_length"], entries["attention.head_count"]
    num_kv_heads, mlp_dim = entries.get("attention.head_count_kv", num_heads), entries[mlp_key]
    if layers_differ:
        num_kv_heads, mlp_dim = (max(each) if isinstance(each, list) else each for each in (num_kv_heads, mlp_dim))
    for key, value in (("head_count", num_heads), ("head_count_kv", num_kv_heads), (mlp_key, mlp_dim)):
        if isinstance(value, list):
            raise UnsupportedArchitectureError(f"a {key} of its own for each layer is not served")
    head_dim = entries.get("attention.key_length", embed_dim // num_heads)
    if not keeps_latents:
        require_gguf(described, {"attention.value_length": head_dim}, why="the head dim")
    if not may_rotate_part:
        require_gguf(described, {"rope.dimension_count": head_dim}, why="the head dim")
    return {
        "vocab_size": int(shapes["token_embd.weight"][0]),
        "embed_dim": embed_dim,
        "mlp_dim": mlp_dim,
        # Layers behind the last one draft tokens, and are left out.
        "num_layers": entries["block_count"] - entries.get("nextn_predict_layers", 0),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_positions": entries["context_length"],
        "norm_eps": shortest(entries[f"attention.{eps_key}"]),
        "tie_embeddings": "output.weight" not in shapes,
        "rope": rope_from_gguf(described, head_dim, truncates),
    }


def experts_from_gguf(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ModelConfig` that say how many experts there are, how many are chosen, and how wide each is.

    Raises:
      KeyError: an entry is missing.
    """
    return {
        "num_experts": entries["expert_count"],
        "num_experts_per_token": entries["expert_used_count"],
        "mlp_dim": entries["expert_feed_forward_length"],
    }


def full_layers_from_gguf(entries: Mapping[str, Any], period: int) -> list[int]:
    """The layers that do not slide, of a model in which others do.

    Args:
      entries: the metadata; it may say of each layer whether it slides, or of which period the last layers do not.
      period: that, where it says neither.
    """
    found = entries.get("attention.sliding_window_pattern", period)
    if isinstance(found, list):
        return [layer for layer, slides in enumerate(found) if not slides]
    return [layer for layer in range(entries["block_count"]) if found and (layer + 1) % found == 0]


def require_gguf(described: GgufDescription, wanted: Mapping[str, Any], why: str = "") -> None:
    """Refuses a file in which an entry is there and is not as wanted.

    Args:
      described: the file.
      wanted: values by key.
      why: what the wanted value is, for the message.

    Raises:
      UnsupportedArchitectureError: there is one; the message names it.
    """
    for key, value in wanted.items():
        found = described.entries.get(key, value)
        if found != value:
            raise UnsupportedArchitectureError(f"{key} {found} is not served; it must be {f'{why} {value}'.strip()}")


def rope_from_gguf(described: GgufDescription, head_dim: int, truncates: bool = True) -> RopeConfig:
    """The rotary embedding of a model.

    Args:
      described: the file.
      head_dim: of the model.
      truncates: as `sizes_from_gguf` takes it.

    Raises:
      UnsupportedArchitectureError: a scaling that is not served, by name.
    """
    entries, (freqs, long, short) = described.entries, map(described.rope_factors.get, ROPE_FACTORS)
    rotary_dim = entries.get("rope.dimension_count", head_dim)
    plain = RopeConfig(
        theta=shortest(entries.get("rope.freq_base", 10000.0)),
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
    )
    scaling, factor = entries.get("rope.scaling.type", "none"), entries.get("rope.scaling.factor", 1.0)
    if "rope.scale_linear" in entries:
        scaling, factor = "linear", entries["rope.scale_linear"]
    factor = shortest(factor)
    original = entries.get("rope.scaling.original_context_length", entries["context_length"])
    if long is not None and short is not None:
        return dataclasses.replace(
            plain,
            scaling="longrope",
            factor=entries["context_length"] / original,
            original_max_positions=original,
            long_factors=tuple(map(shortest, long)),
            short_factors=tuple(map(shortest, short)),
            attention_factor=shortest(entries.get("rope.scaling.attn_factor", 1.0)),
        )
    if freqs is not None:
        if scaling != "none":
            raise UnsupportedArchitectureError(f"rope scaling {scaling!r} with rope_freqs.weight is not served")
        return _proportional_rope(freqs, plain) or _llama3_rope(described, freqs, plain, head_dim)
    if scaling == "none":
        return plain
    if scaling == "linear":
        return dataclasses.replace(plain, scaling="linear", factor=factor)
    if scaling != "yarn":
        raise UnsupportedArchitectureError(
            f"rope scaling {scaling!r} is not served; it must be one of none, linear, yarn, or as tensors: llama3 and "
            "proportional as rope_freqs.weight, longrope as rope_factors_long.weight and rope_factors_short.weight"
        )
    require_gguf(described, {"rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_ext_factor": 1.0})
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    given = entries.get("rope.scaling.yarn_attn_factor", 1.0)
    if given != 1 and not math.isclose(given, usual, rel_tol=1e-5):
        raise UnsupportedArchitectureError(f"rope.scaling.yarn_attn_factor {given} is not served; it must be {usual}")
    divisor = 1.0 + shortest(entries.get("rope.scaling.yarn_log_multiplier", 0.0)) * (usual - 1.0)
    return dataclasses.replace(
        plain,
        scaling="yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=shortest(entries.get("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=shortest(entries.get("rope.scaling.yarn_beta_slow", 1.0)),
        truncate=truncates,
        # As Peng et al. (2023) say in section 3.4, whether files say so or not.
        attention_factor=usual / divisor,
    )


def _proportional_rope(found: np.ndarray, plain: RopeConfig) -> RopeConfig | None:
    """Of divisors that leave the first frequencies as they are and all others nothing; None of any others."""
    num_turning = int((found == 1).sum())
    if (found[:num_turning] == 1).all() and (found[num_turning:] >= _NOTHING).all() and num_turning < len(found):
        return dataclasses.replace(plain, scaling="proportional", num_turning=num_turning)
    return None


def _llama3_rope(described: GgufDescription, found: np.ndarray, plain: RopeConfig, head_dim: int) -> RopeConfig:
    """Llama 3.x files hold the divisor of each frequency, not the rule: finds the rule, checks that it gives them."""
    original_positions = described.entries.get("rope.scaling.original_context_length", _LLAMA3_ORIGINAL_POSITIONS)
    frequencies = rope.inverse_frequencies(plain, head_dim)
    if found.shape == frequencies.shape and np.isfinite(found).all() and found.max() >= 1:
        candidate = dataclasses.replace(
            plain, scaling="llama3", factor=float(found.max()), original_max_positions=original_positions
        )
        if np.allclose(frequencies / rope.inverse_frequencies(candidate, head_dim), found, rtol=1e-3):
            return candidate
    raise UnsupportedArchitectureError(
        f"rope_freqs.weight does not hold llama3 rope scaling for {original_positions} original positions"
    )


def shortest(value: float) -> float:
    """The f32 number that a file holds as the decimal it was written from: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
