"""Llama 1, 2 and 3.x, and what has their shape: Yi, SmolLM, SmolLM2, TinyLlama.

Source: Touvron et al., "LLaMA" (2023); Grattafiori et al., "The Llama 3 Herd of Models" (2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ca_jax.models.config import ModelConfig
from ca_jax.models.families.family import Family, Names, require
from ca_jax.models.families.rope_entries import max_positions_from_hf, rope_from_hf

HF_NAMES: dict[str, str] = {
    "embed.embedding": "model.embed_tokens.weight",
    "attn_norm.scale": "model.layers.{layer}.input_layernorm.weight",
    "attn.wq": "model.layers.{layer}.self_attn.q_proj.weight",
    "attn.wk": "model.layers.{layer}.self_attn.k_proj.weight",
    "attn.wv": "model.layers.{layer}.self_attn.v_proj.weight",
    "attn.wo": "model.layers.{layer}.self_attn.o_proj.weight",
    "mlp_norm.scale": "model.layers.{layer}.post_attention_layernorm.weight",
    "mlp.w_gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "mlp.w_up": "model.layers.{layer}.mlp.up_proj.weight",
    "mlp.w_down": "model.layers.{layer}.mlp.down_proj.weight",
    "final_norm.scale": "model.norm.weight",
    "head.kernel": "lm_head.weight",
}
"""Names in safetensors files, which families after it took over."""

GGUF_NAMES: dict[str, str] = {
    "embed.embedding": "token_embd.weight",
    "attn_norm.scale": "blk.{layer}.attn_norm.weight",
    "attn.wq": "blk.{layer}.attn_q.weight",
    "attn.wk": "blk.{layer}.attn_k.weight",
    "attn.wv": "blk.{layer}.attn_v.weight",
    "attn.wo": "blk.{layer}.attn_output.weight",
    "mlp_norm.scale": "blk.{layer}.ffn_norm.weight",
    "mlp.w_gate": "blk.{layer}.ffn_gate.weight",
    "mlp.w_up": "blk.{layer}.ffn_up.weight",
    "mlp.w_down": "blk.{layer}.ffn_down.weight",
    "final_norm.scale": "output_norm.weight",
    "head.kernel": "output.weight",
}
"""Names in GGUF files, which all families share as far as they have the parts."""


def sizes_from_hf(described: Mapping[str, Any], *, norm_eps: float = 1e-6, theta: float = 10000.0) -> dict[str, Any]:
    """The fields of `ModelConfig` that Llama and the families after it spell alike in a config.json.

    Args:
      described: its contents.
      norm_eps: the family's, where nothing is said.
      theta: the base of its rotary frequencies, where nothing is said.

    Raises:
      KeyError, TypeError, ValueError, UnsupportedArchitectureError: as for `Family.config_from_hf`.
    """
    require(described, {"hidden_act": "silu"})
    embed_dim, num_heads = described["hidden_size"], described["num_attention_heads"]
    head_dim = described.get("head_dim") or embed_dim // num_heads
    rope = rope_from_hf(described, head_dim=head_dim, theta=theta)
    return {
        "vocab_size": described["vocab_size"],
        "embed_dim": embed_dim,
        "mlp_dim": described["intermediate_size"],
        "num_layers": described["num_hidden_layers"],
        "num_heads": num_heads,
        "num_kv_heads": described.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "max_positions": max_positions_from_hf(described, rope),
        "norm_eps": described.get("rms_norm_eps", norm_eps),
        "tie_embeddings": described.get("tie_word_embeddings", False),
        "rope": rope,
    }


def _config_from_hf(described: Mapping[str, Any]) -> ModelConfig:
    require(described, {"attention_bias": False, "mlp_bias": False})
    return ModelConfig(architecture="llama", **sizes_from_hf(described))


def _hf_names(config: ModelConfig) -> Names:
    return HF_NAMES


def _gguf_names(config: ModelConfig) -> Names:
    return GGUF_NAMES


FAMILY = Family(
    name="llama",
    model_types=("llama",),
    architectures=("LlamaForCausalLM",),
    config_from_hf=_config_from_hf,
    hf_names=_hf_names,
    ignored=("rotary_emb.inv_freq",),
    gguf_architectures=("llama",),
    gguf_names=_gguf_names,
)
"""The family."""
