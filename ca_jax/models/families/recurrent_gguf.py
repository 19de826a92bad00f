"""What GGUF files say of the families most of whose layers keep a state.

Not here: the families, and what safetensors files say of them (`recurrent`); how numbers of such layers lie in GGUF
files (`gguf`).
Source: names and layouts are those of llama.cpp, whose converter wrote such files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ca_jax.errors import UnsupportedArchitectureError
from ca_jax.models.families.from_gguf import GgufDescription
from ca_jax.models.families.names import GGUF_NAMES, module_names
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
