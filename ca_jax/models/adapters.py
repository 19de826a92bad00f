"""LoRA adapters: reading them as PEFT writes them, and where their matrices lie beside a model's own.

An adapter adds `scaling x A B` to the product of `x` with a matrix of the model. Each matrix has room for several of
them, all padded to one rank, and a token takes part in one of them or in none:

    x [T, F]   A [F, n, r]        x A [T, n, r]   times 1 at the token's own slot of n, else 0
               B [n, r, O]        and that times B, added to x W [T, O]

What is scaled is B. Slots without an adapter are zeros, and so is the sum that a token of none adds.

Not here: the arrays on the device (device.adapters), which adapters are loaded (serving.adapters).
Source: Hu et al., "LoRA" (2021); several in one batch: Sheng et al., "S-LoRA" (2023); files: PEFT's `LoraConfig`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from ca_jax.errors import AdapterError, CaJaxError, UnsupportedArchitectureError
from ca_jax.models.config import ModelConfig
from ca_jax.models.families import FAMILIES
from ca_jax.models.huggingface import read_json, read_plain_tensors
from ca_jax.models.sharding import Axes
from ca_jax.models.weights import Slot, parameter_slots

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
TARGETS = ("attn.wq", "attn.wk", "attn.wv", "attn.wo", "mlp.w_gate", "mlp.w_up", "mlp.w_down")
"""Matrices that an adapter may add to, as `Slot.key`."""

_PREFIX = "base_model.model."  # Of the names of tensors, before the base model's own.
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
_SERVED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": _NOTHING,
    "modules_to_save": _NOTHING,
    "bias": ("none", *_NOTHING),
    "lora_bias": _NOTHING,
    "fan_in_fan_out": _NOTHING,
    # Others change the base model's weights too, or leave them to be computed.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", *_NOTHING),
    "task_type": ("CAUSAL_LM", *_NOTHING),
}
"""Fields of an adapter's config, and what they may be."""
_READ = ("r", "lora_alpha", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern", "layers_to_transform")
_UNREAD = (
    *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "lora_dropout"),
    *("exclude_modules", "layers_pattern", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("megatron_core", "qalora_group_size", "runtime_config", "ensure_weight_tying"),
)
"""Fields that say nothing of what an adapter computes, but for how it was trained."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """An adapter as read, on the host."""

    name: str
    """What to call it."""
    path: str
    """Where it was read from."""
    rank: int
    """The largest of its matrices'."""
    fingerprint: str
    """Hex SHA-256 of its weights and their scaling: part of the key of KV that was computed with it."""
    matrices: Mapping[tuple[str, ...], tuple[np.ndarray, np.ndarray]]
    """By `Slot.path` A `[inputs, r]` and B `[r, outputs]`, f32, B scaled."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A matrix of the model that adapters may add to, and the arrays beside it."""

    slot: Slot
    """The matrix."""
    module: str
    """Its name in the adapter's files, without the prefix: `model.layers.0.self_attn.q_proj`."""

    @property
    def target(self) -> str:
        """The last part of that: `q_proj`."""
        return self.module.rpartition(".")[2]

    @property
    def num_input_axes(self) -> int:
        """How many of the matrix's axes are inputs."""
        return self.slot.num_inputs or 0

    def arrays(self, num_slots: int, rank: int) -> tuple[tuple[tuple[int, ...], Axes], tuple[tuple[int, ...], Axes]]:
        """Shape and names of axes of A and of B."""
        split, (shape, axes) = self.num_input_axes, (self.slot.shape, self.slot.axes)
        a = (*shape[:split], num_slots, rank), (*axes[:split], None, None)
        return a, ((num_slots, rank, *shape[split:]), (None, None, *axes[split:]))


@functools.cache
def places_of(config: ModelConfig) -> tuple[Place, ...]:
    """The matrices of a model that adapters may add to, in the order of its parameters.

    Raises:
      UnsupportedArchitectureError: the family's files hold several of them in one, or it has experts, latents or
        states.
    """
    names, found = FAMILIES[config.architecture].hf_names(config), []
    parts = {"latent attention": config.latent_dim, "experts": config.num_experts, "states": config.num_states}
    why = next((part for part, count in parts.items() if count), "")
    for slot in parameter_slots(config):
        name = names[slot.key] if slot.key in TARGETS else None
        if name is not None and not isinstance(name, str):
            why = why or f"{slot.key} among the rows of {name.name}"
        elif name is not None:
            found.append(Place(slot, name.format(layer=slot.layer).removesuffix(".weight")))
    if why:
        raise UnsupportedArchitectureError(
            f"max_adapters must be 0 with family {config.architecture}, whose models here have {why}: adapters are "
            "served for families whose files have a matrix each for queries, keys, values, outputs and the "
            "feed-forward block"
        )
    return tuple(found)


def read_adapter(path: str | Path, name: str, config: ModelConfig) -> Adapter:
    """Reads an adapter from a directory as PEFT writes it. Blocks.

    Args:
      path: the directory.
      name: what to call it.
      config: of the model that it is for.

    Raises:
      AdapterError: a file is missing or damaged, or says what is not served (it names the field), or a tensor is
        missing, unknown, or of another model's shape.
    """
    try:
        return _read_adapter(Path(path), name, config)
    except CaJaxError:
        raise
    except (ArithmeticError, AttributeError, TypeError, ValueError, re.error) as error:
        raise AdapterError(f"{path}: its files describe no adapter: {type(error).__name__}: {error}") from error


def _read_adapter(directory: Path, name: str, config: ModelConfig) -> Adapter:
    described, tensors = _described(directory / CONFIG_FILE), _tensors(directory / WEIGHTS_FILE)
    places = _targeted(directory / CONFIG_FILE, described, places_of(config))
    may_lack = bool(described.get("exclude_modules"))
    matrices: dict[tuple[str, ...], tuple[np.ndarray, np.ndarray]] = {}
    digest, largest = hashlib.sha256(), 1
    for place in places:
        wide, module = place.slot.stored_shape, place.module
        names = [f"{_PREFIX}{module}.lora_{part}.weight" for part in "AB"]
        if may_lack and not any(each in tensors for each in names):
            continue
        rank = _of_module("rank_pattern", described, module, "r")
        a, b = (
            _taken(directory / WEIGHTS_FILE, tensors, each, shape)
            for each, shape in zip(names, [(rank, wide[1]), (wide[0], rank)], strict=True)
        )
        scaling = _of_module("alpha_pattern", described, module, "lora_alpha") / (
            math.sqrt(rank) if described.get("use_rslora") else rank
        )
        digest.update(f"{'.'.join(place.slot.path)} {rank} {scaling!r}\n".encode())
        digest.update(a.tobytes())
        digest.update(b.tobytes())
        matrices[place.slot.path] = a.T, (b * np.float32(scaling)).T
        largest = max(largest, rank)
    if tensors:
        shown = ", ".join(sorted(tensors)[:5]) + (", ..." if len(tensors) > 5 else "")
        raise AdapterError(f"{directory / WEIGHTS_FILE}: {len(tensors)} tensors belong to no target module: {shown}")
    return Adapter(name=name, path=str(directory), rank=largest, fingerprint=digest.hexdigest(), matrices=matrices)


def _described(path: Path) -> dict[str, Any]:
    """What an adapter's config says, once it says nothing that is not served."""
    found = read_json(path, error=AdapterError)
    for field, value in {"peft_type": None, **found}.items():
        wanted = _SERVED.get(field, _NOTHING)
        if field not in (*_READ, *_UNREAD) and value not in wanted:
            must = " or ".join(json.dumps(each) for each in wanted if each not in _NOTHING) or "left out"
            raise AdapterError(f"{path}: {field} must be {must}, got {json.dumps(value)}: it is not served")
    for field, kind in (("r", int), ("lora_alpha", (int, float))):
        value = found.get(field)
        if not isinstance(value, kind) or isinstance(value, bool) or not value > 0:
            raise AdapterError(f"{path}: {field} must be a number above 0, got {value!r}")
    for field in ("rank_pattern", "alpha_pattern"):
        pattern = found.get(field) or {}
        if not isinstance(pattern, dict) or not all(isinstance(each, (int, float)) for each in pattern.values()):
            raise AdapterError(f"{path}: {field} must be numbers by the names of modules, got {pattern!r}")
    return found


def _targeted(path: Path, described: Mapping[str, Any], places: tuple[Place, ...]) -> list[Place]:
    """The matrices that an adapter's config names.

    Raises:
      AdapterError: it names others, or not all layers.
    """
    targets, known = described.get("target_modules"), {place.target: None for place in places}
    if not isinstance(targets, list) or not targets:
        raise AdapterError(f"{path}: target_modules must be a list of names, got {targets!r}")
    chosen = [place for place in places if any(_names(target, place.module) for target in targets)]
    unknown = [each for each in targets if not any(_names(each, place.module) for place in places)]
    if unknown:
        raise AdapterError(f"{path}: target_modules must be among {', '.join(known)}, got {', '.join(unknown)}")
    layers, num_layers = described.get("layers_to_transform"), 1 + max(place.slot.layer or 0 for place in places)
    if layers is not None and sorted(layers if isinstance(layers, list) else [layers]) != list(range(num_layers)):
        raise AdapterError(f"{path}: layers_to_transform must be all {num_layers} layers or left out, got {layers}")
    return chosen


def _names(target: str, module: str) -> bool:
    """Whether a name among target modules means a module: its own, or the end of it."""
    return module == target or module.endswith(f".{target}")


def _of_module(pattern: str, described: Mapping[str, Any], module: str, default: str) -> Any:
    """What a pattern says of a module, by the first of its expressions that is a name of it; else the default."""
    found = (described.get(pattern) or {}).items()
    return next((value for key, value in found if re.match(rf"(.*\.)?({key})$", module)), described[default])


def _tensors(path: Path) -> dict[str, np.ndarray]:
    try:
        return dict(read_plain_tensors(path))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise AdapterError(f"{path}: {error}") from error


def _taken(path: Path, tensors: dict[str, np.ndarray], name: str, shape: tuple[int, int]) -> np.ndarray:
    """Takes a tensor out of those of a file, as f32."""
    if name not in tensors:
        raise AdapterError(f"{path}: tensor {name} is missing; its shape must be {shape}")
    found = tensors.pop(name)
    if found.shape != shape:
        raise AdapterError(f"{path}: tensor {name}: the shape must be {shape}, got {found.shape}")
    return np.array(found, np.float32, order="C")  # A copy: the file may be replaced.
