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
    return {}


def tensors(config: Mapping[str, Any], stored: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A checkpoint's tensors, changed as these families' are, by names that the `gguf` package's table knows."""
    converted: dict[str, np.ndarray] = {}
    for name, tensor in stored.items():
        converted |= _CHANGES.get(config["model_type"], _unchanged)(config, name, tensor)
    return converted


def _unchanged(config: Mapping[str, Any], name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    return {name: tensor}


def _lfm2(config: Mapping[str, Any], name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    return {name: tensor.squeeze(1) if name.endswith("conv.conv.weight") else tensor}


_CHANGES = {"lfm2": _lfm2}
