"""Mixtral: Mistral with a few experts in place of each feed-forward block.

Source: Jiang et al., "Mixtral of Experts" (2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ca_jax.models.config import ModelConfig
from ca_jax.models.families import llama
from ca_jax.models.families.family import Family, Names
from ca_jax.models.families.gguf_entries import NAMES, GgufDescription, sizes_from_gguf

_HF_NAMES: dict[str, str] = {
    **llama.HF_NAMES,
    "mlp.router": "model.layers.{layer}.block_sparse_moe.gate.weight",
    "mlp.w_gate": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
    "mlp.w_up": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
    "mlp.w_down": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
}

_GGUF_NAMES: dict[str, str] = {
    **NAMES,
    "mlp.router": "blk.{layer}.ffn_gate_inp.weight",
    "mlp.w_gate": "blk.{layer}.ffn_gate_exps.weight[{expert}]",
    "mlp.w_up": "blk.{layer}.ffn_up_exps.weight[{expert}]",
    "mlp.w_down": "blk.{layer}.ffn_down_exps.weight[{expert}]",
}


def _config_from_hf(described: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(
        architecture="mixtral",
        sliding_window=described.get("sliding_window"),
        num_experts=described["num_local_experts"],
        num_experts_per_token=described["num_experts_per_tok"],
        **llama.sizes_from_hf(described, norm_eps=1e-5, theta=1e6),
    )


def _config_from_gguf(described: GgufDescription) -> ModelConfig | None:
    entries = described.entries
    if not entries.get("expert_count"):
        return None
    return ModelConfig(
        architecture="mixtral",
        sliding_window=entries.get("attention.sliding_window") or None,
        num_experts=entries["expert_count"],
        num_experts_per_token=entries["expert_used_count"],
        **sizes_from_gguf(described),
    )


def _hf_names(config: ModelConfig) -> Names:
    return _HF_NAMES


def _gguf_names(config: ModelConfig) -> Names:
    return _GGUF_NAMES


FAMILY = Family(
    name="mixtral",
    model_types=("mixtral",),
    architectures=("MixtralForCausalLM",),
    config_from_hf=_config_from_hf,
    hf_names=_hf_names,
    ignored=("rotary_emb.inv_freq",),
    gguf_architectures=("llama",),
    config_from_gguf=_config_from_gguf,
    gguf_names=_gguf_names,
    gguf_is_interleaved=True,
)
"""The family."""
