"""What a model family is: how files that others wrote of it are understood.

Everything that is computed follows from `ModelConfig`; a family says how to get one from a file's description, and
under which names the file holds the leaves of the parameter tree.

Not here: the families themselves, file formats (`huggingface`, `gguf`), what GGUF files say alike (`gguf_entries`),
what becomes of a rope scaling (`rope`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ca_jax.errors import UnsupportedArchitectureError
from ca_jax.models.config import Mlp, ModelConfig, RopeConfig
from ca_jax.models.families.gguf_entries import GgufDescription

_GELUS: dict[str, Mlp] = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh"),
}
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class Fused:
    """Rows of a file's tensor that holds several leaves of the parameter tree."""

    name: str
    """The file's name, with `{layer}` where the layer's number goes."""
    num_rows: int
    """Rows of the whole tensor."""
    rows: np.ndarray
    """i64, which rows are the leaf's, in its order."""


Names = Mapping[str, str | Fused]
"""From `Slot.key` to where a file holds the leaf: in the tensor of that name, with `{layer}`, and `{expert}` where each
expert has one of its own; or in some rows of one. Names of parts that a model does not have are not looked at."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One model family."""

    name: str
    """`ModelConfig.architecture`."""
    model_types: tuple[str, ...]
    """What Hugging Face's `model_type` calls it."""
    architectures: tuple[str, ...]
    """What Hugging Face's `architectures` calls it with a language model's head, the usual one first."""
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    """The config that the contents of a config.json describe. KeyError, TypeError, ValueError: they describe none;
    UnsupportedArchitectureError: something about it is not served."""
    hf_names: Callable[[ModelConfig], Names]
    """Names in safetensors files."""
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Ends of names in safetensors files that hold nothing but what the config says."""
    gguf_architecture: str
    """What GGUF's `general.architecture` calls it; several families may go by one name."""
    config_from_gguf: Callable[[GgufDescription], ModelConfig | None]
    """The config that a GGUF file of such an architecture describes; None: it describes another family. Raises as
    `config_from_hf` does."""
    gguf_names: Callable[[ModelConfig], Names]
    """Names in GGUF files."""
    gguf_is_interleaved: bool = False
    """Whether rows of Q and K in GGUF files are in interleaved rotary order (pairs 2j, 2j+1), and not in half-split
    order (pairs j, j + H/2), in which the model rotates."""


def fused_rows(rows: Mapping[str, np.ndarray], names: Mapping[str, str]) -> dict[str, Fused]:
    """Queries, keys and values that are rows of one tensor, or of a weight and a bias.

    Args:
      rows: those of `q`, `k` and `v`.
      names: the file's names of the weight `w` and, if there is one, the bias `b`.
    """
    num_rows = sum(each.size for each in rows.values())
    return {
        f"attn.{kind}{part}": Fused(name, num_rows, each.reshape(-1))
        for part, each in rows.items()
        for kind, name in names.items()
    }


def split_rows(config: ModelConfig) -> dict[str, np.ndarray]:
    """The rows of queries, keys and values that lie one behind the other in one tensor."""
    stops = np.cumsum([config.num_heads, config.num_kv_heads, config.num_kv_heads]) * config.head_dim
    return dict(zip("qkv", np.split(np.arange(stops[-1]), stops[:-1]), strict=True))


# What a config.json says.


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


def rope_from_hf(
    described: Mapping[str, Any],
    *,
    head_dim: int,
    theta: float = 10000.0,
    theta_key: str = "rope_theta",
    partial_key: str = "partial_rotary_factor",
    partial: float = 1.0,
) -> dict[str, Any]:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Args:
      described: the contents of a config.json.
      head_dim: of the model.
      theta: the family's, where nothing is said.
      theta_key: what the family calls it outside `rope_parameters`.
      partial_key: what the family calls the share of a head that is rotated.
      partial: that share, where nothing is said.

    Returns:
      `rope` and `max_positions`, fields of `ModelConfig`: with `dynamic` scaling the context is as long as it can be
      stretched to.

    Raises:
      UnsupportedArchitectureError: a scaling that is not served, by name.
      KeyError, TypeError, ValueError: an entry is missing or no number.
    """
    parameters = {"rope_theta": described.get(theta_key, theta)}
    parameters |= described.get("rope_scaling") or {}
    parameters |= described.get("rope_parameters") or {}
    rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", described.get(partial_key, partial)))
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
    if scaling != "default":
        fields |= {"scaling": scaling, "factor": float(parameters["factor"])}
    if scaling == "llama3":
        fields |= {
            "low_freq_factor": float(parameters["low_freq_factor"]),
            "high_freq_factor": float(parameters["high_freq_factor"]),
            "original_max_positions": parameters["original_max_position_embeddings"],
        }
    elif scaling == "dynamic":
        fields["original_max_positions"] = max_positions
        max_positions = int(max_positions * fields["factor"])
    elif scaling == "yarn":
        fields |= {
            "original_max_positions": parameters.get("original_max_position_embeddings") or max_positions,
            "beta_fast": float(parameters.get("beta_fast") or 32),
            "beta_slow": float(parameters.get("beta_slow") or 1),
            "truncate": bool(parameters.get("truncate", True)),
            "attention_factor": _yarn_attention_factor(parameters),
        }
    return {"rope": RopeConfig(**fields), "max_positions": max_positions}


def _yarn_attention_factor(parameters: Mapping[str, Any]) -> float:
    """What YaRN multiplies queries and keys by (Peng et al., 2023, section 3.4), unless it is given."""
    given, factor = parameters.get("attention_factor"), float(parameters["factor"])
    if given is not None:
        return float(given)

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(float(mscale)) / scale(float(all_dims)) if mscale and all_dims else scale(1.0)
