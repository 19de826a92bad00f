"""Weights rounded to 8 bits: 32 inputs of an output share a scale, as in GGUF's Q8_0.

A model whose weights were rounded computes with what they were rounded to, wherever it runs; on a CPU with kernels its
decode steps then read a quarter of float32's bytes (`cpu_kernels.pack`).

Not here: how files keep quantised weights (gguf, quantized), reading leaves (weights).
"""

from __future__ import annotations

import math

import gguf
import numpy as np

from ca_jax.models.config import ModelConfig
from ca_jax.models.weights import Slot

_BLOCK = 32  # Inputs that share a scale.
_CHUNK_ROWS = 4096  # Outputs that are rounded at a time.


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
