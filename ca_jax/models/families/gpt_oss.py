"""gpt-oss: clipped experts with biases, sinks beside the scores of keys, and a window in every second layer.

Its experts lie in one tensor, `[in, out]`, in which columns of the gate and of what it gates take turns.

Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card" (2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ca_jax.models.config import ModelConfig
from ca_jax.models.families.family import Family
from ca_jax.models.families.from_gguf import GgufDescription, experts_from_gguf, full_layers_from_gguf
from ca_jax.models.families.from_hf import full_layers_from_hf, rope_from_hf
from ca_jax.models.families.llama import HF_NAMES, LAYER
from ca_jax.models.families.names import GGUF_NAMES, Fused, Names, module_names

_BLOCK = "blk.{layer}."
_EXPERTS = LAYER + "mlp.experts."
_STACKED = tuple(f"mlp.experts.{name}" for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"))
_GGUF_NAMES = GGUF_NAMES | {
    "attn.sinks": _BLOCK + "attn_sinks.weight",
    **module_names("mlp_norm.scale", _BLOCK + "post_attention_norm"),
    "mlp.b_router": _BLOCK + "ffn_gate_inp.bias",
}
_DEFAULTS = {
    **{"head_dim": 64, "attention_bias": True, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "sliding_window": 128},
    "max_position_embeddings": 131072,
}
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What `transformers` takes where a config.json says nothing."""


def _hf_names(config: ModelConfig) -> Names:
    num_rows = 2 * config.mlp_dim
    return {
        **HF_NAMES,
        "attn.sinks": LAYER + "self_attn.sinks",
        "mlp.router": LAYER + "mlp.router.weight",
        "mlp.b_router": LAYER + "mlp.router.bias",
        **{
            f"experts.{kind}_{name}": Fused(_EXPERTS + tensor, num_rows, np.arange(first, num_rows, 2))
            for kind, tensor in (("w", "gate_up_proj[{expert}]"), ("b", "gate_up_proj_bias[{expert}]"))
            for first, name in enumerate(("gate", "up"))
        },
        "experts.w_down": _EXPERTS + "down_proj[{expert}]",
        "experts.b_down": _EXPERTS + "down_proj_bias[{expert}]",
    }


def _from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    has_bias = bool(described["attention_bias"])
    fields: dict[str, Any] = {
        "qkv_bias": has_bias,
        "out_bias": has_bias,
        "num_experts": described["num_local_experts"],
        "num_experts_per_token": described["num_experts_per_tok"],
        "sliding_window": described["sliding_window"],
        "full_layers": full_layers_from_hf(described, lambda layer: layer % 2 == 1),
    }
    if not described.get("rope_parameters") and not described.get("rope_scaling"):
        fields |= rope_from_hf({**described, "rope_parameters": _ROPE}, head_dim=described["head_dim"])
    return fields


def _from_gguf(described: GgufDescription) -> dict[str, Any]:
    entries = described.entries
    return {
        "qkv_bias": True,
        "out_bias": True,
        **experts_from_gguf(entries),
        "sliding_window": entries["attention.sliding_window"],
        "full_layers": full_layers_from_gguf(entries, period=2),
    }


FAMILIES = (
    Family(
        name="gpt_oss",
        model_types=("gpt_oss",),
        architectures=("GptOssForCausalLM",),
        fields={"mlp": "swiglu_clipped", "mlp_bias": True, "router_bias": True, "has_sinks": True},
        hf_names=_hf_names,
        hf_stacked=_STACKED,
        stacks_inputs_first=True,
        hf_required={"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        hf_defaults=_DEFAULTS,
        hf_fields=_from_hf,
        gguf_architecture="gpt-oss",
        gguf_names=lambda config: _GGUF_NAMES,
        gguf_sizes={"truncates": False},
        gguf_fields=_from_gguf,
    ),
)
"""The families."""
