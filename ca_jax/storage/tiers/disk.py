"""What both formats of blocks on disk share: threads that move blocks, checksums, room on the disk; and how long moves
take that share a disk.

Not here: the formats themselves (formats), whose a block is, deadlines (mover).
"""

from __future__ import annotations

import abc
import concurrent.futures
import errno
import functools
import itertools
import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path

import numpy as np

from ca_jax.storage.codec import CodecError, KVCodec, Places
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.records import BlockIoError, IoFailure

Blocks = Sequence[np.ndarray] | np.ndarray
"""Memory of several blocks, of the layout's `block_shape` each."""
MAX_READS = 4
"""Blocks that are read at once, each by a thread of its own."""
MAX_WRITES = 8
"""Blocks that are written at once, by threads of their own, so that no read waits for them."""
_MAX_QUEUED = 1024  # Blocks of one move that wait for a thread.
_REASONS = {
    "NOT_FOUND": IoFailure.MISSING,
    "DATA_LOSS": IoFailure.CORRUPT,
    "OUT_OF_RANGE": IoFailure.CORRUPT,
    "RESOURCE_EXHAUSTED": IoFailure.NO_SPACE,
}


class DiskTier(abc.ABC):
    """Blocks that outlive the process.

    Moves block until nothing of them touches memory or disk any more, however they end, and raise a `BlockIoError` for
    what a disk does. Several may run at once: blocks of the one that began first go first. Only whole blocks are
    written. The tier does not know whose a block is: a write replaces what was there.

    Any thread may move blocks. L layers.

    Args:
      layout: the shape of a block.
      capacity_bytes: cap of what is stored, in whole pages.
      free_floor_bytes: free space that stays on a local disk, >= 0.
      only_existing: takes what is on disk as it stands, for tools, beside an engine or after one: makes nothing and
        checks no room. Blocks are read and deleted, never written; the capacity says which ids may be named.
      directory: where its files are, on a local disk; None at a URL.
      codec: codes blocks on their way to disk; None: they lie there as in memory.

    Raises:
      ValueError: a capacity under one block.
    """

    def __init__(
        self,
        layout: KVLayout,
        capacity_bytes: int,
        *,
        free_floor_bytes: int,
        only_existing: bool,
        directory: Path | None,
        codec: KVCodec | None = None,
    ) -> None:
        self.layout, self.codec = layout, codec
        self.stored_block_bytes = size = layout.stored_block_bytes if codec is None else codec.stored_bytes(layout)
        """What one block takes on SSD, at most: the unit of the cap."""
        if capacity_bytes < size:
            raise ValueError(
                f"SSD capacity must be at least one block of {size} bytes ({layout.block_tokens} tokens), "
                f"got {capacity_bytes} bytes"
            )
        self.num_blocks = capacity_bytes // size
        self._free_floor_bytes = free_floor_bytes
        self._only_existing = only_existing
        self._directory = directory
        # Writes under way count as if their bytes were still to come, those over other blocks too: a block is replaced
        # by a new file, and for a while there are both.
        self._reserved_bytes = 0
        self._lock = threading.Lock()
        self._coding = Places()
        self._reads, self._writes = (
            concurrent.futures.ThreadPoolExecutor(number, "ca_jax-ssd") for number in (MAX_READS, MAX_WRITES)
        )

    def read_blocks(
        self,
        block_ids: Sequence[int],
        into: Blocks,
        sums: np.ndarray | None = None,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Reads whole blocks, and checks that they are those that were meant.

        Args:
          block_ids: which.
          into: one array of the layout's `block_shape` for each, C-contiguous, writeable: memory that is reused, such
            as blocks of the DRAM tier. After an error they hold anything.
          sums: what `write_blocks` gave of each, uint32 `[num_blocks, L]`; None: only its form is checked.
          on_step: called before and after each block, by any thread; what it raises ends the move.

        Raises:
          BlockIoError: a block cannot be read, or is another one. Blocks that had not begun by then are left.
          ValueError: an id, shape, dtype or number that does not fit.
        """
        self._check_blocks(block_ids, into)

        def read(block: int, dst: np.ndarray, wanted: np.ndarray | None) -> None:
            if self.codec is not None:
                data = self._read_coded(block)
                try:
                    with self._coding.taken():
                        self.codec.decode(data, self.layout, dst, wanted)
                except CodecError as error:
                    raise BlockIoError(IoFailure.CORRUPT, f"block {block}: {error}") from error
                return
            self._read(block, dst)
            if wanted is not None and not np.array_equal(found := self.layout.layer_sums(dst), wanted):
                layer = int(np.argmax(found != wanted))
                raise BlockIoError(
                    IoFailure.CORRUPT,
                    f"layer {layer} of block {block} must have crc32c {wanted[layer]:#010x}, got {found[layer]:#010x}",
                )

        moves = zip(block_ids, into, itertools.repeat(None) if sums is None else sums, strict=False)
        _run_all(self._reads, (functools.partial(read, *move) for move in moves), on_step)

    def write_blocks(
        self,
        block_ids: Sequence[int],
        blocks: Blocks,
        sums: np.ndarray | None = None,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Writes whole blocks, over whatever is there; they are durable when this returns.

        Args:
          block_ids: which, each once.
          blocks: one array of the layout's `block_shape` for each, C-contiguous.
          sums: uint32 `[num_blocks, L]`, which gets checksums of each, of what is on disk: `KVLayout.layer_sums`, or of
            a codec those of its codes.
          on_step: as for `read_blocks`.

        Raises:
          BlockIoError: they are not written; each of the blocks is the old one, the new one, torn, or none. A codec
            refuses a block whose numbers are none.
          ValueError: an id, shape, dtype or number that does not fit, or a tier that is `only_existing`.
        """
        if self._only_existing:
            raise ValueError("write_blocks must have a tier that may write, got one opened with only_existing")
        self._check_blocks(block_ids, blocks)
        if len(set(block_ids)) < len(block_ids):
            raise ValueError(f"each block id must be given once, got {list(block_ids)}")

        def write(index: int, block: int, src: np.ndarray) -> None:
            if self.codec is not None:
                try:
                    with self._coding.taken():
                        data, found = self.codec.encode(src, self.layout)
                except CodecError as error:
                    raise BlockIoError(IoFailure.NO_SPACE, f"block {block}: {error}") from error
                if sums is not None:
                    sums[index] = found
                self._write_coded(block, data)
                return
            if sums is not None:
                sums[index] = self.layout.layer_sums(src)
            self._write(block, src)

        num_bytes = len(block_ids) * self.stored_block_bytes
        self._reserve(num_bytes)
        try:
            moves = zip(itertools.count(), block_ids, blocks, strict=False)
            _run_all(self._writes, (functools.partial(write, *move) for move in moves), on_step)
            on_step()
            self._sync(block_ids)
        except OSError as error:
            raise describe(error) from error
        finally:
            with self._lock:
                self._reserved_bytes -= num_bytes

    def delete_blocks(self, block_ids: Sequence[int]) -> None:
        """Removes blocks from disk, also such that are not there, or lie beyond the cap (of an earlier, larger store).

        For tools: blocks that are reused need not be deleted.

        Raises:
          BlockIoError: a block cannot be removed; those that had not begun by then are left.
        """
        _run_all(self._writes, (functools.partial(self._delete, block) for block in block_ids), lambda: None)

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

    def close(self) -> None:
        """Refuses new moves, and waits for those under way. May be called again."""
        for threads in (self._reads, self._writes):
            threads.shutdown()

    # One block each, on a thread of the tier: these block.

    @abc.abstractmethod
    def _read(self, block: int, dst: np.ndarray) -> None: ...

    @abc.abstractmethod
    def _write(self, block: int, src: np.ndarray) -> None: ...

    def _read_coded(self, block: int) -> bytes:
        raise NotImplementedError

    def _write_coded(self, block: int, data: bytes) -> None:
        raise NotImplementedError

    @abc.abstractmethod
    def _delete(self, block: int) -> None: ...

    @abc.abstractmethod
    def _sync(self, block_ids: Sequence[int]) -> None:
        """Ends a write of these blocks."""

    # Room on the disk.

    def _check_capacity(self, count_stored_bytes: Callable[[], int]) -> None:
        """Raises where the store may not grow to its cap. What it takes now is counted only if it matters."""
        free_bytes, capacity_bytes = self._free_bytes(), self.num_blocks * self.stored_block_bytes
        floor_bytes = self._free_floor_bytes
        if free_bytes is None or free_bytes - capacity_bytes >= floor_bytes:
            return
        stored_bytes = count_stored_bytes()
        if free_bytes + stored_bytes - capacity_bytes < floor_bytes:
            raise ValueError(
                f"SSD capacity in {self._directory} must be at most {max(free_bytes + stored_bytes - floor_bytes, 0)} "
                f"bytes ({free_bytes} free, {stored_bytes} of an earlier run, less {floor_bytes} to stay free); "
                f"got {capacity_bytes}"
            )

    def _reserve(self, num_bytes: int) -> None:
        """Takes room for a write that is about to begin.

        Raises:
          BlockIoError: there is not enough, or it cannot be told.
        """
        try:
            free_bytes = self._free_bytes()
        except OSError as error:
            found = f"free space of {self._directory} cannot be read: {error}"
            raise BlockIoError(IoFailure.DEVICE, found) from error
        floor_bytes = self._free_floor_bytes
        with self._lock:
            if free_bytes is not None and free_bytes - self._reserved_bytes - num_bytes < floor_bytes:
                raise BlockIoError(
                    IoFailure.NO_SPACE,
                    f"{self._directory} must have {num_bytes} bytes above a floor of {floor_bytes}, got "
                    f"{free_bytes} free and {self._reserved_bytes} of them spoken for",
                )
            self._reserved_bytes += num_bytes

    def _free_bytes(self) -> int | None:
        return None if self._directory is None else shutil.disk_usage(self._directory).free

    def _check_blocks(self, block_ids: Sequence[int], blocks: Blocks) -> None:
        shape, dtype = self.layout.block_shape, self.layout.numpy_dtype
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks:
                raise ValueError(f"a block id must be in [0, {self.num_blocks}), got {block_id}")
        if len(blocks) != len(block_ids):
            raise ValueError(f"there must be one array for each of {len(block_ids)} block ids, got {len(blocks)}")
        for block in blocks:
            if block.shape != shape or block.dtype != dtype or not block.flags.c_contiguous:
                raise ValueError(
                    f"a block must be C-contiguous {dtype}{list(shape)}, got {block.dtype}{list(block.shape)} of "
                    f"strides {block.strides}"
                )


def _run_all(
    threads: concurrent.futures.Executor, operations: Iterable[Callable[[], object]], on_step: Callable[[], None]
) -> None:
    """Runs operations on threads, first come first served, and returns when none is under way any more.

    Raises:
      BlockIoError: what went wrong first; what had not begun by then never does.
    """

    errors: list[Exception] = []

    def run(operation: Callable[[], object]) -> None:
        try:
            if not errors:
                on_step()
                operation()
                on_step()
        except Exception as error:
            errors.append(error)

    operations = iter(operations)
    while queued := [threads.submit(run, each) for each in itertools.islice(operations, _MAX_QUEUED)]:
        concurrent.futures.wait(queued)
        if errors:
            raise describe(errors[0]) from errors[0]


def describe(error: BaseException) -> BlockIoError:
    """Finds the reason in what an operation raised. TensorStore's is a ValueError that begins with its status."""
    if isinstance(error, BlockIoError):
        return error
    message = str(error)
    if isinstance(error, OSError):
        is_full, message = error.errno in (errno.ENOSPC, errno.EDQUOT), f"{type(error).__name__}: {message}"
    else:
        is_full = re.search(r"os_error_code='(28|122)'", message) is not None  # ENOSPC, EDQUOT
    reason = IoFailure.NO_SPACE if is_full else _REASONS.get(message.partition(":")[0], IoFailure.DEVICE)
    return BlockIoError(reason, message)


class BusyPeriods:
    """Reports each period in which moves were under way, unless one of them failed. Any thread may call.

    Of moves that run side by side each takes longer than it would alone, so the time of one says little:

        move a     |==========|
        move b          |============|            |====|
        periods    |=================|            |====|

    Args:
      on_period: given the bytes that were moved and the seconds it took, on the thread that ended the last move.
      clock: seconds.
    """

    def __init__(self, on_period: Callable[[int, float], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self._on_period = on_period
        self._clock = clock
        self._lock = threading.Lock()
        self._moving: set[Hashable] = set()
        self._began_s = 0.0
        self._num_bytes = 0.0  # NaN once a move of the period has failed.

    def begin(self, move: Hashable) -> None:
        """A move begins."""
        with self._lock:
            if not self._moving:
                self._began_s, self._num_bytes = self._clock(), 0
            self._moving.add(move)

    def end(self, move: Hashable, num_bytes: int | None) -> None:
        """A move has ended; of one that never began, or has ended before, nothing is noted.

        Args:
          move: as it began.
          num_bytes: what it moved; None: it failed, so that its period says nothing.
        """
        with self._lock:
            if move not in self._moving:
                return
            self._moving.remove(move)
            self._num_bytes += math.nan if num_bytes is None else num_bytes
            total_bytes, seconds = self._num_bytes, self._clock() - self._began_s
            if self._moving or math.isnan(total_bytes):
                return
        self._on_period(int(total_bytes), seconds)
