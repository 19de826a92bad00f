"""Gemma 4: layers that slide, and others with heads of another size, of which some keep nothing of their own.

Layers that do not slide have larger heads, and in some models fewer of them for keys and values; there keys may be made
of what values are, so that values alone are kept. The last layers may read the keys and values of earlier ones. In
small models each layer is given numbers of a token of its own beside the residual stream; in others each has experts
beside its feed-forward block, with norms of their own. Of models that read images or hear too, the text model is
served.

Source: the Gemma 4 models of `transformers`, which the releases are made for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ca_jax.errors import UnsupportedArchitectureError
from ca_jax.models.config import ModelConfig, RopeConfig
from ca_jax.models.families.family import Family
from ca_jax.models.families.from_gguf import (
    GgufDescription,
    experts_from_gguf,
    full_layers_from_gguf,
    require_gguf,
    shortest,
)
from ca_jax.models.families.from_hf import full_layers_from_hf, rope_from_hf
from ca_jax.models.families.gemma import GEMMA_NAMES
from ca_jax.models.families.llama import LAYER
from ca_jax.models.families.names import GGUF_NAMES, Names, wide_experts

_PERIOD = 6  # Of layers of which the last does not slide, where nothing is said.
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_DEFAULTS = {
    **{"vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512},
    **{"max_position_embeddings": 131072, "tie_word_embeddings": True, "hidden_size_per_layer_input": 256},
    **{"vocab_size_per_layer_input": 262144, "num_kv_shared_layers": 0, "rope_parameters": _ROPES},
}
_EXPERTS = LAYER + "experts."
_NAMES = GEMMA_NAMES | {
    "inputs.embedding": "model.embed_tokens_per_layer.weight",
    "inputs.w": "model.per_layer_model_projection.weight",
    "inputs.norm.scale": "model.per_layer_projection_norm.weight",
    "w_given_gate": LAYER + "per_layer_input_gate.weight",
    "w_given_out": LAYER + "per_layer_projection.weight",
    "given_norm.scale": LAYER + "post_per_layer_input_norm.weight",
    "out_scale": LAYER + "layer_scalar",
    "experts_norm.scale": LAYER + "pre_feedforward_layernorm_2.weight",
    "experts_post_norm.scale": LAYER + "post_feedforward_layernorm_2.weight",
    "shared_post_norm.scale": LAYER + "post_feedforward_layernorm_1.weight",
    "mlp.router": LAYER + "router.proj.weight",
    "mlp.router_scale": LAYER + "router.scale",
    "mlp.share_scale": LAYER + "router.per_expert_scale",
    "experts.w_down": _EXPERTS + "down_proj[{expert}]",
    **{f"shared.w_{part}": f"{LAYER}mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
}


def _hf_names(config: ModelConfig) -> Names:
    return _NAMES | wide_experts(config, _EXPERTS + "gate_up_proj[{expert}]")


def _from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    if described.get("use_bidirectional_attention") == "all":
        raise UnsupportedArchitectureError(
            "config.json: use_bidirectional_attention='all' is not served; tokens must see none behind them"
        )
    alike, num_readers = bool(described.get("attention_k_eq_v")), described["num_kv_shared_layers"]
    if alike and num_readers:
        raise UnsupportedArchitectureError(
            f"config.json: attention_k_eq_v=True with num_kv_shared_layers={num_readers} is not served"
        )
    input_dim = described["hidden_size_per_layer_input"] or 0
    sizes = [described[name] for name in ("vocab_size_per_layer_input", "vocab_size")]
    if input_dim and sizes[0] != sizes[1]:
        raise UnsupportedArchitectureError(
            f"config.json: vocab_size_per_layer_input={sizes[0]} is not served; it must be vocab_size {sizes[1]}"
        )
    full = {*full_layers_from_hf(described, lambda layer: (layer + 1) % _PERIOD == 0)}
    full.add(described["num_hidden_layers"] - 1)
    head_dim, num_kv_heads = _of_full_layers(described, full)
    by_type = {**_ROPES, **(described["rope_parameters"] or {})}
    ropes = (
        rope_from_hf({**described, "rope_scaling": None, "rope_parameters": by_type[name]}, head_dim=dim)["rope"]
        for name, dim in (("full_attention", head_dim), ("sliding_attention", described["head_dim"]))
    )
    is_double, has_bias = described.get("use_double_wide_mlp"), bool(described.get("attention_bias", False))
    has_experts = bool(described.get("enable_moe_block"))
    if has_experts and num_readers and is_double:
        raise UnsupportedArchitectureError(
            "config.json: enable_moe_block=True with use_double_wide_mlp=True is not served"
        )
    return {
        **dict(zip(("rope", "local_rope"), ropes, strict=True)),
        "embed_scale": math.sqrt(described["hidden_size"]),
        "logit_cap": described.get("final_logit_softcapping"),
        "qkv_bias": has_bias,
        "out_bias": has_bias,
        "sliding_window": described["sliding_window"],
        "full_layers": tuple(sorted(full)),
        "full_head_dim": None if head_dim == described["head_dim"] else head_dim,
        "full_kv_heads": None if num_kv_heads == described["num_key_value_heads"] else num_kv_heads,
        "full_keys_are_values": alike,
        "num_readers": num_readers,
        "reader_mlp_dim": 2 * described["intermediate_size"] if num_readers and is_double else None,
        "layer_input_dim": input_dim,
        **(_experts_from_hf(described) if has_experts else {}),
    }


def _experts_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": described["num_experts"],
        "num_experts_per_token": described["top_k_experts"],
        "mlp_dim": described["moe_intermediate_size"],
        "shared_mlp_dim": described["intermediate_size"],
        "norms_experts": True,
    }


def _of_full_layers(described: Mapping[str, Any], full: set[int]) -> tuple[int, int]:
    """H and K of layers that do not slide. Older files say it of all, others of each layer what is not as in general.

    Raises:
      UnsupportedArchitectureError: layers of a kind that differ, or differ in something else.
    """
    of_all = (described["head_dim"], described["num_key_value_heads"])
    if "per_layer_config" not in described:
        num_kv_heads = described.get("num_global_key_value_heads") if described.get("attention_k_eq_v") else None
        return described.get("global_head_dim", 512), num_kv_heads or of_all[1]
    said = {int(layer): each for layer, each in (described["per_layer_config"] or {}).items()}
    found: dict[bool, set[tuple[int, int]]] = {True: set(), False: {of_all}}
    for layer in range(described["num_hidden_layers"]):
        own = said.get(layer, {})
        if unknown := own.keys() - {"head_dim", "num_key_value_heads"}:
            raise UnsupportedArchitectureError(
                f"config.json: per_layer_config with {', '.join(sorted(unknown))} is not served"
            )
        sizes = own.get("head_dim", of_all[0]), own.get("num_key_value_heads", of_all[1])
        found[layer in full].add(sizes)
    if any(len(each) > 1 for each in found.values()):
        raise UnsupportedArchitectureError("config.json: per_layer_config must be alike for layers of one type")
    return found[True].pop()


_BLOCK = "blk.{layer}."
_GGUF_NAMES = GGUF_NAMES | {
    "inputs.embedding": "per_layer_token_embd.weight",
    "inputs.w": "per_layer_model_proj.weight",
    "inputs.norm.scale": "per_layer_proj_norm.weight",
    "w_given_gate": _BLOCK + "inp_gate.weight",
    "w_given_out": _BLOCK + "proj.weight",
    "given_norm.scale": _BLOCK + "post_norm.weight",
    "out_scale": _BLOCK + "layer_output_scale.weight",
    "experts_norm.scale": _BLOCK + "pre_ffw_norm_2.weight",
    "experts_post_norm.scale": _BLOCK + "post_ffw_norm_2.weight",
    "shared_post_norm.scale": _BLOCK + "post_ffw_norm_1.weight",
    "mlp.router_scale": _BLOCK + "ffn_gate_inp.scale",
    "mlp.share_scale": _BLOCK + "ffn_down_exps.scale",
    **{f"shared.w_{part}": f"{_BLOCK}ffn_{part}.weight" for part in ("gate", "up", "down")},
}


def _gguf_names(config: ModelConfig) -> Names:
    return _GGUF_NAMES | wide_experts(config, _BLOCK + "ffn_gate_up_exps.weight[{expert}]")


def _from_gguf(described: GgufDescription) -> dict[str, Any]:
    """Files say what differs of each layer, and of heads of layers that slide under keys of their own."""
    entries, num_layers = described.entries, described.entries["block_count"]
    full = tuple(full_layers_from_gguf(entries, _PERIOD))
    head_dim, num_readers = entries["attention.key_length_swa"], entries.get("attention.shared_kv_layers", 0)
    require_gguf(described, dict.fromkeys(("attention.value_length_swa", "rope.dimension_count_swa"), head_dim))
    num_kv_heads, widths = (
        found if isinstance(found, list) else [found] * num_layers
        for found in (entries["attention.head_count_kv"], entries["feed_forward_length"])
    )
    of_kind = ((num_kv_heads, full), (num_kv_heads, {*range(num_layers)} - {*full}))
    kv_heads = [{each[layer] for layer in layers} for each, layers in of_kind]
    mlp_dims = [{*widths[: num_layers - num_readers]}, {*widths[num_layers - num_readers :]}]
    if any(len(each) > 1 for each in (*kv_heads, *mlp_dims)) or not all(kv_heads):
        raise UnsupportedArchitectureError(
            "head_count_kv must be alike for layers that slide, and for others, and there must be some of either; "
            "feed_forward_length for layers with KV of their own, and for others"
        )
    [of_full], [of_others] = kv_heads
    [mlp_dim], [reader_mlp_dim] = mlp_dims[0], mlp_dims[1] or mlp_dims[0]
    num_experts = entries.get("expert_count", 0)
    return {
        "local_rope": RopeConfig(theta=shortest(entries.get("rope.freq_base_swa", 1e4))),
        "embed_scale": math.sqrt(entries["embedding_length"]),
        "logit_cap": entries.get("final_logit_softcapping"),
        "sliding_window": entries["attention.sliding_window"],
        "full_layers": full,
        "head_dim": head_dim,
        "num_kv_heads": of_others,
        "full_head_dim": None if (of_all := entries["attention.key_length"]) == head_dim else of_all,
        "full_kv_heads": None if of_full == of_others else of_full,
        "full_keys_are_values": f"blk.{full[0]}.attn_v.weight" not in described.shapes,
        "num_readers": num_readers,
        "mlp_dim": mlp_dim,
        "reader_mlp_dim": None if reader_mlp_dim == mlp_dim else reader_mlp_dim,
        "layer_input_dim": entries.get("embedding_length_per_layer_input", 0),
        **({**experts_from_gguf(entries), "shared_mlp_dim": mlp_dim, "norms_experts": True} if num_experts else {}),
    }


FAMILIES = (
    Family(
        name="gemma4",
        model_types=("gemma4_text",),
        architectures=("Gemma4ForCausalLM",),
        multimodal_type="gemma4",
        fields={
            **{"norms_behind": True, "mlp": "geglu_tanh", "qk_norm": True, "value_norm": True},
            **{"attention_scale": 1.0, "has_layer_scale": True},
        },
        hf_names=_hf_names,
        hf_stacked=("experts.gate_up_proj", "experts.down_proj"),
        hf_required={"hidden_activation": "gelu_pytorch_tanh"},
        hf_defaults=_DEFAULTS,
        hf_fields=_from_hf,
        gguf_architecture="gemma4",
        gguf_names=_gguf_names,
        gguf_sizes={"layers_differ": True},
        gguf_fields=_from_gguf,
    ),
)
"""The family."""
