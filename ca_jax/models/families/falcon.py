"""Falcon: attention and feed-forward beside each other; Falcon-7B with one KV head, Falcon-40B and 180B with a few.

Falcon-RW, whose positions are a bias on the scores (ALiBi), is refused.

Source: Almazrouei et al., "The Falcon Series of Open Language Models" (2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ca_jax.errors import UnsupportedArchitectureError
from ca_jax.models.config import ModelConfig
from ca_jax.models.families.family import Family, Names, fused_rows, gelu_from_hf, rope_from_hf, split_rows
from ca_jax.models.families.gguf_entries import NAMES, GgufDescription, module_names, sizes_from_gguf

_LAYER = "transformer.h.{layer}."


def _config_from_hf(described: Mapping[str, Any]) -> ModelConfig:
    if described.get("alibi"):
        raise UnsupportedArchitectureError(
            "config.json: alibi=True is not served: its positions enter as a bias on the attention scores (ALiBi); "
            "only rotary embedding is served"
        )
    embed_dim, num_heads = described["hidden_size"], described["num_attention_heads"]
    is_new = bool(described.get("new_decoder_architecture", False))
    num_kv_heads = described.get("num_kv_heads") or num_heads
    if not is_new:
        num_kv_heads = 1 if described.get("multi_query", True) else num_heads
    is_parallel = bool(is_new or described.get("parallel_attn", True))
    num_norms = described.get("num_ln_in_parallel_attn") or (2 if is_new else 1)
    has_bias = bool(described.get("bias", False))
    return ModelConfig(
        architecture="falcon",
        vocab_size=described["vocab_size"],
        embed_dim=embed_dim,
        mlp_dim=described.get("ffn_hidden_size") or 4 * embed_dim,
        num_layers=described["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=embed_dim // num_heads,
        norm_eps=described.get("layer_norm_epsilon", 1e-5),
        tie_embeddings=described.get("tie_word_embeddings", True),
        norm="layer",
        mlp=gelu_from_hf(described, "activation"),
        is_parallel=is_parallel,
        shares_norm=is_parallel and num_norms == 1,
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=has_bias,
        **rope_from_hf(described, head_dim=embed_dim // num_heads),
    )


def _config_from_gguf(described: GgufDescription) -> ModelConfig:
    return ModelConfig(
        architecture="falcon",
        norm="layer",
        mlp="gelu",
        is_parallel=True,
        shares_norm="blk.0.attn_norm_2.weight" not in described.shapes,
        **sizes_from_gguf(described, eps_key="layer_norm_epsilon"),
    )


def _hf_names(config: ModelConfig) -> Names:
    """Rows of the fused projection: for each KV head its queries, its key and its value, a head dim of rows each.

    With 4 query heads on 2 KV heads:   q0 q1 k0 v0 q2 q3 k1 v1
    """
    num_kv, groups = config.num_kv_heads, config.num_groups
    rows = np.arange(num_kv * (groups + 2) * config.head_dim).reshape(num_kv, groups + 2, config.head_dim)
    parts = {"q": rows[:, :groups], "k": rows[:, groups], "v": rows[:, groups + 1]}
    fused = _LAYER + "self_attention.query_key_value."
    has_two = config.is_parallel and not config.shares_norm
    return {
        "embed.embedding": "transformer.word_embeddings.weight",
        **module_names("attn_norm.scale", _LAYER + ("ln_attn" if has_two else "input_layernorm")),
        **fused_rows(parts, {"w": fused + "weight", "b": fused + "bias"}),
        **module_names("attn.wo", _LAYER + "self_attention.dense"),
        **module_names("mlp_norm.scale", _LAYER + ("ln_mlp" if has_two else "post_attention_layernorm")),
        **module_names("mlp.w_up", _LAYER + "mlp.dense_h_to_4h"),
        **module_names("mlp.w_down", _LAYER + "mlp.dense_4h_to_h"),
        **module_names("final_norm.scale", "transformer.ln_f"),
        "head.kernel": "lm_head.weight",
    }


def _gguf_names(config: ModelConfig) -> Names:
    names = NAMES | fused_rows(split_rows(config), {"w": "blk.{layer}.attn_qkv.weight"})
    if config.shares_norm:
        return names
    return {  # What is called as in Falcon-7B is not the attention's.
        **names,
        **module_names("attn_norm.scale", "blk.{layer}.attn_norm_2"),
        **module_names("mlp_norm.scale", "blk.{layer}.attn_norm"),
    }


FAMILY = Family(
    name="falcon",
    model_types=("falcon", "RefinedWeb", "RefinedWebModel"),
    architectures=("FalconForCausalLM", "RWForCausalLM"),
    config_from_hf=_config_from_hf,
    hf_names=_hf_names,
    ignored=("rotary_emb.inv_freq", "rotary.inv_freq", "maybe_rotary.inv_freq"),
    gguf_architecture="falcon",
    config_from_gguf=_config_from_gguf,
    gguf_names=_gguf_names,
)
"""The family."""
