"""The model families that are served, and why others are refused.

Each is a `Family`: in `llama`, where it is Llama with small differences, in `dense` or `experts`, where its config says
more, in `fused`, where one tensor holds several matrices, in `deepseek`, where layers keep latents, in `recurrent`,
where layers keep states, or in a module of its own.
"""

from __future__ import annotations

from collections.abc import Collection

from ca_jax.errors import UnsupportedArchitectureError
from ca_jax.models.families import deepseek, dense, experts, fused, gemma, gemma4, gpt_oss, llama, recurrent
from ca_jax.models.families.family import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for each in (llama, fused, gemma, gemma4, gpt_oss, dense, experts, deepseek, recurrent)
    for family in each.FAMILIES
}
"""By `ModelConfig.architecture`."""

BY_MODEL_TYPE: dict[str, Family] = {
    model_type: family for family in FAMILIES.values() for model_type in family.model_types
}
"""By Hugging Face's `model_type`."""

MULTIMODAL_TYPES: frozenset[str] = frozenset(
    family.multimodal_type for family in FAMILIES.values() if family.multimodal_type is not None
)
"""Hugging Face's `model_type` of models that read images too, and of which the text model is served."""

BY_GGUF_ARCHITECTURE: dict[str, list[Family]] = {
    architecture: [family for family in FAMILIES.values() if family.gguf_architecture == architecture]
    for architecture in {family.gguf_architecture for family in FAMILIES.values()}
    if architecture is not None
}
"""By GGUF's `general.architecture`, which some share."""

_ABSOLUTE_POSITIONS = frozenset(
    ("bert", "biogpt", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt", "roberta", "starcoder", "xglm")
)  # They add a position embedding to the token embedding.
_ALIBI = frozenset(("bloom", "jais", "mpt", "refact"))  # They add a bias by distance to scores (Press et al., 2022).


def require_served(model_type: str, where: str, served: Collection[str]) -> None:
    """Refuses a model family that is not served, with the reason.

    Args:
      model_type: the family's name.
      where: what named it, for the message.
      served: the names of those that are.

    Raises:
      UnsupportedArchitectureError: the family is not one of them.
    """
    if model_type in served:
        return
    reason = f"served are: {', '.join(sorted(served))}"
    if model_type in _ABSOLUTE_POSITIONS:
        reason = (
            "it embeds absolute positions into its input, so its stored KV carries the position it was computed at: "
            "such KV cannot be reused after truncation, nor kept unrotated and placed anew"
        )
    elif model_type in _ALIBI:
        reason = "its positions enter as a bias on the attention scores (ALiBi); only rotary embedding is served"
    raise UnsupportedArchitectureError(f"{where}: architecture {model_type!r} is not served: {reason}")
