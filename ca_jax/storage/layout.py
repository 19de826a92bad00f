"""How KV lies at rest: groups of layers, the shape of a block, its size, and its checksums.

    block    group 0, [l, P, block_tokens, K, H] | group 1, of other layers and another shape | ...

Axis letters: L layers, l those of a group, P parts (2: keys, unrotated, and values), K KV heads, H head dim.

Not here: memory, files, or which session holds which block.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

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
class LayerGroup:
    """Layers that keep the same of a token, and need it for as long.

    Raises:
      ValueError: no layers, layers that do not ascend, or a size that is not positive.
    """

    layers: tuple[int, ...]
    """Which, ascending."""
    num_kv_heads: int
    """K."""
    head_dim: int
    """H; of int8 the head dim and the bytes of each row's scale behind it."""
    num_parts: int = 2
    """P: keys and values, or one that is both."""
    window: int | None = None
    """How far these layers look back, tokens, the one that looks among them; None: at all that is before it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers or self.layers[0] < 0 or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"layers of a group must be at least one, ascending, got {self.layers}")
        for name in ("num_kv_heads", "head_dim", "num_parts", "window"):
            if (size := getattr(self, name)) is not None and size <= 0:
                raise ValueError(f"{name} must be positive, got {size}")

    @property
    def token_numbers(self) -> int:
        """Numbers that a token leaves in each of the layers."""
        return self.num_parts * self.num_kv_heads * self.head_dim

    def shape(self, num_tokens: int) -> tuple[int, int, int, int]:
        """`(P, num_tokens, K, H)`, of one layer."""
        return (self.num_parts, num_tokens, self.num_kv_heads, self.head_dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVLayout:
    """One block at rest: `[l, P, block_tokens, K, H]` of each group, one behind the other.

    Blocks, not layers, are the outer axis of a tier: a block is one file on SSD and one unit of the free list. It costs
    loads nothing: on 2 CPU cores a layer gathered from 16 scattered blocks (98 KB runs of keys and of values) copied
    at 25 GB/s, one contiguous layer of the same size at 23 GB/s.

    Raises:
      ValueError: groups that do not have each layer once, a size that is not positive, or a dtype that is not stored.
    """

    groups: tuple[LayerGroup, ...]
    """Of all layers, each in one of them."""
    dtype: str
    """Of keys and values at rest: `float32`, `float16`, `bfloat16` or `int8`. Saving and loading never convert."""
    block_tokens: int
    """Tokens in one block."""

    def __post_init__(self) -> None:
        layers = sorted(layer for group in self.groups for layer in group.layers)
        if not layers or layers != list(range(len(layers))):
            raise ValueError(f"groups must have each layer from 0 on once, got layers {layers}")
        if self.block_tokens <= 0:
            raise ValueError(f"block_tokens must be positive, got {self.block_tokens}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"KV dtype must be one of {', '.join(_DTYPES)}; got {self.dtype!r}")

    @classmethod
    def uniform(cls, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str, block_tokens: int) -> KVLayout:
        """Of layers that are all alike, with keys and values, and look at all that is before them."""
        if num_layers <= 0:
            raise ValueError(f"num_layers must be positive, got {num_layers}")
        group = LayerGroup(layers=tuple(range(num_layers)), num_kv_heads=num_kv_heads, head_dim=head_dim)
        return cls(groups=(group,), dtype=dtype, block_tokens=block_tokens)

    def to_dict(self) -> dict[str, Any]:
        """The fields for JSON; of a `uniform` layout those that it is made of."""
        first = self.groups[0]
        fields: dict[str, Any] = {
            "num_layers": self.num_layers,
            "num_kv_heads": first.num_kv_heads,
            "head_dim": first.head_dim,
            "dtype": self.dtype,
            "block_tokens": self.block_tokens,
        }
        return fields if self == KVLayout.uniform(**fields) else dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> KVLayout:
        """The layout that `to_dict` gave, also after a way through JSON.

        Raises:
          TypeError, ValueError: fields that are missing, unknown, or as for the constructor.
        """
        if "groups" not in fields:
            return cls.uniform(**fields)
        return cls(**{**fields, "groups": tuple(LayerGroup(**group) for group in fields["groups"])})

    @property
    def num_layers(self) -> int:
        """L."""
        return sum(len(group.layers) for group in self.groups)

    @property
    def numpy_dtype(self) -> np.dtype:
        """The dtype as numpy knows it (`ml_dtypes` for bfloat16)."""
        return _DTYPES[self.dtype]

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Of a block's array: `(L, P, block_tokens, K, H)` where there is one group, else all numbers in a row."""
        if len(self.groups) == 1:
            return (self.num_layers, *self.groups[0].shape(self.block_tokens))
        return (self.block_bytes // self.numpy_dtype.itemsize,)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        numbers = sum(len(group.layers) * group.token_numbers for group in self.groups)
        return numbers * self.numpy_dtype.itemsize

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

    def place(self, layer: int) -> tuple[int, int]:
        """Which group a layer is in, and where among its layers.

        Raises:
          ValueError: there is no such layer.
        """
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise ValueError(f"layer must be below {self.num_layers}, got {layer}")

    def layer_shape(self, layer: int, num_tokens: int) -> tuple[int, int, int, int]:
        """`(P, num_tokens, K, H)` of a layer. Raises as `place`."""
        return self.groups[self.place(layer)[0]].shape(num_tokens)

    def layer_token_bytes(self, layer: int) -> int:
        """Bytes of one token in a layer. Raises as `place`."""
        return self.groups[self.place(layer)[0]].token_numbers * self.numpy_dtype.itemsize

    def by_group(self, blocks: np.ndarray) -> list[np.ndarray]:
        """Views blocks `[*, *block_shape]` as `[*, l, P, block_tokens, K, H]` of each group."""
        if len(self.groups) == 1:
            return [blocks]
        views, start = [], 0
        for group in self.groups:
            shape = (len(group.layers), *group.shape(self.block_tokens))
            stop = start + math.prod(shape)
            views.append(blocks[..., start:stop].reshape(*blocks.shape[:-1], *shape, copy=False))
            start = stop
        return views

    def layer_sums(self, block: np.ndarray) -> np.ndarray:
        """The checksums of a block: crc32c of each layer's bytes, uint32 `[L]`.

        The catalog keeps them. They find bytes that changed on disk, and a block that is intact but another one:
        swapped with it, an older version, another session's. They guard against accidents, not against an adversary.

        Args:
          block: `[*block_shape]`, C-contiguous.
        """
        sums = np.empty(self.num_layers, np.uint32)
        for group, layers in zip(self.groups, self.by_group(block), strict=True):
            sums[list(group.layers)] = [crc32c.crc32c(as_bytes(layer)) for layer in layers]
        return sums


def as_bytes(array: np.ndarray) -> memoryview:
    """The array's memory, without a copy; it must be C-contiguous."""
    return array.reshape(-1, copy=False).view(np.uint8).data
