"""How KV lies at rest: the shape of a block, its size, and how a range of tokens falls onto blocks.

Axis letters: L layers, K KV heads, H head dim. Index 0 of the axis of size two is keys (unrotated), index 1 is values.

Not here: memory, files, or who owns which block.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

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
                raise ValueError(f"{name} must be positive, found {getattr(self, name)}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"KV dtype wanted one of {', '.join(_DTYPES)}; found {self.dtype!r}")

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
    def layer_block_bytes(self) -> int:
        """Bytes of one layer of one block."""
        return self.block_bytes // self.num_layers

    def num_blocks(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens; the last may be partly filled."""
        return -(-num_tokens // self.block_tokens)

    def tokens_in_block(self, index: int, num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens of a sequence lie in its block `index`; at most 0 behind them."""
        return min(self.block_tokens, num_tokens - index * self.block_tokens)

    def split(self, start_token: int, stop_token: int) -> TokenSplit:
        """Splits tokens `[start_token, stop_token)` of a sequence into whole blocks and parts of blocks.

          start_token                    stop_token
              v                              v
        |.....hhhh|wwwwwwwww|wwwwwwwww|tttttt....|     h head, w whole, t tail
        """
        size = self.block_tokens
        first_whole, end_whole = self.num_blocks(start_token), stop_token // size
        if first_whole > end_whole:  # Both ends lie inside one block.
            return TokenSplit(whole=range(0), parts=(BlockPart(end_whole, start_token % size, stop_token % size),))
        parts = []
        if start_token % size:
            parts.append(BlockPart(first_whole - 1, start_token % size, size))
        if stop_token % size:
            parts.append(BlockPart(end_whole, 0, stop_token % size))
        return TokenSplit(whole=range(first_whole, end_whole), parts=tuple(parts))


@dataclasses.dataclass(frozen=True)
class BlockPart:
    """Some tokens of one block of a sequence."""

    index: int
    """Which block of the sequence, counted from its first."""
    start: int
    """First token, counted from the block's first."""
    stop: int
    """One past the last token, counted from the block's first."""


@dataclasses.dataclass(frozen=True)
class TokenSplit:
    """A range of tokens, as blocks of its sequence."""

    whole: range
    """Indices of the blocks that lie in the range entirely."""
    parts: tuple[BlockPart, ...]
    """The blocks that lie in it partly: none, one or two."""
