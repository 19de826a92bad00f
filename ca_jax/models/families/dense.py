"""Families with one feed-forward block a layer that differ from Llama in what their config says.

SmolLM3 rotates nothing in every fourth layer. Granite multiplies embeddings, scores, logits and what is added to the
residual stream. Ministral 3 stretches its context by YaRN and makes queries larger the further on they are. OLMo 2 and
3 have norms behind attention and feed-forward alone, and one over all heads of queries and of keys; of OLMo 3 three
layers of four slide. Command (Cohere 2) has attention and feed-forward beside each other, a LayerNorm without a bias,
and rotates in layers that slide alone, pairs of numbers that lie side by side. GLM-4 rotates such pairs too, in half of
each head, has norms before and behind, and the feed-forward block's two first matrices in one.

Source: Hugging Face, "SmolLM3" (2025); IBM, "Granite 3.0 Language Models" (2024); Mistral AI, "Ministral 3" (2025);
OLMo Team, "2 OLMo 2 Furious" (2024) and "Olmo 3" (2025); Cohere, "Command A" (2025); GLM Team, "ChatGLM" (2024).
Config entries and names of tensors are those of `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ca_jax.models.config import ModelConfig, RopeConfig
from ca_jax.models.families.family import Family
from ca_jax.models.families.from_gguf import GgufDescription, full_layers_from_gguf, rope_from_gguf, shortest
from ca_jax.models.families.from_hf import rope_from_hf, sliding_from_hf
from ca_jax.models.families.llama import HF_NAMES, LAYER
from ca_jax.models.families.names import GGUF_NAMES, Fused, Names, half_split_rows, module_names, wide_mlp

_NAMES_BEHIND = {
    "attn_post_norm.scale": LAYER + "post_attention_layernorm.weight",
    "mlp_post_norm.scale": LAYER + "post_feedforward_layernorm.weight",
}


def biases_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    """Of all of attention's matrices, and of all of the feed-forward block's."""
    has_bias = bool(described.get("attention_bias", False))
    return {"qkv_bias": has_bias, "out_bias": has_bias, "mlp_bias": bool(described.get("mlp_bias", False))}


def _biases_from_gguf(described: GgufDescription) -> dict[str, Any]:
    parts = {"qkv_bias": "attn_q", "out_bias": "attn_output", "mlp_bias": "ffn_up"}
    return {key: f"blk.0.{name}.bias" in described.shapes for key, name in parts.items()}


def _smollm3_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, interval = described["num_hidden_layers"], described.get("no_rope_layer_interval", 4)
    rotates = described.get("no_rope_layers") or [(i + 1) % interval for i in range(num_layers)]
    nope = tuple(i for i, each in enumerate(rotates[:num_layers]) if not each)
    window = described.get("sliding_window") if described.get("use_sliding_window") else None
    slides = sliding_from_hf(described, window, lambda layer: layer not in nope)
    return {"nope_layers": nope, **slides, **biases_from_hf(described)}


def _smollm3_from_gguf(described: GgufDescription) -> dict[str, Any]:
    """Files do not say which layers rotate nothing: every fourth, as in the release."""
    nope = tuple(range(3, described.entries["block_count"], 4))
    return {"nope_layers": nope, **_biases_from_gguf(described)}


def granite_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    """Granite's multipliers, and which of its matrices have biases."""
    return {
        "embed_scale": float(described.get("embedding_multiplier", 1.0)),
        "residual_scale": float(described.get("residual_multiplier", 1.0)),
        "attention_scale": float(described.get("attention_multiplier", 1.0)),
        "logit_scale": 1 / described.get("logits_scaling", 1.0),
        **biases_from_hf(described),
    }


def granite_from_gguf(described: GgufDescription) -> dict[str, Any]:
    """The same from a GGUF file."""
    entries = described.entries
    scale = entries.get("attention.scale")
    return {
        "embed_scale": shortest(entries.get("embedding_scale") or 1.0),
        "residual_scale": shortest(entries.get("residual_scale") or 1.0),
        "attention_scale": shortest(scale) if scale else None,
        "logit_scale": 1 / shortest(entries["logit_scale"]),
        **_biases_from_gguf(described),
    }


def _ministral3_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    parameters = described.get("rope_parameters") or described.get("rope_scaling") or {}
    beta = parameters.get("llama_4_scaling_beta") or 0.0
    span = {"query_span": parameters["original_max_position_embeddings"]} if beta else {}
    return {"sliding_window": described.get("sliding_window"), "query_beta": float(beta), **span}


def _ministral3_from_gguf(described: GgufDescription) -> dict[str, Any]:
    entries = described.entries
    beta = shortest(entries.get("attention.temperature_scale", 0.0))
    span = {"query_span": entries["rope.scaling.original_context_length"]} if beta else {}
    return {"query_beta": beta, **span}


def _olmo3_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    """Layers that slide are not stretched: older files say so by having one scaling, newer ones by two entries."""
    head_dim = described.get("head_dim") or described["hidden_size"] // described["num_attention_heads"]
    nested = described.get("rope_parameters") or {}
    plain = {**described, "rope_scaling": None}
    if "rope_type" in nested:
        nested = {"full_attention": nested, "sliding_attention": {"rope_theta": nested.get("rope_theta", 500000.0)}}
    full = {**described, "rope_parameters": nested.get("full_attention")}
    local = {**plain, "rope_parameters": nested.get("sliding_attention")}
    ropes = [rope_from_hf(each, head_dim=head_dim, theta=500000.0)["rope"] for each in (full, local)]
    return {
        **sliding_from_hf(described, described.get("sliding_window", 4096), lambda layer: layer % 4 == 3),
        "rope": ropes[0],
        "local_rope": None if ropes[0] == ropes[1] else ropes[1],
        **biases_from_hf(described),
    }


def _olmo3_from_gguf(described: GgufDescription) -> dict[str, Any]:
    entries = described.entries
    head_dim = entries["embedding_length"] // entries["attention.head_count"]
    full = rope_from_gguf(described, head_dim)
    local = RopeConfig(theta=shortest(entries.get("rope.freq_base_swa", full.theta)))
    return {
        "sliding_window": entries["attention.sliding_window"],
        "full_layers": full_layers_from_gguf(entries, period=4),
        "local_rope": None if local == full else local,
    }


def _cohere2_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, pattern = described["num_hidden_layers"], described.get("sliding_window_pattern", 4)
    window = described.get("sliding_window") or 4096
    slides = sliding_from_hf(described, window, lambda layer: (layer + 1) % pattern == 0)
    full = slides.get("full_layers", tuple(range(num_layers)))
    return {
        **slides,
        "nope_layers": full,
        "logit_scale": float(described.get("logit_scale", 0.0625)),
        **biases_from_hf(described),
    }


def _cohere2_from_gguf(described: GgufDescription) -> dict[str, Any]:
    """Files do not say which layers slide and rotate: all but every fourth, as in the releases."""
    entries = described.entries
    full = tuple(full_layers_from_gguf(entries, period=4))
    return {
        "sliding_window": entries["attention.sliding_window"],
        "full_layers": full,
        "nope_layers": full,
        "logit_scale": shortest(entries["logit_scale"]),
    }


def _interleaved_names(config: ModelConfig) -> Names:
    """Names in safetensors files whose rows of queries and keys are in interleaved order."""
    names: dict[str, str | Fused] = dict(HF_NAMES)
    for part, num_heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
        rows = half_split_rows(num_heads, config.head_dim, config.rope.rotary_dim)
        for key, name in module_names(f"attn.w{part}", f"{LAYER}self_attn.{part}_proj").items():
            names[key] = Fused(name, len(rows), rows)
    return names


def _glm4_names(config: ModelConfig) -> Names:
    return {
        **_interleaved_names(config),
        **wide_mlp(config, LAYER + "mlp.gate_up_proj.weight"),
        "attn_post_norm.scale": LAYER + "post_self_attn_layernorm.weight",
        "mlp_post_norm.scale": LAYER + "post_mlp_layernorm.weight",
    }


def _family(name: str, architecture: str, **differences: Any) -> Family:
    fields: dict[str, Any] = {
        "hf_required": {"hidden_act": "silu"},
        "hf_names": lambda config: HF_NAMES,
        "gguf_names": lambda config: GGUF_NAMES,
        "gguf_is_interleaved": True,  # But for OLMo.
    }
    return Family(name=name, model_types=(name,), architectures=(architecture,), **{**fields, **differences})


_OLMO: dict[str, Any] = {
    "fields": {"norms_before": False, "norms_behind": True, "qk_norm": True, "qk_norm_is_whole": True},
    "hf_names": lambda config: HF_NAMES | _NAMES_BEHIND,
    "gguf_architecture": "olmo2",
    "gguf_is_interleaved": False,
}
FAMILIES = (
    _family(
        "smollm3",
        "SmolLM3ForCausalLM",
        hf_sizes={"theta": 2e6, "ties": True},
        hf_fields=_smollm3_from_hf,
        gguf_architecture="smollm3",
        gguf_fields=_smollm3_from_gguf,
    ),
    _family(
        "granite",
        "GraniteForCausalLM",
        hf_fields=granite_from_hf,
        gguf_architecture="granite",
        gguf_required={"rope.scaling.finetuned": True},  # Else it rotates nothing.
        gguf_fields=granite_from_gguf,
    ),
    _family(
        "ministral3",
        "Ministral3ForCausalLM",
        hf_sizes={"norm_eps": 1e-5, "head_dim": 128},
        hf_fields=_ministral3_from_hf,
        gguf_architecture="mistral3",
        gguf_fields=_ministral3_from_gguf,
    ),
    _family(
        "olmo2",
        "Olmo2ForCausalLM",
        hf_sizes={"norm_eps": 1e-5},
        hf_fields=biases_from_hf,
        is_gguf=lambda entries: not entries.get("attention.sliding_window"),
        **_OLMO,
    ),
    _family(
        "olmo3",
        "Olmo3ForCausalLM",
        hf_sizes={"norm_eps": 1e-5, "theta": 5e5},
        hf_fields=_olmo3_from_hf,
        gguf_fields=_olmo3_from_gguf,
        is_gguf=lambda entries: bool(entries.get("attention.sliding_window")),
        **_OLMO,
    ),
    _family(
        "cohere2",
        "Cohere2ForCausalLM",
        fields={"norm": "layer", "norm_bias": False, "is_parallel": True, "shares_norm": True},
        hf_names=_interleaved_names,
        hf_sizes={"eps_key": "layer_norm_eps", "norm_eps": 1e-5, "ties": True},
        hf_fields=_cohere2_from_hf,
        gguf_architecture="cohere2",
        gguf_sizes={"eps_key": "layer_norm_epsilon"},
        gguf_fields=_cohere2_from_gguf,
    ),
    _family(
        "glm4",
        "Glm4ForCausalLM",
        fields={"norms_behind": True},
        hf_names=_glm4_names,
        hf_sizes={"norm_eps": 1.5625e-7, "head_dim": 128, "partial": 0.5},
        hf_fields=lambda described: {"qkv_bias": bool(described.get("attention_bias", True))},
        gguf_architecture="glm4",
        gguf_names=lambda config: GGUF_NAMES | wide_mlp(config, "blk.{layer}.ffn_up.weight"),
        gguf_sizes={"may_rotate_part": True},
        gguf_fields=_biases_from_gguf,
    ),
)
"""The families."""
