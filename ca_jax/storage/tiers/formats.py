"""The two formats of blocks on disk: zarr3 arrays, on a local disk or at a TensorStore URL, and one raw file of slots.

    <directory>/zarr3/000000/zarr.json          what a group of 1,024 blocks is
                            /c.17.0.0.0.0.0     block 17: its bytes and nothing else
                     /000001/...
    <directory>/raw/layout.json                 what a block is
                   /blocks                      slot 0 | slot 1 | ...       sparse until written, then reused in place

In both a block is one contiguous transfer between its file and its memory. That it holds what it should the catalog
knows: it keeps the checksums.

**zarr3** is TensorStore's: `tensorstore.open` reads a group as an array. A block is one file, written, synced and
renamed into place, so that no reader meets half of it. A group is an array of its own, because zarr3 names files by
all six indices of a chunk: split over one directory each they would be six levels deep, and undivided 1.7 million in
one directory at 10 TB of 6 MB blocks. So there are at most 1,025 entries in each of 1,660 directories, which open in
0.08 s. On a local disk system calls move blocks between file and memory: TensorStore has memory of its own in between.

**raw** goes past the page cache where the filesystem has `O_DIRECT` and memory is in whole pages, as blocks of the DRAM
tier are. A write is not atomic: a crash leaves a torn slot. That is enough where a block is published only after it is
durable and never written while it is published. Figures of both are in `results/`.

With a codec a block is a zarr3 chunk of bytes that zstd packed, which TensorStore reads too: what they mean the codec
knows (storage.codec).

Not here: which blocks are whose, what is published (the catalog), memory (the caller's, reused).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import json
import os
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import tensorstore as ts

from ca_jax.storage.catalog.file import make_directory, sync_directory, write_file
from ca_jax.storage.codec import KVCodec
from ca_jax.storage.layout import PAGE_BYTES, KVLayout, as_bytes
from ca_jax.storage.records import BlockIoError, IoFailure
from ca_jax.storage.tiers.disk import DiskTier

GROUP_BLOCKS = 1024
"""Files in one directory."""
_BLOCK_KEY = re.compile(r"(\d{6,})/c\.(\d+)(?:\.0)+$")
_TEMPORARY = ".__lock"  # As TensorStore's own.
_LEFTOVER_KEY = re.compile(r"(?:\d{6,})/.*\.__lock$")
_RAW_FORMAT = 2
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, which Python's os module does not name.


class Zarr3Tier(DiskTier):
    """Blocks in files. See `DiskTier`, whose arguments these are beside:

    Args:
      location: a directory, made if need be, or a TensorStore URL: `file://`, `memory://`, `s3://`, `gs://`.
      codec: codes blocks; None: they lie there as in memory.
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
        *,
        free_floor_bytes: int = 0,
        only_existing: bool = False,
        codec: KVCodec | None = None,
        context: ts.Context | None = None,
    ):
        makes = not only_existing
        url, directory = _resolve(location, make=makes)
        super().__init__(
            layout,
            capacity_bytes,
            free_floor_bytes=free_floor_bytes,
            only_existing=only_existing,
            directory=directory,
            codec=codec,
        )
        self._metadata = _metadata(layout, codec)
        self._context = context or ts.Context({"cache_pool": {"total_bytes_limit": 0}})
        self.kvstore = ts.KvStore.open(url, context=self._context).result()
        """Where the files are."""
        if makes:
            self._check_capacity(lambda: len(self.stored_block_ids()) * self.stored_block_bytes)
        opening = [  # All groups at once, made where they are not there yet.
            ts.open(self._spec(group), open=True, create=makes, context=self._context)
            for group in range(-(-self.num_blocks // GROUP_BLOCKS))
        ]
        self._groups = [self._opened(group, future) for group, future in enumerate(opening)]
        if directory is not None and makes:
            sync_directory(directory)

    def stored_block_ids(self) -> list[int]:
        """See `DiskTier`."""
        matches = filter(None, map(_BLOCK_KEY.fullmatch, self._keys()))
        return sorted(int(match[1]) * GROUP_BLOCKS + int(match[2]) for match in matches)

    def sweep(self) -> int:
        """See `DiskTier`."""
        if self._directory is None:  # TensorStore neither lists nor takes keys that look like its own temporary files.
            return 0
        leftovers = [key for key in self._keys() if _LEFTOVER_KEY.fullmatch(key)]
        for key in leftovers:
            (self._directory / key).unlink(missing_ok=True)
        return len(leftovers)

    def _read(self, block: int, dst: np.ndarray) -> None:
        if self._directory is None:  # Straight into memory: `read` would give fresh memory, which is slow.
            ts.array(dst).write(self._groups[block // GROUP_BLOCKS][block % GROUP_BLOCKS]).result()
            return
        with self._opened_file(block) as file:
            path, found = Path(file.name), os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size != dst.nbytes:
                raise BlockIoError(
                    IoFailure.CORRUPT, f"{path.name} must be a file of {dst.nbytes} bytes, got {found.st_size}"
                )
            _transfer(os.preadv, file.fileno(), dst)

    def _read_coded(self, block: int) -> bytes:
        if self._directory is None:
            found = self.kvstore.read(self._key(block)).result()
            if found.state != "value":
                raise BlockIoError(IoFailure.MISSING, f"{self._key(block)} must hold block {block}, got nothing")
            return found.value
        with self._opened_file(block) as file:
            return file.read()

    def _opened_file(self, block: int) -> io.FileIO:
        assert self._directory is not None  # noqa: S101
        path = self._directory / self._key(block)
        try:
            return path.open("rb", buffering=0)
        except FileNotFoundError as error:
            raise BlockIoError(IoFailure.MISSING, f"{path.name} must hold block {block}, got no file") from error

    def _write(self, block: int, src: np.ndarray) -> None:
        stored = self._groups[block // GROUP_BLOCKS][block % GROUP_BLOCKS]
        # The reference ends with this call.
        self._put(block, src, lambda: stored.write(src, can_reference_source_data_indefinitely=True).result())

    def _write_coded(self, block: int, data: bytes) -> None:
        self._put(block, np.frombuffer(data, np.uint8), lambda: self.kvstore.write(self._key(block), data).result())

    def _put(self, block: int, src: np.ndarray, by_tensorstore: Callable[[], object]) -> None:
        """Writes a block's file, by TensorStore where there is no directory of its own."""
        if self._directory is None:
            by_tensorstore()
            return
        path = self._directory / self._key(block)
        temporary = path.with_name(path.name + _TEMPORARY)
        try:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # The group's directory is gone: TensorStore makes it anew.
            by_tensorstore()
            sync_directory(self._directory)
            return
        try:
            with os.fdopen(file, "wb", 0):
                _transfer(os.pwritev, file, src)
                os.fsync(file)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _delete(self, block: int) -> None:
        self.kvstore.write(self._key(block), None).result()

    def _sync(self, block_ids: Sequence[int]) -> None:
        if self._directory is not None:
            for group in {block // GROUP_BLOCKS for block in block_ids}:
                sync_directory(self._directory / _group_path(group))

    def _key(self, block: int) -> str:
        """Of a block's file, relative to the root."""
        num_axes = len(self._metadata["shape"]) - 1
        return f"{_group_path(block // GROUP_BLOCKS)}c.{block % GROUP_BLOCKS}" + num_axes * ".0"

    def _keys(self) -> Iterator[str]:
        """Every file of every group, relative to the root. Blocks."""
        if self._directory is None:
            yield from (key.decode() for key in self.kvstore.list().result())
            return
        for group in os.scandir(self._directory):
            if group.is_dir(follow_symlinks=False):
                yield from (f"{group.name}/{name}" for name in os.listdir(group))

    def _spec(self, group: int) -> dict[str, Any]:
        return {
            "driver": "zarr3",
            "kvstore": (self.kvstore / _group_path(group)).spec().to_json(),
            "metadata": self._metadata,
            "recheck_cached_metadata": False,
            # There is no cache, but what a read has just used lives on for a moment: never take that for fresh.
            "recheck_cached_data": True,
            "fill_missing_data_reads": False,
            "store_data_equal_to_fill_value": True,
        }

    def _opened(self, group: int, future: ts.Future) -> ts.TensorStore:
        try:
            return future.result()
        except ValueError as error:
            path = f"{_group_path(group)}zarr.json"
            text = self.kvstore.read(path).result().value
            if not text and self._only_existing:  # What an engine would make: blocks may be there nevertheless.
                return ts.open(self._spec(group), open=True, assume_metadata=True, context=self._context).result()
            wanted = f"{self.kvstore.url}{path} must be of {self._metadata}"
            raise ValueError(f"{wanted}, got another layout: {text!r}") from error


class RawTier(DiskTier):
    """Blocks in one file, in a directory that is made if need be. Otherwise as `Zarr3Tier`.

    Raises:
      FileNotFoundError: `only_existing`, and there are no blocks.
      ValueError: a codec, whose blocks differ in size.
    """

    def __init__(
        self,
        layout: KVLayout,
        location: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        free_floor_bytes: int = 0,
        only_existing: bool = False,
        codec: KVCodec | None = None,
    ):
        if codec is not None:
            raise ValueError("the SSD driver must be zarr3 with a codec, got raw")
        makes = not only_existing
        directory = _prepare_directory(location, "raw") if makes else Path(location).absolute() / "raw"
        super().__init__(
            layout, capacity_bytes, free_floor_bytes=free_floor_bytes, only_existing=only_existing, directory=directory
        )
        _check_layout_file(directory, layout, make=makes)
        path = directory / "blocks"
        access = os.O_RDWR
        if makes:
            self._check_capacity(lambda: path.stat().st_blocks * 512 if path.exists() else 0)
            access |= os.O_CREAT
        elif not os.access(path, os.W_OK):
            access = os.O_RDONLY
        self._files = contextlib.ExitStack()
        self._file = os.open(path, access | os.O_CLOEXEC, 0o600)
        self._files.callback(os.close, self._file)
        self._direct_file: int | None = None
        with contextlib.suppress(OSError, AttributeError):  # Not on this filesystem or system: the page cache serves.
            self._direct_file = os.open(path, access | os.O_DIRECT | os.O_CLOEXEC)
            self._files.callback(os.close, self._direct_file)
        if makes:
            num_bytes = self.num_blocks * self.stored_block_bytes
            os.ftruncate(self._file, max(num_bytes, os.fstat(self._file).st_size))
            sync_directory(directory)

    def stored_block_ids(self) -> list[int]:
        """See `DiskTier`. Slots that hold any bytes, torn ones too."""
        ids: set[int] = set()
        slot_bytes, stop = self.stored_block_bytes, 0
        while (start := self._next_data(stop)) is not None:
            stop = os.lseek(self._file, start, os.SEEK_HOLE)
            ids.update(range(start // slot_bytes, -(-stop // slot_bytes)))
        return sorted(ids)

    def close(self) -> None:
        """See `DiskTier`."""
        super().close()
        self._files.close()

    def _read(self, block: int, dst: np.ndarray) -> None:
        start = block * self.stored_block_bytes
        data = self._next_data(start)
        if data is None or data >= start + self.stored_block_bytes:
            raise BlockIoError(IoFailure.MISSING, f"slot {block} must hold a block, got none written")
        _transfer(os.preadv, self._file, dst, start, self._direct_file)

    def _write(self, block: int, src: np.ndarray) -> None:
        _transfer(os.pwritev, self._file, src, block * self.stored_block_bytes, self._direct_file)

    def _sync(self, block_ids: Sequence[int]) -> None:
        os.fdatasync(self._file)

    def _delete(self, block: int) -> None:
        start, length = block * self.stored_block_bytes, self.stored_block_bytes
        if start >= os.fstat(self._file).st_size:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        offsets = ctypes.c_int64(start), ctypes.c_int64(length)
        if libc.fallocate64(ctypes.c_int(self._file), ctypes.c_int(_PUNCH_HOLE), *offsets):
            raise OSError(ctypes.get_errno(), f"slot {block} cannot be given back: {os.strerror(ctypes.get_errno())}")

    def _next_data(self, start: int) -> int | None:
        """Where bytes were written from `start` on; None: nowhere. Transfers name their place, and move none."""
        try:
            return os.lseek(self._file, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # A hole up to the end.
                return None
            raise


FORMATS: dict[str, type[Zarr3Tier] | type[RawTier]] = {"zarr3": Zarr3Tier, "raw": RawTier}
"""By name, as `StoreConfig.ssd_driver` has it."""


def _transfer(
    call: Callable[..., int], file: int, block: np.ndarray, offset: int = 0, direct_file: int | None = None
) -> None:
    """Reads or writes a whole block at `offset`, by `os.preadv` or `os.pwritev`.

    `direct_file` is the same file past the page cache, used where all is in whole pages; None: there is none.

    Raises:
      BlockIoError: the file ends before.
      OSError: the disk reports an error.
    """
    view, address = as_bytes(block), block.ctypes.data
    while view.nbytes:
        is_direct = direct_file is not None and not (address | view.nbytes | offset) % PAGE_BYTES
        num_bytes = call(direct_file if is_direct else file, [view], offset)
        if num_bytes <= 0:
            raise BlockIoError(IoFailure.CORRUPT, f"the file must have {view.nbytes} more bytes, got its end")
        view, address, offset = view[num_bytes:], address + num_bytes, offset + num_bytes


def _prepare_directory(parent: str | os.PathLike[str], name: str) -> Path:
    """Makes `parent/name`, for this user alone (0700). A parent that exists is left as it is."""
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


def _group_path(group: int) -> str:
    return f"{group:06d}/"


def _resolve(location: str | os.PathLike[str], *, make: bool) -> tuple[str, Path | None]:
    """The URL of a store's root, and its directory if it is local."""
    text = os.fspath(location)
    scheme = urlsplit(text).scheme if "://" in text else ""
    if scheme not in ("", "file"):
        return text + ("zarr3/" if text.endswith("/") else "/zarr3/"), None
    parent = unquote(urlsplit(text).path) if scheme else text
    directory = _prepare_directory(parent, "zarr3") if make else Path(parent).absolute() / "zarr3"
    return f"{directory.as_uri()}/", directory


def _metadata(layout: KVLayout, codec: KVCodec | None) -> dict[str, Any]:
    """The zarr3 metadata of one group: each block is a chunk, as its bytes are in memory, or as zstd packs them."""
    shape, dtype = list(layout.block_shape), layout.dtype
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": sys.byteorder}}]
    if codec is not None:
        shape, dtype = [codec.payload_bytes(layout)], "uint8"
        codecs = [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 1}}]
    return {
        "shape": [GROUP_BLOCKS, *shape],
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, *shape]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": codecs,
        "fill_value": 0,
    }


def _check_layout_file(directory: Path, layout: KVLayout, *, make: bool) -> None:
    """Checks what a block is against what an earlier run wrote down; writes it down if none did and `make` is set."""
    path, wanted = directory / "layout.json", json.dumps({"format": _RAW_FORMAT, **layout.to_dict()})
    if not path.exists():
        if make:
            write_file(path, wanted)
    elif (found := path.read_text(encoding="utf-8", errors="replace")) != wanted:
        raise ValueError(f"{path} must be of {wanted}, got another layout: {found!r}")
