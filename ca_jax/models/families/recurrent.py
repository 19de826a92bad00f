"""Families most of whose layers keep a state in place of keys and values: LFM2, Qwen3-Next, Qwen3.5, Granite 4,
Kimi Linear.

LFM2 convolves the last few inputs between two gates. Qwen3-Next and Qwen3.5 have gated delta rules in three layers of
four, attention whose output is gated in the fourth, and rotate a quarter of each head; Qwen3-Next has experts beside a
block that all tokens go through, and so have some of Qwen3.5. Granite 4 has state spaces (Mamba-2) and a few layers of
attention, which in most of its models rotates nothing; its smallest models have attention alone. Kimi Linear
has delta rules in which each number forgets by itself, and every fourth layer latents that no position turns.

Source: Liquid AI, "LFM2" (2025); Qwen Team, "Qwen3-Next" (2025) and "Qwen3.5" (2026); Yang et al., "Gated Delta
Networks" (2024); IBM, "Granite 4.0" (2025); Kimi Team, "Kimi
Linear" (2025). Config entries and names of tensors are those of `transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ca_jax.errors import UnsupportedArchitectureError, check
from ca_jax.models.config import ModelConfig, RopeConfig
from ca_jax.models.families.deepseek import latent_from_hf, latent_names
from ca_jax.models.families.dense import granite_from_hf
from ca_jax.models.families.experts import NAMES, qwen_from_hf
from ca_jax.models.families.family import Family
from ca_jax.models.families.llama import HF_NAMES, LAYER
from ca_jax.models.families.names import Fused, Names, module_names, parts_of
from ca_jax.models.families.recurrent_gguf import (
    LFM2_NAMES,
    betas_and_steps,
    delta_experts_from_gguf,
    delta_from_gguf,
    granite4_from_gguf,
    granite_names,
    in_parts,
    kimi_from_gguf,
    kimi_names,
    lfm2_from_gguf,
    queries_and_gates,
    qwen3_next_names,
    qwen35_names,
)
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


_QUERIES = LAYER + "self_attn.q_proj.weight"
_EXPERT_NAMES = {
    **NAMES,
    **{f"shared.w_{part}": f"{LAYER}mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")},
    "shared.w_share": LAYER + "mlp.shared_expert_gate.weight",
}


def _next_names(config: ModelConfig) -> Names:
    """Those of Qwen3-Next: what a key head's queries, keys, values and gates are made by lies together."""
    names: dict[str, str | Fused] = {**_EXPERT_NAMES, **queries_and_gates(config, _QUERIES)}
    r = config.recurrence
    if r is None:
        return names
    each = r.num_value_heads // r.num_key_heads
    sizes = [r.key_dim, r.key_dim, each * r.value_dim, each * r.value_dim]
    rows = np.arange(r.num_key_heads * sum(sizes)).reshape(r.num_key_heads, -1)
    q, k, v, z = (part.reshape(-1) for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1))
    wide = _DELTA + "in_proj_qkvz.weight"
    return {
        **names,
        **_DELTA_NAMES,
        "mixer.w_qkv": Fused(wide, rows.size, np.concatenate([q, k, v])),
        "mixer.w_z": Fused(wide, rows.size, z),
        **betas_and_steps(r, _DELTA + "in_proj_ba.weight"),
    }


_QWEN35_NAMES = {
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
_GGUF_EXPERT_SIZES = {"may_rotate_part": True, "mlp_key": "expert_feed_forward_length"}

# Granite 4.

_GRANITE_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}  # As files before transformers 5 say it.
_SPACE = LAYER + "mamba."
_SPACE_NAMES = {
    **{key: name.replace(_DELTA, _SPACE) for key, name in _DELTA_NAMES.items()},
    "mixer.b_kernel": _SPACE + "conv1d.bias",
    "mixer.skip": _SPACE + "D",
}


_UNLIMITED = (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])


def _granite_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    if (limit := described.get("time_step_limit")) not in _UNLIMITED:
        raise UnsupportedArchitectureError(
            f"config.json: time_step_limit={limit!r} is not served; it must be {_UNLIMITED[1]!r}"
        )
    num_layers, num_experts = described["num_hidden_layers"], described.get("num_local_experts", 8)
    types = [_GRANITE_TYPES.get(each, each) for each in described.get("layer_types") or ()]
    layers = _layers_from_hf({**described, "layer_types": types}, "linear_attention", [])
    heads, embed_dim = described.get("mamba_n_heads", 128), described["hidden_size"]
    sizes = {
        "conv_width": described.get("mamba_d_conv", 4),
        "has_bias": bool(described.get("mamba_conv_bias", True)),
        "num_key_heads": described.get("mamba_n_groups", 1),
        "num_value_heads": heads,
        "key_dim": described.get("mamba_d_state", 256),
        "value_dim": described.get("mamba_expand", 2) * embed_dim // heads,
    }
    shared = described.get("shared_intermediate_size", 1024)
    experts = {
        "num_experts": num_experts,
        "num_experts_per_token": described.get("num_experts_per_tok", 2),
        "shared_mlp_dim": shared,
    }
    rotates = described.get("position_embedding_type") == "rope"
    return {
        **granite_from_hf(described),
        "mlp_bias": False,
        **(experts if num_experts else {"mlp_dim": shared}),
        "nope_layers": () if rotates else tuple(i for i in range(num_layers) if i not in layers),
        "recurrence": RecurrenceConfig(kind="state_space", layers=layers, **sizes) if layers else None,
    }


def _granite_names(config: ModelConfig) -> Names:
    width = config.shared_mlp_dim or config.mlp_dim
    beside = "shared" if config.num_experts else "mlp"
    names: dict[str, str | Fused] = {
        **HF_NAMES,
        **_SPACE_NAMES,
        **_halves(f"{beside}.w", LAYER + "shared_mlp.input_linear.weight", width),
        f"{beside}.w_down": LAYER + "shared_mlp.output_linear.weight",
    }
    if config.num_experts:
        names |= {
            "mlp.router": LAYER + "block_sparse_moe.router.layer.weight",
            **_halves("experts.w", LAYER + "block_sparse_moe.input_linear.weight[{expert}]", config.mlp_dim),
            "experts.w_down": LAYER + "block_sparse_moe.output_linear.weight[{expert}]",
        }
    return names | in_parts(config, _SPACE + "in_proj.weight")


def _halves(key: str, name: str, width: int) -> dict[str, Fused]:
    """Gates, and behind them what they gate, in one tensor."""
    return parts_of(name, {f"{key}_gate": width, f"{key}_up": width})


# Kimi Linear.

_KIMI = LAYER + "block_sparse_moe."
_KIMI_ALIASES = {
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob",
}
_KDA = LAYER + "self_attn."
_KDA_NAMES = {
    **{f"mixer.w_{part}": f"{_KDA}{part}_proj.weight" for part in "qkv"},
    **{f"mixer.kernel_{part}": f"{_KDA}{part}_conv1d.weight" for part in "qkv"},
    "mixer.w_beta": _KDA + "b_proj.weight",
    **{f"mixer.w_decay_{part}": f"{_KDA}f_{part}_proj.weight" for part in "ab"},
    **{f"mixer.w_gate_{part}": f"{_KDA}g_{part}_proj.weight" for part in "ab"},
    "mixer.a_log": _KDA + "A_log",
    "mixer.b_step": _KDA + "dt_bias",
    "mixer.scale": _KDA + "o_norm.weight",
    "mixer.w_out": _KDA + "o_proj.weight",
    "mlp.router": _KIMI + "gate.weight",
    "mlp.choice_bias": _KIMI + "gate.e_score_correction_bias",
    **{
        f"experts.w_{part}": f"{_KIMI}experts.{{expert}}.w{i}.weight"
        for part, i in (("gate", 1), ("up", 3), ("down", 2))
    },
    **{f"shared.w_{part}": f"{_KIMI}shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")},
}


def _kimi_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    """Layers are counted from 1 in `linear_attn_config`."""
    named = {**described, **{to: described[name] for name, to in _KIMI_ALIASES.items() if name in described}}
    linear, num_layers = described.get("linear_attn_config") or {}, described["num_hidden_layers"]
    full = linear.get("full_attn_layers")
    layers = _layers_from_hf(
        described,
        "linear_attention",
        [i for i in range(num_layers) if i and i % 4 == 0] if full is None else [i - 1 for i in full],
    )
    heads = linear.get("num_heads", described.get("linear_num_heads", 32))
    size = linear.get("head_dim", described.get("linear_head_dim", 128))
    recurrence = RecurrenceConfig(
        kind="channel_delta",
        layers=layers,
        conv_width=linear.get("short_conv_kernel_size", described.get("linear_conv_kernel_dim", 4)),
        **dict.fromkeys(("num_key_heads", "num_value_heads"), heads),
        **dict.fromkeys(("key_dim", "value_dim"), size),
    )
    own = latent_from_hf({**named, "rope_parameters": None, "rope_scaling": None}, 1)
    rotary = described["qk_rope_head_dim"]
    if types := described.get("mlp_layer_types"):
        own["dense_layers"] = tuple(i for i, each in enumerate(types) if each == "dense")
    return {
        **own,
        "rope": RopeConfig(scaling="proportional", num_turning=0, rotary_dim=rotary),
        "max_positions": described.get("model_max_length", described.get("max_position_embeddings", 1 << 20)),
        "recurrence": recurrence,
    }


FAMILIES = (
    Family(
        name="lfm2",
        model_types=("lfm2",),
        architectures=("Lfm2ForCausalLM",),
        fields={"qk_norm": True},
        hf_names=lambda config: _LFM2_NAMES,
        hf_sizes={"eps_key": "norm_eps", "norm_eps": 1e-5, "theta": 1e6, "mlp_key": "hidden_size"},
        hf_fields=_lfm2_from_hf,
        gguf_architecture="lfm2",
        gguf_names=lambda config: LFM2_NAMES,
        gguf_required={"attention.sliding_window": 0},
        gguf_sizes={"layers_differ": True},
        gguf_fields=lfm2_from_gguf,
    ),
    Family(
        name="qwen3_next",
        model_types=("qwen3_next",),
        architectures=("Qwen3NextForCausalLM",),
        hf_defaults={"norm_topk_prob": True},
        hf_names=_next_names,
        hf_sizes={**_QWEN_SIZES, "mlp_key": "moe_intermediate_size"},
        hf_fields=_next_from_hf,
        gguf_architecture="qwen3next",
        gguf_names=qwen3_next_names,
        gguf_sizes=_GGUF_EXPERT_SIZES,
        gguf_fields=delta_experts_from_gguf,
        **{**_QWEN, "fields": {**_QWEN["fields"], "gates_shared": True}},
    ),
    Family(
        name="qwen3_5",
        model_types=("qwen3_5_text",),
        architectures=("Qwen3_5ForCausalLM",),
        multimodal_type="qwen3_5",
        hf_names=lambda config: {**HF_NAMES, **_QWEN35_NAMES, **queries_and_gates(config, _QUERIES)},
        hf_sizes=_QWEN_SIZES,
        hf_fields=_delta_from_hf,
        gguf_architecture="qwen35",
        gguf_names=qwen35_names,
        gguf_sizes={"may_rotate_part": True},
        gguf_fields=delta_from_gguf,
        **_QWEN,
    ),
    Family(
        name="qwen3_5_moe",
        model_types=("qwen3_5_moe_text",),
        architectures=("Qwen3_5MoeForCausalLM",),
        multimodal_type="qwen3_5_moe",
        hf_defaults={"norm_topk_prob": True, "intermediate_size": None},
        hf_names=lambda config: {**_EXPERT_NAMES, **_QWEN35_NAMES, **queries_and_gates(config, _QUERIES)},
        hf_sizes={**_QWEN_SIZES, "mlp_key": "moe_intermediate_size"},
        hf_fields=_next_from_hf,
        gguf_architecture="qwen35moe",
        gguf_names=qwen35_names,
        gguf_sizes=_GGUF_EXPERT_SIZES,
        gguf_fields=delta_experts_from_gguf,
        **{**_QWEN, "fields": {**_QWEN["fields"], "gates_shared": True}},
    ),
    Family(
        name="granite4",
        model_types=("granitemoehybrid",),
        architectures=("GraniteMoeHybridForCausalLM",),
        hf_names=_granite_names,
        hf_stacked=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        hf_required={"hidden_act": "silu", "mamba_proj_bias": False},
        hf_fields=_granite_from_hf,
        gguf_architecture="granitehybrid",
        gguf_is_interleaved=True,
        gguf_names=granite_names,
        gguf_sizes={"layers_differ": True},
        gguf_fields=granite4_from_gguf,
    ),
    Family(
        name="kimi_linear",
        model_types=("kimi_linear",),
        architectures=("KimiLinearForCausalLM",),
        fields={"routing": "sigmoid", "choice_bias": True},
        hf_names=lambda config: {**latent_names(config), **_KDA_NAMES},
        hf_defaults={"routed_scaling_factor": 2.446},
        hf_required={
            **{"hidden_act": "silu", "attention_bias": False, "mla_use_nope": True},
            "moe_router_activation_func": "sigmoid",
        },
        hf_sizes={"mlp_key": "moe_intermediate_size", "norm_eps": 1e-5},
        hf_fields=_kimi_from_hf,
        gguf_architecture="kimi-linear",
        gguf_names=kimi_names,
        gguf_required={"expert_gating_func": 2},
        gguf_sizes={"may_rotate_part": True, "keeps_latents": True, "layers_differ": True},
        gguf_fields=kimi_from_gguf,
    ),
)
"""The families."""
