"""Which model families are served, and for the others the reason why not.

Not here: how a file's metadata becomes a `ModelConfig` (`gguf`, `huggingface`).
"""

from __future__ import annotations

from ca_jax.errors import UnsupportedArchitectureError

SERVED = ("llama",)
"""Model types, as Hugging Face's `model_type` and GGUF's `general.architecture` both spell them."""

_ABSOLUTE_POSITIONS = frozenset(
    ("bert", "biogpt", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt", "starcoder", "xglm")
)
"""Families that add a position embedding to the token embedding."""

_ALIBI = frozenset(("bloom", "mpt"))
"""Families that add a bias by distance to the attention scores (ALiBi, Press et al., 2022)."""


def require_served(model_type: str, where: str) -> None:
    """Refuses a model family that is not served, with the reason.

    Args:
      model_type: the family's name.
      where: what named it, for the message.

    Raises:
      UnsupportedArchitectureError: the family is not one of `SERVED`.
    """
    if model_type in SERVED:
        return
    if model_type in _ABSOLUTE_POSITIONS:
        reason = (
            "it embeds absolute positions into its input, so its stored KV carries the position it was computed at: "
            "such KV cannot be reused after truncation, nor kept unrotated and placed anew"
        )
    elif model_type in _ALIBI:
        reason = "its positions enter as a bias on the attention scores (ALiBi); only rotary embedding is served"
    else:
        reason = f"served are: {', '.join(SERVED)}"
    raise UnsupportedArchitectureError(f"{where}: architecture {model_type!r} is not served: {reason}")
