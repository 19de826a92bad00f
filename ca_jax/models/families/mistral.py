"""Mistral: Llama with a sliding window in every layer, in the releases that say so.

Source: Jiang et al., "Mistral 7B" (2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ca_jax.models.config import ModelConfig
from ca_jax.models.families import llama
from ca_jax.models.families.family import Family, Names
from ca_jax.models.families.gguf_entries import GgufDescription, sizes_from_gguf


def _config_from_hf(described: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(
        architecture="mistral",
        sliding_window=described.get("sliding_window"),
        **llama.sizes_from_hf(described),
    )


def _config_from_gguf(described: GgufDescription) -> ModelConfig | None:
    window = described.entries.get("attention.sliding_window")
    if described.entries.get("expert_count") or not window:
        return None
    return ModelConfig(architecture="mistral", sliding_window=window, **sizes_from_gguf(described))


def _hf_names(config: ModelConfig) -> Names:
    return llama.HF_NAMES


FAMILY = Family(
    name="mistral",
    model_types=("mistral",),
    architectures=("MistralForCausalLM",),
    config_from_hf=_config_from_hf,
    hf_names=_hf_names,
    ignored=("rotary_emb.inv_freq",),
    gguf_architectures=("llama",),
    config_from_gguf=_config_from_gguf,
    gguf_names=llama.gguf_names,
    gguf_is_interleaved=True,
)
"""The family."""
