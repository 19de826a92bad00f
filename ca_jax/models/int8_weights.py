"""Weights rounded to 8 bits. A model computes with what they were rounded to, wherever it runs.

In float32, 32 inputs of an output share a scale, as in GGUF's Q8_0: on a CPU with kernels decode steps then read a
quarter of the bytes (`cpu_kernels.pack`). In bfloat16 and float16 all inputs of an output do, and weights stay in 8
bits on the device (`Int8Matrix`). XLA reads them as they are: numbers become bfloat16 within the product, and what
comes out is scaled. With a scale for each 32 inputs it writes all weights out in bfloat16 first, on H100, v5e and v6e
alike (jax 0.10.2), which costs more than there is to save.

Not here: how files keep quantised weights (gguf, quantized), reading leaves (weights), products (parts).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import gguf
import numpy as np

from ca_jax.models.config import ModelConfig
from ca_jax.models.weights import Slot

_BLOCK = 32  # Inputs that share a scale.
_CHUNK_ROWS = 4096  # Outputs that are rounded at a time.
_CHUNK_INPUTS = 256  # Inputs, likewise.
_MOST = 127  # Of what is rounded to.
SCALE_BYTES = 4
"""Of an output's scale, where weights are held in 8 bits."""
_KEPT_SMALL = ("attn.wq", "attn.wk", "attn.wv", "attn.wg", "attn.wo", "attn.wq_a", "attn.wkv_a", "head.kernel")
_BLOCKS = ("mlp.w_", "shared.w_", "experts.w_")  # Matrices of feed-forward blocks.


class Int8Matrix(NamedTuple):
    """A matrix in 8 bits, where the parameter tree holds it."""

    numbers: Any
    """i8, in the shape of the leaf: inputs first, behind experts; of a table rows first."""
    scales: Any
    """f32, of each output; in the shape of the leaf's other axes."""


def keeps_small(config: ModelConfig, slot: Slot) -> bool:
    """Whether a leaf is held in 8 bits on the device, of a model in bfloat16 or float16.

    Those that are contracted by `parts.project` or give logits are: not what makes keys and values of latents, what
    layers with states have, routers, and tables that are only looked up.
    """
    if slot.key == "embed.embedding":
        return config.tie_embeddings
    is_block = slot.key.startswith(_BLOCKS) and not slot.key.endswith("w_share")
    return slot.num_inputs is not None and (is_block or slot.key in _KEPT_SMALL)


def dtype_of(params: Any) -> np.dtype:
    """In which a model computes, of its parameters or those outside of layers: what is never held in 8 bits has it."""
    found: np.dtype = params["params"]["final_norm"]["scale"].dtype
    return found


def as_int8(slot: Slot, leaf: np.ndarray) -> Int8Matrix:
    """Rounds a leaf: the largest of an output's weights is 127 of its scale.

    Args:
      slot: of the leaf, of which `keeps_small` is true.
      leaf: in the layout of the tree, any float.
    """
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


def round_to_int8(config: ModelConfig, slot: Slot, leaf: np.ndarray) -> np.ndarray:
    """Rounds a leaf in place, where it is a matrix that tokens are multiplied by; what it is then.

    Routers, norms, biases and tables that are only looked up stay as they are, and so do matrices whose number of
    inputs is no multiple of 32.

    Args:
      config: of the model.
      slot: of the leaf.
      leaf: float32, in the layout of the tree.
    """
    is_head = slot.key == "embed.embedding" and config.tie_embeddings
    if slot.key.endswith("router") or (slot.num_inputs is None and not is_head):
        return leaf
    is_stacked = slot.axes[0] == "experts"
    num_stacked = slot.shape[0] if is_stacked else 1
    num_inputs = config.embed_dim if is_head else math.prod(slot.shape[int(is_stacked) :][: slot.num_inputs])
    if num_inputs % _BLOCK:
        return leaf
    matrices = [leaf] if is_head else [part.T for part in leaf.reshape(num_stacked, num_inputs, -1)]
    for matrix in matrices:  # [outputs, inputs]
        for start in range(0, len(matrix), _CHUNK_ROWS):
            rows = np.ascontiguousarray(matrix[start : start + _CHUNK_ROWS])
            kind = gguf.GGMLQuantizationType.Q8_0
            matrix[start : start + _CHUNK_ROWS] = gguf.dequantize(gguf.quantize(rows, kind), kind)
    return leaf
