"""What a model family is: how files that others wrote of it are understood.

Everything that is computed follows from `ModelConfig`; a family says how to get one from a file's description, and
under which names the file holds the leaves of the parameter tree.

Not here: the families themselves, opening files of either format (`huggingface`, `gguf`), what becomes of a rope
scaling (`rope`).
Source: the GGUF specification; names, layouts and defaults are those of llama.cpp, whose converter wrote such files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ca_jax.errors import UnsupportedArchitectureError, check
from ca_jax.models import rope
from ca_jax.models.config import Mlp, ModelConfig, RopeConfig

_GELUS: dict[str, Mlp] = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh"),
}
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


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
expert has one of its own; or in some rows of one. Names of parts that a model does not have are not looked at."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufDescription:
    """What a family is told of a GGUF file."""

    entries: Mapping[str, Any]
    """Metadata of the architecture, by keys without its name: `block_count`."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the tensors, by name, outermost first; `token_embd.weight` is there."""
    rope_factors: np.ndarray | None = None
    """What `rope_freqs.weight` holds: the divisor of each rotary frequency, f32 `[R/2]`; None: it is not there."""


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
    hf_names: Callable[[ModelConfig], Names]
    """Names in safetensors files."""
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Ends of names in safetensors files that hold nothing but what the config says."""
    hf_stacked: tuple[str, ...] = ()
    """Ends of names in safetensors files of tensors that hold all experts' matrices, `[E, in, out]`, or biases
    `[E, out]`. `hf_names` calls those of one expert `name[{expert}]`, and there matrices are `[out, in]` as usual."""
    hf_required: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Entries of a config.json that must be so, where they are there."""
    hf_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Entries of a config.json, where they are not there."""
    hf_sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of `sizes_from_hf`: what its config.json calls otherwise, and its defaults."""
    hf_fields: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda described: {}
    """Further fields of `ModelConfig`, from the contents of a config.json."""
    gguf_architecture: str
    """What GGUF's `general.architecture` calls it; several families may go by one name."""
    is_gguf: Callable[[Mapping[str, Any]], bool] = lambda entries: True
    """Tells the family from others of that name, by the metadata's entries."""
    gguf_names: Callable[[ModelConfig], Names]
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
        sizes, own = sizes_from_hf(described, **self.hf_sizes), self.hf_fields(described)
        return ModelConfig(**{"architecture": self.name, **sizes, **self.fields, **own})

    def config_from_gguf(self, described: GgufDescription) -> ModelConfig:
        """The config that a GGUF file of this family describes; raises as the class says."""
        require_gguf(described, self.gguf_required)
        sizes, own = sizes_from_gguf(described, **self.gguf_sizes), self.gguf_fields(described)
        return ModelConfig(**{"architecture": self.name, **sizes, **self.fields, **own})


def fused_rows(rows: Mapping[str, np.ndarray], names: Mapping[str, str]) -> dict[str, Fused]:
    """Queries, keys and values that are rows of one tensor, or of a weight and a bias.

    Args:
      rows: those of `q`, `k` and `v`.
      names: the file's names of the weight `w` and, if there is one, the bias `b`.
    """
    num_rows = sum(each.size for each in rows.values())
    return {
        f"attn.{kind}{part}": Fused(name, num_rows, each.reshape(-1))
        for part, each in rows.items()
        for kind, name in names.items()
    }


def split_rows(config: ModelConfig) -> dict[str, np.ndarray]:
    """The rows of queries, keys and values that lie one behind the other in one tensor."""
    stops = np.cumsum([config.num_heads, config.num_kv_heads, config.num_kv_heads]) * config.head_dim
    return dict(zip("qkv", np.split(np.arange(stops[-1]), stops[:-1]), strict=True))


# What a config.json says.


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
    """Which GELU an ungated feed-forward has, by the entry `key`.

    Raises:
      UnsupportedArchitectureError: it is none.
    """
    found = described.get(key, "gelu")
    if found not in _GELUS:
        raise UnsupportedArchitectureError(
            f"config.json: {key}={found!r} is not served; it must be one of {', '.join(_GELUS)}"
        )
    return _GELUS[found]


def sizes_from_hf(
    described: Mapping[str, Any],
    *,
    mlp_key: str | None = "intermediate_size",
    eps_key: str = "rms_norm_eps",
    norm_eps: float = 1e-6,
    head_dim: int | None = None,
    ties: bool = False,
    **rope: Any,
) -> dict[str, Any]:
    """The fields of `ModelConfig` that families spell alike in a config.json, but for what is said here.

    Args:
      described: the contents of a config.json.
      mlp_key: what the family calls the width of the feed-forward block; None: it is four times the residual stream's.
      eps_key: what it calls the number added inside its norms.
      norm_eps: that number, where nothing is said.
      head_dim: H, likewise; None: the heads share the residual stream's width.
      ties: whether the output head is the embedding table, where nothing is said.
      **rope: as `rope_from_hf` takes it.

    Raises:
      UnsupportedArchitectureError: a rope scaling that is not served, by name.
      KeyError, TypeError, ValueError: an entry is missing or no number.
    """
    embed_dim, num_heads = described["hidden_size"], described["num_attention_heads"]
    head_dim = described.get("head_dim", head_dim) or embed_dim // num_heads
    return {
        "vocab_size": described["vocab_size"],
        "embed_dim": embed_dim,
        "mlp_dim": 4 * embed_dim if mlp_key is None else described[mlp_key],
        "num_layers": described["num_hidden_layers"],
        "num_heads": num_heads,
        "num_kv_heads": described.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "norm_eps": described.get(eps_key, norm_eps),
        "tie_embeddings": described.get("tie_word_embeddings", ties),
        **rope_from_hf(described, head_dim=head_dim, **rope),
    }


def full_layers_from_hf(described: Mapping[str, Any], is_full: Callable[[int], bool]) -> list[int]:
    """The layers that do not slide, of a model in which others do.

    Args:
      described: the contents of a config.json.
      is_full: whether a layer is one, where `layer_types` is not there to say so.

    Raises:
      ValueError: `layer_types` is not of the model's layers.
      UnsupportedArchitectureError: a type of layer that is not served.
    """
    num_layers, types = described["num_hidden_layers"], described.get("layer_types")
    if types is None:
        return [layer for layer in range(num_layers) if is_full(layer)]
    check(len(types) == num_layers, "layer_types", f"as many as the {num_layers} layers", len(types))
    if unknown := sorted({*types} - {"sliding_attention", "full_attention"}):
        raise UnsupportedArchitectureError(
            f"config.json: layer_types {', '.join(unknown)} not served; they must be sliding_attention "
            "or full_attention"
        )
    return [layer for layer, each in enumerate(types) if each == "full_attention"]


def rope_from_hf(
    described: Mapping[str, Any],
    *,
    head_dim: int,
    theta: float = 10000.0,
    theta_key: str = "rope_theta",
    partial_key: str = "partial_rotary_factor",
    partial: float = 1.0,
) -> dict[str, Any]:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Args:
      described: the contents of a config.json.
      head_dim: of the model.
      theta: the family's, where nothing is said.
      theta_key: what the family calls it outside `rope_parameters`.
      partial_key: what the family calls the share of a head that is rotated.
      partial: that share, where nothing is said.

    Returns:
      `rope` and `max_positions`, fields of `ModelConfig`: with `dynamic` scaling the context is as long as it can be
      stretched to.

    Raises:
      UnsupportedArchitectureError: a scaling that is not served, by name.
      KeyError, TypeError, ValueError: an entry is missing or no number.
    """
    parameters = {"rope_theta": described.get(theta_key, theta)}
    parameters |= described.get("rope_scaling") or {}
    of_all = described.get("rope_parameters") or {}
    parameters |= of_all.get("full_attention", of_all)  # Some files say it for each type of layer.
    rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", described.get(partial_key, partial)))
    fields: dict[str, Any] = {
        "theta": float(parameters["rope_theta"]),
        "rotary_dim": None if rotary_dim == head_dim else rotary_dim,
    }
    scaling = parameters.get("rope_type", parameters.get("type", "default"))
    if scaling not in _ROPE_TYPES:
        raise UnsupportedArchitectureError(
            f"config.json: rope scaling {scaling!r} is not served; it must be one of {', '.join(_ROPE_TYPES)}"
        )
    max_positions = described.get("max_position_embeddings", 2048)
    if scaling != "default":
        fields |= {"scaling": scaling, "factor": float(parameters["factor"])}
    if scaling == "llama3":
        fields |= {
            "low_freq_factor": float(parameters["low_freq_factor"]),
            "high_freq_factor": float(parameters["high_freq_factor"]),
            "original_max_positions": parameters["original_max_position_embeddings"],
        }
    elif scaling == "dynamic":
        fields["original_max_positions"] = max_positions
        max_positions = int(max_positions * fields["factor"])
    elif scaling == "yarn":
        fields |= {
            "original_max_positions": parameters.get("original_max_position_embeddings") or max_positions,
            "beta_fast": float(parameters.get("beta_fast") or 32),
            "beta_slow": float(parameters.get("beta_slow") or 1),
            "truncate": bool(parameters.get("truncate", True)),
            "attention_factor": _yarn_attention_factor(parameters),
        }
    return {"rope": RopeConfig(**fields), "max_positions": max_positions}


def _yarn_attention_factor(parameters: Mapping[str, Any]) -> float:
    """What YaRN multiplies queries and keys by (Peng et al., 2023, section 3.4), unless it is given."""
    given, factor = parameters.get("attention_factor"), float(parameters["factor"])
    if given is not None:
        return float(given)

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(float(mscale)) / scale(float(all_dims)) if mscale and all_dims else scale(1.0)


# What a GGUF file says.


def module_names(weight: str, name: str) -> dict[str, str]:
    """A file's names of a module's weight and bias, by their keys in the parameter tree.

    Args:
      weight: the key of the weight: `attn.wq`, `attn_norm.scale`.
      name: the file's name of the module.
    """
    bias = weight.replace(".scale", ".bias").replace(".w", ".b")
    return {weight: f"{name}.weight", bias: f"{name}.bias"}


_LAYER = "blk.{layer}."
GGUF_NAMES: dict[str, Any] = {
    "embed.embedding": "token_embd.weight",
    **module_names("attn_norm.scale", _LAYER + "attn_norm"),
    **module_names("attn.wq", _LAYER + "attn_q"),
    **module_names("attn.wk", _LAYER + "attn_k"),
    **module_names("attn.wv", _LAYER + "attn_v"),
    **module_names("attn.q_norm.scale", _LAYER + "attn_q_norm"),
    **module_names("attn.k_norm.scale", _LAYER + "attn_k_norm"),
    **module_names("attn.wo", _LAYER + "attn_output"),
    **module_names("mlp_norm.scale", _LAYER + "ffn_norm"),
    **module_names("mlp.w_gate", _LAYER + "ffn_gate"),
    **module_names("mlp.w_up", _LAYER + "ffn_up"),
    **module_names("mlp.w_down", _LAYER + "ffn_down"),
    **module_names("final_norm.scale", "output_norm"),
    "head.kernel": "output.weight",
}
"""Names of tensors, which all families share as far as they have the parts."""

_LLAMA3_ORIGINAL_POSITIONS = 8192  # Every Llama 3.x release; files rarely say.


def sizes_from_gguf(
    described: GgufDescription,
    *,
    eps_key: str = "layer_norm_rms_epsilon",
    may_rotate_part: bool = False,
    truncates: bool = True,
) -> dict[str, Any]:
    """The fields of `ModelConfig` that all families spell alike.

    Args:
      described: the file.
      eps_key: what the family calls the number added inside its norms.
      may_rotate_part: whether the family has models that rotate a part of each head.
      truncates: `RopeConfig.truncate` of its models, which files leave unsaid.

    Raises:
      KeyError: an entry is missing.
      UnsupportedArchitectureError: something about it is not served, by name.
    """
    entries, shapes = described.entries, described.shapes
    embed_dim, num_heads = entries["embedding_length"], entries["attention.head_count"]
    num_kv_heads, mlp_dim = entries.get("attention.head_count_kv", num_heads), entries["feed_forward_length"]
    for key, value in (("head_count", num_heads), ("head_count_kv", num_kv_heads), ("feed_forward_length", mlp_dim)):
        if isinstance(value, list):
            raise UnsupportedArchitectureError(f"a {key} of its own for each layer is not served")
    head_dim = entries.get("attention.key_length", embed_dim // num_heads)
    require_gguf(described, {"attention.value_length": head_dim}, why="the head dim")
    if not may_rotate_part:
        require_gguf(described, {"rope.dimension_count": head_dim}, why="the head dim")
    return {
        "vocab_size": int(shapes["token_embd.weight"][0]),
        "embed_dim": embed_dim,
        "mlp_dim": mlp_dim,
        "num_layers": entries["block_count"],
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_positions": entries["context_length"],
        "norm_eps": _shortest(entries[f"attention.{eps_key}"]),
        "tie_embeddings": "output.weight" not in shapes,
        "rope": _rope_from_gguf(described, head_dim, truncates),
    }


def full_layers_from_gguf(entries: Mapping[str, Any], period: int) -> list[int]:
    """The layers that do not slide, of a model in which others do.

    Args:
      entries: the metadata; it may say of each layer whether it slides, or of which period the last layers do not.
      period: that, where it says neither.
    """
    found = entries.get("attention.sliding_window_pattern", period)
    if isinstance(found, list):
        return [layer for layer, slides in enumerate(found) if not slides]
    return [layer for layer in range(entries["block_count"]) if found and (layer + 1) % found == 0]


def require_gguf(described: GgufDescription, wanted: Mapping[str, Any], why: str = "") -> None:
    """Refuses a file in which an entry is there and is not as wanted.

    Args:
      described: the file.
      wanted: values by key.
      why: what the wanted value is, for the message.

    Raises:
      UnsupportedArchitectureError: there is one; the message names it.
    """
    for key, value in wanted.items():
        found = described.entries.get(key, value)
        if found != value:
            raise UnsupportedArchitectureError(f"{key} {found} is not served; it must be {f'{why} {value}'.strip()}")


def _rope_from_gguf(described: GgufDescription, head_dim: int, truncates: bool) -> RopeConfig:
    entries = described.entries
    rotary_dim = entries.get("rope.dimension_count", head_dim)
    plain = RopeConfig(
        theta=_shortest(entries.get("rope.freq_base", 10000.0)),
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
    )
    scaling, factor = entries.get("rope.scaling.type", "none"), entries.get("rope.scaling.factor", 1.0)
    if "rope.scale_linear" in entries:
        scaling, factor = "linear", entries["rope.scale_linear"]
    factor = _shortest(factor)
    if described.rope_factors is not None:
        if scaling != "none":
            raise UnsupportedArchitectureError(f"rope scaling {scaling!r} with rope_freqs.weight is not served")
        return _llama3_rope(described, described.rope_factors, plain, head_dim)
    if scaling == "none":
        return plain
    if scaling == "linear":
        return dataclasses.replace(plain, scaling="linear", factor=factor)
    if scaling != "yarn":
        raise UnsupportedArchitectureError(
            f"rope scaling {scaling!r} is not served; it must be one of none, linear, yarn, or llama3 as "
            "rope_freqs.weight"
        )
    served = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
    require_gguf(described, {f"rope.scaling.{key}": value for key, value in served.items()})
    return dataclasses.replace(
        plain,
        scaling="yarn",
        factor=factor,
        original_max_positions=entries.get("rope.scaling.original_context_length", entries["context_length"]),
        beta_fast=_shortest(entries.get("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=_shortest(entries.get("rope.scaling.yarn_beta_slow", 1.0)),
        truncate=truncates,
        # As Peng et al. (2023) say in section 3.4; files leave it unsaid.
        attention_factor=0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0,
    )


def _llama3_rope(described: GgufDescription, found: np.ndarray, plain: RopeConfig, head_dim: int) -> RopeConfig:
    """Llama 3.x files hold the divisor of each frequency, not the rule: finds the rule, checks that it gives them."""
    original_positions = described.entries.get("rope.scaling.original_context_length", _LLAMA3_ORIGINAL_POSITIONS)
    frequencies = rope.inverse_frequencies(plain, head_dim)
    if found.shape == frequencies.shape and np.isfinite(found).all() and found.max() >= 1:
        candidate = dataclasses.replace(
            plain, scaling="llama3", factor=float(found.max()), original_max_positions=original_positions
        )
        if np.allclose(frequencies / rope.inverse_frequencies(candidate, head_dim), found, rtol=1e-3):
            return candidate
    raise UnsupportedArchitectureError(
        f"rope_freqs.weight does not hold llama3 rope scaling for {original_positions} original positions"
    )


def _shortest(value: float) -> float:
    """The f32 number that a file holds as the decimal it was written from: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
