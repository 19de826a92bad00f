"""Families whose layers keep one latent of each token: DeepSeek V2 and V3 with R1 and Kimi K2, and Mistral 4.

All have a few layers without experts and then many of them, beside a block that all tokens go through. Experts are in
groups, of which the best are chosen first: V2 by the best share of each, the others by the two best; V3 takes shares by
themselves and chooses by a bias, too. Contexts are stretched by YaRN, which also makes scores larger. Numbers that are
rotated lie side by side in files.

Source: DeepSeek-AI, "DeepSeek-V2" (2024) and "DeepSeek-V3" (2024); Moonshot AI, "Kimi K2" (2025); Mistral AI, "Mistral
Small 4" (2026). Config entries and names of tensors are those of `transformers`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from ca_jax.errors import UnsupportedArchitectureError
from ca_jax.models.config import ModelConfig
from ca_jax.models.families.experts import NAMES, sparse_from_gguf, sparse_from_hf
from ca_jax.models.families.family import Family
from ca_jax.models.families.from_gguf import GgufDescription, require_gguf, rope_from_gguf, shortest
from ca_jax.models.families.from_hf import rope_from_hf
from ca_jax.models.families.llama import LAYER
from ca_jax.models.families.names import GGUF_NAMES, Fused, Names, half_split_rows, wide_experts

_EXPERTS = LAYER + "mlp.experts."
_ATTENTION = LAYER + "self_attn."


def latent_from_hf(described: Mapping[str, Any], num_dense: int) -> dict[str, Any]:
    """What all of them say; a head's size is said in several ways, and means nothing."""
    latent, rotary = described["kv_lora_rank"], described["qk_rope_head_dim"]
    width = rotary + described["qk_nope_head_dim"]
    parameters = described.get("rope_parameters") or described.get("rope_scaling") or {}
    factor, of_all = float(parameters.get("factor") or 1.0), float(parameters.get("mscale_all_dim") or 0.0)
    stretched = 0.1 * of_all * math.log(factor) + 1 if of_all and factor > 1 else 1.0
    own = {name: value for name, value in parameters.items() if name != "partial_rotary_factor"}
    found = rope_from_hf({**described, "rope_scaling": None, "rope_parameters": own}, head_dim=rotary)["rope"]
    return {
        **sparse_from_hf(described, num_dense),
        "rope": dataclasses.replace(found, rotary_dim=rotary),
        "num_kv_heads": 1,
        "head_dim": latent + rotary,
        "latent_dim": latent,
        "nope_dim": described["qk_nope_head_dim"],
        "value_dim": described["v_head_dim"],
        "query_rank": described.get("q_lora_rank") or 0,
        "attention_scale": stretched**2 / math.sqrt(width),
    }


def _v2_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    method = described.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedArchitectureError(
            f"config.json: topk_method={method!r} is not served; it must be greedy or group_limited_greedy"
        )
    own = latent_from_hf(described, 0)
    one = {"num_expert_groups": 1, "num_chosen_groups": 1} if method == "greedy" else {}
    return {**own, **one, "normalizes_shares": False, "num_group_shares": 1}


def _mistral4_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    parameters = described.get("rope_parameters") or {}
    beta = parameters.get("llama_4_scaling_beta") or 0.0
    span = {"query_span": parameters["original_max_position_embeddings"]} if beta else {}
    return {**latent_from_hf(described, 0), "query_beta": float(beta), **span}


def _rotated_first(config: ModelConfig, num_heads: int, num_others: int) -> np.ndarray:
    """Rows of heads whose rotated numbers come first in the tree, half-split, and last in files, interleaved."""
    head = np.concatenate([num_others + half_split_rows(1, config.rotary_dim), np.arange(num_others)])
    return (np.arange(num_heads)[:, None] * len(head) + head).reshape(-1)


def latent_names(config: ModelConfig) -> Names:
    """Names in safetensors files of what all of them have."""
    c, made_of = config, "q_b_proj" if config.query_rank else "q_proj"
    queries = _rotated_first(c, c.num_heads, c.nope_dim)
    latents = _rotated_first(c, 1, c.latent_dim)
    both = np.arange(c.num_heads * (c.nope_dim + c.value_dim)).reshape(c.num_heads, -1)
    made = f"{_ATTENTION}kv_b_proj.weight"
    return {
        **NAMES,
        "attn.wq_a": _ATTENTION + "q_a_proj.weight",
        "attn.q_a_norm.scale": _ATTENTION + "q_a_layernorm.weight",
        "attn.wq": Fused(f"{_ATTENTION}{made_of}.weight", len(queries), queries),
        "attn.wkv_a": Fused(_ATTENTION + "kv_a_proj_with_mqa.weight", len(latents), latents),
        "attn.kv_norm.scale": _ATTENTION + "kv_a_layernorm.weight",
        "attn.wuk": Fused(made, both.size, both[:, : c.nope_dim].reshape(-1)),
        "attn.wuv": Fused(made, both.size, both[:, c.nope_dim :].reshape(-1)),
    }


def latent_from_gguf(described: GgufDescription) -> dict[str, Any]:
    """What all of them say in GGUF files.

    Files hold `mscale_all_dim` of YaRN, a tenth of it; `mscale`, which they leave unsaid, is taken as the same.
    """
    entries = described.entries
    if "attention.key_length_mla" not in entries:
        raise UnsupportedArchitectureError(
            "attn_kv_b.weight without attention.key_length_mla is not served; convert the model anew, "
            "so that it has attn_k_b.weight and attn_v_b.weight"
        )
    latent, width = entries["attention.kv_lora_rank"], entries["attention.key_length_mla"]
    rope = rope_from_gguf(described, head_dim=entries["attention.key_length"])
    of_all = 10 * shortest(entries.get("rope.scaling.yarn_log_multiplier", 0.0))
    if rope.scaling == "yarn" and not of_all:
        raise UnsupportedArchitectureError("rope scaling 'yarn' without yarn_log_multiplier is not served")
    stretched = 0.1 * of_all * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0
    beta = shortest(entries.get("attention.temperature_scale", 0.0))
    span = {"query_span": entries["attention.temperature_length"]} if beta else {}
    return {
        **span,
        "query_beta": beta,
        **sparse_from_gguf(entries),
        "rope": dataclasses.replace(rope, attention_factor=1.0),
        "latent_dim": latent,
        "nope_dim": width - rope.rotary_dim,
        "value_dim": entries["attention.value_length_mla"],
        "query_rank": entries.get("attention.q_lora_rank", 0),
        "attention_scale": stretched**2 / math.sqrt(width),
    }


def _v2_from_gguf(described: GgufDescription) -> dict[str, Any]:
    """Files do not say by how many shares a group is chosen: by one, as in the releases."""
    require_gguf(described, {"expert_gating_func": 1})
    return {**latent_from_gguf(described), "num_group_shares": 1}


def latent_gguf_names(config: ModelConfig) -> Names:
    """Names in GGUF files of what all of them have."""
    block, made_of = "blk.{layer}.", "attn_q_b" if config.query_rank else "attn_q"
    queries = _rotated_first(config, config.num_heads, config.nope_dim)
    latents = _rotated_first(config, 1, config.latent_dim)
    return {
        **GGUF_NAMES,
        "attn.wq_a": block + "attn_q_a.weight",
        "attn.q_a_norm.scale": block + "attn_q_a_norm.weight",
        "attn.wq": Fused(f"{block}{made_of}.weight", len(queries), queries),
        "attn.wkv_a": Fused(block + "attn_kv_a_mqa.weight", len(latents), latents),
        "attn.kv_norm.scale": block + "attn_kv_a_norm.weight",
        "attn.wuk": block + "attn_k_b.weight",
        "attn.wuv": block + "attn_v_b.weight",
    }


def _mistral4_names(config: ModelConfig) -> Names:
    wide = wide_experts(config, _EXPERTS + "gate_up_proj[{expert}]")
    return {**latent_names(config), **wide, "experts.w_down": _EXPERTS + "down_proj[{expert}]"}


def _mistral4_gguf_names(config: ModelConfig) -> Names:
    return {**latent_gguf_names(config), **wide_experts(config, "blk.{layer}.ffn_gate_up_exps.weight[{expert}]")}


def _family(name: str, model_types: tuple[str, ...], architecture: str, **differences: Any) -> Family:
    return Family(
        name=name,
        model_types=model_types,
        architectures=(architecture,),
        hf_required={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_interleave": True},
        hf_sizes={"mlp_key": "moe_intermediate_size"},
        **{"hf_names": latent_names, **differences},
    )


_GGUF: dict[str, Any] = {
    "gguf_architecture": "deepseek2",
    "gguf_fields": latent_from_gguf,
    "gguf_names": latent_gguf_names,
    "gguf_sizes": {"may_rotate_part": True, "keeps_latents": True},
}
FAMILIES = (
    _family(
        "deepseek_v2",
        ("deepseek_v2",),
        "DeepseekV2ForCausalLM",
        hf_fields=_v2_from_hf,
        is_gguf=lambda entries: entries.get("expert_gating_func") != 2,
        **{**_GGUF, "gguf_fields": _v2_from_gguf},
    ),
    _family(
        "deepseek_v3",
        ("deepseek_v3", "kimi_k2"),
        "DeepseekV3ForCausalLM",
        fields={"routing": "sigmoid", "choice_bias": True},
        drafts_behind=True,
        hf_defaults={"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
        hf_fields=partial(latent_from_hf, num_dense=3),
        is_gguf=lambda entries: entries.get("expert_gating_func") == 2,
        **_GGUF,
    ),
    _family(
        "mistral4",
        ("mistral4",),
        "Mistral4ForCausalLM",
        hf_fields=_mistral4_from_hf,
        hf_names=_mistral4_names,
        hf_stacked=("gate_up_proj", "experts.down_proj"),
        **{**_GGUF, "gguf_architecture": "mistral4", "gguf_names": _mistral4_gguf_names},
        gguf_required={"expert_gating_func": 1},
    ),
)
"""The families."""
