"""What a Hugging Face config.json says of how weights are quantised.

Not here: reading such weights (`quantized`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ca_jax.errors import CaJaxError, CheckpointError, UnsupportedQuantizationError, check, is_count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """How the weights of a checkpoint are quantised. Modules that are not are stored as plain tensors."""

    method: str
    """fp8, gptq, awq or mxfp4."""
    block: tuple[int, int] | None = None
    """fp8: outputs and inputs that share a scale; None: all of a weight, or all inputs of an output, as scales are."""
    bits: int = 4
    """gptq and awq: of a code."""
    group_size: int = -1
    """gptq and awq: inputs in succession that share a scale; -1: all."""
    zeros_are_less_one: bool = False
    """gptq: whether zeros are stored minus one."""
    needs_order: bool = False
    """gptq: whether only `g_idx` can say which inputs share a scale."""


def scheme_from_hf(described: Mapping[str, Any]) -> Scheme | None:
    """The scheme that the contents of a config.json describe, or None where weights are plain. Pure.

    Raises:
      UnsupportedQuantizationError: a method, or a variant of one, that is not read, by name.
      CheckpointError: it describes none.
    """
    found = described.get("quantization_config") or described.get("compression_config")
    if not found:
        return None
    try:
        method = found.get("quant_method", "unnamed")
        if method not in _SCHEMES:
            raise UnsupportedQuantizationError(
                f"config.json: quantization {method!r} is not served; quant_method must be one of {', '.join(_SCHEMES)}"
            )
        return _SCHEMES[method](found)
    except CaJaxError:
        raise
    except KeyError as error:
        raise CheckpointError(f"config.json: quantization_config: {error.args[0]} is missing") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: quantization_config describes no quantization: {error}") from error


def _check(found: Mapping[str, Any], key: str, holds: bool, wanted: str, value: Any) -> None:
    name = f"config.json: {found['quant_method']} quantization: {key}"
    check(holds, name, wanted, value, UnsupportedQuantizationError)


def _require(found: Mapping[str, Any], **wanted: tuple[Any, ...]) -> None:
    """Refuses a config in which an entry has an unwanted value. An entry that is missing has the first wanted one."""
    for key, values in wanted.items():
        value = found.get(key, values[0])
        value = value.lower() if isinstance(value, str) else value
        _check(found, key, value in values, " or ".join(map(str, values)), value)


def _require_block(found: Mapping[str, Any], key: str, block: Any) -> tuple[int, int]:
    is_block = isinstance(block, (list, tuple)) and len(block) == 2 and all(is_count(size, 1) for size in block)
    _check(found, key, is_block, "two sizes of at least 1", block)
    return block[0], block[1]


def _fp8_scheme(found: Mapping[str, Any]) -> Scheme:
    _require(found, fmt=("e4m3", "float8_e4m3fn", None), expert_dtype=("fp8", None))
    block = found.get("weight_block_size")
    return Scheme(method="fp8", block=None if block is None else _require_block(found, "weight_block_size", block))


def _compressed_scheme(found: Mapping[str, Any]) -> Scheme:
    _require(found, format=("float-quantized",), transform_config=(None, {}))
    sparsity = (found.get("sparsity_config") or {}).get("format", "dense")
    _check(found, "sparsity_config.format", sparsity == "dense", "dense", sparsity)
    blocks = set()
    for name, group in found["config_groups"].items():
        if (told := group.get("weights")) is None:
            continue
        ours = {"quant_method": f"{found['quant_method']} {name} weights", **told}
        _require({**ours, "format": group.get("format")}, format=(None, "float-quantized"))
        _require(ours, type=("float",), num_bits=(8,), symmetric=(True,), strategy=("tensor", "channel", "block"))
        has_blocks = told.get("strategy") == "block"
        blocks.add(_require_block(ours, "block_structure", told.get("block_structure")) if has_blocks else None)
    _check(found, "config_groups", len(blocks) == 1, "of weights with one block_structure", sorted(map(str, blocks)))
    return Scheme(method="fp8", block=blocks.pop())


def _group_size(found: Mapping[str, Any]) -> int:
    size = found.get("group_size", found.get("q_group_size", 128))
    _check(found, "group_size", is_count(size, 1) or size == -1, "at least 1, or -1", size)
    return size


def _gptq_scheme(found: Mapping[str, Any]) -> Scheme:
    bits, layout = found["bits"], found.get("checkpoint_format") or found.get("format") or "gptq"
    _require({**found, "checkpoint_format": layout}, checkpoint_format=("gptq", "gptq_v2"))
    _require(found, bits=(4, 8), is_marlin_format=(False, None), pack_dtype=("int32", None))
    changed = sorted(key for key in found.get("dynamic") or {} if not key.startswith("-"))
    _check(found, "dynamic", not changed, "of modules left out (-:)", changed)
    return Scheme(
        method="gptq",
        bits=bits,
        group_size=_group_size(found),
        zeros_are_less_one=layout.lower() == "gptq",
        needs_order=bool(found.get("desc_act", False)),
    )


def _awq_scheme(found: Mapping[str, Any]) -> Scheme:
    told = {**found, "version": found.get("version") or found.get("format") or "gemm"}
    told["bits"] = found.get("bits", found.get("w_bit", 4))
    _require(told, version=("gemm",), bits=(4,), zero_point=(True,))
    _check(found, "backend", found.get("backend") != "llm-awq", "autoawq", found.get("backend"))
    return Scheme(method="awq", group_size=_group_size(found))


_SCHEMES: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "fp8": _fp8_scheme,
    "compressed-tensors": _compressed_scheme,
    "gptq": _gptq_scheme,
    "awq": _awq_scheme,
    "mxfp4": lambda found: Scheme(method="mxfp4"),
}
