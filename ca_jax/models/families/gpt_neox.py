"""GPT-NeoX and Pythia: rotary embedding of a part of each head, biases everywhere, attention beside the feed-forward.

Source: Black et al., "GPT-NeoX-20B" (2022); Biderman et al., "Pythia" (2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ca_jax.models.config import ModelConfig
from ca_jax.models.families.family import Family, Names, fused_rows, gelu_from_hf, rope_from_hf, split_rows
from ca_jax.models.families.gguf_entries import NAMES, GgufDescription, module_names, sizes_from_gguf

_LAYER = "gpt_neox.layers.{layer}."


def _config_from_hf(described: Mapping[str, Any]) -> ModelConfig:
    embed_dim, num_heads = described["hidden_size"], described["num_attention_heads"]
    head_dim, has_bias = embed_dim // num_heads, bool(described.get("attention_bias", True))
    rotated: dict[str, Any] = {"theta_key": "rotary_emb_base", "partial_key": "rotary_pct", "partial": 0.25}
    return ModelConfig(
        architecture="gpt_neox",
        vocab_size=described["vocab_size"],
        embed_dim=embed_dim,
        mlp_dim=described["intermediate_size"],
        num_layers=described["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        norm_eps=described.get("layer_norm_eps", 1e-5),
        tie_embeddings=described.get("tie_word_embeddings", False),
        norm="layer",
        mlp=gelu_from_hf(described, "hidden_act"),
        is_parallel=bool(described.get("use_parallel_residual", True)),
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=True,
        **rope_from_hf(described, head_dim=head_dim, **rotated),
    )


def _config_from_gguf(described: GgufDescription) -> ModelConfig:
    return ModelConfig(
        architecture="gpt_neox",
        norm="layer",
        mlp="gelu",
        is_parallel=described.entries["use_parallel_residual"],
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        **sizes_from_gguf(described, eps_key="layer_norm_epsilon", may_rotate_part=True),
    )


def _hf_names(config: ModelConfig) -> Names:
    # Rows of the fused projection, a head dim of each: q0 k0 v0 q1 k1 v1 ...
    rows = np.arange(3 * config.num_heads * config.head_dim).reshape(config.num_heads, 3, config.head_dim)
    fused = _LAYER + "attention.query_key_value."
    return {
        "embed.embedding": "gpt_neox.embed_in.weight",
        **module_names("attn_norm.scale", _LAYER + "input_layernorm"),
        **fused_rows({part: rows[:, i] for i, part in enumerate("qkv")}, {"w": fused + "weight", "b": fused + "bias"}),
        **module_names("attn.wo", _LAYER + "attention.dense"),
        **module_names("mlp_norm.scale", _LAYER + "post_attention_layernorm"),
        **module_names("mlp.w_up", _LAYER + "mlp.dense_h_to_4h"),
        **module_names("mlp.w_down", _LAYER + "mlp.dense_4h_to_h"),
        **module_names("final_norm.scale", "gpt_neox.final_layer_norm"),
        "head.kernel": "embed_out.weight",
    }


def _gguf_names(config: ModelConfig) -> Names:
    fused = "blk.{layer}.attn_qkv."
    return NAMES | fused_rows(split_rows(config), {"w": fused + "weight", "b": fused + "bias"})


FAMILY = Family(
    name="gpt_neox",
    model_types=("gpt_neox",),
    architectures=("GPTNeoXForCausalLM",),
    config_from_hf=_config_from_hf,
    hf_names=_hf_names,
    ignored=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
    gguf_architecture="gptneox",
    config_from_gguf=_config_from_gguf,
    gguf_names=_gguf_names,
)
"""The family."""
