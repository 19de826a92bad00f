"""What a model family is: how files that others wrote of it are understood.

Everything that is computed is said by `ModelConfig`; a family says how to get one from a file's description, and under
which names the file holds the leaves of the parameter tree.

Not here: the families themselves (a file each), file formats (`huggingface`, `gguf`), what files of a format say alike
(`rope_entries`, `gguf_entries`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ca_jax.errors import UnsupportedArchitectureError
from ca_jax.models.config import Mlp, ModelConfig
from ca_jax.models.families.gguf_entries import GgufDescription

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
    """What GGUF's `general.architecture` calls it; several families may go by one name."""
    config_from_gguf: Callable[[GgufDescription], ModelConfig | None] = lambda described: None
    """The config that a GGUF file of such an architecture describes; None: it describes another family. Raises as
    `config_from_hf` does."""
    gguf_names: Callable[[ModelConfig], Names] = lambda config: {}
    """Names in GGUF files."""
    gguf_is_interleaved: bool = False
    """Whether rows of Q and K in GGUF files are in interleaved rotary order (pairs 2j, 2j+1), and not in half-split
    order (pairs j, j + H/2), in which the model rotates."""


def split_rows(config: ModelConfig, name: str) -> dict[str, Fused]:
    """Queries, keys and values that lie one behind the other in the rows of one tensor, by the keys of their matrices.

    Args:
      config: the architecture.
      name: the file's, with `{layer}`.
    """
    sizes = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    stops = np.cumsum([size * config.head_dim for size in sizes.values()])
    parts = np.split(np.arange(stops[-1]), stops[:-1])
    return {part: Fused(name, int(stops[-1]), rows) for part, rows in zip(sizes, parts, strict=True)}


def require(described: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuses a config.json in which an entry is there and is not as wanted.

    Raises:
      UnsupportedArchitectureError: there is one; the message names it.
    """
    for key, value in wanted.items():
        if described.get(key, value) != value:
            raise UnsupportedArchitectureError(
                f"config.json: {key}={described[key]!r} is not served; it must be {value!r}"
            )


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
            f"config.json: {key}={found!r} is not served; it must be one of {', '.join(_GELUS)}"
        )
    return _GELUS[found]
