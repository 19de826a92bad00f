"""Families whose queries, keys and values are rows of one tensor: Falcon, GPT-NeoX with Pythia, Phi-3 and Phi-4.

Falcon has attention and feed-forward beside each other; Falcon-7B one KV head, Falcon-40B and 180B a few. Falcon-RW,
whose positions are a bias on the scores (ALiBi), is refused. GPT-NeoX and Pythia rotate a part of each head, and have
biases everywhere. Phi-3 and 4 are Llama but for that, for parts of heads that are not rotated, and for frequencies that
are those of long contexts or those of short ones (LongRoPE).

Source: Almazrouei et al., "The Falcon Series of Open Language Models" (2023); Black et al., "GPT-NeoX-20B" (2022);
Biderman et al., "Pythia" (2023); Abdin et al., "Phi-3 Technical Report" (2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from ca_jax.errors import UnsupportedArchitectureError
from ca_jax.models.config import ModelConfig
from ca_jax.models.families.family import Family
from ca_jax.models.families.from_gguf import GgufDescription
from ca_jax.models.families.from_hf import gelu_from_hf
from ca_jax.models.families.llama import HF_NAMES, LAYER
from ca_jax.models.families.names import GGUF_NAMES, Names, fused_rows, module_names, split_rows, wide_mlp


def _hf_names(
    config: ModelConfig, stem: str, attention: str, outer: Mapping[str, str], norms: tuple[str, str]
) -> Names:
    """Names of a layer's modules below `stem`, of those outside the layers, and the rows of the fused projection.

    These are for each KV head its queries, its key and its value, a head dim of rows each; with 4 query heads on 2 KV
    heads:   q0 q1 k0 v0 q2 q3 k1 v1
    """
    num_kv, groups = config.num_kv_heads, config.num_groups
    each = np.arange(num_kv * (groups + 2) * config.head_dim).reshape(num_kv, groups + 2, config.head_dim)
    rows = {"q": each[:, :groups], "k": each[:, groups], "v": each[:, groups + 1]}
    layer = stem + ".{layer}."
    fused = f"{layer}{attention}.query_key_value."
    return {
        "embed.embedding": outer["embed"] + ".weight",
        **module_names("attn_norm.scale", layer + norms[0]),
        **fused_rows(rows, {"w": fused + "weight", "b": fused + "bias"}),
        **module_names("attn.wo", f"{layer}{attention}.dense"),
        **module_names("mlp_norm.scale", layer + norms[1]),
        **module_names("mlp.w_up", layer + "mlp.dense_h_to_4h"),
        **module_names("mlp.w_down", layer + "mlp.dense_4h_to_h"),
        **module_names("final_norm.scale", outer["norm"]),
        "head.kernel": outer["head"] + ".weight",
    }


def _falcon_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    if described.get("alibi"):
        raise UnsupportedArchitectureError(
            "config.json: alibi=True is not served: its positions enter as a bias on the attention scores (ALiBi); "
            "only rotary embedding is served"
        )
    is_new = bool(described.get("new_decoder_architecture", False))
    num_kv_heads = described.get("num_kv_heads") or described["num_attention_heads"]
    if not is_new:
        num_kv_heads = 1 if described.get("multi_query", True) else described["num_attention_heads"]
    is_parallel = bool(is_new or described.get("parallel_attn", True))
    num_norms = described.get("num_ln_in_parallel_attn") or (2 if is_new else 1)
    own_mlp_dim = {"mlp_dim": described["ffn_hidden_size"]} if described.get("ffn_hidden_size") else {}
    return {
        "num_kv_heads": num_kv_heads,
        "mlp": gelu_from_hf(described, "activation"),
        "is_parallel": is_parallel,
        "shares_norm": is_parallel and num_norms == 1,
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), bool(described.get("bias", False))),
        **own_mlp_dim,
    }


def _falcon_from_gguf(described: GgufDescription) -> dict[str, Any]:
    return {"mlp": "gelu", "is_parallel": True, "shares_norm": "blk.0.attn_norm_2.weight" not in described.shapes}


def _falcon_hf_names(config: ModelConfig) -> Names:
    has_two = config.is_parallel and not config.shares_norm
    norms = ("ln_attn", "ln_mlp") if has_two else ("input_layernorm", "post_attention_layernorm")
    outer = {"embed": "transformer.word_embeddings", "norm": "transformer.ln_f", "head": "lm_head"}
    return _hf_names(config, "transformer.h", "self_attention", outer, norms)


def _falcon_gguf_names(config: ModelConfig) -> Names:
    names = GGUF_NAMES | fused_rows(split_rows(config), {"w": "blk.{layer}.attn_qkv.weight"})
    if config.shares_norm:
        return names
    return {  # What is called as in Falcon-7B is not the attention's.
        **names,
        **module_names("attn_norm.scale", "blk.{layer}.attn_norm_2"),
        **module_names("mlp_norm.scale", "blk.{layer}.attn_norm"),
    }


def _neox_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "mlp": gelu_from_hf(described, "hidden_act"),
        "is_parallel": bool(described.get("use_parallel_residual", True)),
        **dict.fromkeys(("qkv_bias", "out_bias"), bool(described.get("attention_bias", True))),
    }


def _neox_from_gguf(described: GgufDescription) -> dict[str, Any]:
    is_parallel = described.entries["use_parallel_residual"]
    return {"mlp": "gelu", "is_parallel": is_parallel, "qkv_bias": True, "out_bias": True}


def _neox_hf_names(config: ModelConfig) -> Names:
    outer = {"embed": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"}
    return _hf_names(config, "gpt_neox.layers", "attention", outer, ("input_layernorm", "post_attention_layernorm"))


def _neox_gguf_names(config: ModelConfig) -> Names:
    fused = "blk.{layer}.attn_qkv."
    return GGUF_NAMES | fused_rows(split_rows(config), {"w": fused + "weight", "b": fused + "bias"})


def _phi3_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": described.get("sliding_window")}


def _phi3_from_gguf(described: GgufDescription) -> dict[str, Any]:
    return {"sliding_window": described.entries.get("attention.sliding_window") or None}


def _phi3_names(config: ModelConfig, others: Names, qkv: str, gate_up: str) -> Names:
    """Names of what is fused, and others."""
    return {**others, **fused_rows(split_rows(config), {"w": qkv}), **wide_mlp(config, gate_up)}


_GGUF_SIZES = {"eps_key": "layer_norm_epsilon"}

FAMILIES = (
    Family(
        name="falcon",
        model_types=("falcon", "RefinedWeb", "RefinedWebModel"),
        architectures=("FalconForCausalLM", "RWForCausalLM"),
        fields={"norm": "layer"},
        hf_names=_falcon_hf_names,
        ignored=("rotary_emb.inv_freq", "rotary.inv_freq", "maybe_rotary.inv_freq"),
        hf_sizes={"mlp_key": None, "eps_key": "layer_norm_epsilon", "norm_eps": 1e-5, "ties": True},
        hf_fields=_falcon_from_hf,
        gguf_architecture="falcon",
        gguf_names=_falcon_gguf_names,
        gguf_sizes=_GGUF_SIZES,
        gguf_fields=_falcon_from_gguf,
    ),
    Family(
        name="gpt_neox",
        model_types=("gpt_neox",),
        architectures=("GPTNeoXForCausalLM",),
        fields={"norm": "layer", "mlp_bias": True},
        hf_names=_neox_hf_names,
        ignored=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
        hf_sizes={
            **{"eps_key": "layer_norm_eps", "norm_eps": 1e-5},
            **{"theta_key": "rotary_emb_base", "partial_key": "rotary_pct", "partial": 0.25},
        },
        hf_fields=_neox_from_hf,
        gguf_architecture="gptneox",
        gguf_names=_neox_gguf_names,
        gguf_sizes={**_GGUF_SIZES, "may_rotate_part": True},
        gguf_fields=_neox_from_gguf,
    ),
    Family(
        name="phi3",
        model_types=("phi3",),
        architectures=("Phi3ForCausalLM",),
        hf_required={"hidden_act": "silu"},
        hf_names=partial(
            _phi3_names,
            others=HF_NAMES,
            qkv=LAYER + "self_attn.qkv_proj.weight",
            gate_up=LAYER + "mlp.gate_up_proj.weight",
        ),
        hf_sizes={"norm_eps": 1e-5},
        hf_fields=_phi3_from_hf,
        gguf_architecture="phi3",
        gguf_names=partial(
            _phi3_names,
            others=GGUF_NAMES,
            qkv="blk.{layer}.attn_qkv.weight",
            gate_up="blk.{layer}.ffn_up.weight",
        ),
        gguf_sizes={"may_rotate_part": True},
        gguf_fields=_phi3_from_gguf,
    ),
)
"""The families."""
