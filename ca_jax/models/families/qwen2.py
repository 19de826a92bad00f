"""Qwen2 and Qwen2.5: Llama with a bias on queries, keys and values, and a sliding window in some layers if asked for.

Source: Yang et al., "Qwen2 Technical Report" (2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ca_jax.errors import UnsupportedArchitectureError
from ca_jax.models.config import ModelConfig
from ca_jax.models.families import llama
from ca_jax.models.families.family import Family, Names
from ca_jax.models.families.gguf_entries import GgufDescription, require, sizes_from_gguf

HF_NAMES: dict[str, str] = {
    **llama.HF_NAMES,
    "attn.bq": "model.layers.{layer}.self_attn.q_proj.bias",
    "attn.bk": "model.layers.{layer}.self_attn.k_proj.bias",
    "attn.bv": "model.layers.{layer}.self_attn.v_proj.bias",
}
"""Names in safetensors files."""


def windows_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers slide: those that `layer_types` says, or else those from `max_window_layers` on, if any do.

    Raises:
      ValueError: `layer_types` is not of the model's layers.
      UnsupportedArchitectureError: a type of layer that is not served.
    """
    window = described.get("sliding_window", 4096) if described.get("use_sliding_window") else None
    if window is None:
        return {}
    num_layers, types = described["num_hidden_layers"], described.get("layer_types")
    if types is None:
        return {"sliding_window": window, "full_layers": range(min(described.get("max_window_layers", 28), num_layers))}
    if len(types) != num_layers:
        raise ValueError(f"layer_types must be one for each of {num_layers} layers, got {len(types)}")
    unknown = sorted({*types} - {"sliding_attention", "full_attention"})
    if unknown:
        raise UnsupportedArchitectureError(
            f"config.json: layer_types {', '.join(unknown)} not served; they must be sliding_attention "
            "or full_attention"
        )
    return {"sliding_window": window, "full_layers": [i for i, each in enumerate(types) if each == "full_attention"]}


def _config_from_hf(described: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(
        architecture="qwen2", qkv_bias=True, **windows_from_hf(described), **llama.sizes_from_hf(described)
    )


def _config_from_gguf(described: GgufDescription) -> ModelConfig:
    require(described, {"attention.sliding_window": 0})  # In some layers only, and it does not say in which.
    return ModelConfig(architecture="qwen2", qkv_bias=True, **sizes_from_gguf(described))


def _hf_names(config: ModelConfig) -> Names:
    return HF_NAMES


FAMILY = Family(
    name="qwen2",
    model_types=("qwen2",),
    architectures=("Qwen2ForCausalLM",),
    config_from_hf=_config_from_hf,
    hf_names=_hf_names,
    ignored=("rotary_emb.inv_freq",),
    gguf_architectures=("qwen2",),
    config_from_gguf=_config_from_gguf,
    gguf_names=llama.gguf_names,
)
"""The family."""
