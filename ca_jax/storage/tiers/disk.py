"""What both formats of blocks on disk share: queues of moves, checksums, room on the disk.

Not here: the formats themselves (formats), whose a block is.
"""

from __future__ import annotations

import abc
import concurrent.futures
import dataclasses
import errno
import functools
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ca_jax.storage.catalog.file import make_directory
from ca_jax.storage.layout import KVLayout, layer_sums
from ca_jax.storage.placement.blocks import BlockAllocator
from ca_jax.storage.records import BlockIoError, IoFailure
from ca_jax.storage.tiers.io import IoHandle, IoQueue, Operation, close_all

_REASONS = {
    "NOT_FOUND": IoFailure.MISSING,
    "DATA_LOSS": IoFailure.CORRUPT,
    "OUT_OF_RANGE": IoFailure.CORRUPT,
    "RESOURCE_EXHAUSTED": IoFailure.NO_SPACE,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskOptions:
    """How a tier on disk is opened."""

    durable: bool = True
    """Whether a write is done only when it would survive a loss of power."""
    deadline_s: float = 30.0
    """Seconds without progress after which a move fails; see `IoQueue`."""
    free_floor_bytes: int = 0
    """Free space that stays on a local disk."""
    max_reads: int = 4
    """Blocks that are read at once, each by a thread of its own."""
    max_writes: int = 8
    """Blocks that are written at once, in a queue of their own, so that no read waits for them."""
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
      capacity_bytes: cap of what is stored, in whole pages.
      options: how it is opened.
      directory: where its files are, on a local disk; None at a URL.

    Raises:
      ValueError: a capacity under one block, a deadline or number that is not positive, a floor at a URL.
    """

    def __init__(
        self, layout: KVLayout, capacity_bytes: int, options: DiskOptions, directory: Path | None = None
    ) -> None:
        self.layout = layout
        """The shape of a block."""
        self._options = options
        if capacity_bytes < layout.stored_block_bytes:
            raise ValueError(
                f"SSD capacity must be at least one block of {layout.stored_block_bytes} bytes "
                f"({layout.block_tokens} tokens), got {capacity_bytes} bytes"
            )
        self.num_blocks = capacity_bytes // layout.stored_block_bytes
        """How many blocks the cap holds."""
        self._space = DiskSpace(directory, options.free_floor_bytes)
        self._reads, self._writes = (
            IoQueue(max_in_flight=number, deadline_s=options.deadline_s, describe=describe, clock=options.clock)
            for number in (options.max_reads, options.max_writes)
        )
        num_threads = options.max_reads + options.max_writes
        self._threads = concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix="ca_jax-ssd")

    @functools.cached_property
    def allocator(self) -> BlockAllocator:
        """The free list. At start all blocks are free, whatever is on disk: the catalog takes its own."""
        return BlockAllocator(self.num_blocks)

    @property
    def stored_block_bytes(self) -> int:
        """What one block takes on SSD: the unit of the cap."""
        return self.layout.stored_block_bytes

    def read_blocks(
        self,
        block_ids: Sequence[int],
        into: Sequence[np.ndarray] | np.ndarray,
        sums: np.ndarray | None = None,
    ) -> IoHandle:
        """Reads whole blocks, and checks that they are those that were meant.

        Args:
          block_ids: which.
          into: one `[L, 2, block_tokens, K, H]` for each, C-contiguous, writeable: memory that is reused, such as
            blocks of the DRAM tier. After an error they hold anything.
          sums: what `layer_sums` gave of each, uint32 `[num_blocks, L]`; None: nothing is checked but that a block is
            there in full.

        Raises:
          ValueError: an id, shape, dtype or number that does not fit, or memory that cannot be written.
        """
        self._check_ids(block_ids, self.num_blocks)
        self._check_blocks("into", into, sums, len(block_ids), writeable=True)

        def read(block: int, dst: np.ndarray, wanted: np.ndarray | None) -> None:
            self._read(block, dst)
            if wanted is not None and not np.array_equal(found := layer_sums(dst), wanted):
                layer = int(np.argmax(found != wanted))
                raise BlockIoError(
                    IoFailure.CORRUPT,
                    f"layer {layer} of block {block} must have crc32c {wanted[layer]:#010x}, got {found[layer]:#010x}",
                )

        wanted = [None] * len(block_ids) if sums is None else list(sums)
        return self._reads.submit(
            [self._threaded(read, *each) for each in zip(map(int, block_ids), into, wanted, strict=True)]
        )

    def write_blocks(
        self,
        block_ids: Sequence[int],
        blocks: Sequence[np.ndarray] | np.ndarray,
        sums: np.ndarray | None = None,
    ) -> IoHandle:
        """Writes whole blocks, over whatever is there; durable, if the tier is, when the handle is done.

        After an error each of the blocks is the old one, the new one, torn, or none.

        Args:
          block_ids: which, each once.
          blocks: one `[L, 2, block_tokens, K, H]` for each, C-contiguous. They must stand still until it has settled.
          sums: uint32 `[num_blocks, L]`, which gets what `layer_sums` gives of each.

        Raises:
          ValueError: an id, shape, dtype or number that does not fit, or a tier that is `only_existing`.
        """
        if self._options.only_existing:
            raise ValueError("write_blocks must have a tier that may write, got one opened with only_existing")
        self._check_ids(block_ids, self.num_blocks)
        if len(set(block_ids)) < len(block_ids):
            raise ValueError(f"each block id must be given once, got {list(block_ids)}")
        self._check_blocks("blocks", blocks, sums, len(block_ids))
        num_bytes = len(block_ids) * self.layout.stored_block_bytes
        error = self._space.reserve(num_bytes)
        if error is not None:
            return self._writes.failed(error)

        def write(index: int, block: int, src: np.ndarray) -> None:
            if sums is not None:
                sums[index] = layer_sums(src)
            self._write(block, src)

        handle = self._writes.submit(
            [self._threaded(write, *each) for each in zip(range(len(block_ids)), block_ids, blocks, strict=True)],
            last=self._threaded(self._sync, block_ids) if self._options.durable else None,
        )
        handle.add_settled_callback(lambda _: self._space.release(num_bytes))
        return handle

    def delete_blocks(self, block_ids: Sequence[int]) -> IoHandle:
        """Removes blocks from disk, also such that are not there, or lie beyond the cap (of an earlier, larger store).

        For tools: blocks that are reused need not be deleted.

        Raises:
          ValueError: a negative id.
        """
        self._check_ids(block_ids, None)
        return self._writes.submit([self._threaded(self._delete, block) for block in block_ids])

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

    # One block each, on a thread of the tier: these block.

    @abc.abstractmethod
    def _read(self, block: int, dst: np.ndarray) -> None: ...

    @abc.abstractmethod
    def _write(self, block: int, src: np.ndarray) -> None: ...

    @abc.abstractmethod
    def _delete(self, block: int) -> None: ...

    @abc.abstractmethod
    def _sync(self, block_ids: Sequence[int]) -> None:
        """Ends a durable write of these blocks."""

    def _threaded(self, function: Callable[..., None], *args: object) -> Operation:
        return functools.partial(self._threads.submit, function, *args)

    def _check_capacity(self, count_stored_bytes: Callable[[], int]) -> None:
        self._space.check_capacity(self.num_blocks * self.layout.stored_block_bytes, count_stored_bytes)

    @staticmethod
    def _check_ids(block_ids: Sequence[int], num_blocks: int | None) -> None:
        for block in block_ids:
            if block < 0 or (num_blocks is not None and block >= num_blocks):
                wanted = "at least 0" if num_blocks is None else f"in [0, {num_blocks})"
                raise ValueError(f"a block id must be {wanted}, got {block}")

    def _check_blocks(
        self,
        name: str,
        blocks: Sequence[np.ndarray] | np.ndarray,
        sums: np.ndarray | None,
        num_blocks: int,
        *,
        writeable: bool = False,
    ) -> None:
        layout = self.layout
        if len(blocks) != num_blocks:
            raise ValueError(f"{name} must be one array for each of {num_blocks} block ids, got {len(blocks)}")
        for block in blocks:
            if block.shape != layout.block_shape or block.dtype != layout.numpy_dtype:
                raise ValueError(
                    f"{name} must be {layout.numpy_dtype}{list(layout.block_shape)}, "
                    f"got {block.dtype}{list(block.shape)}"
                )
            if not block.flags.c_contiguous or (writeable and not block.flags.writeable):
                raise ValueError(
                    f"{name} must be C-contiguous{', writeable' if writeable else ''} memory, got strides "
                    f"{block.strides}, {'writeable' if block.flags.writeable else 'read-only'}"
                )
        if sums is not None and (sums.shape != (num_blocks, layout.num_layers) or sums.dtype != np.uint32):
            raise ValueError(
                f"sums must be uint32[{num_blocks}, {layout.num_layers}], got {sums.dtype}{list(sums.shape)}"
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
            raise ValueError(f"free_floor_bytes must be at least 0, got {floor_bytes}")
        if floor_bytes and directory is None:
            raise ValueError(f"free_floor_bytes must be 0 without a local disk, got {floor_bytes} for blocks at a URL")
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
                    f"{self._directory} must have {num_bytes} bytes above a floor of {self._floor_bytes}, got "
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
    return BlockIoError(_REASONS.get(message.partition(":")[0], IoFailure.DEVICE), message)
