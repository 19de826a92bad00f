"""Llama 1, 2 and 3.x, and what has their shape: Yi, SmolLM, SmolLM2, TinyLlama.

Source: Touvron et al., "LLaMA" (2023); Grattafiori et al., "The Llama 3 Herd of Models" (2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ca_jax.models.config import ModelConfig
from ca_jax.models.families.family import Family, Names, require
from ca_jax.models.families.gguf_entries import NAMES, GgufDescription, sizes_from_gguf
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


def _config_from_gguf(described: GgufDescription) -> ModelConfig | None:
    if described.entries.get("expert_count") or described.entries.get("attention.sliding_window"):
        return None
    return ModelConfig(architecture="llama", **sizes_from_gguf(described))


def gguf_names(config: ModelConfig) -> Names:
    """Names in GGUF files of families whose parts are all called as those of others."""
    return NAMES


FAMILY = Family(
    name="llama",
    model_types=("llama",),
    architectures=("LlamaForCausalLM",),
    config_from_hf=_config_from_hf,
    hf_names=_hf_names,
    ignored=("rotary_emb.inv_freq",),
    gguf_architectures=("llama",),
    config_from_gguf=_config_from_gguf,
    gguf_names=gguf_names,
    gguf_is_interleaved=True,
)
"""The family."""
