"""Weights rounded to 8 or 4 bits. A model computes with what they were rounded to, wherever it runs.

In float32, 32 inputs of an output share a scale, as in GGUF's Q8_0, or in 4 bits a scale and an offset, as in Q4_1: on
a CPU with kernels decode steps then read a quarter or a sixth of the bytes (`cpu_kernels.pack`). In bfloat16 and
float16 weights stay so small on the device:

    Int8Matrix   all inputs of an output share a scale. XLA reads them as they are: numbers become bfloat16 within the
                 product, and what comes out is scaled. With a scale for each 32 inputs it writes all weights out in
                 bfloat16 first, on H100, v5e and v6e alike (jax 0.10.2), which costs more than there is to save.
    Int4Matrix   32 inputs of an output share a scale and an offset. Products are by a kernel of ours (int4_product).

Not here: how files keep quantised weights (gguf, quantized), reading leaves (weights), products (parts).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import gguf
import ml_dtypes
import numpy as np

from ca_jax.models.config import ModelConfig
from ca_jax.models.weights import Slot

GROUP = 32
"""Inputs that share a scale."""
_CHUNK_ROWS = 4096  # Outputs that are rounded at a time.
_CHUNK_INPUTS = 256  # Inputs, likewise.
_MOST = 127  # Of what is rounded to in 8 bits, either way.
_LARGEST = 15  # Of what is rounded to in 4 bits; the least is 0.
_SAMPLE = 256  # Groups of a matrix by which it is found whether it was in 4 bits before.
_OFF = 0.125  # Most that numbers of such a group are off their codes: bfloat16's rounding of 16 steps, three times.
_KEPT_SMALL = ("attn.wq", "attn.wk", "attn.wv", "attn.wg", "attn.wo", "attn.wq_a", "attn.wkv_a", "head.kernel")
_BLOCKS = ("mlp.w_", "shared.w_", "experts.w_")  # Matrices of feed-forward blocks.


class Int8Matrix(NamedTuple):
    """A matrix in 8 bits, where the parameter tree holds it."""

    numbers: Any
    """i8, in the shape of the leaf: inputs first, behind experts; of a table rows first."""
    scales: Any
    """f32, of each output; in the shape of the leaf's other axes."""


class Int4Matrix(NamedTuple):
    """A matrix in 4 bits, where the parameter tree holds it; of experts one behind the other, else without the axis E.

    I inputs and O outputs are one axis each, whatever they are in the leaf. Weights are codes times scale plus offset.
    """

    numbers: Any
    """u8 `[E, I / 2, O]`, two codes of 0 to 15 each: a group's first 16 inputs are the low halves of its 16 rows."""
    scales: Any
    """bf16 `[E, I / 32, O]`."""
    offsets: Any
    """bf16 `[E, I / 32, O]`, the least weight of each group."""


SmallMatrix = Int8Matrix | Int4Matrix
"""What the parameter tree holds in place of an array."""


class Part(NamedTuple):
    """An array of a small matrix, before there is one."""

    shape: tuple[int, ...]
    """Its own."""
    dtype: np.dtype
    """Its own."""
    axes: tuple[str | None, ...]
    """Names, as a `Slot` has them."""
    units: tuple[int, ...]
    """What of each axis devices may divide among them: its size, but of inputs groups."""


def form_of(
    config: ModelConfig, slot: Slot, weight_dtype: str, dtype: str
) -> type[Int8Matrix] | type[Int4Matrix] | None:
    """How a leaf is held on the device, of a model with that `weight_dtype`; None: as an array of its `dtype`.

    Those that are contracted by `parts.project` or give logits are small: not what makes keys and values of latents,
    what layers with states have, routers, and tables that are only looked up. With int4, tied tables are in 8 bits, and
    so are matrices of whose inputs the last axis is no multiple of 32.
    """
    if weight_dtype == "model" or dtype == "float32":
        return None
    is_block = slot.key.startswith(_BLOCKS) and not slot.key.endswith("w_share")
    is_head = slot.key == "embed.embedding" and config.tie_embeddings
    if not is_head and (slot.num_inputs is None or not (is_block or slot.key in _KEPT_SMALL)):
        return None
    return Int4Matrix if weight_dtype == "int4" and _has_groups(slot) else Int8Matrix


def _has_groups(slot: Slot) -> bool:
    """Whether inputs are whole groups, also those that a device has of them: heads are never divided."""
    if slot.num_inputs is None:
        return False
    return slot.shape[int(slot.num_stacked is not None) + slot.num_inputs - 1] % GROUP == 0


def parts_of(slot: Slot, form: type[Int8Matrix] | type[Int4Matrix]) -> tuple[Part, ...]:
    """The arrays of a leaf that is held so, in the order of the form's fields."""
    if form is Int8Matrix:
        outputs = slot.of_outputs(slot.shape)
        scales = Part(outputs, np.dtype(np.float32), slot.of_outputs(slot.axes), outputs)
        return Part(slot.shape, np.dtype(np.int8), slot.axes, slot.shape), scales
    first = int(slot.num_stacked is not None)
    before = slot.shape[:first]
    num_inputs, num_outputs = slot.stored_shape[-1], math.prod(slot.of_outputs(slot.shape)[first:])
    axes = *slot.axes[: first + 1], slot.axes[first + (slot.num_inputs or 0)]
    groups = *before, num_inputs // GROUP, num_outputs
    half = np.dtype(ml_dtypes.bfloat16)
    numbers = Part((*before, num_inputs // 2, num_outputs), np.dtype(np.uint8), axes, groups)
    return numbers, *[Part(groups, half, axes, groups)] * 2


def dtype_of(params: Any) -> np.dtype:
    """In which a model computes, of its parameters or those outside of layers: what is never held small has it."""
    found: np.dtype = params["params"]["final_norm"]["scale"].dtype
    return found


def as_small(slot: Slot, leaf: np.ndarray, form: type[Int8Matrix] | type[Int4Matrix]) -> SmallMatrix:
    """Rounds a leaf, in the layout of the tree and of any float, to what `form_of` says."""
    return _as_int8(slot, leaf) if form is Int8Matrix else _as_int4(slot, leaf)


def _as_int8(slot: Slot, leaf: np.ndarray) -> Int8Matrix:
    """The largest of an output's weights is 127 of its scale."""
    num_inputs, numbers = slot.stored_shape[-1], np.empty(leaf.shape, np.int8)
    both = leaf, numbers
    if slot.num_inputs is None:
        matrices, out = (each.T[None] for each in both)
    else:
        matrices, out = (each.reshape(slot.num_stacked or 1, num_inputs, -1) for each in both)
    scales = np.empty((len(matrices), matrices.shape[-1]), np.float32)
    for matrix, rounded, scale in zip(matrices, out, scales, strict=True):
        starts = range(0, num_inputs, _CHUNK_INPUTS)
        parts = [matrix[start : start + _CHUNK_INPUTS] for start in starts]
        most = np.max([np.abs(part.astype(np.float32)).max(0) for part in parts], axis=0)
        scale[:] = np.where(most > 0, most / _MOST, 1)
        for start, part in zip(starts, parts, strict=True):
            rounded[start : start + _CHUNK_INPUTS] = np.rint(part.astype(np.float32) / scale)
    return Int8Matrix(numbers, scales.reshape(slot.of_outputs(leaf.shape)))


def _as_int4(slot: Slot, leaf: np.ndarray) -> Int4Matrix:
    """A group's weights are 15 steps from the least to the largest; fewer where they were codes of 4 bits already."""
    numbers, scales, offsets = (np.empty(part.shape, part.dtype) for part in parts_of(slot, Int4Matrix))
    matrices = leaf.reshape(slot.num_stacked or 1, -1, GROUP, scales.shape[-1])
    out = (each.reshape(len(matrices), matrices.shape[1], -1, scales.shape[-1]) for each in (numbers, scales, offsets))
    for matrix, packed, scale, offset in zip(matrices, *out, strict=True):
        was_small = _is_of_codes(matrix)
        for start in range(0, len(matrix), _CHUNK_INPUTS // GROUP):
            chunk = slice(start, start + _CHUNK_INPUTS // GROUP)
            groups = matrix[chunk].astype(np.float32)  # [groups, 32, O]
            least, largest = groups.min(1), groups.max(1)
            steps = _steps_of(groups.swapaxes(0, 1)) if was_small else _LARGEST
            offset[chunk, 0] = least
            low = offset[chunk].astype(np.float32)
            scale[chunk, 0] = np.where(largest > least, (largest - low[:, 0]) / steps, 1)
            codes = np.rint((groups - low) / scale[chunk].astype(np.float32)).clip(0, _LARGEST).astype(np.uint8)
            packed[chunk] = codes[:, : GROUP // 2] | codes[:, GROUP // 2 :] << 4
    return Int4Matrix(numbers, scales, offsets)


def _is_of_codes(matrix: np.ndarray) -> bool:
    """Whether most groups of a sample of a matrix `[groups, 32, O]` are codes of 4 bits, to bfloat16's rounding."""
    sample = matrix[:, :, : max(_SAMPLE // len(matrix), 1)][:_SAMPLE].astype(np.float32)
    return bool(np.mean(_are_codes(sample.swapaxes(0, 1), _steps_of(sample.swapaxes(0, 1)))) > 0.5)


def _steps_of(groups: np.ndarray) -> np.ndarray:
    """In how many steps groups f32 `[32, …]` go from the least to the largest; 15 where they are no codes."""
    flat = groups.reshape(GROUP, -1)
    steps, left = np.full(flat.shape[1], _LARGEST), np.arange(flat.shape[1])
    for number in range(_LARGEST, 0, -1):
        are_codes = _are_codes(flat[:, left], number)
        steps[left[are_codes]] = number
        left = left[~are_codes]
        if not len(left):
            break
    return steps.reshape(groups.shape[1:])


def _are_codes(groups: np.ndarray, steps: Any) -> np.ndarray:
    """Whether groups f32 `[32, …]` are whole numbers of so many steps from the least to the largest."""
    least, largest = groups.min(0), groups.max(0)
    codes = (groups - least) * (steps / np.where(largest > least, largest - least, 1))
    are_codes: np.ndarray = np.abs(codes - np.rint(codes)).max(0) < _OFF
    return are_codes


def round_in_place(config: ModelConfig, slot: Slot, leaf: np.ndarray, weight_dtype: str) -> np.ndarray:
    """Rounds a leaf, where it is a matrix that tokens are multiplied by; what it is then.

    Routers, norms, biases and tables that are only looked up stay as they are, and so do matrices whose number of
    inputs is no multiple of 32. With int4 so do groups that are numbers of GGUF's Q4_0, and tied tables get 8 bits.

    Args:
      config: of the model.
      slot: of the leaf.
      leaf: float32, in the layout of the tree.
      weight_dtype: `int8` or `int4`.
    """
    is_head = slot.key == "embed.embedding" and config.tie_embeddings
    if slot.key.endswith("router") or (slot.num_inputs is None and not is_head):
        return leaf
    first = int(slot.num_stacked is not None)
    num_inputs = config.embed_dim if is_head else math.prod(slot.shape[first:][: slot.num_inputs])
    if num_inputs % GROUP:
        return leaf
    matrices = [leaf] if is_head else [part.T for part in leaf.reshape(slot.num_stacked or 1, num_inputs, -1)]
    for matrix in matrices:  # [outputs, inputs]
        for start in range(0, len(matrix), _CHUNK_ROWS):
            rows = np.ascontiguousarray(matrix[start : start + _CHUNK_ROWS])
            matrix[start : start + _CHUNK_ROWS] = _rounded(rows, "int8" if is_head else weight_dtype)
    return leaf


def _rounded(rows: np.ndarray, weight_dtype: str) -> np.ndarray:
    """Rows f32 `[n, inputs]` in GGUF's Q8_0, or in Q4_1 where they are not in Q4_0."""

    def as_in(kind: gguf.GGMLQuantizationType) -> np.ndarray:
        found: np.ndarray = gguf.dequantize(gguf.quantize(rows, kind), kind)
        return found

    kinds = gguf.GGMLQuantizationType
    if weight_dtype == "int8":
        return as_in(kinds.Q8_0)
    groups, before, found = (
        each.reshape(len(rows), -1, GROUP) for each in (rows, as_in(kinds.Q4_0), as_in(kinds.Q4_1))
    )
    return np.where((groups == before).all(-1, keepdims=True), groups, found).reshape(rows.shape)
