"""The SSD tier: blocks in zarr3 files by TensorStore, on a local disk or whatever a TensorStore URL names.

    <directory>/zarr3/000000/zarr.json          layout of a group of 1,024 blocks
                            /c.17.0.0.0.0.0     block 17: L inner chunks, each with a crc32c, and their index
                     /000001/...

One block is one file (a zarr3 shard), written at once, fsynced and renamed into place, so that a file is never seen
half-written; one layer of a block is one inner chunk, so that a layer can be read alone. Blocks are replaced in place:
the number of files follows from the cap. A group is a zarr3 array of its own, because zarr3 names files by all six
indices of a chunk: split over one directory each they would be six levels deep, and undivided 1.7 million in one
directory at 10 TB of 6 MB blocks. So there are at most 1,025 entries in each of 1,660 directories, which open in
0.08 s.

On a local disk whole blocks are read and written by `shard_file`, past TensorStore's copies: 4.5-6 GB/s from the page
cache instead of 2.3-2.9, for 0.3-0.4 s of CPU a GB instead of 0.65-0.8, of which crc32c is 0.065; reading them with
`os.preadv` costs 0.17 s (2 CPU cores).

A missing file or chunk is an error, never zeros; so are flipped bits and short files. A file that is intact but another
one is for `ca_jax.storage.tiers.seal` to find.

Reads and writes one zarr3 shard of KV without a copy, as TensorStore does: layers in order, each with its crc32c.

    layer 0 | crc32c | layer 1 | crc32c | … | index: offset and size of each layer, little-endian uint64 | crc32c

One `preadv` scatters a file over a block's layers and the checksums between them, one `pwritev` gathers it. TensorStore
moves the bytes through memory of its own, and pays page faults for it: figures in `ssd`. A file that is laid out
otherwise is valid too, and is left to TensorStore.

Not here: which blocks are whose, what is published (the catalog), memory (the caller's, reused).
"""

from __future__ import annotations

import concurrent.futures
import errno
import functools
import json
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import crc32c
import numpy as np
import tensorstore as ts

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
from ca_jax.storage.tiers.io import IoHandle, IoQueue, Operation, OperationFuture, close_all

GROUP_BLOCKS = 1024
"""Files in one directory."""
_LAYER_RUN_BLOCKS = 16  # Blocks of a layer that are read in one operation.
_PAGE_BYTES = 4096  # What a file's size is rounded up to on disk.
_BLOCK_KEY = re.compile(r"(\d{6,})/c\.(\d+)(?:\.0)+$")
_TEMPORARY = ".__lock"  # As TensorStore's own.
_LEFTOVER_KEY = re.compile(r"(?:\d{6,})/.*\.__lock$")
_REASONS = {
    "NOT_FOUND": IoFailure.MISSING,
    "DATA_LOSS": IoFailure.CORRUPT,
    "OUT_OF_RANGE": IoFailure.CORRUPT,
    "RESOURCE_EXHAUSTED": IoFailure.NO_SPACE,
}


class SsdTier:
    """Blocks in files. See `DiskTier`.

    Args:
      layout: the shape of a block.
      location: a directory, made if need be, or a TensorStore URL: `file://`, `memory://`, `s3://`, `gs://`.
      capacity_bytes: cap of what is stored, checksums and rounding of files included.
      durable: whether a write is done only when it would survive a loss of power.
      deadline_s: seconds without progress after which a move fails; see `IoQueue`.
      free_floor_bytes: free space that stays on a local disk.
      max_reads: blocks that are read at once, each by a thread of its own on a local disk.
      max_writes: blocks that are written at once, in a queue of their own, so that no read waits for them.
        With 2 / 4 / 8: 1.1 / 1.4 / 1.8 GB/s, durable.
      context: TensorStore's resources; by default its own, without a cache.
      clock: seconds, never decreasing.
      only_existing: takes what is on disk as it stands, for tools, beside an engine or after one: nothing is made, no
        room is checked. Blocks are read and deleted, never written; the capacity says which ids may be named.

    Raises:
      ValueError: a capacity under one block or beyond what the floor leaves; a store of another layout; a bad URL.
      NotADirectoryError: the location is a file, or in one.
      PermissionError: it cannot be written to.
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
        max_writes: int = 8,
        context: ts.Context | None = None,
        clock: Callable[[], float] = time.monotonic,
        only_existing: bool = False,
    ):
        self._layout = layout
        self._num_blocks = blocks_within(capacity_bytes, self.stored_block_bytes, layout)
        self._reads = IoQueue(max_in_flight=max_reads, deadline_s=deadline_s, describe=_describe, clock=clock)
        self._writes = IoQueue(max_in_flight=max_writes, deadline_s=deadline_s, describe=_describe, clock=clock)
        self._only_existing = only_existing
        self._durable = durable
        self._shards = ShardFiles(layout)
        self._threads = concurrent.futures.ThreadPoolExecutor(max_reads + max_writes, thread_name_prefix="ca_jax-ssd")
        url, self._directory = _resolve(location, make=not only_existing)
        self._space = DiskSpace(self._directory, free_floor_bytes)
        self._context = context or ts.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_sync": durable})
        self._kvstore = ts.KvStore.open(url, context=self._context).result()
        if self._directory is not None and not only_existing:
            self._space.check_capacity(
                self._num_blocks * self.stored_block_bytes,
                lambda: len(self.stored_block_ids()) * self.stored_block_bytes,
            )
        self._groups = self._open_groups()
        if self._directory is not None and durable and not only_existing:
            sync_directory(self._directory)
        self._allocator = BlockAllocator(self._num_blocks)

    @classmethod
    def open_existing(cls, layout: KVLayout, location: str | os.PathLike[str], num_blocks: int) -> SsdTier:
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
        """What one block takes on disk: its bytes, a checksum for each layer, an index, rounded up to pages."""
        return stored_block_bytes(self._layout)

    @property
    def allocator(self) -> BlockAllocator:
        """Who knows which blocks are free."""
        return self._allocator

    @property
    def kvstore(self) -> ts.KvStore:
        """Where the files are."""
        return self._kvstore

    @functools.cached_property
    def blocks(self) -> ts.TensorStore:
        """`[num_blocks, L, 2, block_tokens, K, H]`: all groups as one array. For tools: moves have a deadline."""
        whole = self._groups[0] if len(self._groups) == 1 else ts.concat(self._groups, axis=0)
        return whole[: self._num_blocks]

    def read_blocks(self, block_ids: Sequence[int], into: Sequence[np.ndarray] | np.ndarray) -> IoHandle:
        """See `DiskTier`."""
        check_block_ids(block_ids, self._num_blocks)
        check_blocks("into", into, len(block_ids), self._layout, writeable=True)
        return self._reads.submit(
            [functools.partial(self._read, block, dst) for block, dst in zip(block_ids, into, strict=True)]
        )

    def read_layer(
        self, block_ids: Sequence[int], layer: int, dst: np.ndarray, num_tokens: int | None = None
    ) -> IoHandle:
        """See `DiskTier`."""
        check_block_ids(block_ids, self._num_blocks)
        num_tokens = check_layer(layer, dst, len(block_ids), num_tokens, self._layout)
        size = self._layout.block_tokens
        num_whole = num_tokens // size
        operations: list[Operation] = []
        for group, start, ids in _runs(block_ids[:num_whole]):
            # One operation for a stretch of blocks: dst's rows as blocks, with the block axis in front.
            rows = dst[:, start * size : (start + len(ids)) * size]
            blocks = rows.reshape(2, len(ids), size, *dst.shape[2:], copy=False).transpose(1, 0, 2, 3, 4)
            operations.append(functools.partial(_copy, self._groups[group][ids, layer], blocks))
        if num_tokens % size:
            rows = dst[:, num_whole * size : num_tokens]
            view = self._block(block_ids[num_whole])[layer, :, : num_tokens % size]
            operations.append(functools.partial(_copy, view, rows))
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
            [functools.partial(self._write, block, src) for block, src in zip(block_ids, blocks, strict=True)],
            last=self._syncing(block_ids),
        )
        handle.add_settled_callback(lambda _: self._space.release(num_bytes))
        return handle

    def delete_blocks(self, block_ids: Sequence[int]) -> IoHandle:
        """See `DiskTier`."""
        check_block_ids(block_ids, None)
        keys = [_block_key(block) for block in block_ids]
        return self._writes.submit([functools.partial(self._kvstore.write, key, None) for key in keys])

    def stored_block_ids(self) -> list[int]:
        """See `DiskTier`."""
        matches = filter(None, map(_BLOCK_KEY.fullmatch, self._keys()))
        return sorted(int(match[1]) * GROUP_BLOCKS + int(match[2]) for match in matches)

    def sweep(self) -> int:
        """See `DiskTier`."""
        leftovers = [key for key in self._keys() if _LEFTOVER_KEY.fullmatch(key)]
        for key in leftovers:
            if self._directory is not None:  # TensorStore refuses keys that look like its own temporary files.
                (self._directory / key).unlink(missing_ok=True)
        return len(leftovers)

    def poll(self) -> None:
        """See `DiskTier`."""
        self._reads.poll()
        self._writes.poll()

    def close(self, timeout_s: float | None = None) -> bool:
        """See `DiskTier`."""
        settled = close_all([self._reads, self._writes], timeout_s)
        self._threads.shutdown(wait=settled)
        return settled

    def _block(self, block: int) -> ts.TensorStore:
        return self._groups[block // GROUP_BLOCKS][block % GROUP_BLOCKS]

    def _read(self, block: int, dst: np.ndarray) -> OperationFuture:
        if self._directory is None:
            return _copy(self._block(block), dst)
        return self._threads.submit(self._read_file, self._directory, block, dst)

    def _read_file(self, directory: Path, block: int, dst: np.ndarray) -> None:
        if not self._shards.read(directory / _block_key(block), dst):
            _copy(self._block(block), dst).result()

    def _write(self, block: int, src: np.ndarray) -> OperationFuture:
        if self._directory is None or not self._shards.usable:
            return self._write_by_tensorstore(block, src)
        return self._threads.submit(self._write_file, self._directory, block, src)

    def _write_file(self, directory: Path, block: int, src: np.ndarray) -> None:
        path = directory / _block_key(block)
        try:
            self._shards.write(path, src, path.with_name(path.name + _TEMPORARY), durable=self._durable)
        except FileNotFoundError:  # The group's directory is gone: TensorStore makes it anew.
            self._write_by_tensorstore(block, src).result()
            if self._durable:
                sync_directory(directory)

    def _write_by_tensorstore(self, block: int, src: np.ndarray) -> ts.Future:
        # The reference ends with the move: the caller keeps `src` as it is until it has settled.
        write = self._block(block).write(src, can_reference_source_data_indefinitely=True).commit
        write.force()
        return write

    def _syncing(self, block_ids: Sequence[int]) -> Operation | None:
        """The operation that ends a durable write."""
        if self._directory is None or not self._durable:
            return None
        groups = {block // GROUP_BLOCKS for block in block_ids}
        return functools.partial(self._threads.submit, self._sync_names, self._directory, groups)

    def _sync_names(self, directory: Path, groups: set[int]) -> None:
        """Makes the names of written blocks durable."""
        for group in groups:
            sync_directory(directory / _group_path(group))

    def _keys(self) -> Iterator[str]:
        """Every file of every group, relative to the root. Blocks."""
        if self._directory is None:
            yield from (key.decode() for key in self._kvstore.list().result())
            return
        for group in os.scandir(self._directory):  # TensorStore's list leaves out what it takes for temporary files.
            if group.is_dir(follow_symlinks=False):
                yield from (f"{group.name}/{name}" for name in os.listdir(group))

    def _open_groups(self) -> list[ts.TensorStore]:
        """Opens all groups at once, and makes those that are not there yet."""
        metadata = _metadata(self._layout)
        opening = [
            ts.open(self._spec(group, metadata), open=True, create=not self._only_existing, context=self._context)
            for group in range(-(-self._num_blocks // GROUP_BLOCKS))
        ]
        return [self._opened(group, future, metadata) for group, future in enumerate(opening)]

    def _spec(self, group: int, metadata: dict[str, Any]) -> dict[str, Any]:
        return {
            "driver": "zarr3",
            "kvstore": (self._kvstore / _group_path(group)).spec().to_json(),
            "metadata": metadata,
            "recheck_cached_metadata": False,
            # There is no cache, but what a read has just used lives on for a moment: never take that for fresh.
            "recheck_cached_data": True,
            "fill_missing_data_reads": False,
            "store_data_equal_to_fill_value": True,
        }

    def _opened(self, group: int, future: ts.Future, metadata: dict[str, Any]) -> ts.TensorStore:
        try:
            return future.result()
        except ValueError as error:
            path = f"{_group_path(group)}zarr.json"
            text = self._kvstore.read(path).result().value
            if not text and self._only_existing:  # What an engine would make: blocks may be there nevertheless.
                spec = self._spec(group, metadata)
                return ts.open(spec, open=True, assume_metadata=True, context=self._context).result()
            try:
                found = json.loads(text)
            except ValueError:
                raise ValueError(f"{self._kvstore.url}{path} wanted zarr3 metadata, found {error}") from error
            if not isinstance(found, dict):
                found = {}
            for name, wanted in metadata.items():
                if found.get(name) != wanted:
                    raise ValueError(
                        f"SSD store at {self._kvstore.url} holds another layout: wanted {name} {wanted}, "
                        f"found {found.get(name)}"
                    ) from error
            raise


def stored_block_bytes(layout: KVLayout) -> int:
    """What a file of one block takes on disk: layers, their checksums and the index, in whole pages."""
    file_bytes = layout.block_bytes + layout.num_layers * (4 + 16) + 4
    return -(-file_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _copy(view: ts.TensorStore, dst: np.ndarray) -> ts.Future:
    """Begins to decode a view of the files straight into memory: `read` would give fresh memory, which is slow."""
    copy = ts.array(dst).write(view).commit
    copy.force()
    return copy


def _block_key(block: int) -> str:
    return f"{_group_path(block // GROUP_BLOCKS)}c.{block % GROUP_BLOCKS}" + 5 * ".0"


def _group_path(group: int) -> str:
    return f"{group:06d}/"


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int, list[int]]]:
    """Splits a sequence of blocks into stretches of one group each: `(group, position of the first, ids within)`."""
    start = 0
    while start < len(block_ids):
        group = block_ids[start] // GROUP_BLOCKS
        stop = start
        while stop < min(len(block_ids), start + _LAYER_RUN_BLOCKS) and block_ids[stop] // GROUP_BLOCKS == group:
            stop += 1
        yield group, start, [block % GROUP_BLOCKS for block in block_ids[start:stop]]
        start = stop


def _resolve(location: str | os.PathLike[str], *, make: bool) -> tuple[str, Path | None]:
    """The URL of a store's root, and its directory if it is local."""
    text = os.fspath(location)
    scheme = urlsplit(text).scheme if "://" in text else ""
    if not text:
        raise ValueError("SSD location wanted a directory or a TensorStore URL, found none")
    if scheme not in ("", "file"):
        return text + ("zarr3/" if text.endswith("/") else "/zarr3/"), None
    parent = unquote(urlsplit(text).path) if scheme else text
    directory = prepare_directory(parent, "zarr3") if make else Path(parent).absolute() / "zarr3"
    return f"{directory.as_uri()}/", directory


def _metadata(layout: KVLayout) -> dict[str, Any]:
    """The zarr3 metadata of one group: a block is a shard, a layer of it an inner chunk."""
    to_bytes = {"name": "bytes", "configuration": {"endian": "little"}}
    checked = [to_bytes, {"name": "crc32c"}]
    num_layers, *layer_shape = layout.block_shape
    sharding = {
        "chunk_shape": [1, 1, *layer_shape],
        "codecs": checked,
        "index_codecs": checked,
        "index_location": "end",
    }
    return {
        "shape": [GROUP_BLOCKS, num_layers, *layer_shape],
        "data_type": layout.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, num_layers, *layer_shape]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "fill_value": 0,
    }


def _describe(exception: BaseException) -> BlockIoError:
    """Finds the reason in what TensorStore raises: a ValueError whose message begins with its status."""
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
