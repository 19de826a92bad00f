"""What GGUF files say of the families most of whose layers keep a state.

Not here: the families, and what safetensors files say of them (`recurrent`); how numbers of such layers lie in GGUF
files (`gguf`).
Source: names and layouts are those of llama.cpp, whose converter wrote such files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ca_jax.errors import UnsupportedArchitectureError
from ca_jax.models.config import ModelConfig, RopeConfig
from ca_jax.models.families.deepseek import latent_from_gguf, latent_gguf_names
from ca_jax.models.families.dense import granite_from_gguf
from ca_jax.models.families.from_gguf import GgufDescription, experts_from_gguf
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


# What Granite 4, Qwen3-Next and Qwen3.5 have in common.

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


def _state_sizes(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of a `RecurrenceConfig` with heads of keys and of values."""
    heads = entries["ssm.time_step_rank"]
    return {
        "conv_width": entries["ssm.conv_kernel"],
        "num_key_heads": entries["ssm.group_count"],
        "num_value_heads": heads,
        "key_dim": entries["ssm.state_size"],
        "value_dim": entries["ssm.inner_size"] // heads,
    }


# Granite 4.


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


# Qwen3-Next and Qwen3.5.

_DELTA_NAMES = {
    **GGUF_NAMES,
    **_SSM_NAMES,
    "mlp_norm.scale": _BLOCK + "post_attention_norm.weight",
    "mixer.w_qkv": _BLOCK + "attn_qkv.weight",
    "mixer.w_z": _BLOCK + "attn_gate.weight",
}


def delta_from_gguf(described: GgufDescription) -> dict[str, Any]:
    """The fields of a Qwen3.5's config. Scales of norms are stored whole, but those of layers with states."""
    entries = described.entries
    num_layers, every = entries["block_count"], entries.get("full_attention_interval", 4)
    num_layers -= entries.get("nextn_predict_layers", 0)
    keeps = entries.get("attention.recurrent_layers", [(layer + 1) % every != 0 for layer in range(num_layers)])
    layers = tuple(layer for layer in range(num_layers) if keeps[layer])
    if layers and f"blk.{layers[0]}.ssm_in.weight" in described.shapes:
        raise UnsupportedArchitectureError(
            "ssm_in.weight is not served; convert the model anew, so that it has attn_qkv.weight and attn_gate.weight"
        )
    recurrence = RecurrenceConfig(kind="gated_delta", layers=layers, **_state_sizes(entries))
    return {"norm_offset": 0.0, "recurrence": recurrence}


def delta_experts_from_gguf(described: GgufDescription) -> dict[str, Any]:
    """The same with experts. Files do not say whether shares are made to add up to 1: as in the releases, they are."""
    return {
        **delta_from_gguf(described),
        **experts_from_gguf(described.entries),
        "dense_mlp_dim": described.entries.get("feed_forward_length"),
        "shared_mlp_dim": described.entries["expert_shared_feed_forward_length"],
    }


def qwen3_next_names(config: ModelConfig) -> Names:
    """Names in GGUF files of Qwen3-Next."""
    names: dict[str, str | Fused] = {**_DELTA_NAMES, **queries_and_gates(config, _BLOCK + "attn_q.weight")}
    return names if config.recurrence is None else names | betas_and_steps(config.recurrence, _SSM + "ba.weight")


def qwen35_names(config: ModelConfig) -> Names:
    """Names in GGUF files of Qwen3.5, in which the first value head of each key head lies before all second ones."""
    names: dict[str, str | Fused] = {**_DELTA_NAMES, **queries_and_gates(config, _BLOCK + "attn_q.weight")}
    names |= {"mixer.w_beta": _SSM + "beta.weight", "mixer.w_step": _SSM + "alpha.weight"}
    r = config.recurrence
    if r is None:
        return names
    of_keys, heads = 2 * r.num_key_heads * r.key_dim, _heads_in_turns(r, 1)
    values = _heads_in_turns(r, r.value_dim)
    for rows, keys in (
        (np.concatenate([np.arange(of_keys), of_keys + values]), ("w_qkv", "kernel")),
        (values, ("w_z",)),
        (heads, ("w_beta", "w_step", "a_log", "b_step")),
    ):
        names |= {f"mixer.{key}": Fused(str(names[f"mixer.{key}"]), len(rows), rows) for key in keys}
    outputs = np.arange(config.embed_dim)
    return names | {"mixer.w_out": Fused(_SSM + "out.weight", len(outputs), outputs, columns=values)}


def _heads_in_turns(r: RecurrenceConfig, size: int) -> np.ndarray:
    """For each of `size` numbers of value heads, those of a key head together, where it lies in a file.

    Two key heads a and b of two each:   file  a0 b0 a1 b1   ->   here  a0 a1 b0 b1
    """
    each = r.num_value_heads // r.num_key_heads
    return np.arange(r.num_value_heads * size).reshape(each, r.num_key_heads, size).swapaxes(0, 1).reshape(-1)


# Kimi Linear.

_KIMI_NAMES = {
    **{f"mixer.w_{part}": f"{_BLOCK}attn_{part}.weight" for part in "qkv"},
    **{f"mixer.kernel_{part}": f"{_SSM}conv1d_{part}.weight" for part in "qkv"},
    **{f"mixer.w_decay_{part}": f"{_SSM}f_{part}.weight" for part in "ab"},
    **{f"mixer.w_gate_{part}": f"{_SSM}g_{part}.weight" for part in "ab"},
    **{f"mixer.{key}": _SSM_NAMES[f"mixer.{key}"] for key in ("a_log", "b_step", "scale")},
    "mixer.w_beta": _SSM + "beta.weight",
    "mixer.w_out": _BLOCK + "attn_output.weight",
}


def kimi_from_gguf(described: GgufDescription) -> dict[str, Any]:
    """The fields of a Kimi Linear's config. Files do not say whether shares add up to 1: as in the release, they do."""
    entries = {"expert_weights_norm": True, **described.entries}
    heads = dict.fromkeys(("num_key_heads", "num_value_heads"), entries["attention.head_count"])
    sizes = dict.fromkeys(("key_dim", "value_dim"), entries["kda.head_dim"])
    rotary = entries["rope.dimension_count"]
    return {
        **latent_from_gguf(dataclasses.replace(described, entries=entries)),
        "rope": RopeConfig(scaling="proportional", num_turning=0, rotary_dim=rotary),
        "num_kv_heads": 1,
        "recurrence": RecurrenceConfig(
            kind="channel_delta",
            layers=_without_kv(entries),
            conv_width=entries["ssm.conv_kernel"],
            **heads,
            **sizes,
        ),
    }


def kimi_names(config: ModelConfig) -> Names:
    """Names in GGUF files of Kimi Linear."""
    return {**latent_gguf_names(config), **_KIMI_NAMES}


# What safetensors and GGUF files hold alike.


def queries_and_gates(config: ModelConfig, name: str) -> dict[str, Fused]:
    """Queries and gates, which lie head by head in one tensor."""
    heads, size = config.num_heads, config.head_dim
    rows = np.arange(heads * 2 * size).reshape(heads, 2, size)
    return {key: Fused(name, rows.size, rows[:, i].reshape(-1)) for i, key in enumerate(("attn.wq", "attn.wg"))}


def betas_and_steps(r: RecurrenceConfig, name: str) -> dict[str, Fused]:
    """What makes betas and steps of Qwen3-Next, which lies key head by key head in one tensor."""
    rows = np.arange(2 * r.num_value_heads).reshape(r.num_key_heads, 2, -1)
    keys = ("mixer.w_beta", "mixer.w_step")
    return {key: Fused(name, rows.size, rows[:, i].reshape(-1)) for i, key in enumerate(keys)}


def in_parts(config: ModelConfig, name: str) -> dict[str, Fused]:
    """Rows of the tensor that makes all that a state space reads, which files of either format have alike."""
    r = config.recurrence
    if r is None:
        return {}
    sizes = {"w_z": r.num_value_heads * r.value_dim, "w_qkv": r.conv_dim(config.embed_dim), "w_step": r.num_value_heads}
    return parts_of(name, {f"mixer.{key}": size for key, size in sizes.items()})
