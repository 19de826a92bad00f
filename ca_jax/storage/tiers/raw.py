"""The SSD tier on one raw file: direct reads and writes between a block's memory and its slot, past the page cache.

    <directory>/raw/layout.json   what a block is
                   /blocks        slot 0 | slot 1 | ...       sparse until written, then reused in place

    one slot:  block `[L, 2, block_tokens, K, H]` | zeros to the next page | trailer: label, block id, L x crc32c

A block is one contiguous transfer, its layers one each; its checksums and its id come with it in the same read. A write
is not atomic: a crash leaves a torn slot, which its checksums tell. That is enough where a block is published only
after it is durable and never written while it is published.

`O_DIRECT` needs a filesystem that has it and memory and sizes in whole pages, as blocks of the DRAM tier are; anything
else goes through the page cache.

Measured on 2 CPU cores with blocks of 5.9 MB, next to `SsdTier` in the same run: written durably 4.8 to 1.4-1.8 GB/s,
read cold 2.3 to 1.6-1.9 GB/s, for 0.15 s of CPU a GB, checksums included, to 0.75 s. What lies in the page cache it
does not use: 2.3 to 3.0 GB/s there.

Not here: which blocks are whose, what is published (the catalog), memory (the caller's, reused).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import errno
import functools
import json
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import crc32c
import numpy as np

from ca_jax.storage.catalog.file import sync_directory
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.placement.blocks import BlockAllocator
from ca_jax.storage.records import BlockIoError, IoFailure
from ca_jax.storage.tiers.disk import (
    DiskSpace,
    blocks_within,
    check_block_ids,
    check_blocks,
    check_layer,
    prepare_directory,
)
from ca_jax.storage.tiers.io import IoHandle, IoQueue, Operation, close_all

_LAYER_RUN_BLOCKS = 16  # Blocks of a layer that are read in one operation.
_PAGE_BYTES = 4096
_MAGIC = b"ca_jaxKV"
_FORMAT = 1
_Buffer = memoryview | mmap.mmap | bytearray | bytes
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, which Python's os module does not name.


class RawSsdTier:
    """Blocks in one file. See `DiskTier`.

    Args:
      layout: the shape of a block.
      location: a directory, made if need be.
      capacity_bytes: cap of what is stored, checksums and rounding included.
      durable: whether a write is done only when it would survive a loss of power.
      deadline_s: seconds without progress after which a move fails; see `IoQueue`.
      free_floor_bytes: free space that stays on the disk.
      max_reads: blocks that are read at once, each by a thread of its own.
      max_writes: blocks that are written at once, likewise.
      clock: seconds, never decreasing.
      only_existing: takes what is on disk as it stands, for tools, beside an engine or after one: nothing is made, no
        room is checked. Blocks are read and deleted, never written; the capacity says which ids may be named.

    Raises:
      ValueError: a capacity under one block or beyond what the floor leaves; a store of another layout.
      NotADirectoryError: the location is a file, or in one.
      PermissionError: it cannot be written to.
      FileNotFoundError: `only_existing`, and there are no blocks.
    """

    def __init__(
        self,
        layout: KVLayout,
        location: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        durable: bool = True,
        deadline_s: float = 30.0,
        free_floor_bytes: int = 0,
        max_reads: int = 4,
        max_writes: int = 4,
        clock: Callable[[], float] = time.monotonic,
        only_existing: bool = False,
    ):
        self._layout = layout
        self._durable = durable
        self._trailer = _Trailer(layout.num_layers)
        self._data_bytes = _whole_pages(layout.block_bytes)
        self._num_blocks = blocks_within(capacity_bytes, self.stored_block_bytes, layout)
        self._reads = IoQueue(max_in_flight=max_reads, deadline_s=deadline_s, describe=_describe, clock=clock)
        self._writes = IoQueue(max_in_flight=max_writes, deadline_s=deadline_s, describe=_describe, clock=clock)
        self._only_existing = only_existing
        directory = Path(location).absolute() / "raw" if only_existing else prepare_directory(location, "raw")
        _check_layout_file(directory, layout, durable, make=not only_existing)
        self._path = directory / "blocks"
        self._space = DiskSpace(directory, free_floor_bytes)
        if only_existing:
            self._file, self._direct_file = _open_existing(self._path)
        else:
            self._space.check_capacity(self._num_blocks * self.stored_block_bytes, self._stored_bytes)
            self._file, self._direct_file = _open_file(self._path, self._num_blocks * self.stored_block_bytes)
            if durable:
                sync_directory(directory)
        self._threads = concurrent.futures.ThreadPoolExecutor(max_reads + max_writes, thread_name_prefix="ca_jax-ssd")
        self._allocator = BlockAllocator(self._num_blocks)

    @classmethod
    def open_existing(cls, layout: KVLayout, location: str | os.PathLike[str], num_blocks: int) -> RawSsdTier:
        """Opens what is on disk as it stands (`only_existing`), with ids below `num_blocks`."""
        return cls(layout, location, num_blocks * stored_block_bytes(layout), only_existing=True)

    @property
    def layout(self) -> KVLayout:
        """The shape of a block."""
        return self._layout

    @property
    def num_blocks(self) -> int:
        """How many blocks the capacity holds."""
        return self._num_blocks

    @property
    def stored_block_bytes(self) -> int:
        """What one slot takes on disk: the block in whole pages, and its trailer."""
        return stored_block_bytes(self._layout)

    @property
    def allocator(self) -> BlockAllocator:
        """Who knows which blocks are free."""
        return self._allocator

    def read_blocks(self, block_ids: Sequence[int], into: Sequence[np.ndarray] | np.ndarray) -> IoHandle:
        """See `DiskTier`."""
        check_block_ids(block_ids, self._num_blocks)
        check_blocks("into", into, len(block_ids), self._layout, writeable=True)
        return self._reads.submit(
            [
                functools.partial(self._threads.submit, self._read, block, dst)
                for block, dst in zip(block_ids, into, strict=True)
            ]
        )

    def read_layer(
        self, block_ids: Sequence[int], layer: int, dst: np.ndarray, num_tokens: int | None = None
    ) -> IoHandle:
        """See `DiskTier`."""
        check_block_ids(block_ids, self._num_blocks)
        num_tokens = check_layer(layer, dst, len(block_ids), num_tokens, self._layout)
        size = self._layout.block_tokens
        operations: list[Operation] = []
        for first in range(0, len(block_ids), _LAYER_RUN_BLOCKS):  # So many by one thread: handing over costs more.
            ids = block_ids[first : first + _LAYER_RUN_BLOCKS]
            rows = dst[:, first * size : min((first + len(ids)) * size, num_tokens)]
            operations.append(functools.partial(self._threads.submit, self._read_layer, ids, layer, rows))
        return self._reads.submit(operations)

    def write_blocks(self, block_ids: Sequence[int], blocks: Sequence[np.ndarray] | np.ndarray) -> IoHandle:
        """See `DiskTier`."""
        if self._only_existing:
            raise ValueError("write_blocks wanted a tier that may write, found one opened with only_existing")
        check_block_ids(block_ids, self._num_blocks, distinct=True)
        check_blocks("blocks", blocks, len(block_ids), self._layout)
        num_bytes = len(block_ids) * self.stored_block_bytes
        error = self._space.reserve(num_bytes)
        if error is not None:
            return self._writes.failed(error)
        handle = self._writes.submit(
            [
                functools.partial(self._threads.submit, self._write, block, src)
                for block, src in zip(block_ids, blocks, strict=True)
            ],
            last=functools.partial(self._threads.submit, os.fdatasync, self._file) if self._durable else None,
        )
        handle.add_settled_callback(lambda _: self._space.release(num_bytes))
        return handle

    def delete_blocks(self, block_ids: Sequence[int]) -> IoHandle:
        """See `DiskTier`."""
        check_block_ids(block_ids, None)
        return self._writes.submit(
            [functools.partial(self._threads.submit, self._delete, block) for block in block_ids]
        )

    def stored_block_ids(self) -> list[int]:
        """See `DiskTier`. Slots that hold any bytes, torn ones too."""
        ids: set[int] = set()
        file = os.open(self._path, os.O_RDONLY)
        try:
            end = os.fstat(file).st_size
            stop = 0
            while stop < end:
                try:
                    start = os.lseek(file, stop, os.SEEK_DATA)
                except OSError as error:
                    if error.errno == errno.ENXIO:  # A hole up to the end.
                        break
                    raise
                stop = os.lseek(file, start, os.SEEK_HOLE)
                ids.update(range(start // self.stored_block_bytes, -(-stop // self.stored_block_bytes)))
        finally:
            os.close(file)
        return sorted(ids)

    def sweep(self) -> int:
        """See `DiskTier`. Nothing is ever left behind: slots are written in place."""
        return 0

    def poll(self) -> None:
        """See `DiskTier`."""
        self._reads.poll()
        self._writes.poll()

    def close(self, timeout_s: float | None = None) -> bool:
        """See `DiskTier`. Until all has settled the file stays open."""
        settled = close_all([self._reads, self._writes], timeout_s)
        if settled and self._file >= 0:
            self._threads.shutdown()
            os.close(self._file)
            if self._direct_file is not None:
                os.close(self._direct_file)
            self._file, self._direct_file = -1, None
        return settled

    def _read(self, block: int, dst: np.ndarray) -> None:
        trailer = mmap.mmap(-1, self._trailer.num_bytes)
        padding = bytearray(self._data_bytes - self._layout.block_bytes)
        self._transfer(os.preadv, block * self.stored_block_bytes, [_as_bytes(dst), padding, trailer])
        sums = self._trailer.unpack(trailer[:], block)
        for layer, wanted in enumerate(sums):
            _check_sum(block, layer, wanted, crc32c.crc32c(_as_bytes(dst[layer])))

    def _read_layer(self, block_ids: Sequence[int], layer: int, dst: np.ndarray) -> None:
        """Reads one layer of some blocks into `dst` `[2, t, K, H]`, where the last block may be cut short."""
        size = self._layout.block_tokens
        for block, first in zip(block_ids, range(0, dst.shape[1], size), strict=True):
            start = block * self.stored_block_bytes
            trailer = bytearray(self._trailer.num_bytes)  # Through the page cache: the next layer wants it too.
            self._transfer(os.preadv, start + self._data_bytes, [trailer])
            rows = dst[:, first : first + size]
            whole = rows
            if rows.shape[1] < size:
                whole = np.empty(self._layout.block_shape[1:], self._layout.numpy_dtype)
            keys, values = _as_bytes(whole[0]), _as_bytes(whole[1])
            self._transfer(os.preadv, start + layer * self._layout.layer_block_bytes, [keys, values])
            wanted = self._trailer.unpack(bytes(trailer), block)[layer]
            _check_sum(block, layer, wanted, crc32c.crc32c(values, crc32c.crc32c(keys)))
            if whole is not rows:
                rows[...] = whole[:, : rows.shape[1]]

    def _write(self, block: int, src: np.ndarray) -> None:
        sums = [crc32c.crc32c(_as_bytes(layer)) for layer in src]
        trailer = mmap.mmap(-1, self._trailer.num_bytes)
        trailer[:] = self._trailer.pack(block, sums)
        padding = bytes(self._data_bytes - self._layout.block_bytes)
        self._transfer(os.pwritev, block * self.stored_block_bytes, [_as_bytes(src), padding, trailer])

    def _transfer(self, call: Callable[..., int], offset: int, buffers: Sequence[_Buffer]) -> None:
        """Reads or writes all of `buffers` at `offset`, past the page cache where all is in whole pages."""
        views = [np.frombuffer(buffer, np.uint8) for buffer in buffers if len(buffer)]
        direct = self._direct_file is not None and not any(
            (view.ctypes.data | view.nbytes | offset) % _PAGE_BYTES for view in views
        )
        left = sum(view.nbytes for view in views)
        while left:
            num_bytes = call(self._direct_file if direct else self._file, views, offset)
            if num_bytes <= 0:
                raise BlockIoError(IoFailure.CORRUPT, f"{self._path} wanted {left} more bytes at {offset}, found none")
            offset, left = offset + num_bytes, left - num_bytes
            while views and num_bytes >= views[0].nbytes:
                num_bytes -= views.pop(0).nbytes
            if num_bytes:
                views[0] = views[0][num_bytes:]
                direct = direct and not num_bytes % _PAGE_BYTES

    def _delete(self, block: int) -> None:
        start, length = block * self.stored_block_bytes, self.stored_block_bytes
        if start >= os.fstat(self._file).st_size:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        offsets = ctypes.c_int64(start), ctypes.c_int64(length)
        if libc.fallocate64(ctypes.c_int(self._file), ctypes.c_int(_PUNCH_HOLE), *offsets):
            raise OSError(ctypes.get_errno(), f"slot {block} cannot be given back: {os.strerror(ctypes.get_errno())}")

    def _stored_bytes(self) -> int:
        return os.stat(self._path).st_blocks * 512 if self._path.exists() else 0


@dataclasses.dataclass(frozen=True)
class _Trailer:
    """What follows a block in its slot: whose it is, and a crc32c for each layer. Little-endian, whole pages."""

    num_layers: int

    @property
    def _dtype(self) -> np.dtype:
        return np.dtype([("magic", "S8"), ("block", "<u8"), ("sums", "<u4", (self.num_layers,)), ("sum", "<u4")])

    @property
    def num_bytes(self) -> int:
        """On disk."""
        return _whole_pages(self._dtype.itemsize)

    def pack(self, block: int, sums: Sequence[int]) -> bytes:
        """The trailer of a block whose layers have these checksums."""
        fields = np.zeros((), self._dtype)
        fields["magic"], fields["block"], fields["sums"] = _MAGIC, block, sums
        fields["sum"] = crc32c.crc32c(fields.tobytes()[:-4])
        return fields.tobytes().ljust(self.num_bytes, b"\0")

    def unpack(self, page: bytes, block: int) -> list[int]:
        """Gives the layers' checksums, if it is the trailer of that block."""
        data = page[: self._dtype.itemsize]
        fields = np.frombuffer(data, self._dtype)[0]
        if not any(data):
            raise BlockIoError(IoFailure.MISSING, f"slot {block} wanted a block, found that none was written")
        if fields["magic"] != _MAGIC or fields["sum"] != crc32c.crc32c(data[:-4]):
            raise BlockIoError(IoFailure.CORRUPT, f"slot {block} wanted a trailer, found other bytes")
        if fields["block"] != block:
            raise BlockIoError(IoFailure.CORRUPT, f"slot {block} wanted block {block}, found block {fields['block']}")
        return fields["sums"].tolist()


def stored_block_bytes(layout: KVLayout) -> int:
    """What one slot takes on disk: the block in whole pages, and its trailer."""
    return _whole_pages(layout.block_bytes) + _Trailer(layout.num_layers).num_bytes


def _check_sum(block: int, layer: int, wanted: int, found: int) -> None:
    if found != wanted:
        raise BlockIoError(
            IoFailure.CORRUPT, f"layer {layer} of block {block} wanted crc32c {wanted:#010x}, found {found:#010x}"
        )


def _check_layout_file(directory: Path, layout: KVLayout, durable: bool, *, make: bool) -> None:
    """Checks what a block is against what an earlier run wrote down; writes it down if none did and `make` is set."""
    path = directory / "layout.json"
    wanted = {"format": _FORMAT, **dataclasses.asdict(layout)}
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if not make:
            return
        temporary = path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(wanted, file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
        return
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} wanted JSON, found {error}") from error
    if found != wanted:
        raise ValueError(f"SSD store at {directory} holds another layout: wanted {wanted}, found {found}")


def _open_file(path: Path, num_bytes: int) -> tuple[int, int | None]:
    """Opens the file through the page cache and, where the filesystem has it, past it; grown to its size, sparse."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if os.fstat(file).st_size < num_bytes:
        os.ftruncate(file, num_bytes)
    return file, _open_direct(path, os.O_RDWR)


def _open_existing(path: Path) -> tuple[int, int | None]:
    """Opens the file likewise, as it is; to read only, where it may not be written to."""
    access = os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY
    return os.open(path, access | os.O_CLOEXEC), _open_direct(path, access)


def _open_direct(path: Path, access: int) -> int | None:
    if hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):  # Not on this filesystem: the page cache serves.
            return os.open(path, access | os.O_DIRECT | os.O_CLOEXEC)
    return None


def _as_bytes(array: np.ndarray) -> memoryview:
    """The array's memory, without a copy."""
    return array.reshape(-1, copy=False).view(np.uint8).data


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _describe(exception: BaseException) -> BlockIoError:
    if isinstance(exception, BlockIoError):
        return exception
    full = isinstance(exception, OSError) and exception.errno in (errno.ENOSPC, errno.EDQUOT)
    return BlockIoError(IoFailure.NO_SPACE if full else IoFailure.DEVICE, f"{type(exception).__name__}: {exception}")
