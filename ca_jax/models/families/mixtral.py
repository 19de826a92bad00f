"""Mixtral: Mistral with a few experts in place of each feed-forward block.

Source: Jiang et al., "Mixtral of Experts" (2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ca_jax.models.config import ModelConfig
from ca_jax.models.families import llama
from ca_jax.models.families.family import Family, Names

_HF_NAMES: dict[str, str] = {
    **llama.HF_NAMES,
    "mlp.router": "model.layers.{layer}.block_sparse_moe.gate.weight",
    "mlp.w_gate": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
    "mlp.w_up": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
    "mlp.w_down": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
}


def _config_from_hf(described: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(
        architecture="mixtral",
        sliding_window=described.get("sliding_window"),
        num_experts=described["num_local_experts"],
        num_experts_per_token=described["num_experts_per_tok"],
        **llama.sizes_from_hf(described, norm_eps=1e-5, theta=1e6),
    )


def _hf_names(config: ModelConfig) -> Names:
    return _HF_NAMES


FAMILY = Family(
    name="mixtral",
    model_types=("mixtral",),
    architectures=("MixtralForCausalLM",),
    config_from_hf=_config_from_hf,
    hf_names=_hf_names,
    ignored=("rotary_emb.inv_freq",),
)
"""The family."""
