"""The SSD tier on one raw file: direct reads and writes between a block's memory and its slot, past the page cache.

    <directory>/raw/layout.json   what a block is
                   /blocks        slot 0 | slot 1 | ...       sparse until written, then reused in place

    one slot:  block `[L, 2, block_tokens, K, H]` | zeros to the next page | trailer: label, block id, L x crc32c

A block is one contiguous transfer; its checksums and its id come with it in the same read. A write
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

import contextlib
import ctypes
import dataclasses
import errno
import functools
import json
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import crc32c
import numpy as np

from ca_jax.storage.catalog.file import sync_directory
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.records import BlockIoError, IoFailure
from ca_jax.storage.tiers.disk import (
    DEFAULT_OPTIONS,
    Buffer,
    DiskOptions,
    DiskSpace,
    DiskTier,
    as_bytes,
    check_sums,
    layer_sums,
    prepare_directory,
    transfer,
    whole_pages,
)
from ca_jax.storage.tiers.io import Operation, OperationFuture

_MAGIC = b"ca_jaxKV"
_FORMAT = 1
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, which Python's os module does not name.


class RawSsdTier(DiskTier):
    """Blocks in one file. See `DiskTier`.

    Args:
      layout: the shape of a block.
      location: a directory, made if need be.
      capacity_bytes: cap of what is stored, checksums and rounding included.
      options: how it is opened.
      max_reads: as for `DiskTier`.
      max_writes: likewise.

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
        options: DiskOptions = DEFAULT_OPTIONS,
        *,
        max_reads: int = 4,
        max_writes: int = 4,
    ):
        super().__init__(layout, capacity_bytes, stored_block_bytes(layout), options, max_reads, max_writes)
        self._trailer = _Trailer(layout.num_layers)
        self._padding_bytes = whole_pages(layout.block_bytes) - layout.block_bytes
        makes = not options.only_existing
        directory = prepare_directory(location, "raw") if makes else Path(location).absolute() / "raw"
        _check_layout_file(directory, layout, options.durable, make=makes)
        self._path = directory / "blocks"
        self._space = DiskSpace(directory, options.free_floor_bytes)
        if makes:
            self._space.check_capacity(self._num_blocks * self.stored_block_bytes, self._stored_bytes)
            self._file, self._direct_file = _open_file(self._path, self._num_blocks * self.stored_block_bytes)
            if options.durable:
                sync_directory(directory)
        else:
            self._file, self._direct_file = _open_existing(self._path)

    @classmethod
    def open_existing(cls, layout: KVLayout, location: str | os.PathLike[str], num_blocks: int) -> RawSsdTier:
        """Opens what is on disk as it stands (`only_existing`), with ids below `num_blocks`."""
        return cls(layout, location, num_blocks * stored_block_bytes(layout), DiskOptions(only_existing=True))

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

    def close(self, timeout_s: float | None = None) -> bool:
        """See `DiskTier`. Until all has settled the file stays open."""
        settled = super().close(timeout_s)
        if settled and self._file >= 0:
            os.close(self._file)
            if self._direct_file is not None:
                os.close(self._direct_file)
            self._file, self._direct_file = -1, None
        return settled

    def _read(self, block: int, dst: np.ndarray) -> OperationFuture:
        return self._threads.submit(self._read_slot, block, dst)

    def _read_slot(self, block: int, dst: np.ndarray) -> None:
        trailer = mmap.mmap(-1, self._trailer.num_bytes)
        slot: list[Buffer] = [as_bytes(dst), bytearray(self._padding_bytes), trailer]
        transfer(os.preadv, self._file, slot, block * self.stored_block_bytes, self._direct_file)
        check_sums(f"block {block}", dst, self._trailer.unpack(trailer[:], block))

    def _write(self, block: int, src: np.ndarray) -> OperationFuture:
        return self._threads.submit(self._write_slot, block, src)

    def _write_slot(self, block: int, src: np.ndarray) -> None:
        trailer = mmap.mmap(-1, self._trailer.num_bytes)
        trailer[:] = self._trailer.pack(block, layer_sums(src))
        slot: list[Buffer] = [as_bytes(src), bytes(self._padding_bytes), trailer]
        transfer(os.pwritev, self._file, slot, block * self.stored_block_bytes, self._direct_file)

    def _syncing(self, block_ids: Sequence[int]) -> Operation | None:
        return functools.partial(self._threads.submit, os.fdatasync, self._file)

    def _delete(self, block: int) -> OperationFuture:
        return self._threads.submit(self._punch_slot, block)

    def _punch_slot(self, block: int) -> None:
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
        return whole_pages(self._dtype.itemsize)

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
            raise BlockIoError(IoFailure.MISSING, f"slot {block} must be a block, got that none was written")
        if fields["magic"] != _MAGIC or fields["sum"] != crc32c.crc32c(data[:-4]):
            raise BlockIoError(IoFailure.CORRUPT, f"slot {block} must be a trailer, got other bytes")
        if fields["block"] != block:
            raise BlockIoError(IoFailure.CORRUPT, f"slot {block} must be block {block}, got block {fields['block']}")
        return fields["sums"].tolist()


def stored_block_bytes(layout: KVLayout) -> int:
    """What one slot takes on disk: the block in whole pages, and its trailer."""
    return whole_pages(layout.block_bytes) + _Trailer(layout.num_layers).num_bytes


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
        raise ValueError(f"{path} must be JSON, got {error}") from error
    if found != wanted:
        raise ValueError(f"SSD store at {directory} holds another layout: there must be {wanted}, got {found}")


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
