"""Families of experts beyond Mixtral: Qwen2-MoE and Qwen3-MoE, GLM-4.5, MiniMax-M2.

Qwen's shares are a softmax over all experts, which may be left as they are; Qwen2's have a block beside them that all
tokens go through, weighed by each. GLM-4.5 and MiniMax-M2 take each share by itself, choose by it and a bias, and
rotate a part of each head; GLM's first layers have no experts, its others a block beside them. MiniMax-M2 norms all
heads of queries and of keys as one vector.

Source: Yang et al., "Qwen2 Technical Report" (2024) and "Qwen3 Technical Report" (2025); GLM-4.5 Team, "GLM-4.5"
(2025); MiniMax, "MiniMax-M2" (2025). Config entries and names of tensors are those of `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ca_jax.models.families.family import Family
from ca_jax.models.families.from_gguf import GgufDescription, experts_from_gguf, shortest
from ca_jax.models.families.from_hf import sliding_from_hf
from ca_jax.models.families.llama import HF_NAMES, LAYER
from ca_jax.models.families.names import GGUF_NAMES, module_names

_MLP = LAYER + "mlp."


def _shared(name: str) -> dict[str, str]:
    """Names of the block beside the experts."""
    return {f"shared.w_{part}": f"{_MLP}{name}.{part}_proj.weight" for part in ("gate", "up", "down")}


NAMES: dict[str, str] = {
    **HF_NAMES,
    "mlp.router": _MLP + "gate.weight",
    **module_names("experts.w_gate", _MLP + "experts.{expert}.gate_proj"),
    **module_names("experts.w_up", _MLP + "experts.{expert}.up_proj"),
    **module_names("experts.w_down", _MLP + "experts.{expert}.down_proj"),
    **_shared("shared_experts"),
    "mlp.choice_bias": _MLP + "gate.e_score_correction_bias",
}
"""Names in safetensors files of what most of them have."""


def _chosen_from_hf(described: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {"num_experts": described[key], "num_experts_per_token": described["num_experts_per_tok"]}


def qwen_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    """What Qwen2-MoE and Qwen3-MoE have in common."""
    step, dense = described.get("decoder_sparse_step", 1), described.get("mlp_only_layers") or ()
    layers = range(described["num_hidden_layers"])
    return {
        **_chosen_from_hf(described, "num_experts" if "num_experts" in described else "num_local_experts"),
        "dense_layers": tuple(i for i in layers if i in dense or (i + 1) % step),
        "dense_mlp_dim": described["intermediate_size"],
        "normalizes_shares": bool(described.get("norm_topk_prob", False)),
    }


def _qwen2_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    first = described.get("max_window_layers", 28)
    window = described.get("sliding_window", 4096) if described.get("use_sliding_window") else None
    return {
        **qwen_from_hf(described),
        **sliding_from_hf(described, window or None, lambda layer: layer >= first or layer % 2 == 1),
        "qkv_bias": bool(described.get("qkv_bias", True)),
        "shared_mlp_dim": described["shared_expert_intermediate_size"],
    }


def _qwen_from_gguf(described: GgufDescription, normalizes_shares: bool) -> dict[str, Any]:
    """Files do not say whether shares are made to add up to 1: as llama.cpp does it."""
    entries, width = described.entries, described.entries["feed_forward_length"]
    return {
        **experts_from_gguf(entries),
        "dense_mlp_dim": width,
        "normalizes_shares": normalizes_shares,
        "qkv_bias": "blk.0.attn_q.bias" in described.shapes,
        "out_bias": "blk.0.attn_output.bias" in described.shapes,
    }


def _qwen2_from_gguf(described: GgufDescription) -> dict[str, Any]:
    entries = described.entries
    shared = entries.get("expert_shared_feed_forward_length", entries["feed_forward_length"])
    return {**_qwen_from_gguf(described, normalizes_shares=False), "shared_mlp_dim": shared}


def _qwen3_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    has_bias = bool(described.get("attention_bias", False))
    window = described.get("sliding_window", 4096) if described.get("use_sliding_window") else None
    return {**qwen_from_hf(described), "sliding_window": window, "qkv_bias": has_bias, "out_bias": has_bias}


def sparse_from_hf(described: Mapping[str, Any], num_dense: int = 1) -> dict[str, Any]:
    """What families say alike whose first layers have no experts, and whose others have a block beside them.

    Args:
      described: the contents of a config.json.
      num_dense: how many layers have none, where nothing is said.
    """
    num_layers = described["num_hidden_layers"]
    return {
        **_chosen_from_hf(described, "n_routed_experts" if "n_routed_experts" in described else "num_local_experts"),
        "dense_layers": tuple(range(min(described.get("first_k_dense_replace", num_dense), num_layers))),
        "dense_mlp_dim": described["intermediate_size"],
        "shared_mlp_dim": described["moe_intermediate_size"] * described.get("n_shared_experts", 1),
        "normalizes_shares": bool(described.get("norm_topk_prob", True)),
        "routing_scale": float(described.get("routed_scaling_factor", 1.0)),
        "num_expert_groups": described.get("n_group") or 1,
        "num_chosen_groups": described.get("topk_group") or 1,
    }


def sparse_from_gguf(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The same from a GGUF file's metadata."""
    experts = experts_from_gguf(entries)
    return {
        **experts,
        "dense_layers": tuple(range(entries.get("leading_dense_block_count", 0))),
        "dense_mlp_dim": entries["feed_forward_length"],
        "shared_mlp_dim": experts["mlp_dim"] * entries.get("expert_shared_count", 0),
        "normalizes_shares": entries.get("expert_weights_norm", False),
        "routing_scale": shortest(entries.get("expert_weights_scale") or 1.0),
        "num_expert_groups": entries.get("expert_group_count") or 1,
        "num_chosen_groups": entries.get("expert_group_used_count") or 1,
    }


def _glm4_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **sparse_from_hf(described),
        "qkv_bias": bool(described.get("attention_bias", False)),
        "qk_norm": bool(described.get("use_qk_norm", False)),
    }


def _glm4_from_gguf(described: GgufDescription) -> dict[str, Any]:
    shapes = described.shapes
    return {
        **sparse_from_gguf(described.entries),
        "qkv_bias": "blk.0.attn_q.bias" in shapes,
        "qk_norm": "blk.0.attn_q_norm.weight" in shapes,
    }


def _minimax_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    return _chosen_from_hf(described, "num_local_experts" if "num_local_experts" in described else "num_experts")


_MINIMAX = LAYER + "block_sparse_moe."
_MINIMAX_NAMES = {
    "mlp.router": _MINIMAX + "gate.weight",
    "mlp.choice_bias": _MINIMAX + "e_score_correction_bias",
    "experts.w_gate": _MINIMAX + "experts.{expert}.w1.weight",
    "experts.w_up": _MINIMAX + "experts.{expert}.w3.weight",
    "experts.w_down": _MINIMAX + "experts.{expert}.w2.weight",
}
_SIGMOID = {"routing": "sigmoid", "choice_bias": True}
_GGUF_SIGMOID: dict[str, Any] = {"gguf_required": {"expert_gating_func": 2}, "gguf_sizes": {"may_rotate_part": True}}
_GLM4_GGUF_NAMES = GGUF_NAMES | {"mlp_norm.scale": "blk.{layer}.post_attention_norm.weight"}


def _family(name: str, architecture: str, names: Mapping[str, str], **differences: Any) -> Family:
    all_names = {**NAMES, **names}
    return Family(
        name=name,
        model_types=(name,),
        architectures=(architecture,),
        hf_required={"hidden_act": "silu"},
        hf_names=lambda config: all_names,
        **{"gguf_names": lambda config: GGUF_NAMES, **differences},
    )


_MOE_KEY = {"mlp_key": "moe_intermediate_size"}
FAMILIES = (
    _family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        _shared("shared_expert") | {"shared.w_share": _MLP + "shared_expert_gate.weight"},
        fields={"gates_shared": True},
        hf_sizes=_MOE_KEY,
        hf_fields=_qwen2_from_hf,
        gguf_architecture="qwen2moe",
        gguf_fields=_qwen2_from_gguf,
    ),
    _family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {},
        fields={"qk_norm": True},
        hf_sizes=_MOE_KEY,
        hf_fields=_qwen3_from_hf,
        gguf_architecture="qwen3moe",
        gguf_fields=partial(_qwen_from_gguf, normalizes_shares=True),
    ),
    _family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        {},
        fields=_SIGMOID,
        drafts_behind=True,
        hf_sizes={**_MOE_KEY, "norm_eps": 1e-5, "partial": 0.5},
        hf_fields=_glm4_from_hf,
        gguf_architecture="glm4moe",
        gguf_names=lambda config: _GLM4_GGUF_NAMES,
        gguf_fields=_glm4_from_gguf,
        **_GGUF_SIGMOID,
    ),
    _family(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        _MINIMAX_NAMES,
        fields={**_SIGMOID, "qk_norm": True, "qk_norm_is_whole": True},
        hf_sizes={"theta": 5e6, "head_dim": 128, "rotary_dim_key": "rotary_dim"},
        hf_fields=_minimax_from_hf,
        gguf_architecture="minimax-m2",
        gguf_fields=lambda described: experts_from_gguf(described.entries),
        **_GGUF_SIGMOID,
    ),
)
"""The families."""
