"""What a Hugging Face config.json says of rotary embedding, in its spellings of now and before.

Not here: what becomes of it (`rope`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ca_jax.errors import UnsupportedArchitectureError
from ca_jax.models.config import RopeConfig

_SERVED = ("default", "linear", "dynamic", "llama3", "yarn")


def rope_from_hf(
    described: Mapping[str, Any],
    *,
    head_dim: int,
    theta: float = 10000.0,
    theta_key: str = "rope_theta",
    partial_key: str = "partial_rotary_factor",
    partial: float = 1.0,
) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Args:
      described: the contents of a config.json.
      head_dim: of the model.
      theta: the family's, where nothing is said.
      theta_key: what the family calls it outside `rope_parameters`.
      partial_key: what the family calls the share of a head that is rotated.
      partial: that share, where nothing is said.

    Raises:
      UnsupportedArchitectureError: a scaling that is not served, by name.
      KeyError, TypeError, ValueError: an entry is missing or no number.
    """
    parameters = {"rope_theta": described.get(theta_key, theta)}
    parameters |= described.get("rope_scaling") or {}
    parameters |= described.get("rope_parameters") or {}
    share = parameters.get("partial_rotary_factor", described.get(partial_key, partial))
    rotary_dim = int(head_dim * share)
    fields: dict[str, Any] = {
        "theta": float(parameters["rope_theta"]),
        "rotary_dim": None if rotary_dim == head_dim else rotary_dim,
    }
    scaling = parameters.get("rope_type", parameters.get("type", "default"))
    if scaling not in _SERVED:
        raise UnsupportedArchitectureError(
            f"config.json: rope scaling {scaling!r} is not served; it must be one of {', '.join(_SERVED)}"
        )
    if scaling == "default":
        return RopeConfig(**fields)
    fields |= {"scaling": scaling, "factor": float(parameters["factor"])}
    max_positions = described.get("max_position_embeddings", 2048)
    if scaling == "llama3":
        fields |= {
            "low_freq_factor": float(parameters["low_freq_factor"]),
            "high_freq_factor": float(parameters["high_freq_factor"]),
            "original_max_positions": parameters["original_max_position_embeddings"],
        }
    elif scaling == "dynamic":
        fields["original_max_positions"] = max_positions
    elif scaling == "yarn":
        fields |= {
            "original_max_positions": parameters.get("original_max_position_embeddings") or max_positions,
            "beta_fast": float(parameters.get("beta_fast") or 32),
            "beta_slow": float(parameters.get("beta_slow") or 1),
            "truncate": bool(parameters.get("truncate", True)),
            "attention_factor": _yarn_attention_factor(parameters),
        }
    return RopeConfig(**fields)


def max_positions_from_hf(described: Mapping[str, Any], rope: RopeConfig) -> int:
    """The context length of a model, tokens: with `dynamic` scaling, what it can be stretched to."""
    max_positions = described.get("max_position_embeddings", 2048)
    return int(max_positions * rope.factor) if rope.scaling == "dynamic" else max_positions


def _yarn_attention_factor(parameters: Mapping[str, Any]) -> float:
    """What YaRN multiplies queries and keys by (Peng et al., 2023, section 3.4), unless it is given."""
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    factor = float(parameters["factor"])

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and all_dims:
        return scale(float(mscale)) / scale(float(all_dims))
    return scale(1.0)
