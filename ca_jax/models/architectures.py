"""Why model families that are not served are refused.

Not here: which are served (`families`), how a file's metadata becomes a `ModelConfig` (`gguf`, `huggingface`).
"""

from __future__ import annotations

from collections.abc import Collection

from ca_jax.errors import UnsupportedArchitectureError

_ABSOLUTE_POSITIONS = frozenset(
    ("bert", "biogpt", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt", "roberta", "starcoder", "xglm")
)
"""Families that add a position embedding to the token embedding."""

_ALIBI = frozenset(("bloom", "jais", "mpt", "refact"))
"""Families that add a bias by distance to the attention scores (ALiBi, Press et al., 2022)."""


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
    if model_type in _ABSOLUTE_POSITIONS:
        reason = (
            "it embeds absolute positions into its input, so its stored KV carries the position it was computed at: "
            "such KV cannot be reused after truncation, nor kept unrotated and placed anew"
        )
    elif model_type in _ALIBI:
        reason = "its positions enter as a bias on the attention scores (ALiBi); only rotary embedding is served"
    else:
        reason = f"served are: {', '.join(sorted(served))}"
    raise UnsupportedArchitectureError(f"{where}: architecture {model_type!r} is not served: {reason}")
