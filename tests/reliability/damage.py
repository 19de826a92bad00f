"""Ways to break what a store has on disk, and the operations it does there.

Damage to blocks takes an arena and names of its conversations, which are idle; it gives the conversations that cannot
be read any more. What an operation does is changed for the length of a `with` block.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

from ca_jax.storage.catalog.file import CATALOG_NAME
from tests.reliability import workload
from tests.reliability.arena import Arena
from tests.storage.store_helpers import mount, replaced, stalled, unmount


def flip_bits(arena: Arena, names: Sequence[str]) -> set[str]:
    """One bit in one block of each conversation."""
    for table in arena.block_tables(names).values():
        path, start, num_bytes = _place(arena, int(arena.random.choice(table)))
        offset = start + int(arena.random.integers(num_bytes))
        with path.open("r+b") as file:
            byte = os.pread(file.fileno(), 1, offset)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << int(arena.random.integers(8))]), offset)
    return set(names)


def truncate(arena: Arena, names: Sequence[str]) -> set[str]:
    """A block of each conversation is cut short. The one file of raw blocks is cut once, for all that lies behind."""
    tables = arena.block_tables(names)
    if arena.driver == "zarr3":
        for table in tables.values():
            path, _, num_bytes = _place(arena, int(arena.random.choice(table)))
            os.truncate(path, int(arena.random.integers(num_bytes)))
        return set(names)
    path, start, num_bytes = _place(arena, max(max(table) for table in tables.values()))
    end = start + int(arena.random.integers(num_bytes))
    os.truncate(path, end)
    size = arena.tier.stored_block_bytes
    return {name for name, table in arena.block_tables(arena.names).items() if (max(table) + 1) * size > end}


def remove(arena: Arena, names: Sequence[str]) -> set[str]:
    """A block of each conversation is gone: its file, or the bytes of its slot."""
    for table in arena.block_tables(names).values():
        block = int(arena.random.choice(table))
        if arena.driver == "zarr3":
            _place(arena, block)[0].unlink()
        else:
            arena.tier._delete(block)
    return set(names)


def swap(arena: Arena, names: Sequence[str]) -> set[str]:
    """Two conversations at a time have a block exchanged, both intact."""
    tables = list(arena.block_tables(names).values())
    for pair in zip(tables[::2], tables[1::2], strict=True):
        places = [_place(arena, int(arena.random.choice(table))) for table in pair]
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(path.open("r+b")).fileno() for path, _, _ in places]
            size = arena.tier.stored_block_bytes if arena.driver == "raw" else os.fstat(files[0]).st_size
            data = [os.pread(file, size, start) for file, (_, start, _) in zip(files, places, strict=True)]
            assert data[0] != data[1]
            for file, (_, start, _), other in zip(files, places, reversed(data), strict=True):
                os.pwrite(file, other, start)
    return set(names)


def delete_catalog(arena: Arena) -> None:
    """The catalog's files are gone, whoever has them open."""
    for path in arena.directory.glob(f"{CATALOG_NAME}*"):
        path.unlink()


def overwrite_catalog(arena: Arena) -> None:
    """Random bytes stand in a few random places of the catalog and of its log, of which the one or the other counts."""
    if arena.random.random() < 0.7:  # What is in the log goes to the file, so that damage to the file counts.
        with contextlib.closing(sqlite3.connect(arena.directory / CATALOG_NAME)) as db:
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")
    for ending in ("", "-wal"):
        path = arena.directory / f"{CATALOG_NAME}{ending}"
        size = path.stat().st_size if path.exists() else 0
        if not size:
            continue
        with path.open("r+b") as file:
            for _ in range(4):
                offset = int(arena.random.integers(size))
                os.pwrite(file.fileno(), arena.random.bytes(min(600, size - offset)), offset)


def catalog_held(arena: Arena, *, reads: bool) -> contextlib.AbstractContextManager[object]:
    """Reads or else commits of the catalog begin and do not end, until the block does."""
    mover = workload.ssd_of(arena.engine)._mover
    if reads:
        return stalled((mover._reader, "load"), (mover._asked_reader, "contents"))
    return stalled(*((mover._catalog, name) for name in ("publish", "forget", "cut", "touch_used")))


def failing(arena: Arena, operation: str, code: int) -> contextlib.AbstractContextManager[None]:
    """Reads or writes of blocks raise what the system would."""

    def fail(*_: object) -> object:
        raise OSError(code, os.strerror(code))

    return replaced(arena.tier, operation, fail)


@contextlib.contextmanager
def read_only(arena: Arena) -> Iterator[None]:
    """Nothing can be written where blocks are.

    By a mount or by modes where that hinders this process; a file that is open already stays writable then, so that a
    write of the raw driver just raises.
    """
    directory = arena.block_directory
    with contextlib.ExitStack() as stack:
        if arena.driver == "raw" or (os.geteuid() == 0 and not mount("--bind", directory, directory)):
            stack.enter_context(failing(arena, "_write", errno.EROFS))
        elif os.geteuid() == 0:
            stack.callback(unmount, directory)
            assert mount("-o", "remount,ro,bind", directory), "what was mounted can be made read-only"
        else:
            for group in filter(Path.is_dir, directory.iterdir()):
                group.chmod(0o500)
                stack.callback(group.chmod, 0o700)
        yield


@contextlib.contextmanager
def full_disk(arena: Arena, disk: Path | None, *, unnoticed: bool) -> Iterator[None]:
    """There is no room on an arena's disk: it is filled, or, where it is not one of its own, said to be full.

    Args:
      arena: whose.
      disk: that of `small_disk`.
      unnoticed: whether free space is not looked at, so that writes meet the full disk.
    """
    space = arena.tier
    if disk is None:
        with failing(arena, "_write", errno.ENOSPC) if unnoticed else replaced(space, "_free_bytes", lambda: 0):
            yield
        return
    ballast = disk / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        with replaced(space, "_free_bytes", lambda: None) if unnoticed else contextlib.nullcontext():
            yield
    finally:
        ballast.unlink()


def _place(arena: Arena, block: int) -> tuple[Path, int, int]:
    """Where a block is: a file, its first byte there, and how many bytes mean something."""
    if arena.driver == "zarr3":
        path = arena.block_directory / f"{block // 1024:06d}" / f"c.{block % 1024}.0.0.0.0.0"
        return path, 0, path.stat().st_size
    start = block * arena.tier.stored_block_bytes
    return arena.block_directory / "blocks", start, arena.tier.layout.block_bytes
