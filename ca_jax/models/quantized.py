"""Quantised Hugging Face checkpoints: FP8, GPTQ, AWQ and MXFP4 weights, dequantised a few rows at a time.

Each format is a function from packed arrays, as they lie in a file, to float32 rows `[start, stop)` of a weight
`[out, in]`. Codes and zeros are small integers, so their product with a scale is rounded once.

Not here: what a config.json says of them (`quantization_scheme`), opening files (`huggingface`), GGUF's formats
(`gguf`), quantised arithmetic (there is none).
Source: the layouts are those of DeepSeek-V3's and vLLM's FP8, compressed-tensors, AutoGPTQ with GPTQModel, AutoAWQ,
and gpt-oss; MXFP4's numbers are those of the OCP Microscaling Formats specification, version 1.0.
"""

from __future__ import annotations

import dataclasses
import functools

import ml_dtypes
import numpy as np

from ca_jax.errors import CheckpointError, UnsupportedQuantizationError, check
from ca_jax.models.quantization_scheme import Scheme
from ca_jax.models.stored import StoredTensor

Arrays = dict[str, np.ndarray]
"""Tensors of a checkpoint by name, mapped from its files and not yet read."""

_F8 = np.dtype(ml_dtypes.float8_e4m3fn)
_FLOATS = tuple(map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16)))
_EXPONENTS = np.dtype(ml_dtypes.float8_e8m0fnu)
_WORDS, _BYTES = (np.dtype(np.int32),), (np.dtype(np.uint8),)

# What each byte, or each half of one, stands for.
_E4M3 = np.arange(256, dtype=np.uint8).view(_F8).astype(np.float32)
_E8M0 = np.arange(256, dtype=np.uint8).view(_EXPONENTS).astype(np.float32)
_E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)

_MXFP4_BLOCK = 32
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # Where in its word each of eight columns is: they are stored 0 2 4 6 1 3 5 7.
_OF_ACTIVATIONS = (
    ".input_scale",
    ".output_scale",
    ".activation_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
)


# The formats. N outputs, M inputs, G groups of inputs that share a scale, P = 32 / bits codes in a word.


def fp8_rows(weight: np.ndarray, scales: np.ndarray, block: tuple[int, int], start: int, stop: int) -> np.ndarray:
    """Rows of an FP8 weight `[N, M]` with a scale for each `block` of rows and columns; edge blocks may be cut off."""
    numbers = _E4M3[weight[start:stop].view(np.uint8)]
    of_rows = scales[np.arange(start, stop) // block[0]].astype(np.float32)
    numbers *= np.repeat(of_rows, block[1], axis=1)[:, : weight.shape[1]]
    return numbers


def gptq_rows(
    qweight: np.ndarray,
    qzeros: np.ndarray,
    scales: np.ndarray,
    groups: np.ndarray,
    scheme: Scheme,
    start: int,
    stop: int,
) -> np.ndarray:
    """Rows of a GPTQ weight.

    Zeros minus one were made by subtracting one from every code of a word at once, so that a zero of 0 borrows from the
    next code; adding to whole words undoes that.

    Args:
      qweight: i32 `[M / P, N]`, inputs packed.
      qzeros: i32 `[G, N / P]`, outputs packed.
      scales: `[G, N]`.
      groups: `[M]`, the group of each input.
      scheme: how it is packed.
      start: the first row.
      stop: behind the last row.
    """
    ones = sum(1 << shift for shift in range(0, 32, scheme.bits)) if scheme.zeros_are_less_one else 0
    codes = _unpack(qweight[:, start:stop].T, scheme.bits)
    zeros = _columns(qzeros, scheme.bits, start, stop, add=ones)
    return _scaled(codes, zeros, scales[:, start:stop], groups)


def awq_rows(
    qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, groups: np.ndarray, start: int, stop: int
) -> np.ndarray:
    """Rows of an AWQ weight, version GEMM: `qweight` i32 `[M, N / 8]`, the others as `gptq_rows` has them."""
    codes = _columns(qweight, 4, start, stop, _AWQ_PLACES)
    return _scaled(codes.T, _columns(qzeros, 4, start, stop, _AWQ_PLACES), scales[:, start:stop], groups)


def mxfp4_rows(blocks: np.ndarray, scales: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Rows of MXFP4 numbers `[..., 32 G]`: u8 `blocks` `[..., G, 16]`, and powers of two as u8 `scales` `[..., G]`."""
    numbers = _E2M1[_unpack(blocks[start:stop], 4)]
    numbers *= _E8M0[scales[start:stop]][..., None]
    return numbers.reshape(*numbers.shape[:-2], -1)


def _unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """u8 codes of 4 or 8 bits, packed along the last axis with the lowest bits first."""
    found = np.ascontiguousarray(packed).view(np.uint8)
    return found if bits == 8 else np.stack([found & 15, found >> 4], axis=-1).reshape(*found.shape[:-1], -1)


def _columns(
    words: np.ndarray, bits: int, start: int, stop: int, places: tuple[int, ...] | None = None, add: int = 0
) -> np.ndarray:
    """Columns `[start, stop)` of codes packed along the last axis, with `add` added to each word beforehand."""
    per_word = 32 // bits
    first = start // per_word
    codes = _unpack(words[:, first : -(-stop // per_word)].view(np.uint32) + np.uint32(add), bits)
    if places is not None:
        codes = codes.reshape(len(codes), -1, per_word)[..., places].reshape(len(codes), -1)
    return codes[:, start - first * per_word :][:, : stop - start]


def _scaled(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """`(code - zero) * scale` for codes `[rows, M]`, zeros and scales `[G, rows]` and the group of each input."""
    numbers = codes.astype(np.float32)
    numbers -= zeros.T.astype(np.float32)[:, groups]
    numbers *= scales.T.astype(np.float32)[:, groups]
    return numbers


# A checkpoint's tensors.


def plain(tensor: np.ndarray) -> StoredTensor:
    """A tensor of numbers as they are."""
    return StoredTensor(
        shape=tensor.shape,
        read_rows=lambda start, stop: tensor[start:stop],
        part=(lambda index: plain(tensor[index])) if tensor.ndim > 2 else None,
    )


def take(raw: Arrays, scheme: Scheme) -> dict[str, StoredTensor]:
    """Takes everything that is quantised out of `raw`, which keeps the plain tensors.

    Returns:
      Dequantised weights by the names that they have in plain checkpoints, and biases of zeros that GPTQ wrote for
      modules without one.

    Raises:
      CheckpointError: a part of a weight is missing or misshaped; the message names it.
      UnsupportedQuantizationError: a part is of a type that is not read.
    """
    return {"fp8": _take_fp8, "mxfp4": _take_mxfp4}.get(scheme.method, _take_packed)(raw, scheme)


def _part(raw: Arrays, name: str, shape: tuple[int, ...] | None, types: tuple[np.dtype, ...]) -> np.ndarray:
    """Takes one tensor of one of those types, and of that shape; None: its caller checks that."""
    if name not in raw:
        raise CheckpointError(f"tensor {name} is missing" + (f"; its shape must be {shape}" if shape else ""))
    found = raw.pop(name)
    if shape is not None:
        check(found.shape == shape, f"tensor {name}: the shape", str(shape), found.shape, CheckpointError)
    wanted = " or ".join(each.name for each in types)
    check(found.dtype in types, f"tensor {name}: the type", wanted, found.dtype.name, UnsupportedQuantizationError)
    return found


def _stems(raw: Arrays, *ends: str) -> list[str]:
    """What precedes any of these ends in names of tensors."""
    return sorted({name.removesuffix(end) for end in ends for name in raw if name.endswith(end)})


def _take_fp8(raw: Arrays, scheme: Scheme) -> dict[str, StoredTensor]:
    for name in [name for name in raw if name.endswith(_OF_ACTIVATIONS)]:
        del raw[name]
    stored = {}
    for name in [name for name, tensor in raw.items() if tensor.dtype == _F8]:
        weight = raw.pop(name)
        check(weight.ndim == 2, f"tensor {name}: FP8 weights", "matrices", weight.shape, CheckpointError)
        (num_rows, num_columns), block = weight.shape, scheme.block
        usual = f"{name}_scale" if block is None else f"{name}_scale_inv"
        scale_name = next((each for each in (f"{name}_scale_inv", f"{name}_scale") if each in raw), usual)
        if block is None:
            scales = _part(raw, scale_name, None, (*_FLOATS, _EXPONENTS))
            fits = scales.shape in ((), (1,), (1, 1), (num_rows,), (num_rows, 1))
            wanted = f"(1,) or {(num_rows, 1)}"
            check(fits, f"tensor {scale_name}: the shape", wanted, scales.shape, CheckpointError)
            scales = scales.reshape(-1, 1)
            block = (num_rows // len(scales), num_columns)
        else:
            grid = (-(-num_rows // block[0]), -(-num_columns // block[1]))
            scales = _part(raw, scale_name, grid, (*_FLOATS, _EXPONENTS))
        rows = functools.partial(fp8_rows, weight, scales, block)
        stored[name] = StoredTensor(shape=weight.shape, read_rows=rows)
    return stored


def _take_packed(raw: Arrays, scheme: Scheme) -> dict[str, StoredTensor]:
    stored, per_word, is_awq = {}, 32 // scheme.bits, scheme.method == "awq"
    for stem in _stems(raw, ".qweight", ".qzeros", ".g_idx"):
        qweight = _part(raw, f"{stem}.qweight", None, _WORDS)
        check(qweight.ndim == 2, f"tensor {stem}.qweight: the shape", "of two axes", qweight.shape, CheckpointError)
        num_in, num_out = qweight.shape
        num_in, num_out = (num_in, num_out * per_word) if is_awq else (num_in * per_word, num_out)
        group_size = num_in if scheme.group_size == -1 else scheme.group_size
        num_groups = -(-num_in // group_size)
        scales = _part(raw, f"{stem}.scales", (num_groups, num_out), _FLOATS)
        qzeros = _part(raw, f"{stem}.qzeros", (num_groups, -(-num_out // per_word)), _WORDS)
        groups = np.arange(num_in) // group_size
        if not is_awq and (scheme.needs_order or f"{stem}.g_idx" in raw):
            groups = _part(raw, f"{stem}.g_idx", (num_in,), _WORDS)
            fits, wanted = bool((groups >= 0).all() and (groups < num_groups).all()), f"of groups 0 to {num_groups - 1}"
            check(fits, f"tensor {stem}.g_idx", wanted, groups.tolist()[:8], CheckpointError)
        parts = (qweight, qzeros, scales, groups)
        rows = functools.partial(awq_rows, *parts) if is_awq else functools.partial(gptq_rows, *parts, scheme)
        stored[f"{stem}.weight"] = StoredTensor(shape=(num_out, num_in), read_rows=rows)
        bias = raw.get(f"{stem}.bias")
        if bias is not None and not bias.any():
            del raw[f"{stem}.bias"]
            stored[f"{stem}.bias"] = dataclasses.replace(plain(bias), is_optional=True)
    return stored


def _take_mxfp4(raw: Arrays, scheme: Scheme) -> dict[str, StoredTensor]:
    stored = {}
    for stem in _stems(raw, "_blocks", "_scales"):
        scales = _part(raw, f"{stem}_scales", None, _BYTES)
        blocks = _part(raw, f"{stem}_blocks", (*scales.shape, _MXFP4_BLOCK // 2), _BYTES)
        stored[stem] = _mxfp4(blocks, scales)
    return stored


def _mxfp4(blocks: np.ndarray, scales: np.ndarray) -> StoredTensor:
    return StoredTensor(
        shape=(*scales.shape[:-1], scales.shape[-1] * _MXFP4_BLOCK),
        read_rows=functools.partial(mxfp4_rows, blocks, scales),
        part=(lambda index: _mxfp4(blocks[index], scales[index])) if scales.ndim > 2 else None,
    )
