"""Families most of whose layers keep a state in place of keys and values: LFM2, Qwen3-Next, Qwen3.5.

LFM2 convolves the last few inputs between two gates. Qwen3-Next and Qwen3.5 have gated delta rules in three layers of
four, attention whose output is gated in the fourth, and rotate a quarter of each head; Qwen3-Next has experts beside a
block that all tokens go through.

Source: Liquid AI, "LFM2" (2025); Qwen Team, "Qwen3-Next" (2025) and "Qwen3.5" (2026); Yang et al., "Gated Delta
Networks" (2024). Config entries and names of tensors are those of `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ca_jax.errors import UnsupportedArchitectureError, check
from ca_jax.models.config import ModelConfig
from ca_jax.models.families.experts import NAMES, qwen_from_hf
from ca_jax.models.families.family import Family
from ca_jax.models.families.llama import HF_NAMES, LAYER
from ca_jax.models.families.names import Fused, Names, module_names
from ca_jax.models.recurrence import RecurrenceConfig

# LFM2.

_CONV = LAYER + "conv."
_LFM2_NAMES = {
    **HF_NAMES,
    "attn_norm.scale": LAYER + "operator_norm.weight",
    "attn.wo": LAYER + "self_attn.out_proj.weight",
    "attn.q_norm.scale": LAYER + "self_attn.q_layernorm.weight",
    "attn.k_norm.scale": LAYER + "self_attn.k_layernorm.weight",
    "mlp_norm.scale": LAYER + "ffn_norm.weight",
    "mlp.w_gate": LAYER + "feed_forward.w1.weight",
    "mlp.w_up": LAYER + "feed_forward.w3.weight",
    "mlp.w_down": LAYER + "feed_forward.w2.weight",
    "final_norm.scale": "model.embedding_norm.weight",
    **module_names("mixer.w_in", _CONV + "in_proj"),
    **module_names("mixer.w_out", _CONV + "out_proj"),
    "mixer.kernel": _CONV + "conv.weight",
    "mixer.b_kernel": _CONV + "conv.bias",
}


def _layers_from_hf(described: Mapping[str, Any], recurrent: str, full: list[int]) -> tuple[int, ...]:
    """The layers that keep a state.

    Args:
      described: the contents of a config.json.
      recurrent: what its `layer_types` calls them.
      full: those that do not, where `layer_types` is not there to say so.

    Raises:
      ValueError: `layer_types` is not of the model's layers.
      UnsupportedArchitectureError: a type of layer that is not served.
    """
    num_layers = described["num_hidden_layers"]
    types = described.get("layer_types") or ["full_attention" if i in full else recurrent for i in range(num_layers)]
    check(len(types) == num_layers, "layer_types", f"as many as the {num_layers} layers", len(types))
    if unknown := sorted({*types} - {recurrent, "full_attention"}):
        raise UnsupportedArchitectureError(
            f"config.json: layer_types {', '.join(unknown)} not served; they must be {recurrent} or full_attention"
        )
    return tuple(i for i, each in enumerate(types) if each == recurrent)


def _lfm2_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    width = described.get("block_ff_dim") or described["intermediate_size"]
    if described.get("block_auto_adjust_ff_dim", True):
        factor, of = described.get("block_ffn_dim_multiplier", 1.0), described.get("block_multiple_of", 256)
        width = int(2 * width / 3)
        width = width if factor is None else -(-int(factor * width) // of) * of
    full = described.get("full_attn_idxs")
    layers = _layers_from_hf(described, "conv", list(range(described["num_hidden_layers"])) if full is None else full)
    sizes = {"conv_width": described.get("conv_L_cache", 3), "has_bias": bool(described.get("conv_bias", False))}
    recurrence = RecurrenceConfig(kind="short_conv", layers=layers, **sizes) if layers else None
    ties = described.get("tie_embedding", described.get("tie_word_embeddings", True))
    return {"mlp_dim": width, "tie_embeddings": ties, "recurrence": recurrence}


# Qwen3-Next and Qwen3.5.

_DELTA = LAYER + "linear_attn."
_DELTA_NAMES = {
    "mixer.kernel": _DELTA + "conv1d.weight",
    "mixer.a_log": _DELTA + "A_log",
    "mixer.b_step": _DELTA + "dt_bias",
    "mixer.scale": _DELTA + "norm.weight",
    "mixer.w_out": _DELTA + "out_proj.weight",
}


def _delta_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    every, num_layers = described.get("full_attention_interval", 4), described["num_hidden_layers"]
    full = [i for i in range(num_layers) if (i + 1) % every == 0]
    recurrence = RecurrenceConfig(
        kind="gated_delta",
        layers=_layers_from_hf(described, "linear_attention", full),
        conv_width=described.get("linear_conv_kernel_dim", 4),
        num_key_heads=described.get("linear_num_key_heads", 16),
        num_value_heads=described.get("linear_num_value_heads", 32),
        key_dim=described.get("linear_key_head_dim", 128),
        value_dim=described.get("linear_value_head_dim", 128),
    )
    return {"recurrence": recurrence}


def _next_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    shared = described.get("shared_expert_intermediate_size", 512)
    return {**qwen_from_hf(described), **_delta_from_hf(described), "shared_mlp_dim": shared}


def _queries(config: ModelConfig) -> dict[str, Fused]:
    """Queries and gates, which lie head by head in one tensor."""
    heads, size = config.num_heads, config.head_dim
    rows = np.arange(heads * 2 * size).reshape(heads, 2, size)
    name = LAYER + "self_attn.q_proj.weight"
    return {key: Fused(name, rows.size, rows[:, i].reshape(-1)) for i, key in enumerate(("attn.wq", "attn.wg"))}


def _next_names(config: ModelConfig) -> Names:
    """Those of Qwen3-Next: what a key head's queries, keys, values and gates are made by lies together."""
    shared = {f"shared.w_{part}": f"{LAYER}mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")}
    names: dict[str, str | Fused] = {**NAMES, **shared, **_queries(config)}
    names["shared.w_share"] = LAYER + "mlp.shared_expert_gate.weight"
    r = config.recurrence
    if r is None:
        return names
    each = r.num_value_heads // r.num_key_heads
    sizes = [r.key_dim, r.key_dim, each * r.value_dim, each * r.value_dim]
    rows = np.arange(r.num_key_heads * sum(sizes)).reshape(r.num_key_heads, -1)
    q, k, v, z = (part.reshape(-1) for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1))
    both = np.arange(2 * r.num_value_heads).reshape(r.num_key_heads, 2, each)
    wide, small = _DELTA + "in_proj_qkvz.weight", _DELTA + "in_proj_ba.weight"
    return {
        **names,
        **_DELTA_NAMES,
        "mixer.w_qkv": Fused(wide, rows.size, np.concatenate([q, k, v])),
        "mixer.w_z": Fused(wide, rows.size, z),
        "mixer.w_beta": Fused(small, both.size, both[:, 0].reshape(-1)),
        "mixer.w_step": Fused(small, both.size, both[:, 1].reshape(-1)),
    }


_QWEN35_NAMES = {
    **HF_NAMES,
    **_DELTA_NAMES,
    "mixer.w_qkv": _DELTA + "in_proj_qkv.weight",
    "mixer.w_z": _DELTA + "in_proj_z.weight",
    "mixer.w_beta": _DELTA + "in_proj_b.weight",
    "mixer.w_step": _DELTA + "in_proj_a.weight",
}
_QWEN: dict[str, Any] = {
    "fields": {"qk_norm": True, "norm_offset": 1.0, "gates_heads": True},
    "hf_required": {"hidden_act": "silu", "attention_bias": False},
    "drafts_behind": True,
}
_QWEN_SIZES = {"head_dim": 256, "partial": 0.25}

FAMILIES = (
    Family(
        name="lfm2",
        model_types=("lfm2",),
        architectures=("Lfm2ForCausalLM",),
        fields={"qk_norm": True},
        hf_names=lambda config: _LFM2_NAMES,
        hf_sizes={"eps_key": "norm_eps", "norm_eps": 1e-5, "theta": 1e6, "mlp_key": "hidden_size"},
        hf_fields=_lfm2_from_hf,
    ),
    Family(
        name="qwen3_next",
        model_types=("qwen3_next",),
        architectures=("Qwen3NextForCausalLM",),
        hf_defaults={"norm_topk_prob": True},
        hf_names=_next_names,
        hf_sizes={**_QWEN_SIZES, "mlp_key": "moe_intermediate_size"},
        hf_fields=_next_from_hf,
        **{**_QWEN, "fields": {**_QWEN["fields"], "gates_shared": True}},
    ),
    Family(
        name="qwen3_5",
        model_types=("qwen3_5_text",),
        architectures=("Qwen3_5ForCausalLM",),
        hf_names=lambda config: {**_QWEN35_NAMES, **_queries(config)},
        hf_sizes=_QWEN_SIZES,
        hf_fields=_delta_from_hf,
        **_QWEN,
    ),
)
"""The families."""
