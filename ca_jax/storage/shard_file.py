"""Reads and writes one zarr3 shard of KV without a copy, as TensorStore does: layers in order, each with its crc32c.

    layer 0 | crc32c | layer 1 | crc32c | … | index: offset and size of each layer, little-endian uint64 | crc32c

One `preadv` scatters a file over a block's layers and the checksums between them, one `pwritev` gathers it. TensorStore
moves the bytes through memory of its own, and pays page faults for it: figures in `ssd`. A file that is laid out
otherwise is valid too, and is left to TensorStore.

Not here: the tier (ssd).
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import crc32c
import numpy as np

from ca_jax.storage.block_io import BlockIoError, IoFailure
from ca_jax.storage.layout import KVLayout

_CRC_BYTES = 4
_MAX_BUFFERS = 1024  # Of one call; more layers than that are left to TensorStore.


class ShardFiles:
    """Reads and writes shards of one layout. Any thread may use it.

    Args:
      layout: of a block.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        stride = layout.layer_block_bytes + _CRC_BYTES
        offsets = np.arange(layout.num_layers, dtype="<u8") * stride
        index = np.stack([offsets, np.full(layout.num_layers, stride, "<u8")], axis=1).tobytes()
        self._index = index + crc32c.crc32c(index).to_bytes(_CRC_BYTES, "little")
        self._file_bytes = layout.num_layers * stride + len(self._index)
        self.usable = sys.byteorder == "little" and 2 * layout.num_layers + 1 <= _MAX_BUFFERS
        """Whether this machine and layout are served; if not, TensorStore has to do it."""

    def read(self, path: Path, dst: np.ndarray) -> bool:
        """Reads and checks a whole block. Blocks.

        Args:
          path: of the shard.
          dst: `[L, 2, block_tokens, K, H]` of the layout's dtype, C-contiguous. After an error it holds anything.

        Returns:
          Whether it was read; False where the file is not laid out so, and `dst` holds anything.

        Raises:
          BlockIoError: there is no such file, or a checksum is wrong.
          OSError: the disk reports another error.
        """
        if not self.usable:
            return False
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise BlockIoError(IoFailure.MISSING, f"wanted a block in {path.name}, found no file") from error
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise BlockIoError(IoFailure.CORRUPT, f"wanted a block in {path.name}, found no regular file")
            if found.st_size != self._file_bytes:
                return False
            sums = bytearray(self._layout.num_layers * _CRC_BYTES)
            index = bytearray(len(self._index))
            _transfer(os.preadv, file, self._buffers(dst, sums, index))
        finally:
            os.close(file)
        if index != self._index:
            return False
        for layer, data in enumerate(dst):
            wanted = int.from_bytes(sums[layer * _CRC_BYTES : (layer + 1) * _CRC_BYTES], "little")
            sum_found = crc32c.crc32c(_as_bytes(data))
            if sum_found != wanted:
                raise BlockIoError(
                    IoFailure.CORRUPT,
                    f"layer {layer} in {path.name} wanted crc32c {wanted:#010x}, found {sum_found:#010x}",
                )
        return True

    def write(self, path: Path, src: np.ndarray, temporary: Path, *, durable: bool) -> None:
        """Writes a whole block to `temporary` and renames it into place. Blocks.

        Args:
          path: of the shard.
          src: `[L, 2, block_tokens, K, H]` of the layout's dtype, C-contiguous; it must stand still meanwhile.
          temporary: in the same directory. After an error it is gone, if that can be.
          durable: whether the bytes, but not yet the name, survive a loss of power.

        Raises:
          OSError: the disk reports an error; `path` is as it was.
        """
        sums = b"".join(crc32c.crc32c(_as_bytes(layer)).to_bytes(_CRC_BYTES, "little") for layer in src)
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            try:
                _transfer(os.pwritev, file, self._buffers(src, sums, self._index))
                if durable:
                    os.fsync(file)
            finally:
                os.close(file)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _buffers(self, block: np.ndarray, sums: bytes | bytearray, index: bytes | bytearray) -> list[memoryview]:
        """What a file is made of, in order."""
        views = memoryview(sums)
        buffers: list[memoryview] = []
        for layer, data in enumerate(block):
            buffers += [_as_bytes(data), views[layer * _CRC_BYTES : (layer + 1) * _CRC_BYTES]]
        return [*buffers, memoryview(index)]


def _as_bytes(array: np.ndarray) -> memoryview:
    """The array's memory, without a copy."""
    return array.reshape(-1, copy=False).view(np.uint8).data


def _transfer(call: Callable[..., int], file: int, buffers: list[memoryview]) -> None:
    """Reads or writes all buffers from the beginning of a file; one that ends before has shrunk meanwhile."""
    offset = 0
    while buffers:
        num_bytes = call(file, buffers, offset)
        if not num_bytes:
            raise BlockIoError(IoFailure.CORRUPT, f"wanted more bytes at {offset}, found the end of the file")
        offset += num_bytes
        while buffers and num_bytes >= len(buffers[0]):
            num_bytes -= len(buffers.pop(0))
        if num_bytes:
            buffers[0] = buffers[0][num_bytes:]
