"""What llama.cpp's converter makes of checkpoints of families whose layers keep a state, and of Gemma 4.

Not here: what it makes of all families alike (`gguf_kit`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

ARCHITECTURES = {
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "kimi_linear": gguf.MODEL_ARCH.KIMI_LINEAR,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
}
"""By Hugging Face's `model_type`."""


def _kv_heads(config: Mapping[str, Any], num_kv_heads: int) -> list[int]:
    """Of each layer; of those that keep a state none."""
    return [num_kv_heads if each == "full_attention" else 0 for each in config["layer_types"]]


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """What is added to or changed of what is said of all families."""
    if config["model_type"] == "lfm2":
        width, of = int(2 * config["intermediate_size"] / 3), config["block_multiple_of"]
        adjusted = -(-width // of) * of
        return {
            "attention.head_count_kv": _kv_heads(config, config["num_key_value_heads"]),
            "attention.layer_norm_rms_epsilon": config["norm_eps"],
            "feed_forward_length": adjusted if config["block_auto_adjust_ff_dim"] else config["intermediate_size"],
            "shortconv.l_cache": config["conv_L_cache"],
            "vocab_size": config["vocab_size"],
        }
    if config["model_type"] == "gemma4_text":
        return _of_gemma4(config)
    if config["model_type"] == "granitemoehybrid":
        heads, embed_dim = config["mamba_n_heads"], config["hidden_size"]
        multipliers = {"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale"}
        multipliers |= {"residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"}
        return {
            **{key: float(config[name]) for name, key in multipliers.items()},
            "context_length": 2**20,
            "attention.head_count_kv": _kv_heads(config, config["num_key_value_heads"]),
            "expert_shared_feed_forward_length": config["shared_intermediate_size"],
            "rope.dimension_count": embed_dim // config["num_attention_heads"],
            "rope.scaling.finetuned": False,
            "ssm.conv_kernel": config["mamba_d_conv"],
            "ssm.state_size": config["mamba_d_state"],
            "ssm.group_count": config["mamba_n_groups"],
            "ssm.time_step_rank": heads,
            "ssm.inner_size": config["mamba_expand"] * embed_dim,
            "vocab_size": config["vocab_size"],
        }
    if config["model_type"] == "kimi_linear":
        return _of_kimi(config)
    if config["model_type"].startswith("qwen3"):
        return _of_qwen(config) if "linear_num_key_heads" in config else {}
    return {}


def _of_kimi(config: Mapping[str, Any]) -> dict[str, Any]:
    latent, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return {
        "vocab_size": config["vocab_size"],
        "attention.head_count_kv": _kv_heads(config, 1),
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rotary,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotary,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotary,
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "kda.head_dim": config["linear_head_dim"],
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_token"],
        "expert_group_count": config["num_expert_group"],
        "expert_group_used_count": config["topk_group"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["num_shared_experts"],
        "expert_gating_func": 2,
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
    }


def _of_qwen(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["linear_num_value_heads"]
    return {
        "full_attention_interval": 4,
        "rope.dimension_count": int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]),
        "rope.dimension_sections": [1, 1, 0, 0] if "3_5" in config["model_type"] else None,
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": config["linear_value_head_dim"] * heads,
    }


def _of_gemma4(config: Mapping[str, Any]) -> dict[str, Any]:
    slides = [each == "sliding_attention" for each in config["layer_types"]]
    of_full = config["per_layer_config"][str(slides.index(False))]
    head_dim, num_kv_heads, width = of_full["head_dim"], config["num_key_value_heads"], config["intermediate_size"]
    of_sliding = ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa")
    entries = {
        **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), head_dim),
        **dict.fromkeys(of_sliding, config["head_dim"]),
        "rope.scaling.type": None,
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": slides,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "final_logit_softcapping": config["final_logit_softcapping"],
    }
    if config["use_double_wide_mlp"]:
        num_plain = config["num_hidden_layers"] - config["num_kv_shared_layers"]
        entries["feed_forward_length"] = [width if i < num_plain else 2 * width for i in range(len(slides))]
    if "num_key_value_heads" in of_full:
        full = of_full["num_key_value_heads"]
        entries["attention.head_count_kv"] = [num_kv_heads if each else full for each in slides]
    if config["num_experts"]:
        entries["expert_count"], entries["expert_used_count"] = config["num_experts"], config["top_k_experts"]
        entries["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return entries


def tensors(config: Mapping[str, Any], stored: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A checkpoint's tensors, changed as these families' are, by names that the `gguf` package's table knows."""
    converted: dict[str, np.ndarray] = {}
    for name, tensor in stored.items():
        converted |= _CHANGES.get(config["model_type"], _unchanged)(config, name, tensor)
    if config["model_type"] == "gemma4_text":
        rope = config["rope_parameters"]["full_attention"]
        of_full = next(iter(config["per_layer_config"].values()))["head_dim"] // 2
        turning = int(of_full * rope["partial_rotary_factor"])
        converted["rope_freqs.weight"] = np.array([1.0] * turning + [1e30] * (of_full - turning), np.float32)
    return converted


def _unchanged(config: Mapping[str, Any], name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    return {name: tensor}


def _lfm2(config: Mapping[str, Any], name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    return {name: tensor.squeeze(1) if name.endswith("conv.conv.weight") else tensor}


def _gemma4(config: Mapping[str, Any], name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """Its scales have no module's name."""
    layer = name.split(".")[2]
    own = {"router.scale": f"blk.{layer}.ffn_gate_inp.scale", "per_expert_scale": f"blk.{layer}.ffn_down_exps.scale"}
    changed = next((to for end, to in own.items() if name.endswith(end)), name)
    return {f"{changed}.weight" if name.endswith("layer_scalar") else changed: tensor}


def _granite4(config: Mapping[str, Any], name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    block, has_experts = f"blk.{name.split('.')[2]}." if ".layers." in name else "", config["num_local_experts"]
    if name.endswith("input_linear.weight"):
        suffix = "_exps" if "block_sparse_moe" in name else "_shexp" if has_experts else ""
        parts = zip(("gate", "up"), np.split(tensor, 2, axis=-2), strict=True)
        return {f"{block}ffn_{part}{suffix}.weight": each for part, each in parts}
    if name.endswith("shared_mlp.output_linear.weight") and not has_experts:
        return {block + "ffn_down.weight": tensor}
    if name.endswith(".D"):
        return {name: tensor[:, None]}
    if name.endswith("mamba.norm.weight"):
        return {name: tensor.reshape(config["mamba_n_groups"], -1)}
    return _ssm(name, tensor, -np.exp(tensor[:, None])) if name.endswith(".A_log") else _ssm(name, tensor)


def _ssm(name: str, tensor: np.ndarray, decay: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """What is changed of all layers with states alike."""
    if name.endswith(".A_log"):
        return {name: -np.exp(tensor) if decay is None else decay}
    if "conv1d" in name:
        return {name: tensor.squeeze()}
    return {name.replace(".dt_bias", ".dt_proj.bias"): tensor}


def _qwen3_next(config: Mapping[str, Any], name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return {name: tensor + 1}
    if not name.endswith("in_proj_qkvz.weight"):
        return _ssm(name, tensor)
    num_keys, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    width = config["linear_num_value_heads"] // num_keys * config["linear_value_head_dim"]
    stops = np.cumsum([key_dim, key_dim, width])
    parts = [part.reshape(-1, tensor.shape[1]) for part in np.split(_by_head(tensor, num_keys), stops, axis=1)]
    block = f"blk.{name.split('.')[2]}."
    return {block + "attn_qkv.weight": np.concatenate(parts[:3]), block + "attn_gate.weight": parts[3]}


def _by_head(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    return tensor.reshape(num_heads, -1, *tensor.shape[1:])


def _kimi(config: Mapping[str, Any], name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    return {name: tensor[None]} if "_conv1d" in name else _ssm(name, tensor)


def _qwen3_5(config: Mapping[str, Any], name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """Value heads lie so that those of a key head are as far apart as there are key heads."""
    of_keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]

    def spread(part: np.ndarray) -> np.ndarray:
        num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        heads = part.reshape(num_keys, num_values // num_keys, -1, *part.shape[1:])
        return heads.swapaxes(0, 1).reshape(part.shape)

    if ".linear_attn." in name and not name.endswith("linear_attn.norm.weight"):
        if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            tensor = np.concatenate([tensor[:of_keys], spread(tensor[of_keys:])])
        elif name.endswith("out_proj.weight"):
            tensor = spread(tensor.T).T
        else:
            tensor = spread(tensor)
    return _qwen3_next(config, name, tensor)


_CHANGES = {
    "lfm2": _lfm2,
    "gemma4_text": _gemma4,
    "granitemoehybrid": _granite4,
    "kimi_linear": _kimi,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5,
}
