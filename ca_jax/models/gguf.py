"""GGUF files of the llama architecture: metadata to `ModelConfig`, quantised tensors to plain arrays.

Rows of Q and K in such files are in interleaved rotary order (pairs 2j, 2j+1); the model rotates in half-split order
(pairs j, j + H/2). They are put back on load: taken for one another, the model speaks fluent nonsense.

Not here: the tokenizer in the metadata (`gguf_tokenizer`), the parameter tree (`weights`).
Source: the GGUF specification and the `gguf` package, both of ggml-org.
"""

from __future__ import annotations

import concurrent.futures
import functools
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ca_jax.errors import CheckpointError, UnsupportedArchitectureError, UnsupportedQuantizationError
from ca_jax.models import gguf_tokenizer, rope, weights
from ca_jax.models.architectures import require_served
from ca_jax.models.config import ModelConfig, RopeConfig
from ca_jax.models.families import BY_GGUF_ARCHITECTURE, FAMILIES
from ca_jax.models.families.family import Names

_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3_ORIGINAL_POSITIONS = 8192  # Every Llama 3.x release; files rarely say.


class GgufFile:
    """A GGUF file opened for reading: its metadata and its tensors, mapped and not yet read.

    Args:
      path: the file.

    Raises:
      CheckpointError: the file is not GGUF, or is cut off.
      UnsupportedQuantizationError: a tensor's type is unknown to the `gguf` package.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = _Reader(path)
        except UnsupportedQuantizationError as error:
            raise UnsupportedQuantizationError(f"{path}: {error}") from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        except (ValueError, IndexError, KeyError, OverflowError, struct.error) as error:
            raise CheckpointError(f"{path}: not a whole GGUF file: {error}") from error
        if reader.byte_order != "I":
            raise CheckpointError(f"{path}: wanted a little-endian GGUF file, found a big-endian one")
        self._fields = reader.fields
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

    def __contains__(self, key: str) -> bool:
        """Whether the metadata has `key`."""
        return key in self._fields

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value of `key` as plain Python, or `default` where there is none."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        """The metadata value of `key`; CheckpointError where there is none."""
        if key not in self._fields:
            raise CheckpointError(f"{self.path}: metadata {key} is missing")
        return self.get(key)


def load_gguf(
    path: Path, *, name: str, dtype: np.dtype, progress: weights.ProgressFn | None = None
) -> weights.Checkpoint:
    """Loads a GGUF file: weights dequantised, tokenizer and chat template out of the metadata. Blocks.

    Args:
      path: the file.
      name: what to call the model.
      dtype: of the weights in memory.
      progress: told of bytes written.

    Raises:
      CheckpointError: the file is cut off, or a tensor or metadata is missing, misshaped or unexpected.
      UnsupportedArchitectureError: the model, its rope scaling or its tokenizer is not one of those served.
      UnsupportedQuantizationError: a tensor cannot be dequantised.
    """
    file = GgufFile(path)
    config = config_from_gguf(file)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        content = pool.submit(weights.hash_file, path)
        tokenizer = gguf_tokenizer.tokenizer_from_gguf(file)
        params = weights.build_params(
            config,
            _stored_tensors(file, config),
            _names(config),
            dtype=dtype,
            source=str(path),
            progress=progress,
        )
        content_sha256 = content.result()
    return weights.Checkpoint(
        config=config,
        params=params,
        tokenizer=tokenizer,
        name=name,
        fingerprint=weights.fingerprint(content_sha256, config, dtype),
        stop_token_ids=gguf_tokenizer.stop_token_ids(file, tokenizer),
    )


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """The architecture that a GGUF file's metadata describes.

    Raises:
      CheckpointError: metadata or the token embedding is missing.
      UnsupportedArchitectureError: it is not a dense llama, or something about it is not served, by name.
    """
    where = str(file.path)
    require_served(file.require("general.architecture"), where, BY_GGUF_ARCHITECTURE)
    if file.get("llama.expert_count", 0):
        raise UnsupportedArchitectureError(f"{where}: mixture of experts (llama.expert_count) is not served")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{where}: tensor token_embd.weight is missing")
    embed_dim, num_heads = file.require("llama.embedding_length"), file.require("llama.attention.head_count")
    num_kv_heads, mlp_dim = (
        file.get("llama.attention.head_count_kv", num_heads),
        file.require("llama.feed_forward_length"),
    )
    for key, value in (("head_count", num_heads), ("head_count_kv", num_kv_heads), ("feed_forward_length", mlp_dim)):
        if isinstance(value, list):
            raise UnsupportedArchitectureError(f"{where}: a {key} of its own for each layer is not served")
    head_dim = file.get("llama.attention.key_length", embed_dim // num_heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if file.get(key, head_dim) != head_dim:
            raise UnsupportedArchitectureError(
                f"{where}: {key} {file.get(key)} is not served, wanted the head dim {head_dim}"
            )
    try:
        return ModelConfig(
            vocab_size=int(file.tensors["token_embd.weight"].shape[-1]),
            embed_dim=embed_dim,
            mlp_dim=mlp_dim,
            num_layers=file.require("llama.block_count"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_positions=file.require("llama.context_length"),
            norm_eps=_shortest(file.require("llama.attention.layer_norm_rms_epsilon")),
            tie_embeddings="output.weight" not in file.tensors,
            rope=_rope_from_gguf(file, head_dim),
        )
    except UnsupportedArchitectureError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{where}: its metadata describes no model: {error}") from error


def _names(config: ModelConfig) -> Names:
    names = FAMILIES[config.architecture].gguf_names
    if names is None:
        raise UnsupportedArchitectureError(f"GGUF files of architecture {config.architecture!r} are not read")
    return names(config)


def _rope_from_gguf(file: GgufFile, head_dim: int) -> RopeConfig:
    theta = _shortest(file.get("llama.rope.freq_base", 10000.0))
    scaling = file.get("llama.rope.scaling.type", "none")
    factor = file.get("llama.rope.scaling.factor", 1.0)
    if "llama.rope.scale_linear" in file:
        scaling, factor = "linear", file.get("llama.rope.scale_linear")
    if _ROPE_FACTORS in file.tensors:
        if scaling != "none":
            raise UnsupportedArchitectureError(
                f"{file.path}: rope scaling {scaling!r} with {_ROPE_FACTORS} is not served"
            )
        return _llama3_rope(file, theta, head_dim)
    if scaling not in ("none", "linear"):
        raise UnsupportedArchitectureError(
            f"{file.path}: rope scaling {scaling!r} is not served; wanted one of none, linear, llama3"
        )
    return RopeConfig(theta=theta, scaling=scaling, factor=_shortest(factor))


def _llama3_rope(file: GgufFile, theta: float, head_dim: int) -> RopeConfig:
    """Llama 3.x files hold the divisor of each frequency, not the rule: finds the rule, checks that it gives them."""
    found = np.asarray(file.tensors[_ROPE_FACTORS].data, np.float32).reshape(-1)
    original_positions = file.get("llama.rope.scaling.original_context_length", _LLAMA3_ORIGINAL_POSITIONS)
    if found.shape == (head_dim // 2,) and np.isfinite(found).all() and found.max() >= 1:
        candidate = RopeConfig(
            theta=theta, scaling="llama3", factor=float(found.max()), original_max_positions=original_positions
        )
        plain = rope.inverse_frequencies(RopeConfig(theta=theta), head_dim)
        if np.allclose(plain / rope.inverse_frequencies(candidate, head_dim), found, rtol=1e-3):
            return candidate
    raise UnsupportedArchitectureError(
        f"{file.path}: {_ROPE_FACTORS} does not hold llama3 rope scaling for {original_positions} original positions; "
        "served are none, linear, llama3"
    )


def _stored_tensors(file: GgufFile, config: ModelConfig) -> dict[str, weights.StoredTensor]:
    """The file's tensors, Q and K in half-split order."""
    order = {
        "attn_q.weight": _half_split_rows(config.num_heads, config.head_dim),
        "attn_k.weight": _half_split_rows(config.num_kv_heads, config.head_dim),
    }
    return {
        name: weights.StoredTensor(
            shape=tuple(int(n) for n in reversed(tensor.shape)),
            read_rows=functools.partial(_read_rows, tensor, order.get(name.split(".", 2)[-1])),
        )
        for name, tensor in file.tensors.items()
        if name != _ROPE_FACTORS
    }


def _half_split_rows(num_heads: int, head_dim: int) -> np.ndarray:
    """For each row in half-split order, its row in a GGUF file.

    One head of H = 6, pairs a b c:   file  a0 a1 b0 b1 c0 c1   ->   half-split  a0 b0 c0 a1 b1 c1
    """
    return np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _read_rows(tensor: gguf.ReaderTensor, order: np.ndarray | None, start: int, stop: int) -> np.ndarray:
    # Quantisation blocks lie within rows, so rows are reordered while they are still small.
    stored = tensor.data[start:stop] if order is None else tensor.data[order[start:stop]]
    try:
        return gguf.dequantize(stored, tensor.tensor_type)
    except NotImplementedError as error:
        raise UnsupportedQuantizationError(
            f"tensor {tensor.name}: type {tensor.tensor_type.name} cannot be dequantised"
        ) from error


def _shortest(value: float) -> float:
    """The f32 number that a file holds as the decimal it was written from: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


class _Reader(gguf.GGUFReader):
    """The package's reader, faster and with checks: both only refine it, so it stays right should its internals move.

    Vocabularies are arrays of 50,000 strings and more, for which the package makes three numpy views each (over two
    seconds for SmolLM2); here it is one pass over the mapped bytes. Tensors are checked to lie within the file before
    any is looked at.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        mapped = self.data.data
        raw_item_type, length = struct.unpack_from("<IQ", mapped, orig_offs)
        item_type = gguf.GGUFValueType(raw_item_type)
        types = [gguf.GGUFValueType.ARRAY, item_type]
        offset = orig_offs + 12
        if item_type in self.gguf_scalar_to_np:
            values = self._get(offset, self.gguf_scalar_to_np[item_type], length)
            if len(values) < length:
                raise ValueError(f"wanted an array of {length} values in the metadata, found the file's end")
            return 12 + values.nbytes, [values], [0], types
        if item_type != gguf.GGUFValueType.STRING:
            return super()._get_field_parts(orig_offs, raw_type)
        strings = []
        for _ in range(length):
            (num_bytes,) = struct.unpack_from("<Q", mapped, offset)
            strings.append(mapped[offset + 8 : offset + 8 + num_bytes])
            offset += 8 + num_bytes
        return offset - orig_offs, strings, list(range(length)), types

    def _build_tensors(self, start_offs: int, fields: list[gguf.ReaderField]) -> None:
        for field in fields:
            _, name_data, _, dims, raw_type, offset = field.parts
            name = bytes(name_data).decode()
            try:
                block_elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(raw_type[0])]
            except (ValueError, KeyError) as error:
                raise UnsupportedQuantizationError(
                    f"tensor {name}: type {raw_type[0]} is unknown to gguf, so it cannot be dequantised"
                ) from error
            end = start_offs + int(offset[0]) + int(np.prod(dims)) * block_bytes // block_elements
            if end > self.data.nbytes:
                raise ValueError(f"tensor {name}: wanted bytes up to {end}, found a file of {self.data.nbytes}")
        super()._build_tensors(start_offs, fields)
