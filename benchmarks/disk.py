"""The plain ways to read and write what a disk tier reads and writes, and a page cache that can be emptied.

Not here: the tiers, and what is measured (`suites.store`).
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.harness import BenchError
from ca_jax.storage.catalog.file import CATALOG_NAME
from ca_jax.storage.catalog.notes import LOG_NAME

_BOOKS = (CATALOG_NAME, LOG_NAME)  # Files of a store, with what follows their names, that hold no blocks.
_PROBE_BYTES = 1 << 20
_READ_BYTES = 1 << 20
_DROPPED_SHARE = 0.05  # Of its pages a file may keep in memory and still count as dropped: some are in use.


@contextlib.contextmanager
def scratch_directory(ssd_dir: str | None) -> Iterator[Path]:
    """Makes a directory in `ssd_dir`, which is made if need be, and removes it with all that is in it.

    None is where the system keeps temporary files. BenchError: `ssd_dir` is a file, or cannot be made or written to.
    """
    parent = None if ssd_dir is None else Path(ssd_dir).expanduser()
    try:
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix="ca_jax-bench-", dir=parent)
    except (FileExistsError, NotADirectoryError) as error:
        raise BenchError(f"ssd_dir must be a directory, got the file {error.filename}") from error
    except OSError as error:
        raise BenchError(f"ssd_dir must be a directory that can be written to, got {parent}: {error}") from error
    with made as path:
        yield Path(path)


@contextlib.contextmanager
def scratch_on_disk(ssd_dir: str | None) -> Iterator[Path]:
    """As `scratch_directory`, where reads can be made to reach the disk; where files stay in memory, BenchError."""
    with scratch_directory(ssd_dir) as directory:
        if not can_drop(directory):
            raise BenchError(
                f"ssd_dir must be on a disk, whose page cache can be emptied, got {directory.parent}, where files stay "
                "in memory (tmpfs?)"
            )
        yield directory


def drop_cached(paths: Iterable[Path]) -> None:
    """Has the system forget what it keeps of files in memory; they are made durable first, since that is kept."""
    for path in paths:
        with _opened(path) as file:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def _opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    file = os.open(path, flags, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def fill_cached(paths: Iterable[Path]) -> None:
    """Has the system keep files in memory, as far as it has some to spare: reads them."""
    buffer = bytearray(_READ_BYTES)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def cached_share(path: Path) -> float:
    """The share of a file's pages that are in memory; 0 for an empty one. OSError: the system does not say."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return 0.0
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
            view = np.frombuffer(pages, np.uint8)
            resident = np.zeros(-(-view.nbytes // mmap.PAGESIZE), np.uint8)
            libc = ctypes.CDLL(None, use_errno=True)
            arguments = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(view.nbytes)
            failed = libc.mincore(*arguments, ctypes.c_void_p(resident.ctypes.data))
            del view  # The map cannot be closed while something looks at it.
            if failed:
                raise OSError(ctypes.get_errno(), f"pages in memory cannot be told: {os.strerror(ctypes.get_errno())}")
    return float((resident & 1).mean())


def can_drop(directory: Path) -> bool:
    """Whether `drop_cached` works there. It does not where files live in memory (tmpfs), nor outside of Linux."""
    if not hasattr(os, "posix_fadvise"):
        return False
    with tempfile.NamedTemporaryFile(dir=directory) as probe:
        probe.write(bytes(_PROBE_BYTES))
        probe.flush()
        try:
            drop_cached([Path(probe.name)])
            return is_dropped([Path(probe.name)])
        except (OSError, AttributeError):  # A libc without mincore.
            return False


def is_dropped(paths: Sequence[Path]) -> bool:
    """Whether next to nothing of these files is in memory. OSError: the system does not say."""
    return sum(map(cached_share, paths)) <= _DROPPED_SHARE * len(paths)


@dataclasses.dataclass(frozen=True)
class Extent:
    """Where a block's bytes begin."""

    path: Path
    offset: int
    """How far from its beginning, bytes."""


def block_files(directory: Path, block_bytes: int) -> list[Path]:
    """Finds the files of a tier, or store, that hold blocks of `block_bytes`: those that are large enough for one."""
    found = (path for path in directory.rglob("*") if not path.name.startswith(_BOOKS))
    return [path for path in found if path.is_file() and path.stat().st_size >= block_bytes]


def block_extents(directory: Path, block_bytes: int, stored_block_bytes: int, num_blocks: int) -> list[Extent]:
    """Finds the blocks of a tier: in a file each, or in slots of one file. In the order of their ids.

    A block's KV has `block_bytes` and takes `stored_block_bytes` on disk. Fewer blocks than that are a BenchError.
    """
    files = block_files(directory, block_bytes)
    files.sort(key=lambda path: (path.parent, len(path.name), path.name))
    extents = [Extent(path, offset) for path in files for offset in range(0, path.stat().st_size, stored_block_bytes)]
    if len(extents) < num_blocks:
        raise BenchError(f"{directory} must hold {num_blocks} blocks, got {len(extents)}")
    return extents[:num_blocks]


@dataclasses.dataclass(frozen=True)
class PlainDisk:
    """Reads and writes blocks as a simple program would, with system calls and threads alone."""

    num_threads: int

    def read(self, extents: Sequence[Extent], into: np.ndarray) -> None:
        """Reads blocks with `preadv`, through the page cache, into bytes `[num_blocks, block_bytes]`."""

        def read_one(i: int) -> None:
            with _opened(extents[i].path) as file:
                _transfer(os.preadv, file, into[i], extents[i].offset)

        self._run(read_one, len(extents))

    def write_files(self, directory: Path, blocks: Sequence[np.ndarray]) -> None:
        """Writes a file for each block, durably and atomically: written, fsynced, renamed; the directory at the end."""

        def write_one(i: int) -> None:
            unfinished = directory / f"{i}.unfinished"
            with _opened(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
                _transfer(os.pwritev, file, blocks[i], 0)
                os.fsync(file)
            unfinished.replace(directory / str(i))

        self._run(write_one, len(blocks))
        with _opened(directory) as file:
            os.fsync(file)

    def write_slots(self, path: Path, blocks: Sequence[np.ndarray]) -> None:
        """Writes blocks one behind the other into one file, over what is there, and syncs it once at the end."""
        with _opened(path, os.O_WRONLY | os.O_CREAT) as file:
            self._run(lambda i: _transfer(os.pwritev, file, blocks[i], i * blocks[i].nbytes), len(blocks))
            os.fdatasync(file)

    def _run(self, work: Callable[[int], None], count: int) -> None:
        if self.num_threads == 1:
            for i in range(count):
                work(i)
            return
        with concurrent.futures.ThreadPoolExecutor(self.num_threads) as threads:
            collections.deque(threads.map(work, range(count)), maxlen=0)  # Raises what a thread raised.


def _transfer(call: Callable[..., int], file: int, data: np.ndarray, offset: int) -> None:
    """Reads or writes all of `data`, bytes."""
    while data.nbytes:
        num_bytes = call(file, [data], offset)
        if num_bytes <= 0:
            raise OSError(f"the file must have {data.nbytes} more bytes at {offset}, got its end")
        data, offset = data[num_bytes:], offset + num_bytes
