"""What a model family is: how files that others wrote of it are understood.

Everything that is computed is said by `ModelConfig`; a family says how to get one from a file's description, and under
which names the file holds the leaves of the parameter tree.

Not here: the families themselves (a file each), file formats (`huggingface`, `gguf`), reading rope (`rope_entries`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ca_jax.errors import UnsupportedArchitectureError
from ca_jax.models.config import Mlp, ModelConfig

_GELUS: dict[str, Mlp] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclasses.dataclass(frozen=True)
class Fused:
    """Rows of a file's tensor that holds several leaves of the parameter tree."""

    name: str
    """The file's name, with `{layer}` where the layer's number goes."""
    num_rows: int
    """Rows of the whole tensor."""
    rows: np.ndarray
    """i64, which rows are the leaf's, in its order."""


Names = Mapping[str, str | Fused]
"""From `Slot.key` to where a file holds the leaf: in the tensor of that name, with `{layer}`, and `{expert}` where each
expert has one of its own; or in some rows of one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One model family."""

    name: str
    """`ModelConfig.architecture`."""
    model_types: tuple[str, ...]
    """What Hugging Face's `model_type` calls it."""
    architectures: tuple[str, ...]
    """What Hugging Face's `architectures` calls it with a language model's head, the usual one first."""
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    """The config that the contents of a config.json describe. KeyError, TypeError, ValueError: they describe none;
    UnsupportedArchitectureError: something about it is not served."""
    hf_names: Callable[[ModelConfig], Names]
    """Names in safetensors files."""
    ignored: tuple[str, ...] = ()
    """Ends of names in safetensors files that hold nothing but what the config says."""
    gguf_architectures: tuple[str, ...] = ()
    """What GGUF's `general.architecture` calls it; none: such files are not read."""
    gguf_names: Callable[[ModelConfig], Names] | None = None
    """Names in GGUF files."""


def require(described: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuses a config.json in which an entry is there and is not as wanted.

    Raises:
      UnsupportedArchitectureError: there is one; the message names it.
    """
    for key, value in wanted.items():
        if described.get(key, value) != value:
            raise UnsupportedArchitectureError(f"config.json: {key}={described[key]!r} is not served, wanted {value!r}")


def gelu_from_hf(described: Mapping[str, Any], key: str) -> Mlp:
    """Which GELU an ungated feed-forward has.

    Args:
      described: the contents of a config.json.
      key: the entry that says it.

    Raises:
      UnsupportedArchitectureError: it is none.
    """
    found = described.get(key, "gelu")
    if found not in _GELUS:
        raise UnsupportedArchitectureError(
            f"config.json: {key}={found!r} is not served, wanted one of {', '.join(_GELUS)}"
        )
    return _GELUS[found]
