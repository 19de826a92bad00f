"""What a model family is: how files that others wrote of it are understood.

Everything that is computed follows from `ModelConfig`; a family says how to get one from a file's description, and
under which names the file holds the leaves of the parameter tree.

Not here: the families themselves, what most files say alike (`from_hf`, `from_gguf`, `names`), opening files of either
format (`huggingface`, `gguf`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ca_jax.errors import check
from ca_jax.models.config import ModelConfig
from ca_jax.models.families.from_gguf import GgufDescription, require_gguf, sizes_from_gguf
from ca_jax.models.families.from_hf import require, sizes_from_hf
from ca_jax.models.families.names import Names

_MOST_LAYERS = 10_000  # What says more is damaged: something is made of each layer before any weight is looked for.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One model family. Of a config it gives what is not as in `sizes_from_hf` and `sizes_from_gguf`.

    What `hf_fields` and `gguf_fields` raise: KeyError, TypeError and ValueError where a file describes no model,
    UnsupportedArchitectureError where something about it is not served.
    """

    name: str
    """`ModelConfig.architecture`."""
    model_types: tuple[str, ...]
    """What Hugging Face's `model_type` calls it."""
    architectures: tuple[str, ...]
    """What Hugging Face's `architectures` calls it with a language model's head, the usual one first."""
    multimodal_type: str | None = None
    """Hugging Face's `model_type` of models that read images too and whose text model is of this family."""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of `ModelConfig` that are the same for all of its models."""
    drafts_behind: bool = False
    """Whether files may hold layers behind the last one, with which others draft tokens; they are left out."""
    hf_names: Callable[[ModelConfig], Names]
    """Names in safetensors files."""
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Ends of names in safetensors files that hold nothing but what the config says."""
    hf_stacked: tuple[str, ...] = ()
    """Ends of names in safetensors files of tensors that hold all experts' matrices or biases, `[E, ...]`. `hf_names`
    calls those of one expert `name[{expert}]`, and there matrices are `[out, in]` as usual."""
    stacks_inputs_first: bool = False
    """Whether matrices in these are `[in, out]`, where they are not quantised."""
    hf_required: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Entries of a config.json that must be so, where they are there."""
    hf_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Entries of a config.json, where they are not there."""
    hf_sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of `sizes_from_hf`: what its config.json calls otherwise, and its defaults."""
    hf_fields: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda described: {}
    """Further fields of `ModelConfig`, from the contents of a config.json."""
    gguf_architecture: str | None = None
    """What GGUF's `general.architecture` calls it; several families may go by one name. None: none is read."""
    is_gguf: Callable[[Mapping[str, Any]], bool] = lambda entries: True
    """Tells the family from others of that name, by the metadata's entries."""
    gguf_names: Callable[[ModelConfig], Names] = lambda config: {}
    """Names in GGUF files."""
    gguf_is_interleaved: bool = False
    """Whether rows of Q and K in GGUF files are in interleaved rotary order (pairs 2j, 2j+1), and not in half-split
    order (pairs j, j + H/2), in which the model rotates."""
    gguf_required: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Entries of the metadata that must be so, where they are there."""
    gguf_sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of `sizes_from_gguf`."""
    gguf_fields: Callable[[GgufDescription], dict[str, Any]] = lambda described: {}
    """Further fields of `ModelConfig`, from a GGUF file."""

    def config_from_hf(self, described: Mapping[str, Any]) -> ModelConfig:
        """The config that the contents of a config.json describe; raises as the class says."""
        described = {**self.hf_defaults, **described}
        require(described, self.hf_required)
        _check_layers("num_hidden_layers", described)
        sizes, own = sizes_from_hf(described, **self.hf_sizes), self.hf_fields(described)
        return ModelConfig(**{"architecture": self.name, **sizes, **self.fields, **own})

    def config_from_gguf(self, described: GgufDescription) -> ModelConfig:
        """The config that a GGUF file of this family describes; raises as the class says."""
        require_gguf(described, self.gguf_required)
        _check_layers("block_count", described.entries)
        sizes, own = sizes_from_gguf(described, **self.gguf_sizes), self.gguf_fields(described)
        return ModelConfig(**{"architecture": self.name, **sizes, **self.fields, **own})


def _check_layers(key: str, described: Mapping[str, Any]) -> None:
    num_layers = described.get(key, 0)
    check(num_layers <= _MOST_LAYERS, key, f"at most {_MOST_LAYERS}", num_layers)
