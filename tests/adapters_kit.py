"""A tiny model and LoRA adapters of it as PEFT writes them; and the same adapters merged into the model's checkpoint.

What an adapter adds is merged by numpy: `W + scaling B A`. The merged checkpoint is a model like any other, which
`transformers` computes, and this engine without adapters.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import ca_jax
from ca_jax.pretrained import LoadedModel
from ca_jax.testing import tiny
from tests import engine_kit as kit
from tests import families_kit

CONFIG = tiny.tiny_config(max_positions=kit.WINDOW)
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."
_SIZE = 0.5  # Of what an adapter adds, beside the weights.


@dataclasses.dataclass(frozen=True)
class Lora:
    """An adapter to be made."""

    seed: int
    rank: int = 4
    alpha: float = 12.0
    targets: tuple[str, ...] = ALL
    use_rslora: bool = False
    ranks: tuple[tuple[str, int], ...] = ()
    """`rank_pattern`."""
    alphas: tuple[tuple[str, float], ...] = ()
    """`alpha_pattern`."""

    def scaling(self, module: str, rank: int) -> float:
        """What is multiplied by, of a module that a pattern names by its last part."""
        alpha = dict(self.alphas).get(module.rpartition(".")[2], self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


FIRST = Lora(1)
SECOND = Lora(2, rank=3, targets=("q_proj", "v_proj", "down_proj"), use_rslora=True)
PATTERNED = Lora(3, targets=("k_proj", "o_proj"), ranks=(("o_proj", 2),), alphas=(("k_proj", 5.0),))


@functools.cache
def base_params() -> dict[str, Any]:
    """Of a model whose likeliest token is a printable one. Its numbers are bfloat16's, which a CPU packs."""
    params = tiny.tiny_params(CONFIG, seed=1)
    params["params"]["head"]["kernel"][:, [i for i in range(256) if not 0x20 <= i < 0x7F]] = 0.0
    return _each(params, lambda leaf: leaf.astype(ml_dtypes.bfloat16).astype(np.float32))


def _each(tree: dict[str, Any], change: Any) -> dict[str, Any]:
    return {name: _each(part, change) if isinstance(part, dict) else change(part) for name, part in tree.items()}


def tensors_of(lora: Lora, base: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """An adapter's tensors by PEFT's names, for a model of these tensors; None: the tiny one."""
    rng, found = np.random.default_rng(lora.seed), {}
    for name, weight in (merged_tensors(None) if base is None else base).items():
        module = name.removesuffix(".weight")
        target = module.rpartition(".")[2]
        if target not in lora.targets:
            continue
        rank = dict(lora.ranks).get(target, lora.rank)
        outputs, inputs = weight.shape
        a, b = rng.standard_normal((rank, inputs)), rng.standard_normal((outputs, rank))
        size = _SIZE / (math.sqrt(inputs * rank) * lora.scaling(module, rank))
        found[f"{PREFIX}{module}.lora_A.weight"] = a.astype(np.float32)
        found[f"{PREFIX}{module}.lora_B.weight"] = (b * size).astype(np.float32)
    return found


def described(lora: Lora, **changes: Any) -> dict[str, Any]:
    """What PEFT 0.18 writes into adapter_config.json, with the changes."""
    plain = dict.fromkeys(
        (
            *("alora_invocation_tokens", "arrow_config", "auto_mapping", "corda_config", "eva_config"),
            *("exclude_modules", "layer_replication", "layers_pattern", "layers_to_transform", "megatron_config"),
            *("modules_to_save", "revision", "target_parameters", "trainable_token_indices"),
        )
    )
    off = dict.fromkeys(("ensure_weight_tying", "fan_in_fan_out", "lora_bias", "use_dora", "use_qalora"), False)
    return {
        **plain,
        **off,
        "alpha_pattern": dict(lora.alphas),
        "base_model_name_or_path": "somebody/tiny",
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "loftq_config": {},
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.05,
        "megatron_core": "megatron.core",
        "peft_type": "LORA",
        "peft_version": "0.18.0",
        "qalora_group_size": 16,
        "r": lora.rank,
        "rank_pattern": dict(lora.ranks),
        "target_modules": list(lora.targets),
        "task_type": "CAUSAL_LM",
        "use_rslora": lora.use_rslora,
        **changes,
    }


def write(directory: Path, lora: Lora, tensors: dict[str, np.ndarray] | None = None, **changes: Any) -> Path:
    """Writes an adapter's directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(described(lora, **changes)))
    safetensors.numpy.save_file(
        tensors_of(lora) if tensors is None else tensors, directory / "adapter_model.safetensors"
    )
    return directory


@functools.cache
def written(lora: Lora) -> Path:
    """A directory with an adapter, for as long as the process lives."""
    return write(Path(tempfile.mkdtemp(prefix="adapter-")), lora)


def merged_tensors(lora: Lora | None, base: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """A model's tensors with an adapter in them; None: the tiny one's."""
    tensors = dict(tiny.hf_tensors(CONFIG, base_params()) if base is None else base)
    if lora is None:
        return tensors
    parts = tensors_of(lora, tensors)
    for name in [name for name in parts if name.endswith("lora_A.weight")]:
        module, a = name.removeprefix(PREFIX).removesuffix(".lora_A.weight"), parts[name]
        b = parts[name.replace("lora_A", "lora_B")]
        weight = tensors[f"{module}.weight"].astype(np.float64)
        tensors[f"{module}.weight"] = (weight + lora.scaling(module, len(a)) * (b.astype(np.float64) @ a)).astype(
            np.float32
        )
    return tensors


def _write_model(directory: str, lora: Lora | None) -> None:
    tiny.write_tiny_hf(directory, CONFIG, base_params())
    tensors = merged_tensors(lora)
    safetensors.numpy.save_file(tensors, Path(directory) / "model.safetensors", metadata={"format": "pt"})


@functools.cache
def model_of(lora: Lora | None) -> LoadedModel:
    """The model with an adapter in it, or without."""
    with tempfile.TemporaryDirectory() as directory:
        _write_model(directory, lora)
        return ca_jax.load_model(directory, dtype="float32")


@functools.cache
def pair_of(lora: Lora | None) -> families_kit.Pair:
    """The same, and as `transformers` has it."""
    transformers = pytest.importorskip("transformers")
    with tempfile.TemporaryDirectory() as directory:
        _write_model(directory, lora)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    return families_kit.Pair(model_of(lora), theirs)


def engine_of(*loras: Lora, **changes: Any) -> ca_jax.Engine:
    """An engine of the model with these adapters, which are called a, b, c."""
    engine = kit.small_engine(model_of(None), **{"max_adapters": 3, "max_adapter_rank": 6, **changes})
    for name, lora in zip("abc", loras, strict=False):
        engine.load_adapter(name, written(lora))
    return engine


def say_alone(lora: Lora | None, turns: Sequence[tuple[list[int], int]], **changes: Any) -> list[list[int]]:
    """The answers of the model with an adapter merged into it, served by an engine that knows of none."""
    with kit.small_engine(model_of(lora), **changes) as engine:
        session = engine.session()
        return [kit.say(session, prompt, max_tokens) for prompt, max_tokens in turns]
