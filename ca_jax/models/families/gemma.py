"""Gemma 2 and Gemma 3: norms before and behind attention and feed-forward, of which each scale is stored less 1.

Both scale embeddings by the square root of their width and gate by GELU. Gemma 2 slides a window over every second
layer and caps scores and logits. Gemma 3 caps neither, norms each head of queries and keys, and slides over five layers
of six, which have a rotary embedding of their own. Of models that read images too, the text model is served.

Source: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size" (2024), "Gemma 3 Technical Report"
(2025).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ca_jax.errors import UnsupportedArchitectureError
from ca_jax.models.config import RopeConfig
from ca_jax.models.families.family import Family
from ca_jax.models.families.from_gguf import GgufDescription, full_layers_from_gguf
from ca_jax.models.families.from_hf import full_layers_from_hf, rope_from_hf
from ca_jax.models.families.llama import HF_NAMES, LAYER
from ca_jax.models.families.names import GGUF_NAMES, module_names

GEMMA_NAMES = HF_NAMES | {
    **module_names("attn_post_norm.scale", LAYER + "post_attention_layernorm"),
    **module_names("mlp_norm.scale", LAYER + "pre_feedforward_layernorm"),
    **module_names("mlp_post_norm.scale", LAYER + "post_feedforward_layernorm"),
}
"""Names in safetensors files of what models of these families have."""
_LOCAL_THETA = 1e4
_DEFAULTS = {
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256},
    **{"sliding_window": 4096, "tie_word_embeddings": True, "final_logit_softcapping": None},
}
_DEFAULTS2 = {
    **_DEFAULTS,
    **{"vocab_size": 256000, "max_position_embeddings": 8192, "sliding_window_pattern": 2},
    **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
}
_DEFAULTS3 = {
    **_DEFAULTS,
    **{"vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6},
    **{"rope_theta": 1e6, "rope_local_base_freq": _LOCAL_THETA},
}


def _from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    if described.get("use_bidirectional_attention"):
        raise UnsupportedArchitectureError(
            "config.json: use_bidirectional_attention=True is not served; tokens must see none behind them"
        )
    has_bias, period = bool(described.get("attention_bias", False)), described["sliding_window_pattern"]
    return {
        "norm_offset": 1.0,
        "embed_scale": math.sqrt(described["hidden_size"]),
        "attention_scale": _scale(described["query_pre_attn_scalar"], described["head_dim"]),
        "score_cap": described.get("attn_logit_softcapping"),
        "logit_cap": described["final_logit_softcapping"],
        "qkv_bias": has_bias,
        "out_bias": has_bias,
        "sliding_window": described["sliding_window"],
        "full_layers": full_layers_from_hf(described, lambda layer: (layer + 1) % period == 0),
    }


def _scale(width: int, head_dim: int) -> float | None:
    """What scores are multiplied by; None where that is the usual."""
    return None if width == head_dim else width**-0.5


def _gemma3_from_hf(described: Mapping[str, Any]) -> dict[str, Any]:
    said = (described.get("rope_parameters") or {}).get("sliding_attention") or {}
    local = {"rope_theta": described["rope_local_base_freq"], **said}
    of_local = {**described, "rope_scaling": None, "rope_parameters": local}
    return {**_from_hf(described), "local_rope": rope_from_hf(of_local, head_dim=described["head_dim"])["rope"]}


def _from_gguf(described: GgufDescription, period: int, num_layers_27b: int) -> dict[str, Any]:
    """What files say alike of both. They do not say what scores are multiplied by: models of 27B have it otherwise."""
    entries, window = described.entries, described.entries.get("attention.sliding_window") or None
    embed_dim, head_dim = entries["embedding_length"], entries["attention.key_length"]
    is_27b = entries["block_count"] == num_layers_27b
    return {
        "embed_scale": math.sqrt(embed_dim),
        "attention_scale": _scale(embed_dim // entries["attention.head_count"], head_dim) if is_27b else None,
        "sliding_window": window,
        "full_layers": full_layers_from_gguf(entries, period) if window else (),
    }


def _gemma2_from_gguf(described: GgufDescription) -> dict[str, Any]:
    entries = {"attention.sliding_window": 4096, **described.entries}
    return {
        **_from_gguf(dataclasses.replace(described, entries=entries), period=2, num_layers_27b=46),
        "score_cap": entries.get("attn_logit_softcapping", 50.0),
        "logit_cap": entries.get("final_logit_softcapping", 30.0),
    }


def _gemma3_from_gguf(described: GgufDescription) -> dict[str, Any]:
    fields = _from_gguf(described, period=6, num_layers_27b=62)
    local = RopeConfig(theta=described.entries.get("rope.freq_base_swa", _LOCAL_THETA))
    return {
        **fields,
        "local_rope": local if fields["sliding_window"] else None,
        "logit_cap": described.entries.get("final_logit_softcapping"),
    }


def _family(name: str, architecture: str, fields: Mapping[str, Any], **differences: Any) -> Family:
    return Family(
        name=name,
        architectures=(architecture,),
        fields={"norms_behind": True, "mlp": "geglu_tanh", **fields},
        hf_names=lambda config: GEMMA_NAMES,
        gguf_architecture=name,
        gguf_names=lambda config: GGUF_NAMES,
        **differences,
    )


_REQUIRED = {"hidden_activation": "gelu_pytorch_tanh"}

FAMILIES = (
    _family(
        "gemma2",
        "Gemma2ForCausalLM",
        fields={},
        model_types=("gemma2",),
        hf_required=_REQUIRED,
        hf_defaults=_DEFAULTS2,
        hf_fields=_from_hf,
        gguf_fields=_gemma2_from_gguf,
    ),
    _family(
        "gemma3",
        "Gemma3ForCausalLM",
        fields={"qk_norm": True},
        model_types=("gemma3_text",),
        multimodal_type="gemma3",
        hf_required=_REQUIRED | {"attn_logit_softcapping": None},
        hf_defaults=_DEFAULTS3,
        hf_fields=_gemma3_from_hf,
        gguf_fields=_gemma3_from_gguf,
    ),
)
"""The families."""
