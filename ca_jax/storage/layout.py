"""How KV lies at rest: the shape of a block, its size, and its checksums.

Axis letters: L layers, K KV heads, H head dim. Index 0 of the axis of size two is keys (unrotated), index 1 is values.

Not here: memory, files, or which session holds which block.
"""

from __future__ import annotations

import dataclasses

import crc32c
import ml_dtypes
import numpy as np

PAGE_BYTES = 4096
"""What a block is rounded up to on disk."""
_DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.int8),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVLayout:
    """One block at rest: `[L, 2, block_tokens, K, H]`.

    Blocks, not layers, are the outer axis of a tier: a block is one file on SSD and one unit of the free list. It costs
    loads nothing: on 2 CPU cores a layer gathered from 16 scattered blocks (98 KB runs of keys and of values) copied
    at 25 GB/s, one contiguous layer of the same size at 23 GB/s.

    Raises:
      ValueError: a size that is not positive, or a dtype that is not stored.
    """

    num_layers: int
    """L."""
    num_kv_heads: int
    """K."""
    head_dim: int
    """H; of int8 the head dim and the bytes of each row's scale behind it."""
    dtype: str
    """Of keys and values at rest: `float32`, `float16`, `bfloat16` or `int8`. Saving and loading never convert."""
    block_tokens: int
    """Tokens in one block."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_tokens"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"KV dtype must be one of {', '.join(_DTYPES)}; got {self.dtype!r}")

    @property
    def numpy_dtype(self) -> np.dtype:
        """The dtype as numpy knows it (`ml_dtypes` for bfloat16)."""
        return _DTYPES[self.dtype]

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """`(L, 2, block_tokens, K, H)`."""
        return (self.num_layers, 2, self.block_tokens, self.num_kv_heads, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.numpy_dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.token_bytes * self.block_tokens

    @property
    def stored_block_bytes(self) -> int:
        """Bytes that one block takes on SSD, in whole pages: the unit of that tier's cap."""
        return -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES

    def num_blocks(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens; the last may be partly filled."""
        return -(-num_tokens // self.block_tokens)


def layer_sums(block: np.ndarray) -> np.ndarray:
    """The checksums of a block: crc32c of each layer's bytes, uint32 `[L]`.

    The catalog keeps them. They find bytes that changed on disk, and a block that is intact but another one: swapped
    with it, an older version, another session's. They guard against accidents, not against an adversary.

    Args:
      block: `[L, 2, block_tokens, K, H]`, each layer C-contiguous.
    """
    return np.array([crc32c.crc32c(as_bytes(layer)) for layer in block], np.uint32)


def as_bytes(array: np.ndarray) -> memoryview:
    """The array's memory, without a copy; it must be C-contiguous."""
    return array.reshape(-1, copy=False).view(np.uint8).data
