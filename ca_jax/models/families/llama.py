"""Llama and the families that are Llama with small differences: Mistral, Mixtral, Qwen2 and Qwen3.

Of Llama's shape are Llama 1, 2 and 3.x, Yi, SmolLM, SmolLM2 and TinyLlama. Mistral slides a window over every layer.
Mixtral has a few experts in place of each feed-forward block. Qwen2 (and 2.5) has a bias on queries, keys and values,
and slides a window over some layers if asked to. Qwen3, dense, norms each head of queries and keys, and its heads' size
is not that of the residual stream.

Source: Touvron et al., "LLaMA" (2023); Grattafiori et al., "The Llama 3 Herd of Models" (2024); Jiang et al.,
"Mistral 7B" (2023) and "Mixtral of Experts" (2024); Yang et al., "Qwen2 Technical Report" (2024) and "Qwen3 Technical
Report" (2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ca_jax.models.families.family import Family
from ca_jax.models.families.from_gguf import GgufDescription
from ca_jax.models.families.from_hf import sliding_from_hf
from ca_jax.models.families.names import GGUF_NAMES, module_names

LAYER = "model.layers.{layer}."
"""How names of what is in a layer begin in safetensors files."""
HF_NAMES: dict[str, str] = {
    "embed.embedding": "model.embed_tokens.weight",
    **module_names("attn_norm.scale", LAYER + "input_layernorm"),
    **module_names("attn.wq", LAYER + "self_attn.q_proj"),
    **module_names("attn.wk", LAYER + "self_attn.k_proj"),
    **module_names("attn.wv", LAYER + "self_attn.v_proj"),
    **module_names("attn.wo", LAYER + "self_attn.o_proj"),
    **module_names("attn.q_norm.scale", LAYER + "self_attn.q_norm"),
    **module_names("attn.k_norm.scale", LAYER + "self_attn.k_norm"),
    **module_names("mlp_norm.scale", LAYER + "post_attention_layernorm"),
    **module_names("mlp.w_gate", LAYER + "mlp.gate_proj"),
    **module_names("mlp.w_up", LAYER + "mlp.up_proj"),
    **module_names("mlp.w_down", LAYER + "mlp.down_proj"),
    "final_norm.scale": "model.norm.weight",
    "head.kernel": "lm_head.weight",
}
"""Names in safetensors files of what Llama has, and of what most others have beside it."""
_HF_EXPERTS: dict[str, str] = {
    "mlp.router": LAYER + "block_sparse_moe.gate.weight",
    "experts.w_gate": LAYER + "block_sparse_moe.experts.{expert}.w1.weight",
    "experts.w_up": LAYER + "block_sparse_moe.experts.{expert}.w3.weight",
    "experts.w_down": LAYER + "block_sparse_moe.experts.{expert}.w2.weight",
}


def _family(name: str, hf_architecture: str, gguf_architecture: str = "llama", **differences: Any) -> Family:
    """A family by its differences.

    Args:
      name: of it, also what Hugging Face's `model_type` calls it.
      hf_architecture: what Hugging Face's `architectures` calls it.
      gguf_architecture: what GGUF calls it; by Llama's name go all that `_kind` tells apart.
      **differences: further fields of `Family`.
    """
    is_llama = gguf_architecture == "llama"
    hf_names = HF_NAMES | (_HF_EXPERTS if name == "mixtral" else {})
    fields: dict[str, Any] = {
        "hf_required": {"hidden_act": "silu"},
        "is_gguf": lambda entries: not is_llama or _kind(entries) == name,
        # Others slide in some layers only, and their files do not say in which.
        "gguf_required": {} if is_llama else {"attention.sliding_window": 0},
        **differences,
    }
    return Family(
        name=name,
        model_types=(name,),
        architectures=(hf_architecture,),
        hf_names=lambda config: hf_names,
        gguf_architecture=gguf_architecture,
        gguf_names=lambda config: GGUF_NAMES,
        gguf_is_interleaved=is_llama,
        **fields,
    )


def _kind(entries: Mapping[str, Any]) -> str:
    if entries.get("expert_count"):
        return "mixtral"
    return "mistral" if entries.get("attention.sliding_window") else "llama"


def _mistral_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": described.get("sliding_window")}


def _mistral_from_gguf(described: GgufDescription) -> dict[str, Any]:
    return {"sliding_window": described.entries.get("attention.sliding_window") or None}


def _mixtral_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    experts = {"num_experts": described["num_local_experts"], "num_experts_per_token": described["num_experts_per_tok"]}
    return experts | _mistral_from_hf(described)


def _mixtral_from_gguf(described: GgufDescription) -> dict[str, Any]:
    entries = described.entries
    experts = {"num_experts": entries["expert_count"], "num_experts_per_token": entries["expert_used_count"]}
    return experts | _mistral_from_gguf(described)


def _qwen3_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    has_bias = bool(described.get("attention_bias", False))
    return {"qkv_bias": has_bias, "out_bias": has_bias, **_windows_from_hf(described)}


def _windows_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers slide: those that `layer_types` says, or else those from `max_window_layers` on, if any do."""
    window = described.get("sliding_window", 4096) if described.get("use_sliding_window") else None
    first = described.get("max_window_layers", 28)
    return sliding_from_hf(described, window, lambda layer: layer < first)


FAMILIES = (
    _family(
        "llama",
        "LlamaForCausalLM",
        hf_required={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    ),
    _family(
        "mistral",
        "MistralForCausalLM",
        hf_defaults={"sliding_window": 4096, "num_key_value_heads": 8},
        hf_fields=_mistral_from_hf,
        gguf_fields=_mistral_from_gguf,
    ),
    _family(
        "mixtral",
        "MixtralForCausalLM",
        hf_sizes={"norm_eps": 1e-5, "theta": 1e6},
        hf_fields=_mixtral_from_hf,
        gguf_fields=_mixtral_from_gguf,
    ),
    _family("qwen2", "Qwen2ForCausalLM", "qwen2", fields={"qkv_bias": True}, hf_fields=_windows_from_hf),
    _family(
        "qwen3",
        "Qwen3ForCausalLM",
        "qwen3",
        fields={"qk_norm": True},
        hf_sizes={"head_dim": 128},
        hf_fields=_qwen3_from_hf,
    ),
)
"""The families."""
