"""What both formats of blocks on disk share: queues of moves, checksums, room on the disk.

Not here: the formats themselves (formats), whose a block is.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from ca_jax.storage.layout import KVLayout, layer_sums
from ca_jax.storage.records import BlockIoError, IoFailure
from ca_jax.storage.tiers.io import IoHandle, IoQueue

Blocks = Sequence[np.ndarray] | np.ndarray
"""Memory of several blocks, `[L, 2, block_tokens, K, H]` each."""
MAX_READS = 4
"""Blocks that are read at once, each by a thread of its own."""
MAX_WRITES = 8
"""Blocks that are written at once, in a queue of their own, so that no read waits for them."""


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

    Any thread may move blocks. L layers, K KV heads, H head dim.

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
        self.stored_block_bytes = size = layout.stored_block_bytes
        """What one block takes on SSD: the unit of the cap."""
        if capacity_bytes < size:
            raise ValueError(
                f"SSD capacity must be at least one block of {size} bytes ({layout.block_tokens} tokens), "
                f"got {capacity_bytes} bytes"
            )
        if options.free_floor_bytes < 0:
            raise ValueError(f"free_floor_bytes must be at least 0, got {options.free_floor_bytes}")
        if options.free_floor_bytes and directory is None:
            raise ValueError(
                f"free_floor_bytes must be 0 without a local disk, got {options.free_floor_bytes} for blocks at a URL"
            )
        self.num_blocks = capacity_bytes // size
        self.deadline_s = options.deadline_s
        self._options = options
        self._directory = directory
        # Writes under way count as if their bytes were still to come, those over other blocks too: a block is replaced
        # by a new file, and for a while there are both.
        self._reserved_bytes = 0
        self._lock = threading.Lock()
        self._reads, self._writes = (
            IoQueue(max_in_flight=number, deadline_s=options.deadline_s, clock=options.clock)
            for number in (MAX_READS, MAX_WRITES)
        )

    def read_blocks(self, block_ids: Sequence[int], into: Blocks, sums: np.ndarray | None = None) -> IoHandle:
        """Reads whole blocks, and checks that they are those that were meant.

        Args:
          block_ids: which.
          into: one `[L, 2, block_tokens, K, H]` for each, C-contiguous, writeable: memory that is reused, such as
            blocks of the DRAM tier. After an error they hold anything.
          sums: what `layer_sums` gave of each, uint32 `[num_blocks, L]`; None: only its length is checked.

        Raises:
          ValueError: an id, shape, dtype or number that does not fit, or memory that cannot be written.
        """
        self._check_blocks("into", block_ids, into, sums, writeable=True)

        def read(block: int, dst: np.ndarray, wanted: np.ndarray | None) -> None:
            self._read(block, dst)
            if wanted is not None and not np.array_equal(found := layer_sums(dst), wanted):
                layer = int(np.argmax(found != wanted))
                raise BlockIoError(
                    IoFailure.CORRUPT,
                    f"layer {layer} of block {block} must have crc32c {wanted[layer]:#010x}, got {found[layer]:#010x}",
                )

        moves = zip(block_ids, into, [None] * len(block_ids) if sums is None else sums, strict=True)
        return self._reads.submit([functools.partial(read, *move) for move in moves])

    def write_blocks(self, block_ids: Sequence[int], blocks: Blocks, sums: np.ndarray | None = None) -> IoHandle:
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
        self._check_blocks("blocks", block_ids, blocks, sums)
        if len(set(block_ids)) < len(block_ids):
            raise ValueError(f"each block id must be given once, got {list(block_ids)}")
        num_bytes = len(block_ids) * self.stored_block_bytes
        error = self._reserve(num_bytes)
        if error is not None:
            return self._writes.failed(error)

        def write(index: int, block: int, src: np.ndarray) -> None:
            if sums is not None:
                sums[index] = layer_sums(src)
            self._write(block, src)

        handle = self._writes.submit(
            [functools.partial(write, *each) for each in zip(range(len(block_ids)), block_ids, blocks, strict=True)],
            last=functools.partial(self._sync, block_ids) if self._options.durable else None,
        )
        handle.add_settled_callback(lambda _: self._release(num_bytes))
        return handle

    def delete_blocks(self, block_ids: Sequence[int]) -> IoHandle:
        """Removes blocks from disk, also such that are not there, or lie beyond the cap (of an earlier, larger store).

        For tools: blocks that are reused need not be deleted.

        Raises:
          ValueError: a negative id.
        """
        if block_ids and min(block_ids) < 0:
            raise ValueError(f"a block id must be at least 0, got {min(block_ids)}")
        return self._writes.submit([functools.partial(self._delete, block) for block in block_ids])

    @abc.abstractmethod
    def stored_block_ids(self) -> list[int]:
        """Which blocks have bytes on disk, ascending, also beyond the cap. Blocks, for seconds at a million blocks."""

    def stored_but(self, tables: Iterable[np.ndarray]) -> list[int]:
        """Those of `stored_block_ids` that are in none of these block tables, int64 `[n]` each."""
        held = np.concatenate([np.zeros(0, np.int64), *tables])
        unheld: list[int] = np.setdiff1d(np.array(self.stored_block_ids(), np.int64), held).tolist()
        return unheld

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
        give_up_s = None if timeout_s is None else time.monotonic() + timeout_s
        queues = self._reads, self._writes
        for each in queues:
            each.close()
        return all(each.wait_empty(None if give_up_s is None else give_up_s - time.monotonic()) for each in queues)

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

    # Room on the disk.

    def _check_capacity(self, count_stored_bytes: Callable[[], int]) -> None:
        """Raises where the store may not grow to its cap. What it takes now is counted only if it matters."""
        free_bytes, capacity_bytes = self._free_bytes(), self.num_blocks * self.stored_block_bytes
        floor_bytes = self._options.free_floor_bytes
        if free_bytes is None or free_bytes - capacity_bytes >= floor_bytes:
            return
        stored_bytes = count_stored_bytes()
        if free_bytes + stored_bytes - capacity_bytes < floor_bytes:
            raise ValueError(
                f"SSD capacity in {self._directory} must be at most {max(free_bytes + stored_bytes - floor_bytes, 0)} "
                f"bytes ({free_bytes} free, {stored_bytes} of an earlier run, less {floor_bytes} to stay free); "
                f"got {capacity_bytes}"
            )

    def _reserve(self, num_bytes: int) -> BlockIoError | None:
        """Takes room for a write that is about to begin, all or nothing; why not, where there is none."""
        try:
            free_bytes = self._free_bytes()
        except OSError as error:
            return BlockIoError(IoFailure.DEVICE, f"free space of {self._directory} cannot be read: {error}")
        floor_bytes = self._options.free_floor_bytes
        with self._lock:
            if free_bytes is not None and free_bytes - self._reserved_bytes - num_bytes < floor_bytes:
                return BlockIoError(
                    IoFailure.NO_SPACE,
                    f"{self._directory} must have {num_bytes} bytes above a floor of {floor_bytes}, got "
                    f"{free_bytes} free and {self._reserved_bytes} of them spoken for",
                )
            self._reserved_bytes += num_bytes
        return None

    def _release(self, num_bytes: int) -> None:
        with self._lock:
            self._reserved_bytes -= num_bytes

    def _free_bytes(self) -> int | None:
        return None if self._directory is None else shutil.disk_usage(self._directory).free

    def _check_blocks(
        self, name: str, block_ids: Sequence[int], blocks: Blocks, sums: np.ndarray | None, *, writeable: bool = False
    ) -> None:
        layout, num_blocks = self.layout, len(block_ids)
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks:
                raise ValueError(f"a block id must be in [0, {self.num_blocks}), got {block_id}")
        if len(blocks) != num_blocks:
            raise ValueError(f"{name} must be one array for each of {num_blocks} block ids, got {len(blocks)}")
        for block in blocks:
            if block.shape != layout.block_shape or block.dtype != layout.numpy_dtype:
                wanted = f"{layout.numpy_dtype}{list(layout.block_shape)}"
                raise ValueError(f"{name} must be {wanted}, got {block.dtype}{list(block.shape)}")
            if not block.flags.c_contiguous or (writeable and not block.flags.writeable):
                raise ValueError(
                    f"{name} must be C-contiguous{', writeable' if writeable else ''} memory, got strides "
                    f"{block.strides}, {'writeable' if block.flags.writeable else 'read-only'}"
                )
        if sums is not None and (sums.shape != (num_blocks, layout.num_layers) or sums.dtype != np.uint32):
            raise ValueError(
                f"sums must be uint32[{num_blocks}, {layout.num_layers}], got {sums.dtype}{list(sums.shape)}"
            )
