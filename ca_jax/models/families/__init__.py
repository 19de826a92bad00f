"""The model families that are served: a row for each, and a file of its own.

Not here: which others are refused, and why (`architectures`).
"""

from __future__ import annotations

from ca_jax.models.families import falcon, gpt_neox, llama, mistral, mixtral, qwen2, qwen3
from ca_jax.models.families.family import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        llama.FAMILY,
        mistral.FAMILY,
        mixtral.FAMILY,
        qwen2.FAMILY,
        qwen3.FAMILY,
        falcon.FAMILY,
        gpt_neox.FAMILY,
    )
}
"""By `ModelConfig.architecture`."""

BY_MODEL_TYPE: dict[str, Family] = {
    model_type: family for family in FAMILIES.values() for model_type in family.model_types
}
"""By Hugging Face's `model_type`."""

BY_GGUF_ARCHITECTURE: dict[str, list[Family]] = {}
"""By GGUF's `general.architecture`, which some share."""
for _family in FAMILIES.values():
    for _architecture in _family.gguf_architectures:
        BY_GGUF_ARCHITECTURE.setdefault(_architecture, []).append(_family)
