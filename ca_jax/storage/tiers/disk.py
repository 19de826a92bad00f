"""What a tier on disk is, whichever way it keeps its files, and what it asks of its callers.

Where an SSD tier may write, and how much: its directory, the cap, and the floor of free space on the disk.

Not here: the two that there are, `SsdTier` and `RawSsdTier`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from ca_jax.storage.catalog.file import make_directory
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.placement.blocks import BlockAllocator
from ca_jax.storage.records import BlockIoError, IoFailure
from ca_jax.storage.tiers.io import IoHandle


class SsdBlocks(Protocol):
    """How many blocks there are on SSD, and which are free."""

    @property
    def layout(self) -> KVLayout:
        """The shape of a block."""
        ...

    @property
    def num_blocks(self) -> int:
        """How many blocks the cap holds."""
        ...

    @property
    def stored_block_bytes(self) -> int:
        """What one block takes on SSD, with checksums and rounding: the unit of the cap."""
        ...

    @property
    def allocator(self) -> BlockAllocator:
        """Who knows which blocks are free. At start all are, whatever is on disk: the catalog takes its own."""
        ...


class DiskTier(SsdBlocks, Protocol):
    """Blocks that outlive the process.

    Moves do not block and never raise for what a disk does: they give a handle, whose error has a reason. Memory and
    blocks of a move belong to it until the handle has `settled`, after an error or a missed deadline too. Whole blocks
    only are written, and whose bytes they are is for others to know: a block that nobody refers to is just overwritten.

    Any thread may move, the allocator belongs to one. L layers, K KV heads, H head dim.
    """

    def read_blocks(self, block_ids: Sequence[int], into: Sequence[np.ndarray] | np.ndarray) -> IoHandle:
        """Reads whole blocks, verifying their checksums.

        Args:
          block_ids: which.
          into: one `[L, 2, block_tokens, K, H]` for each, C-contiguous, writeable: memory that is reused, such as
            blocks of the DRAM tier. After an error they hold anything.

        Raises:
          ValueError: an id, shape, dtype or number that does not fit, or memory that cannot be written.
        """
        ...

    def read_layer(
        self, block_ids: Sequence[int], layer: int, dst: np.ndarray, num_tokens: int | None = None
    ) -> IoHandle:
        """Reads one layer of a sequence of blocks, verifying its checksums.

        Args:
          block_ids: the sequence's blocks, in order.
          layer: which layer.
          dst: `[2, S, K, H]`, keys and values each C-contiguous, writeable; `dst[:, :num_tokens]` is filled, the rest
            stays.
          num_tokens: how many, in the last of the blocks at the least; by default all that the blocks hold.

        Raises:
          ValueError: an id, layer, shape, dtype or number that does not fit, or memory that cannot be written.
        """
        ...

    def write_blocks(self, block_ids: Sequence[int], blocks: Sequence[np.ndarray] | np.ndarray) -> IoHandle:
        """Writes whole blocks, over whatever is there; durable, if the tier is, when the handle is done.

        After an error each of the blocks is the old one, the new one, or none.

        Args:
          block_ids: which, each once.
          blocks: one `[L, 2, block_tokens, K, H]` for each, C-contiguous.

        Raises:
          ValueError: an id, shape, dtype or number that does not fit.
        """
        ...

    def delete_blocks(self, block_ids: Sequence[int]) -> IoHandle:
        """Removes blocks from disk, also such that are not there, or lie beyond the cap (of an earlier, larger store).

        For tools: blocks that are reused need not be deleted.

        Raises:
          ValueError: a negative id.
        """
        ...

    def stored_block_ids(self) -> list[int]:
        """Which blocks have bytes on disk, ascending, also beyond the cap. Blocks, for seconds at a million blocks."""
        ...

    def sweep(self) -> int:
        """Removes what writes cut short by a crash left behind. Before the first write, by the only user of the store.

        Returns:
          Number of files removed. Blocks for as long as `stored_block_ids`.
        """
        ...

    def poll(self) -> None:
        """Fails moves that are late. Never blocks; for whoever turns the engine's wheel."""
        ...

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuses new moves, cancels those that have not begun, waits for the others.

        Returns:
          Whether all have settled within `timeout_s`. If not, the memory they move must stay.
        """
        ...


def blocks_within(capacity_bytes: int, stored_block_bytes: int, layout: KVLayout) -> int:
    """How many blocks a cap holds.

    Raises:
      ValueError: not even one.
    """
    if capacity_bytes < stored_block_bytes:
        raise ValueError(
            f"SSD capacity wanted at least one block of {stored_block_bytes} bytes ({layout.block_tokens} tokens), "
            f"found {capacity_bytes} bytes"
        )
    return capacity_bytes // stored_block_bytes


def check_block_ids(block_ids: Sequence[int], num_blocks: int | None, *, distinct: bool = False) -> None:
    """Checks that ids are in range, and each named once if they must be.

    Raises:
      ValueError: they are not.
    """
    for block in block_ids:
        if block < 0 or (num_blocks is not None and block >= num_blocks):
            wanted = "not negative" if num_blocks is None else f"in [0, {num_blocks})"
            raise ValueError(f"wanted a block id {wanted}, found {block}")
    if distinct and len(set(block_ids)) < len(block_ids):
        raise ValueError(f"wanted each block id once, found {list(block_ids)}")


def check_blocks(
    name: str, blocks: Sequence[np.ndarray] | np.ndarray, num_blocks: int, layout: KVLayout, *, writeable: bool = False
) -> None:
    """Checks that there is one array of a block's shape for each id.

    Raises:
      ValueError: there is not.
    """
    if len(blocks) != num_blocks:
        raise ValueError(f"{name} wanted one array for each of {num_blocks} block ids, found {len(blocks)}")
    for block in blocks:
        _check_shape(name, block, layout.block_shape, layout)
        _check_memory(name, block, writeable=writeable)


def check_layer(layer: int, dst: np.ndarray, num_blocks: int, num_tokens: int | None, layout: KVLayout) -> int:
    """Checks the arguments of `DiskTier.read_layer`; the default of `num_tokens` is all that the blocks hold.

    Returns:
      How many tokens are read.

    Raises:
      ValueError: they do not fit.
    """
    if not 0 <= layer < layout.num_layers:
        raise ValueError(f"wanted a layer in [0, {layout.num_layers}), found {layer}")
    held = num_blocks * layout.block_tokens
    num_tokens = held if num_tokens is None else num_tokens
    if layout.num_blocks(num_tokens) != num_blocks or num_tokens < 0:
        raise ValueError(
            f"wanted num_tokens that end in the last of {num_blocks} blocks of {layout.block_tokens}, "
            f"found {num_tokens}"
        )
    num_slots = dst.shape[1] if dst.ndim == 4 else 0
    _check_shape("dst", dst, (2, max(num_slots, num_tokens), layout.num_kv_heads, layout.head_dim), layout)
    for half in dst:
        _check_memory("dst", half, writeable=True)
    return num_tokens


def _check_shape(name: str, array: np.ndarray, shape: tuple[int, ...], layout: KVLayout) -> None:
    if array.shape != shape or array.dtype != layout.numpy_dtype:
        raise ValueError(f"{name} wanted {layout.numpy_dtype}{list(shape)}, found {array.dtype}{list(array.shape)}")


def _check_memory(name: str, array: np.ndarray, *, writeable: bool) -> None:
    if not array.flags.c_contiguous or (writeable and not array.flags.writeable):
        wanted = "C-contiguous, writeable" if writeable else "C-contiguous"
        raise ValueError(
            f"{name} wanted {wanted} memory, found strides {array.strides}, "
            f"{'writeable' if array.flags.writeable else 'read-only'}"
        )


def prepare_directory(parent: str | os.PathLike[str], name: str) -> Path:
    """Makes `parent/name`, for this user alone (0700). A parent that exists is left as it is.

    Raises:
      NotADirectoryError: one of them, or what they are to lie in, is a file.
      PermissionError: one of them cannot be made, or not be written to.
    """
    directory = Path(parent).absolute() / name
    try:
        make_directory(directory)
        directory.chmod(0o700)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(f"SSD directory wanted a directory, found a file: {error.filename}") from error
    except OSError as error:
        raise PermissionError(f"SSD directory wanted {directory} to be writable, found: {error}") from error
    return directory


class DiskSpace:
    """The free space of one disk, above its floor. Any thread may use it.

    Writes under way are counted as if their bytes were still to come, those of blocks that are overwritten too: a block
    is replaced by a new file, and for a while there are both.

    Args:
      directory: on that disk; None where there is no local disk, and no floor.
      floor_bytes: what stays free.

    Raises:
      ValueError: the floor is negative, or there is one and no disk.
    """

    def __init__(self, directory: Path | None, floor_bytes: int):
        if floor_bytes < 0:
            raise ValueError(f"wanted a floor of free disk space >= 0 bytes, found {floor_bytes}")
        if floor_bytes and directory is None:
            raise ValueError(f"a floor of free space wants a local disk, found {floor_bytes} bytes for a remote URL")
        self._directory = directory
        self._floor_bytes = floor_bytes
        self._reserved_bytes = 0
        self._lock = threading.Lock()

    def check_capacity(self, capacity_bytes: int, count_stored_bytes: Callable[[], int]) -> None:
        """Checks that the store may grow to its cap.

        Args:
          capacity_bytes: the cap.
          count_stored_bytes: what the store takes now, files of an earlier run; asked only if it matters.

        Raises:
          ValueError: it would leave less than the floor.
        """
        free_bytes = self._free_bytes()
        if free_bytes is None or free_bytes - capacity_bytes >= self._floor_bytes:
            return
        stored_bytes = count_stored_bytes()
        if free_bytes + stored_bytes - capacity_bytes < self._floor_bytes:
            raise ValueError(
                f"SSD capacity in {self._directory} wanted at most "
                f"{max(free_bytes + stored_bytes - self._floor_bytes, 0)} bytes ({free_bytes} free, {stored_bytes} of "
                f"an earlier run, less {self._floor_bytes} to stay free); found {capacity_bytes}"
            )

    def reserve(self, num_bytes: int) -> BlockIoError | None:
        """Takes room for a write that is about to begin, all or nothing.

        Returns:
          None, or why there is no room.
        """
        try:
            free_bytes = self._free_bytes()
        except OSError as error:
            return BlockIoError(IoFailure.DEVICE, f"free space of {self._directory} cannot be read: {error}")
        with self._lock:
            if free_bytes is not None and free_bytes - self._reserved_bytes - num_bytes < self._floor_bytes:
                return BlockIoError(
                    IoFailure.NO_SPACE,
                    f"wanted {num_bytes} bytes above a floor of {self._floor_bytes} in {self._directory}, found "
                    f"{free_bytes} free and {self._reserved_bytes} of them spoken for",
                )
            self._reserved_bytes += num_bytes
        return None

    def release(self, num_bytes: int) -> None:
        """Ends a reservation: its write has settled."""
        with self._lock:
            self._reserved_bytes -= num_bytes

    def _free_bytes(self) -> int | None:
        return None if self._directory is None else shutil.disk_usage(self._directory).free
