"""Where an SSD tier may write, and how much: its directory, the cap, and the floor of free space on the disk.

Not here: what is written.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from ca_jax.storage.block_io import BlockIoError, IoFailure
from ca_jax.storage.directories import make_directory


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
        raise NotADirectoryError(f"SSD directory wanted a directory, found a file: {error.filename}") from error
    except OSError as error:
        raise PermissionError(f"SSD directory wanted {directory} to be writable, found: {error}") from error
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
            raise ValueError(f"wanted a floor of free disk space >= 0 bytes, found {floor_bytes}")
        if floor_bytes and directory is None:
            raise ValueError(f"a floor of free space wants a local disk, found {floor_bytes} bytes for a remote URL")
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
                f"SSD capacity in {self._directory} wanted at most "
                f"{max(free_bytes + stored_bytes - self._floor_bytes, 0)} bytes ({free_bytes} free, {stored_bytes} of "
                f"an earlier run, less {self._floor_bytes} to stay free); found {capacity_bytes}"
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
                    f"wanted {num_bytes} bytes above a floor of {self._floor_bytes} in {self._directory}, found "
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
