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
    return {}


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


_CHANGES = {"lfm2": _lfm2, "gemma4_text": _gemma4}
