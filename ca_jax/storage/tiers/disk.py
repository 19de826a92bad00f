"""What every tier on disk does, whichever way it keeps its files: queues of moves, checks, room on the disk, checksums.

Not here: the two kinds there are, `SsdTier` (zarr3) and `RawSsdTier` (raw).
"""

from __future__ import annotations

import abc
import concurrent.futures
import dataclasses
import errno
import functools
import mmap
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import crc32c
import numpy as np

from ca_jax.storage.catalog.file import make_directory
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.placement.blocks import BlockAllocator
from ca_jax.storage.records import BlockIoError, IoFailure
from ca_jax.storage.tiers.io import IoHandle, IoQueue, Operation, OperationFuture, close_all

PAGE_BYTES = 4096
"""What files are rounded up to on disk."""
Buffer = memoryview | mmap.mmap | bytearray | bytes
_REASONS = {
    "NOT_FOUND": IoFailure.MISSING,
    "DATA_LOSS": IoFailure.CORRUPT,
    "OUT_OF_RANGE": IoFailure.CORRUPT,
    "RESOURCE_EXHAUSTED": IoFailure.NO_SPACE,
}


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
        """The free list. At start all are, whatever is on disk: the catalog takes its own."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskOptions:
    """How a tier on disk is opened."""

    durable: bool = True
    """Whether a write is done only when it would survive a loss of power."""
    deadline_s: float = 30.0
    """Seconds without progress after which a move fails; see `IoQueue`."""
    free_floor_bytes: int = 0
    """Free space that stays on a local disk."""
    clock: Callable[[], float] = time.monotonic
    """Seconds, never decreasing."""
    only_existing: bool = False
    """Takes what is on disk as it stands, for tools, beside an engine or after one: makes nothing and checks no room.
    Blocks are read and deleted, never written; the capacity says which ids may be named."""


DEFAULT_OPTIONS = DiskOptions()


class DiskTier(abc.ABC):
    """Blocks that outlive the process.

    Moves do not block and never raise for what a disk does: they give a handle, whose error has a reason. Memory and
    blocks of a move belong to it until the handle has `settled`, after an error or a missed deadline too. Only whole
    blocks are written. The tier does not know whose a block is: a write replaces what was there.

    Any thread may move blocks; the allocator belongs to one thread. L layers, K KV heads, H head dim.

    Args:
      layout: the shape of a block.
      capacity_bytes: cap of what is stored, checksums and rounding included.
      stored_block_bytes: what one block takes.
      options: how it is opened.
      max_reads: blocks that are read at once, each by a thread of its own on a local disk.
      max_writes: blocks that are written at once, in a queue of their own, so that no read waits for them.

    Raises:
      ValueError: a capacity under one block, or a deadline or number that is not positive.
    """

    def __init__(
        self,
        layout: KVLayout,
        capacity_bytes: int,
        stored_block_bytes: int,
        options: DiskOptions,
        max_reads: int,
        max_writes: int,
    ) -> None:
        self._layout = layout
        self._options = options
        self._stored_block_bytes = stored_block_bytes
        self._num_blocks = blocks_within(capacity_bytes, stored_block_bytes, layout)
        self._reads, self._writes = (
            IoQueue(max_in_flight=number, deadline_s=options.deadline_s, describe=describe, clock=options.clock)
            for number in (max_reads, max_writes)
        )
        self._threads = concurrent.futures.ThreadPoolExecutor(max_reads + max_writes, thread_name_prefix="ca_jax-ssd")
        self._space = DiskSpace(None, 0)
        self._allocator = BlockAllocator(self._num_blocks)

    @property
    def layout(self) -> KVLayout:
        """The shape of a block."""
        return self._layout

    @property
    def num_blocks(self) -> int:
        """How many blocks the cap holds."""
        return self._num_blocks

    @property
    def stored_block_bytes(self) -> int:
        """What one block takes on SSD, with checksums and rounding: the unit of the cap."""
        return self._stored_block_bytes

    @property
    def allocator(self) -> BlockAllocator:
        """The free list. At start all blocks are free, whatever is on disk: the catalog takes its own."""
        return self._allocator

    def read_blocks(self, block_ids: Sequence[int], into: Sequence[np.ndarray] | np.ndarray) -> IoHandle:
        """Reads whole blocks, verifying their checksums.

        Args:
          block_ids: which.
          into: one `[L, 2, block_tokens, K, H]` for each, C-contiguous, writeable: memory that is reused, such as
            blocks of the DRAM tier. After an error they hold anything.

        Raises:
          ValueError: an id, shape, dtype or number that does not fit, or memory that cannot be written.
        """
        check_block_ids(block_ids, self._num_blocks)
        check_blocks("into", into, len(block_ids), self._layout, writeable=True)
        return self._reads.submit(
            [functools.partial(self._read, block, dst) for block, dst in zip(block_ids, into, strict=True)]
        )

    def write_blocks(self, block_ids: Sequence[int], blocks: Sequence[np.ndarray] | np.ndarray) -> IoHandle:
        """Writes whole blocks, over whatever is there; durable, if the tier is, when the handle is done.

        After an error each of the blocks is the old one, the new one, or none.

        Args:
          block_ids: which, each once.
          blocks: one `[L, 2, block_tokens, K, H]` for each, C-contiguous.

        Raises:
          ValueError: an id, shape, dtype or number that does not fit.
        """
        if self._options.only_existing:
            raise ValueError("write_blocks must have a tier that may write, got one opened with only_existing")
        check_block_ids(block_ids, self._num_blocks, distinct=True)
        check_blocks("blocks", blocks, len(block_ids), self._layout)
        num_bytes = len(block_ids) * self._stored_block_bytes
        error = self._space.reserve(num_bytes)
        if error is not None:
            return self._writes.failed(error)
        handle = self._writes.submit(
            [functools.partial(self._write, block, src) for block, src in zip(block_ids, blocks, strict=True)],
            last=self._syncing(block_ids) if self._options.durable else None,
        )
        handle.add_settled_callback(lambda _: self._space.release(num_bytes))
        return handle

    def delete_blocks(self, block_ids: Sequence[int]) -> IoHandle:
        """Removes blocks from disk, also such that are not there, or lie beyond the cap (of an earlier, larger store).

        For tools: blocks that are reused need not be deleted.

        Raises:
          ValueError: a negative id.
        """
        check_block_ids(block_ids, None)
        return self._writes.submit([functools.partial(self._delete, block) for block in block_ids])

    @abc.abstractmethod
    def stored_block_ids(self) -> list[int]:
        """Which blocks have bytes on disk, ascending, also beyond the cap. Blocks, for seconds at a million blocks."""

    def sweep(self) -> int:
        """Removes what writes cut short by a crash left behind. Before the first write, by the only user of the store.

        Returns:
          Number of files removed. Blocks for as long as `stored_block_ids`.
        """
        return 0

    def poll(self) -> None:
        """Fails moves that are late. Never blocks; call it now and then."""
        self._reads.poll()
        self._writes.poll()

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuses new moves, cancels those that have not begun, waits for the others.

        Returns:
          Whether all have settled within `timeout_s`. If not, the memory they move must stay.
        """
        settled = close_all([self._reads, self._writes], timeout_s)
        self._threads.shutdown(wait=settled)
        return settled

    # One block each. An operation that runs when it is called is given to `_threads`.

    @abc.abstractmethod
    def _read(self, block: int, dst: np.ndarray) -> OperationFuture: ...

    @abc.abstractmethod
    def _write(self, block: int, src: np.ndarray) -> OperationFuture: ...

    @abc.abstractmethod
    def _delete(self, block: int) -> OperationFuture: ...

    @abc.abstractmethod
    def _syncing(self, block_ids: Sequence[int]) -> Operation | None:
        """The operation that ends a durable write of blocks."""


def blocks_within(capacity_bytes: int, stored_block_bytes: int, layout: KVLayout) -> int:
    """How many blocks a cap holds.

    Raises:
      ValueError: not even one.
    """
    if capacity_bytes < stored_block_bytes:
        raise ValueError(
            f"SSD capacity must be at least one block of {stored_block_bytes} bytes ({layout.block_tokens} tokens), "
            f"got {capacity_bytes} bytes"
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
            raise ValueError(f"a block id must be {wanted}, got {block}")
    if distinct and len(set(block_ids)) < len(block_ids):
        raise ValueError(f"each block id must be given once, got {list(block_ids)}")


def check_blocks(
    name: str, blocks: Sequence[np.ndarray] | np.ndarray, num_blocks: int, layout: KVLayout, *, writeable: bool = False
) -> None:
    """Checks that there is one array of a block's shape for each id.

    Raises:
      ValueError: there is not.
    """
    if len(blocks) != num_blocks:
        raise ValueError(f"{name} must be one array for each of {num_blocks} block ids, got {len(blocks)}")
    for block in blocks:
        _check_shape(name, block, layout.block_shape, layout)
        _check_memory(name, block, writeable=writeable)


def _check_shape(name: str, array: np.ndarray, shape: tuple[int, ...], layout: KVLayout) -> None:
    if array.shape != shape or array.dtype != layout.numpy_dtype:
        raise ValueError(f"{name} must be {layout.numpy_dtype}{list(shape)}, got {array.dtype}{list(array.shape)}")


def _check_memory(name: str, array: np.ndarray, *, writeable: bool) -> None:
    if not array.flags.c_contiguous or (writeable and not array.flags.writeable):
        wanted = "C-contiguous, writeable" if writeable else "C-contiguous"
        raise ValueError(
            f"{name} must be {wanted} memory, got strides {array.strides}, "
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
        raise NotADirectoryError(f"SSD directory must be a directory, got a file: {error.filename}") from error
    except OSError as error:
        raise PermissionError(f"SSD directory {directory} must be writable, got: {error}") from error
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
            raise ValueError(f"there must be a floor of free disk space >= 0 bytes, got {floor_bytes}")
        if floor_bytes and directory is None:
            raise ValueError(
                f"a floor of free space must be asked of a local disk, got {floor_bytes} bytes for a remote URL"
            )
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
                f"SSD capacity in {self._directory} must be at most "
                f"{max(free_bytes + stored_bytes - self._floor_bytes, 0)} bytes ({free_bytes} free, {stored_bytes} of "
                f"an earlier run, less {self._floor_bytes} to stay free); got {capacity_bytes}"
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
                    f"there must be {num_bytes} bytes above a floor of {self._floor_bytes} in {self._directory}, got "
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


def transfer(
    call: Callable[..., int], file: int, buffers: Sequence[Buffer], offset: int = 0, direct_file: int | None = None
) -> None:
    """Reads or writes all of `buffers` at `offset`, by `os.preadv` or `os.pwritev`.

    Args:
      call: which of the two.
      file: through the page cache.
      buffers: memory in the order of the file.
      offset: bytes from the beginning of the file.
      direct_file: the same file past the page cache, used where all is in whole pages; None: there is none.

    Raises:
      BlockIoError: the file ends before.
      OSError: the disk reports an error.
    """
    views = [np.frombuffer(buffer, np.uint8) for buffer in buffers if len(buffer)]
    direct = direct_file is not None and not any(
        (view.ctypes.data | view.nbytes | offset) % PAGE_BYTES for view in views
    )
    while views:
        num_bytes = call(direct_file if direct else file, views, offset)
        if num_bytes <= 0:
            raise BlockIoError(IoFailure.CORRUPT, f"the file must have more bytes at {offset}, and ends there")
        offset += num_bytes
        while views and num_bytes >= views[0].nbytes:
            num_bytes -= views.pop(0).nbytes
        if num_bytes:
            views[0] = views[0][num_bytes:]
            direct = direct and not num_bytes % PAGE_BYTES


def as_bytes(array: np.ndarray) -> memoryview:
    """The array's memory, without a copy."""
    return array.reshape(-1, copy=False).view(np.uint8).data


def layer_sums(block: np.ndarray) -> list[int]:
    """The crc32c of each layer of a block."""
    return [crc32c.crc32c(as_bytes(layer)) for layer in block]


def check_sums(where: str, block: np.ndarray, wanted: Sequence[int]) -> None:
    """Checks the crc32c of each layer of a block.

    Raises:
      BlockIoError: one is another.
    """
    for layer, (sum_wanted, found) in enumerate(zip(wanted, layer_sums(block), strict=True)):
        if found != sum_wanted:
            raise BlockIoError(
                IoFailure.CORRUPT, f"layer {layer} of {where} must have crc32c {sum_wanted:#010x}, got {found:#010x}"
            )


def whole_pages(num_bytes: int) -> int:
    """So many bytes, rounded up to pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def describe(exception: BaseException) -> BlockIoError:
    """Finds the reason in what an operation raised. TensorStore's is a ValueError that begins with its status."""
    if isinstance(exception, BlockIoError):
        return exception
    if isinstance(exception, OSError):
        full = exception.errno in (errno.ENOSPC, errno.EDQUOT)
        return BlockIoError(
            IoFailure.NO_SPACE if full else IoFailure.DEVICE, f"{type(exception).__name__}: {exception}"
        )
    message = str(exception)
    if re.search(r"os_error_code='(28|122)'", message):  # ENOSPC, EDQUOT
        return BlockIoError(IoFailure.NO_SPACE, message)
    if re.search(r"Requested byte range .* is not valid for value of size", message):
        return BlockIoError(IoFailure.CORRUPT, message)
    return BlockIoError(_REASONS.get(message.partition(":")[0], IoFailure.DEVICE), message)
