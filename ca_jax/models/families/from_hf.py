"""What a Hugging Face config.json says that families spell alike.

Not here: what each family says besides (its own module), what becomes of a rope scaling (`rope`).
Source: `transformers`, whose defaults these are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ca_jax.errors import UnsupportedArchitectureError, check
from ca_jax.models.config import Mlp, RopeConfig

_GELUS: dict[str, Mlp] = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh"),
}
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


def require(described: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuses a config.json in which an entry is there and is not as wanted.

    Raises:
      UnsupportedArchitectureError: there is one; the message names it.
    """
    for key, value in wanted.items():
        if described.get(key, value) != value:
            raise UnsupportedArchitectureError(
                f"config.json: {key}={described[key]!r} is not served; it must be {value!r}"
            )


def gelu_from_hf(described: Mapping[str, Any], key: str) -> Mlp:
    """Which GELU an ungated feed-forward has, by the entry `key`.

    Raises:
      UnsupportedArchitectureError: it is none.
    """
    found = described.get(key, "gelu")
    if found not in _GELUS:
        raise UnsupportedArchitectureError(
            f"config.json: {key}={found!r} is not served; it must be one of {', '.join(_GELUS)}"
        )
    return _GELUS[found]


def sizes_from_hf(
    described: Mapping[str, Any],
    *,
    mlp_key: str | None = "intermediate_size",
    eps_key: str = "rms_norm_eps",
    norm_eps: float = 1e-6,
    head_dim: int | None = None,
    ties: bool = False,
    **rope: Any,
) -> dict[str, Any]:
    """The fields of `ModelConfig` that families spell alike in a config.json, but for what is said here.

    Args:
      described: the contents of a config.json.
      mlp_key: what the family calls the width of the feed-forward block; None: it is four times the residual stream's.
      eps_key: what it calls the number added inside its norms.
      norm_eps: that number, where nothing is said.
      head_dim: H, likewise; None: the heads share the residual stream's width.
      ties: whether the output head is the embedding table, where nothing is said.
      **rope: as `rope_from_hf` takes it.

    Raises:
      UnsupportedArchitectureError: a rope scaling that is not served, by name.
      KeyError, TypeError, ValueError: an entry is missing or no number.
    """
    embed_dim, num_heads = described["hidden_size"], described["num_attention_heads"]
    head_dim = described.get("head_dim", head_dim) or embed_dim // num_heads
    return {
        "vocab_size": described["vocab_size"],
        "embed_dim": embed_dim,
        "mlp_dim": 4 * embed_dim if mlp_key is None else described[mlp_key],
        "num_layers": described["num_hidden_layers"],
        "num_heads": num_heads,
        "num_kv_heads": described.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "norm_eps": described.get(eps_key, norm_eps),
        "tie_embeddings": described.get("tie_word_embeddings", ties),
        **rope_from_hf(described, head_dim=head_dim, **rope),
    }


def full_layers_from_hf(described: Mapping[str, Any], is_full: Callable[[int], bool]) -> list[int]:
    """The layers that do not slide, of a model in which others do.

    Args:
      described: the contents of a config.json.
      is_full: whether a layer is one, where `layer_types` is not there to say so.

    Raises:
      ValueError: `layer_types` is not of the model's layers.
      UnsupportedArchitectureError: a type of layer that is not served.
    """
    num_layers, types = described["num_hidden_layers"], described.get("layer_types")
    if types is None:
        return [layer for layer in range(num_layers) if is_full(layer)]
    check(len(types) == num_layers, "layer_types", f"as many as the {num_layers} layers", len(types))
    if unknown := sorted({*types} - {"sliding_attention", "full_attention"}):
        raise UnsupportedArchitectureError(
            f"config.json: layer_types {', '.join(unknown)} not served; they must be sliding_attention "
            "or full_attention"
        )
    return [layer for layer, each in enumerate(types) if each == "full_attention"]


def rope_from_hf(
    described: Mapping[str, Any],
    *,
    head_dim: int,
    theta: float = 10000.0,
    theta_key: str = "rope_theta",
    partial_key: str = "partial_rotary_factor",
    partial: float = 1.0,
    rotary_dim_key: str | None = None,
) -> dict[str, Any]:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Args:
      described: the contents of a config.json.
      head_dim: of the model.
      theta: the family's, where nothing is said.
      theta_key: what the family calls it outside `rope_parameters`.
      partial_key: what the family calls the share of a head that is rotated.
      partial: that share, where nothing is said.
      rotary_dim_key: what it calls how many numbers of a head are rotated, where files may say that instead.

    Returns:
      `rope` and `max_positions`, fields of `ModelConfig`: with `dynamic` scaling the context is as long as it can be
      stretched to.

    Raises:
      UnsupportedArchitectureError: a scaling that is not served, by name.
      KeyError, TypeError, ValueError: an entry is missing or no number.
    """
    parameters = {"rope_theta": described.get(theta_key, theta)}
    parameters |= described.get("rope_scaling") or {}
    of_all = described.get("rope_parameters") or {}
    parameters |= of_all.get("full_attention", of_all)  # Some files say it for each type of layer.
    rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", described.get(partial_key, partial)))
    if rotary_dim_key is not None and rotary_dim_key in described:
        rotary_dim = described[rotary_dim_key]
    fields: dict[str, Any] = {
        "theta": float(parameters["rope_theta"]),
        "rotary_dim": None if rotary_dim == head_dim else rotary_dim,
    }
    scaling = parameters.get("rope_type", parameters.get("type", "default"))
    if scaling not in _ROPE_TYPES:
        raise UnsupportedArchitectureError(
            f"config.json: rope scaling {scaling!r} is not served; it must be one of {', '.join(_ROPE_TYPES)}"
        )
    max_positions = described.get("max_position_embeddings", 2048)
    original = described.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    original = original or max_positions
    if scaling == "proportional":
        turning = int(parameters.get("partial_rotary_factor", 1.0) * head_dim // 2)
        factor = float(parameters.get("factor", 1.0))
        fields |= {"scaling": scaling, "factor": factor, "num_turning": turning, "rotary_dim": None}
    elif scaling == "longrope":
        factor = float(parameters.get("factor") or max_positions / original)
        given = parameters.get("attention_factor")
        stretched = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        fields |= {
            **{"scaling": scaling, "factor": factor, "original_max_positions": original},
            **{f"{name}_factors": tuple(map(float, parameters[f"{name}_factor"])) for name in ("short", "long")},
            "attention_factor": stretched if given is None else float(given),
        }
    elif scaling != "default":
        fields |= {"scaling": scaling, "factor": float(parameters["factor"])}
    if scaling == "llama3":
        fields |= {
            "low_freq_factor": float(parameters["low_freq_factor"]),
            "high_freq_factor": float(parameters["high_freq_factor"]),
            "original_max_positions": original,
        }
    elif scaling == "dynamic":
        fields["original_max_positions"] = max_positions
        max_positions = int(max_positions * fields["factor"])
    elif scaling == "yarn":
        fields |= {
            "original_max_positions": original,
            "beta_fast": float(parameters.get("beta_fast") or 32),
            "beta_slow": float(parameters.get("beta_slow") or 1),
            "truncate": bool(parameters.get("truncate", True)),
            "attention_factor": _yarn_attention_factor(parameters),
        }
    return {"rope": RopeConfig(**fields), "max_positions": max_positions}


def sliding_from_hf(described: Mapping[str, Any], window: int | None, is_full: Callable[[int], bool]) -> dict[str, Any]:
    """The fields of `ModelConfig` that say which layers slide, if any does.

    Args:
      described: the contents of a config.json.
      window: how many tokens a token sees where layers slide; None: none does.
      is_full: as `full_layers_from_hf` takes it, and raises.
    """
    full = tuple(full_layers_from_hf(described, is_full))
    slides = window is not None and len(full) < described["num_hidden_layers"]
    return {"sliding_window": window, "full_layers": full} if slides else {}


def _yarn_attention_factor(parameters: Mapping[str, Any]) -> float:
    """What YaRN multiplies queries and keys by (Peng et al., 2023, section 3.4), unless it is given."""
    given, factor = parameters.get("attention_factor"), float(parameters["factor"])
    if given is not None:
        return float(given)

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(float(mscale)) / scale(float(all_dims)) if mscale and all_dims else scale(1.0)
