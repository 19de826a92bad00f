"""Qwen3, dense: Llama with a norm on each head of queries and keys, whose size is not that of the residual stream.

Source: Yang et al., "Qwen3 Technical Report" (2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ca_jax.models.config import ModelConfig
from ca_jax.models.families import llama, qwen2
from ca_jax.models.families.family import Family, Names
from ca_jax.models.families.gguf_entries import GgufDescription, require, sizes_from_gguf

_HF_NAMES: dict[str, str] = {
    **qwen2.HF_NAMES,
    "attn.bo": "model.layers.{layer}.self_attn.o_proj.bias",
    "attn.q_norm.scale": "model.layers.{layer}.self_attn.q_norm.weight",
    "attn.k_norm.scale": "model.layers.{layer}.self_attn.k_norm.weight",
}


def _config_from_hf(described: Mapping[str, Any]) -> ModelConfig:
    has_bias = bool(described.get("attention_bias", False))
    return ModelConfig(
        architecture="qwen3",
        qk_norm=True,
        qkv_bias=has_bias,
        out_bias=has_bias,
        **qwen2.windows_from_hf(described),
        **llama.sizes_from_hf({"head_dim": 128, **described}),
    )


def _config_from_gguf(described: GgufDescription) -> ModelConfig:
    require(described, {"attention.sliding_window": 0})  # In some layers only, and it does not say in which.
    return ModelConfig(architecture="qwen3", qk_norm=True, **sizes_from_gguf(described))


def _hf_names(config: ModelConfig) -> Names:
    return _HF_NAMES


FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    architectures=("Qwen3ForCausalLM",),
    config_from_hf=_config_from_hf,
    hf_names=_hf_names,
    ignored=("rotary_emb.inv_freq",),
    gguf_architectures=("qwen3",),
    config_from_gguf=_config_from_gguf,
    gguf_names=llama.gguf_names,
)
"""The family."""
