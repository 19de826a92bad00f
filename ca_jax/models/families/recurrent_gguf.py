"""What GGUF files say of the families most of whose layers keep a state.

Not here: the families, and what safetensors files say of them (`recurrent`); how numbers of such layers lie in GGUF
files (`gguf`).
Source: names and layouts are those of llama.cpp, whose converter wrote such files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ca_jax.errors import UnsupportedArchitectureError
from ca_jax.models.config import ModelConfig
from ca_jax.models.families.dense import granite_from_gguf
from ca_jax.models.families.from_gguf import GgufDescription
from ca_jax.models.families.names import GGUF_NAMES, Fused, Names, module_names, parts_of
from ca_jax.models.recurrence import RecurrenceConfig

_BLOCK = "blk.{layer}."


def _without_kv(entries: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers that keep a state, of a model in which they are those that have no KV heads.

    Raises:
      UnsupportedArchitectureError: layers that have some have not all as many.
    """
    found = entries["attention.head_count_kv"]
    each = found if isinstance(found, list) else [found]
    if len({*each} - {0}) > 1:
        raise UnsupportedArchitectureError("a head_count_kv of its own for each layer is not served")
    return tuple(layer for layer, heads in enumerate(each) if not heads)


# LFM2.

_CONV = _BLOCK + "shortconv."
LFM2_NAMES = {
    **GGUF_NAMES,
    "final_norm.scale": "token_embd_norm.weight",
    **module_names("mixer.w_in", _CONV + "in_proj"),
    **module_names("mixer.w_out", _CONV + "out_proj"),
    "mixer.kernel": _CONV + "conv.weight",
    "mixer.b_kernel": _CONV + "conv.bias",
}


def lfm2_from_gguf(described: GgufDescription) -> dict[str, Any]:
    """The fields of an LFM2's config."""
    layers, width = _without_kv(described.entries), described.entries["shortconv.l_cache"]
    if not layers:
        return {}
    has_bias = f"blk.{layers[0]}.shortconv.conv.bias" in described.shapes
    return {"recurrence": RecurrenceConfig(kind="short_conv", layers=layers, conv_width=width, has_bias=has_bias)}


# Granite 4.

_SSM = _BLOCK + "ssm_"
_SSM_NAMES = {
    "mixer.kernel": _SSM + "conv1d.weight",
    "mixer.b_kernel": _SSM + "conv1d.bias",
    "mixer.a_log": _SSM + "a",
    "mixer.b_step": _SSM + "dt.bias",
    "mixer.skip": _SSM + "d",
    "mixer.scale": _SSM + "norm.weight",
    "mixer.w_out": _SSM + "out.weight",
}


def _state_sizes(entries: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of a `RecurrenceConfig` with heads of keys and of values."""
    heads = entries["ssm.time_step_rank"]
    return {
        "conv_width": entries["ssm.conv_kernel"],
        "num_key_heads": entries["ssm.group_count"],
        "num_value_heads": heads,
        "key_dim": entries["ssm.state_size"],
        "value_dim": entries["ssm.inner_size"] // heads,
    }


def granite4_from_gguf(described: GgufDescription) -> dict[str, Any]:
    """The fields of a Granite 4's config; models without layers that keep states are files of other architectures."""
    entries, shapes = described.entries, described.shapes
    layers = _without_kv(entries)
    full = tuple(layer for layer in range(entries["block_count"]) if layer not in layers)
    if not layers or not full:
        raise UnsupportedArchitectureError("head_count_kv must be 0 for some layers, and not for others")
    has_bias, num_experts = f"blk.{layers[0]}.ssm_conv1d.bias" in shapes, entries.get("expert_count", 0)
    shared = entries.get("expert_shared_feed_forward_length", 0)
    experts = {
        "num_experts": num_experts,
        "num_experts_per_token": entries.get("expert_used_count", 0),
        "shared_mlp_dim": shared,
    }
    return {
        **granite_from_gguf(described),
        "qkv_bias": f"blk.{full[0]}.attn_q.bias" in shapes,
        "out_bias": f"blk.{full[0]}.attn_output.bias" in shapes,
        **(experts if num_experts else {"mlp_dim": shared or entries["feed_forward_length"]}),
        "nope_layers": () if entries.get("rope.scaling.finetuned", True) else full,
        "recurrence": RecurrenceConfig(kind="state_space", layers=layers, has_bias=has_bias, **_state_sizes(entries)),
    }


def granite_names(config: ModelConfig) -> Names:
    """Names in GGUF files of Granite 4."""
    return {**GGUF_NAMES, **_SSM_NAMES, **in_parts(config, _SSM + "in.weight")}


def in_parts(config: ModelConfig, name: str) -> dict[str, Fused]:
    """Rows of the tensor that makes all that a state space reads, which files of either format have alike."""
    r = config.recurrence
    if r is None:
        return {}
    sizes = {"w_z": r.num_value_heads * r.value_dim, "w_qkv": r.conv_dim(config.embed_dim), "w_step": r.num_value_heads}
    return parts_of(name, {f"mixer.{key}": size for key, size in sizes.items()})
