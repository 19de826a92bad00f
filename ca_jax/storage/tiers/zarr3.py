"""The SSD tier: blocks in zarr3 files by TensorStore, on a local disk or whatever a TensorStore URL names.

    <directory>/zarr3/000000/zarr.json          layout of a group of 1,024 blocks
                            /c.17.0.0.0.0.0     block 17: L inner chunks, each with a crc32c, and their index
                     /000001/...

One block is one file (a zarr3 shard), written at once, fsynced and renamed into place, so that a file is never seen
half-written; a layer of it is one inner chunk. Blocks are replaced in place: the cap gives the number of files. A
group is a zarr3 array of its own, because zarr3 names files by all six indices of a chunk: split over one directory
each they would be six levels deep, and undivided 1.7 million in one directory at 10 TB of 6 MB blocks. So there are at
most 1,025 entries in each of 1,660 directories, which open in 0.08 s.

On a local disk whole blocks are read and written by `ShardFiles`, past TensorStore's copies: 4.5-6 GB/s from the page
cache instead of 2.3-2.9, for 0.3-0.4 s of CPU a GB instead of 0.65-0.8, of which crc32c is 0.065; reading them with
`os.preadv` costs 0.17 s (2 CPU cores).

A missing file or chunk is an error, never zeros; so are flipped bits and short files. A file that is intact but another
one is for `tiers.seal` to find.

Reads and writes one zarr3 shard of KV without a copy, as TensorStore does: layers in order, each with its crc32c.

    layer 0 | crc32c | layer 1 | crc32c | … | index: offset and size of each layer, little-endian uint64 | crc32c

One `preadv` scatters a file over a block's layers and the checksums between them, one `pwritev` gathers it. TensorStore
moves the bytes through memory of its own, and pays page faults for it: figures in `ssd`. A file that is laid out
otherwise is valid too, and is left to TensorStore.

Not here: which blocks are whose, what is published (the catalog), memory (the caller's, reused).
"""

from __future__ import annotations

import functools
import json
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import crc32c
import numpy as np
import tensorstore as ts

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

GROUP_BLOCKS = 1024
"""Files in one directory."""
_BLOCK_KEY = re.compile(r"(\d{6,})/c\.(\d+)(?:\.0)+$")
_TEMPORARY = ".__lock"  # As TensorStore's own.
_LEFTOVER_KEY = re.compile(r"(?:\d{6,})/.*\.__lock$")
_CRC_BYTES = 4
_MAX_BUFFERS = 1024  # Of one `preadv`; blocks of more layers than that are left to TensorStore.


class SsdTier(DiskTier):
    """Blocks in files. See `DiskTier`.

    Args:
      layout: the shape of a block.
      location: a directory, made if need be, or a TensorStore URL: `file://`, `memory://`, `s3://`, `gs://`.
      capacity_bytes: cap of what is stored, checksums and rounding of files included.
      options: how it is opened.
      max_reads: as for `DiskTier`.
      max_writes: likewise. With 2 / 4 / 8: 1.1 / 1.4 / 1.8 GB/s, durable.
      context: TensorStore's resources; by default its own, without a cache.

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
        options: DiskOptions = DEFAULT_OPTIONS,
        *,
        max_reads: int = 4,
        max_writes: int = 8,
        context: ts.Context | None = None,
    ):
        super().__init__(layout, capacity_bytes, stored_block_bytes(layout), options, max_reads, max_writes)
        self._shards = ShardFiles(layout)
        makes = not options.only_existing
        url, self._directory = _resolve(location, make=makes)
        self._space = DiskSpace(self._directory, options.free_floor_bytes)
        self._context = context or ts.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_sync": options.durable})
        self._kvstore = ts.KvStore.open(url, context=self._context).result()
        if self._directory is not None and makes:
            self._space.check_capacity(
                self._num_blocks * self.stored_block_bytes,
                lambda: len(self.stored_block_ids()) * self.stored_block_bytes,
            )
        self._groups = self._open_groups()
        if self._directory is not None and options.durable and makes:
            sync_directory(self._directory)

    @classmethod
    def open_existing(cls, layout: KVLayout, location: str | os.PathLike[str], num_blocks: int) -> SsdTier:
        """Opens what is on disk as it stands (`only_existing`), with ids below `num_blocks`."""
        return cls(layout, location, num_blocks * stored_block_bytes(layout), DiskOptions(only_existing=True))

    @property
    def kvstore(self) -> ts.KvStore:
        """Where the files are."""
        return self._kvstore

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

    def _block(self, block: int) -> ts.TensorStore:
        return self._groups[block // GROUP_BLOCKS][block % GROUP_BLOCKS]

    def _read(self, block: int, dst: np.ndarray) -> OperationFuture:
        if self._directory is None:
            return self._read_by_tensorstore(block, dst)
        return self._threads.submit(self._read_file, self._directory, block, dst)

    def _read_file(self, directory: Path, block: int, dst: np.ndarray) -> None:
        if not self._shards.read(directory / _block_key(block), dst):
            self._read_by_tensorstore(block, dst).result()

    def _read_by_tensorstore(self, block: int, dst: np.ndarray) -> ts.Future:
        """Begins to decode a file straight into memory: `read` would give fresh memory, which is slow."""
        copy = ts.array(dst).write(self._block(block)).commit
        copy.force()
        return copy

    def _write(self, block: int, src: np.ndarray) -> OperationFuture:
        if self._directory is None or not self._shards.usable:
            return self._write_by_tensorstore(block, src)
        return self._threads.submit(self._write_file, self._directory, block, src)

    def _delete(self, block: int) -> OperationFuture:
        return self._kvstore.write(_block_key(block), None)

    def _write_file(self, directory: Path, block: int, src: np.ndarray) -> None:
        path = directory / _block_key(block)
        try:
            self._shards.write(path, src, path.with_name(path.name + _TEMPORARY), durable=self._options.durable)
        except FileNotFoundError:  # The group's directory is gone: TensorStore makes it anew.
            self._write_by_tensorstore(block, src).result()
            if self._options.durable:
                sync_directory(directory)

    def _write_by_tensorstore(self, block: int, src: np.ndarray) -> ts.Future:
        # The reference ends with the move: the caller keeps `src` as it is until it has settled.
        write = self._block(block).write(src, can_reference_source_data_indefinitely=True).commit
        write.force()
        return write

    def _syncing(self, block_ids: Sequence[int]) -> Operation | None:
        if self._directory is None:
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
            ts.open(
                self._spec(group, metadata), open=True, create=not self._options.only_existing, context=self._context
            )
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
            if not text and self._options.only_existing:  # What an engine would make: blocks may be there nevertheless.
                spec = self._spec(group, metadata)
                return ts.open(spec, open=True, assume_metadata=True, context=self._context).result()
            try:
                found = json.loads(text)
            except ValueError:
                raise ValueError(f"{self._kvstore.url}{path} must be zarr3 metadata, got {error}") from error
            if not isinstance(found, dict):
                found = {}
            for name, wanted in metadata.items():
                if found.get(name) != wanted:
                    raise ValueError(
                        f"SSD store at {self._kvstore.url} holds another layout: there must be {name} {wanted}, "
                        f"got {found.get(name)}"
                    ) from error
            raise


def stored_block_bytes(layout: KVLayout) -> int:
    """What a file of one block takes on disk: layers, their checksums and the index, in whole pages."""
    return whole_pages(layout.block_bytes + layout.num_layers * (_CRC_BYTES + 16) + _CRC_BYTES)


def _block_key(block: int) -> str:
    return f"{_group_path(block // GROUP_BLOCKS)}c.{block % GROUP_BLOCKS}" + 5 * ".0"


def _group_path(group: int) -> str:
    return f"{group:06d}/"


def _resolve(location: str | os.PathLike[str], *, make: bool) -> tuple[str, Path | None]:
    """The URL of a store's root, and its directory if it is local."""
    text = os.fspath(location)
    scheme = urlsplit(text).scheme if "://" in text else ""
    if not text:
        raise ValueError("SSD location must be a directory or a TensorStore URL, got none")
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
            raise BlockIoError(IoFailure.MISSING, f"there must be a block in {path.name}, got no file") from error
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise BlockIoError(IoFailure.CORRUPT, f"there must be a block in {path.name}, got no regular file")
            if found.st_size != self._file_bytes:
                return False
            sums = bytearray(self._layout.num_layers * _CRC_BYTES)
            index = bytearray(len(self._index))
            transfer(os.preadv, file, self._buffers(dst, sums, index))
        finally:
            os.close(file)
        if index != self._index:
            return False
        check_sums(path.name, dst, np.frombuffer(sums, "<u4").tolist())
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
        sums = np.array(layer_sums(src), "<u4").tobytes()
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            try:
                transfer(os.pwritev, file, self._buffers(src, sums, self._index))
                if durable:
                    os.fsync(file)
            finally:
                os.close(file)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _buffers(self, block: np.ndarray, sums: bytes | bytearray, index: bytes | bytearray) -> list[Buffer]:
        """What a file is made of, in order."""
        views = memoryview(sums)
        buffers: list[Buffer] = []
        for layer, data in enumerate(block):
            buffers += [as_bytes(data), views[layer * _CRC_BYTES : (layer + 1) * _CRC_BYTES]]
        return [*buffers, memoryview(index)]
